"""``bench cost``: both ends run in this process, what fails is said beside what was measured, and the verdict is its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cost
from bench.__main__ import main
from bench.cost import CASES, Case, measure
from bench.repetitions import Timing
from bench.results import Status

SMALL = CASES[:3]


def test_every_way_has_a_cost(capsys: pytest.CaptureFixture[str]) -> None:
    findings = measure(SMALL, Timing(2, 0.05, 0.01))
    lines = capsys.readouterr().err.splitlines()
    rows = findings.tables[0].rows
    titles = [f"{case}: CPU per message" for case in ("4 KB, inline", "64 KB, copied", "64 KB, in place")]
    assert [row[0] for row in rows] == titles
    assert all(1 < float(row[2]) < 10_000 for row in rows)
    begun = [f"{step} of 6: {titles[0]}, both ends, repetition {number} of 2" for step, number in ((1, 1), (4, 2))]
    assert lines[:4:3] == begun, "they are interleaved"
    assert len(lines) == 6
    assert findings.failures == 0


def test_a_case_that_fails_is_said_and_the_others_go_on() -> None:
    findings = measure((Case(-4096, "broken", 1.0), SMALL[0]), Timing(2, 0.02, 0.01))
    assert findings.coverage is not None
    (gap,) = findings.coverage.gaps
    assert (gap.case, gap.status) == ("-4 KB, broken: CPU per message", Status.FAILED)
    assert [row[0] for row in findings.tables[0].rows] == ["4 KB, inline: CPU per message"]


async def test_a_message_out_of_turn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = cost.shmring.Client.submit

    def submit(client: object, payload: dict[str, list[object]]) -> object:
        header = payload["header"]
        return sent(client, payload | {"header": [header[0] if header[0] != 20 else 19, *header[1:]]})  # type: ignore[arg-type]

    monkeypatch.setattr(cost.shmring.Client, "submit", submit)
    with pytest.raises(ExceptionGroup) as raised:
        await cost.both_ends(4096, False, Timing(1, 0.01, 0.01))
    assert raised.group_contains(cost.BenchError, match="message 19 came where message 20 was due")


@pytest.mark.parametrize(("limits_us", "code"), [((10_000.0, 10_000.0), 0), ((10_000.0, 0.1), 1)])
def test_the_command_writes_what_it_shows_and_a_miss_ends_it_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits_us: Sequence[float], code: int
) -> None:
    cases = [case._replace(limit_us=limit) for case, limit in zip(SMALL, limits_us, strict=False)]
    monkeypatch.setattr(cost, "CASES", cases)
    path = tmp_path / "cost.json"
    done = CliRunner().invoke(main, ["cost", "--repetitions", "1", "--seconds", "0.02", "--json", str(path)])
    assert done.exit_code == code, done.output
    assert ("1 target missed" in done.stderr) is bool(code)
    assert "4 KB, inline" in done.stdout
    assert "2 of 2 measurements in 2 cases" in done.stdout
    stored = json.loads(path.read_bytes())
    assert (stored["mode"], stored["coverage"]["gaps"]) == ("cost", [])
    assert [verdict["met"] for verdict in stored["targets"]] == [True, not code]


def test_the_targets_are_those_of_the_project() -> None:
    assert {case.title.removesuffix(": CPU per message"): case.limit_us for case in CASES} == {
        "4 KB, inline": 5, "64 KB, copied": 7, "64 KB, in place": 6.5, "1 MB, in place": 6.5, "8 MB, in place": 6.5,
        "64 MB, in place": 6.5,
    }  # fmt: skip
