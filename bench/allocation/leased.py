"""Shmring's allocation as a whole: the engine's book leases ranges to frontends, whose books place slots in them.

Both are the books that run in production, without the processes around them: what one wants to send goes to the other at
once. A slot finds no place when its frontend would have to wait: for another's slots, for a lease that has been recalled, or
for its quota. Slots are requested by the frontends in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shmring.config import ClientConfig, RingConfig
from shmring.core import effects
from shmring.core.compiled import ClientBook, ClientSlotRecord, EngineBook
from shmring.core.geometry import BLOCK_NBYTES, ClientBookLimits, EngineBookLimits, Geometry
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseRequest
from shmring.ring.limits import MAX_LEASES

_ARRIVALS_PER_S = 50  # so that what was empty for ``lease_idle_s`` goes back in the course of a trace


class Leased:
    """A :class:`~bench.allocation.measures.Policy` made of a ledger of so many blocks and the books of its frontends."""

    def __init__(self, length: int, frontends: int) -> None:
        ring, client = RingConfig(), ClientConfig()
        self.ledger = EngineBook(
            Geometry(length, reply_blocks=1),
            EngineBookLimits(
                max_lease_blocks=max(1, length // 8),  # as ``RingConfig`` says of None
                quota_blocks=max(1, length * 3 // 4),
                max_leases=MAX_LEASES,
                max_inflight=ring.max_inflight,
            ),
        )
        self.books: dict[int, ClientBook] = {}
        self.slots: dict[int, tuple[ClientBook, int, ClientSlotRecord]] = {}  # by first block
        self.tickets = itertools.count(1)
        self.arrivals = 0
        for client_id in range(1, frontends + 1):
            grant = self.ledger.connect(client_id, int(client.lease_nbytes))
            self.books[client_id] = ClientBook(
                ClientBookLimits(
                    client_id=client_id,
                    leasable_nbytes=length * BLOCK_NBYTES,
                    max_leases=MAX_LEASES,
                    lease_nbytes=int(client.lease_nbytes),
                    lease_idle_s=client.lease_idle_s,
                )
            )
            if grant is not None:
                self._reach(effects.Granted(client_id, grant))

    def allocate(self, length: int) -> int | None:
        client_id = self.arrivals % len(self.books) + 1
        self.arrivals += 1
        book, nbytes = self.books[client_id], length * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        self._follow(client_id, book.expire(self._now()))
        slot = book.acquire(nbytes, held=False)
        if slot is None:  # queues for one, and gives up if all that follows does not bring it
            ticket = next(self.tickets)
            slot = self._follow(client_id, book.queue(ticket, nbytes, held=False))
            if slot is None:
                self._follow(client_id, book.cancel(ticket))
                return None
        assert slot.blocks == length
        self.slots[slot.start] = (book, client_id, slot)
        return slot.start

    def free(self, start: int, length: int) -> None:
        book, client_id, slot = self.slots.pop(start)
        self._follow(client_id, book.give_up(slot, self._now()))

    def _now(self) -> float:
        return self.arrivals / _ARRIVALS_PER_S

    def _follow(self, client_id: int, caused: Sequence[effects.ClientEffect]) -> ClientSlotRecord | None:
        """Carries out what a frontend causes, and all that follows; returns the slot that somebody waited for."""
        acquired = None
        for effect in caused:
            if isinstance(effect, effects.Acquired):
                acquired = effect.slot
                continue
            if isinstance(request := effect.message, LeaseRequest):
                answers = self.ledger.request_lease(client_id, request)
            else:
                answers = self.ledger.return_leases(client_id, request.lease_ids)
            for answer in answers:
                acquired = self._reach(answer) or acquired
        return acquired

    def _reach(self, effect: effects.EngineEffect) -> ClientSlotRecord | None:
        """Carries out what the engine causes at a frontend, likewise."""
        match effect:
            case effects.Granted(client_id, grant):
                return self._follow(client_id, self.books[client_id].granted(grant, self._now()))
            case effects.Recalled(client_id, lease_ids):
                return self._follow(client_id, self.books[client_id].recalled(lease_ids))
        raise AssertionError(f"nothing of this causes {effect}")
