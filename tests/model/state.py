"""A book's whole state as plain data, of a compiled book and of its model alike.

What each kind of object holds is said here once. ``FIELDS`` is what both have; ``DERIVED`` is what only the compiled one keeps,
to be fast, and what follows from the rest: ``check`` of the book compares it with what it is derived from. A test compares both
with the fields that there are.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from types import NoneType
from typing import Any

import msgspec

from shmring.core.compiled import ClientBook
from shmring.core.states import ClientSlot, EngineSlot, Lease
from tests.model.inside import slots_here, slots_with_engine

FIELDS: dict[str, tuple[str, ...]] = {
    "EngineBook": (
        *("clients", "lendings", "late_aborts", "stale_releases"),
        *("_replies", "_reply_wants", "_may_overtake", "_next_reply_generation", "_lent_replies", "kept", "_next_use"),
        "_is_draining",
    ),
    "Lending": ("_free", "_wants", "_window", "_next_lease_id"),
    "ClientRecord": (
        *("client_id", "last_generation", "last_request_id", "connected", "dead"),
        *("leases", "slots", "requests", "replies", "unsent_replies", "pins", "waits"),
    ),
    "LeaseRecord": (
        "lease_id",
        "client_id",
        "memory",
        "start",
        "blocks",
        "state",
        "live",
        "recalled",
        "given_up",
        "kept_blocks",
        "new_moments",
        "silent_moments",
    ),
    "KeptBook": (
        *("by_key", "by_generation", "unpinned", "waits", "dropped", "hits", "misses", "refusals", "taken", "withdrawn"),
        *("evictions", "evictions_for_content", "evicted_nbytes", "deliveries_dropped"),
    ),
    "KeptRecord": ("generation", "key", "start", "blocks", "nbytes", "is_copied", "payload", "pins", "hits", "for_one"),
    "EngineSlotRecord": ("generation", "lease", "start", "blocks", "state", "kept"),
    "RequestRecord": ("request_id", "slots", "state", "unread_replies"),
    "LeaseWant": ("client_id", "token", "blocks", "preferred_blocks", "waits", "rest_moments", "patience"),
    "ReplyWant": ("client_id", "blocks", "request_id"),
    "Window": ("client_id", "start", "blocks", "next_lease_id", "vain_moments"),
    "ClientBook": (
        *("leases", "_waiters", "_submitted", "_others"),
        *("_token", "_requested_nbytes", "_request_waits", "_wish_nbytes", "_next_generation"),
    ),
    "HeldLease": ("lease_id", "is_base", "slots", "empty_since", "recalled", "kept_blocks"),
    "ClientSlotRecord": ("lease", "start", "blocks", "nbytes", "state", "held", "viewed", "generation"),
    "Waiter": ("nbytes", "held", "vain_moments", "rest_moments", "patience"),
}
DERIVED: dict[str, tuple[str, ...]] = {
    "EngineBook": ("host",),
    "Lending": ("clients", "contents", "_apart", "_by_start"),
    "ClientRecord": (
        *("reply_blocks", "passing_blocks", "leased_blocks", "lease_counts", "pin_count", "pinned_blocks"),
        *("untaken", "untaken_blocks"),
    ),
    "KeptBook": ("untaken",),
}
#: Of a frontend's compiled book, what Python does not see.
HIDDEN = {"_submitted": slots_with_engine, "_others": slots_here}
#: What the compiled code has in tables by number, which have no order of their own.
BY_NUMBER = {
    "slots": lambda client: dict(sorted(client.slots.items())),
    "requests": lambda client: dict(sorted(client.requests.items())),
}
#: What a book answers about itself; its counts of slots and leases by state come beside.
ANSWERS: dict[str, tuple[str, ...]] = {
    "EngineBook": ("waiting_lease_requests", "reply_free_nbytes"),
    "Lending": ("free_nbytes", "waiting_lease_requests"),
    "KeptBook": ("blocks", "unpinned_blocks"),
    "ClientBook": ("waiting", "leased_nbytes", "free_nbytes"),
}


def plain(value: Any) -> Any:
    """Returns a deep, comparable copy, in which the order of dicts counts."""
    copy = _COPIES[type(value)]
    return value if copy is None else copy(value)


_ENGINE_SLOTS, _CLIENT_SLOTS, _LEASES = tuple(EngineSlot), tuple(ClientSlot), tuple(Lease)  # enums take long to go through

_Copy = Callable[[Any], Any]


class _Copies(dict[type, _Copy | None]):
    """How objects of a class are copied, which is looked up once. None: they stay as they are."""

    def __missing__(self, kind: type) -> _Copy | None:
        copy = self[kind] = _copy_of(kind)
        return copy


_COPIES = _Copies()


def _copy_of(kind: type) -> _Copy | None:
    if issubclass(kind, NoneType | int | float | str | bytes | enum.Enum | msgspec.Struct):
        return None
    if issubclass(kind, dict):
        return lambda value: [(key, plain(item)) for key, item in value.items()]
    if issubclass(kind, list | tuple):
        return lambda value: [plain(item) for item in value]
    if issubclass(kind, set | frozenset):
        return lambda value: sorted((plain(item) for item in value), key=repr)
    name = next(base.__name__ for base in kind.__mro__ if base.__name__ in FIELDS or hasattr(base, "runs"))
    if name not in FIELDS:
        return lambda value: [getattr(value, "start", None), getattr(value, "length", None), *value.runs()]
    special = HIDDEN if issubclass(kind, ClientBook) else BY_NUMBER if name == "ClientRecord" else {}
    fields = [(field, special.get(field, operator.attrgetter(field))) for field in FIELDS[name]]
    answers = [(answer, operator.attrgetter(answer)) for answer in ANSWERS.get(name, ())]
    add = _ADDS.get(name)

    def copy(value: Any) -> Any:
        items = [(field, plain(read(value))) for field, read in fields]
        items += [(answer, read(value)) for answer, read in answers]
        if add is not None:
            add(value, items)
        return name, items

    return copy


def _add_of_engine(value: Any, items: list[tuple[str, Any]]) -> None:
    items += [("slots", [value.count_slots(state) for state in _ENGINE_SLOTS]), ("device", value.count_device_slots())]


def _add_of_client(value: Any, items: list[tuple[str, Any]]) -> None:
    items.append(("slots", [value.count(state) for state in _CLIENT_SLOTS]))
    items += [("draining", value.draining_nbytes()), ("in use", value.leases_in_use()), ("expiry", value.next_expiry())]


def _add_of_lending(value: Any, items: list[tuple[str, Any]]) -> None:
    items[0] = ("_free", _joined([*value._free.runs(), *getattr(value, "_apart", ())]))
    items.append(("leased", [value.leased_nbytes(state) for state in _LEASES]))


def _add_of_request(value: Any, items: list[tuple[str, Any]]) -> None:
    items[1] = ("slots", plain([*value.slots]))


#: What a class has beside its fields and answers, or has otherwise than its model.
_ADDS = {
    "EngineBook": _add_of_engine,
    "ClientBook": _add_of_client,
    "Lending": _add_of_lending,
    "RequestRecord": _add_of_request,
}


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs by address, those that touch made one: what is free, wherever it is kept."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(runs):
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
