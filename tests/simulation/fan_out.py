"""An engine's end towards its workers: the real :class:`~shmring.ring.workers.Workers`, in a loop that the simulation turns.

Nothing of it is written again here: what is made up is its connections (records, bells, a pidfd that fires when the simulation
says so), and the thread that makes long copies. A *call* is a task of the engine that sends a message to workers, and may wait
in the loop: for its turn, for memory, for room, for replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shmring.core.compiled import WORKER_PAGE_NBYTES, JoinedWorker, LinkReader, Mapping
from shmring.core.geometry import BLOCK_NBYTES
from shmring.errors import (
    CapacityError,
    LocalProtocolError,
    RemoteProtocolError,
    WorkerFailedError,
    WorkerLostError,
    WorkersBehindError,
    WouldBlock,
)
from shmring.ring.workers import Workers, _Worker
from tests.simulation.around import CopyingThreads
from tests.simulation.fan_out_truth import Call, FanOutTruth
from tests.simulation.payloads import content_nbytes, payload_of
from tests.simulation.scenario import Action, Kind, Sending, require
from tests.simulation.wire import Link, Wire, map_beside, map_slab

if TYPE_CHECKING:
    from shmring.core.compiled import EngineEnd, Packed
    from shmring.memory.slab import Slab
    from shmring.ring.life import RingLife
    from tests.simulation.engine import Engine, Handling
    from tests.simulation.worker import WorkerProcess

_TIMEOUT_S = 1.0  # of calls that have one; when it is over, the simulation says
_MOST_CALLS = 3  # of one engine at a time


class WorkerLink(Link):
    """The engine's end of a connection to a worker, as the shell has it."""

    is_awaited = False  # the engine waits for room here
    bell: socket.socket

    def lacks_room(self) -> bool:
        """Whether there is no room; then the worker rings when it has read."""
        self.is_awaited = not self.can_write
        return self.is_awaited

    def queue(self, record: bytes) -> None:
        super().queue(record)
        self.arrived.append(record)

    def send(self, message: Any) -> None:
        self.published()  # what the end has written comes before
        super().send(message)

    def close(self) -> None:
        self.published()
        self._wire.close_engine()
        self.bell.close()

    abort = close

    def read_last_words(self) -> None:
        """What a worker had sent before its end is heard."""
        while self._wire.to_engine:
            self.worker.hear()

    def start(self, worker: EngineWorker, bell: socket.socket) -> None:
        """Its owner is there."""
        self.worker, self.bell = worker, bell
        self.arrived: list[bytes] = []  # that nobody has looked at yet


class _Watch:
    """The pidfd of a worker."""

    is_open = True

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def has_died(self) -> bool:
        return not self._process.alive

    def close(self) -> None:
        self.is_open = False


class EngineWorker(_Worker):
    """A worker that has joined, as the engine has it."""

    def __init__(self, fan_out: FanOut, process: WorkerProcess, rank: int) -> None:
        JoinedWorker.__init__(self, fan_out.end)
        self._workers = self.fan_out = fan_out
        self.rank, self.name, self.pid = rank, "", process.pid
        self.process = process
        self.pidfd = _Watch(process)
        self.watch = cast(Any, self.pidfd)
        self.page = map_slab(WORKER_PAGE_NBYTES)
        self.parts, self.parts_nbytes = [], 0
        self.wire: Wire = Wire(fan_out.engine.scenario.max_queue, WorkerLink)
        self.towards: WorkerLink = cast(WorkerLink, self.wire.towards_frontend)
        self.link = cast(Any, self.towards)
        pair: tuple[socket.socket, socket.socket] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours: socket.socket = pair[0]
        self.theirs: socket.socket = pair[1]
        ours.setblocking(False)
        self.towards.start(self, ours)
        self.attach(fan_out.book.join(rank, self.page, self.link.writer), LinkReader(bytearray(1 << 13), -1))

    def hear(self) -> None:
        """Reads one record of the worker."""
        record = self.wire.towards_engine.take()
        try:
            self.handle_record(record)
        except RemoteProtocolError as error:
            require(False, f"an honest worker is accused: {error}")

    @property
    def is_rung(self) -> bool:
        """Whether a bell of its worker was not heard yet."""
        try:
            return bool(self.towards.bell.recv(1, socket.MSG_PEEK))
        except OSError:  # there is none, or the socket is closed
            return False

    def close(self) -> None:
        """Its process has gone, and its engine knows, or has gone as well."""
        self.towards.bell.close()
        self.theirs.close()


