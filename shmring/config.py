"""Configuration of both ends: one frozen object each, every limit with its reason.

Nothing here reads the environment or the machine; settings that depend on them (the socket directory, the uid) are resolved
where they are used. Sizes are given in bytes or as text (``"4GiB"``, ``"64 MiB"``, ``"10MB"``) and stored in bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, TypeVar, get_args

from shmring.door import count_of, parse_nbytes, seconds_of, shown

__all__ = [
    "BACKINGS",
    "Backing",
    "ClientConfig",
    "ClientOptions",
    "RingConfig",
    "RingOptions",
    "WorkerConfig",
    "WorkerOptions",
]

#: Where a slab lies; see :class:`RingConfig`.
Backing = Literal["auto", "/dev/shm", "memfd"]
BACKINGS: tuple[Backing, ...] = get_args(Backing)

_MAX_BUSY_POLL_S = 0.1
_MIN_MESSAGE_RING_NBYTES = 16 << 10  # messages of 4 KiB, which have room for the text of an error and for lists of ids
_LARGEST_MESSAGE_NBYTES = 64 << 10  # as the core has it
_MAX_MESSAGE_RING_NBYTES = 16 << 20  # a client takes twice as much, and what lies there is only late

_LEAST_MAX_VALUES = 1024  # a payload of a few fields always finds room
_LARGEST_COUNT = 2**31 - 1  # the core counts in 32 bits
_LARGEST_UID = 2**32 - 1
_LARGEST_BACKLOG = 256  # as the core has it: stamps in a worker's page

_CUDA_DEVICE = re.compile(r"cuda(:[0-9]{1,3})?")


_Config = TypeVar("_Config", "RingConfig", "ClientConfig", "WorkerConfig")


def configured(kind: type[_Config], config: _Config | None, overrides: Mapping[str, object]) -> _Config:
    """Returns ``config`` (or the defaults) with ``overrides`` applied; an unknown option is a ``TypeError`` naming it."""
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config is a {kind.__name__}, or None, not {shown(config)}")
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise TypeError(f"{kind.__name__} has no option {', '.join(sorted(unknown))}")
    changes: dict[str, Any] = dict(overrides)
    return dataclasses.replace(config or kind(), **changes)


def _normalise(config: Any, *size_fields: str) -> None:
    for field in size_fields:
        value = getattr(config, field)
        if value is not None or getattr(type(config), field) is not None:  # some may be None, as they are if nobody says more
            _set(config, field, parse_nbytes(value, field))


def _set(config: Any, field: str, value: object) -> None:
    object.__setattr__(config, field, value)


def _uids_of(uids: Any, field: str) -> frozenset[int] | None:
    if uids is None:
        return None
    if not isinstance(uids, frozenset | set | list | tuple):
        raise TypeError(f"{field} is a set of user ids, or None, not {shown(uids)}")
    return frozenset(count_of(uid, f"a user id in {field}", least=0, most=_LARGEST_UID) for uid in uids)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def busy_poll_of(seconds: float) -> float:
    """Returns for how many seconds a side may look before it sleeps. Raises as :func:`~shmring.door.seconds_of`."""
    # Looking for longer does not reduce latency further, but keeps a core busy: vLLM's readers spin for a second, one core
    # each.
    return seconds_of(seconds, "busy_poll_s", most=_MAX_BUSY_POLL_S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The engine's side.

    Attributes:
        slab_nbytes: size of the whole slab, replies included. It is reserved at the start.
        backing: where the slab lies; ``"auto"``: in ``/dev/shm`` where it fits, else in a memfd.

            The log says which. ``"/dev/shm"``: in that mount. ``"memfd"``: in memory that no mount limits and no process can
            truncate.
        reply_nbytes: the part of it that is kept for replies; ``None``: a sixteenth of the slab.
        max_lease_nbytes: the largest *base* lease a frontend gets; ``None``: an eighth of what can be leased, so eight can
            connect before any has to give something back.
        client_quota_nbytes: how many bytes one frontend may hold in leases while others are connected; ``None``: three quarters
            of what can be leased. One that is alone may hold all, and each may always have one lease of any size.
        kept_nbytes: how many bytes of the slab may hold content that is kept to be sent again (``client.keep``); ``None``: half
            of what can be leased; 0: nothing is kept. Content that is not pinned gives way to leases.
        client_pinned_nbytes: how many bytes of kept content one frontend may have pinned at a time; ``None``: all of it. So one
            that reads and leaves nothing can't keep all content from being dropped.
        max_clients: connections of frontends at a time.

            Each costs two descriptors; the usual limit is 1,024. A connection that has ended does not count. A process with 16
            of these is refused.
        max_inflight: requests a client may have in flight. Bounds the engine's queue and its terminal replies.
        message_ring_nbytes: how many bytes of a client's messages may be unread, and as many of the messages to it; a power of
            two. A quarter of it, but at most 64 KiB, is the largest message: larger payloads travel in slots.
        max_payload_nbytes: the largest payload, either way. Tensors don't count, text and ``bytes`` do.
        max_tensors: tensors in one payload; their dimensions count toward ``max_payload_nbytes`` anyway.
        max_values: what the values of one payload may count, either way: a number, a truth value or nil 1, text, bytes, an
            array or a map 4, an extension 8; 8 bytes of text that is not ASCII 1. Reading a count takes 40 nanoseconds and 40
            bytes, so a loop waits for one payload for 20 ms at most. Send more values as a tensor.
        allowed_uids: user ids that may connect; ``None``: the engine's own.
        socket_dir: where the socket lives; ``None``: ``$XDG_RUNTIME_DIR/shmring``, else ``/tmp/shmring-<uid>``.
        prefault: touch the whole slab at the start, so that no request pays for a page's first use (49 ms per 64 MB).
        pin: whether the slab is registered with CUDA at the start (0.1 s a GB, and a context on this thread's current device),
            so that ``claim.to`` is a DMA from the slot. ``"auto"``: where CUDA works, else say so once; ``"on"``: fail where it
            doesn't; ``"off"``: leave CUDA alone.
        staging_nbytes: memory on each GPU that ``claim.to`` copies to, allocated at the first copy there. A request keeps its
            part until its last tensor is gone, and can be no larger than this.
        device_slab_nbytes: memory on a GPU for tensors that frontends make there (``client.slot(..., device="cuda")``),
            allocated at the start, rounded up to 2 MiB; 0: none. One frontend may hold three quarters of it while others are
            connected.
        device_slab_device: which GPU; ``"cuda"``: this thread's current one.
        inline_nbytes: requests whose tensors take no more than this may travel in the message, and such replies always do. At 4
            and 8 KiB that costs a quarter less than a slot; from 32 KiB on it costs more. Such bytes are not pinned.
        busy_poll_s: for how long after a message the loop looks for the next one instead of sleeping, which takes some
            microseconds off its latency and costs a core meanwhile. 0: for 200 microseconds, and only while that helps. If it
            is set, ``gather`` also looks for replies, for up to 250 microseconds, and an idle ``claim`` for up to 50.
        worker_backlog: how many messages a worker may have that it has not left yet; at most 256. Further messages to it wait.
        broadcast_nbytes: memory for the copies of tensors in all messages that workers have not left yet. Reserved when the
            first worker joins.
        debug: log which views outlive their claim, where that was left, and what holds them. Looking stops the loop for a
            moment.
    """

    slab_nbytes: int | str = "1GiB"
    backing: Backing = "auto"
    reply_nbytes: int | str | None = None
    max_lease_nbytes: int | str | None = None
    client_quota_nbytes: int | str | None = None
    kept_nbytes: int | str | None = None
    client_pinned_nbytes: int | str | None = None
    max_clients: int = 256
    max_inflight: int = 1024
    message_ring_nbytes: int | str = "256KiB"
    max_payload_nbytes: int | str = "16MiB"
    max_tensors: int = 4096
    max_values: int = 524288
    allowed_uids: frozenset[int] | None = None
    socket_dir: str | None = None
    prefault: bool = True
    pin: Literal["auto", "on", "off"] = "auto"
    staging_nbytes: int | str = "256MiB"
    device_slab_nbytes: int | str = 0
    device_slab_device: str = "cuda"
    inline_nbytes: int | str = "8KiB"
    busy_poll_s: float = 0.0
    worker_backlog: int = 128
    broadcast_nbytes: int | str = "256MiB"
    debug: bool = False

    def __post_init__(self) -> None:
        _normalise(
            self, "slab_nbytes", "reply_nbytes", "max_lease_nbytes", "client_quota_nbytes", "kept_nbytes",
            "client_pinned_nbytes", "message_ring_nbytes", "max_payload_nbytes", "staging_nbytes", "device_slab_nbytes",
            "inline_nbytes", "broadcast_nbytes",
        )  # fmt: skip
        _require(self.backing in BACKINGS, f"backing must be 'auto', '/dev/shm' or 'memfd', not {shown(self.backing)}")
        _require(self.pin in ("auto", "on", "off"), f"pin must be 'auto', 'on' or 'off', not {shown(self.pin)}")
        _require(int(self.staging_nbytes) >= 4096, "staging_nbytes must be at least 4096")
        _require(
            isinstance(self.device_slab_device, str) and _CUDA_DEVICE.fullmatch(self.device_slab_device) is not None,
            f"device_slab_device must be 'cuda' or 'cuda:N', not {shown(self.device_slab_device)}",
        )
        for field in ("max_clients", "max_inflight", "max_tensors"):
            _set(self, field, count_of(getattr(self, field), field, most=_LARGEST_COUNT))
        _set(self, "max_values", count_of(self.max_values, "max_values", least=_LEAST_MAX_VALUES, most=_LARGEST_COUNT))
        _set(self, "worker_backlog", count_of(self.worker_backlog, "worker_backlog", most=_LARGEST_BACKLOG))
        _require(int(self.broadcast_nbytes) >= 8192, "broadcast_nbytes must be at least 8192")
        _set(self, "busy_poll_s", busy_poll_of(self.busy_poll_s))
        _set(self, "allowed_uids", _uids_of(self.allowed_uids, "allowed_uids"))
        ring_nbytes = int(self.message_ring_nbytes)
        _require(
            _MIN_MESSAGE_RING_NBYTES <= ring_nbytes <= _MAX_MESSAGE_RING_NBYTES and not ring_nbytes & (ring_nbytes - 1),
            f"message_ring_nbytes must be a power of two from {_MIN_MESSAGE_RING_NBYTES} to {_MAX_MESSAGE_RING_NBYTES}, "
            f"not {ring_nbytes}",
        )
        _require(int(self.max_payload_nbytes) >= 4096, "max_payload_nbytes must be at least 4096")
        _require(
            int(self.inline_nbytes) <= min(ring_nbytes // 4, _LARGEST_MESSAGE_NBYTES) // 2,
            "inline_nbytes must be at most half of the largest message (see message_ring_nbytes)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """A frontend's side.

    Attributes:
        lease_nbytes: the base lease asked for at connect, and the least asked for later.
        inline_nbytes: payloads whose tensors have no more bytes than this travel in the message, if the engine allows as much;
            :class:`RingConfig` says why.
        copy_offload_nbytes: copies larger than this run on a thread; smaller ones in the loop, at most so many bytes in each
            turn (16 MiB take one to two milliseconds).
        lease_idle_s: a further lease that has been empty for this long goes back to the engine.
        connect_timeout_s: how long ``connect`` waits for an engine of that name, and for its answer.
        socket_dir: as in :class:`RingConfig`.
        engine_uids: user ids an engine may run under; ``None``: this process's own. An engine of another user is refused.
        prefault: map all of the slab's pages soon after attaching, so that no copy pays for their first use. This takes page
            tables (2 MiB per GiB); the slab then counts as resident in this process.
        busy_poll_s: as in :class:`RingConfig`.
        map_leased_only: a debug mode: only leased ranges are writable in this process, so a stray write elsewhere is a fault.
        debug: log which views outlive their slot, as in :class:`RingConfig`.
    """

    lease_nbytes: int | str = "16MiB"
    inline_nbytes: int | str = "8KiB"
    copy_offload_nbytes: int | str = "16MiB"
    lease_idle_s: float = 5.0
    connect_timeout_s: float = 60.0
    socket_dir: str | None = None
    engine_uids: frozenset[int] | None = None
    prefault: bool = True
    busy_poll_s: float = 0.0
    map_leased_only: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        _normalise(self, "lease_nbytes", "inline_nbytes", "copy_offload_nbytes")
        _require(int(self.lease_nbytes) >= 4096, "lease_nbytes must be at least 4096")
        _set(self, "busy_poll_s", busy_poll_of(self.busy_poll_s))
        for field in ("lease_idle_s", "connect_timeout_s"):
            _set(self, field, seconds_of(getattr(self, field), field))
        _set(self, "engine_uids", _uids_of(self.engine_uids, "engine_uids"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A worker's side.

    Attributes:
        connect_timeout_s: how long ``join`` waits for an engine of that name, and for its answer.
        socket_dir: as in :class:`RingConfig`.
        engine_uids: user ids an engine may run under; ``None``: this process's own. An engine of another user is refused.
        prefault: map all pages of the engine's memory when joining, so that no message pays for their first use.
        busy_poll_s: for how long ``receive`` looks for the next message before it sleeps (0.1 ms anyway, as long as that
            helps). Other processes run between two looks; if they keep the core for more than 100 microseconds, the next 64
            waits sleep at once. An engine that gathers replies polls with its own (``RingConfig``).
    """

    connect_timeout_s: float = 60.0
    socket_dir: str | None = None
    engine_uids: frozenset[int] | None = None
    prefault: bool = True
    busy_poll_s: float = 0.0

    def __post_init__(self) -> None:
        _set(self, "busy_poll_s", busy_poll_of(self.busy_poll_s))
        _set(self, "connect_timeout_s", seconds_of(self.connect_timeout_s, "connect_timeout_s"))
        _set(self, "engine_uids", _uids_of(self.engine_uids, "engine_uids"))


# ``**overrides`` for type checkers. A test compares them with the fields.


class RingOptions(TypedDict, total=False):
    """The fields of :class:`RingConfig`, as keywords of :func:`shmring.serve`."""

    slab_nbytes: int | str
    backing: Backing
    reply_nbytes: int | str | None
    max_lease_nbytes: int | str | None
    client_quota_nbytes: int | str | None
    kept_nbytes: int | str | None
    client_pinned_nbytes: int | str | None
    max_clients: int
    max_inflight: int
    message_ring_nbytes: int | str
    max_payload_nbytes: int | str
    max_tensors: int
    max_values: int
    allowed_uids: frozenset[int] | None
    socket_dir: str | None
    prefault: bool
    pin: Literal["auto", "on", "off"]
    staging_nbytes: int | str
    device_slab_nbytes: int | str
    device_slab_device: str
    inline_nbytes: int | str
    busy_poll_s: float
    worker_backlog: int
    broadcast_nbytes: int | str
    debug: bool


class ClientOptions(TypedDict, total=False):
    """The fields of :class:`ClientConfig`, as keywords of :func:`shmring.connect`."""

    lease_nbytes: int | str
    inline_nbytes: int | str
    copy_offload_nbytes: int | str
    lease_idle_s: float
    connect_timeout_s: float
    socket_dir: str | None
    engine_uids: frozenset[int] | None
    prefault: bool
    busy_poll_s: float
    map_leased_only: bool
    debug: bool


class WorkerOptions(TypedDict, total=False):
    """The fields of :class:`WorkerConfig`, as keywords of :func:`shmring.join`."""

    connect_timeout_s: float
    socket_dir: str | None
    engine_uids: frozenset[int] | None
    prefault: bool
    busy_poll_s: float
