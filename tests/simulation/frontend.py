"""A frontend's process and its sessions: the real :class:`~shmring.client.session.Session`, and its callers.

Nothing of the session is written again here. What is made up is what it stands on (:mod:`.around`) and who uses it: callers.
Each is a task that may be anywhere between two awaits.

A call that looks for what has come, or that runs a caller's code, may find the end of its session there, or leave what it works
on (:mod:`.midst`).

What is not simulated: message rings that are full and links that poll by themselves (a record comes when the simulation says
so), turns of copies in the loop, a close in steps, device memory, calls, deadlines, signals, and clients of other threads.

A process can outlive its session, and so can views of its slots: they are memory that the process may still write.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import warnings
from bisect import insort
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from shmring.client import session as session_module
from shmring.client.counters import ClientCounters
from shmring.client.kept import Kept
from shmring.client.life import SessionLife
from shmring.client.session import Session as RealSession
from shmring.client.slot import Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig
from shmring.core.compiled import ClientSlotRecord, ForEngine, Regions, Waiter
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, slot_blocks
from shmring.core.messages import KEY_NBYTES, SLOT_HEADER_NBYTES, LeaseReturn, ReplyRelease, SlotRef, encode_message
from shmring.core.states import ClientSlot
from shmring.errors import CapacityError, ShmringError, WouldBlock
from shmring.memory import slots as slots_module
from shmring.memory.slab import Slab
from tests.model.inside import has_reply, slots_here, slots_with_engine
from tests.records import submit_of
from tests.simulation.around import Connected, Copying, CopyingThreads, End, standing_on
from tests.simulation.books import Books
from tests.simulation.engine import Engine
from tests.simulation.loop import SimulatedLoop, came_to, local_of, require_obeyed
from tests.simulation.midst import Midst
from tests.simulation.payloads import INLINE_NBYTES, arrays_of, content_nbytes, offload_nbytes, payload_of, require_intact
from tests.simulation.scenario import Action, Forgery, Inside, Kind, Moment, Scenario, require

#: After which an empty lease goes back, on the simulation's clock.
IDLE_TICKS = 1.0

_MORE_THAN_INFLIGHT = 2  # requests that wait for their turn, where turns wait
_FORGERIES = tuple(Forgery)  # an enum takes long to go through
_NO_LEASE = 2**40  # no engine lends so many
_NO_REPLY = 2**40  # nor sends so many replies
_UNSUBMITTED = (ClientSlot.WRITING, ClientSlot.CACHED)
_ONLY_LOG = frozenset({"_warn_of_draining"})
_FOR_TENSORS_NBYTES = 512  # of a held slot, beside what is sent
#: Actions that look for what has come, and those that run a caller's code: as they pack a payload, or read a shape.
_LOOKING = frozenset({Kind.ACQUIRE, Kind.REQUEST, Kind.REQUEST_NOW, Kind.SUBMIT, Kind.SEND_KEPT, Kind.READ})
#: Actions of a silent process: its loop goes on, and what has begun.
_BY_ITSELF = frozenset(
    {
        Kind.TO_FRONTEND, Kind.FRONTEND_SEES_END, Kind.FRONTEND_TURN, Kind.FRONTEND_TIMER, Kind.FRONTEND_MOMENT, Kind.COPIED,
    }
)  # fmt: skip
_PACKING = frozenset({Kind.REQUEST, Kind.REQUEST_NOW, Kind.SUBMIT, Kind.SEND_KEPT, Kind.KEEP, Kind.FRONTEND_TURN})


class Pace(enum.Enum):
    """How a process goes."""

    GOES = 0
    SILENT = 1  # its loop goes on, and its callers do nothing
    STOPPED = 2


class Wants(enum.Enum):
    """What a caller's task is about."""

    SLOT = 0
    REQUEST = 1
    FIND = 2
    KEEP = 3
    WAIT_KEPT = 4


@dataclasses.dataclass(slots=True, eq=False)
class Caller:
    """A task.

    Attributes:
        wants: what.
        detail: blocks of a slot that it waits for; 0: of none; or the number of a key.
        slots: that its payload lies in.
        number: that its payload carries.
    """

    wants: Wants
    detail: int
    task: asyncio.Task[Any]
    slots: tuple[ClientSlotRecord, ...] = ()
    number: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Holding:
    """A slot that a caller holds, and what it writes to."""

    slot: Slot
    record: ClientSlotRecord
    array: Any


