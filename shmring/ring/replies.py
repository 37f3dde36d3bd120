"""Replies that wait: for space in the reply reserve, and for a frontend to read.

Theory of operation: a reply's tensors are copied to a slot of the reserve, unless they are few enough to travel in the message.
The slot is the engine's until the record that names it was written, and then its frontend's. Replies that wait for a slot stand
in line in the book.

Invariant: a slot whose reply is not sent goes back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import numpy as np

from shmring.core.compiled import BaseClaim, EngineEnd, Packed
from shmring.core.effects import EngineEffect, ReplySlot
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.messages import COPY_OUT, SLOT_HEADER_NBYTES, SlotRef
from shmring.errors import PeerLostError, WouldBlock
from shmring.line import Line, Place, give
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.memory.tensors import make_packer
from shmring.ring.life import Life
from shmring.transport.link import Link

__all__ = ["Replies"]


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
        life: Life,
        end: EngineEnd,
        geometry: Geometry,
        slab: Slab,
        copier: Copier,
        carry_out: Callable[[list[EngineEffect]], None],
    ) -> None:
        config = life.config
        self._life = life
        self._end = end
        self._book = end.book
        self._reserve_nbytes = geometry.reply_nbytes
        self._slab = slab
        self._copier = copier
        self._carry_out = carry_out
        self._packer = make_packer(config.max_tensors, int(config.max_payload_nbytes), config.max_values)
        self._inline_nbytes = int(config.inline_nbytes)
        self._line: Line[ReplySlot] = Line()

    def __len__(self) -> int:
        """How many wait for space."""
        return len(self._line)

    async def send(self, claim: BaseClaim, payload: object) -> None:
        """Sends a reply, waiting for space. See :meth:`Claim.reply`."""
        await self._send(claim, self._pack(claim, payload), self._end.send_reply)

    async def send_last(self, claim: BaseClaim, payload: object) -> None:
        """Sends a reply, waiting for space, and ends the request in the same message. See :meth:`Claim.done`."""
        await self._send(claim, self._pack(claim, payload), self._end.finish_with)

    async def _send(self, claim: BaseClaim, packed: Packed, send: Callable[[BaseClaim, Packed, SlotRef | None], bool]) -> None:
        frontend = self._end.frontend_of(claim)
        link = frontend.link
        if frontend.is_local:
            await self._copier.copy(packed, self._slab.mapping, _own_content(packed))
        slot = await self._acquire(claim, packed.slot_nbytes) if packed.slot_nbytes and not frontend.is_local else None
        sent = False
        try:
            self._end.check_running(claim)
            if slot is not None:
                await self._copier.copy(packed, self._slab.mapping, self._slab.address + _content_start(slot))
            await self._writable(claim, link)
            while not (sent := send(claim, packed, self._ref(packed, slot))):
                link.expect_space()
                await self._writable(claim, link)
        finally:
            if slot is not None and not sent:
                self._carry_out(self._book.discard_reply(claim.client_id, slot.generation))

    async def _writable(self, claim: BaseClaim, link: Link) -> None:
        """Waits while the frontend reads more slowly than it is written to; a claim may have ended meanwhile."""
        with contextlib.suppress(PeerLostError):  # then the claim is aborted
            await link.drain()
        self._end.check_running(claim)

    def send_nowait(self, claim: BaseClaim, payload: object) -> None:
        """Sends a reply if nothing has to be waited for. See :meth:`Claim.reply_nowait`."""
        packed = self._pack(claim, payload)
        would_block = WouldBlock(f"client {claim.client_id} reads more slowly than it is written to")
        frontend = self._end.frontend_of(claim)
        if not frontend.link.can_write:
            raise would_block
        if frontend.is_local:
            packed.copy_into(_own_content(packed))
            self._end.send_reply(claim, packed, None)
            return
        slot = self._book.acquire_reply(claim.client_id, packed.slot_nbytes) if packed.slot_nbytes else None
        if slot is None and packed.slot_nbytes:
            raise WouldBlock(f"no {packed.slot_nbytes} bytes of reply space are free")
        sent = False
        try:
            if slot is not None:
                self._copier.count_in_turn(packed.slot_nbytes)
                packed.copy_into(self._slab.address + _content_start(slot))
            sent = self._end.send_reply(claim, packed, self._ref(packed, slot))
            if not sent:
                raise would_block
        finally:
            if slot is not None and not sent:
                self._carry_out(self._book.discard_reply(claim.client_id, slot.generation))

    def _ref(self, packed: Packed, slot: ReplySlot | None) -> SlotRef | None:
        """Describes a reply's slot.

        A caller may keep all its replies, and wait for more. So views of them must never hold all of the reserve.
        """
        if slot is None:
            return None
        is_short = self._book.reply_free_nbytes < self._reserve_nbytes // 2
        lease_id = COPY_OUT if is_short else 0
        return SlotRef(lease_id, slot.start * BLOCK_NBYTES, packed.slot_nbytes, slot.generation)

    def _pack(self, claim: BaseClaim, payload: object) -> Packed:
        self._life.check_open()
        packed = self._packer.pack(payload, self._inline_nbytes, self._life.record_nbytes)
        self._end.check_running(claim)  # the payload's own code may have ended it
        return packed

    async def _acquire(self, claim: BaseClaim, nbytes: int) -> ReplySlot:
        slot = self._book.acquire_reply(claim.client_id, nbytes)
        if slot is not None:
            return slot
        self._life.check_loop()
        place = self._line.enter()
        self._book.queue_reply(claim.client_id, place, nbytes)
        give_up = functools.partial(self._give_up, place, claim)
        self._end.call_on_end(claim, give_up)
        try:
            return await self._line.stay(place, self._discard, self._gave_up_waiting)
        finally:
            self._end.forget_on_end(claim, give_up)
            del place, give_up

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


def _own_content(packed: Packed) -> int:
    """Makes memory for a reply to a frontend of this process, which has no slots; returns its address."""
    nbytes = max(packed.slot_nbytes, packed.region_nbytes)
    if not nbytes:
        return 0
    packed.content = np.zeros(nbytes, np.uint8)  # zeros: between the tensors stand no old bytes
    return int(packed.content.ctypes.data)


def _content_start(slot: ReplySlot) -> int:
    return slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES
