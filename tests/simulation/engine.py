"""One life of an engine: the real :class:`~shmring.ring.ring.Ring`, in a loop that the simulation turns, and its handlers.

Nothing of the ring is written again here. What is made up is what it stands on (see :mod:`.around`) and who uses it: handlers.
Each may be anywhere between two awaits, waiting for reply space, for a copy or for a frontend that reads, cancelled but not run
yet, or gone with views of a request's slots still alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import Coroutine, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from shmring.config import RingConfig
from shmring.core.effects import ReplySlot
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import PROTOCOL_VERSION, Hello, SlotRef, Welcome
from shmring.errors import AbortedError, LocalProtocolError, PeerLostError, RemoteProtocolError, WouldBlock
from shmring.memory.slab import Slab
from shmring.ring import frontend as frontend_module
from shmring.ring import handshakes as handshakes_module
from shmring.ring import limits
from shmring.ring import shell as shell_module
from shmring.ring.claim import Claim
from shmring.ring.frontend import Frontend
from shmring.ring.life import RingLife
from shmring.ring.replies import link_of
from shmring.ring.ring import Ring
from shmring.ring.shell import Shell
from shmring.ring.workers import Workers
from tests.model.waiting import check_waiting
from tests.simulation.around import Connected, CopyingThreads, End, Watch, standing_on
from tests.simulation.books import Books
from tests.simulation.fan_out import FanOut
from tests.simulation.injecting import Injecting
from tests.simulation.loop import NOBODY_KNOCKS, SimulatedLoop, came_to, local_of, require_obeyed
from tests.simulation.midst import Midst
from tests.simulation.payloads import (
    INLINE_NBYTES,
    MAX_PAYLOAD_NBYTES,
    MAX_TENSORS,
    MAX_VALUES,
    arrays_of,
    content_nbytes,
    offload_nbytes,
    payload_of,
    require_intact,
)
from tests.simulation.scenario import Action, Inside, Kind, Moment, Scenario, Sending, require
from tests.simulation.wire import Wire, open_slab

_RING_NBYTES = 1 << 14
_ENDINGS = (Kind.FINISH, Kind.FAIL, Kind.TIME_OUT)
_ONLY_LOOKS = frozenset({"_look_again"})  # a timer that changes nothing: it is for people (ring/inspection.py)
_PACKING = frozenset({Kind.REPLY, Kind.REPLY_NOW, Kind.BROADCAST, Kind.SHARE})  # they run a caller's code


@functools.cache
def ring_config(scenario: Scenario) -> RingConfig:
    """Returns the options of an engine."""
    return RingConfig(
        max_lease_nbytes=scenario.max_lease_blocks * BLOCK_NBYTES,
        client_quota_nbytes=scenario.quota_blocks * BLOCK_NBYTES,
        kept_nbytes=scenario.kept_blocks * BLOCK_NBYTES,
        max_inflight=scenario.max_inflight,
        max_tensors=MAX_TENSORS,
        max_values=MAX_VALUES,
        max_payload_nbytes=MAX_PAYLOAD_NBYTES,
        inline_nbytes=INLINE_NBYTES,
        message_ring_nbytes=_RING_NBYTES,
        worker_backlog=scenario.worker_backlog,
        prefault=False,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Client:
    """A connection, as the engine has it."""

    process: Any
    wire: Wire
    frontend: Frontend
    watch: Watch


@dataclasses.dataclass(slots=True, eq=False)
class Handling:
    """A claim in a handler's hands.

    Attributes:
        claim: the product's.
        number: that its payload carries.
        replies: begun so far.
        replying: the task that sends one.
        is_last: whether that ends the request.
        is_released: whether it has released its slots.
        is_left: whether it was left by code of a reply that is still being sent.
    """

    claim: Claim
    number: int
    replies: int = 0
    replying: asyncio.Task[Any] | None = None
    is_last: bool = False
    is_released: bool = False
    is_left: bool = False

    @property
    def client_id(self) -> int:
        return self.claim.client_id

    @property
    def request_id(self) -> int:
        return self.claim.request_id

    @property
    def reply_slot(self) -> ReplySlot | None:
        """The slot of the reply that is about to be sent: it was granted, is written, or waits for room."""
        task: Any = self.replying
        if task is None or task.done():
            return None
        came = came_to(task)
        return came if isinstance(came, ReplySlot) else cast("ReplySlot | None", local_of(task, "send_in_turn", "slot"))

    @property
    def slots(self) -> tuple[SlotRef, ...]:
        """In the order of its tensors; those that are kept content with the numbers that the book has given them."""
        return tuple(self.claim._submit.content.slots)


@dataclasses.dataclass(slots=True, eq=False)
class Draining:
    """A slot that was released with a view of it alive, or with a message to workers that shows it."""

    client_id: int
    slot: SlotRef
    view: Any  # None: only workers may still read it


class Engine:
    """One life of an engine, with its slab.

    Attributes:
        ring: the real one.
        loop: that it lives in.
        injecting: what this process itself asks.
        claims: in the hands of handlers, whether or not they can still be answered.
        draining: what views and workers read of claims that were released.
    """

    def __init__(self, scenario: Scenario, epoch: int, kind: Books, midst: Midst) -> None:
        self.scenario = scenario
        self.midst = midst
        self.epoch = epoch
        self.loop = SimulatedLoop(_ONLY_LOOKS)
        self.slab_fd, self.slab = open_slab(scenario.geometry.slab_nbytes)
        slab = Slab((-1, -1), self.slab, scenario.geometry.reply_nbytes, epoch)
        reserved = SimpleNamespace(slab=slab, pinned=None, device_slabs=(), load_fd=-1, load=None)
        workers = functools.partial(FanOut, self) if scenario.workers else Workers
        with (
            self.loop.running(),
            standing_on(shell_module, EngineBook=kind.engine, Copier=CopyingThreads, Workers=workers),
            standing_on(
                limits,
                MAX_KEPT=scenario.max_kept,
                MAX_PINS=scenario.max_pins,
                MAX_LEASES=scenario.max_leases,
                MAX_WORKERS=scenario.workers + 2,  # who was dropped and still reads counts
                COPY_OFFLOAD_NBYTES=offload_nbytes(scenario),
            ),
        ):
            shell = Shell(
                RingLife("simulated", ring_config(scenario), epoch),
                geometry=scenario.geometry,
                reserved=cast(Any, reserved),
                cuda=cast(Any, None),
                listener=cast(Any, SimpleNamespace(socket=SimpleNamespace(fileno=lambda: NOBODY_KNOCKS))),
                payload_type=Any,
                calls={},
                claim_type=Claim,
            )
            self.ring, self.shell = Ring(shell), shell
        os.close(self.slab_fd)
        self.end = self.shell.end
        self.book = self.end.book
        self.copier = cast(CopyingThreads, self.shell._copier)
        self.fan_out = self.shell.workers if isinstance(self.shell.workers, FanOut) else None
        self.injecting = Injecting(scenario, self.ring, self.loop)
        self.claims: list[Handling] = []
        self.draining: list[Draining] = []
        self._clients: dict[int, Client] = {}

    @property
    def clients(self) -> dict[int, Client]:
        """Connections that the ring has, ended ones included."""
        there = self.shell._frontends
        return {client_id: client for client_id, client in self._clients.items() if client_id in there}

    @property
    def tasks(self) -> list[asyncio.Task[Any] | None]:
        """Of handlers that reply, and of callers of this process, by their places."""
        return [*(handling.replying for handling in self.claims), *(asked.reading for asked in self.injecting.asked)]

    # -- connections ---------------------------------------------------------------------------------------------------------

    def admit(self, process: Any) -> tuple[Wire, Welcome]:
        """A frontend has come."""
        wire = Wire(self.scenario.max_queue)
        welcomes: list[Welcome] = []
        self._shake_hands(wire, lambda peer, welcome, *descriptors: welcomes.append(welcome))
        [welcome] = welcomes
        frontend = self.shell._frontends[welcome.client_id]
        assert isinstance(frontend, Frontend)
        self._clients[welcome.client_id] = Client(process, wire, frontend, cast(Any, frontend.watch))
        return wire, welcome

    def admit_in_vain(self) -> None:
        """A frontend is gone before it was welcomed: it never got the slab."""

        def is_gone(*welcome: object) -> None:
            raise PeerLostError("it is gone")

        try:
            self._shake_hands(Wire(self.scenario.max_queue), is_gone)
        except PeerLostError:
            return
        require(False, "whoever is gone was admitted")

    def _shake_hands(self, wire: Wire, send_welcome: Any) -> None:
        hello = Hello(PROTOCOL_VERSION, self.scenario.base_blocks * BLOCK_NBYTES, "")
        peer = SimpleNamespace(pid=0, hello=hello, socket=Connected(wire, True, self.midst), pidfd=-1)
        with (
            self.loop.running(),
            standing_on(frontend_module, Link=End),
            standing_on(
                handshakes_module,
                ProcessWatch=Watch,
                sealed_rings=lambda nbytes: (),
                map_rings=lambda descriptors, nbytes: (None, None),
                send_welcome=send_welcome,
            ),
        ):
            self.shell._handshakes._admit(cast(Any, peer), hello)

    def sees_end(self, client_id: int) -> None:
        """A connection has ended; what it brought and was not read is lost."""
        with self.loop.running():
            self.clients[client_id].frontend.link.close()

    def hang_up(self, client_id: int) -> None:
        """A frontend does not read, say."""
        with self.loop.running():
            self.clients[client_id].frontend.link.violated(RemoteProtocolError("it does not read"))

    def bury(self, client_id: int) -> None:
        """A process is dead, as the kernel says."""
        with self.loop.running():
            self.clients[client_id].watch.fire()

    def die(self) -> None:
        """The engine's process ends, and with it its sockets."""
        for client in self.clients.values():
            client.wire.close_engine()
        self.close()

    def close(self) -> None:
        """Lets go of everything that refers to everything else."""
        self.end.is_open = False
        for client in self.clients.values():
            cast(End, client.frontend.link).lost = True
        if self.fan_out is not None:
            self.fan_out.close()
        tasks = [task for task in self.tasks if task is not None]
        self.copier.abandon()
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_all()
        self.loop.clear()
        self.injecting.asked.clear()
        self.claims.clear()
        self.draining.clear()
        self.end.detach()
        self.shell._host_claims.unmap()

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self, client_id: int) -> None:
        """Reads one record of a frontend."""
        with self._judging(), self.loop.running():
            cast(End, self.clients[client_id].frontend.link).deliver()

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """Records are read: those that were forged are refused, and no others."""
        errors = self.shell.life.protocol_errors
        forging = [client.wire for client in self.clients.values() if client.wire.holds_forged]
        yield
        accused = self.shell.life.protocol_errors - errors
        taken = sum(not wire.holds_forged for wire in forging)
        require(accused >= taken, "a forged message was accepted")
        require(accused <= taken, "an honest frontend is accused")

    def pass_moment(self) -> None:
        """Another moment has passed: nobody waits for the silent beside idle memory."""
        self.loop.pass_moment()
        if self.book.is_awaited():
            check_waiting(self.book.host)

    # -- handlers ------------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """A handler takes up the request that has waited longest; where none waits it looks, and may find none."""
        expected = next(iter(self.end.waiting), None)
        try:
            with self._judging(), self.loop.running():
                claim = self.ring.claim_nowait()
        except WouldBlock:
            require(expected is None, "a request can't be taken up")
            return
        came = claim.client_id, claim.request_id
        require(expected in (None, came), "a request was overtaken")
        require_intact(claim.payload, claim.payload[0])
        self.claims.append(Handling(claim, claim.payload[0]))

    def release(self, index: int, viewed: int) -> None:
        """A handler releases its slots; those in the mask ``viewed`` drain."""
        handling = self.claims[index]
        self._keep_views(handling, viewed)
        with self.loop.running():
            handling.claim.release()
        handling.is_released = True
        self._keep_shared(handling)

    def _keep_views(self, handling: Handling, viewed: int) -> None:
        if handling.claim.released:
            return
        require_intact(handling.claim.payload, handling.number)
        arrays = arrays_of(handling.claim.payload)
        for position, slot in enumerate(handling.slots):
            if viewed >> position & 1:
                self.draining.append(Draining(handling.client_id, slot, arrays[position]))

    def _keep_shared(self, handling: Handling) -> None:
        """What workers may still read of a claim that was released drains as well."""
        client = self.book.clients.get(handling.client_id)
        draining = [draining.slot for draining in self.draining]
        for slot in handling.slots:
            if client is not None and slot.generation in client.slots and slot not in draining:
                self.draining.append(Draining(handling.client_id, slot, None))  # which :meth:`_collect` looks at

    def leave(self, index: int, how: Kind, viewed: int) -> None:
        """A handler leaves its claim."""
        handling = self.claims.pop(index)
        self._require_told(handling)
        self._keep_views(handling, viewed)
        with self.loop.running():
            if how is Kind.FINISH:
                handling.claim.done()
            elif how is Kind.FAIL:
                handling.claim.fail(ValueError("it can't be answered"))
            else:
                handling.claim.time_out("it took too long")
        self._keep_shared(handling)

    def _require_told(self, handling: Handling) -> None:
        client = self.book.clients.get(handling.client_id)
        is_booked = client is not None and handling.request_id in client.requests
        require(handling.claim.ended or is_booked, "a request had ended without its claim being told")

    def reply(self, index: int, blocks: int, is_last: int) -> None:
        """A handler replies: in the record, or in a slot that it may have to wait for."""
        handling = self.claims[index]
        handling.is_last = bool(is_last)
        payload = self._answer(handling, blocks)
        answer = handling.claim.done(payload) if is_last else handling.claim.reply(payload)
        handling.replying = self.loop.begin(cast(Coroutine[Any, Any, Any], answer))
        if handling not in self.claims:
            handling.is_left = True
            self.claims.append(handling)  # until its task has returned

    def reply_now(self, index: int, blocks: int) -> None:
        """A handler replies if nothing has to be waited for."""
        handling = self.claims[index]
        payload = self._answer(handling, blocks)
        try:
            with self.loop.running():
                handling.claim.reply_nowait(payload)
        except WouldBlock:
            return
        except (AbortedError, LocalProtocolError):
            require(handling.claim.ended, "a claim that goes on can't be answered")
            return
        require(not handling.claim.ended, "a claim was answered that had ended")

    def _answer(self, handling: Handling, blocks: int) -> list[Any]:
        handling.replies += 1
        arrays = [np.zeros(content_nbytes(blocks), np.uint8)] if blocks else []
        return payload_of(arrays, handling.number, self.midst.code)

    def cancel_reply(self, index: int) -> None:
        """A handler is cancelled while it waits or copies."""
        task = self.claims[index].replying
        assert task is not None
        with self.loop.running():
            task.cancel()

    def reply_copied(self, index: int) -> None:
        """A thread has copied a reply."""
        with self.loop.running():
            self.copier.end(index)

    def _replied(self) -> None:
        """Tasks that send replies may have returned."""
        for handling in [handling for handling in self.claims if handling.replying is not None and handling.replying.done()]:
            assert handling.replying is not None
            task, handling.replying = handling.replying, None
            require_obeyed(task, "handler")
            if handling.is_left:
                self.claims.remove(handling)
            if task.cancelled():
                continue
            error = task.exception()
            if isinstance(error, AbortedError):
                require(handling.claim.aborted, "a request was aborted that nobody has aborted")
            elif isinstance(error, LocalProtocolError):
                require(handling.is_left, "a claim that goes on can't be answered")
            elif error is not None:
                raise error
            elif handling.is_left:
                require(False, "a claim was answered that had ended")
            elif handling.is_last:
                self.claims.remove(handling)
                self._keep_shared(handling)

    def view_dies(self, index: int) -> None:
        """The last view of a slot that was released dies in the engine."""
        with self.loop.running():
            self.draining[index].view = None

    # -- what follows --------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """The loop runs what is ready first."""
        if self.fan_out is not None:
            self.fan_out.truth.begins(self.loop.tasks_ready()[0])
        self.loop.run_next()

    def rest(self, *, is_cancelling: bool) -> None:
        """What has become ready runs at once, unless turns wait or a task was cancelled just now."""
        is_resting = self.scenario.turns_wait or is_cancelling or not self.loop.is_touched
        self.follow()
        while self.loop.ready and not is_resting:
            self.turn()
            self.follow()
        self.loop.is_touched = False

    def follow(self) -> None:
        """Something has happened here: what it means for handlers, for workers, and for slots that are read."""
        self._replied()
        self.injecting.follow()
        if self.fan_out is not None:
            with self.loop.running():  # with a task go the views that it had
                self.fan_out.follow()
        self._collect()

    def content_of(self, client_id: int, generation: int) -> int | None:
        """Returns which kept content a slot of a request is; None: none, or there is no such slot."""
        client = self.book.clients.get(client_id)
        slot = None if client is None else client.slots.get(generation)
        return None if slot is None or slot.kept is None else slot.kept.generation

    def _collect(self) -> None:
        """Slots that nobody reads any more have drained, or are about to."""
        truth = None if self.fan_out is None else self.fan_out.truth
        for draining in tuple(self.draining):
            key = draining.client_id, draining.slot.generation
            if draining.view is not None or (truth is not None and truth.holds(*key)):
                continue
            client = self.book.clients.get(draining.client_id)
            if client is None or draining.slot.generation not in client.slots:
                self.draining.remove(draining)
            else:
                require(self.loop.is_heard("_collect_deaths"), "a slot drains that nobody reads")

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self) -> Iterator[Action]:
        """Yields what can happen in the engine and at its end of the connections, and what can in the midst of that."""
        actions = [*self._enabled()]
        yield from actions
        if not self.midst.offers:
            return
        if self.scenario.looks and not self.end.waiting_count:
            records = [len(client.wire.to_engine) for client in self.clients.values() if client.frontend.connected]
            for left in range(max(records, default=0)):
                yield Action(Kind.CLAIM, inside=Inside(Moment.LOOKING, Kind.TO_ENGINE, 0, 1 + left))
        in_code = self.scenario.in_code
        does = [Inside(Moment.IN_CODE, *action[:4]) for action in actions if action.kind in in_code and _is_at_once(action)]
        for action in actions:
            if self._packs(action):
                yield from (Action(*action[:4], inside) for inside in does)

    def _packs(self, action: Action) -> bool:
        """Whether an action packs a payload: a turn does so if a task begins there that sends a message to workers."""
        if action.kind is Kind.TURN:
            return self.fan_out is not None and self.fan_out.truth.is_new(self.loop.tasks_ready()[0])
        return action.kind in _PACKING and _is_at_once(action)

    def _enabled(self) -> Iterator[Action]:
        for position, client in enumerate(self.clients.values()):
            if client.frontend.connected:
                if client.wire.to_engine:
                    yield Action(Kind.TO_ENGINE, position)
                if not client.wire.frontend_open:
                    yield Action(Kind.ENGINE_SEES_END, position)
                else:
                    yield Action(Kind.ENGINE_HANGS_UP, position)
            if not client.process.alive and not client.watch.has_fired:
                yield Action(Kind.PIDFD_FIRES, position)
        if self.loop.ready:
            yield Action(Kind.TURN)
        if self.loop.other_timers:
            yield Action(Kind.TIMER)
        if self.scenario.stops and self.loop.moments:
            yield Action(Kind.MOMENT)
        if self.end.waiting_count:
            yield Action(Kind.CLAIM)
        for index in range(len(self.copier.running)):
            yield Action(Kind.REPLY_COPIED, index)
        for index, handling in enumerate(self.claims):
            yield from self._enabled_for_claim(index, handling)
        for index, draining in enumerate(self.draining):
            if draining.view is not None:
                yield Action(Kind.ENGINE_VIEW_DIES, index)
        yield from self.injecting.enabled()
        if self.fan_out is not None:
            yield from self.fan_out.enabled()

    def _enabled_for_claim(self, index: int, handling: Handling) -> Iterable[Action]:
        claim = handling.claim
        if handling.replying is not None:
            return () if handling.replying.cancelling() else (Action(Kind.CANCEL_REPLY, index),)
        with_ends = self.scenario.max_disturbances is None  # elsewhere an end is a record of its own
        actions = [Action(kind, index) for kind in _ENDINGS]
        if not claim.released:
            masks = range(1 << len(handling.slots))
            actions += [Action(Kind.RELEASE, index, 0, mask) for mask in masks]
            actions += [Action(Kind.FINISH, index, 0, mask) for mask in masks[1:] if with_ends]
        if claim.aborted or handling.replies >= self.scenario.max_replies:
            return actions
        wanted = self.scenario.reply_blocks_wanted
        if not self.scenario.turns_wait and not link_of(self.shell._frontends[claim.client_id], claim).can_write:
            return actions
        actions += [Action(Kind.REPLY, index, blocks) for blocks in wanted]
        if self.scenario.in_code:
            actions += [Action(Kind.REPLY_NOW, index, blocks) for blocks in wanted]
        if with_ends:
            actions += [Action(Kind.REPLY, index, blocks, 1) for blocks in wanted]
        return actions


def _is_at_once(action: Action) -> bool:
    """Whether code can do this without waiting for anything."""
    return action.kind not in (Kind.BROADCAST, Kind.SHARE) or action.item == Sending.NOW
