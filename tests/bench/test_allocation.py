"""``bench allocator``: traces fill a slab, leases hold what they should, and a run says what it saw."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.allocation.command import MANY_LIVE, MEAN_FILL, MINIMUM_FILL, STORED, Plan, Result, allocator_command, beside_stored
from bench.allocation.leased import Leased, lone_book
from bench.allocation.measures import (
    LIMIT,
    OURS,
    POLICIES,
    Limit,
    Policy,
    costs,
    evicting,
    first_failures,
    shares,
)
from bench.allocation.traces import LIFETIMES, SIZES, trace
from shmring.core.compiled import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES
from tests.tables import for_each

SLAB_NBYTES = 1 << 30
RANGE = 20_000
LARGEST = 500

# -- policies ----------------------------------------------------------------------------------------------------------


def churn(policy: Policy, start: int, length: int, seed: int = 1) -> None:
    """Places and frees at random; no place may overlap another or leave the range. Frees everything at the end."""
    chance = random.Random(seed)
    live: dict[int, int] = {}
    taken: set[int] = set()
    for _ in range(1500):
        if live and chance.random() < 0.45:
            place = chance.choice(list(live))
            blocks = live.pop(place)
            taken.difference_update(range(place, place + blocks))
            policy.free(place, blocks)
            continue
        blocks = chance.randint(1, LARGEST)
        found = policy.allocate(blocks)
        if found is not None:
            cells = set(range(found, found + blocks))
            assert not cells & taken
            assert start <= found
            assert found + blocks <= start + length
            taken |= cells
            live[found] = blocks
    assert len(live) > 20
    for place, blocks in live.items():
        policy.free(place, blocks)


def capacity(policy: Policy, blocks: int) -> int:
    """How many runs of a length can be placed; they are freed again."""
    places = []
    while (place := policy.allocate(blocks)) is not None:
        places.append(place)
    for place in places:
        policy.free(place, blocks)
    return len(places)


def test_places_are_disjoint_and_everything_comes_back() -> None:
    policy = RunAllocator(7, RANGE)
    before = [capacity(policy, blocks) for blocks in (1, 100, LARGEST)]
    assert min(before) > 0
    churn(policy, 7, RANGE)
    assert [capacity(policy, blocks) for blocks in (1, 100, LARGEST)] == before


@for_each("frontends", [1, 3])
def test_leases_hold_disjoint_slots_and_come_back(frontends: int) -> None:
    policy = Leased(RANGE, frontends)
    churn(policy, 1, RANGE)
    policy.ledger.check()
    for book in policy.books.values():
        book.check()
        assert all(lease.slots.is_empty for lease in book.leases.values())
    assert not policy.slots


def test_the_limit_loses_nothing_but_what_does_not_fit() -> None:
    assert capacity(Limit(0, 1024), 100) == 10


# -- traces --------------------------------------------------------------------------------------------------------------


@for_each("sizes", SIZES)
@for_each("lifetime", LIFETIMES)
def test_a_trace_fills_the_slab_and_every_slot_goes_at_most_once(sizes: str, lifetime: str) -> None:
    arrivals = list(trace(SIZES[sizes], LIFETIMES[lifetime], SLAB_NBYTES, 5))
    assert arrivals == list(trace(SIZES[sizes], LIFETIMES[lifetime], SLAB_NBYTES, 5))
    assert arrivals != list(trace(SIZES[sizes], LIFETIMES[lifetime], SLAB_NBYTES, 6))
    gone = [slot for arrival in arrivals for slot in arrival.gone]
    assert len(set(gone)) == len(gone)
    assert all(slot < number for number, arrival in enumerate(arrivals) for slot in arrival.gone)
    assert all(1 <= arrival.nbytes <= SIZES[sizes].largest_nbytes for arrival in arrivals)
    live_nbytes = sum(arrival.nbytes for arrival in arrivals) - sum(arrivals[slot].nbytes for slot in gone)
    assert live_nbytes > SLAB_NBYTES
    assert gone  # it has come and gone before


def test_a_storm_takes_half_of_what_is_there() -> None:
    arrivals = list(trace(SIZES["mix"], LIFETIMES["storms"], SLAB_NBYTES, 5))
    assert max(len(arrival.gone) for arrival in arrivals) > 20
    assert max(len(arrival.gone) for arrival in trace(SIZES["mix"], LIFETIMES["fifo"], SLAB_NBYTES, 5)) < 10


# -- fill ------------------------------------------------------------------------------------------------------------------


def test_nobody_is_fuller_on_average_than_what_moving_together_gives() -> None:
    """On a single trace one may be: what fails earlier may fail at a smaller slot."""
    sizes, lifetime = SIZES["log-uniform"], LIFETIMES["random"]
    limit = first_failures(POLICIES[LIMIT], sizes, lifetime, SLAB_NBYTES, range(20))
    assert limit["minimum"] > 1 - (sizes.largest_nbytes + 2 * BLOCK_NBYTES) / SLAB_NBYTES - 0.001
    for name, policy in POLICIES.items():
        if policy.fills:
            mean = first_failures(policy, sizes, lifetime, SLAB_NBYTES, range(20))["mean"]
            assert 0 < mean <= limit["mean"], name


def test_a_fill_says_mean_and_worst() -> None:
    fill = shares([0.5, *[0.9] * 198, 1.0])
    assert fill["mean"] == pytest.approx((0.5 + 0.9 * 198 + 1) / 200)
    assert (fill["p1"], fill["minimum"], fill["samples"]) == (0.9, 0.5, 200)


def test_ours_keeps_the_target_where_slots_go_in_order() -> None:
    fill = first_failures(POLICIES[OURS], SIZES["log-uniform"], LIFETIMES["fifo"], 4 << 30, range(20))
    assert fill["mean"] >= MEAN_FILL
    assert fill["minimum"] >= MINIMUM_FILL


def test_ours_is_fuller_by_mooncake_s_method_than_mooncake_says_of_its_own() -> None:
    fill = evicting(POLICIES[OURS], 8_000, seed=1)
    assert 0.8416 < fill["mean"] < evicting(POLICIES[LIMIT], 8_000, seed=1)["mean"]
    assert fill["samples"] == 7_600  # the first twentieth is not counted


# -- time ------------------------------------------------------------------------------------------------------


def test_the_lease_book_that_is_timed_places_and_releases() -> None:
    book = lone_book(10_000, 4)
    *placed, none = [book.allocate(1_000) for _ in range(9)]
    assert none is None  # two of 1,000 in each of 2,500
    assert len(set(placed)) == 8
    assert placed[0] is not None
    book.free(placed[0], 1_000)
    assert book.allocate(1_000) is not None
    assert book.allocate(1_000) is None
    book.book.check()


def test_costs_are_of_all_subjects_at_once() -> None:
    timed = [policy for policy in POLICIES.values() if policy.timed]
    found = costs(timed, SIZES["log-uniform"], 10, 2)
    assert len(found) == len(timed) == 3
    assert all(0 < cost["minimum_us"] <= cost["median_us"] <= cost["maximum_us"] for cost in found)


# -- beside the stored run ---------------------------------------------------------------------------------------------------


def filled(mean: float, minimum: float, samples: int = 300, kind: str = "filled", **at: object) -> Result:
    return Result(kind, OURS, at, {"mean": mean, "p1": minimum, "minimum": minimum, "samples": samples})


def test_a_run_is_as_full_as_the_stored_one_or_says_by_how_much_it_is_not() -> None:
    stored = [filled(0.9, 0.7, sizes="mixed"), filled(0.8, 0.6, sizes="large")]
    assert [verdict.met for verdict in beside_stored(stored, stored)] == [True, True]
    mean, minimum = beside_stored([stored[0], filled(0.799, 0.61, sizes="large")], stored)
    assert (mean.met, mean.fails, mean.measured, mean.detail) == (False, True, "0.100% less", "shmring, large")
    assert (minimum.met, minimum.measured) == (True, "the same or more")
    mean, minimum = beside_stored([filled(0.9, 0.699, sizes="mixed"), stored[1]], stored)
    assert (mean.met, minimum.met) == (True, False)


def test_fewer_traces_have_a_minimum_to_be_compared_and_no_mean() -> None:
    stored = [filled(0.9, 0.7), filled(0.9, 0.7, kind="evicting")]
    mean, minimum = beside_stored([filled(0.1, 0.7, samples=15), filled(0.1, 0.1, samples=15, kind="evicting")], stored)
    assert (mean.met, minimum.met) == (None, True)
    _, minimum = beside_stored([filled(0.9, 0.699, samples=15)], stored)
    assert minimum.fails
    assert [verdict.met for verdict in beside_stored([filled(0.9, 0.1, samples=301)], stored)] == [None, None]
    assert [verdict.met for verdict in beside_stored(stored, [])] == [None, None]


def test_the_stored_run_is_what_this_code_gives() -> None:
    stored = json.loads(STORED.read_bytes())["results"]
    at = {"sizes": "log-uniform", "lifetime": "fifo", "slab_nbytes": 4 << 30}
    [numbers] = [found["numbers"] for found in stored if (found["subject"], found["at"]) == (OURS, at)]
    fill = first_failures(POLICIES[OURS], SIZES["log-uniform"], LIFETIMES["fifo"], 4 << 30, range(numbers["samples"]))
    assert fill["mean"] >= numbers["mean"]
    assert fill["minimum"] >= numbers["minimum"]


# -- a run -------------------------------------------------------------------------------------------------------------------


def test_a_run_says_what_the_targets_are_and_how_far_they_are_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Plan(
        seeds=2, slab_nbytes=SLAB_NBYTES, slab_sizes=(SLAB_NBYTES, 2 * SLAB_NBYTES), placements=200,
        live=(10, MANY_LIVE), batches=1,
    )  # fmt: skip
    monkeypatch.setattr(Plan, "quick", lambda: tiny)
    path = tmp_path / "allocator.json"
    done = CliRunner().invoke(allocator_command, ["--quick", "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "fill at the first failure" in done.output
    found = json.loads(path.read_bytes())
    assert found["coverage"]["planned"]
    assert found["coverage"]["gaps"] == []
    assert (found["mode"], found["command"]) == ("allocator", "python -m bench allocator")
    limits = {f"{target['what']}, {target['at']}": target["asked"] for target in found["targets"]}
    assert limits["time per operation: shmring, 10,000 slots live"] == "<= 0.5 us"
    assert "time per operation: shmring" in done.output
    assert all(len(row) == len(table["columns"]) for table in found["tables"] for row in table["rows"])
    asked = {target["what"]: target["met"] for target in found["targets"]}
    assert (asked["mean fill, beside the stored run"], asked["minimum fill, beside the stored run"]) == (None, True)
    assert {one["kind"] for one in found["results"]} == {"filled", "evicting", "cost"}
    assert {one["subject"] for one in found["results"]} == set(POLICIES)
    # 4 who fill with 3 kinds of sizes, 2 in a second slab, 3 who evict, 2 numbers of live slots
    assert len([line for line in done.stderr.splitlines() if line]) == 12 + 2 + 3 + 2


def test_a_run_that_is_less_full_than_the_stored_one_ends_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Plan(seeds=2, slab_nbytes=SLAB_NBYTES, slab_sizes=(), placements=200, live=())
    monkeypatch.setattr(Plan, "quick", lambda: tiny)
    path = tmp_path / "allocator.json"
    assert CliRunner().invoke(allocator_command, ["--quick", "--json", str(path)]).exit_code == 0
    monkeypatch.setattr("bench.allocation.command.STORED", path)
    done = CliRunner().invoke(allocator_command, ["--quick"])
    assert done.exit_code == 0, "a fill depends on nothing but the seeds"
    fuller = json.loads(path.read_bytes())
    fuller["results"][0]["numbers"]["mean"] += 1e-9
    path.write_text(json.dumps(fuller))
    done = CliRunner().invoke(allocator_command, ["--quick"])
    assert (done.exit_code, "1 target missed" in done.output) == (1, True)
