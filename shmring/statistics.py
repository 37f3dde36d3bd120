"""The numbers of each side: frozen records, for tests, metrics and people.

The tables of docs/reference.md and the numbers in Prometheus are made of them (:mod:`shmring.service.numbers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["ClientStatistics", "RingStatistics", "WorkerStatistics", "counted_in", "counts_of"]


def _counter(default: Any = dataclasses.MISSING) -> Any:
    """A field of a number that only grows."""
    return dataclasses.field(default=default, metadata={"kind": "counter"})


def _counted(default: Any = dataclasses.MISSING, kind: str = "counter") -> Any:
    """A field of a number that is an attribute of that name where it is counted."""
    return dataclasses.field(default=default, metadata={"kind": kind, "is_counted": True})


def counted_in(record: type[_Record]) -> tuple[str, ...]:
    """Returns the names of a record's fields that are filled in by :func:`counts_of`."""
    return tuple(field.name for field in dataclasses.fields(record) if "is_counted" in field.metadata)  # type: ignore[arg-type]


def counts_of(record: type[_Record], *places: object) -> dict[str, int]:
    """Returns what is counted for a record, each number from the first place that has an attribute of its name."""
    return {name: getattr(next(place for place in places if hasattr(place, name)), name) for name in counted_in(record)}


