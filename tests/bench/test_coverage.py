"""What a run planned and what it lacks: counted right, recorded by every mode, said by the report."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from bench.__main__ import main
from bench.machine import Machine
from bench.messages import Case
from bench.results import Coverage, Findings, Gap, Planned, Status, checkout, write_json


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


def test_sources_with_uncommitted_changes_are_said_to_be() -> None:
    assert checkout("abc") == "commit abc, a clean checkout"
    assert checkout("abc-dirty") == "commit abc, with uncommitted changes"
    assert checkout(None) == "no commit is known"


def test_a_report_says_what_a_stored_result_lacks(tmp_path: Path) -> None:
    cases = [Case(nbytes, producers).title for nbytes in (4096, 65536) for producers in (1, 2)]
    there = {(case, peer): 3 for case in cases[::2] for peer in ("shmring", "pyzmq")}
    coverage = Coverage.of([Planned(case, ["shmring", "pyzmq"], 3) for case in cases], there)
    commit = msgspec.structs.replace(Machine.here(), commit="abc")
    for name, found in (("planned", coverage), ("unplanned", None)):
        write_json(Findings(name, commit, coverage=found), tmp_path / "results" / f"{name}.json")
    outcome = CliRunner().invoke(main, ["report", "--results", str(tmp_path / "results"), "--docs", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    said = " ".join(outcome.stdout.split())
    assert "commit abc, a clean checkout" in said
    assert "4 of 8 measurements in 4 cases, 4 missing" in said
    assert "the plan is not known" in said
    text = (tmp_path / "benchmarks.md").read_text()
    planned, unplanned = (part.partition("\n#")[0] for part in text.split("Not measured:\n")[1:])
    assert "| 4 KB, 2 producers, window 16; 64 KB, 2 producers, window 16 | shmring | missing |" in planned
    assert "plan of this result is not known" in unplanned
