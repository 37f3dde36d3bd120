"""The allocator of runs against a plain set of units, and the compiled one against its model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.compiled import RunAllocator, TakenRuns
from tests.model import blocks as model
from tests.model.inside import largest_run
from tests.tables import for_each


def runs_of(units: set[int]) -> list[tuple[int, int]]:
    """The maximal runs of a set of units, as (start, length), by address."""
    runs: list[tuple[int, int]] = []
    for unit in sorted(units):
        if runs and sum(runs[-1]) == unit:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((unit, 1))
    return runs


def free_runs(allocator: RunAllocator) -> list[tuple[int, int]]:
    return list(allocator.runs())


def with_free(*free: tuple[int, int], start: int = 0, length: int = 20) -> RunAllocator:
    """An allocator in which exactly these runs are free."""
    allocator = RunAllocator(start, length)
    assert allocator.carve(start, length)
    for run in free:
        allocator.free(*run)
    return allocator


def test_a_new_range_is_one_free_run() -> None:
    allocator = RunAllocator(5, 10)
    assert free_runs(allocator) == [(5, 10)]
    assert (allocator.free_units, largest_run(allocator), allocator.end) == (10, 10, 15)
    assert allocator.is_empty


@for_each(("start", "length"), [(-1, 4), (0, 0), (3, -1)])
def test_a_range_without_units_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"not {start} and {length}"):
        RunAllocator(start, length)


def test_a_full_range_has_no_run() -> None:
    allocator = RunAllocator(5, 10)
    assert allocator.allocate(10) == 5
    assert (free_runs(allocator), allocator.free_units, largest_run(allocator)) == ([], 0, 0)
    assert allocator.allocate(1) is None
    assert not allocator.is_empty


def test_the_shortest_run_that_fits_is_taken() -> None:
    allocator = with_free((0, 6), (8, 3), (12, 4))
    assert allocator.allocate(3) == 8
    assert allocator.allocate(3) == 12
    assert allocator.allocate(3) == 0
    assert free_runs(allocator) == [(3, 3), (15, 1)]


def test_of_equal_runs_the_lowest_is_taken() -> None:
    allocator = with_free((12, 2), (4, 2), (8, 2))
    assert [allocator.allocate(2) for _ in range(4)] == [4, 8, 12, None]


def test_a_run_of_exact_size_is_taken_again_at_once() -> None:
    allocator = RunAllocator(0, 20)
    starts = [allocator.allocate(3) for _ in range(5)]
    assert starts == [0, 3, 6, 9, 12]
    allocator.free(6, 3)
    assert allocator.allocate(3) == 6


def test_free_space_in_pieces_does_not_fit_a_whole() -> None:
    allocator = with_free((0, 4), (6, 4))
    assert allocator.allocate(5) is None
    assert allocator.free_units == 8


@for_each("length", [0, -1])
def test_an_empty_run_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"not {length}"):
        RunAllocator(0, 4).allocate(length)


@for_each(
    ("free", "given_back", "merged"),
    [
        ([], (4, 4), [(4, 4)]),
        ([(0, 4)], (4, 4), [(0, 8)]),
        ([(8, 4)], (4, 4), [(4, 8)]),
        ([(0, 4), (8, 4)], (4, 4), [(0, 12)]),
        ([(0, 3), (9, 4)], (4, 4), [(0, 3), (4, 4), (9, 4)]),
    ],
)
def test_a_freed_run_merges_with_its_neighbours(
    free: list[tuple[int, int]], given_back: tuple[int, int], merged: list[tuple[int, int]]
) -> None:
    allocator = with_free(*free)
    allocator.free(*given_back)
    assert free_runs(allocator) == merged
    assert allocator.allocate(merged[0][1]) is not None


@for_each("run", [(4, 8), (4, 2), (6, 2), (10, 2), (7, 1)])
def test_carve_takes_exactly_what_it_is_asked_for(run: tuple[int, int]) -> None:
    allocator = with_free((4, 8))
    assert allocator.carve(*run)
    assert free_runs(allocator) == runs_of(set(range(4, 12)) - set(range(run[0], sum(run))))


@for_each("run", [(3, 1), (3, 2), (11, 2), (12, 1), (4, 9), (5, 0), (5, -1), (-1, 2), (100, 1), (14, 6), (2, 18)])
def test_carve_of_what_is_not_wholly_free_takes_nothing(run: tuple[int, int]) -> None:
    allocator = with_free((4, 8), (16, 2))
    assert not allocator.carve(*run)
    assert free_runs(allocator) == [(4, 8), (16, 2)]
    assert allocator.free_units == 10


@for_each("run", [(9, 2), (30, 1), (28, 3), (14, 1), (13, 2), (17, 2), (12, 12), (20, 0), (20, -1), (13, 5), (10, 20)])
def test_a_bad_free_changes_nothing(run: tuple[int, int]) -> None:
    allocator = with_free((14, 4), (24, 2), start=10)
    with pytest.raises(ValueError, match=r"is not allocated in \[10, 30\)"):
        allocator.free(*run)
    assert free_runs(allocator) == [(14, 4), (24, 2)]
    assert allocator.free_units == 6
    assert [allocator.allocate(length) for length in (4, 2, 1)] == [14, 24, None]


class AllocatorMachine(RuleBasedStateMachine):
    """Every call against a set of units; the model finds the best fit by looking at all runs."""

    @initialize(start=st.integers(0, 3), length=st.integers(1, 40))
    def create(self, start: int, length: int) -> None:
        self.allocator = RunAllocator(start, length)
        self.everything = set(range(start, start + length))
        self.free = set(self.everything)
        self.taken: list[tuple[int, int]] = []

    @rule(length=st.integers(1, 12))
    def allocate(self, length: int) -> None:
        fitting = [(run_length, start) for start, run_length in runs_of(self.free) if run_length >= length]
        start = self.allocator.allocate(length)
        assert start == (min(fitting)[1] if fitting else None)
        if start is not None:
            self.free -= set(range(start, start + length))
            self.taken.append((start, length))

    @rule(start=st.integers(-1, 45), length=st.integers(-1, 12))
    def carve(self, start: int, length: int) -> None:
        wanted = set(range(start, start + length))
        carved = self.allocator.carve(start, length)
        assert carved == (bool(wanted) and wanted <= self.free)
        if carved:
            self.free -= wanted
            self.taken.append((start, length))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_one(self, data: Any) -> None:
        start, length = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.allocator.free(start, length)
        self.free |= set(range(start, start + length))

    @rule(start=st.integers(-1, 45), length=st.integers(-1, 12))
    def free_badly(self, start: int, length: int) -> None:
        units = set(range(start, start + length))
        if units and units <= self.everything - self.free:
            return  # that would be a good one: the allocator does not know in which pieces it was taken
        with pytest.raises(ValueError, match="is not allocated"):
            self.allocator.free(start, length)

    @invariant()
    def the_free_runs_are_the_models(self) -> None:
        runs = runs_of(self.free)
        assert free_runs(self.allocator) == runs
        assert self.allocator.free_units == len(self.free)
        assert largest_run(self.allocator) == max((length for _, length in runs), default=0)
        assert self.allocator.is_empty == (self.free == self.everything)

    def teardown(self) -> None:
        for run in getattr(self, "taken", []):
            self.allocator.free(*run)
        if hasattr(self, "allocator"):
            assert self.allocator.is_empty
            assert free_runs(self.allocator) == [(self.allocator.start, self.allocator.length)]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(stateful_step_count=40)


# -- many runs: the orders lie in many chunks, which split and join ------------------------------------------------------


@for_each("seed", range(2))
def test_ten_thousand_live_runs_lie_where_the_models_lie(seed: int) -> None:
    """Grows to ten thousand live runs, comes and goes there, and empties again; every start is the model's."""
    chance = random.Random(seed)
    compiled, expected = RunAllocator(1, 400_000), model.RunAllocator(1, 400_000)
    live: list[tuple[int, int]] = []
    for step in range(40_000):
        if live and (step > 25_000 or chance.random() < 0.45 or len(live) > 10_000):
            position = chance.randrange(len(live)) if seed % 2 else -1 - chance.randrange(min(8, len(live)))
            live[position], live[-1] = live[-1], live[position]
            run = live.pop()
            compiled.free(*run)
            expected.free(*run)
            continue
        length = chance.choice((1, 1, 2, 3, 9, 17, 64, 300))
        start = compiled.allocate(length)
        assert start == expected.allocate(length)
        if start is not None:
            live.append((start, length))
    assert compiled.runs() == list(expected.runs())
    for run in live:
        compiled.free(*run)
    assert compiled.runs() == [(1, 400_000)]


