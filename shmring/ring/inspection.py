"""What a ring is doing now, from its books: ``ring.inspect()``, and the warning that says who keeps the slab full.

No message is timed for this. Once a second, or less often where that takes long, :class:`Inspection` looks at the books and
notes what it has not seen before. So an
age is at most a second too small, and what lives for less than a second costs nothing. A ring that has nothing to do is looked
at less and less often, to let its process sleep: the first request after a pause may seem up to ten seconds younger than it is.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shmring.core.compiled import EngineBook, EngineEnd, LeaseRecord, Lending, Window
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.loggers import logger_of
from shmring.core.messages import KEY_NBYTES
from shmring.core.printable import printable
from shmring.core.states import EngineSlot, Lease
from shmring.ring.frontend import Frontend
from shmring.ring.injecting import Injector
from shmring.ring.life import RingLife
from shmring.snapshot import (
    MAX_CLIENTS,
    MAX_KEPT_SHOWN,
    MAX_REQUESTS,
    MAX_RUNS,
    ClientSnapshot,
    DroppedSnapshot,
    ErrorSnapshot,
    KeptSnapshot,
    RequestSnapshot,
    RingSnapshot,
    Run,
    SlotSnapshot,
    WorkerSnapshot,
)
from shmring.statistics import RingStatistics

__all__ = ["Inspection"]

logger = logger_of("shmring.ring")

_LOOK_S = 1.0
_REST_S = 10.0  # between two looks at a ring that has had nothing to do for long
_PAUSES = 100  # as long as a look takes, it is not looked again: a hundredth of the loop at most
_FULL_S = 2.0  # a lease request that waits for longer than several steps take is no ordinary wait
_FULL_AGAIN_S = 30.0  # between two lines about the same full slab
_MAX_NAMED = 4  # holders in such a line

_Key = tuple[int, int]
_SLOT_STATES = {EngineSlot.PUBLISHED: "published", EngineSlot.CLAIMED: "claimed", EngineSlot.DRAINING: "draining"}


class Inspection:
    """See above. It begins to look at once.

    Args:
        life, book, end: of the engine.
        geometry: of its slab.
        frontends: by id.
        statistics: returns the ring's.

    Attributes:
        describe_program: returns what the engine's program adds to a snapshot.
    """

    def __init__(
        self,
        life: RingLife,
        book: EngineBook,
        end: EngineEnd,
        geometry: Geometry,
        frontends: Mapping[int, Frontend | Injector],
        statistics: Callable[[], RingStatistics],
    ) -> None:
        self.describe_program: Callable[[], dict[str, Any]] = dict  # a server sets it: what a snapshot has of it besides
        self._life = life
        self._book = book
        self._end = end
        self._geometry = geometry
        self._frontends = frontends
        self._statistics = statistics
        # Since when (of the monotonic clock) this has known
        self._requests: dict[_Key, float] = {}  # a request
        self._slots: dict[int, tuple[float, str]] = {}  # a slot, by generation; with the name of its request
        self._waits: dict[int, float] = {}  # that a client waits for a lease
        self._recalls: dict[int, float] = {}  # that a lease is recalled, while somebody waits
        self._evictions = 0  # of the book, those that are known
        self._dropped: deque[tuple[float, tuple[bytes, int, int, bool]]] = deque(maxlen=MAX_KEPT_SHOWN)  # and when
        self._warned_at = -_FULL_AGAIN_S
        self._pause_s = _LOOK_S
        self._timer: asyncio.TimerHandle | None = life.loop.call_later(_LOOK_S, self._look_again)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self) -> None:
        if self._life.home.is_closed or self._life.home.forked:
            return
        now = time.monotonic()
        try:
            self._look(now)
            if self._waits and now - min(self._waits.values()) >= _FULL_S and now - self._warned_at >= _FULL_AGAIN_S:
                self._warned_at = now
                logger.warning("the slab is full: %s", self._describe_full(now))
        finally:
            is_busy = bool(self._requests or self._slots or self._waits)
            took_s = time.monotonic() - now
            self._pause_s = max(_LOOK_S, _PAUSES * took_s) if is_busy else min(2 * self._pause_s, _REST_S)
            self._timer = self._life.loop.call_later(self._pause_s, self._look_again)

    def _look(self, now: float) -> None:
        """Notes what is new, and forgets what has gone."""
        claims = {**self._end.claims, **self._end.waiting}  # of two that are as old, the one in hands came first
        self._requests = {key: self._requests.get(key, now) for key in claims}
        slots: dict[int, tuple[float, str]] = {}
        for client_id, client in self._book.clients.items():
            for request_id, request in client.requests.items():
                claim = claims.get((client_id, request_id))
                for generation in request.generations:
                    if generation in client.slots:
                        slots[generation] = self._slots.get(generation) or (now, claim.name if claim is not None else "")
            for generation in client.slots:
                if generation not in slots:
                    slots[generation] = self._slots.get(generation) or (now, "")
        self._slots = slots
        wants = {client_id for _, client_id in self._wants()}
        self._waits = {client_id: self._waits.get(client_id, now) for client_id in wants}
        recalled = [lease.lease_id for lease in self._leases() if lease.recalled] if wants else []
        self._recalls = {lease_id: self._recalls.get(lease_id, now) for lease_id in recalled}
        if dropped := self._book.kept.evictions - self._evictions:
            self._evictions += dropped
            self._dropped += ((now, each) for each in self._book.kept.dropped[-dropped:])

    def _leases(self) -> Iterator[LeaseRecord]:
        for client in self._book.clients.values():
            yield from client.leases.values()

    def _wants(self) -> Iterator[tuple[int, int]]:
        """The leases that callers wait for: bytes, and the client."""
        for lending in self._book.lendings:
            for want in lending._wants.values():
                if want.waits:
                    yield want.blocks * BLOCK_NBYTES, want.client_id

    # -- a snapshot ---------------------------------------------------------------------------------------------------

    def inspect(self) -> RingSnapshot:
        """Returns what the ring is doing now. Nothing is changed."""
        now = time.monotonic()
        self._look(now)
        return self._snapshot(now, self.describe_program())

    def _snapshot(self, now: float, program: dict[str, Any]) -> RingSnapshot:
        runs = list(self._runs())
        statistics = self._statistics()
        clients = sorted(self._clients(now), key=lambda client: (-client.waits_s, -client.leased_nbytes))
        draining = list(self._draining(now))
        return RingSnapshot(
            name=self._life.name,
            epoch=self._life.epoch,
            pid=os.getpid(),
            time_s=now,
            block_nbytes=BLOCK_NBYTES,
            blocks=self._geometry.slab_nbytes // BLOCK_NBYTES,
            reply_blocks=self._geometry.reply_nbytes // BLOCK_NBYTES,
            runs=runs[:MAX_RUNS],
            run_count=len(runs),
            clients=clients[:MAX_CLIENTS],
            client_count=len(clients),
            workers=[
                WorkerSnapshot(
                    worker.rank,
                    worker.pid,
                    worker.is_member,
                    worker.is_stopped,
                    worker.unacknowledged,
                    worker.unacknowledged_nbytes,
                )
                for worker in statistics.workers
            ],
            requests=self._oldest_requests(now),
            request_count=len(self._requests),
            draining=heapq.nlargest(MAX_REQUESTS, draining, key=lambda slot: slot.age_s),
            draining_count=len(draining),
            errors=[ErrorSnapshot(now - at, text) for at, text in reversed(self._life.errors)],
            kept=list(self._kept()),
            kept_count=len(self._book.kept),
            dropped=[
                DroppedSnapshot(key.hex(), nbytes, hits, "content" if for_content else "lease", now - at)
                for at, (key, nbytes, hits, for_content) in reversed(self._dropped)
            ],
            statistics={
                name: value
                for name, value in statistics.as_dict().items()
                if name != "epoch" and isinstance(value, int | float)
            },
            program=program,
        )

    def _runs(self) -> Iterator[Run]:
        host = self._book.lendings[0]
        for client_id, client in self._book.clients.items():
            state = "leased" if client.connected else "quarantined"
            for lease in client.leases.values():
                if lease.memory == 0:
                    yield Run(lease.start, lease.blocks, state, client_id)  # type: ignore[arg-type]  # one of these two
            for generation, slot in client.slots.items():
                is_host = slot.lease is None or slot.lease.memory == 0
                if is_host and (slot_state := _SLOT_STATES.get(slot.state)) is not None:
                    yield Run(slot.start, slot.blocks, slot_state, client_id, generation)  # type: ignore[arg-type]  # as above
        for piece in host._by_start:
            if piece.kept is not None:
                yield Run(piece.start, piece.blocks, "kept_pinned" if piece.kept.pins else "kept", 0, piece.kept.generation)
        reply_blocks = self._geometry.reply_nbytes // BLOCK_NBYTES
        yield Run(self._geometry.slab_nbytes // BLOCK_NBYTES - reply_blocks, reply_blocks, "replies")

    def _clients(self, now: float) -> Iterator[ClientSnapshot]:
        wants = {client_id: nbytes for nbytes, client_id in self._wants()}
        for client_id, client in self._book.clients.items():
            frontend = self._frontends.get(client_id)
            yield ClientSnapshot(
                client_id,
                frontend.name if frontend is not None else "",
                frontend.pid if frontend is not None else 0,
                "connected" if client.connected else "quarantined",
                len(client.leases),
                sum(client.leased_blocks) * BLOCK_NBYTES,
                len(client.slots),
                len(client.requests),
                len(client.replies),
                client.pin_count,
                wants.get(client_id, 0),
                now - self._waits.get(client_id, now),
            )

    def _kept(self) -> Iterator[KeptSnapshot]:
        largest = heapq.nlargest(MAX_KEPT_SHOWN, self._book.kept.by_generation.values(), key=lambda kept: kept.nbytes)
        for kept in largest:
            yield KeptSnapshot(kept.key[:KEY_NBYTES].hex(), kept.nbytes, kept.pins, kept.hits, kept.for_one)

    def _oldest_requests(self, now: float) -> list[RequestSnapshot]:
        waiting = self._end.waiting
        claims = {**self._end.claims, **waiting}
        oldest = heapq.nsmallest(MAX_REQUESTS, self._requests.items(), key=lambda item: item[1])
        return [
            self._request(key, claims[key].name, "waiting" if key in waiting else "running", now - since)
            for key, since in oldest
            if key in claims and key[0] in self._book.clients
        ]

    def _request(self, key: _Key, name: str, state: Any, age_s: float) -> RequestSnapshot:
        client = self._book.clients[key[0]]
        record = client.requests.get(key[1])
        slots = [client.slots[generation] for generation in record.generations if generation in client.slots] if record else []
        nbytes = sum(slot.blocks for slot in slots) * BLOCK_NBYTES
        return RequestSnapshot(*key, printable(name), state, age_s, [slot.generation for slot in slots], nbytes)

    def _draining(self, now: float) -> Iterator[SlotSnapshot]:
        for client_id, client in self._book.clients.items():
            for generation, slot in client.slots.items():
                if slot.state == EngineSlot.DRAINING:
                    since, name = self._slots.get(generation, (now, ""))
                    yield SlotSnapshot(client_id, generation, printable(name), now - since, slot.blocks * BLOCK_NBYTES)

    # -- a full slab --------------------------------------------------------------------------------------------------

    def _describe_full(self, now: float) -> str:
        """Says who waits, for whose memory and why it does not come, who else has how much, and what to do."""
        snapshot = self._snapshot(now, {})
        clients = {client.client_id: client for client in snapshot.clients}
        waiting = [client for client in snapshot.clients if client.wants_nbytes]
        lending = next(lending for lending in self._book.lendings if waiting[0].client_id in lending._wants)
        window = lending._window
        first = waiting[0] if window is None else clients.get(window.client_id, waiting[0])
        parts = [f"{_named(first)} has waited for {first.waits_s:.0f} s for {_mib(first.wants_nbytes)}"]
        if len(waiting) > 1:
            parts[0] += f", and {len(waiting) - 1} more wait{'s' if len(waiting) == 2 else ''}"
        if window is None:
            parts.append("it must first return memory: it has as much as one client may have beside others")
            return "; ".join([*parts, "have a larger client_quota_nbytes, or fewer requests of one client at a time"])
        whose, advice = self._describe_window(lending, window, clients, now)
        parts += whose
        idle = self._idle_nbytes(lending, window)
        parts += [
            f"{_named(client)} has {_mib(idle[client.client_id])} that lie idle"
            for client in sorted(snapshot.clients, key=lambda client: -idle[client.client_id])[:_MAX_NAMED]
            if idle[client.client_id]
        ]
        if nbytes := snapshot.statistics["kept_pinned_nbytes"]:
            parts.append(f"kept content in use has {_mib(nbytes)}")
        oldest = _oldest(snapshot.requests, snapshot.draining)
        if oldest or not advice:
            slab = _mib(snapshot.blocks * BLOCK_NBYTES)
            advice.append(f"have a slab of more than {slab} (slab_nbytes), or fewer requests at a time")
        return "; ".join([*parts, *oldest, *advice])

    def _describe_window(
        self, lending: Lending, window: Window, clients: Mapping[int, ClientSnapshot], now: float
    ) -> tuple[list[str], list[str]]:
        """Returns whose memory is emptied for the request that waits, and what helps, unless a larger slab does."""
        nbytes: Counter[tuple[int, str]] = Counter()
        advice: dict[str, None] = {}
        for piece in lending._by_start:
            lease = piece.lease
            if lease is None or piece.start >= window.end or piece.start + piece.blocks <= window.start:
                continue
            if lease.state is Lease.QUARANTINED:
                why = "its connection has ended, and its process lives"
                advice["end the processes whose connections have ended"] = None
            elif lease.client_id == window.client_id:
                why = "which it uses itself"
            elif lease.live.units != lease.kept_blocks:
                why = "the engine has slots of it"
            else:
                why = f"does not answer since {now - self._recalls.get(lease.lease_id, now):.0f} s"
                advice["a frontend that does not answer is stopped or busy with a slot: let it go on, or end it"] = None
            nbytes[lease.client_id, why] += piece.blocks * BLOCK_NBYTES
        parts = [
            f"{_named(clients[client_id])} has {_mib(amount)} of what it waits for ({why})"
            for (client_id, why), amount in nbytes.most_common(_MAX_NAMED)
            if client_id in clients
        ]
        return parts, [*advice]

    def _idle_nbytes(self, lending: Lending, window: Window) -> Counter[int]:
        """Returns the bytes of leases outside of the window that nobody uses and that are not recalled, by client."""
        nbytes: Counter[int] = Counter()
        for lease in self._leases():
            is_outside = lease.start >= window.end or lease.end <= window.start
            is_idle = lease.state is Lease.LEASED and not lease.recalled and lease.live.units == lease.kept_blocks
            if lease.memory == lending.memory and is_outside and is_idle:
                nbytes[lease.client_id] += (lease.blocks - lease.kept_blocks) * BLOCK_NBYTES
        return nbytes


def _named(client: ClientSnapshot) -> str:
    return f"client {client.client_id} ({client.name or 'unnamed'}, pid {client.pid})"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _oldest(requests: Sequence[RequestSnapshot], draining: Sequence[SlotSnapshot]) -> list[str]:
    texts = [
        f"the oldest request with slots, {request.name or request.number}, is {request.state} for {request.age_s:.0f} s with "
        f"{_mib(request.nbytes)}"
        for request in requests
        if request.nbytes
    ][:1]
    if draining:
        first, nbytes = draining[0], sum(slot.nbytes for slot in draining)
        texts.append(
            f"{len(draining)} slots with {_mib(nbytes)} are left and still viewed, the oldest for {first.age_s:.0f} s "
            f"(request {first.request or 'unknown'}): delete its tensors"
        )
    return texts
