"""Kept content without a loop: found by any thread, waited for without polling, handed over; and claims by their names."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import threads
from tests.running_threads import Thread
from tests.tables import for_each
from tests.waiting import until

SIZE = 20_000


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@pytest.fixture
def ring(socket_dir: Path) -> Iterator[threads.Ring]:
    with threads.serve("test", slab_nbytes="4MiB", inline_nbytes="1KiB", socket_dir=str(socket_dir)) as ring:
        yield ring


@pytest.fixture
def clients(ring: threads.Ring, socket_dir: Path) -> Iterator[list[threads.Client]]:
    options: dict[str, Any] = {"socket_dir": str(socket_dir), "lease_nbytes": "256KiB", "inline_nbytes": "1KiB"}
    with threads.connect("test", **options) as one, threads.connect("test", **options) as two:
        yield [one, two]
        until(lambda: ring.statistics().kept_pinned == 0)


def give(client: threads.Client, *numbers: int) -> None:
    for number in numbers:
        client.keep(key(number), {"x": torch.full((SIZE,), number, dtype=torch.uint8)}).close()


def test_many_are_found_at_once_and_what_is_pinned_without_asking(ring: threads.Ring, clients: list[threads.Client]) -> None:
    first, other = clients
    give(first, 1, 2)
    with pytest.raises(shmring.WouldBlock):
        other.find_nowait(key(1))
    found = other.find_many([key(1), key(9), key(2)], timeout=20)
    assert [kept and int(kept.payload["x"][0]) for kept in found] == [1, None, 2]
    hits = ring.statistics().kept_hits
    again = other.find_nowait(key(2))
    assert (again.key, again.nbytes, ring.statistics().kept_hits) == (key(2), SIZE, hits)
    for kept in filter(None, found):
        kept.close()
    until(lambda: ring.statistics().kept_pinned == 1)
    with again:
        assert int(again.payload["x"].sum()) == 2 * SIZE


def test_threads_that_find_and_leave_all_the_time_never_see_a_pin_that_is_gone(
    ring: threads.Ring, clients: list[threads.Client]
) -> None:
    """Each finds the one content without asking the loop's thread, which forgets the pin whenever nobody has it."""
    first, other = clients
    give(first, 3)
    was_found: list[bool] = []
    missed = itertools.count()
    over = threading.Event()

    def hammer() -> None:
        while not over.is_set():
            try:
                kept = other.find_nowait(key(3))
            except shmring.WouldBlock:
                next(missed)
                continue
            assert int(kept.payload["x"][0]) == 3
            was_found[:] = [True]
            kept.close()

    running = [Thread(hammer) for _ in range(3)]
    for _ in range(200):
        with other.find(key(3)) as kept:
            assert kept is not None
            until(lambda: was_found, 60)  # a thread has found it too, as there is a pin
    over.set()
    for thread in running:
        thread.ended(60)
    assert next(missed) > 0, "nobody came while there was no pin"
    until(lambda: ring.statistics().kept_pinned == 0)
    assert (other.statistics().kept_pins, ring.statistics().protocol_errors) == (0, 0)
    assert other.connected


def test_a_thread_that_waits_for_a_key_is_woken(ring: threads.Ring, clients: list[threads.Client]) -> None:
    first, other = clients
    waiting = [Thread(other.wait_kept, key(1)) for _ in range(3)]
    until(lambda: ring.statistics().kept_waits == 1)
    with pytest.raises(TimeoutError, match="content to come"):
        other.wait_kept(key(1), timeout=0.01)
    with pytest.raises(TimeoutError):
        other.wait_kept(key(2), timeout=0.01)
    until(lambda: ring.statistics().kept_waits == 1)
    give(first, 1)
    for thread in waiting:
        with thread.ended(60) as kept:
            assert int(kept.payload["x"].sum()) == SIZE


def test_a_thread_that_is_interrupted_while_it_waits_holds_nothing(ring: threads.Ring, clients: list[threads.Client]) -> None:
    first, other = clients
    waiting = Thread(other.wait_kept, key(1))
    until(lambda: ring.statistics().kept_waits == 1)
    waiting.stop()
    waiting.is_stopped()
    until(lambda: ring.statistics().kept_waits == 0)
    give(first, 1)