@dataclasses.dataclass(slots=True, eq=False)
class View:
    """What is left of a slot that was left with a view of it."""

    record: ClientSlotRecord
    array: Any


@dataclasses.dataclass(slots=True, eq=False)
class HeldReply:
    """A reply in a slot that this process may read; in blocks of the slab."""

    generation: int
    start: int
    blocks: int
    array: Any


@dataclasses.dataclass(slots=True, eq=False)
class KeptView:
    """A payload that somebody views."""

    generation: int
    start: int
    blocks: int
    payload: list[Any]


@dataclasses.dataclass(slots=True, eq=False)
class HeldContent:
    """Content that a caller holds."""

    kept: Kept[Any]
    view: KeptView


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """A request, in its caller's hands."""

    submission: Submission
    number: int


def key_of(number: int) -> bytes:
    """The key of content, whose payload has this number."""
    return number.to_bytes(KEY_NBYTES, "little")


@functools.cache
def client_config(scenario: Scenario) -> ClientConfig:
    """Returns the options of a frontend."""
    return ClientConfig(
        lease_nbytes=scenario.lease_blocks * BLOCK_NBYTES,
        lease_idle_s=IDLE_TICKS,
        inline_nbytes=INLINE_NBYTES,
        copy_offload_nbytes=offload_nbytes(scenario),
        prefault=False,
    )


async def _hold(session: RealSession, nbytes: int) -> Slot:
    """What :meth:`shmring.Client.slot` awaits."""
    slots = session.host_slots
    slot: Slot = slots.hold(await slots.acquire(nbytes, held=True), drain=True)
    return slot


