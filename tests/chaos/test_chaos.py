"""Chaos: the plan follows from its seed, every kind of damage is found, and a short run finds none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.chaos.account import Findings, account
from tests.chaos.driver import Happened, Incarnation, Observations, QuietLook
from tests.chaos.journal import Aborted, Began, Ended, Gone, Held, Journal, Record, Reusable, read
from tests.chaos.plan import Event, Fault, Plan, phases
from tests.fleet import cargo
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000

Written = Began | Ended | Aborted | Reusable | Held | Gone


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_seed_decides_everything() -> None:
    plan = Plan(minutes=1, seed=7)
    assert phases(plan) == phases(Plan(minutes=1, seed=7))
    assert phases(plan) != phases(Plan(minutes=1, seed=8))
    first, second = (cargo.Source(random.Random("7")).content(3, 1000) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]


@for_each("seed", range(5))
def test_ten_minutes_have_every_fault_and_a_hundred_kills(seed: int) -> None:
    plan = Plan(minutes=10, seed=seed)
    found = phases(plan)
    assert sum(phase.seconds for phase in found) == pytest.approx(600)
    events: list[Event] = [event for phase in found for event in phase.events]
    assert {event.fault for event in events} == set(Fault)
    kills = [event for event in events if event.fault in (Fault.KILL_ENGINE, Fault.KILL_FRONTEND, Fault.HANG_UP)]
    assert len(kills) >= 100
    assert sum(event.fault is Fault.KILL_ENGINE for event in events) >= 10
    assert {event.frontend for event in events} == set(range(plan.frontends))
    assert all(0 <= event.at_s < phase.seconds for phase in found for event in phase.events)


# -- contents and journals ---------------------------------------------------------------------------------------------


@for_each("place", [0, 500, 999])
def test_a_single_wrong_bit_is_found(place: int) -> None:
    tensor, checksum = cargo.Source(random.Random(1)).content(5, 1000)
    cargo.check(tensor, 5, checksum, "now")
    tensor[place] ^= 1
    with pytest.raises(cargo.CorruptedError, match=r"content 5 of 1000 bytes .* now"):
        cargo.check(tensor, 5, checksum, "now")


def test_a_journal_that_a_death_has_cut_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    records: list[Record] = [Began(1, "copied", 10), Ended(1, "answered", 20), Held(4, 1, 15, 9)]
    for record in records:
        journal.write(record)
    journal.wrong("violation", "such a thing")
    with path.open("ab") as file:
        file.write(b'["began",2,"cop')
    *found, wrong = read(path)
    assert found == records
    assert getattr(wrong, "text", "") == "such a thing"


# -- the account -------------------------------------------------------------------------------------------------------


def seen(directory: Path, records: dict[int, list[Written]], ends: dict[int, str]) -> Observations:
    incarnations = []
    for pid, written in records.items():
        path = directory / f"{pid}"
        journal = Journal(path)
        for record in written:
            journal.write(record)
        incarnations.append(Incarnation(pid, pid == 1, path, ends.get(pid, "stayed")))
    return Observations(began_ns=0, ended_ns=2_000 * MS, incarnations=incarnations, looks=[QuietLook(0, 0, 0, 0, 0)])


def settle(observations: Observations) -> Findings:
    return account(Plan(minutes=1, seed=1), observations)


def test_a_request_without_an_end_is_lost_unless_its_frontend_was_killed(tmp_path: Path) -> None:
    began: list[Written] = [Began(1, "copied", 0), Began(2, "copied", 0), Ended(1, "answered", 5)]
    findings = settle(seen(tmp_path, {2: began, 3: began, 4: began}, {3: "killed", 4: "left"}))
    assert (findings.requests, findings.answered) == (6, 3)
    assert (findings.died_with_their_frontend, findings.lost) == (1, 2)
    assert not findings.passed


def test_latencies_count_beyond_the_step_and_without_stops(tmp_path: Path) -> None:
    observations = seen(
        tmp_path,
        {
            1: [Held(2, 1, 130 * MS, 1), Held(2, 2, 10 * MS, 1), Held(3, 9, 420 * MS, 1), Gone(3, 4096, 425 * MS)],
            5: [Held(4, 1, 310 * MS, 5), Gone(4, 4096, 363 * MS, heard_ns=360 * MS)],
            2: [
                *(Aborted(number, 100 * MS) for number in (1, 2)),
                *(Reusable(number, 132 * MS) for number in (1, 2)),
                Aborted(3, 500 * MS),
                Reusable(3, 700 * MS),  # it was stopped meanwhile
            ],
        },
        {},
    )
    observations.happened = [
        Happened(Fault.KILL_FRONTEND, 3, 400 * MS, 450 * MS, {1: 0}),
        Happened(Fault.KILL_FRONTEND, 4, 300 * MS, 350 * MS, {5: 0}),
        Happened(Fault.STOP_FRONTEND, 2, 550 * MS, 650 * MS),
    ]
    findings = settle(observations)
    assert findings.abort_to_reusable.all_ms == [2.0, 32.0]
    assert findings.death_to_reclaimed.all_ms == [3.0, 5.0]
    assert findings.kill_to_word.all_ms == [0.0, 60.0]
    assert findings.kills == 2


def test_an_engine_that_is_dead_to_a_frontend_must_have_died(tmp_path: Path) -> None:
    observations = seen(tmp_path, {2: [Began(1, "copied", 0), Ended(1, "EngineDeadError", 110 * MS)]}, {})
    assert settle(observations).violations == 1
    observations.happened = [Happened(Fault.KILL_ENGINE, 1, 100 * MS, 120 * MS)]
    findings = settle(observations)
    assert findings.passed
    assert findings.engine_death_to_error.all_ms == [10.0]
    observations.happened = [Happened(Fault.HANG_UP, 2, 100 * MS, 120 * MS)]
    assert settle(observations).passed


def test_who_looks_late_is_told_late_and_who_waits_is_told_at_once(tmp_path: Path) -> None:
    """The engine dies after 100 ms. One caller looks long after that, and another one waits."""
    looks: list[Written] = [Began(1, "copied", 0), Ended(1, "EngineDeadError", 9_001 * MS, 9_000 * MS)]
    waits: list[Written] = [Began(1, "copied", 0), Ended(1, "EngineDeadError", 130 * MS, 50 * MS)]
    observations = seen(tmp_path, {2: looks, 3: waits}, {})
    observations.ended_ns = 10_000 * MS
    assert settle(observations).violations == 2
    observations.happened = [Happened(Fault.KILL_ENGINE, 1, 100 * MS, 120 * MS)]
    findings = settle(observations)
    assert findings.passed
    assert findings.engine_death_to_error.all_ms == [30.0]
    observations.happened = [Happened(Fault.KILL_ENGINE, 1, 100 * MS, 140 * MS, {}, 121 * MS)]
    findings = settle(observations)
    assert findings.engine_death_to_error.all_ms == [9.0]
    assert findings.kill_to_word.all_ms == [21.0]


def test_who_waits_and_is_told_late_is_found(tmp_path: Path) -> None:
    """Whether the engine was dead when it began, or not."""
    written: list[Written] = []
    for number, at in ((1, 50), (2, 200)):
        written += (Began(number, "copied", at * MS), Ended(number, "EngineDeadError", 9_000 * MS, at * MS))
    observations = seen(tmp_path, {2: written}, {})
    observations.happened = [Happened(Fault.KILL_ENGINE, 1, 100 * MS, 120 * MS)]
    observations.ended_ns = 10_000 * MS
    assert settle(observations).violations == 2


def test_a_stopped_process_notices_the_death_of_an_engine_when_it_goes_on(tmp_path: Path) -> None:
    observations = seen(tmp_path, {2: [Began(1, "copied", 0), Ended(1, "EngineDeadError", 30_000 * MS)]}, {})
    death = Happened(Fault.KILL_ENGINE, 1, 100 * MS, 120 * MS)
    observations.ended_ns = 31_000 * MS
    observations.happened = [death, Happened(Fault.STOP_FRONTEND, 3, 50 * MS, 29_900 * MS)]
    assert not settle(observations).passed, "another was stopped"
    observations.happened = [death, Happened(Fault.STOP_FRONTEND, 2, 50 * MS, 29_900 * MS)]
    assert settle(observations).passed


@for_each("field", msgspec.structs.fields(QuietLook), ids=lambda field: field.name)
def test_whatever_a_quiet_look_finds_fails_the_run(tmp_path: Path, field: msgspec.structs.FieldInfo) -> None:
    observations = seen(tmp_path, {2: []}, {})
    assert settle(observations).passed
    observations.looks.append(msgspec.structs.replace(observations.looks[0], **{field.name: 1}))
    findings = settle(observations)
    assert sum(findings.must_be_zero.values()) == 1
    assert not findings.passed


# -- real runs ---------------------------------------------------------------------------------------------------------


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--minutes", "0.05", "--seed", "2", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    done = run("--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    found = json.loads(path.read_bytes())
    assert found["passed"] is True
    assert set(found["must_be_zero"].values()) == {0}
    assert found["requests"] > 50
    assert found["answered"] > 0
    assert sum(found["faults"].values()) > 0
    assert found["abort_to_reusable"]["count"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "what"),
    [("corrupt", "corrupted"), ("leak", "leaked bytes"), ("lose", "lost")],
)
def test_what_is_broken_on_purpose_is_found(tmp_path: Path, sabotage: str, what: str) -> None:
    path = tmp_path / "chaos.json"
    done = run("--json", str(path), "--frontends", "1", "--sabotage", sabotage)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert json.loads(path.read_bytes())["must_be_zero"][what] > 0
