"""``bench vllm``: what is planned, and what its report makes of measurements. (The servers themselves: ``make test-vllm``.)"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bench import command_line
from bench.plan import Runs, Timing
from bench.serving.load import Latency
from bench.vllm import command, embeds, embeds_program, encoders, load, workers
from bench.vllm.command import PLAN, vllm_command
from bench.vllm.load import CASES, SIDES, WAYS, Case, Fleet, Measurement, Way, fleets, for_a_while
from tests.tables import for_each


def measurement(requests_per_s: float, engine_ms: float = 5.0, lags_ms: Sequence[float] = (5.0,)) -> Measurement:
    return Measurement(
        duration_s=1.0,
        requests=1,
        requests_per_s=requests_per_s,
        ttft=Latency(1e3 / requests_per_s, 2e3 / requests_per_s),
        tpot=None,
        e2e=None,
        generator_cpu_s=0.0,
        lags_ms=list(lags_ms),
        cpu_ms={"EngineCore": engine_ms, "APIServer": 50.0},
        tensors={},
    )


def test_torch_shm_is_not_asked_for_what_it_cannot_do() -> None:
    assert Fleet(1344, 2).ways == list(WAYS)
    assert Fleet(1344, 2, engines=2).ways == ["shmring", "inline", "paged_shm"]


def test_a_way_is_measured_as_soon_as_vllm_has_it(tmp_path: Path) -> None:
    sources = tmp_path / "lib/python3.11/site-packages/vllm/config/multimodal.py"
    sources.parent.mkdir(parents=True)
    for values, has in (('"shm", "lru"', False), ('"shm", "lru", "paged_shm"', True)):
        sources.write_text(f'MMCacheType = Literal[{values}]\nMMTensorIPC = Literal["direct_rpc", "torch_shm"]\n')
        there = [name for name, way in WAYS.items() if way.is_in(tmp_path)]
        assert there == ["shmring", "inline", "torch_shm"] + ["paged_shm"] * has


def test_all_cases_of_a_fleet_are_measured_while_it_is_up() -> None:
    planned = fleets(CASES)
    assert sum(len(cases) for cases in planned.values()) == len(CASES) == len(set(CASES))
    assert len(planned) == 2 * len(SIDES)


def test_ratios_are_those_of_the_same_repetition_and_decide_the_targets() -> None:
    jpeg = CASES[0]
    measured = {
        "shmring": [measurement(30, 4.0), measurement(60, 4.0), measurement(15, 4.0)],
        "inline": [measurement(15), measurement(30), measurement(10)],
        "torch_shm": [measurement(30), measurement(60), measurement(15)],
    }
    findings = PLAN.findings({jpeg: measured})
    verdicts = {(verdict.what, verdict.detail): verdict.met for verdict in findings.targets if verdict.met is not None}
    assert verdicts == {
        ("vLLM, JPEG sent again, 8 at a time: requests/s of inline", "inline: 2"): True,
        ("vLLM, JPEG sent again, 8 at a time: requests/s of torch_shm", "torch_shm: 1"): False,
        ("vLLM, a hit: CPU of the engine", "torch_shm: 0.8"): True,
        ("vLLM, a hit: CPU of API servers", "torch_shm: 1"): True,
    }
    ((table, rows),) = [(table.title, table.rows) for table in findings.tables]
    assert table == "43 MB, 2 API servers"
    assert [row[1] for row in rows] == ["shmring", "inline", "torch_shm"]
    assert [row[4] for row in rows] == ["", "2.00 x", "1.00 x"]


def test_the_lag_is_that_of_all_repetitions() -> None:
    new = CASES[3]
    short, long = [1.0] * 99, [1.0] * 98 + [100.0]
    measured = {
        "shmring": [measurement(6, lags_ms=short), measurement(6, lags_ms=[*short, 2.0]), measurement(6, lags_ms=long)],
        "inline": [measurement(5, lags_ms=[2.0] * 100)] * 3,
    }
    findings = PLAN.findings({new: measured})
    [lag] = [verdict for verdict in findings.targets if "lag" in verdict.what]
    assert (lag.met, lag.detail) == (True, "inline: 0.5")  # one long wait in three hundred is beyond the 99th percentile


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    case = Case(Fleet(416, 1), "new", 1)
    findings = PLAN.findings({case: {"shmring": [measurement(3)]}})
    assert {verdict.met for verdict in findings.targets} == {None}


def test_an_environment_without_vllm_is_told_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    done = CliRunner().invoke(vllm_command)
    assert done.exit_code == 3
    assert "has no vLLM; `make test-vllm` makes an environment that has" in done.output


@for_each("case", CASES, ids=lambda case: case.title)
def test_fewer_requests_are_sent_one_at_a_time(case: Case) -> None:
    assert Case(case.fleet, case.kind, 1).requests * 2 == Case(case.fleet, case.kind, 8).requests


def test_a_repetition_is_long_enough_to_be_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def taken(each_s: float) -> int:
        nonlocal now_s
        count = 0
        for _ in for_a_while(iter([b""] * 100), 3, now_s + 10.0):
            count += 1
            now_s += each_s
        return count

    assert taken(each_s=60.0) == 3  # slow ones: as many as were asked for
    assert taken(each_s=1.0) == 10  # quick ones: until the time is over


@for_each(("count", "lengths"), [(1, [1]), (2, [1, 1]), (5, [2, 2, 1]), (12, [4, 4, 4]), (13, [6, 6, 1])])
def test_servers_are_started_for_parts_in_which_each_way_is_first_as_often(count: int, lengths: list[int]) -> None:
    parts = Runs(dataclasses.replace(PLAN, timing=Timing(count))).parts(3)
    assert [len(range(count)[part]) for part in parts] == lengths
    assert [number for part in parts for number in range(count)[part]] == list(range(count))


def test_the_command_goes_on_without_what_fails_and_stores_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    played: list[str] = []

    @contextlib.contextmanager
    def server(fleet: Fleet, way: Way, environment: Path) -> Iterator[str]:
        (name,) = (name for name in WAYS if WAYS[name] is way)
        started.append(name)
        yield name

    def wait_until_it_answers(server: str) -> None:
        if server == "inline":
            raise RuntimeError("the server did not start")

    def warm_up(fleet: Fleet, server: str) -> None:
        pass

    def measure(case: Case, server: str) -> Measurement:
        played.append(server)
        if server == "torch_shm":
            raise OSError("it has gone")
        return measurement(30)

    monkeypatch.setattr(command, "_server", server)
    monkeypatch.setattr(command, "wait_until_it_answers", wait_until_it_answers)
    monkeypatch.setattr(load, "warm_up", warm_up)
    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(command, "_versions", lambda _: "")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process goes on after the command
    (tmp_path / ".venv-vllm" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-vllm" / "bin" / "vllm").touch()
    path = tmp_path / "vllm.json"
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    options = ["--repetitions", "3", "--case", PLAN.title(CASES[3]), "--json", str(path)]
    done = CliRunner().invoke(vllm_command, options)
    assert done.exit_code == 3, done.output
    assert started == ["shmring", "inline", "torch_shm", "shmring"]  # nor is what did not start started again
    assert played == ["shmring", "torch_shm", "shmring", "shmring"]  # what fails is not tried again
    stored = json.loads(path.read_bytes())
    assert [row[1:3] for row in stored["tables"][0]["rows"]] == [["shmring", "30.0"]]
    reasons = {gap["subject"]: gap["reason"].partition(" (")[0] for gap in stored["coverage"]["gaps"]}
    assert reasons == {
        "inline": "the server did not start",
        "torch_shm": "OSError: it has gone",
        "paged_shm": "not in this version of vLLM",
        "cuda_ipc": "not in this version of vLLM",
    }


def test_every_column_and_target_of_workers_is_of_what_was_measured() -> None:
    def run(cpu_ms: float, p50_ms: float) -> workers.WorkersRun:
        return workers.WorkersRun(dict.fromkeys(("APIServer", "EngineCore", "Worker"), cpu_ms), p50_ms, 1e5 / p50_ms, "abc")

    ways = {"shmring": [run(1.0, 100.0)], "MessageQueue": [run(20.0, 200.0)], "its arena": [run(20.0, 200.0)]}
    findings = workers.PLAN.findings(dict.fromkeys(workers.KINDS, ways))
    assert findings.tables[0].rows[:2] == [
        ["short", "shmring", "3.0", "1.0", "1.0", "1.0", "", "100.0", "1,000", "abc"],
        ["short", "MessageQueue", "60.0", "20.0", "20.0", "20.0", "0.05 x", "200.0", "500", "abc"],
    ]
    assert [verdict.met for verdict in findings.targets] == [True] * len(workers.TARGETS)


def encoders_run(save_ms: float, *, copies: float = 1.1, load_ms: float = 0.3) -> encoders.EncodersRun:
    return encoders.EncodersRun(
        save_ms=save_ms,
        save_wall_ms=save_ms,
        copies=copies,
        look_ms=0.2,
        load_ms=load_ms,
        again_us=1.0,
        request_ms=100.0,
        encoded=0,
        left_nbytes=0,
        digest="same",
    )


def test_encoder_outputs_are_judged_by_copies_and_beside_files() -> None:
    alone = encoders.EncodersRun(*(None,) * 6, 120.0, 4, 0, "same")
    measured = {
        "shmring": [encoders_run(4.0), encoders_run(6.0, copies=1.2)],
        "ECExampleConnector": [encoders_run(20.0, load_ms=0.4), encoders_run(20.0, load_ms=0.2)],
        "without": [alone, alone],
    }
    findings = encoders.PLAN.findings({encoders.CASE: measured})
    assert [verdict.met for verdict in findings.targets] == [True, True, True, True, False]
    ((title, rows),) = [(table.title, table.rows) for table in findings.tables]
    assert title == "From an encoder to another engine, one request at a time"
    assert [row[1] for row in rows] == ["shmring", "ECExampleConnector", "without a connector"]
    assert [row[3] for row in rows] == ["", "0.25 x", ""]
    assert len({row[-1] for row in rows}) == 1, "they computed the same"


def test_a_prompt_as_embeddings_is_compared_with_one_of_token_ids() -> None:
    def run(engine_ms: float, wall_ms: float) -> embeds_program.Answered:
        return embeds_program.Answered(wall_ms, {"LLM": 100.0, "EngineCore": engine_ms, "Worker": 400.0}, "abc")

    ways = {"shmring": [run(10.0, 900.0)], "vLLM's own": [run(300.0, 1200.0)]}
    findings = embeds.PLAN.findings(dict.fromkeys(embeds.KINDS, ways))
    assert findings.tables[0].rows[:2] == [
        ["embeddings", "shmring", "510", "", "+0% +0%", "100", "10", "400", "900", "abc"],
        ["embeddings", "vLLM's own", "800", "0.64 x", "+0% +0%", "100", "300", "400", "1,200", "abc"],
    ]
    assert [verdict.met for verdict in findings.targets] == [True, True, True]
