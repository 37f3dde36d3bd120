"""``bench transport``: what can't be measured is said, and the commands end as they should."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from bench import command_line, groups, machine, transport
from bench.__main__ import main
from bench.children import BenchError
from bench.messages import Case, Cell, Measurement
from bench.meter import Cost
from bench.peers import MEMCPY, PEERS, Peer
from bench.plan import Plan, Runs, Timing
from bench.repetitions import ratio
from bench.results import format_nbytes
from bench.transport import PLAN, QUICK_PLAN, quick_command
from shmring.processes.process import Process
from tests.bench.conftest import command_of
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
TIMING = Timing(3, 0.1, 0.1)


# -- plans ----------------------------------------------------------------------------------------------------------------


def test_windows_are_those_of_one_producer_and_few_peers_have_several() -> None:
    assert list(PLAN.cases)[:3] == [Case(4096), Case(4096, window=1), Case(4096, producers=8)]
    assert PLAN.cases[Case(4096)] == ["shmring", MEMCPY, *list(PEERS)[1:]]
    assert PLAN.cases[Case(4096, window=1)] == list(PEERS)
    assert PLAN.cases[Case(4096, producers=8)] == ["shmring", "iceoryx2"]
    chosen = PLAN.chosen(["4 KB, 1 producer, window 1"], ["pyzmq"])
    assert chosen.cases == {Case(4096): ["shmring", "pyzmq"], Case(4096, window=1): ["shmring", "pyzmq"]}


def test_a_quick_run_has_what_targets_are_about() -> None:
    cases = QUICK_PLAN.cases
    assert {case.nbytes for case in cases} == {4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20}
    assert cases[Case(64 << 10, producers=8)] == ["shmring"]
    assert set(cases[Case(8 << 20, window=1)]) == {"shmring", "shmring-in-place"}
    assert {"shmring", MEMCPY, "pyzmq", "spinning-arena", "iceoryx2-loaned"} <= set(cases[Case(64 << 20)])


def test_what_is_in_flight_fits_into_memory() -> None:
    def window(case: Case) -> int:
        return case.cell(warm_up_s=0.0, timed_s=0.0, limit_s=0.0, directory="").window

    assert [window(Case(256 << 20)), window(Case(256 << 20, producers=8)), window(Case(1 << 20))] == [4, 1, 16]


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
        cost = Cost(messages=10, cpu_s=0.001, resident_nbytes=1 << 20, stall_ms=None)
        latencies = np.full(10, 1000, np.int64)
        return Measurement(10, 10 / self.speeds[self.name], latencies, (cost,), (cost,) * self.producers)

    def kill(self) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(groups, "PeerGroup", Pretended)
    monkeypatch.setattr(transport, "_COPIES_S", 0.001)
    monkeypatch.setattr(machine, "last_level_cache_nbytes", lambda: 1 << 20)  # times four, for each size: touched before
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this process keeps its own handlers
    monkeypatch.setattr(Pretended, "started", [])
    return Pretended


def plan(*sizes: int, peers: Sequence[str] = tuple(Pretended.speeds)) -> Plan:
    return dataclasses.replace(PLAN, cases={Case(nbytes): peers for nbytes in sizes}, timing=TIMING)


def measured(*sizes: int, peers: Sequence[str] = tuple(Pretended.speeds)) -> Runs:
    runs = Runs(plan(*sizes, peers=peers))
    transport.measure(runs)
    return runs


@pytest.mark.usefixtures("pretended")
def test_what_was_measured_so_far_is_kept_after_each_size() -> None:
    kept: list[str] = []
    transport.measure(Runs(plan(4096, 8192), lambda findings: kept.append(findings.coverage.summary())))  # type: ignore[union-attr]
    assert kept == ["3 of 6 measurements in 2 cases, 3 missing", "6 of 6 measurements in 2 cases"]


@pytest.mark.usefixtures("pretended")
def test_repetitions_are_interleaved_and_ratios_taken_within_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(4096).measured
    order = [line.split(", ")[-2] for line in capsys.readouterr().err.splitlines()]
    titles = [PEERS[name].title.split(", ")[-1] for name in Pretended.speeds]
    assert order == [*titles, *reversed(titles), *titles]
    assert ratio(found, Case(4096), "shmring", "torch-queue", "messages_per_s") == pytest.approx(10)
    assert [run.both_us for run in found[Case(4096)]["torch-queue"]] == pytest.approx([200] * 3)


@pytest.mark.usefixtures("pretended")
def test_copies_are_timed_beside_the_peers() -> None:
    runs = measured(4096, peers=["shmring", MEMCPY])
    assert runs.coverage().complete
    assert all(run.messages_per_s > 0 for run in runs.measured[Case(4096)][MEMCPY])
    report = runs.findings()
    assert [row[0] for row in report.tables[0].rows] == ["shmring, one copy", "memcpy, cold"]
    assert [stored.peer for stored in report.results] == ["shmring"]


def test_a_peer_that_fails_is_reported_and_the_others_go_on(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "fails", [("inline-msgpack", 4096)])
    runs = measured(4096, 8192)
    found = runs.measured
    assert [(gap.subject, gap.case, gap.reason) for gap in runs.coverage().gaps] == [
        ("inline-msgpack", Case(4096).title, "inline-msgpack broke")
    ]
    assert list(found[Case(4096)]) == ["shmring", "torch-queue"]
    assert len(found[Case(8192)]["inline-msgpack"]) == 3  # with new processes
    assert pretended.started.count("inline-msgpack") == 2


@pytest.mark.usefixtures("pretended")
def test_without_the_baseline_there_is_nothing_to_compare_and_the_others_go_on(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "fails", [("shmring", 4096)])
    findings = measured(4096).findings()
    assert findings.failures == 1
    assert findings.tables[1].rows == [
        ["inline msgpack, same socket", ""], ["torch.multiprocessing.Queue", ""],
    ]  # fmt: skip


def test_a_peer_that_is_missing_or_can_not_is_reported(pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEERS["torch-queue"], "requires", "no-such-distribution", raising=False)
    monkeypatch.setattr(PEERS["inline-msgpack"], "limits", lambda cell: "too large" if cell.nbytes > 4096 else None)
    runs = measured(4096, 8192)
    assert runs.coverage().table().rows == [
        ("all", "torch-queue", "not possible: not installed: pip install no-such-distribution"),
        (Case(8192).title, "inline-msgpack", "not possible: too large"),
    ]
    assert pretended.started == ["shmring", "inline-msgpack"]
    assert runs.findings().failures == 0


def test_processes_that_do_not_fit_into_memory_are_not_started(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups.psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * groups._PROCESS_NBYTES))
    assert [(gap.subject, gap.reason) for gap in measured(4096).coverage().gaps] == [
        ("torch-queue", "there is too little memory for its processes")
    ]
    assert pretended.started == ["shmring", "inline-msgpack"]


def test_processes_that_do_not_start_again_are_ended(pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has failed in a case, and its new processes fail to start: that is said of the next case, and nothing lives on."""
    ended: list[str] = []

    class Dying(Pretended):
        def start(self) -> None:
            if self.started.count(self.name) > 1:
                raise BenchError("no memory")

        def kill(self) -> None:
            ended.append(self.name)

    monkeypatch.setattr(groups, "PeerGroup", Dying)
    monkeypatch.setattr(Dying, "fails", [("inline-msgpack", 4096)])
    runs = Runs(dataclasses.replace(plan(4096, 8192), timing=Timing(1, 0.1)))
    with groups.Groups(PEERS, TIMING) as running:
        running.prepare(runs, [Case(4096), Case(8192)])
        runs.measure(running.run)
        assert ended == ["inline-msgpack"] * 2
    assert [gap.reason for gap in runs.coverage().gaps] == ["inline-msgpack broke", "no memory"]