@for_each("seed", range(3))
def test_a_thousand_free_runs_that_grow_and_shrink_at_both_ends_are_those_of_the_model(seed: int) -> None:
    """A full range is freed in pieces and filled again, in turns, so that what is first in a chunk changes in its place."""
    chance = random.Random(seed)
    compiled, expected = RunAllocator(0, 30_000), model.RunAllocator(0, 30_000)
    live: list[tuple[int, int]] = []
    while (start := compiled.allocate(length := chance.choice((1, 2, 3)))) is not None:
        assert start == expected.allocate(length)
        live.append((start, length))
    most = 0
    for step in range(20_000):
        if live and chance.random() < (0.7 if step // 5_000 % 2 == 0 else 0.3):
            position = chance.randrange(len(live))
            live[position], live[-1] = live[-1], live[position]
            run = live.pop()
            compiled.free(*run)
            expected.free(*run)
        else:
            length = chance.choice((1, 1, 2, 3, 4))
            start = compiled.allocate(length)
            assert start == expected.allocate(length)
            if start is not None:
                live.append((start, length))
        if step % 100 == 0:
            assert compiled.runs() == list(expected.runs())
            most = max(most, len(compiled.runs()))
    assert most > 1_000


def test_runs_at_the_end_of_what_a_key_can_hold() -> None:
    allocator = RunAllocator(2**32 - 11, 10)
    assert allocator.allocate(10) == 2**32 - 11
    allocator.free(2**32 - 2, 1)
    assert allocator.carve(2**32 - 2, 1)
    assert not allocator.carve(2**32 - 2, 2**40)
    assert allocator.allocate(2**70) is None


@for_each(("start", "length"), [(0, 2**32), (2**32, 1), (2**70, 1), (1, 2**70)])
def test_a_range_beyond_what_a_key_can_hold_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="below 2\\*\\*32"):
        RunAllocator(start, length)
    with pytest.raises(ValueError, match="below 2\\*\\*32"):
        TakenRuns().add(start, length)
    with pytest.raises(ValueError, match="is not taken"):
        TakenRuns().remove(start, length)


