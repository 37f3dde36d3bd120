"""A book's whole state as plain data, of a compiled book and of its model alike.

What each kind of object holds is said here once. ``FIELDS`` is what both have; ``DERIVED`` is what only the compiled one keeps,
to be fast, and what follows from the rest: ``check`` of the book compares it with what it is derived from. A test compares both
with the fields that there are.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from shmring.core.compiled import ClientBook
from shmring.core.states import ClientSlot, EngineSlot, Lease
from tests.model.inside import slots_here, slots_with_engine

__all__ = ["DERIVED", "FIELDS", "HIDDEN", "plain"]

FIELDS: dict[str, tuple[str, ...]] = {
    "EngineBook": (
        *("clients", "lendings", "late_aborts", "stale_releases"),
        *("_replies", "_reply_wants", "_next_reply_generation", "_lent_replies", "kept", "_next_use"),
    ),
    "Lending": ("_free", "_wants", "_window", "_next_lease_id"),
    "ClientRecord": (
        *("client_id", "last_generation", "last_request_id", "connected", "dead"),
        *("leases", "slots", "requests", "replies", "unsent_replies", "pins"),
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
    ),
    "KeptBook": ("by_key", "by_generation", "unpinned", "hits", "misses", "evictions"),
    "KeptRecord": ("generation", "key", "start", "blocks", "nbytes", "is_copied", "payload", "pins"),
    "EngineSlotRecord": ("generation", "lease", "start", "blocks", "state", "kept"),
    "RequestRecord": ("request_id", "slots", "state"),
    "LeaseWant": ("client_id", "token", "blocks", "preferred_blocks", "waits"),
    "ReplyWant": ("client_id", "blocks"),
    "Window": ("client_id", "start", "blocks"),
    "ClientBook": (
        *("leases", "_waiters", "_submitted", "_others"),
        *("_token", "_requested_nbytes", "_request_waits", "_wish_nbytes", "_next_generation"),
    ),
    "HeldLease": ("lease_id", "is_base", "slots", "empty_since", "recalled", "kept_blocks"),
    "ClientSlotRecord": ("lease", "start", "blocks", "nbytes", "state", "held", "viewed", "generation"),
    "Waiter": ("nbytes", "held"),
}
DERIVED: dict[str, tuple[str, ...]] = {
    "EngineBook": ("host",),
    "Lending": ("clients", "contents", "_apart", "_by_start"),
    "ClientRecord": ("reply_blocks", "leased_blocks", "lease_counts", "pin_count", "pinned_blocks"),
}
#: Of a frontend's compiled book, what Python does not see.
HIDDEN = {"_submitted": slots_with_engine, "_others": slots_here}
#: What a book answers about itself; its counts of slots and leases by state come beside.
ANSWERS: dict[str, tuple[str, ...]] = {
    "EngineBook": ("waiting_lease_requests", "reply_free_nbytes"),
    "Lending": ("free_nbytes", "waiting_lease_requests"),
    "KeptBook": ("blocks", "unpinned_blocks"),
    "ClientBook": ("waiting", "leased_nbytes", "free_nbytes"),
}


def plain(value: Any) -> Any:
    """Returns a deep, comparable copy, in which the order of dicts counts."""
    if value is None or isinstance(value, int | float | str | bytes | enum.Enum | msgspec.Struct):
        return value
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    name = next(kind.__name__ for kind in type(value).__mro__ if kind.__name__ in FIELDS or hasattr(kind, "runs"))
    if name not in FIELDS:
        return [getattr(value, "start", None), getattr(value, "length", None), *value.runs()]
    items = [(field, plain(_field(value, field))) for field in FIELDS[name]]
    items += [(answer, getattr(value, answer)) for answer in ANSWERS.get(name, ())]
    if name == "EngineBook":
        items += [("slots", [value.count_slots(state) for state in EngineSlot]), ("device", value.count_device_slots())]
    if name == "ClientBook":
        items.append(("slots", [value.count(state) for state in ClientSlot]))
        items += [("draining", value.draining_nbytes()), ("in use", value.leases_in_use()), ("expiry", value.next_expiry())]
    if name == "Lending":
        items[0] = ("_free", _joined([*value._free.runs(), *getattr(value, "_apart", ())]))
        items.append(("leased", [value.leased_nbytes(state) for state in Lease]))
    if name == "RequestRecord":
        items[1] = ("slots", plain(value.slots or []))
    return name, items


def _field(value: Any, name: str) -> Any:
    if isinstance(value, ClientBook) and name in HIDDEN:
        return HIDDEN[name](value)
    return getattr(value, name)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs by address, those that touch made one: what is free, wherever it is kept."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(runs):
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
