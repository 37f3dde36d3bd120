"""``bench cost``: both ends run in this process, what fails is said beside what was measured, and the verdict is its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cost
from bench.__main__ import main
from bench.cost import PLAN, Case, cost_command
from bench.plan import Timing
from tests.bench.conftest import command_of

ONE_EACH = ("4 KB, inline", "64 KB, copied", "64 KB, in place")
SHORT = ("--repetitions", "2", "--seconds", "0.02")


@pytest.mark.slow
def test_every_way_has_a_cost_and_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    chosen = [part for case in ONE_EACH for part in ("--case", case)]
    done = CliRunner().invoke(main, ["cost", *chosen, *SHORT, "--json", str(path)])
    stored = json.loads(path.read_bytes())
    missed = [target for target in stored["targets"] if target["met"] is False]
    assert done.exit_code == bool(missed), done.output
    titles = [f"{case}: CPU per message" for case in ONE_EACH]
    rows = stored["tables"][0]["rows"]
    assert [row[0] for row in rows] == titles
    assert all(1 < float(row[2]) < 10_000 for row in rows)
    lines = done.stderr.splitlines()[:6]
    begun = [f"{step} of 6: {titles[0]}, both ends, repetition {number} of 2" for step, number in ((1, 1), (4, 2))]
    assert lines[::3] == begun, "they are interleaved"
    assert "3 of 3 measurements in 3 cases" in done.stdout
    assert (stored["mode"], stored["coverage"]["gaps"]) == ("cost", [])
    assert stored["notes"][0] == "2 repetitions of 0.02 s."


def test_a_case_that_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cases = dict.fromkeys((Case(-4096, "broken", 1.0), Case(4096, "inline", 1.0)), ("both ends",))
    done = CliRunner().invoke(command_of(dataclasses.replace(PLAN, cases=cases), cost_command), [*SHORT, "--json", str(path)])
    assert done.exit_code == 3
    assert "1 measurements failed: see the table" in done.stderr
    stored = json.loads(path.read_bytes())
    [gap] = stored["coverage"]["gaps"]
    assert (gap["case"], gap["status"]) == ("-4 KB, broken: CPU per message", "failed")
    assert [row[0] for row in stored["tables"][0]["rows"]] == ["4 KB, inline: CPU per message"]


async def test_a_message_out_of_turn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = cost.shmring.Client.submit

    def submit(client: object, payload: dict[str, list[object]]) -> object:
        header = payload["header"]
        return sent(client, payload | {"header": [header[0] if header[0] != 20 else 19, *header[1:]]})  # type: ignore[arg-type]

    monkeypatch.setattr(cost.shmring.Client, "submit", submit)
    with pytest.raises(ExceptionGroup) as raised:
        await cost.both_ends(4096, False, Timing(1, 0.01, 0.01))
    assert raised.group_contains(cost.BenchError, match="message 19 came where message 20 was due")


def test_a_median_decides_a_target() -> None:
    case = next(iter(PLAN.cases))
    findings = PLAN.findings({case: {"both ends": [4.0, 5.1, 5.2]}})
    assert [verdict.met for verdict in findings.targets] == [False, *[None] * 5]
    assert findings.targets[0].measured == "5.1 us"


def test_what_is_no_case_is_refused() -> None:
    done = CliRunner().invoke(main, ["cost", "--case", "1 GB"])
    assert done.exit_code == 2
    assert "no case begins so; there are: 4 KB, inline: CPU per message; 64 KB" in done.stderr
