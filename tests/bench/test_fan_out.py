"""``bench fan-out``: real workers of small cells, what is made of their numbers, and that what fails is said."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench import command_line
from bench.__main__ import main
from bench.children import BenchError
from bench.fan_out.command import CENTRAL, LARGE, MIDDLE, PLAN, SIZES, SMALL, WORKERS, host, planned
from bench.fan_out.measuring import END, Cell, Run, Stamps
from bench.fan_out.ways import ARENA, IN_PLACE, MESSAGE_QUEUE, OURS, POLLING, WAYS
from bench.programs import Program
from tests.tables import slow

QUEUE = MESSAGE_QUEUE


def run(per_s: float = 1.0, **numbers: Any) -> Run:
    return msgspec.structs.replace(Run(per_s, last_us=100.0, engine_us=10.0, worker_us=5.0), **numbers)


# -- cells ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Iterator[Program]:
    with host(sys.executable) as own:
        yield own


@pytest.mark.parametrize("subject", [OURS, slow(POLLING), slow(IN_PLACE)])
def test_every_way_brings_each_message_to_all_workers(own: Program, subject: str) -> None:
    found = own.order(Cell(subject, 2, 4096, seconds=0.02, steps=3, gathers=WAYS[subject].gathers), Run)
    assert found.per_s > 0
    assert found.last_us > 0
    assert (found.gathers_per_s is not None) is WAYS[subject].gathers


def test_rest_is_measured(own: Program) -> None:
    found = own.order(Cell(OURS, 2, 4096, seconds=0.02, steps=3, rests=True), Run)
    assert found.awake_percent is not None
    assert found.idle_percent is not None
    assert 0 <= found.idle_percent < 100


@pytest.mark.slow  # it starts a host and its workers twice
def test_a_host_tells_what_failed_and_is_started_again_when_it_has_died(own: Program) -> None:
    with pytest.raises(BenchError, match="ended with"):
        own.order(Cell("nothing-of-this-name", 1, 4096, seconds=0.02, steps=3), Run)
    cell = Cell(OURS, 1, 4096, seconds=0.02, steps=3)
    own.start()
    assert own._process is not None
    own._process.kill()
    with pytest.raises(BenchError, match="its program has died"):
        own.order(cell, Run)
    assert own.order(cell, Run).per_s > 0


def test_a_message_out_of_turn_is_noticed() -> None:
    stamps = Stamps(1)
    assert not stamps.note(0, 1, 7)
    with pytest.raises(RuntimeError, match="worker 0 got 3, 7 after 1"):
        stamps.note(0, 3, 7)
    with pytest.raises(RuntimeError, match="got 2, 0"):
        stamps.note(0, 2, 0)
    assert stamps.note(0, END, 0)


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_goes_on_without_what_fails_and_stores_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def play(program: Program, cell: Cell, kind: type[Run]) -> Run:
        if (cell.workers, cell.nbytes) == (1, SMALL):
            played.append(cell.subject)
        if cell.subject == POLLING:
            raise BenchError("no descriptors are left")
        return run(200.0 if cell.subject == OURS else 50.0)

    monkeypatch.setattr(Program, "order", play)
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    path = tmp_path / "fan-out.json"
    done = CliRunner().invoke(main, ["fan-out", "--repetitions=2", f"--json={path}"])
    assert done.exit_code == 3, done.output
    assert "no descriptors are left" in done.stdout
    assert "has no vLLM; `make test-vllm` makes an environment that has" in done.stdout
    assert played == [OURS, POLLING, IN_PLACE, IN_PLACE, OURS], "in turns; what fails is not tried again"
    stored = json.loads(path.read_bytes())
    assert (stored["mode"], len(stored["coverage"]["planned"])) == ("fan-out", len(SIZES) * len(WORKERS))
    assert stored["tables"][0]["rows"][0][:3] == ["4 KB to 1 worker", WAYS[OURS].title, "200"]


# -- the report ----------------------------------------------------------------------------------------------------------


def test_ratios_are_those_of_the_same_repetition_and_the_worst_case_decides() -> None:
    findings = PLAN.findings(
        {
            (1, SMALL): {OURS: [run(30), run(60), run(15)], QUEUE: [run(10), run(20), run(5)]},
            (2, SMALL): {OURS: [run(19)], QUEUE: [run(10)]},
        }
    )
    verdict = findings.targets[0]
    assert (verdict.at, verdict.met, verdict.measured) == ("4 KB", False, "1.9 x")
    assert verdict.detail == "1: 3, 2: 1.9, 4: not measured, 8: not measured"


def test_in_place_is_compared_with_itself_either_way() -> None:
    def steady(small: float, large: float) -> bool | None:
        findings = PLAN.findings({(1, SMALL): {IN_PLACE: [run(small)]}, (1, LARGE): {IN_PLACE: [run(large)]}})
        (verdict,) = [verdict for verdict in findings.targets if verdict.what.endswith("of the other")]
        return verdict.met

    assert steady(100, 70) is True
    assert steady(100, 60) is False
    assert steady(60, 100) is False


def test_every_target_is_judged_by_what_it_speaks_of() -> None:
    good = run(10_000.0, last_us=50.0, engine_us=3.0, gathers_per_s=40_000.0, awake_percent=1.0, idle_percent=0.1)
    measured = {
        (workers, nbytes): {
            OURS: [good], POLLING: [good], IN_PLACE: [good], QUEUE: [run(100.0, gathers_per_s=9_000.0)], ARENA: [run(100.0)],
        }
        for workers in (1, 2, CENTRAL, 8)
        for nbytes in (SMALL, MIDDLE, LARGE)
    }  # fmt: skip
    findings = PLAN.findings(measured)
    assert {verdict.what: verdict.met for verdict in findings.targets if not verdict.met} == {}
    bad = run(1.0, last_us=1e6, engine_us=1e3, gathers_per_s=1.0, awake_percent=136.0, idle_percent=2.0)
    for found in measured.values():
        found |= {OURS: [bad], POLLING: [bad], IN_PLACE: [bad]}
    findings = PLAN.findings(measured)
    assert [verdict.what for verdict in findings.targets if verdict.met] == [
        "messages/s in place, 4 KB and 64 MB, of the other"
    ]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert {verdict.met for verdict in PLAN.findings({(1, SMALL): {OURS: [run()]}}).targets} == {None}


def test_only_the_central_case_is_looked_at_more_closely() -> None:
    assert planned(OURS, CENTRAL, SMALL, 0.5).rests
    assert planned(QUEUE, CENTRAL, SMALL, 0.5).rests
    assert planned(POLLING, 1, SMALL, 0.5).gathers
    assert not planned(IN_PLACE, 1, SMALL, 0.5).gathers
    assert not planned(OURS, CENTRAL, MIDDLE, 0.5).rests
