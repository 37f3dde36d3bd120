"""What a run planned and what it lacks: counted right."""

from __future__ import annotations

from bench.results import Coverage, Gap, Planned, Status


def test_what_has_fewer_repetitions_than_planned_is_a_gap() -> None:
    plan = [Planned("small", ["ours", "theirs"], 3), Planned("large", ["ours"], 2)]
    measured = {("small", "ours"): 3, ("small", "theirs"): 1}
    coverage = Coverage.of(plan, measured, {("small", "theirs"): (Status.FAILED, "it died")})
    assert coverage.gaps == [Gap("small", "theirs", 1, Status.FAILED, "it died"), Gap("large", "ours", 0, Status.MISSING)]
    assert coverage.summary() == "1 of 3 measurements in 2 cases, 1 failed, 1 missing"
    assert list(coverage.lines()) == [
        ("small", "theirs", "failed: it died; 1 repetitions are there"),
        ("large", "ours", "missing"),
    ]
    assert not coverage.complete
    assert Coverage.of(plan, {("small", "ours"): 3, ("small", "theirs"): 3, ("large", "ours"): 2}).complete


def test_cases_that_lack_the_same_share_a_row() -> None:
    coverage = Coverage.of([Planned("x", ["a", "b"], 1), Planned("y", ["a", "b"], 1), Planned("z", ["b"], 1)], {("z", "b"): 1})
    assert list(coverage.lines()) == [("x; y", "a", "missing"), ("x; y", "b", "missing")]
    coverage = Coverage.of([Planned("x", ["a"], 1), Planned("y", ["a"], 1)], {})
    assert list(coverage.lines()) == [("all", "a", "missing")]
