"""``bench allocator``: policies place as they say, traces fill a slab, and a run says what it saw."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.allocation import bandwidth, speed, survey
from bench.allocation.command import allocator_command
from bench.allocation.fill import Fill, evicting, fills
from bench.allocation.leased import Leased, LoneBook
from bench.allocation.policies import POLICIES, BinnedFit, Buddy, Compacting, FirstFit, FixedSlots, NextFit, Policy
from bench.allocation.traces import LIFETIMES, SIZES, trace
from shmring.core.blocks import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks

MIB = 1 << 20
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


@pytest.mark.parametrize("name", POLICIES)
def test_places_are_disjoint_and_everything_comes_back(name: str) -> None:
    policy = POLICIES[name].create(7, RANGE, LARGEST)
    before = [capacity(policy, blocks) for blocks in (1, 100, LARGEST)]
    assert min(before) > 0
    churn(policy, 7, RANGE)
    assert [capacity(policy, blocks) for blocks in (1, 100, LARGEST)] == before


@pytest.mark.parametrize("frontends", [1, 3])
def test_leases_hold_disjoint_slots_and_come_back(frontends: int) -> None:
    policy = Leased(RANGE, frontends)
    churn(policy, 1, RANGE)
    policy.ledger.check()
    for book in policy.books.values():
        book.check()
        assert all(lease.slots.is_empty for lease in book.leases.values())
    assert not policy.slots


def gaps(policy: Policy) -> None:
    """Leaves free runs of 4 at 0, of 2 at 10, of 3 at 20, and what is behind 30."""
    places = [policy.allocate(blocks) for blocks in (4, 6, 2, 8, 3, 7)]
    assert places == [0, 4, 10, 12, 20, 23]
    for place, blocks in ((0, 4), (10, 2), (20, 3)):
        policy.free(place, blocks)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shmring", [10, 20, 30, 0]),
        ("first-fit", [0, 20, 30, 2]),
        ("next-fit", [30, 32, 35, 40]),
    ],
)
def test_each_chooses_its_gap(name: str, expected: list[int]) -> None:
    policy = POLICIES[name].create(0, 100, 100)
    gaps(policy)
    assert [policy.allocate(blocks) for blocks in (2, 3, 5, 2)] == expected


def test_next_fit_comes_round_again() -> None:
    policy = NextFit(0, 40)
    gaps(policy)
    assert [policy.allocate(blocks) for blocks in (10, 3, 2)] == [30, 0, 10]


def test_shmring_takes_the_shortest_run_and_of_those_the_lowest() -> None:
    ours, plain = RunAllocator(0, RANGE), FirstFit(0, RANGE)
    chance = random.Random(3)
    live: list[tuple[int, int]] = []
    for _ in range(2000):
        if live and chance.random() < 0.48:
            place, blocks = live.pop(chance.randrange(len(live)))
            ours.free(place, blocks)
            plain.free(place, blocks)
        else:
            blocks = chance.randint(1, LARGEST)
            fitting = [(n, s) for s, n in zip(plain.starts, plain.lengths, strict=True) if n >= blocks]
            place = ours.allocate(blocks)  # type: ignore[assignment]
            assert place == (min(fitting)[1] if fitting else None)
            if fitting:
                assert plain.take(plain.starts.index(place), blocks) == place
                live.append((place, blocks))


def test_what_rounds_loses_what_it_rounds_up() -> None:
    assert capacity(Buddy(0, 1024), 65) == 8  # as 128
    assert capacity(Buddy(0, 1024 + 256), 129) == 5  # as 256; a range that is no power of two is used, too
    assert capacity(BinnedFit(0, 1152, rounded=True), 129) == 8  # as 144
    assert capacity(BinnedFit(0, 1152, rounded=False), 129) == 8  # 120 blocks are left, and no bin of them fits
    assert capacity(FixedSlots(0, 1024, 100), 1) == 10
    assert capacity(Compacting(0, 1024), 100) == 10


# -- traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lifetime", LIFETIMES)
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


def test_no_policy_is_fuller_on_average_than_what_moving_together_gives() -> None:
    """On a single trace one may be: what fails earlier may fail at a smaller slot."""
    sizes, lifetime = SIZES["log-uniform"], LIFETIMES["random"]
    limit = fills(survey.FILLED["limit"], sizes, lifetime, SLAB_NBYTES, range(20))
    assert limit.minimum > 1 - (sizes.largest_nbytes + 2 * BLOCK_NBYTES) / SLAB_NBYTES - 0.001
    for name, contender in survey.FILLED.items():
        assert 0 < fills(contender, sizes, lifetime, SLAB_NBYTES, range(20)).mean <= limit.mean, name


def test_a_fill_says_mean_and_worst() -> None:
    fill = Fill.of([0.5, *[0.9] * 198, 1.0])
    assert fill.mean == pytest.approx((0.5 + 0.9 * 198 + 1) / 200)
    assert (fill.p1, fill.minimum, fill.samples) == (0.9, 0.5, 200)


def test_ours_keeps_the_target_where_slots_go_in_order() -> None:
    fill = fills(survey.FILLED["shmring"], SIZES["log-uniform"], LIFETIMES["fifo"], 4 << 30, range(20))
    assert fill.mean >= survey.MEAN_FILL
    assert fill.minimum >= survey.MINIMUM_FILL


def test_rounded_bins_are_as_full_as_mooncake_says_of_its_own() -> None:
    """Their published mean is 0.8416: what is compared with here behaves as the original does."""
    fill = evicting(survey.FILLED["rounded-bins"], 8_000, seed=1)
    assert fill.mean == pytest.approx(0.8416, abs=0.01)
    assert evicting(survey.FILLED["shmring"], 8_000, seed=1).mean > fill.mean


# -- time and bandwidth ------------------------------------------------------------------------------------------------------


def test_the_lease_book_that_is_timed_places_and_releases() -> None:
    book = LoneBook(10_000, 4)
    places = [book.allocate(1_000) for _ in range(9)]
    assert places[-1] is None  # two of 1,000 in each of 2,500
    assert len(set(places)) == 9
    book.free(places[0], 1_000)  # type: ignore[arg-type]
    assert book.allocate(1_000) == places[0]
    book.book.check()


def test_a_policy_that_reuses_touches_less_than_one_that_goes_round() -> None:
    found = bandwidth.bandwidths(["shmring", "next-fit"], MIB, 4, 64 * MIB, repetitions=1, seconds=0.01)
    touched = {one.policy: one.touched_nbytes for one in found}
    assert touched["shmring"] == 4 * MIB
    assert touched["next-fit"] > 4 * MIB
    assert all(one.gb_per_s > 0 for one in found)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("plan", [survey.Plan(), survey.Plan.quick()], ids=["full", "quick"])
def test_what_a_run_copies_fits_every_policy(name: str, plan: survey.Plan) -> None:
    copied = {in_flight: plan.copied_at_light_load(in_flight) for in_flight in plan.in_flight}
    assert all(copied.values())
    for in_flight, sizes in copied.items():
        for blocks in map(slot_blocks, sizes):
            policy = POLICIES[name].create(0, plan.copy_slab_nbytes // BLOCK_NBYTES, blocks)
            assert None not in [policy.allocate(blocks) for _ in range(in_flight)]


def test_costs_are_of_all_subjects_at_once() -> None:
    lines: list[str] = []
    costs = speed.costs(list(speed.SUBJECTS), 10, 2, lines.append)
    assert [cost.subject for cost in costs] == list(speed.SUBJECTS)
    assert all(0 < cost.minimum_us <= cost.median_us <= cost.maximum_us for cost in costs)
    assert len(lines) == len(costs)


# -- a run -------------------------------------------------------------------------------------------------------------------


def test_a_run_says_what_the_targets_are_and_how_far_they_are_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = survey.Plan(
        seeds=2, slab_nbytes=SLAB_NBYTES, slab_sizes=(SLAB_NBYTES, 2 * SLAB_NBYTES), placements=200,
        live=(10, survey.MANY_LIVE), batches=1,
        copied_sizes=(64 << 10, 4 * MIB), in_flight=(1, 2), copy_slab_nbytes=16 * MIB, repetitions=1, copy_s=0.001,
    )  # fmt: skip
    monkeypatch.setattr(survey.Plan, "quick", lambda: tiny)
    # The plain ones take a while to fill with ten thousand slots, and are timed above.
    fast = {name: speed.SUBJECTS[name] for name in ("shmring", "book")}
    monkeypatch.setattr(speed, "SUBJECTS", fast)
    monkeypatch.setattr(survey, "SUBJECTS", fast)
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
    assert [table["columns"] for table in found["tables"][-2:]] == [["policy", "64 KiB", "4 MiB"], ["policy", "64 KiB"]]
    assert {one["kind"] for one in found["results"]} == {"filled", "evicting", "cost", "bandwidth"}
    assert len([line for line in done.stderr.splitlines() if line]) == survey.steps(tiny)
