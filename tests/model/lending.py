"""The model of ``core/lending.pyx``: the same rules, without its counts, its order of leases and what it keeps apart.

A client has at most one request waiting in each memory. Requests are served in order of arrival. The first that can't be
served gets a *window*: the address range that is cheapest to empty (its leases are recalled), closed to every other client
until the request is granted or withdrawn. For each request behind the first, leases outside of it are recalled if they lie idle
and would make room. What is cheapest is decided by the states of leases (``Price``).

While somebody waits, moments pass. Who does not answer a recall for two of them is passed over: the window is chosen again, if
there is a range in a better state. It never moves to leases that were granted since it was opened. A want that waits in vain
for long gives its window up and rests: for as long as it has waited, and until there is a range whose holders answer; less long
if one comes that is on its way, or idle. Each time it is twice as patient.

The owner's own leases in its window are not recalled. A request for which nobody waits is a *wish*: granted when there is room,
with no window. When it comes, and nobody waits, and leases that lie idle would make room for it, those are recalled.

What the engine keeps of a lease is in it no more: the lease is in pieces then. What is kept and not pinned goes when somebody
wants its
memory: the least recently used first, of which only what lies in the run that comes free; or all that lies in a window.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator

from shmring.core.effects import EngineEffect, Granted, Recalled
from shmring.core.geometry import BLOCK_NBYTES, EngineBookLimits, blocks_for
from shmring.core.messages import DEVICE_MEMORY, LeaseGrant, LeaseRequest, Memory
from shmring.core.states import LEASE, Lease, LeaseEvent, advance
from shmring.errors import RemoteProtocolError
from tests.model.blocks import RunAllocator, TakenRuns
from tests.model.kept_book import KeptBook
from tests.model.records import ClientRecord, KeptRecord, LeaseRecord, LeaseWant, Window

MOST_TRIED = 128
SILENT_AFTER = 2  # moments


class Price(enum.IntEnum):
    """What it costs to empty what lies in a range; the worst first."""

    MAY_NEVER_COME = 0  # quarantined, or pinned content
    LENT_SINCE = 1  # since the window was opened
    NO_ANSWER = 2  # recalled in vain
    GRANTED_NOW = 3
    IN_USE = 4  # or of the client that asks
    RECALLED = 5  # and may still come
    LIES_IDLE = 6
    CAN_GO = 7  # content that is not pinned


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
        contents: KeptBook | None = None,
    ) -> None:
        self.clients = clients
        self.limits = limits
        self.memory = memory
        self._free = RunAllocator(start, blocks)
        self._wants: dict[int, LeaseWant] = {}  # by client, in order of arrival
        self._window: Window | None = None
        self._next_lease_id = first_lease_id
        self.contents = contents
        self._carved: dict[int, list[tuple[int, int]]] = {}  # what is in a lease no more, by lease

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
        return sum(lease.blocks - lease.kept_blocks for lease in self._lent() if lease.state is state) * BLOCK_NBYTES

    def is_awaited(self) -> bool:
        """Whether a caller waits for a lease."""
        return any(want.waits for want in self._wants.values())

    def connect(self, client: ClientRecord, blocks: int) -> LeaseGrant | None:
        """Returns a base lease, smaller than asked for where less is free; None if nothing is, or somebody waits for it."""
        if self.is_awaited():
            return None
        self._make_room(blocks)
        blocks = min(blocks, self._free.largest_run)
        if not blocks:
            return None
        start = self._free.allocate(blocks)
        assert start is not None
        return self._lend(client, 0, start, blocks)

    def ask(self, client_id: int, request: LeaseRequest) -> list[EngineEffect]:
        """A client asks for a lease; it replaces what the client asked for before, and 0 bytes withdraw that.

        Raises:
            RemoteProtocolError: it asks for more than can ever be granted.
        """
        if request.nbytes == 0:
            self._withdraw(client_id)
            return self.serve()
        blocks, waits = blocks_for(request.nbytes), request.waits
        if blocks > self._free.length:
            raise RemoteProtocolError(f"a lease of {request.nbytes} bytes was requested of {self._free.length * BLOCK_NBYTES}")
        window = self._window
        if window is not None and window.client_id == client_id and (window.blocks != blocks or not waits):
            self._window = None
        preferred = min(max(blocks, blocks_for(request.preferred_nbytes)), self._free.length)
        want = self._wants[client_id] = LeaseWant(client_id, request.token, blocks, preferred, waits)
        effects = self.serve()
        if self._wants.get(client_id) is want and (waits or self._window is None):
            effects += self._recall_idle(want) or []
        return effects

    def moment_passed(self) -> list[EngineEffect]:
        """Another moment has passed while callers wait."""
        for lease in self._lent():
            lease.new_moments = max(0, lease.new_moments - 1)
            if lease.recalled and lease.live.units == lease.kept_blocks:
                lease.silent_moments = min(SILENT_AFTER, lease.silent_moments + 1)
        is_moved, effects = self._move_window()
        if self._wake() or is_moved:
            effects += self.serve()
        too_large = math.inf
        for want in [*self._wants.values()]:
            if want.waits and want.blocks < too_large:
                recalled = self._recall_idle(want)
                too_large = want.blocks if recalled is None else too_large
                effects += recalled or []
        return effects

    def forget(self, client: ClientRecord) -> None:
        """A client has gone: it waits for nothing, and a window that is its own, or rests on a lease of it, is chosen again."""
        self._withdraw(client.client_id)
        window = self._window
        if window is not None and any(
            self._has_piece_in(lease, window.start, window.end) for lease in client.leases_in(self.memory)
        ):
            self._window = None

    def take_back(self, client: ClientRecord, lease: LeaseRecord) -> None:
        """Frees a lease's blocks. The caller must then serve those that wait for blocks."""
        del client.leases[lease.lease_id]
        for start, blocks in self._pieces(lease):
            self._free.free(start, blocks)
        self._carved.pop(lease.lease_id, None)
        if self._window is not None and self.is_wanted(lease.start, lease.blocks):
            self._window = dataclasses.replace(self._window, vain_moments=0)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def carve(self, lease: LeaseRecord, kept: KeptRecord) -> None:
        """A range of a lease, in which nothing else lies, is kept from now on."""
        self._carved.setdefault(lease.lease_id, []).append((kept.start, kept.blocks))
        lease.kept_blocks += kept.blocks

    def _pieces(self, lease: LeaseRecord) -> list[tuple[int, int]]:
        pieces = []
        start = lease.start
        for hole, blocks in [*sorted(self._carved.get(lease.lease_id, [])), (lease.end, 0)]:
            if hole > start:
                pieces.append((start, hole - start))
            start = hole + blocks
        return pieces

    def is_wanted(self, start: int, blocks: int) -> bool:
        """Whether somebody waits for a range that has a block of this one."""
        return self._window is not None and self._window.overlaps(start, start + blocks)

    def evict(self, kept: KeptRecord, for_content: bool = False) -> None:
        """What is kept and not pinned goes. The caller must then serve those that wait for blocks."""
        assert self.contents is not None
        self.contents.forget(kept, for_content)
        self._free.free(kept.start, kept.blocks)

    def _make_room(self, blocks: int, client_id: int = 0) -> None:
        """Lets the least recently used content go that leaves a free run of so many blocks, outside of other windows."""
        free = {block for start, length in self._free.runs() for block in range(start, start + length)}
        if self._window is not None and self._window.client_id != client_id:
            free -= set(range(self._window.start, self._window.end))
        if self.contents is None or any(set(range(start, start + blocks)) <= free for start in free):
            return
        oldest = list(self.contents.unpinned.values())[:MOST_TRIED]
        for count, kept in enumerate(oldest, 1):
            free |= set(range(kept.start, kept.start + kept.blocks))
            first = last = kept.start
            while first - 1 in free:
                first -= 1
            while last + 1 in free:
                last += 1
            if last + 1 - first >= blocks:
                for older in oldest[:count]:
                    if first <= older.start <= last:
                        self.evict(older)
                return

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
            new_moments=SILENT_AFTER if token else 0,
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
                elif self._window is None and want.waits and not want.rest_moments:
                    start, _ = self._cheapest_range(client_id, want.blocks)
                    effects += self._open_window(Window(client_id, start, want.blocks, self._next_lease_id))
                    if self._is_window_free() and (taken := self._take_run(client, want)) is not None:
                        effects.append(Granted(client_id, self._lend(client, want.token, *taken)))
                        self._withdraw(client_id)
                        break
            else:
                return effects
            # A window was closed: begin again with the first, whom it may have kept out.

    def _is_window_free(self) -> bool:
        window = self._window
        assert window is not None
        return any(start <= window.start and window.end <= start + length for start, length in self._free.runs())

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
        """Whether the client must first return something. Alone it may hold everything; one lease it may always hold.

        What it has pinned counts as if it held it, and so does what it has delivered and nobody has taken.
        """
        leases = client.leases_in(self.memory)
        if len(leases) >= self.limits.max_leases:
            return True
        quota = self.limits.device_quota_blocks if self.memory == DEVICE_MEMORY else self.limits.quota_blocks
        others = [other for other in self.clients.values() if other is not client and (other.connected or other.leases)]
        held = sum(lease.blocks - lease.kept_blocks for lease in leases)
        if self.contents is not None:
            pinned = sum(self.contents.by_generation[generation].blocks for generation in client.pins)
            pinned += sum(kept.blocks for kept in self.contents.untaken_of(client.client_id))
        else:
            pinned = 0
        return bool(others and held) and held + pinned + blocks > quota

    def _take_run(self, client: ClientRecord, want: LeaseWant) -> tuple[int, int] | None:
        """Takes a run for a want from the free list, outside the window of anybody else."""
        for blocks in dict.fromkeys((want.preferred_blocks, want.blocks)):
            if self._is_over_quota(client, blocks):
                continue  # what it needs is within its quota, what it would prefer is not
            self._make_room(blocks, client.client_id)
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

    def _open_window(self, window: Window) -> list[EngineEffect]:
        """Keeps a range for a want, and recalls the leases in it."""
        self._window = window
        contents = [] if self.contents is None else self.contents.unpinned.values()
        for kept in sorted(contents, key=lambda kept: kept.start):
            if window.overlaps(kept.start, kept.start + kept.blocks):
                self.evict(kept)
        return self._recall(window.start, window.end, but_of=window.client_id)

    def _move_window(self) -> tuple[bool, list[EngineEffect]]:
        """Chooses the window again, if what it waits for does not come and there is a range in a better state; gives it up, if
        that has been so for long. Returns whether."""
        window = self._window
        if window is None:
            return False, []
        worst = self._worst_in(window.start, window.blocks, window.client_id, window.next_lease_id)
        if worst is None or worst >= Price.RECALLED:
            return False, []
        start, best = self._cheapest_range(window.client_id, window.blocks, window.next_lease_id)
        if best is None or best > worst:
            return True, self._open_window(Window(window.client_id, start, window.blocks, window.next_lease_id))
        window = self._window = dataclasses.replace(window, vain_moments=window.vain_moments + 1)
        want = self._wants[window.client_id]
        if window.vain_moments < want.patience:
            return False, []
        want.rest_moments, want.patience = want.patience, 2 * want.patience
        self._window = None
        return True, []

    def _wake(self) -> bool:
        """Has wants rest no longer that have rested for long, or for which a range has come; returns whether there was one."""
        any_woken = False
        for want in self._wants.values():
            if want.rest_moments:
                _, worst = self._cheapest_range(want.client_id, want.blocks)
                need = Price.NO_ANSWER if want.rest_moments == 1 else Price.IN_USE
                if worst is None or worst > need:
                    want.rest_moments, any_woken = 0, True
                else:
                    want.rest_moments = max(1, want.rest_moments - 1)
        return any_woken

    def _recall_idle(self, want: LeaseWant) -> list[EngineEffect] | None:
        """Recalls idle leases that would make room for a want that has no window; None: they do not suffice."""
        window, owner = self._window, want.client_id if want.waits else None
        if window is not None and window.client_id == want.client_id:
            return []
        if self._is_over_quota(self.clients[want.client_id], want.blocks):
            return []
        start, worst = self._cheapest_range(owner, want.blocks)
        is_idle = worst is None or worst >= Price.LIES_IDLE
        return self._recall(start, start + want.blocks, but_of=owner) if is_idle else None

    def _pieces_by_price(self, client_id: int | None, next_lease_id: int | None) -> list[tuple[int, int, Price]]:
        """All that is lent or kept: where it begins, its blocks, and what it costs to empty it for a client."""

        def price(lease: LeaseRecord) -> Price:
            if lease.state is Lease.QUARANTINED:
                return Price.MAY_NEVER_COME
            if next_lease_id is not None and lease.lease_id >= next_lease_id:
                return Price.LENT_SINCE
            if lease.client_id == client_id or lease.live.units != lease.kept_blocks:
                return Price.IN_USE
            if lease.recalled:
                return Price.NO_ANSWER if lease.silent_moments >= SILENT_AFTER else Price.RECALLED
            return Price.GRANTED_NOW if lease.new_moments else Price.LIES_IDLE

        contents = [] if self.contents is None else self.contents.by_generation.values()
        return [(*piece, price(lease)) for lease in self._lent() for piece in self._pieces(lease)] + [
            (kept.start, kept.blocks, Price.MAY_NEVER_COME if kept.pins else Price.CAN_GO) for kept in contents
        ]

    def _worst_in(self, start: int, blocks: int, client_id: int | None, next_lease_id: int | None) -> Price | None:
        """The worst price of what lies in a range; None: nothing lies there."""
        prices = [
            price
            for piece, length, price in self._pieces_by_price(client_id, next_lease_id)
            if piece < start + blocks and start < piece + length
        ]
        return min(prices, default=None)

    def _cheapest_range(self, client_id: int | None, blocks: int, next_lease_id: int | None = None) -> tuple[int, Price | None]:
        """Returns where the range begins that is cheapest to empty for a client, the lowest of those, and its worst price.

        It does not lie over the window of another client; if there is no other range, its price is ``MAY_NEVER_COME``.
        """
        pieces = self._pieces_by_price(client_id, next_lease_id)
        window = self._window if self._window is not None and self._window.client_id != client_id else None

        def cost(start: int) -> list[int]:
            inside = [(price, length) for at, length, price in pieces if at < start + blocks and start < at + length]
            return [sum(length for price, length in inside if price is each) for each in Price]

        starts = [
            start
            for start in range(self._free.start, self._free.end - blocks + 1)
            if window is None or not window.overlaps(start, start + blocks)
        ]
        if not starts:
            return self._free.start, Price.MAY_NEVER_COME
        start = min(starts, key=lambda start: (cost(start), start))
        return start, self._worst_in(start, blocks, client_id, next_lease_id)

    def _has_piece_in(self, lease: LeaseRecord, start: int, end: int) -> bool:
        return any(piece < end and start < piece + length for piece, length in self._pieces(lease))

    def _recall(self, start: int, end: int, *, but_of: int | None = None) -> list[EngineEffect]:
        """Recalls the leases in a range, but those of one client."""
        effects: list[EngineEffect] = []
        for client in self.clients.values():
            leases = [
                lease for lease in client.leases_in(self.memory) if not lease.recalled and self._has_piece_in(lease, start, end)
            ]
            if client.connected and client.client_id != but_of and leases:
                for lease in leases:
                    lease.recalled = True
                    lease.new_moments = 0
                effects.append(Recalled(client.client_id, tuple(lease.lease_id for lease in leases)))
        return effects

    def _lent(self) -> Iterator[LeaseRecord]:
        for client in self.clients.values():
            yield from client.leases_in(self.memory)

    def check(self) -> None:
        """Asserts the invariants of this memory: no block is lost, and no two leases overlap."""
        contents = [] if self.contents is None else [*self.contents.by_generation.values()]
        taken = [piece for lease in self._lent() for piece in self._pieces(lease)]
        taken += [(kept.start, kept.blocks) for kept in contents]
        free = self._free.free_units
        assert free + sum(blocks for _, blocks in taken) == self._free.length, "a block is lost or counted twice"
        end = self._free.start
        for start, blocks in sorted(taken):
            assert start >= end, f"what begins at block {start} overlaps something else"
            end = start + blocks
        assert end <= self._free.end
