"""In place of vLLM's ``MessageQueue`` between an engine core and its workers: a fan-out ring, and a ring back from each worker.

Theory of operation: vLLM's executor makes a queue and hands its *handle* to the workers that it starts. Each makes its end of
it from the handle, and a queue of its own, whose handle goes back. Then both sides call ``wait_until_ready`` of both queues, in
the same order. Here a queue is a ring that its writer serves and its readers join as workers (of shmring). What the engine core
sends goes through the ring that its API servers are connected to, so that tensors that they have put there stay where they are.

What a worker is to compute with may be viewed in place, for as long as vLLM keeps it. Everything else is copied out, since vLLM
may write to it. Views keep memory of the ring, and a step that waits for memory would wait for ever if only a later step drops
views. So objects are viewed only while enough memory is left for those that are copied out. An object that still finds no
memory is sent in pieces that need none.

A reader that waits sleeps in the kernel, and learns at once that the writer has died. An engine core that waits for workers
looks every second whether one of them was stopped.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shmring.core.loggers import logger_of
from shmring.errors import CapacityError, ClosedError, EngineDeadError, ShmringError, WorkersBehindError, WouldBlock
from shmring.integrations.reaching import OtherRingError, check_epoch
from shmring.integrations.vllm.parcels import IN_RECORD_NBYTES, Parcel, Pieces, is_first_piece, pack, unpack
from shmring.integrations.vllm.peers import PeerError, Peers

if TYPE_CHECKING:
    from shmring.threads import Message, Ring, Worker

__all__ = ["Handle", "Reader", "Writer", "WriterCounts"]

logger = logger_of("vllm.shmring")

_READY_S = 600.0  # for the other side to join: it has loaded its model by then
_LOOKING_S = 0.005  # the next step, or the answer, is there by then if it takes no longer to compute
_MOST_VAIN, _RETRY = 4, 32  # times in a row; after so many, every so many-th is tried
_LOOK_S = 1.0  # between two looks at those who are waited for
_FULL_S = 0.25  # for memory to come free: by then a worker that runs has copied out what it was sent
_WARN_S = 60.0  # as vLLM does
_ENDING_S = 1.0  # for vLLM to notice itself that the other side has gone, and to end in good order
_MOST_VIEWED = 96  # messages with views that are kept: of the 256 that may be outstanding


@dataclasses.dataclass(frozen=True)
class Handle:
    """What a reader is made from. vLLM sends it to other processes, and looks at some of its attributes.

    Attributes:
        ring: the name of the writer's ring.
        epoch: of the writer's ring: another one may have the name by then.
        pid: the writer's process.
        local_reader_ranks: vLLM's ranks of the readers, in order.
        is_of_steps: whether the engine core writes to it, and not a worker.
        remote_subscribe_addr: for vLLM: there are no readers in other machines.
    """

    ring: str
    epoch: int
    pid: int
    local_reader_ranks: list[int]
    is_of_steps: bool
    remote_subscribe_addr: None = None


@dataclasses.dataclass
class WriterCounts:
    """What has gone through a queue.

    Attributes:
        sent: objects.
        viewed: of those, with large tensors that the readers view in place.
        copied_out: of those, with large tensors that the readers have copied out.
        in_pieces: of those, in pieces, since there was no memory for the whole.
    """

    sent: int = 0
    viewed: int = 0
    copied_out: int = 0
    in_pieces: int = 0


class Writer:
    """The writing end of a queue. Several threads may write.

    Args:
        ring: its own.
        ranks: vLLM's, of the readers.
        peers: the readers that an engine core looks after; ``None``: this is a worker's queue.
        may_view: whether the readers of an object may keep views of its large tensors.
        lies_in_slot: whether a tensor lies in a slot of the ring already.
        close: gives the ring up.
    """

    def __init__(
        self,
        ring: Ring,
        ranks: Sequence[int],
        *,
        peers: Peers | None = None,
        may_view: Callable[[Any], bool] = lambda _: False,
        lies_in_slot: Callable[[torch.Tensor], bool] = lambda _: False,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.handle = Handle(ring.name, ring.epoch, os.getpid(), list(ranks), peers is not None)
        self.shutting_down = False
        self.counts = WriterCounts()
        self._ring = ring
        self._readers = len(ranks)
        self._peers = peers
        self._may_view = may_view
        self._lies_in_slot = lies_in_slot
        self._close = close or ring.close
        self._lock = threading.Lock()  # pieces of two objects are not mixed
        self._more_views = 0  # messages that readers may keep views of, before outstanding ones are counted again

    def export_handle(self) -> Handle:
        """For vLLM: what the readers are made from."""
        return self.handle

    def wait_until_ready(self) -> None:
        """For vLLM: waits until all readers are there.

        Raises:
            PeerError: they do not come.
        """
        try:
            self._ring.wait_workers(self._readers, timeout=_READY_S)
        except (ShmringError, TimeoutError) as error:
            raise PeerError(f"shmring: not all readers of {self._ring.name} have come: {error}") from error
        if self._peers is not None:
            for worker in self._ring.statistics().workers:
                self._peers.add(f"worker {worker.rank}", worker.pid)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """For vLLM: sends an object to all readers. After :meth:`shutdown` it goes nowhere, as nobody reads it.

        Args:
            obj: anything that pickle takes.
            timeout: seconds to wait for readers that are behind.

        Raises:
            TimeoutError: one still is.
            PeerError: a worker has died, or was stopped.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        parcel = pack(obj)
        with self._lock:
            if parcel.large and self._peers is not None:
                self._peers.take_long = True
            try:
                self._send(parcel, self._may_view(obj), deadline_s)
            except ClosedError:
                if not self.shutting_down:
                    raise
            self.counts.sent += 1

    def _send(self, parcel: Parcel, may_view: bool, deadline_s: float | None) -> None:
        if not parcel.needs_memory:
            self._broadcast(parcel.message(views=False), deadline_s)
            return
        views = may_view and bool(parcel.large) and self._has_room_for_views(parcel)
        try:
            self._broadcast_once(parcel.message(views=views), _FULL_S)
        except (WorkersBehindError, CapacityError):
            self._send_pieces(parcel, deadline_s)
            return
        if parcel.large:
            self.counts.viewed += views
            self.counts.copied_out += not views

    def _has_room_for_views(self, parcel: Parcel) -> bool:
        """Whether, with views of these kept for long, enough is left for messages of which none are kept."""
        needed_nbytes = sum(
            part.nbytes for part in parcel.large if not (isinstance(part, torch.Tensor) and self._lies_in_slot(part))
        )
        self._more_views -= 1
        if not needed_nbytes and self._more_views >= 0:
            return True  # as when it was counted: counting looks at every worker
        statistics = self._ring.statistics()
        self._more_views = _MOST_VIEWED - statistics.broadcasts_outstanding - 1
        return self._more_views >= 0 and statistics.broadcast_free_nbytes - needed_nbytes >= statistics.broadcast_nbytes // 4

    def _send_pieces(self, parcel: Parcel, deadline_s: float | None) -> None:
        """Sends something in pieces: through memory as long as there is some, else in messages that need none."""
        self.counts.in_pieces += 1
        first, *pieces = parcel.pieces(max(IN_RECORD_NBYTES, int(self._ring.config.broadcast_nbytes) // 8))
        self._broadcast(first, deadline_s)
        for piece in pieces:
            try:
                self._broadcast_once(piece, _FULL_S)
            except WorkersBehindError:
                for start in range(0, piece.nbytes, IN_RECORD_NBYTES):
                    self._broadcast(bytes(piece[start : start + IN_RECORD_NBYTES]), deadline_s)

    def _broadcast(self, message: object, deadline_s: float | None) -> None:
        """Sends a message that needs no memory. Who is behind is waited for, unless a worker has died or was stopped."""
        while True:
            wait_s = _LOOK_S if deadline_s is None else min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))
            try:
                return self._broadcast_once(message, wait_s)
            except WorkersBehindError as error:
                if self._peers is not None:
                    self._peers.look()
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise TimeoutError(str(error)) from error

    def _broadcast_once(self, message: object, timeout: float) -> None:
        ranks = self._ring.broadcast(message, timeout=timeout)
        if self._peers is not None and len(ranks) < self._readers and not self.shutting_down:
            missing = sorted(set(range(self._readers)) - set(ranks))
            raise PeerError(f"shmring: worker {', '.join(map(str, missing))} has died, or has left {self._ring.name}")

    def shutdown(self) -> None:
        """For vLLM: nothing more is sent. Twice is once."""
        if not self.shutting_down:
            self.shutting_down = True
            self._close()