def test_who_waits_hears_that_the_client_is_closed(ring: threads.Ring, clients: list[threads.Client]) -> None:
    waiting = Thread(clients[1].wait_kept, key(1))
    until(lambda: ring.statistics().kept_waits == 1)
    clients[1].close()
    with pytest.raises(shmring.ClosedError):
        waiting.ended(60)


def test_a_slot_is_handed_over_by_a_thread_that_does_not_wait(ring: threads.Ring, clients: list[threads.Client]) -> None:
    first, other = clients
    waiting = Thread(other.wait_kept, key(1))
    with first.slot(SIZE, timeout=20) as slot:
        view = slot.tensor((SIZE,), torch.uint8).fill_(5)
        with pytest.raises(TypeError, match="a slot of this client"):
            first.keep_nowait(key(1), {"x": view}, "slot")
        with pytest.raises(ValueError, match="lies in the slot"):
            first.keep_nowait(key(1), {"x": torch.ones(5000)}, slot)
        keeping = first.keep_nowait(key(1), {"x": view}, slot)
        del view
        with pytest.raises(shmring.ClosedError):
            slot.tensor((1,), torch.uint8)
        with pytest.raises(shmring.ClosedError):
            first.keep_nowait(key(1), {}, slot)
    keeping.wait(timeout=60)
    assert (keeping.key, keeping.ended, keeping.error) == (key(1), True, None)
    assert "kept" in repr(keeping)
    with waiting.ended(60) as kept:
        assert int(kept.payload["x"].sum()) == 5 * SIZE
    until(lambda: first.statistics().slots_in_use == 0)


# -- a claim by its name ---------------------------------------------------------------------------------------------------


def test_a_request_is_taken_by_its_name_in_any_order(ring: threads.Ring, clients: list[threads.Client]) -> None:
    first, other = clients
    for count, (client, name) in enumerate(((first, "a"), (other, "b"), (first, "b"), (first, "")), 1):
        client.submit({"of": name}, request_id=name)
        until(lambda: ring.untaken == count)  # noqa: B023 - it is called here
    one, two = ring.take_named("b"), ring.take_named("b", timeout=1)
    assert [claim.client_id for claim in (one, two)] == [other.client_id, first.client_id]
    assert ring.take_named("a").payload == {"of": "a"}
    with pytest.raises(TimeoutError, match="'b'"):
        ring.take_named("b", timeout=0.01)
    assert ring.claim_nowait().name == ""


def test_a_thread_that_waits_for_a_name_gets_it_before_others(ring: threads.Ring, clients: list[threads.Client]) -> None:
    claiming, named = Thread(ring.claim), [Thread(ring.take_named, "x") for _ in range(2)]
    until(lambda: len(ring._arrivals._named.get("x", ())) == 2 and ring._arrivals._claimers)
    for name in ("x", "y", "x"):
        clients[0].submit({"of": name}, request_id=name)
    assert claiming.ended(60).name == "y"
    assert [thread.ended(60).name for thread in named] == ["x", "x"]
    assert ring._arrivals._named == {}


def test_a_name_whose_request_was_aborted_is_waited_for(ring: threads.Ring, clients: list[threads.Client]) -> None:
    submission = clients[0].submit({"n": 1}, request_id="x")
    until(lambda: ring.untaken == 1)
    submission.abort()
    until(lambda: ring.untaken == 0)
    waiting = Thread(ring.take_named, "x")
    until(lambda: ring._arrivals._named)
    clients[1].submit({"n": 2}, request_id="x")
    assert waiting.ended(60).payload == {"n": 2}


def test_whoever_waits_for_a_name_hears_that_the_ring_is_closed(ring: threads.Ring) -> None:
    waiting = Thread(ring.take_named, "x")
    until(lambda: ring._arrivals._named)
    ring.close()
    with pytest.raises(shmring.ClosedError):
        waiting.ended(60)


@for_each(("wrong", "error"), [("", ValueError), (7, TypeError), ("x" * 257, ValueError)])
def test_what_is_no_name_is_refused(ring: threads.Ring, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="name"):
        ring.take_named(wrong)