class Session:
    """One connection to one life of an engine, and its callers.

    Attributes:
        real: the product's.
        loop: that it lives in.
        callers: whose tasks have not returned, in order.
        held: slots that callers hold, by address.
        views: of slots that were left.
        sent: requests whose callers have not seen their ends, by id.
        awaited: the request before whose end no reply of another is read; None: there is none.
        replies: that callers view.
        contents: kept ones that callers hold.
        kept_views: of those that were left.
    """

    def __init__(self, scenario: Scenario, engine: Engine, process: Process, kind: Books, now: float, midst: Midst) -> None:
        self.scenario = scenario
        self.midst = midst
        self.epoch = engine.epoch
        self.loop = SimulatedLoop(_ONLY_LOG)
        self.loop.now = now
        self.wire, welcome = engine.admit(process)
        self.client_id = welcome.client_id
        self.copier = CopyingThreads(1, offload_nbytes(scenario))
        self.slab = engine.slab
        self.callers: list[Caller] = []
        self.held: list[Holding] = []
        self.views: list[View] = []
        self.sent: dict[int, Sent] = {}
        self.awaited: int | None = None
        self.replies: list[HeldReply] = []
        self.contents: list[HeldContent] = []
        self.kept_views: list[KeptView] = []
        self.asks = 0
        self.moments = 0
        self.next_number = 1
        self.last_sent: SlotRef | None = None
        with (
            self.loop.running(),
            standing_on(session_module, Link=End),
            standing_on(slots_module, ClientBook=kind.client),
        ):
            self.real = RealSession(
                SessionLife("simulated", welcome, client_config(scenario), ClientCounters()),
                self.copier,
                cast(Any, None),
                cast(Any, None),
                cast(Any, Connected(self.wire, False, midst)),
                Slab((-1, -1), self.slab, scenario.geometry.reply_nbytes, engine.epoch),
                Regions(),
                cast(Any, (None, None)),
                cast(Any, None),
                cast(Any, SimpleNamespace(close=lambda: None)),
                lambda session: None,
            )
            if welcome.base_lease is not None:
                self.real._granted(welcome.base_lease)
        self.end = self.real.end
        self.book = self.real.host_slots.book
        self.link = cast(End, self.real.link)

    @property
    def ended(self) -> bool:
        """Whether it can't be used any more."""
        return self.real.error is not None

    # -- what can be reached ---------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> list[Copying]:
        """Copies that threads make."""
        return self.copier.running

    @property
    def reached(self) -> list[ClientSlotRecord]:
        """The records of the slots that callers, or copies of theirs, can read or write."""
        granted = [slot for caller in self.callers if (slot := self.granted(caller)) is not None]
        left = [view.record for view in self.views]
        return [*(holding.record for holding in self.held), *left, *granted, *self.real.sending.copies.values()]

    @property
    def slots(self) -> list[ClientSlotRecord]:
        """The same and, as long as the session lives, all that are not free; by address."""
        booked = () if self.ended else (*slots_with_engine(self.book).values(), *slots_here(self.book))
        slots = {id(slot): slot for slot in (*self.reached, *booked)}
        return sorted(slots.values(), key=lambda slot: slot.start)

    @staticmethod
    def is_in_flight(caller: Caller) -> bool:
        """Whether the request of a caller counts as in flight: its turn has come."""
        flight: Any = local_of(caller.task, "submit_in_turn", "flight")
        in_line = local_of(caller.task, "turn", "self") is not None
        turn: Any = local_of(caller.task, "stay", "place") if in_line else None
        return flight is not None and (flight._counts or (turn is not None and turn.done() and not turn.cancelled()))

    @staticmethod
    def unsent(caller: Caller) -> ClientSlotRecord | None:
        """Returns the slot that the payload of a caller is in, or about to be, and that is not sent yet."""
        slot = local_of(caller.task, "_send_when_possible", "slot") or local_of(caller.task, "_space", "slot")
        return cast("ClientSlotRecord | None", slot or local_of(caller.task, "keep", "copied"))

    def granted(self, caller: Caller) -> ClientSlotRecord | None:
        """Returns the slot of a caller whose turn has come, and that has not run since."""
        came = came_to(caller.task)
        return came if isinstance(came, ClientSlotRecord) else None

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Reads one record of the engine."""
        with self.loop.running():
            self.link.deliver()

    def sees_end(self) -> None:
        """The connection has ended."""
        with self.loop.running():
            self.real.connection_lost()

    def read(self, request_id: int) -> None:
        """A caller reads the next reply of a request, or its end; where nothing has come it looks, and gives up."""
        sent = self.sent[request_id]
        with self.loop.running():
            if not has_reply(sent.submission) and sent.submission.ended:
                del self.sent[request_id]
                return
            try:
                payload = self._next_reply(sent.submission)
            except (StopAsyncIteration, ShmringError, TimeoutError):
                require(sent.submission.ended, "a request failed that goes on")
                self.sent.pop(request_id)
                return
        if payload is None:
            return
        require(payload[0] == sent.number, "a caller gets another request's reply")
        require_intact(payload, payload[0])
        for array in arrays_of(payload):
            self._view_reply(array)

    def _next_reply(self, submission: Submission) -> Any:
        """What a caller gets that awaits the next reply, as far as that comes at once; else None."""
        waiting = submission.next().__await__()
        try:
            waiting.send(None)
        except StopIteration as came:
            return came.value
        with contextlib.suppress(asyncio.CancelledError):
            waiting.throw(asyncio.CancelledError())
        return None

    def _view_reply(self, array: Any) -> None:
        offset = array.__array_interface__["data"][0] - self.slab.address
        if not 0 <= offset < self.slab.nbytes:
            return  # it was copied out: the engine is short of reply space
        with memoryview(self.slab) as memory:
            generation = int.from_bytes(memory[offset - SLOT_HEADER_NBYTES + 8 : offset - SLOT_HEADER_NBYTES + 16], "little")
        start = offset // BLOCK_NBYTES
        blocks = (array.nbytes + SLOT_HEADER_NBYTES) // BLOCK_NBYTES
        self.replies.append(HeldReply(generation, start, blocks, array))

    def await_reply(self, index: int) -> None:
        """Callers read no other reply before this request has ended."""
        self.awaited = list(self.sent)[index]

    def forget(self, request_id: int) -> None:
        """A caller drops a request."""
        with self.loop.running():
            del self.sent[request_id]

    # -- callers -------------------------------------------------------------------------------------------------------------

    def _begin(
        self, wants: Wants, detail: int, coroutine: Any, slots: Sequence[ClientSlotRecord] = (), number: int = 0
    ) -> None:
        task = self.loop.begin(cast(Coroutine[Any, Any, Any], coroutine))
        self.callers.append(Caller(wants, detail, task, tuple(slots), number))

    def _number(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        return number

    def acquire(self, blocks: int) -> None:
        """A caller wants a slot to hold, and waits in line if there is none."""
        nbytes = content_nbytes(blocks)
        with self.loop.running():
            slot = self.end.hold_now(nbytes, True)
        if slot is not None:
            require(not self.book.waiting, "a waiter was overtaken")
            self._hold(slot)
        elif not self.ended:
            self._begin(Wants.SLOT, blocks, _hold(self.real, nbytes))

    def attempt(self, blocks: int) -> None:
        """A caller takes a slot if one is free, and else asks for a lease in passing."""
        slots = self.real.host_slots
        try:
            with self.loop.running():
                slot = slots.hold(slots.acquire_nowait(content_nbytes(blocks), held=True), drain=True)
        except WouldBlock:
            return
        self._hold(slot)

    def _hold(self, slot: Slot) -> None:
        """A caller has a slot. By address: in which order they were taken makes no difference to anybody."""
        require(not self.ended, "a slot is held that has gone")
        holding = Holding(slot, slot._record, slot.array((slot.nbytes - _FOR_TENSORS_NBYTES,), np.uint8))
        insort(self.held, holding, key=lambda holding: holding.record.start)

    def request(self, blocks: int) -> None:
        """A caller sends a payload that has to be copied."""
        self._submit(blocks, [np.zeros(content_nbytes(blocks), np.uint8)], ())

    def request_now(self, blocks: int) -> None:
        """The same if nothing has to be waited for; else it asks for a lease in passing."""
        number = self._number()
        payload = payload_of([np.zeros(content_nbytes(blocks), np.uint8)], number, self.midst.code)
        try:
            with self.loop.running():
                submission = self.real.sending.submit_nowait(payload, ForEngine(), ask=True)
        except ShmringError as error:
            require(isinstance(error, WouldBlock) or self.ended, f"who does not wait gets {type(error).__name__}: {error}")
            return
        require(not self.book.waiting, "a waiter was overtaken")
        self._was_sent(submission, number)

    def _submit(self, blocks: int, arrays: Sequence[Any], slots: Sequence[ClientSlotRecord], kept: Sequence[Any] = ()) -> None:
        number = self._number()
        payload = [*payload_of(arrays, number, self.midst.code), *kept]
        with self.loop.running():
            submission = self.end.submit_now(payload, ForEngine(), self.copier.at_once_nbytes)
        if submission is not None:
            self._was_sent(submission, number)
        elif not self.ended:
            self._begin(Wants.REQUEST, blocks, self.real.sending.submit_in_turn(payload, ForEngine()), slots, number)

    def _was_sent(self, submission: Submission, number: int) -> None:
        require(not self.ended or submission.ended, "a request was sent when its session had ended")
        self.sent[submission.request_id] = Sent(submission, number)
        submitted = [slot for slot in slots_with_engine(self.book).values() if slot.lease is not None]
        if submitted:
            self.last_sent = max(submitted, key=lambda slot: slot.generation).ref()

    def submittable(self) -> list[int]:
        """Positions of the slots that callers hold and may submit: those that nobody is about to submit."""
        taken = [slot for caller in self.callers for slot in caller.slots]
        return [
            index
            for index, holding in enumerate(self.held)
            if holding.record.state in _UNSUBMITTED and holding.record not in taken
        ]

    def submit_held(self, index: int, with_next: int) -> None:
        """A caller submits a held slot as it is, or two."""
        positions = self.submittable()
        chosen = [self.held[position] for position in positions[positions.index(index) :][: 1 + with_next]]
        self._submit(0, [holding.array for holding in chosen], [holding.record for holding in chosen])

    def send_kept(self, index: int, with_slot: int) -> None:
        """A caller sends a request with content that it holds, from where that lies, alone or with a held slot."""
        chosen = [self.held[with_slot]] if with_slot >= 0 else []
        content = self.contents[index].kept.payload
        self._submit(0, [holding.array for holding in chosen], [holding.record for holding in chosen], [content])

    def cancel(self, index: int) -> None:
        """The task of a caller is cancelled."""
        with self.loop.running():
            self.callers[index].task.cancel()

    def copied(self, index: int) -> None:
        """A thread has copied a payload."""
        with self.loop.running():
            self.copier.end(index)

    def leave(self, index: int, is_viewed: int) -> None:
        """A caller leaves a slot; with living views it drains."""
        holding = self.held.pop(index)
        if is_viewed:
            self.views.append(View(holding.record, holding.array))
        holding.array = None
        with self.loop.running():
            holding.slot.close()

    def make_tensor(self, index: int) -> None:
        """A caller makes a tensor in a slot, and drops it; its code may have left the slot by then."""
        slot = self.held[index].slot
        with self.loop.running(), contextlib.suppress(ShmringError):
            slot.tensor(cast(Any, self.midst.shape()), torch.uint8)

    def view_dies(self, index: int) -> None:
        """The last view of a slot that was left dies."""
        with self.loop.running():
            self.views.pop(index)

    def abort(self, index: int) -> None:
        """A caller gives a request up."""
        with self.loop.running():
            self.abortable()[index].submission.abort()

    def abortable(self) -> list[Sent]:
        """Requests that have not ended."""
        return [sent for sent in self.sent.values() if not sent.submission.ended]

    def drop_reply(self, index: int) -> None:
        """The last view of a reply dies."""
        with self.loop.running():
            self.replies.pop(index)

    def find(self, key: int) -> None:
        """A caller looks for what is kept."""
        self.asks += 1
        self._begin(Wants.FIND, key, self.real.kept.find(key_of(key), Any), number=key)

    def wait_kept(self, key: int) -> None:
        """A caller waits for content."""
        self.asks += 1
        self._begin(Wants.WAIT_KEPT, key, self.real.kept.wait(key_of(key), Any), number=key)

    def keep(self, index: int, key: int) -> None:
        """A caller gives a slot to the engine to keep."""
        self.asks += 1
        holding = self.held[index]
        payload = payload_of([holding.array], key, self.midst.code)
        self._begin(Wants.KEEP, key, self.real.kept.keep(key_of(key), payload), [holding.record], key)

    def unpin(self, index: int, is_viewed: int) -> None:
        """A caller leaves content; a view of it may stay alive."""
        content = self.contents.pop(index)
        if is_viewed:
            self.kept_views.append(content.view)
        kept = content.kept
        del content
        with self.loop.running():
            kept.close()

    def kept_view_dies(self, index: int) -> None:
        """A view of content that was left dies."""
        with self.loop.running():
            self.kept_views.pop(index)

    # -- what follows ----------------------------------------------------------------------------------------------------------

    def fire(self) -> None:
        """A timer fires; what was dropped comes back with a warning."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            self.loop.fire()

    def pass_moment(self) -> None:
        """Another moment has passed: no caller waits for one who can't be served any time soon."""
        self.moments += 1
        self.loop.pass_moment()

    def may_be_served(self) -> list[Waiter]:
        """Returns who gets a slot as soon as there is room.

        Those are who rests, of whom each wants less than the one before, and who has the turn, and wants less still.
        """
        may: list[Waiter] = []
        for waiter in self.by_size():
            may.append(waiter)
            if not waiter.rest_moments:
                break
        return may

    def by_size(self) -> Iterator[Waiter]:
        """Yields those in line that want less than all before them: each of them has its turn at some time."""
        least = None
        for waiter in self.book._waiters.values():
            if least is None or slot_blocks(waiter.nbytes) < least:
                least = slot_blocks(waiter.nbytes)
                yield waiter

    def rest(self, *, is_cancelling: bool) -> None:
        """What has become ready runs at once, unless turns wait or a task was cancelled just now; after the end in any case."""
        is_resting = self.scenario.turns_wait or is_cancelling or not self.loop.is_touched
        self.follow()
        while self.loop.ready and (self.ended or not is_resting):
            self.loop.run_next()
            self.follow()
        self.loop.is_touched = False

    def follow(self) -> None:
        """Something has happened here: tasks may have returned, and replies have come."""
        returned = [caller for caller in self.callers if caller.task.done()]
        if returned:
            with self.loop.running():  # with a task go the views that it had
                for caller in returned:
                    self.callers.remove(caller)
                    self._returned(caller)
        if not self.scenario.turns_wait:
            while ready := [request_id for request_id in self.sent if self._reads(request_id)]:
                self.read(ready[0])

    def _reads(self, request_id: int) -> bool:
        """Whether the caller of a request has something to read, and does."""
        submission = self.sent[request_id].submission
        return submission.ended if not has_reply(submission) else self._may_read(request_id)

    def _may_read(self, request_id: int) -> bool:
        """Whether no caller awaits another request before all."""
        return self.awaited == request_id or self.awaited not in self.sent

    def _returned(self, caller: Caller) -> None:
        task, caller.task = caller.task, cast(Any, None)  # its error would keep what its frames had
        require_obeyed(task, "caller")
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._has(caller, task.result())
        elif self.ended:
            require(isinstance(error, ShmringError), f"who waits as a session ends gets {type(error).__name__}")
        elif not isinstance(error, _MAY_BE_REFUSED.get(caller.wants, ())):
            raise error

    def _has(self, caller: Caller, result: Any) -> None:
        if caller.wants is Wants.SLOT:
            self._hold(result)
        elif caller.wants is Wants.REQUEST:
            self._was_sent(result, caller.number)
        elif result is not None and not self.ended:
            require_intact(result.payload, caller.number)
            pin = result._pin
            view = KeptView(pin.found.generation, pin.record.start, pin.record.blocks, result.payload)
            self.contents.append(HeldContent(result, view))

    # -- the end -------------------------------------------------------------------------------------------------------------

    def goodbye(self, *, replies_viewed: bool) -> None:
        """Closes in order: what this process can still reach is named."""
        if not replies_viewed:
            with self.loop.running():
                self.replies.clear()
        self._begin(Wants.FIND, 0, self.real.close())
        closing = self.callers.pop().task
        while not closing.done():
            if self.loop.ready:
                self.loop.run_next()
            else:
                self.loop.fire()  # a copy takes too long, say
        closing.result()

    def abandon(self) -> None:
        """Its process has ended: none of its code runs any more."""
        for reach in (self.held, self.views, self.replies, self.contents, self.kept_views):
            reach.clear()
        self.sent.clear()
        self.copier.abandon()
        if not self.ended:
            with self.loop.running():
                self.real.connection_lost()
        self.loop.run_all()
        self.loop.clear()
        self.callers.clear()

    def outlives(self) -> None:
        """The session is over; what callers can read of content they can still read."""
        self.kept_views += [content.view for content in self.contents]
        self.contents.clear()
        self.sent.clear()

    def check_told(self) -> None:
        """The session has ended: whoever waited in it knows, but for those whose copies go on."""
        copying = [copying.task for copying in self.copies]
        require(all(caller.task in copying for caller in self.callers), "who waits is not told of the end")

    @property
    def reach(self) -> list[list[Any]]:
        """All that code of the process may still write or read after the session's end."""
        return [self.held, self.views, self.copies, self.replies, self.kept_views]

    def let_go(self, index: int) -> None:
        """Code of the process lets something go; the engine can't hear of it."""
        for reach in self.reach:
            if index < len(reach):
                if reach is self.copies:
                    self.copied(index)
                    self.loop.run_all()
                    self.follow()
                    self.check_told()
                else:
                    del reach[index]
                return
            index -= len(reach)

    # -- breaking the rules --------------------------------------------------------------------------------------------------

    def forgeries(self, other_lease: SlotRef | None) -> dict[Forgery, Callable[[], bytes]]:
        """Returns what makes the records that must be refused: of each kind that this session can make.

        Args:
            other_lease: a place in what was lent to somebody else.
        """
        request = self._next_request
        others = (other_lease.lease_id if other_lease is not None else _NO_LEASE,)
        forgeries: dict[Forgery, Callable[[], bytes]] = {
            Forgery.OLD_EPOCH: lambda: self._forged(request, epoch=self.epoch - 1),
            Forgery.OLD_REQUEST: lambda: self._forged(request - 1),
            Forgery.RETURN_OF_ANOTHER: lambda: encode_message(LeaseReturn(others)),
            Forgery.REPLY_OF_ANOTHER: lambda: encode_message(ReplyRelease((_NO_REPLY,))),
        }
        if request == 1:
            del forgeries[Forgery.OLD_REQUEST]
        for kind, slots in self._forged_slots(other_lease):
            forgeries[kind] = functools.partial(self._forged, request, slots)
        return {kind: forgeries[kind] for kind in _FORGERIES if kind in forgeries}

    def _forged_slots(self, other_lease: SlotRef | None) -> Iterator[tuple[Forgery, tuple[SlotRef, ...]]]:
        """Yields slots of which an engine must refuse at least one."""
        fresh = (self.client_id << GENERATION_BITS) + (1 << (GENERATION_BITS - 1))
        if other_lease is not None:
            yield Forgery.LEASE_OF_ANOTHER, (_changed(other_lease, generation=fresh),)
        if not self.book.leases:
            return
        lease = list(self.book.leases.values())[-1]
        start = next((start for start, _ in lease.slots.runs()), lease.slots.start)  # where nothing else is wrong
        own = SlotRef(lease.lease_id, start * BLOCK_NBYTES, content_nbytes(1), fresh)
        yield Forgery.BEHIND_THE_LEASE, (_changed(own, offset=lease.slots.end * BLOCK_NBYTES),)
        yield Forgery.OVERLAP, (own, _changed(own, generation=fresh + 1))
        yield Forgery.GENERATION_OF_ANOTHER, (_changed(own, generation=fresh + (1 << GENERATION_BITS)),)
        if self.last_sent is not None:
            yield Forgery.OLD_GENERATION, (_changed(own, generation=self.last_sent.generation),)

    @property
    def _next_request(self) -> int:
        return self.submitted + 1

    @property
    def submitted(self) -> int:
        """Requests that were sent."""
        return cast(int, cast(Any, self.end).submitted)

    def _forged(self, request_id: int, slots: Sequence[SlotRef] = (), epoch: int | None = None) -> bytes:
        return submit_of([], None, slots, epoch=self.epoch if epoch is None else epoch, request_id=request_id)

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self, pid: int, now: float) -> Iterator[Action]:
        """Yields what its callers and its connection can do now, and what can happen in the midst of that."""
        actions = [*self._enabled(pid, now)]
        yield from actions
        if not self.midst.offers:
            return
        yield from self._enabled_as_it_looks(pid, actions)
        in_code = self.scenario.in_code
        does = [Inside(Moment.IN_CODE, *action[:4]) for action in actions if action.kind in in_code]
        if Kind.HANG_UP in in_code:
            does.append(Inside(Moment.IN_CODE, Kind.HANG_UP, pid))
        for action in actions:
            if action.kind in _PACKING:
                yield from (Action(*action[:4], inside) for inside in does)
        for index in range(len(self.held)):
            yield from (Action(Kind.TENSOR, pid, index, inside=inside) for inside in does)

    def _enabled_as_it_looks(self, pid: int, actions: Sequence[Action]) -> Iterator[Action]:
        if not self.scenario.looks:
            return
        waiting = [index for index, sent in enumerate(self.sent.items()) if not _has_come(sent[1]) and self._may_read(sent[0])]
        looking = [action for action in actions if action.kind in _LOOKING]
        looking += [Action(Kind.READ, pid, index) for index in waiting]
        for left in range(len(self.wire.to_frontend)):
            inside = Inside(Moment.LOOKING, Kind.TO_FRONTEND, pid, 1 + left)
            yield from (Action(*action[:4], inside) for action in looking)

    def _enabled(self, pid: int, now: float) -> Iterator[Action]:
        wire = self.wire
        if wire.to_frontend:
            yield Action(Kind.TO_FRONTEND, pid)
        if not wire.engine_open:
            yield Action(Kind.FRONTEND_SEES_END, pid)
        if self.loop.ready:
            yield Action(Kind.FRONTEND_TURN, pid)
        if self.loop.other_timers and self.loop.other_timers[0].when() <= now:
            yield Action(Kind.FRONTEND_TIMER, pid)
        if self.scenario.stops and self.loop.moments and self.moments != self.scenario.max_moments:
            yield Action(Kind.FRONTEND_MOMENT, pid)
        for index, caller in enumerate(self.callers):
            if not caller.task.cancelling():
                yield Action(Kind.CANCEL, pid, index)
        for index in range(len(self.copies)):
            yield Action(Kind.COPIED, pid, index)
        sending = [slot for caller in self.callers if caller.wants is Wants.REQUEST for slot in caller.slots]
        for index, holding in enumerate(self.held):
            if holding.record not in sending:  # its block goes on when it was sent
                yield Action(Kind.LEAVE, pid, index)
                yield Action(Kind.LEAVE, pid, index, 1)
        for index in range(len(self.views)):
            yield Action(Kind.VIEW_DIES, pid, index)
        for index, request_id in enumerate(self.sent):
            if self._reads(request_id):
                yield Action(Kind.READ, pid, index)
            elif self.scenario.stops and self._may_read(request_id) and self.awaited != request_id:
                yield Action(Kind.AWAIT, pid, index)
            yield Action(Kind.FORGET, pid, index)
        if self._writes:
            yield from self._enabled_messages(pid)
            yield from self._enabled_for_slots(pid)

    @property
    def _writes(self) -> bool:
        """Whether callers begin what writes: where nobody may wait for room, they do so only if there is some."""
        return self.scenario.turns_wait or self.link.can_write

    def _enabled_messages(self, pid: int) -> Iterator[Action]:
        for index in range(len(self.replies)):
            yield Action(Kind.DROP_REPLY, pid, index)
        for index in range(len(self.abortable())):
            yield Action(Kind.ABORT, pid, index)
        for index in range(len(self.contents)):
            yield Action(Kind.UNPIN, pid, index)
            yield Action(Kind.UNPIN, pid, index, 1)
        for index in range(len(self.kept_views)):
            yield Action(Kind.KEPT_VIEW_DIES, pid, index)
        scenario = self.scenario
        if not scenario.kept_blocks or (scenario.max_asks is not None and self.asks >= scenario.max_asks):
            return
        waiting = sum(caller.wants is Wants.WAIT_KEPT for caller in self.callers)
        if waiting < scenario.max_asking and len(self.contents) < scenario.max_held:
            for key in range(scenario.keys):
                yield Action(Kind.WAIT_KEPT, pid, key)
        asking = sum(caller.wants in (Wants.FIND, Wants.KEEP) for caller in self.callers)
        if asking < scenario.max_asking and len(self.contents) < scenario.max_held:
            for key in range(scenario.keys):
                yield Action(Kind.FIND, pid, key)
                for index in self.submittable():
                    yield Action(Kind.KEEP, pid, index, key)

    @property
    def wanting(self) -> int:
        """Requests that are not sent yet."""
        return sum(caller.wants is Wants.REQUEST for caller in self.callers)

    def _enabled_for_slots(self, pid: int) -> Iterator[Action]:
        scenario = self.scenario
        most = scenario.max_inflight + (_MORE_THAN_INFLIGHT if scenario.turns_wait else 0)
        may_request = len(self.end.pending) + self.wanting < most and (
            scenario.max_requests is None or self.submitted + self.wanting < scenario.max_requests
        )
        if may_request:
            held = self.submittable()
            for position, index in enumerate(held):
                yield Action(Kind.SUBMIT, pid, index)
                if position + 1 < len(held):
                    yield Action(Kind.SUBMIT, pid, index, 1)
            for content in range(len(self.contents)):
                yield Action(Kind.SEND_KEPT, pid, content)
                if held:
                    yield Action(Kind.SEND_KEPT, pid, content, 1 + held[0])
        if self.used < scenario.max_slots:
            for blocks in scenario.slot_blocks:
                yield Action(Kind.ACQUIRE, pid, blocks)
                yield Action(Kind.TRY, pid, blocks)
                if may_request:
                    yield Action(Kind.REQUEST, pid, blocks)
                    yield Action(Kind.REQUEST_NOW, pid, blocks)

    @property
    def used(self) -> int:
        """Slots that are not free, and callers that want one."""
        waiting = sum(bool(caller.detail) and caller.wants in (Wants.SLOT, Wants.REQUEST) for caller in self.callers)
        unsent = sum(self.granted(caller) is not None for caller in self.callers) + len(self.copies)
        return sum(self.book.count(state) for state in _USED) - unsent + waiting