@pytest.mark.usefixtures("pretended")
def test_a_run_that_is_broken_off_ends_its_processes_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Pretended, "kill", lambda group: ended.append(group.name))

    def refuse(findings: object, path: Path) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(command_line, "write_json", refuse)
    arguments = ["--case", "4 KB, 1 producer, window 16", "--peer", "torch-queue"]
    done = CliRunner().invoke(main, ["transport", *arguments, "--json", str(tmp_path / "x.json")])
    assert isinstance(done.exception, OSError)
    assert ended == ["shmring", "torch-queue"]


# -- the command ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pretended")
def test_sources_are_those_of_before_the_run_whose_result_may_change_a_file_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commits = iter(["clean", "clean-dirty", "clean-dirty"])
    monkeypatch.setattr(machine, "commit_of", lambda root: next(commits))
    stored: list[str] = []
    monkeypatch.setattr(command_line, "write_json", lambda findings, path: stored.append(findings.machine.commit))
    path = tmp_path / "x.json"
    arguments = ["--case", "4 KB, 1 producer", "--peer", "torch-queue"]
    CliRunner().invoke(main, ["transport", *arguments, "--json", str(path)])
    assert stored == ["clean"] * 2, "after the one size, and at the end"


@pytest.mark.slow
@pytest.mark.usefixtures("no_new_segments")
def test_the_command_prints_tables_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this process keeps its own handlers
    path = tmp_path / "results.json"
    arguments = ["--case", "4 KB, 1 producer, window 16", "--peer", "multiprocessing-queue", "--peer", MEMCPY]
    arguments += ["--repetitions", "2", "--seconds", "0.1", "--json", str(path)]
    outcome = CliRunner().invoke(main, ["transport", *arguments])
    assert outcome.exit_code in (0, 1), outcome.output
    assert "4 KB, 1 producer, window 16, multiprocessing.Queue, repetition 2 of 2" in outcome.stderr
    stored = json.loads(path.read_bytes())
    assert stored["mode"] == "transport"
    speeds, ratios, costs = stored["tables"][:3]
    for table in (speeds, ratios):
        assert [row[0] for row in table["rows"]] == ["shmring, one copy", "memcpy, cold", "multiprocessing.Queue"]
    assert (ratios["rows"][0][1], costs["rows"][1][1]) == ("1.00 x", "")
    ours, queue = stored["results"]
    assert (ours["peer"], queue["peer"]) == ("shmring", "multiprocessing-queue")
    assert ours["shmring_ratio"] == 1
    assert min(queue["messages_per_s"], ours["messages_per_s"]) > 0
    assert stored["machine"].keys() >= {"cpu", "cores", "kernel", "python", "torch", "shmring", "commit"}
    assert [case["repetitions"] for case in stored["coverage"]["planned"]] == [2]
    assert stored["coverage"]["gaps"] == []
    assert {"resident memory without the slab, above a process that only imported torch"} <= {
        verdict["what"] for verdict in stored["targets"] if verdict["met"] is not None
    }


