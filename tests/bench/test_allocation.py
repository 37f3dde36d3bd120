"""``bench allocator``: traces fill a slab, leases hold what they should, and a run says what it saw."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bench.allocation.command import FILL_TARGETS, PLAN, Filled, Live, allocator_command, measure
from bench.allocation.leased import Leased
from bench.allocation.measures import FILLED, LIMIT, OURS, Limit, Policy, Timed, first_failure
from bench.allocation.traces import LARGEST_NBYTES, LIFETIMES, trace
from bench.machine import ROOT
from bench.results import Findings
from shmring.core.compiled import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES
from tests.bench.conftest import command_of
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


@for_each("lifetime", LIFETIMES)
def test_a_trace_fills_the_slab_and_every_slot_goes_at_most_once(lifetime: str) -> None:
    arrivals = list(trace(LIFETIMES[lifetime], SLAB_NBYTES, 5))
    assert arrivals == list(trace(LIFETIMES[lifetime], SLAB_NBYTES, 5))
    assert arrivals != list(trace(LIFETIMES[lifetime], SLAB_NBYTES, 6))
    gone = [slot for arrival in arrivals for slot in arrival.gone]
    assert len(set(gone)) == len(gone)
    assert all(slot < number for number, arrival in enumerate(arrivals) for slot in arrival.gone)
    assert all(1 <= arrival.nbytes <= LARGEST_NBYTES for arrival in arrivals)
    live_nbytes = sum(arrival.nbytes for arrival in arrivals) - sum(arrivals[slot].nbytes for slot in gone)
    assert live_nbytes > SLAB_NBYTES
    assert gone  # it has come and gone before


def test_a_storm_takes_half_of_what_is_there() -> None:
    arrivals = list(trace(LIFETIMES["storms"], 4 * SLAB_NBYTES, 5))
    assert max(len(arrival.gone) for arrival in arrivals) > 20
    assert max(len(arrival.gone) for arrival in trace(LIFETIMES["fifo"], 4 * SLAB_NBYTES, 5)) < 10


# -- fill ------------------------------------------------------------------------------------------------------------------


def test_nobody_is_fuller_on_average_than_what_moving_together_gives() -> None:
    """On a single trace one may be: what fails earlier may fail at a smaller slot."""
    lifetime = LIFETIMES["random"]
    fills = {name: [first_failure(of.create, lifetime, SLAB_NBYTES, seed) for seed in range(20)] for name, of in FILLED.items()}
    assert min(fills[LIMIT]) > 1 - (LARGEST_NBYTES + 2 * BLOCK_NBYTES) / SLAB_NBYTES - 0.001
    for name, fill in fills.items():
        assert 0 < statistics.fmean(fill) <= statistics.fmean(fills[LIMIT]), name


def test_the_page_says_what_this_code_gives_and_it_keeps_the_targets_where_slots_go_in_order() -> None:
    stored = msgspec.json.decode((ROOT / "bench" / "results" / "allocator.json").read_bytes(), type=Findings)
    case = Filled("fifo", 4 << 30)
    measured = {case: {OURS: [measure(case, OURS)]}}
    findings = PLAN.findings(measured)
    assert findings.tables[0].rows[0][1] == stored.tables[0].rows[0][1], "python -m bench allocator"
    assert [target.judge(measured).met for target in FILL_TARGETS] == [True, True, None, None]


# -- time ------------------------------------------------------------------------------------------------------


def test_an_operation_takes_time() -> None:
    assert 0 < Timed(10).batch_us() < 1e4


# -- a run -------------------------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "allocator.json"
    monkeypatch.setattr("bench.allocation.command._SEEDS", 2)
    monkeypatch.setattr("bench.allocation.command._BATCHES", 1)
    cases = {Filled("fifo", SLAB_NBYTES): list(FILLED), Live(10): [OURS]}
    command = command_of(dataclasses.replace(PLAN, cases=cases), allocator_command)
    done = CliRunner().invoke(command, ["--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "fill at the first failure" in done.output
    found = json.loads(path.read_bytes())
    assert found["coverage"]["gaps"] == []
    assert (found["mode"], found["command"]) == ("allocator", "python -m bench allocator")
    fills, times = found["tables"]
    assert [row[0] for row in fills["rows"]] == [FILLED[name].title for name in FILLED]
    assert [row[:2] for row in times["rows"]] == [["10 slots live", "shmring"]]
    assert {target["met"] for target in found["targets"]} == {None}
