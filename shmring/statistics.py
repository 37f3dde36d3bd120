"""The numbers of each side: frozen records, for tests, metrics and people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["ClientStatistics", "RingStatistics", "WorkerStatistics", "counted_in", "counts_of"]


def _counted(default: Any = dataclasses.MISSING) -> Any:
    """A field of a number that is an attribute of that name where it is counted."""
    return dataclasses.field(default=default, metadata={"is_counted": True})


def counted_in(record: type[_Record]) -> tuple[str, ...]:
    """Returns the names of a record's fields that are filled in by :func:`counts_of`."""
    return tuple(field.name for field in dataclasses.fields(record) if field.metadata)  # type: ignore[arg-type]


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
        rank, pid: which one.
        is_member: whether it gets messages; if not, its connection has ended or it was dropped, and it may still be reading.
        sent: messages so far.
        unacknowledged, unacknowledged_nbytes: messages that it has not left, and the memory that they keep.
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
        epoch: identity of this engine's life.
        slab_nbytes: the whole slab.
        shm_nbytes: what of it lies in ``/dev/shm``; the rest lies in memfds.
        leasable_nbytes: the part that is leased out; ``free`` + ``leased`` + ``quarantined`` + ``kept`` add up to it.
        clients: frontends connected now.
        departed_clients: frontends that are gone but of which something is still quarantined or being read.
        lease_requests_waiting: frontends that wait for a lease.
        waiting, running: requests not yet claimed, and claimed.
        slots_published, slots_claimed, slots_draining: slots in each state.
        reply_nbytes, reply_free_nbytes: the reply reserve, and what of it is free.
        replies_waiting: replies that wait for space in it.
        submitted, finished, failed, aborted: requests; the last three are terminal.
        replies: replies sent.
        reply_copies, reply_copied_nbytes: tensors copied into replies.
        received_nbytes: bytes of slots taken over from frontends.
        late_aborts: aborts of requests that had ended: the messages crossed.
        stale_releases: reply slots that were given back once more.
        protocol_errors: connections closed because their frontend broke the rules.
        refused: connections refused in the handshake.
        reclaimed_nbytes: bytes taken back from frontends that had gone.
        kept, kept_nbytes: contents that are kept to be sent again, and their part of the slab.
        kept_pinned, kept_pinned_nbytes: of them, those that somebody uses. The memory of the others is as good as free.
        kept_capacity_nbytes: what may be kept.
        kept_hits, kept_misses: how often a frontend looked for content, and it was there or not.
        kept_evictions: contents that have gone, because their memory was wanted.
        pinned_nbytes, pin_seconds: what of the slab is registered with CUDA (all or nothing), and what that took.
        device_copies, device_copied_nbytes: requests copied to a GPU, and their bytes, small gaps between tensors included.
        device_slab_nbytes: the device slab; 0 if there is none. What is in it is in none of the sizes above, but its slots are.
        device_slab_free_nbytes, device_slab_leased_nbytes, device_slab_quarantined_nbytes: they add up to it.
        device_slots_in_use: slots in it that the engine holds in any state.
        device_slots_lost: slots of it that are kept for good, because CUDA failed to say when they are free.
        device_fences: events of frontends that are open in this process.
        workers: one record for each worker, in order of rank.
        broadcasts, gathers: messages sent to workers, shared claims among the former.
        broadcasts_outstanding: of those, messages that some worker has not left.
        broadcast_nbytes, broadcast_free_nbytes: memory for what is copied to workers, and what of it is free.
        broadcast_copied_nbytes, broadcast_in_place_nbytes: bytes of tensors copied for workers, and sent from where they were.
        late_answers: replies of workers for which nobody waited any more.
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
    reply_free_nbytes: int = _counted()
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
    device_copies: int
    device_copied_nbytes: int
    kept: int
    kept_nbytes: int
    kept_pinned: int
    kept_pinned_nbytes: int
    kept_capacity_nbytes: int
    kept_hits: int
    kept_misses: int
    kept_evictions: int
    device_slab_nbytes: int = 0
    device_slab_free_nbytes: int = 0
    device_slab_leased_nbytes: int = 0
    device_slab_quarantined_nbytes: int = 0
    device_slots_in_use: int = 0
    device_slots_lost: int = 0
    device_fences: int = 0
    workers: tuple[WorkerStatistics, ...] = ()
    broadcasts: int = _counted(0)
    gathers: int = 0
    broadcasts_outstanding: int = 0
    broadcast_nbytes: int = 0
    broadcast_free_nbytes: int = 0
    broadcast_copied_nbytes: int = 0
    broadcast_in_place_nbytes: int = 0
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
        epoch: the identity of its life; 0 if none is, and of several engines together.
        client_id: how the engine calls this client; 0 likewise.
        leases, leased_nbytes, free_nbytes: leases held, their bytes, and bytes of them in no slot.
        slots_writing, slots_submitted, slots_cached, slots_draining: slots in each state.
        waiting: callers in line for a slot.
        in_flight: requests without a terminal reply.
        submitted, finished, failed, aborted: requests; the last three are terminal.
        copies, copied_nbytes: tensors copied for sending, into slots or messages.
        in_place, in_place_nbytes: tensors sent from where they were: no copy.
        inline_payloads: payloads whose tensors travelled in the message.
        slot_nbytes_submitted: bytes of slots handed to the engine.
        replies: replies received.
        reply_copies, reply_copied_nbytes: replies that were copied out of the engine's slab, which was short of space for them.
        reply_slots_held: reply slots that living views keep.
        kept_pins: kept contents that this client has pinned.
        kept_hits, kept_misses: how often :meth:`~shmring.Client.find` found something, and how often not. What this
            client has pinned already it finds without asking the engine.
        stale_releases: releases of slots that were not with the engine (late or doubled).
        reconnections: engines attached to after the first.
        device_slab_nbytes: the engine's device slab, once this client has attached to it. Its leases are in none of the sizes
            above, but its slots are.
        device_leased_nbytes, device_free_nbytes: bytes of leases in it, and bytes of them in no slot.
        device_slots_in_use: slots in it, in any state but free.
        device_slots_lost: slots of it that are kept for good, because CUDA failed to say when they are free.
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