@pytest.mark.parametrize(
    ("fails", "code", "last"),
    [((), 1, "1 target missed"), ([("torch-queue", 4096)], 3, "Error: 1 measurements failed: see the table")],
)
def test_a_missed_target_is_not_a_crash(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch, fails: Sequence[tuple[str, int]], code: int, last: str
) -> None:
    names = tuple(pretended.speeds)
    monkeypatch.setattr(pretended, "speeds", {"shmring": 10.0, "inline-msgpack": 1.0, "torch-queue": 1.0})  # we want 30 times
    monkeypatch.setattr(pretended, "fails", fails)
    command = command_of(dataclasses.replace(plan(4096, 65536, peers=names), mode="quick"), quick_command)
    outcome = CliRunner().invoke(command)
    assert outcome.exit_code == code
    assert "torch.multiprocessing.Queue" in outcome.stdout  # the table of targets is there in both cases
    assert "…" not in outcome.stdout, "of no number a part is cut off"
    assert last in outcome.stderr.splitlines()[-1]


@pytest.mark.slow
def test_whoever_stops_it_stops_all_of_it(run_python: Callable[..., Process]) -> None:
    command = ["-m", "bench", "transport", "--case", "4 KB, 1 producer", "--peer", "shmring", "--seconds", "60"]
    running = run_python(*command, cwd=ROOT, stderr=subprocess.STDOUT)
    while "repetition 1" not in (line := running.line()):
        assert line, "it ended by itself"
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) >= 2
    running.send(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@for_each(("nbytes", "text"), [(65536, "64 KB"), (16 << 20, "16 MB"), (1000, "1000 B")])
def test_sizes_are_shown_as_people_say_them(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
