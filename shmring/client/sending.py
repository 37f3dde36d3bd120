"""Payloads on their way to the engine, and what they wait for: their turn, space, a copy, and an engine that reads.

Theory of operation: what can be sent at once is sent by the :class:`~shmring.core.client_end.ClientEnd`, and never comes
here. Any other payload counts as in flight from its turn on. From then on it either becomes a submission, or gives everything
back: its turn, and the slot that it was to be copied to.

Invariants: turns come in order, and one that is cancelled passes its turn on; nothing is sent between looking and sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING

from shmring.client.submission import Submission
from shmring.core.client_book import ClientSlotRecord
from shmring.core.payload import Packed
from shmring.errors import PeerLostError, WouldBlock
from shmring.gpu.cuda import Stream
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab

if TYPE_CHECKING:
    from shmring.client.session import Session

__all__ = ["Sending"]

_READS_SLOWLY = "the engine reads more slowly than it is written to"


class Sending:
    """What one session has to send, and can't send at once. Lives in a loop.

    Args:
        session: that it is part of.
        copier: has the turns of copies, and the threads.
        slab: that payloads are copied to.

    Attributes:
        copies: the slots of the copies that are being made, or wait for their turn.
    """

    def __init__(self, session: Session, copier: Copier, slab: Slab) -> None:
        self._session = session
        self._end = session.end
        self._link = session.link
        self._host_slots = session.host_slots
        self._device_slots = session.device_slots
        self._copier = copier
        self._slab = slab
        self._turns: deque[asyncio.Future[None]] = deque()  # of requests that wait until fewer are in flight
        self.copies: dict[asyncio.Future[None], ClientSlotRecord] = {}

    async def submit(self, payload: object, name: str) -> Submission:
        """Packs and sends a payload, waiting for space, for a request's turn, and for an engine that reads."""
        # Of now: while this waits, another task may make another stream the current one.
        stream = self._device_slots.current_stream() if self._device_slots.held else None
        self._link.poll()  # what the engine has released meanwhile may be used again
        if self._copier.copied_in_turn:
            await asyncio.sleep(0)  # the turn of whoever else is in this loop
        if not self._end.begin():
            await self._turn()
        try:
            while True:
                self._session.check_alive()
                packed, in_place = self._end.pack(payload)
                submission = self._send_now(packed, in_place, name, stream, self._copier.at_once_nbytes)
                if submission is None:
                    submission = await self._send_in_turn(packed, in_place, name, stream)
                if submission is not None:
                    return submission
        except BaseException:
            self._end.leave()
            raise

    async def _turn(self) -> None:
        """Waits until this request may be in flight, which it then is."""
        turn = self._session.loop.create_future()
        self._turns.append(turn)
        self._end.crowded = True
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end.leave()  # its turn came as it was cancelled: the next one's
            raise

    def request_left(self) -> None:
        """For the end: fewer requests are in flight, and others wait for that."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():  # else it was cancelled
                self._end.pass_on()
                turn.set_result(None)
                break
        self._end.crowded = bool(self._turns)

    def _send_now(
        self, packed: Packed, in_place: list[ClientSlotRecord], name: str, stream: Stream | None, copy_limit_nbytes: float
    ) -> Submission | None:
        """Sends what was just packed; None if something has to be waited for: the engine, space, or a long copy."""
        if not self._link.can_write or packed.slot_nbytes > copy_limit_nbytes:
            return None
        self._copier.count_in_turn(packed.slot_nbytes)
        sent: Submission | None = self._end.send_now(packed, in_place, name, stream)
        return sent

    async def _send_in_turn(
        self, packed: Packed, in_place: list[ClientSlotRecord], name: str, stream: Stream | None
    ) -> Submission | None:
        """Sends a payload when its copy's turn has come; None if a slot that it lies in has changed hands while we waited.

        The slot is taken after that, so that it is the one that was released last, which is still in the cache.
        """
        await self._copier.turn(packed.slot_nbytes)
        self._session.check_alive()
        submission = self._send_now(packed, in_place, name, stream, self._copier.offload_nbytes)
        if submission is None:
            submission = await self._send_when_possible(packed, in_place, name, stream)
        return submission

    async def _send_when_possible(
        self,
        packed: Packed,
        in_place: list[ClientSlotRecord],
        name: str,
        stream: Stream | None,
        slot: ClientSlotRecord | None = None,
    ) -> Submission | None:
        """Sends a payload; None if a slot that it lies in has changed hands while we waited for space.

        Args:
            slot: to copy it to, if there is one already.
        """
        if packed.slot_nbytes and slot is None:
            slot = await self._host_slots.acquire(packed.slot_nbytes, held=False)
        submission: Submission | None = None
        try:
            if slot is not None:
                await self.copy(packed, slot)
            while submission is None and all(record.is_submittable() for record in in_place):
                await self.writable()
                self._session.check_alive()
                submission = self._end.send(packed, in_place, slot, name, stream)
                if submission is None and self._link.can_write:
                    self._link.expect_space()
            return submission
        finally:
            if slot is not None and submission is None:
                self._host_slots.give_up(slot)

    async def copy(self, packed: Packed, slot: ClientSlotRecord) -> None:
        """Copies a payload into a slot; for :meth:`Session.close` to know of."""
        copying = self._session.loop.create_future()
        self.copies[copying] = slot
        try:
            await self._copier.copy(packed, self._slab.mapping, self._end.content_address(slot))
        finally:
            del self.copies[copying]
            copying.set_result(None)

    async def writable(self) -> None:
        """Waits while the engine reads more slowly than it is written to."""
        with contextlib.suppress(PeerLostError):  # the session says why
            await self._link.drain()

    # -- without waiting -----------------------------------------------------------------------------------------------------

    def submit_nowait(self, payload: object, name: str, *, ask: bool) -> Submission:
        """Sends a payload if nothing has to be waited for; the copy is made in the loop."""
        self._begin_nowait()
        try:
            packed, in_place = self._end.pack(payload)
            return self._send_nowait(packed, in_place, name, ask=ask)
        except BaseException:
            self._end.leave()
            raise

    async def submit_unless_full(self, payload: object, name: str, *, ask: bool) -> Submission:
        """As :meth:`submit_nowait`, for a loop that several threads wait for: a long copy is made on a thread."""
        self._begin_nowait()
        try:
            packed, in_place = self._end.pack(payload)
            if packed.slot_nbytes <= self._copier.offload_nbytes:
                return self._send_nowait(packed, in_place, name, ask=ask)
            slot = self._host_slots.acquire_nowait(packed.slot_nbytes, held=False, ask=ask)
            submission = await self._send_when_possible(packed, in_place, name, None, slot)
            if submission is None:
                raise WouldBlock("a slot that the payload lies in was submitted by somebody else while the rest was copied")
            return submission
        except BaseException:
            self._end.leave()
            raise

    def _begin_nowait(self) -> None:
        """A request is in flight from here on; raises if it would have to wait for that, or for the engine."""
        self._session.check_alive()
        self._link.poll()
        self._session.check_alive()  # what came may have been its end
        if not self._end.begin():
            limit = self._session.welcome.max_inflight
            raise WouldBlock(f"{limit} requests are in flight, the engine takes no more (max_inflight)")
        if not self._link.can_write:
            self._end.leave()
            raise WouldBlock(_READS_SLOWLY)

    def _send_nowait(self, packed: Packed, in_place: list[ClientSlotRecord], name: str, *, ask: bool) -> Submission:
        submission = self._send_now(packed, in_place, name, None, math.inf)
        if submission is None and self._end.found_full:
            self._link.expect_space()
            raise WouldBlock(_READS_SLOWLY)
        if submission is None:
            raise self._host_slots.no_space(packed.slot_nbytes, ask=ask)
        return submission

    # -- what is waited for ----------------------------------------------------------------------------------------------------

    def why_not_sent(self) -> str:
        """Says what somebody waits for who has a payload to send, or wants a slot."""
        if any(slots.book.waiting for slots in self._session.slots):
            book = self._host_slots.book
            reason = f"space: {book.free_nbytes} of the {book.leased_nbytes} bytes that this client has leased are free"
            kept_nbytes = book.draining_nbytes()
            if kept_nbytes:
                reason += f", {kept_nbytes} bytes of slots that were left are kept by living views of them"
            pins = len(self._session.kept)
            if len(self._end.held) > pins:  # what is kept stands there, too
                reason += f", callers hold {len(self._end.held) - pins} slots"
            if pins:
                reason += (
                    f", {pins} kept contents are pinned (leave what find() and keep() have returned, and drop views of it)"
                )
            return f"{reason}; the engine leases out what no other client uses or has pinned"
        if self._turns:
            return f"its turn: {self._end.in_flight} requests are in flight, and the engine takes no more (max_inflight)"
        if not self._link.can_write:
            return f"room in the message ring: {_READS_SLOWLY}"
        return "a copy of its tensors, which waits behind others"
