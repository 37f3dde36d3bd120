"""Payloads that wait to be sent: for their turn, for space, for a copy, and for the engine to read.

Theory of operation: a payload that need not wait is sent by the :class:`~shmring.core.compiled.ClientEnd`, and never comes
here. Any other payload counts as in flight from its turn on. From then on it either becomes a submission, or gives back its
turn and the slot for its copy. If it has to wait for space, it gives its turn to another payload meanwhile: it may wait for
slots whose holders wait for their turn. When it has space, it gets the next turn.

Invariants: turns come in order, and a payload that is cancelled passes its turn on; a payload with a turn never waits for
space; no other code runs between the last check and sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from shmring.client.life import SessionLife
from shmring.client.submission import Submission
from shmring.core.compiled import ClientEnd, ClientSlotRecord, ForEngine, Packed
from shmring.errors import PeerLostError, WouldBlock
from shmring.gpu.cuda import Stream
from shmring.gpu.device_slots import DeviceSlots
from shmring.line import Place, WaitingLine
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.memory.slots import HostSlots
from shmring.transport.link import Link

__all__ = ["Sending"]

_READS_SLOWLY = "the engine reads more slowly than it is written to"


class _Flight:
    """Whether a payload counts as in flight, which it does from its turn on."""

    __slots__ = ("_counts", "_sending", "_waited_before")

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._counts = self._waited_before = False

    async def begin(self) -> None:
        """Waits for its turn; a payload that has had a turn before comes first."""
        if not self._sending.end.begin():
            await self._sending.turn(comes_first=self._waited_before)
        self._counts = self._waited_before = True

    def end(self) -> None:
        """Gives its turn to the next one."""
        if self._counts:
            self._counts = False
            self._sending.end.end_flight()


class Sending:
    """The payloads of one session that can't be sent at once. Lives in a loop.

    Args:
        life: of the engine.
        end, link: of the session, towards the engine.
        host_slots, device_slots: of the session.
        copier: has the turns of copies, and the threads.
        slab: that payloads are copied to.
        count_pins: returns how many kept contents the session has pinned.

    Attributes:
        end: the session's.
        copies: the slots of the copies that are being made, or wait for their turn.
    """

    def __init__(
        self,
        life: SessionLife,
        end: ClientEnd,
        link: Link,
        host_slots: HostSlots,
        device_slots: DeviceSlots,
        copier: Copier,
        slab: Slab,
        count_pins: Callable[[], int],
    ) -> None:
        self._life = life
        self.end = end
        self._link = link
        self._host_slots = host_slots
        self._device_slots = device_slots
        self._copier = copier
        self._slab = slab
        self._count_pins = count_pins
        # Lines of requests that wait until fewer are in flight. Those in the second line have space already, and come first.
        self._turns: WaitingLine[None] = WaitingLine()
        self._again: WaitingLine[None] = WaitingLine()
        self.copies: dict[asyncio.Future[None], ClientSlotRecord] = {}

    async def submit_in_turn(self, payload: object, for_engine: ForEngine) -> Submission:
        """Packs and sends a payload: waits for space, for a request's turn, and for an engine that reads."""
        # The stream of now: while this waits, another task may make another stream the current one.
        stream = self._device_slots.current_stream() if self._device_slots.held else None
        self._link.poll()  # slots that the engine has released meanwhile may be used again
        if self._copier.copied_in_turn:
            await asyncio.sleep(0)  # gives the other tasks of this loop a turn
        flight = _Flight(self)
        await flight.begin()
        try:
            while True:
                self._life.check_alive()
                packed = self.end.pack(payload, for_engine)
                submission = self._send_now(packed, stream, self._copier.at_once_nbytes)
                if submission is None:
                    submission = await self._send_in_turn(packed, stream, flight)
                if submission is not None:
                    return submission
        except BaseException:
            flight.end()
            raise

    async def turn(self, *, comes_first: bool) -> None:
        """Waits until this request may be in flight, which it then is. One that has given its turn back comes first."""
        self.end.crowded = True
        await (self._again if comes_first else self._turns).wait(lambda _: self.end.end_flight())

    def lose(self) -> list[Place[None]]:
        """The session has ended; returns the futures that tasks wait for."""
        self.end.crowded = False
        return [*self._again, *self._turns]

    def flight_ended(self) -> None:
        """Fewer requests are in flight, and others wait for that."""
        line = self._again if self._again.is_waited_in else self._turns
        if line.give_first(None):
            self.end.pass_on()
        self.end.crowded = self._again.is_waited_in or self._turns.is_waited_in

    def _send_now(self, packed: Packed, stream: Stream | None, copy_limit_nbytes: float) -> Submission | None:
        """Sends a payload that was just packed; None if it has to wait for the engine, for space, or for a long copy."""
        if not self._link.can_write or packed.slot_nbytes > copy_limit_nbytes:
            return None
        self._copier.count_in_turn(packed.slot_nbytes)
        sent: Submission | None = self.end.send_now(packed, stream)
        return sent

    async def _send_in_turn(self, packed: Packed, stream: Stream | None, flight: _Flight) -> Submission | None:
        """Sends a payload when its copy's turn has come; None if a slot that it lies in has changed hands while we waited.

        The slot is acquired after that, so that it is the one that was released last, which is still in the cache.
        """
        await self._copier.turn(packed.slot_nbytes)
        self._life.check_alive()
        submission = self._send_now(packed, stream, self._copier.offload_nbytes)
        if submission is None:
            slot = await self._space(packed.slot_nbytes, flight) if packed.slot_nbytes else None
            submission = await self._send_when_possible(packed, stream, slot)
        return submission

    async def _space(self, nbytes: int, flight: _Flight) -> ClientSlotRecord:
        """Waits for a slot to copy a payload to; and then, if it took waiting, for the payload's turn again."""
        slot = self._host_slots.book.acquire(nbytes, held=False)
        if slot is not None:
            return slot
        flight.end()
        slot = await self._host_slots.acquire(nbytes, held=False)
        try:
            await flight.begin()
            self._life.check_alive()
        except BaseException:
            self._host_slots.give_up(slot)
            raise
        return slot

    async def _send_when_possible(
        self, packed: Packed, stream: Stream | None, slot: ClientSlotRecord | None
    ) -> Submission | None:
        """Sends a payload; None if a slot that it lies in has changed hands while we waited.

        Args:
            slot: to copy it to, if it needs one; given back if it is not sent.
        """
        submission: Submission | None = None
        try:
            if slot is not None:
                await self.copy(packed, slot)
            while submission is None and all(record.is_submittable() for record in packed.slots):
                await self.writable()
                self._life.check_alive()
                submission = self.end.send(packed, slot, stream)
                if submission is None and self._link.can_write:
                    self._link.expect_space()
            return submission
        finally:
            if slot is not None and submission is None:
                self._host_slots.give_up(slot)

    async def copy(self, packed: Packed, slot: ClientSlotRecord) -> None:
        """Copies a payload into a slot; for :meth:`Session.close` to know of."""
        copying = self._life.loop.create_future()
        self.copies[copying] = slot
        try:
            await self._copier.copy(packed, self._slab.mapping, self.end.content_address(slot))
        finally:
            del self.copies[copying]
            copying.set_result(None)

    async def writable(self) -> None:
        """Waits while the engine reads more slowly than it is written to."""
        with contextlib.suppress(PeerLostError):  # the session says why
            await self._link.drain()

    # -- without waiting -----------------------------------------------------------------------------------------------------

    def submit_nowait(self, payload: object, for_engine: ForEngine, *, ask: bool) -> Submission:
        """Sends a payload if nothing has to be waited for, else raises; the copy is made here, and on no other thread."""
        self._begin_nowait()
        try:
            return self._send_nowait(self.end.pack(payload, for_engine), ask=ask)
        except BaseException:
            self.end.end_flight()
            raise

    async def submit_unless_full(self, payload: object, for_engine: ForEngine, *, ask: bool) -> Submission:
        """Sends a payload if there is space and a turn for it now. A long copy is made on a thread: others use the loop."""
        self._begin_nowait()
        try:
            packed = self.end.pack(payload, for_engine)
            if packed.slot_nbytes <= self._copier.offload_nbytes:
                return self._send_nowait(packed, ask=ask)
            slot = self._host_slots.acquire_nowait(packed.slot_nbytes, held=False, ask=ask)
            submission = await self._send_when_possible(packed, None, slot)
            if submission is None:
                raise WouldBlock("a slot that the payload lies in was submitted by somebody else while the rest was copied")
            return submission
        except BaseException:
            self.end.end_flight()
            raise

    def _begin_nowait(self) -> None:
        """A request is in flight from here on; raises if it would have to wait for that, or for the engine."""
        self._life.check_alive()
        self._link.poll()
        self._life.check_alive()  # a record may have ended the session
        if not self.end.begin():
            limit = self._life.welcome.max_inflight
            raise WouldBlock(f"{limit} requests are in flight, the engine takes no more (max_inflight)")
        if not self._link.can_write:
            self.end.end_flight()
            raise WouldBlock(_READS_SLOWLY)

    def _send_nowait(self, packed: Packed, *, ask: bool) -> Submission:
        submission = self._send_now(packed, None, math.inf)
        if submission is None and self.end.found_full:
            self._link.expect_space()
            raise WouldBlock(_READS_SLOWLY)
        if submission is None:
            raise self._host_slots.no_space(packed.slot_nbytes, ask=ask)
        return submission

    # -- what is waited for ----------------------------------------------------------------------------------------------------

    def why_not_sent(self) -> str:
        """Says for what an unsent payload, or a caller that wants a slot, is waiting."""
        reasons = []
        if any(slots.book.waiting for slots in (self._host_slots, self._device_slots)):
            reasons.append(self._why_no_space())
        if self._turns.is_waited_in or self._again.is_waited_in:
            reasons.append(
                f"its turn: {self.end.in_flight} requests are in flight, and the engine takes no more (max_inflight)"
            )
        if not reasons and not self._link.can_write:
            reasons.append(f"room in the message ring: {_READS_SLOWLY}")
        return "; or ".join(reasons) or "a copy of its tensors, which waits behind others"

    def _why_no_space(self) -> str:
        book = self._host_slots.book
        reason = f"space: {book.free_nbytes} of the {book.leased_nbytes} bytes that this client has leased are free"
        kept_nbytes = book.draining_nbytes()
        if kept_nbytes:
            reason += f", {kept_nbytes} bytes of slots that were left are kept by living views of them"
        pins = self._count_pins()
        if len(self.end.held) > pins:  # kept content is in the list, too
            reason += f", callers hold {len(self.end.held) - pins} slots"
        if pins:
            reason += f", {pins} kept contents are pinned (leave what find() and keep() have returned, and drop views of it)"
        return f"{reason}; the engine leases out what no other client uses or has pinned"
