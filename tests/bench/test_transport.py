"""``bench transport``: what can't be measured is said, and the commands end as they should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from bench import interleaving, machine, targets, transport
from bench.__main__ import main
from bench.children import BenchError
from bench.interleaving import Plan, Round
from bench.messages import Case, Cell, Measurement
from bench.meter import Cost
from bench.peers import PEERS, Peer
from bench.records import Results
from bench.results import format_nbytes
from shmring.processes.process import Process
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


# -- plans ----------------------------------------------------------------------------------------------------------------


def test_sweeps_vary_one_dimension_at_a_time() -> None:
    rounds = transport.sweeps(["shmring", "pyzmq"], sizes=(4096,), producers=(1, 2))
    base = Case(4096)
    assert rounds[0].cases == (
        base,
        Case(4096, window=1),
        Case(4096, copies_out=True),
        Case(4096, dtype="bfloat16"),
        Case(4096, dtype="uint8"),
    )
    assert rounds[1].cases == (Case(4096, producers=2),)
    assert [one.limits for one in rounds] == [True, False]


def test_a_quick_run_says_what_it_leaves_out() -> None:
    names = list(PEERS)
    rounds = transport.quick_rounds(names)
    asked = {(name, case) for one in rounds for case in one.cases for name in one.peers}
    without = transport.quick_without(names)
    latencies = [Case(nbytes, window=1) for nbytes in transport.QUICK_SIZES[:-1]]
    for name in names:
        for case in [*map(Case, transport.QUICK_SIZES), *latencies]:
            assert ((name, case) in asked) is not ((case.title, name) in without)
    assert {("shmring", Case(64 << 20)), ("shmring-in-place", Case(8 << 20, window=1))} <= asked
    assert (Case(8 << 20, window=1).title, "pyzmq") in without
    limits = [one.cases[0].nbytes for one in rounds if one.limits]
    assert limits == sorted(set(limits)) == list(transport.QUICK_SIZES)


def test_what_is_in_flight_fits_into_memory() -> None:
    assert Case(256 << 20).bounded().window == 4
    assert Case(256 << 20, producers=8).bounded().window == 1
    assert Case(1 << 20).bounded().window == 16
    rounds = transport.sweeps(["shmring"], sizes=(1 << 30,), dtypes=("uint8",), producers=(1,), copies_out=(False,))
    assert rounds[0].cases == (Case(1 << 30, "uint8", window=1),)  # once, though two windows were asked for


def test_processes_are_started_for_as_many_peers_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(PEERS)
    monkeypatch.setattr(interleaving, "_PROCESS_NBYTES", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 32)
    chunks = Round((Case(4096, producers=3),), names).chunks()  # 16 processes: 4 peers of 4
    assert [len(chunk) for chunk in chunks[:-1]] == [4] * (len(chunks) - 1)
    assert {chunk[0] for chunk in chunks} == {names[0]}
    assert [name for chunk in chunks for name in chunk[1:]] == list(names[1:])
    assert Round((Case(4096),), names[:1]).chunks() == [names[:1]]


# -- a run, with groups that only pretend -------------------------------------------------------------------------------------


class Pretended:
    """A group without processes: in which peer and case it fails, and how fast the others are."""

    fails: Sequence[tuple[str, int]] = ()
    started: list[str] = []  # noqa: RUF012 # of the class, for the tests to look at
    speeds = {"shmring": 100.0, "inline-msgpack": 50.0, "torch-queue": 10.0}  # noqa: RUF012 # not changed

    def __init__(self, peer: Peer, producers: int) -> None:
        self.name, self.producers = peer.name, producers
        self.started.append(peer.name)

    def start(self) -> None:
        pass

    def run(self, cell: Cell) -> Measurement:
        if (self.name, cell.nbytes) in self.fails:
            raise BenchError(f"{self.name} broke")
        cost = Cost(messages=10, cpu_s=0.001, resident_nbytes=1 << 20, descriptors=5, lag=None)
        latencies = np.full(10, 1000, np.int64)
        return Measurement(10, 10 / self.speeds[self.name], latencies, cost, (cost,) * self.producers)

    def close(self) -> None:
        pass

    kill = close


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(interleaving, "PeerGroup", Pretended)
    monkeypatch.setattr(interleaving, "_LIMITS_S", 0.001)
    monkeypatch.setattr(machine, "last_level_cache_nbytes", lambda: 1 << 20)  # times four, for each round: touched before
    monkeypatch.setattr(interleaving, "torch_resident_nbytes", lambda: 200 << 20)
    monkeypatch.setattr(Pretended, "started", [])
    return Pretended


def plan(*sizes: int, peers: Sequence[str] = tuple(Pretended.speeds)) -> Plan:
    rounds = [Round((Case(nbytes),), tuple(peers), limits=True) for nbytes in sizes]
    return Plan(rounds=rounds, repetitions=3, timed_s=0.1, warm_up_s=0.1)


@pytest.mark.usefixtures("pretended")
def test_what_was_measured_so_far_is_kept_after_each_round() -> None:
    kept: list[Results] = list(interleaving.run(plan(4096, 8192), lambda line: None))
    assert [{one.case.nbytes for one in each.results} for each in kept] == [{4096}, {4096, 8192}]
    assert [each.coverage.summary() for each in kept if each.coverage] == [
        "3 of 6 measurements in 2 cases, 3 missing",
        "6 of 6 measurements in 2 cases",
    ]


@pytest.mark.usefixtures("pretended")
def test_sources_are_those_of_before_the_run_whose_result_may_change_a_file_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = iter(["clean", "clean-dirty", "clean-dirty"])
    monkeypatch.setattr(machine, "git", lambda root, *arguments: next(commits))
    kept: list[Results] = list(interleaving.run(plan(4096, 8192), lambda line: None))
    assert [results.machine.commit for results in kept] == ["clean"] * len(kept)


def test_repetitions_are_interleaved_and_ratios_taken_within_them(pretended: type[Pretended]) -> None:
    lines: list[str] = []
    *_, results = interleaving.run(plan(4096), lines.append)
    assert len(lines) == plan(4096).steps() == 10
    order = [line.partition(": ")[2] for line in lines[1:]]
    assert order == [PEERS[name].title for name in pretended.speeds] * 3
    slowest = results.find("torch-queue", Case(4096))
    assert slowest is not None
    assert slowest.shmring_ratio.median == pytest.approx(10)
    assert slowest.runs == pytest.approx([10.0] * 3)
    assert slowest.consumer.cpu_us_per_message.median == pytest.approx(100)
    assert [limit.nbytes for limit in results.limits] == [4096]
    assert len(results.limits[0].copies_cold_runs) == 3


def test_a_peer_that_fails_is_reported_and_the_others_go_on(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "fails", [("inline-msgpack", 4096)])
    *_, results = interleaving.run(plan(4096, 8192), lambda line: None)
    assert [(one.subject, one.case, one.reason) for one in results.failed] == [
        ("inline-msgpack", Case(4096).title, "inline-msgpack broke")
    ]
    assert results.find("inline-msgpack", Case(4096)) is None
    assert results.find("torch-queue", Case(4096)) is not None
    assert results.find("inline-msgpack", Case(8192)) is not None  # with new processes
    assert pretended.started.count("inline-msgpack") == 2


def test_without_the_baseline_a_case_has_no_result_and_the_others_go_on(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "fails", [("shmring", 4096)])
    *_, results = interleaving.run(plan(4096, 8192), lambda line: None)
    assert {one.case.nbytes for one in results.results} == {8192}
    assert [(one.subject, one.case) for one in results.failed] == [
        (name, Case(4096).title) for name in ("shmring", "inline-msgpack", "torch-queue")
    ]
    assert results.failed[0].reason == "shmring broke"
    assert results.coverage is not None
    assert results.coverage.summary() == "3 of 6 measurements in 2 cases, 3 failed"


def test_a_peer_that_is_missing_or_can_not_is_reported(pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEERS["torch-queue"], "requires", "no-such-distribution", raising=False)
    monkeypatch.setattr(PEERS["inline-msgpack"], "limits", lambda cell: "too large" if cell.nbytes > 4096 else None)
    *_, results = interleaving.run(plan(4096, 8192), lambda line: None)
    assert results.coverage is not None
    assert list(results.coverage.lines()) == [
        ("all", "torch-queue", "not possible: not installed: pip install no-such-distribution"),
        (Case(8192).title, "inline-msgpack", "not possible: too large"),
    ]
    assert pretended.started == ["shmring", "inline-msgpack"]
    assert not results.failed


# -- the command ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_new_segments")
def test_the_command_prints_tables_and_writes_json_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this process keeps its own handlers
    path, stem = tmp_path / "results.json", tmp_path / "plot"
    arguments = ["--size", "4KiB", "--dtype", "float32", "--producers", "1", "--window", "16", "--no-copies-out"]
    arguments += ["--repetitions", "2", "--seconds", "0.1", "--peer", "torch-queue-by-name"]
    outcome = CliRunner().invoke(main, ["transport", *arguments, "--json", str(path), "--plot", str(stem)])
    assert outcome.exit_code == 0, outcome.output
    assert "4 KB of float32, 1 producer, window 16, repetition 2 of 2: torch.multiprocessing.Queue" in outcome.stderr
    rows = {
        title: line for line in outcome.stdout.splitlines() for title in ("one copy", "file_system", "memcpy") if title in line
    }
    assert "1.00 x" in rows["one copy"]
    assert all(" x " in row for row in rows.values())

    stored = json.loads(path.read_bytes())
    assert stored["mode"] == "transport"
    ours, queue = stored["results"]
    assert (ours["peer"], queue["peer"]) == ("shmring", "torch-queue-by-name")
    assert ours["shmring_ratio"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    ratios = [mine / other for mine, other in zip(ours["runs"], queue["runs"], strict=True)]
    assert queue["shmring_ratio"]["minimum"] == pytest.approx(min(ratios))
    assert 0 < queue["latency_p50_us"]["median"] <= queue["latency_p99_us"] <= queue["latency_p999_us"]
    assert stored["machine"].keys() >= {"cpu", "cores", "kernel", "python", "torch", "shmring", "commit"}
    assert stored["limits"][0]["nbytes"] == 4096
    assert stored["torch_resident_nbytes"] > 10 << 20
    assert [case["repetitions"] for case in stored["coverage"]["planned"]] == [2]
    assert stored["coverage"]["gaps"] == []
    assert {file.suffix for file in tmp_path.glob("plot-throughput.*")} == {".png", ".svg"}


@pytest.mark.parametrize(
    ("fails", "code", "last"),
    [((), 1, "target"), ([("torch-queue", 4096)], 3, "Error: 2 measurements failed: see the table")],
)
def test_a_missed_target_is_not_a_crash(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch, fails: Sequence[tuple[str, int]], code: int, last: str
) -> None:
    names = tuple(pretended.speeds)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setattr(transport, "quick_plan", lambda repetitions, seconds: plan(4096, 65536, peers=names))
    monkeypatch.setattr(pretended, "speeds", dict.fromkeys(names, 1.0))  # as fast as ours, of which we want 30 times
    monkeypatch.setattr(pretended, "fails", [*fails, *((name, 65536) for name, _ in fails)])
    outcome = CliRunner().invoke(main, ["quick"])
    assert outcome.exit_code == code
    assert "torch.multiprocessing.Queue" in outcome.stdout  # the table of targets is there in both cases
    assert "…" not in outcome.stdout, "of no number a part is cut off"
    assert last in outcome.stderr.splitlines()[-1]
    assert ("missed" in outcome.stderr.splitlines()[-1]) is not bool(fails)


@pytest.mark.parametrize(("second", "code", "measured"), [(1000.0, 0, "1e+03 x"), (10.0, 1, "10 x")])
def test_what_is_missed_is_measured_again_and_longer_and_that_counts(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch, second: float, code: int, measured: str
) -> None:
    cells: list[Cell] = []

    class Disturbed(Pretended):
        def run(self, cell: Cell) -> Measurement:
            cells.append(cell)
            short = cell.timed_s < 0.5
            self.speeds = {"shmring": 100.0, "torch-queue": 10.0 if short and cell.nbytes == 4096 else 100.0 / second}
            return super().run(cell)

    monkeypatch.setattr(interleaving, "PeerGroup", Disturbed)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setattr(
        transport, "quick_plan", lambda repetitions, seconds: plan(4096, 65536, peers=("shmring", "torch-queue"))
    )
    outcome = CliRunner().invoke(main, ["quick"])
    assert outcome.exit_code == code, outcome.output
    assert {cell.nbytes for cell in cells if cell.timed_s == 0.5} == ({4096, 65536} if code else {4096})  # only what misses it
    assert ("1 target missed" in outcome.stderr) is bool(code)
    (row,) = [
        line for line in outcome.stdout.splitlines() if "messages/s of torch.multiprocessing.Queue" in line and "4 KB" in line
    ]
    assert measured in row
    assert "at first 10 x" in outcome.stdout


@pytest.mark.usefixtures("pretended")
def test_only_the_cases_and_peers_of_missed_targets_are_measured_again() -> None:
    *_, results = interleaving.run(plan(4096, 65536, 1 << 20, 8 << 20), lambda line: None)
    missed = [target for target in targets.TARGETS if target.judge(results).met is False]
    (slow,) = [target for target in missed if "torch" in target.what]
    assert slow.at == "4 KB, 64 KB"
    again = transport.again(plan(4096, 65536, 1 << 20, 8 << 20), results, [slow])
    assert [part.cases for part in again.rounds] == [(Case(4096),), (Case(65536),)]
    assert {part.peers for part in again.rounds} == {("shmring", "torch-queue")}
    assert (again.repetitions, again.timed_s) == (5, 0.5)


@pytest.mark.slow
def test_whoever_stops_it_stops_all_of_it(run_python: Callable[..., Process]) -> None:
    command = ["-m", "bench", "transport", "--size", "4KiB", "--peer", "shmring", "--seconds", "60"]
    running = run_python(*command, cwd=ROOT, stderr=subprocess.STDOUT)
    while "repetition 1" not in (line := running.line()):
        assert line, "it ended by itself"
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) >= 2
    running.send(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_sizes_must_be_whole_numbers_of_stamps() -> None:
    result = CliRunner().invoke(main, ["transport", "--size", "4097"])
    assert result.exit_code == 2
    assert "multiple of 4 bytes" in result.output


@for_each(("nbytes", "text"), [(65536, "64 KB"), (16 << 20, "16 MB"), (1000, "1000 B")])
def test_sizes_are_shown_as_people_say_them(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
