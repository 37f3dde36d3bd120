"""What a run planned and what it lacks: counted right, recorded by every mode, read from the command where it was not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import plots
from bench.__main__ import main
from bench.cases import Case
from bench.coverage import Coverage, Gap, Planned, Status, checkout
from bench.recorded import recorded_coverage
from bench.request.command import request_plan
from bench.request.plan import Plan, planned
from bench.results import write_json

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def test_what_has_fewer_repetitions_than_planned_is_a_gap() -> None:
    plan = [Planned("small", ["ours", "theirs"], 3), Planned("large", ["ours"], 2), Planned("small", ["ours"], 1)]
    measured = {("small", "ours"): 4, ("small", "theirs"): 1}
    coverage = Coverage.of(plan, measured, {("small", "theirs"): (Status.FAILED, "it died")})
    assert coverage.gaps == [Gap("small", "theirs", 1, Status.FAILED, "it died"), Gap("large", "ours", 0, Status.MISSING)]
    assert coverage.summary() == "1 of 3 measurements in 2 cases, 1 failed, 1 missing"
    assert list(coverage.lines()) == [
        ("small", "theirs", "failed: it died; 1 repetitions are there"),
        ("large", "ours", "missing"),
    ]
    assert not coverage.complete
    assert Coverage.of(plan[:2], {("small", "ours"): 3, ("small", "theirs"): 3, ("large", "ours"): 2}).complete


def test_subjects_that_a_case_lacks_are_named_up_to_a_few() -> None:
    peers = list("abcdef")
    coverage = Coverage.of([Planned("x", peers, 1), Planned("y", peers, 1)], {("y", "a"): 1})
    assert list(coverage.lines()) == [("x", "all 6", "missing"), ("y", "b, c, d and 2 more", "missing")]


def test_sources_with_uncommitted_changes_are_said_to_be() -> None:
    assert checkout("abc") == "commit abc, a clean checkout"
    assert checkout("abc-dirty") == "commit abc, with uncommitted changes"
    assert checkout(None) == "no commit is known"


# -- stored results ------------------------------------------------------------------------------------------------------


def stored_transport(directory: Path, made_result: Make, made_results: Make, command: str) -> None:
    """Of a run over two sizes with one and two producers, what one producer sent."""
    found = [made_result(peer, Case(nbytes), [100.0] * 3) for nbytes in (4096, 65536) for peer in ("shmring", "pyzmq")]
    directory.mkdir()
    path = directory / "transport.json"
    write_json(made_results(found), path)
    content = json.loads(path.read_bytes())
    del content["coverage"]  # as results were before they had it
    path.write_text(json.dumps(content | {"command": command}))


@pytest.mark.parametrize(
    ("command", "says", "rows"),
    [
        (
            "python -m bench transport --size 4KiB --size 64KiB --dtype float32 --window 16 --no-copies-out --peer pyzmq "
            "--producers 1 --producers 2 --repetitions 3",
            "4 of 8 measurements in 4 cases, 4 missing; planned by the recorded command",
            ["4 KB of float32, 2 producers, window 16", "64 KB of float32, 2 producers, window 16"],
        ),
        ("python -m bench transport --no-such-option", "plan of this result is not known", []),
        ("", "plan of this result is not known", []),
    ],
)
def test_a_report_says_what_a_stored_result_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_result: Make, made_results: Make,
    command: str, says: str, rows: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(plots, "draw", lambda results, stem, kinds: [])
    stored_transport(tmp_path / "results", made_result, made_results, command)
    arguments = ["report", "--results", str(tmp_path / "results"), "--docs", str(tmp_path)]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    said = " ".join(outcome.stdout.split())
    assert "commit abc, a clean checkout" in said
    assert "4 missing" in said if rows else "the plan is not known" in said
    text = (tmp_path / "benchmarks.md").read_text()
    section = text.partition("### Not measured\n")[2].partition("\n#")[0]
    assert says in section
    assert [row.split(" | ")[0].removeprefix("| ") for row in section.splitlines() if "| all 2 | missing" in row] == rows


@pytest.mark.parametrize(
    ("name", "cases", "gaps"),
    [("transport", 40, 195), ("request", 24, 5), ("request-scaling", 1, 0), ("serve", 1, 0), ("allocator", 47, 0)],
)
def test_the_plans_of_results_that_are_older_than_the_record_are_found(name: str, cases: int, gaps: int) -> None:
    content = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_bytes())
    if "coverage" in content:
        pytest.skip("it was measured again")
    coverage = recorded_coverage(content["command"], content)
    assert coverage is not None
    assert coverage.derived
    assert len({case.case for case in coverage.planned}) == cases
    assert len(coverage.gaps) == gaps


def test_the_plan_of_requests_has_every_cell() -> None:
    plan = request_plan(
        sizes=(), in_flight=(), clients=(), reply_nbytes=64, peers=(), repetitions=5, seconds=None, quick=False, scaling=False
    )
    assert isinstance(plan, Plan)
    cases = planned(plan)
    assert len(cases) == 4 * 3 * 2
    assert (cases[0].case, cases[0].repetitions) == ("4 KB, 1 in flight of 1 client", 5)