class _Looking:
    """Looking for a message before a reader sleeps: for so long as the next step or its answer takes while there is work.

    Workers wait for each other in the middle of a step, and on CPUs they spin there. If all of them sleep before it, the kernel
    may wake them on one core, where the first one spins until its time is over. So they look, and let others run after each
    look. (``busy_poll_s`` stops looking where other processes want the core: then this happens most.)
    """

    def __init__(self) -> None:
        self._vain = 0  # times in a row

    def next(self, worker: Worker) -> Message[Any] | None:
        """Returns a message if one comes in time. Where that was in vain several times in a row, it is tried now and then."""
        if self._vain >= _MOST_VAIN and self._vain % _RETRY:
            self._vain += 1
            return None
        until_s = time.monotonic() + _LOOKING_S
        while True:
            try:
                message = worker.receive_nowait()
            except WouldBlock:
                if time.monotonic() >= until_s:
                    self._vain += 1
                    return None
            else:
                self._vain = 0
                return message
            os.sched_yield()


class Reader:
    """The reading end of a queue. Several threads may read: each object goes to one of them.

    Args:
        handle: of the writer.
        rank: vLLM's, of this reader.
        peers: the workers that an engine core looks after while it waits; ``None``: this is a worker, and waits.
    """

    def __init__(self, handle: Handle, rank: int, peers: Peers | None = None) -> None:
        self.handle = handle
        self.shutting_down = False
        self._rank = handle.local_reader_ranks.index(rank)
        self._peers = peers
        self._worker: Worker | None = None
        self._pieces: Pieces | None = None  # of an object that is coming
        self._looking = _Looking()
        self._is_shut_down = threading.Event()
        self._lock = threading.Lock()  # an object in pieces is for one thread

    def export_handle(self) -> Handle:
        """For vLLM: what this was made from."""
        return self.handle

    def wait_until_ready(self) -> None:
        """For vLLM: joins the writer's ring.

        Raises:
            PeerError: it has gone.
        """
        from shmring import threads

        try:
            worker = threads.join(self.handle.ring, self._rank, connect_timeout_s=_READY_S, label="vLLM")
            try:
                check_epoch(worker.epoch, self.handle.epoch, self.handle.ring)
            except OtherRingError:
                worker.close()
                raise
        except (ShmringError, OSError, ValueError) as error:
            raise PeerError(f"shmring: process {self.handle.pid} is not reached through {self.handle.ring}: {error}") from error
        self._worker = worker

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """For vLLM: waits for the next object, and for other threads that wait for theirs.

        Args:
            timeout: seconds.
            indefinite: whether this may take for ever, and is nothing to tell the log of.

        Raises:
            TimeoutError: none came.
            PeerError: the writer has died; or a worker has, or was stopped.
            RuntimeError: this was shut down.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError("another thread waits for the next object")
        try:
            return self._next(deadline_s, indefinite)
        finally:
            self._lock.release()

    def _next(self, deadline_s: float | None, indefinite: bool) -> Any:
        while True:
            with self._receive(deadline_s, indefinite) as message:
                payload = message.payload
                if self._pieces is None and not is_first_piece(payload):
                    return unpack(payload)
                if self._pieces is None:
                    self._pieces = Pieces(payload)
                elif self._pieces.add(payload):
                    pieces, self._pieces = self._pieces, None
                    return pieces.unpack()

    def _receive(self, deadline_s: float | None, indefinite: bool) -> Message[Any]:
        worker = self._worker
        if worker is None:
            raise RuntimeError("wait_until_ready was not called")
        warn_s = time.monotonic() + _WARN_S
        looks = self._peers is not None or not indefinite
        while True:
            wait_s = _LOOK_S if looks else None
            if deadline_s is not None:
                wait_s = min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))
            try:
                if self._peers is None:
                    return self._looking.next(worker) or worker.receive(wait_s)
                message = (None if self._peers.take_long else self._looking.next(worker)) or worker.receive(wait_s)
                self._peers.take_long = False
                return message
            except TimeoutError:
                now_s = time.monotonic()
                if deadline_s is not None and now_s >= deadline_s:
                    raise
                if self._peers is not None:
                    self._peers.look(now_s)
                if not indefinite and now_s >= warn_s:
                    warn_s += _WARN_S
                    logger.info("shmring: process %d has not written to %s for a minute", self.handle.pid, self.handle.ring)
            except (EngineDeadError, ClosedError) as error:
                raise self._why_it_ended(error) from None

    def _why_it_ended(self, error: ShmringError) -> RuntimeError:
        if self.handle.is_of_steps:
            self._is_shut_down.wait(_ENDING_S)  # vLLM watches the process as well, and may be about to shut down: then say that
        if self.shutting_down:
            return RuntimeError("cancelled")
        who = "the engine core" if self.handle.is_of_steps else "a worker"
        return PeerError(f"shmring: {who} (pid {self.handle.pid}) has died, or has left: {error}")

    def shutdown(self) -> None:
        """For vLLM, in any thread: whoever waits here gets a ``RuntimeError``. Twice is once."""
        self.shutting_down = True
        self._is_shut_down.set()
        if self._worker is not None:
            self._worker.close()
