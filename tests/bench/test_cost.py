"""``bench cost``: both ends run in this process, every message is checked, and what fails is said beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cost
from bench.__main__ import main
from bench.cost import CASES, Case, measure, plan_of
from bench.coverage import Status

SMALL = CASES[:3]


def test_every_way_has_a_cost() -> None:
    lines: list[str] = []
    findings = measure(plan_of(SMALL, 2, 0.05, 0.01), lines.append)
    assert [(cost.case, len(cost.runs)) for cost in findings.results] == [
        ("4 KB, inline", 2), ("64 KB, copied", 2), ("64 KB, in place", 2),
    ]  # fmt: skip
    assert all(1 < cost.cpu_us.minimum < 10_000 for cost in findings.results)
    assert all(cost.messages >= 2 * 16 for cost in findings.results)
    assert len(lines) == plan_of(SMALL, 2, 0.05, 0.01).steps() == 1 + 6
    assert findings.failures == 0


def test_a_case_that_fails_is_said_and_the_others_go_on() -> None:
    class Broken(type(cost.PEERS["shmring"])):  # type: ignore[misc]
        async def produce(self, *arguments: object) -> None:
            raise ValueError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cost.PEERS, "broken", Broken())
        findings = measure(plan_of((Case(4096, "broken", "broken"), SMALL[0]), 1, 0.02, 0.01), lambda line: None)
    assert findings.coverage is not None
    (gap,) = findings.coverage.gaps
    assert (gap.case, gap.status) == ("4 KB, broken", Status.FAILED)
    assert [cost.case for cost in findings.results] == ["4 KB, inline"]


def test_the_command_writes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CASES", SMALL[:1])
    path = tmp_path / "cost.json"
    done = CliRunner().invoke(main, ["cost", "--repetitions", "1", "--seconds", "0.02", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "4 KB, inline" in done.stdout
    assert "1 of 1 measurements in 1 case" in done.stdout
    stored = json.loads(path.read_bytes())
    assert (stored["mode"], stored["coverage"]["gaps"]) == ("cost", [])
