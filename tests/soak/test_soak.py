"""Soak: whatever grows is found, a short run in which nothing does passes, and one that leaks on purpose fails."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from bench.report import Budget
from bench.report import pages as build_pages
from tests.fleet.cargo import CorruptedError, check_stamp, stamp
from tests.fleet.footprint import Footprint, footprint
from tests.soak import report
from tests.soak.control import Seen
from tests.soak.driver import ENGINE, IdleLook, Observations, ProcessSample, Sample
from tests.soak.plan import FEWEST_CYCLES, Phase, Plan
from tests.soak.verdict import MEMORY_LIMIT_NBYTES, judge
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PROCESSES = (ENGINE, "frontend 1")

# -- the plan and what is sent -----------------------------------------------------------------------------------------


def test_an_hour_is_divided_and_a_short_run_has_enough_cycles() -> None:
    hour = Plan.of(60)
    assert hour.cycles * len(Phase) * hour.phase_s == pytest.approx(3600)
    assert hour.interval_s == 1
    short = Plan.of(0.05)
    assert short.cycles >= FEWEST_CYCLES
    assert short.interval_s < short.phase_s


@for_each("place", [0, -1])
def test_a_tensor_of_another_request_is_found(place: int) -> None:
    tensor = stamp(torch.zeros(1001, dtype=torch.uint8), 7)
    check_stamp(tensor, 7)
    tensor[place] += 1
    with pytest.raises(CorruptedError, match="request 7 carries"):
        check_stamp(tensor, 7)


# -- what the kernel says ------------------------------------------------------------------------------------------------


def test_private_and_shared_memory_are_told_apart() -> None:
    before = footprint(os.getpid())
    anonymous = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, 64 * MIB)
    for mapping in (anonymous, shared):
        mapping.write(b"x" * len(mapping))
    with tempfile.TemporaryFile():
        after = footprint(os.getpid())
    anonymous.close()
    shared.close()
    # Writing takes a buffer of the size of each, which malloc may keep: of the larger one at most.
    assert after.private_nbytes - before.private_nbytes >= 31 * MIB
    assert 63 * MIB <= after.shared_nbytes - before.shared_nbytes <= 72 * MIB
    assert after.descriptors == before.descriptors + 1
    assert footprint(os.getpid()).shared_nbytes <= after.shared_nbytes - 63 * MIB


# -- the verdict ---------------------------------------------------------------------------------------------------------


def observed(
    cycles: int = 9, grow: Callable[[int, Phase, str], Footprint] | None = None, failures: tuple[str, ...] = ()
) -> Observations:
    """Two samples of each phase, of two processes; ``grow(cycle, phase, process)`` says what a process takes beyond 100 MiB."""
    seen = Observations([], [])
    for cycle in range(cycles):
        for number, phase in enumerate(Phase):
            for half in range(2):
                processes = {}
                for process in PROCESSES:
                    more = grow(cycle, phase, process) if grow else Footprint(0, 0, 0)
                    taken = Footprint(100 * MIB + more.private_nbytes, 300 * MIB, 20 + more.descriptors)
                    requests = 1000 * (2 * (cycle * len(Phase) + number) + half)
                    processes[process] = ProcessSample(taken, Seen(requests=requests, failures=list(failures)))
                at_s = float(2 * (cycle * len(Phase) + number) + half)
                seen.samples.append(Sample(at_s, cycle, phase, processes))
        seen.idle_looks.append(IdleLook(cycle, 0, 0, 0, 0, 0))
    return seen


def failed(seen: Observations) -> list[str]:
    return [check.what for check in judge(seen) if not check.passed]


def test_what_does_not_grow_passes() -> None:
    assert failed(observed()) == []


def test_memory_that_grows_in_one_process_and_one_phase_is_found() -> None:
    per_cycle = MEMORY_LIMIT_NBYTES // 6 + MIB  # six cycles lie between the middles of the quarters compared

    def grow(cycle: int, phase: Phase, process: str) -> Footprint:
        return Footprint(cycle * per_cycle if (phase, process) == (Phase.LARGE, "frontend 1") else 0, 0, 0)

    assert failed(observed(grow=grow)) == ["frontend 1: private memory, last quarter against first"]


def test_memory_within_the_limit_or_of_the_warm_up_passes() -> None:
    within = observed(grow=lambda cycle, phase, process: Footprint(cycle * MEMORY_LIMIT_NBYTES // 10, 0, 0))
    assert failed(within) == []
    warm_up = observed(grow=lambda cycle, phase, process: Footprint(500 * MIB if cycle else 0, 0, 5 if cycle else 0))
    assert failed(warm_up) == []


def test_one_descriptor_is_too_many() -> None:
    def grow(cycle: int, phase: Phase, process: str) -> Footprint:
        return Footprint(0, 0, int(process == ENGINE and cycle > 5))

    assert failed(observed(grow=grow)) == ["engine: descriptors while idle, last quarter against first"]


@for_each(
    "field", [member.name for member in msgspec.structs.fields(IdleLook) if member.name != "cycle"], ids=lambda name: name
)
def test_whatever_is_not_at_home_after_one_idle_phase_fails(field: str) -> None:
    seen = observed()
    seen.idle_looks[3] = msgspec.structs.replace(seen.idle_looks[3], **{field: 1})
    assert failed(seen) == ["the slab is empty after an idle phase"]


def test_a_failure_fails() -> None:
    seen = observed(failures=("frontend 1: CorruptedError: no",))
    assert failed(seen) == ["failures"]


def test_two_cycles_say_nothing() -> None:
    with pytest.raises(ValueError, match="three cycles"):
        judge(observed(cycles=2))


def test_what_is_kept_of_a_run_has_its_longest_stall_and_no_samples() -> None:
    seen = observed(cycles=3)
    late = msgspec.structs.replace(seen.samples[8].processes[ENGINE].seen, lag_s=0.5)
    processes = seen.samples[8].processes
    processes[ENGINE] = msgspec.structs.replace(processes[ENGINE], seen=late)
    found = report.findings(Plan.of(1), seen, judge(seen))
    assert found.results is None
    lags = {row[0]: row[4].split(" / ")[1] for row in found.tables[1].rows}
    assert lags[seen.samples[8].phase.value] == "500.0"


def test_the_benchmarks_pages_show_a_stored_run() -> None:
    seen = observed(cycles=3)
    found = report.findings(Plan.of(1), seen, judge(seen))
    text = build_pages({"soak": found}, Budget("abc", {}))["benchmarks.md"]
    assert found.targets
    assert all(f"| {verdict.what} |" in text for verdict in found.targets)
    assert 'in `bench/results/soak.json`: "soak"' in text, "what happened in the phases"


# -- real runs -----------------------------------------------------------------------------------------------------------

Run = tuple[int, str, dict[str, object]]

_RUN_LIMIT_S = 280  # seconds on an idle machine; on a crowded one the imports alone may take a minute


def start(directory: Path, name: str, *options: str) -> tuple[subprocess.Popen[str], Path]:
    path = directory / f"{name}.json"
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.05", "--frontends", "1", "--json", str(path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes), path  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """A run in which nothing is broken, and one in which everything is that can be, at the same time."""
    directory = tmp_path_factory.mktemp("soak")
    sabotages = [f"--sabotage={what}" for what in ("memory", "descriptors", "slab")]
    started = {"clean": start(directory, "clean"), "broken": start(directory, "broken", *sabotages)}
    ended: dict[str, Run] = {}
    try:
        for name, (process, path) in started.items():
            output = process.communicate(timeout=_RUN_LIMIT_S)[0]
            ended[name] = (process.returncode, output, json.loads(path.read_bytes()) if path.exists() else {})
        yield ended
    finally:
        for process, _ in started.values():
            process.kill()
            process.wait()


def verdicts(run: Run) -> dict[str, str]:
    _, output, found = run
    assert found, output
    return {row[0]: row[-1] for row in found["tables"][0]["rows"]}  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_passes(runs: dict[str, Run]) -> None:
    status, output, found = runs["clean"]
    assert status == 0, output
    assert found["mode"] == "soak"
    assert set(verdicts(runs["clean"]).values()) == {"passed"}
    phases = {row[0]: row[1:] for row in found["tables"][1]["rows"]}  # type: ignore[index]
    assert set(phases) == {phase.value for phase in Phase}
    assert float(phases[Phase.SMALL.value][0].replace(",", "")) > 0
    assert float(phases[Phase.ABORTS.value][2].replace(",", "")) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_broken_on_purpose_is_found(runs: dict[str, Run]) -> None:
    status, output, _ = runs["broken"]
    assert status == 1, output
    found = verdicts(runs["broken"])
    assert found["engine: private memory, last quarter against first"] == "FAILED"
    assert found["frontend 1: descriptors while idle, last quarter against first"] == "FAILED"
    assert found["the slab is empty after an idle phase"] == "FAILED"
    assert found["frontend 1: private memory, last quarter against first"] == "passed"
