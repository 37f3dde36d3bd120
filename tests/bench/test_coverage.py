"""What a run planned and what it lacks: counted right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.plan import Plan, Runs, Timing
from bench.results import Gap, Planned, Status


def runs_of(cases: Mapping[str, Sequence[str]], measured: Mapping[str, Mapping[str, int]], count: int = 1) -> Runs:
    """A run of a plan, of which there are so many repetitions."""
    runs = Runs(Plan(mode="any", cases=cases, timing=Timing(count), tables=lambda measured: []))
    runs.measured = {case: {name: [None] * there for name, there in of_case.items()} for case, of_case in measured.items()}
    return runs


def test_what_has_fewer_repetitions_than_planned_is_a_gap() -> None:
    cases = {"small": ["ours", "theirs"], "large": ["ours"]}
    runs = runs_of(cases, {"small": {"ours": 3, "theirs": 1}}, 3)
    runs.fail(["small"], ["theirs"], "it died")
    coverage = runs.coverage()
    assert coverage.planned == [Planned("small", ["ours", "theirs"], 3), Planned("large", ["ours"], 3)]
    assert coverage.gaps == [Gap("small", "theirs", 1, Status.FAILED, "it died"), Gap("large", "ours", 0, Status.MISSING)]
    assert coverage.summary() == "1 of 3 measurements in 2 cases, 1 failed, 1 missing"
    assert coverage.table().rows == [
        ("small", "theirs", "failed: it died; 1 repetitions are there"),
        ("large", "ours", "missing"),
    ]
    assert not coverage.complete
    assert runs_of(cases, {"small": {"ours": 3, "theirs": 3}, "large": {"ours": 3}}, 3).coverage().complete


def test_cases_that_lack_the_same_share_a_row() -> None:
    runs = runs_of({"x": ["a", "b"], "y": ["a", "b"], "z": ["b"]}, {"z": {"b": 1}})
    assert runs.coverage().table().rows == [("x; y", "a", "missing"), ("x; y", "b", "missing")]
    assert runs_of({"x": ["a"], "y": ["a"]}, {}).coverage().table().rows == [("all", "a", "missing")]