# -- runs that somebody else chose --------------------------------------------------------------------------------------


def test_taken_runs_may_touch_and_not_overlap() -> None:
    taken = TakenRuns()
    assert taken.add(10, 5)
    assert taken.add(15, 1)
    assert taken.add(5, 5)
    assert taken.units == 11
    for start, length in ((10, 5), (9, 2), (14, 1), (15, 3), (0, 6), (0, 100), (12, 1)):
        assert not taken.add(start, length)
    assert taken.units == 11


@for_each(("start", "length"), [(10, 4), (10, 6), (11, 4), (9, 1), (20, 1)])
def test_only_what_was_taken_is_given_back(start: int, length: int) -> None:
    taken = TakenRuns()
    taken.add(10, 5)
    with pytest.raises(ValueError, match="is not taken"):
        taken.remove(start, length)
    assert taken.units == 5
    taken.remove(10, 5)
    assert taken.units == 0
    assert taken.add(12, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.booleans()), max_size=40))
def test_taken_runs_are_those_of_a_set_of_units(actions: list[tuple[int, int, bool]]) -> None:
    taken, runs = TakenRuns(), set[tuple[int, int]]()
    for start, length, gives_back in actions:
        if gives_back and runs:
            run = min(runs, key=lambda candidate: abs(candidate[0] - start))
            taken.remove(*run)
            runs.remove(run)
            continue
        units = {unit for first, count in runs for unit in range(first, first + count)}
        free = units.isdisjoint(range(start, start + length))
        assert taken.add(start, length) is free
        if free:
            runs.add((start, length))
        assert taken.units == sum(count for _, count in runs)