class FanOut(Workers):
    """See the head of this file.

    Attributes:
        engine: whose workers they are.
        connections: of workers, until their death was heard of.
        calls: that have not returned.
        truth: what was sent to whom, and what the model says.
        readable: the memory of slab and broadcasts, as workers map it.
    """

    def __init__(self, engine: Engine, life: RingLife, end: EngineEnd, slab: Slab, copier: CopyingThreads) -> None:
        scenario = engine.scenario
        super().__init__(life, end, slab, cast(Any, copier))
        self.engine = engine
        self.truth = FanOutTruth(self, scenario.workers + 2)
        self._memory, self.readable = map_beside(engine.slab_fd, engine.slab.nbytes, scenario.broadcast_blocks * BLOCK_NBYTES)
        self.end.reserve(self._memory)
        copier.aside = self._copies
        self.connections: list[EngineWorker] = []
        self.calls: list[Call] = []
        self.next_call = 1

    def _copies(self, packed: Packed, memory: Mapping, address: int) -> bool:
        """A call copies to the memory of broadcasts: at once, and its task goes on in a later turn of the loop."""
        if memory is not self._memory:
            return False
        packed.copy_into(address)
        start = (address - memory.address) // BLOCK_NBYTES
        self.truth.took_memory(asyncio.current_task(), start, packed.slot_nbytes)
        return True

    @property
    def workers(self) -> dict[Any, EngineWorker]:
        """Those that are not gone, by their records."""
        return cast(dict[Any, EngineWorker], self._workers)

    # -- workers come and go -------------------------------------------------------------------------------------------------

    def join(self, process: WorkerProcess, rank: int) -> EngineWorker:
        """A worker has come."""
        self._settle()
        worker = EngineWorker(self, process, rank)
        self.workers[worker.record] = worker
        self.connections.append(worker)
        self.truth.joined(worker)
        return worker

    def sees_end(self, index: int) -> None:
        """A worker's connection has ended; what came before is heard."""
        worker = self.connections[index]
        worker.towards.read_last_words()
        worker.connection_lost()
        worker.towards.close()

    def bury(self, index: int) -> None:
        """A worker's process is dead, as the kernel says."""
        worker = self.connections.pop(index)
        if worker.pidfd.is_open:
            self._died(worker)
        self.truth.died(worker)
        worker.close()

    def hear_bell(self, index: int) -> None:
        """A worker has rung."""
        worker = self.connections[index]
        worker.towards.bell.recv(4096)
        worker.rang()

    def close(self, reason: str = "") -> None:
        """The engine's process has ended."""
        for worker in self.connections:
            worker.wire.close_engine()
            worker.close()
        self.connections.clear()
        for call in self.calls:
            if not call.begun:
                call.awaitable.close()
        self.calls.clear()
        self.workers.clear()

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def send(self, blocks: int, how: int, mask: int) -> None:
        """A task sends a message of its own.

        Args:
            blocks: that it copies; 0: nothing.
            how: a :class:`~tests.simulation.scenario.Sending`.
            mask: of ranks; 0: all.
        """
        call = self._new_call(mask, how == Sending.GATHER)
        call.blocks = blocks
        arrays = [np.zeros(content_nbytes(blocks), np.uint8)] if blocks else []
        payload = payload_of(arrays, call.number, self.engine.midst.code)
        timeout = _TIMEOUT_S if how == Sending.IN_TIME else None
        if how == Sending.NOW:
            self._send_now(lambda: self.broadcast_nowait(payload, call.to))
        elif how == Sending.GATHER:
            self._begin(call, self.gather(payload, call.to, timeout))
        else:
            self._begin(call, self.broadcast(payload, call.to, timeout))

    def share_claim(self, handling: Handling, how: int) -> None:
        """A handler sends the payload of its claim."""
        call = self._new_call(0, False)
        claim = handling.claim
        call.claim = claim
        call.slots = tuple((claim.client_id, slot.generation) for slot in handling.slots)
        contents = (self.engine.content_of(*slot) for slot in call.slots)
        call.contents = frozenset(content for content in contents if content is not None)
        beside = payload_of([], call.number, self.engine.midst.code)
        if how == Sending.NOW:
            self._send_now(lambda: self.share_nowait(claim, beside, None), claim)
        else:
            self._begin(call, self.share(claim, beside, None, _TIMEOUT_S if how == Sending.IN_TIME else None))

    def _new_call(self, mask: int, gathers: bool) -> Call:
        number, self.next_call = self.next_call, self.next_call + 1
        to = tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1) or None
        call = self.truth.by_number[number] = Call(number, to, gathers, outer=asyncio.current_task())
        return call

    def _send_now(self, send: Any, claim: Any = None) -> None:
        try:
            with contextlib.suppress(WouldBlock):
                send()
        except LocalProtocolError as error:
            require(claim is not None and claim.released, f"a message that can be sent is refused: {error}")
        except WorkerLostError as error:
            require(not set(error.ranks) & set(self.book.ranks), "a worker that is there is said to be none")

    def _begin(self, call: Call, awaitable: Any) -> None:
        call.awaitable, call.task = awaitable, asyncio.Task(awaitable, loop=self.loop)
        self.calls.append(call)

    def cancel(self, index: int) -> None:
        """The task of a call is cancelled."""
        self.calls[index].is_cancelled = True
        self.calls[index].task.cancel()

    def _check_result(self, call: Call) -> None:
        if call.task.cancelled():
            require(call.is_cancelled, "a call was cancelled by nobody")
            return
        error = call.task.exception()
        if error is None:
            self.truth.check_result(call, call.task.result())
        elif isinstance(error, WorkerLostError):
            require(not set(error.ranks) & set(self.book.ranks) or call.gathers, "a worker that is there is said to be none")
        elif isinstance(error, LocalProtocolError):
            require(call.claim is not None and call.claim.released, f"a message that can be sent is refused: {error}")
        elif isinstance(error, CapacityError):
            require(bool(call.slots), "a message that fits does not fit")  # of a claim that was left before the task ran
        elif not isinstance(error, WorkerFailedError | WorkersBehindError):
            raise error

    # -- what follows --------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Looks at what the engine has written and freed since the last time."""
        for worker in self.connections:
            worker.towards.published()
        self.truth.follow()
        returned = [call for call in self.calls if call.task.done()]
        for call in returned:
            self.calls.remove(call)
            self.truth.returned(call)
        self.truth.look()
        for call in returned:
            self._check_result(call)
            call.task = call.awaitable = call.claim = None  # an error would keep what its caller had

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self) -> Iterator[Action]:
        """Yields what can happen at the engine's end."""
        scenario = self.engine.scenario
        for position, worker in enumerate(self.connections):
            if worker.wire.to_engine:
                yield Action(Kind.FROM_WORKER, position)
            if worker.wire.engine_open and not worker.wire.frontend_open:
                yield Action(Kind.ENGINE_SEES_WORKERS_END, position)
            if worker.is_rung:
                yield Action(Kind.WORKERS_BELL, position)
            if not worker.process.alive:
                yield Action(Kind.WORKER_IS_DEAD, position)
            elif worker.record.is_member:
                yield Action(Kind.DROP_WORKER, position)
        for position, call in enumerate(self.calls):
            if not call.is_cancelled:
                yield Action(Kind.CANCEL_CALL, position)
        if len(self.calls) < _MOST_CALLS and (scenario.max_calls is None or self.next_call <= scenario.max_calls):
            yield from self._enabled_calls()

    def _some_ranks(self) -> tuple[int, ...]:
        """To which messages go alone: where a worker may stop, to each."""
        ranks, scenario = self.book.ranks, self.engine.scenario
        if len(ranks) < 2 or (scenario.max_calls is not None and not scenario.stops):
            return ()
        return ranks if scenario.stops else ranks[:1]

    def _enabled_calls(self) -> Iterator[Action]:
        for blocks in self.engine.scenario.broadcast_blocks_wanted:
            for how in self.engine.scenario.sendings:
                yield Action(Kind.BROADCAST, blocks, how)
                for rank in self._some_ranks():
                    yield Action(Kind.BROADCAST, blocks, how, 1 << rank)
        for index, handling in enumerate(self.engine.claims):
            if not handling.claim.released:
                for how in self.engine.scenario.sendings:
                    if how != Sending.GATHER:
                        yield Action(Kind.SHARE, index, how)