#: What those who wait may get though nothing is wrong.
_MAY_BE_REFUSED: dict[Wants, tuple[type[Exception], ...]] = {
    Wants.FIND: (WouldBlock,),
    Wants.WAIT_KEPT: (WouldBlock,),
    Wants.KEEP: (WouldBlock, CapacityError),
}
_USED = (ClientSlot.WRITING, ClientSlot.SUBMITTED, ClientSlot.CACHED, ClientSlot.DRAINING)


def _has_come(sent: Sent) -> bool:
    return has_reply(sent.submission) or sent.submission.ended


def _changed(slot: SlotRef, *, offset: int | None = None, generation: int | None = None) -> SlotRef:
    return SlotRef(
        slot.lease_id,
        slot.offset if offset is None else offset,
        slot.nbytes,
        slot.generation if generation is None else generation,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Process:
    """A frontend's process: at most one session at a time, and views of those that have ended."""

    alive: bool = True
    pace: Pace = Pace.GOES
    session: Session | None = None
    former: list[Session] = dataclasses.field(default_factory=list)

    def enabled_by_itself(self, pid: int, now: float) -> Iterator[Action]:
        """Yields what happens in it while it has stopped or is silent."""
        if self.pace is Pace.SILENT and self.session is not None:
            for action in self.session.enabled(pid, now):
                if action.kind in _BY_ITSELF and action.inside is None:
                    yield action

    def retire(self) -> None:
        """Puts the ended session away, for as long as something of it is in reach."""
        assert self.session is not None
        self.session.check_told()
        self.session.outlives()
        self.former.append(self.session)
        self.session = None
        self.forget()

    def forget(self) -> None:
        """Forgets former sessions of which nothing is in reach."""
        self.former = [session for session in self.former if any(session.reach)]

    def crash(self) -> None:
        """Dies: the kernel closes its socket, and none of its code can reach anything."""
        self.alive = False
        for session in self.sessions():
            session.wire.close_frontend()
            session.abandon()
        self.session = None
        self.former.clear()

    def sessions(self) -> list[Session]:
        """All of which something may be in reach."""
        return self.former if self.session is None else [self.session, *self.former]
