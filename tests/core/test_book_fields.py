"""What the compiled books have: every field is compared with the model's, or checked against what it follows from."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest

from shmring.core import compiled
from shmring.core.compiled import EngineBook
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits, EngineBookLimits, Geometry
from shmring.core.messages import DEVICE_MEMORY, SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, SlotRef
from shmring.core.states import ClientSlot
from tests.model import client_book as model_client_book
from tests.model import records as model_records
from tests.model.inside import counts_of, miscount
from tests.model.state import ANSWERS, DERIVED, FIELDS, HIDDEN
from tests.tables import for_each

#: What never changes, and what is worked out from the fields when it is looked at.
BESIDE = {
    "EngineBook": {"geometry", "limits"},
    "Lending": {"limits", "memory"},
    "KeptBook": {"max_blocks", "max_kept"},
    "ClientBook": {"limits"},
    "LeaseRecord": {"end"},
    "RequestRecord": {"generations"},
    "Window": {"end"},
    "ClientSlotRecord": {"offset"},
}

MODEL_RECORDS = [getattr(model_records, name) for name in model_records.__all__]
MODEL_RECORDS += [model_client_book.HeldLease, model_client_book.ClientSlotRecord, model_client_book.Waiter]
COMPILED = [
    *(compiled.EngineBook, compiled.Lending, compiled.KeptBook, *[getattr(compiled, name) for name in model_records.__all__]),
    *(compiled.ClientBook, compiled.HeldLease, compiled.ClientSlotRecord, compiled.Waiter),
]


@for_each("kind", COMPILED)
def test_no_field_of_a_compiled_book_is_compared_with_nothing(kind: type) -> None:
    name = kind.__name__
    fields = {field for field, member in vars(kind).items() if isinstance(member, types.GetSetDescriptorType)}
    beside = {*BESIDE.get(name, ()), *ANSWERS.get(name, ())}
    assert fields - beside == {*FIELDS[name], *DERIVED.get(name, ())} - (HIDDEN.keys() if name == "ClientBook" else set())


@for_each("kind", MODEL_RECORDS)
def test_no_field_of_a_model_is_compared_with_nothing(kind: Any) -> None:
    assert {field.name for field in dataclasses.fields(kind)} == set(FIELDS[kind.__name__])


# -- what is counted ---------------------------------------------------------------------------------------------------------


def busy_book() -> EngineBook:
    """Client 1 has a lease in each memory, and a slot in each; client 2 has one lease."""
    book = EngineBook(
        Geometry(leasable_blocks=12, reply_blocks=4, device_blocks=8),
        EngineBookLimits(max_lease_blocks=4, quota_blocks=8, max_leases=8, max_inflight=4, device_quota_blocks=8),
    )
    base = book.connect(1, 4 * BLOCK_NBYTES)
    book.connect(2, 4 * BLOCK_NBYTES)
    [granted] = book.request_lease(1, LeaseRequest(1, 4 * BLOCK_NBYTES, memory=DEVICE_MEMORY))
    slots = [slot_in(base, 1), slot_in(granted.grant, 2)]  # type: ignore[arg-type,union-attr]
    book.submit(1, 1, slots)
    book.check()
    return book


def slot_in(grant: LeaseGrant, n: int) -> SlotRef:
    return SlotRef(grant.lease_id, grant.offset, BLOCK_NBYTES - SLOT_HEADER_NBYTES, 1 << GENERATION_BITS | n)


def test_what_is_counted_is_what_there_is() -> None:
    book = busy_book()
    assert (book.clients[1].leased_blocks, book.clients[1].lease_counts) == ((4, 4), (1, 1))
    assert (book.clients[2].leased_blocks, book.clients[2].lease_counts) == ((4, 0), (1, 0))
    assert book.count_device_slots() == 1
    assert (book.host.free_nbytes, book.lendings[1].free_nbytes) == (4 * BLOCK_NBYTES, 4 * BLOCK_NBYTES)


def miscount_leases(book: Any) -> None:
    book.clients[1].leased_blocks = (5, 4)


def miscount_leases_in_device_memory(book: Any) -> None:
    book.clients[1].leased_blocks = (4, 5)


def miscount_lease_numbers(book: Any) -> None:
    book.clients[1].lease_counts = (0, 0)


def miscount_replies(book: Any) -> None:
    book.clients[1].reply_blocks += 1


def miscount_slots(book: Any) -> None:
    slots, device_slots = counts_of(book)
    miscount(book, (*slots[:-1], slots[-1] + 1), device_slots)


def miscount_device_slots(book: Any) -> None:
    slots, device_slots = counts_of(book)
    miscount(book, slots, device_slots + 1)


def miscount_states(book: Any) -> None:
    states, kept = counts_of(book.host)
    miscount(book.host, (states[0], states[1] - 1, states[2] + 1), kept)


def miscount_what_is_kept(book: Any) -> None:
    states, _ = counts_of(book.host)
    miscount(book.host, states, 1)


def lose_a_place(book: Any) -> None:
    book.host._by_start.reverse()


@for_each(
    "damage",
    [
        miscount_leases,
        miscount_leases_in_device_memory,
        miscount_lease_numbers,
        miscount_replies,
        miscount_slots,
        miscount_device_slots,
        miscount_states,
        miscount_what_is_kept,
        lose_a_place,
    ],
)
def test_check_finds_what_is_miscounted(damage: Callable[[Any], None]) -> None:
    book = busy_book()
    damage(book)
    with pytest.raises(AssertionError):
        book.check()


@for_each("place", [0, 1, 2, 3])
def test_check_finds_what_a_frontend_miscounts(place: int) -> None:
    """Slots by state, recalls, draining blocks, and base leases."""
    limits = ClientBookLimits(1, 24 * BLOCK_NBYTES, 8, 4 * BLOCK_NBYTES, 5.0)
    book: Any = compiled.ClientBook(limits)
    book.granted(LeaseGrant(0, 1, BLOCK_NBYTES, 4 * BLOCK_NBYTES), 0.0)
    assert book.acquire(1, held=True)
    book.check()
    counts = list(counts_of(book))
    counts[place] = (0,) * len(ClientSlot) if place == 0 else 0 if counts[place] else 1
    miscount(book, *counts)
    with pytest.raises(AssertionError):
        book.check()
