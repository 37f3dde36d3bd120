"""The model of :mod:`shmring.core.lending`: the same rules, without its counts, its order of leases and what it keeps apart.

A client has at most one request waiting in each memory. Requests are served in order of arrival. The first that can't be
served gets a *window*: the address range that is cheapest to empty (its leases are recalled), closed to every other client
until the request is granted or withdrawn.

The owner's own leases in its window are not recalled. A request for which nobody waits is a *wish*: granted when there is room,
with no window. When it comes, and nobody waits, and leases that lie idle would make room for it, those are recalled.
"""

from __future__ import annotations

from collections.abc import Iterator

from shmring.core.effects import EngineEffect, Granted, Recalled
from shmring.core.geometry import BLOCK_NBYTES, EngineBookLimits, blocks_for
from shmring.core.messages import DEVICE_MEMORY, LeaseGrant, Memory
from shmring.core.states import LEASE, Lease, LeaseEvent, advance
from shmring.errors import RemoteProtocolError
from tests.model.blocks import RunAllocator, TakenRuns
from tests.model.records import ClientRecord, LeaseRecord, LeaseWant, Window

__all__ = ["Lending"]


class Lending:
    """The leases of one memory. Every method is one event, or a part of one; effects are the caller's next duty, in order."""

    def __init__(
        self,
        clients: dict[int, ClientRecord],
        limits: EngineBookLimits,
        memory: Memory,
        start: int,
        blocks: int,
        first_lease_id: int,
    ) -> None:
        self.clients = clients
        self.limits = limits
        self.memory = memory
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

    def connect(self, client: ClientRecord, blocks: int) -> LeaseGrant | None:
        """Returns a base lease, smaller than asked for where less is free; None if nothing is, or somebody waits for it."""
        blocks = min(blocks, self._free.largest_run)
        if not blocks or any(want.waits for want in self._wants.values()):
            return None
        start = self._free.allocate(blocks)
        assert start is not None
        return self._lend(client, 0, start, blocks)

    def ask(self, client_id: int, token: int, nbytes: int, preferred_nbytes: int, waits: bool) -> list[EngineEffect]:
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
        window = self._window
        if window is not None and window.client_id == client_id and (window.blocks != blocks or not waits):
            self._window = None
        preferred = min(max(blocks, blocks_for(preferred_nbytes)), self._free.length)
        want = self._wants[client_id] = LeaseWant(client_id, token, blocks, preferred, waits)
        effects = self.serve()
        is_left = self._wants.get(client_id) is want and not self._is_over_quota(self.clients[client_id], blocks)
        return effects + (self._recall_idle(blocks) if is_left and not waits else [])

    def forget(self, client_id: int) -> None:
        """A client has gone: it waits for nothing, and the window is chosen again, as it may rest on a lease of that client."""
        self._wants.pop(client_id, None)
        self._window = None

    def take_back(self, client: ClientRecord, lease: LeaseRecord) -> None:
        """Frees a lease's blocks. The caller must then serve those that wait for blocks."""
        del client.leases[lease.lease_id]
        self._free.free(lease.start, lease.blocks)

    def _lend(self, client: ClientRecord, token: int, start: int, blocks: int) -> LeaseGrant:
        """Writes a lease down whose blocks are taken; returns what its holder is told."""
        lease = LeaseRecord(
            lease_id=self._next_lease_id,
            client_id=client.client_id,
            memory=self.memory,
            start=start,
            blocks=blocks,
            state=advance(LEASE, Lease.FREE, LeaseEvent.GRANT),
            live=TakenRuns(),
        )
        self._next_lease_id += 1
        client.leases[lease.lease_id] = lease
        return LeaseGrant(token, lease.lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)

    def serve(self) -> list[EngineEffect]:
        """Grants what can be granted, in order of arrival; opens a window for the first that can't."""
        effects: list[EngineEffect] = []
        while True:
            for client_id, want in list(self._wants.items()):
                client = self.clients[client_id]
                if self._is_over_quota(client, want.blocks):
                    # It waits for what its own client returns, so nobody else waits for it.
                    if self._close_window(client_id):
                        break
                elif (taken := self._take_run(client, want)) is not None:
                    effects.append(Granted(client_id, self._lend(client, want.token, *taken)))
                    if self._withdraw(client_id):
                        break
                elif self._window is None and want.waits:
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
        leases = client.leases_in(self.memory)
        if len(leases) >= self.limits.max_leases:
            return True
        quota = self.limits.device_quota_blocks if self.memory == DEVICE_MEMORY else self.limits.quota_blocks
        others = [other for other in self.clients.values() if other is not client and (other.connected or other.leases)]
        return bool(others and leases) and sum(lease.blocks for lease in leases) + blocks > quota

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

    def _open_window(self, client_id: int, blocks: int) -> list[EngineEffect]:
        """Keeps the range that is cheapest to empty for this want, and recalls the leases in it."""
        start, _ = self._cheapest_range(blocks, idle_only=False)
        self._window = Window(client_id, start, blocks)
        return self._recall(start, start + blocks, but_of=client_id)

    def _recall_idle(self, blocks: int) -> list[EngineEffect]:
        """Recalls the leases in the cheapest range for a wish, if they are idle."""
        start, has_avoided = self._cheapest_range(blocks, idle_only=True)
        return [] if self._window is not None or has_avoided else self._recall(start, start + blocks)

    def _cheapest_range(self, blocks: int, *, idle_only: bool) -> tuple[int, bool]:
        """Returns where the range begins that is cheapest to empty, the lowest of those, and whether a lease in it is avoided.

        That is a quarantined one, which comes back when a process dies, which may be never; or one that is in use.
        """

        def cost(start: int) -> tuple[int, int, int]:
            leases = [lease for lease in self._lent() if lease.start < start + blocks and start < lease.end]
            avoided = [lease for lease in leases if lease.state is Lease.QUARANTINED or (idle_only and lease.live.units)]
            return sum(lease.blocks for lease in avoided), sum(lease.blocks for lease in leases), start

        avoided, _, start = min(cost(start) for start in range(self._free.start, self._free.end - blocks + 1))
        return start, avoided > 0

    def _recall(self, start: int, end: int, *, but_of: int | None = None) -> list[EngineEffect]:
        """Recalls the leases in a range, but those of one client."""
        effects: list[EngineEffect] = []
        for client in self.clients.values():
            leases = [
                lease
                for lease in client.leases_in(self.memory)
                if lease.start < end and start < lease.end and not lease.recalled
            ]
            if client.connected and client.client_id != but_of and leases:
                for lease in leases:
                    lease.recalled = True
                effects.append(Recalled(client.client_id, tuple(lease.lease_id for lease in leases)))
        return effects

    def _lent(self) -> Iterator[LeaseRecord]:
        for client in self.clients.values():
            yield from client.leases_in(self.memory)

    def check(self) -> None:
        """Asserts the invariants of this memory: no block is lost, and no two leases overlap."""
        lent = sum(lease.blocks for lease in self._lent())
        assert self._free.free_units + lent == self._free.length, "a block is lost or counted twice"
        ends = self._free.start
        for lease in sorted(self._lent(), key=lambda lease: lease.start):
            assert lease.start >= ends, f"lease {lease.lease_id} overlaps another"
            ends = lease.end
        assert ends <= self._free.end