class _Record:
    """The base of these records."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields by name, and ``slots_in_use`` where there are slots; of workers, a tuple of such."""
        fields: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return fields | ({"slots_in_use": self.slots_in_use} if hasattr(self, "slots_in_use") else {})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics(_Record):
    """A worker at one moment, as its engine's books have it.

    Attributes:
        rank: identity: the caller's name for it.
        pid: identity of its process.
        is_member: whether it gets messages; if not, its connection has ended or it was dropped, and it may still be reading.
        sent: messages to it so far.
        unacknowledged: messages that it has not left: how far it is behind.
        unacknowledged_nbytes: bytes of memory that those keep.
        is_stopped: whether a signal (SIGSTOP) or a debugger has stopped its process.
    """

    rank: int
    pid: int
    is_member: bool
    sent: int
    unacknowledged: int
    unacknowledged_nbytes: int
    is_stopped: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingStatistics(_Record):
    """The engine's numbers at one moment. Sizes in bytes; counters count from the ring's start.

    Attributes:
        epoch: identity of this engine's life; not a quantity, and not in Prometheus.
        slab_nbytes: bytes of the whole slab.
        shm_nbytes: bytes of the slab that lie in ``/dev/shm``; the rest lies in memfds. 0: all of it.
        leasable_nbytes: bytes of the part that is leased out: free, leased, quarantined and kept ones add up to it.
        free_nbytes: bytes of the leasable part, lent to nobody.
        leased_nbytes: bytes lent to frontends.
        quarantined_nbytes: bytes of frontends that disconnected but whose process lives.
        clients: frontends connected now.
        departed_clients: frontends that are gone, of which something is still quarantined or being read.
        lease_requests_waiting: frontends that wait for a lease.
        waiting: requests not yet claimed.
        running: requests claimed, and not ended.
        slots_published: slots submitted, their request not yet claimed.
        slots_claimed: slots of claimed requests.
        slots_draining: slots released, but kept by living views: a handler or executor still has tensors.
        reply_nbytes: bytes of the slab that are kept for replies.
        reply_free_nbytes: bytes of those, free.
        replies_waiting: replies that wait for space there.
        submitted: requests that came.
        finished: requests that ended well.
        failed: requests that ended with an error.
        aborted: requests that their frontend gave up, or left.
        replies: replies sent.
        reply_copies: tensors copied into replies.
        reply_copied_nbytes: bytes of those.
        received_nbytes: bytes of slots taken over from frontends.
        late_aborts: messages that aborted a request which had ended: they crossed.
        stale_releases: messages that gave a reply slot back once more.
        protocol_errors: connections closed because their frontend broke the rules.
        refused: connections refused in the handshake.
        reclaimed_nbytes: bytes taken back from frontends that had gone.
        kept: contents kept to be sent again.
        kept_nbytes: bytes of the slab that those take.
        kept_pinned: contents of those that are in use; the memory of the others is free for requests.
        kept_pinned_nbytes: bytes of the slab that those in use take.
        kept_capacity_nbytes: bytes that may be kept.
        kept_hits: lookups of content that was there.
        kept_misses: lookups of content that was not.
        kept_evictions: contents that have gone because their memory was wanted.
        kept_evictions_for_content: contents of those that made room for other content; the others made room for a lease.
        kept_evicted_nbytes: bytes of contents that have gone because their memory was wanted.
        kept_refusals: contents not kept, or not pinned for a frontend that looked for them, because of a limit.
        kept_waits: keys for which frontends wait now, each counted once for each frontend.
        deliveries_untaken: deliveries that nobody has taken yet; they count as content in use.
        deliveries_taken: deliveries that a frontend has taken.
        deliveries_withdrawn: deliveries that their sender has taken back.
        deliveries_dropped: deliveries that have gone because a later one has their name, or nobody has taken them for long.
        pinned_nbytes: bytes of the slab that are registered with CUDA: all or nothing.
        pin_seconds: seconds that registering them took.
        device_copies: requests copied to a GPU.
        device_copied_nbytes: bytes of those, small gaps between tensors included.
        device_slab_nbytes: bytes of the device slab; 0 if there is none. They are in no size above, but its slots count there.
        device_slab_free_nbytes: bytes of the device slab, lent to nobody.
        device_slab_leased_nbytes: bytes of the device slab, lent to frontends.
        device_slab_quarantined_nbytes: bytes of the device slab, of frontends that disconnected but whose process lives.
        device_slots_in_use: slots of the device slab that the engine holds in any state.
        device_slots_lost: slots of the device slab, kept for good because CUDA failed to say when they are free.
        device_fences: events of frontends that are open in the engine's process.
        workers: workers that get messages; in the record itself, one record for each worker, in order of rank.
        broadcasts: messages sent to workers without waiting for replies, shared claims included.
        gathers: messages sent to workers, whose replies were waited for.
        broadcasts_outstanding: messages that some worker has not left.
        broadcast_nbytes: bytes reserved for what is copied to workers; 0 before the first one joins.
        broadcast_free_nbytes: bytes of those, free.
        broadcast_copied_nbytes: bytes of tensors that were copied for workers.
        broadcast_in_place_nbytes: bytes of tensors that were sent to workers from where they were.
        late_answers: messages of workers: replies for which no gather waited any more.
    """

    epoch: int
    slab_nbytes: int
    shm_nbytes: int
    leasable_nbytes: int
    free_nbytes: int
    leased_nbytes: int
    quarantined_nbytes: int
    clients: int
    departed_clients: int
    lease_requests_waiting: int
    waiting: int
    running: int
    slots_published: int
    slots_claimed: int
    slots_draining: int
    reply_nbytes: int
    reply_free_nbytes: int = _counted(kind="gauge")
    replies_waiting: int
    submitted: int = _counted()
    finished: int = _counted()
    failed: int = _counted()
    aborted: int = _counted()
    replies: int = _counted()
    reply_copies: int = _counted()
    reply_copied_nbytes: int = _counted()
    received_nbytes: int = _counted()
    late_aborts: int = _counted()
    stale_releases: int = _counted()
    protocol_errors: int = _counted()
    refused: int = _counted()
    reclaimed_nbytes: int = _counted()
    pinned_nbytes: int
    pin_seconds: float
    device_copies: int = _counter()
    device_copied_nbytes: int = _counter()
    kept: int
    kept_nbytes: int
    kept_pinned: int
    kept_pinned_nbytes: int
    kept_capacity_nbytes: int
    kept_hits: int = _counter()
    kept_misses: int = _counter()
    kept_evictions: int = _counter()
    kept_evictions_for_content: int = _counter()
    kept_evicted_nbytes: int = _counter()
    kept_refusals: int = _counter()
    kept_waits: int
    deliveries_untaken: int
    deliveries_taken: int = _counter()
    deliveries_withdrawn: int = _counter()
    deliveries_dropped: int = _counter()
    device_slab_nbytes: int = 0
    device_slab_free_nbytes: int = 0
    device_slab_leased_nbytes: int = 0
    device_slab_quarantined_nbytes: int = 0
    device_slots_in_use: int = 0
    device_slots_lost: int = 0
    device_fences: int = 0
    workers: tuple[WorkerStatistics, ...] = ()
    broadcasts: int = _counted(0)
    gathers: int = _counter(0)
    broadcasts_outstanding: int = 0
    broadcast_nbytes: int = 0
    broadcast_free_nbytes: int = 0
    broadcast_copied_nbytes: int = _counter(0)
    broadcast_in_place_nbytes: int = _counter(0)
    late_answers: int = _counted(0)

    @property
    def slots_in_use(self) -> int:
        """Slots that the engine holds in any state."""
        return self.slots_published + self.slots_claimed + self.slots_draining


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics(_Record):
    """A frontend's numbers at one moment. Sizes in bytes; counters count from ``connect``, over all reconnections.

    Attributes:
        connected: whether an engine is attached now.
        epoch: identity of the attached engine's life; 0 if there is none, and of several engines together.
        client_id: identity of this client, as the engine calls it; 0 likewise.
        leases: leases held.
        leased_nbytes: bytes of the slab that are leased.
        free_nbytes: bytes of leases that are in no slot.
        slots_writing: slots that callers write to.
        slots_submitted: slots with the engine.
        slots_cached: slots released by the engine, which a caller still holds: their content can be submitted again.
        slots_draining: slots left, which living views keep.
        waiting: callers that wait for space in the slab.
        in_flight: requests without a terminal reply.
        submitted: requests sent.
        finished: requests that ended well.
        failed: requests that ended with an error.
        aborted: requests given up.
        copies: tensors copied for sending, into slots or messages.
        copied_nbytes: bytes of tensors copied for sending.
        in_place: tensors sent from where they were in the slab, without a copy.
        in_place_nbytes: bytes of those.
        inline_payloads: payloads whose tensors travelled in the message.
        slot_nbytes_submitted: bytes of slots handed to the engine.
        replies: replies received.
        reply_copies: replies copied out of the engine's slab, because views of earlier ones held half of the reserve.
        reply_copied_nbytes: bytes of those.
        reply_slots_held: slots of replies, which living views keep.
        kept_pins: contents that this client has pinned.
        kept_hits: lookups that found content; what is pinned already is found without asking the engine.
        kept_misses: lookups that found nothing.
        stale_releases: messages that released a slot which was not with the engine: late, or doubled.
        reconnections: engines attached to after the first.
        device_slab_nbytes: bytes of the engine's device slab, once this client has attached to it. Its leases are in no size
            above, but its slots count there.
        device_leased_nbytes: bytes of leases in the device slab.
        device_free_nbytes: bytes of those in no slot.
        device_slots_in_use: slots of the device slab, in any state but free.
        device_slots_lost: slots of the device slab, kept for good because CUDA failed to say when they are free.
    """

    connected: bool
    epoch: int
    client_id: int
    leases: int = 0
    leased_nbytes: int = 0
    free_nbytes: int = 0
    slots_writing: int
    slots_submitted: int
    slots_cached: int
    slots_draining: int
    waiting: int
    in_flight: int
    submitted: int = _counted()
    finished: int = _counted()
    failed: int = _counted()
    aborted: int = _counted()
    copies: int = _counted()
    copied_nbytes: int = _counted()
    in_place: int = _counted()
    in_place_nbytes: int = _counted()
    inline_payloads: int = _counted()
    slot_nbytes_submitted: int = _counted()
    replies: int = _counted()
    reply_copies: int = _counted()
    reply_copied_nbytes: int = _counted()
    reply_slots_held: int
    stale_releases: int = _counted()
    reconnections: int = _counted()
    kept_pins: int
    kept_hits: int = _counted()
    kept_misses: int = _counted()
    device_slab_nbytes: int = 0
    device_leased_nbytes: int = 0
    device_free_nbytes: int = 0
    device_slots_in_use: int = 0
    device_slots_lost: int = 0

    @classmethod
    def total(cls, parts: Sequence[ClientStatistics]) -> ClientStatistics:
        """Returns the sums of what several engines' connections have; one engine's as it is."""
        if len(parts) == 1:
            return parts[0]
        sums = {field.name: sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(cls)}
        return cls(**sums | {"connected": any(part.connected for part in parts), "epoch": 0, "client_id": 0})

    @property
    def slots_in_use(self) -> int:
        """Slots in any state but free."""
        return self.slots_writing + self.slots_submitted + self.slots_cached + self.slots_draining
