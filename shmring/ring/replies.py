"""Replies that wait: for space in the reply reserve, and for a frontend to read.

Theory of operation: a reply that need not wait is sent by the :class:`~shmring.core.compiled.EngineEnd`, and never comes here.
A reply's tensors are copied to a slot of the reserve, unless they are few enough to travel in the message. The slot is the
engine's until the record that names it was written, and then its frontend's. Replies that wait for a slot stand in line in the
book, which says how much of the reserve a frontend may have.

A reply that waits holds nothing that others need: its handler has given its place up (``waits.py``), and a reply that finds no
room for 50 ms lets smaller ones pass.

Invariant: a slot whose reply is not sent goes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from shmring.core.compiled import BaseClaim, EngineEnd, Packed, reply_ref
from shmring.core.effects import EngineEffect, ReplySlot
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.messages import SLOT_HEADER_NBYTES
from shmring.errors import PeerLostError
from shmring.line import Place, WaitingLine, give
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.ring.injecting import Unread
from shmring.ring.life import RingLife
from shmring.ring.waits import Waits
from shmring.transport.link import Link

__all__ = ["Replies", "link_of"]


class Replies:
    """The replies that an engine sends. Lives in a loop.

    Args:
        life, end: of their engine.
        geometry: of the slab.
        slab: that they are copied to.
        copier: has the turns of copies, and the threads.
        carry_out: carries effects of the book out.
    """

    def __init__(
        self,
        life: RingLife,
        end: EngineEnd,
        geometry: Geometry,
        slab: Slab,
        copier: Copier,
        carry_out: Callable[[list[EngineEffect]], None],
    ) -> None:
        self._life = life
        self._end = end
        self._book = end.book
        self._slab = slab
        self._copier = copier
        self._carry_out = carry_out
        self._line: WaitingLine[ReplySlot] = WaitingLine()
        self._waits = Waits(life, self._describe, self._let_overtake)
        self._reserve_nbytes = geometry.reply_nbytes

    def __len__(self) -> int:
        """How many wait for space."""
        return len(self._line)

    async def send_in_turn(self, claim: BaseClaim, packed: Packed, is_last: bool) -> None:
        """Sends a reply that the end can't send at once; the last one ends the request in the same message.

        While it waits for the frontend, a handler of ``ring.run`` has no place; afterwards it has one.
        """
        send = self._end.finish_with if is_last else self._end.send_reply
        frontend = self._end.frontend_of(claim)
        link = link_of(frontend, claim)
        try:
            self._end.check_running(claim)  # the payload's code may have ended it, or the last reply, which released its slots
            if frontend.is_local:
                await self._copier.copy(packed, self._slab.mapping, _own_content(packed))
            slot = await self._acquire(claim, packed.slot_nbytes) if packed.slot_nbytes and not frontend.is_local else None
            sent = False
            try:
                self._end.check_running(claim)
                if slot is not None:
                    await self._copier.copy(packed, self._slab.mapping, self._slab.address + _content_start(slot))
                await self._writable(claim, link)
                while not (sent := send(claim, packed, reply_ref(packed, slot))):
                    link.expect_space()
                    await self._writable(claim, link)
            finally:
                if slot is not None and not sent:
                    self._carry_out(self._book.discard_reply(claim.client_id, slot.generation))
        except Exception:
            await self._waits.take_place_again(claim)
            raise
        await self._waits.take_place_again(claim)

    async def _writable(self, claim: BaseClaim, link: Link | Unread) -> None:
        """Waits while the frontend reads more slowly than it is written to; a claim may have ended meanwhile."""
        try:
            if link.can_write:
                await link.drain()
            else:
                with self._waits.of(claim):
                    await link.drain()
        except PeerLostError:
            pass  # the claim is aborted
        self._end.check_running(claim)

    def send_local_nowait(self, claim: BaseClaim, packed: Packed) -> bool:
        """Sends a reply to a frontend of this process, if it has room for it."""
        if not link_of(self._end.frontend_of(claim), claim).can_write:
            return False
        packed.copy_into(_own_content(packed))
        return self._end.send_reply(claim, packed, None)

    async def _acquire(self, claim: BaseClaim, nbytes: int) -> ReplySlot:
        slot = self._book.acquire_reply(claim.client_id, nbytes, claim.request_id)
        if slot is not None:
            return slot
        self._life.home.check_loop()
        place = self._line.enter()
        self._book.queue_reply(claim.client_id, place, nbytes, claim.request_id)
        give_up = functools.partial(self._give_up, place, claim)
        self._end.call_on_end(claim, give_up)
        try:
            with self._waits.of(claim):
                return await self._line.stay(place, self._discard, self._gave_up_waiting)
        finally:
            self._end.forget_on_end(claim, give_up)
            del place, give_up

    def _let_overtake(self, may_overtake: bool) -> None:
        self._carry_out(self._book.let_overtake(may_overtake))

    def _describe(self, client_id: int) -> str:
        """Says which client keeps replies waiting, and how much of the reserve it has."""
        record = self._book.clients.get(client_id)
        held_nbytes = 0 if record is None else record.reply_blocks * BLOCK_NBYTES
        return f"{held_nbytes} of the {self._reserve_nbytes} bytes for replies (reply_nbytes)"

    def _give_up(self, place: Place[ReplySlot], claim: BaseClaim) -> None:
        if not place.done():
            place.set_exception(self._life.ended_error(claim))

    def granted(self, place: Place[ReplySlot], slot: ReplySlot) -> list[EngineEffect]:
        """A waiting reply has its slot; returns the effects that follow."""
        return [] if give(place, slot) else self._discarded(slot)

    def _gave_up_waiting(self, place: Place[ReplySlot]) -> None:
        self._carry_out(self._book.cancel_reply(place))

    def _discard(self, slot: ReplySlot) -> None:
        self._carry_out(self._discarded(slot))

    def _discarded(self, slot: ReplySlot) -> list[EngineEffect]:
        client_id = next(c.client_id for c in self._book.clients.values() if slot.generation in c.replies)
        return self._book.discard_reply(client_id, slot.generation)


def link_of(frontend: Any, claim: BaseClaim) -> Link | Unread:
    """What says whether a frontend reads as fast as it is written to."""
    return frontend.unread_of(claim.request_id) if frontend.is_local else frontend.link  # type: ignore[no-any-return]


def _own_content(packed: Packed) -> int:
    """Makes memory for a reply to a frontend of this process, which has no slots; returns its address."""
    nbytes = max(packed.slot_nbytes, packed.region_nbytes)
    if not nbytes:
        return 0
    packed.content = np.zeros(nbytes, np.uint8)  # zeros: between the tensors stand no old bytes
    return int(packed.content.ctypes.data)


def _content_start(slot: ReplySlot) -> int:
    return slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES
