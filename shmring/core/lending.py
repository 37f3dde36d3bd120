"""Lending one memory out in ranges: who asks for one, who holds one, and for whom a range is kept.

A client has at most one request waiting in each memory. Requests are served in order of arrival, which is round robin over
clients. The first that can't be served gets a *window*: the address range that is cheapest to empty (its leases are recalled),
closed to every other client until the request is granted or withdrawn. So small requests go on beside a large one, but can't
overtake it for ever.

The slab is lent by the :class:`~shmring.core.ledger.Ledger` itself, a device slab by a lending beside it. Both count blocks in
one address space, so where a lease starts says which memory it is of.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from shmring.core.blocks import RunAllocator, TakenRuns
from shmring.core.effects import Effect, Granted, Recalled
from shmring.core.geometry import BLOCK_NBYTES, LedgerLimits, blocks_for
from shmring.core.messages import LeaseGrant, Memory
from shmring.core.records import ClientRecord, LeaseRecord, LeaseWant, Window
from shmring.core.states import LEASE, Lease, LeaseEvent, advance
from shmring.errors import RemoteProtocolError

__all__ = ["Lending"]


class Lending:
    """The leases of one memory. Every method is one event, or a part of one; effects are the caller's next duty, in order.

    Args:
        clients: of the engine, by id; shared by all of its lendings.
        limits: bounds per client, in this memory.
        start, blocks: the range that is lent out, in blocks of the address space.
        first_lease_id: where its lease ids begin; those of two memories must not meet.
    """

    memory: Memory = 0

    def __init__(
        self, clients: dict[int, ClientRecord], limits: LedgerLimits, start: int, blocks: int, *, first_lease_id: int
    ) -> None:
        self.clients = clients
        self.limits = limits
        self._free = RunAllocator(start, blocks)
        self._wants: dict[int, LeaseWant] = {}  # by client, in order of arrival
        self._window: Window | None = None
        self._next_lease_id = first_lease_id

    @property
    def free_nbytes(self) -> int:
        """Bytes that can be lent out and that nobody holds."""
        return self._free.free_units * BLOCK_NBYTES

    @property
    def waiting_lease_requests(self) -> int:
        """Clients that wait for a lease."""
        return len(self._wants)

    def leased_nbytes(self, state: Lease) -> int:
        """Bytes in leases of this state."""
        return sum(lease.blocks for lease in self._lent() if lease.state is state) * BLOCK_NBYTES

    def has(self, lease: LeaseRecord) -> bool:
        """Whether a lease is of this memory."""
        return self._free.start <= lease.start < self._free.end

    def ask(self, client_id: int, token: int, nbytes: int, preferred_nbytes: int) -> list[Effect]:
        """A client asks for a lease; it replaces what the client asked for before, and 0 bytes withdraw that.

        Raises:
            RemoteProtocolError: it asks for more than can ever be granted.
        """
        if nbytes == 0:
            self._withdraw(client_id)
            return self.serve()
        blocks = blocks_for(nbytes)
        if blocks > self._free.length:
            raise RemoteProtocolError(f"a lease of {nbytes} bytes was requested of {self._free.length * BLOCK_NBYTES}")
        if self._window is not None and self._window.client_id == client_id and self._window.blocks != blocks:
            self._window = None
        preferred = min(max(blocks, blocks_for(preferred_nbytes)), self._free.length)
        self._wants[client_id] = LeaseWant(token, blocks, preferred)
        return self.serve()

    def forget(self, client_id: int) -> None:
        """A client has gone: it waits for nothing, and the window is chosen again, as it may rest on a lease of that client."""
        self._wants.pop(client_id, None)
        self._window = None

    def take_back(self, client: ClientRecord, lease: LeaseRecord) -> None:
        """Frees a lease's blocks. The caller must then serve those that wait for blocks."""
        del client.leases[lease.lease_id]
        client.leased_blocks[self.memory] -= lease.blocks
        self._free.free(lease.start, lease.blocks)

    def lend(self, client: ClientRecord, token: int, start: int, blocks: int) -> LeaseGrant:
        """Writes a lease down whose blocks are taken; returns what its holder is told."""
        lease = LeaseRecord(
            lease_id=self._next_lease_id,
            start=start,
            blocks=blocks,
            state=advance(LEASE, Lease.FREE, LeaseEvent.GRANT),
            live=TakenRuns(),
        )
        self._next_lease_id += 1
        client.leases[lease.lease_id] = lease
        client.leased_blocks[self.memory] += blocks
        return LeaseGrant(token, lease.lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)

    def serve(self) -> list[Effect]:
        """Grants what can be granted, in order of arrival; opens a window for the first that can't."""
        effects: list[Effect] = []
        while True:
            for client_id, want in list(self._wants.items()):
                client = self.clients[client_id]
                if self._is_over_quota(client, want.blocks):
                    # It waits for what its own client returns, so nobody else waits for it.
                    if self._close_window(client_id):
                        break
                elif (taken := self._take_run(client, want)) is not None:
                    effects.append(Granted(client_id, self.lend(client, want.token, *taken)))
                    if self._withdraw(client_id):
                        break
                elif self._window is None:
                    effects += self._open_window(client_id, want.blocks)
            else:
                return effects
            # A window was closed: begin again with the first, whom it may have kept out.

    def _withdraw(self, client_id: int) -> bool:
        self._wants.pop(client_id, None)
        return self._close_window(client_id)

    def _close_window(self, client_id: int) -> bool:
        """Closes the client's window; returns whether it had one."""
        if self._window is None or self._window.client_id != client_id:
            return False
        self._window = None
        return True

    def _is_over_quota(self, client: ClientRecord, blocks: int) -> bool:
        """Whether the client must first return something. Alone it may hold everything; one lease it may always hold."""
        if sum(self.has(lease) for lease in client.leases.values()) >= self.limits.max_leases:
            return True
        held = client.leased_blocks[self.memory]
        alone = sum(other.connected or bool(other.leases) for other in self.clients.values()) == 1
        return not alone and held > 0 and held + blocks > self.limits.quota_blocks

    def _take_run(self, client: ClientRecord, want: LeaseWant) -> tuple[int, int] | None:
        """Takes a run for a want from the free list, outside the window of anybody else."""
        for blocks in dict.fromkeys((want.preferred_blocks, want.blocks)):
            if self._is_over_quota(client, blocks):
                continue  # what it needs is within its quota, what it would prefer is not
            if self._window is None or self._window.client_id == client.client_id:
                start = self._free.allocate(blocks)
            else:
                start = self._allocate_outside(self._window, blocks)
            if start is not None:
                return start, blocks
        return None

    def _allocate_outside(self, window: Window, blocks: int) -> int | None:
        pieces: list[tuple[int, int]] = []
        for start, length in self._free.runs():
            if not window.overlaps(start, start + length):
                pieces.append((length, start))
                continue
            pieces += [(window.start - start, start), (start + length - window.end, window.end)]
        fitting = [(length, start) for length, start in pieces if length >= blocks]
        if not fitting:
            return None
        start = min(fitting)[1]
        carved = self._free.carve(start, blocks)
        assert carved, "the free runs changed under us"
        return start

    def _open_window(self, client_id: int, blocks: int) -> list[Effect]:
        """Keeps the range that is cheapest to empty for this want, and recalls the leases in it."""
        leases = sorted(self._lent(), key=lambda lease: lease.start)
        starts, ends = [lease.start for lease in leases], [lease.end for lease in leases]
        # Sums over the first n leases, so that the cost of a range is two bisections and two differences.
        leased = list(itertools.accumulate((lease.blocks for lease in leases), initial=0))
        quarantined = list(
            itertools.accumulate((lease.blocks * (lease.state is Lease.QUARANTINED) for lease in leases), initial=0)
        )
        first_start, last_start = self._free.start, self._free.end - blocks
        edges = {first_start, last_start, *starts, *ends}
        edges |= {edge - blocks for edge in [*starts, *ends]}

        def cost(start: int) -> tuple[int, int]:
            first, behind = bisect_right(ends, start), bisect_left(starts, start + blocks)
            # A quarantined lease comes back when a process dies, which may be never: last choice.
            return quarantined[behind] - quarantined[first], leased[behind] - leased[first]

        candidates = [start for start in edges if first_start <= start <= last_start]
        start = min(sorted(candidates), key=cost)
        self._window = Window(client_id, start, blocks)
        effects: list[Effect] = []
        for client in self.clients.values():
            recalled = [
                lease
                for lease in client.leases.values()
                if client.connected and not lease.recalled and self._window.overlaps(lease.start, lease.end)
            ]
            for lease in recalled:
                lease.recalled = True
            if recalled:
                effects.append(Recalled(client.client_id, tuple(lease.lease_id for lease in recalled)))
        return effects

    def _lent(self) -> Iterator[LeaseRecord]:
        for client in self.clients.values():
            for lease in client.leases.values():
                if self.has(lease):
                    yield lease

    def check_leases(self) -> None:
        """Asserts the invariants of this memory: no block is lost, and no two leases overlap."""
        assert self._free.free_units + sum(lease.blocks for lease in self._lent()) == self._free.length, (
            "a block is lost or counted twice"
        )
        ends = self._free.start
        for lease in sorted(self._lent(), key=lambda lease: lease.start):
            assert lease.start >= ends, f"lease {lease.lease_id} overlaps another"
            ends = lease.end
        assert ends <= self._free.end
        for client in self.clients.values():
            own = sum(lease.blocks for lease in client.leases.values() if self.has(lease))
            assert client.leased_blocks[self.memory] == own
