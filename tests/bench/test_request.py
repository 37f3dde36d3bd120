"""``bench request``: every peer passes its checks and fails them when it should; processes, command and report.

The adapters run with both ends in this process; real processes are started twice, since each takes seconds to import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import shmring
from bench.children import BenchError
from bench.coverage import Coverage
from bench.interleaving import Plan
from bench.machine import Machine
from bench.meter import Cost
from bench.peers import BASELINE, REQUEST_PEERS, Ask, RequestPeer
from bench.peers.in_flight import Pending
from bench.request.command import request_command
from bench.request.load import Load, Phases, come_to_rest
from bench.request.plan import Checks, Repetition, Result, Results, rounds, run
from bench.request.processes import Measurement, RequestGroup
from bench.request.questions import Answer, Case, Cell, Desk, Header, Question, checks_us
from bench.request.report import report, scaling_report
from bench.request.scaling import VARIANT_GROUPS, ConnectedClients, SlotsInUse
from bench.results import Spread
from bench.stamps import CheckError

SMALL = Cell(nbytes=4096, reply_nbytes=64, in_flight=4, clients=1, warm_up_s=0.01, timed_s=0.05, limit_s=60.0, directory="")


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield msgspec.structs.replace(SMALL, directory=directory)


# -- questions and answers ---------------------------------------------------------------------------------------------


def test_an_answer_belongs_to_its_question() -> None:
    question, desk = Question(SMALL), Desk(SMALL)
    for sequence in range(3000):  # past where the moving places have been everywhere
        header = Header(0, sequence)
        question.stamp(header)
        question.check(header, Answer(header, desk.answer(header, question.tensor)))
    assert desk.answered == 3000


def test_a_question_that_is_not_what_was_sent_is_noticed() -> None:
    question, desk = Question(SMALL), Desk(SMALL)
    question.stamp(Header(0, 7))
    with pytest.raises(CheckError, match=r"request 8 of client 0 holds -8 at 0, not -9: it is corrupted"):
        desk.answer(Header(0, 8), question.tensor)
    for tensor in (question.tensor[1:], question.tensor.to(torch.float64)):
        with pytest.raises(CheckError, match=r"not torch\.float32"):
            Desk(SMALL).answer(Header(0, 7), tensor)


@pytest.mark.parametrize("place", [0, 1023, 7 * 40_503 % 1024, (7 * 9_973 + 512) % 1024])
def test_every_stamped_place_is_looked_at(place: int) -> None:
    question = Question(SMALL)
    question.stamp(Header(0, 7))
    question.tensor[place] = 1.0
    with pytest.raises(CheckError, match=f"at {4 * place}, not"):
        Desk(SMALL).answer(Header(0, 7), question.tensor)


def test_questions_of_two_clients_differ() -> None:
    question, desk = Question(SMALL), Desk(msgspec.structs.replace(SMALL, clients=2))
    question.stamp(Header(0, 7))
    with pytest.raises(CheckError, match="request 7 of client 1 holds"):
        desk.answer(Header(1, 7), question.tensor)


@pytest.mark.parametrize("order", [(0, 0), (1, 1), (0, 2, 1, 2), (2, 1, 0, 0)])
def test_a_question_that_comes_twice_is_noticed(order: tuple[int, ...]) -> None:
    question, desk = Question(SMALL), Desk(SMALL)
    for sequence in order[:-1]:
        question.stamp(Header(0, sequence))
        desk.answer(Header(0, sequence), question.tensor)
    question.stamp(Header(0, order[-1]))
    with pytest.raises(CheckError, match="came twice"):
        desk.answer(Header(0, order[-1]), question.tensor)


def test_an_answer_that_is_not_the_question_s_is_noticed() -> None:
    question, desk = Question(SMALL), Desk(SMALL)
    question.stamp(Header(0, 0))
    reply = desk.answer(Header(0, 0), question.tensor)
    with pytest.raises(CheckError, match=r"request \(0, 1\) \(client, sequence\) got the reply of \(0, 0\)"):
        question.check(Header(0, 1), Answer(Header(0, 0), reply))
    with pytest.raises(CheckError, match="reply 1 of client 0 holds"):
        question.check(Header(0, 1), Answer(Header(0, 1), reply))
    reply[-1] = 1.0
    with pytest.raises(CheckError, match="at 60, not"):
        question.check(Header(0, 0), Answer(Header(0, 0), reply))


def test_the_checks_have_a_cost_of_their_own() -> None:
    client_us, engine_us = checks_us(SMALL)
    assert client_us > 0
    assert engine_us > 0


async def test_a_reply_that_nobody_waits_for_fails_whoever_waits() -> None:
    tensor = torch.empty(0)
    pending = Pending(lambda header, tensor: pending.settle(Answer(Header(0, header.sequence + 1), tensor)))
    with pytest.raises(ConnectionError, match="which nobody waits for"):
        await pending.ask(Header(0, 1), tensor)
    with pytest.raises(ConnectionError):
        await pending.ask(Header(0, 3), tensor)


# -- peers -----------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(peer: RequestPeer, cell: Cell, desk: Desk) -> AsyncIterator[Ask]:
    """Both ends of a peer in this process; what the engine raises comes out of this."""
    shared = peer.create_shared(multiprocessing.get_context("spawn"), 1)
    listening = asyncio.Event()
    async with asyncio.timeout(cell.limit_s), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(peer.serve(cell, shared, desk, listening.set))
        await listening.wait()
        async with peer.connect(cell, shared, 0) as ask:
            yield ask
        serving.cancel()


async def asked(peer: RequestPeer, cell: Cell) -> tuple[Load, Desk, Cost]:
    """The load of a cell, in this process."""
    load, desk = Load(cell, 0), Desk(cell)
    async with connected(peer, cell, desk) as ask, asyncio.TaskGroup() as tasks:
        load.start(tasks, ask)
        cost = await load.phases.measure(time.perf_counter_ns())
        load.stop()
    return load, desk, cost


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.fixture(params=REQUEST_PEERS)
def peer(request: pytest.FixtureRequest) -> RequestPeer:
    found = REQUEST_PEERS[request.param]
    if (reason := found.missing()) is not None:
        pytest.skip(reason)
    return found


@pytest.mark.parametrize(("nbytes", "reply_nbytes"), [(4096, 64), (1 << 20, 4), (4, 256 << 10)])
async def test_every_peer_answers_every_question(peer: RequestPeer, cell: Cell, nbytes: int, reply_nbytes: int) -> None:
    load, desk, cost = await asked(peer, msgspec.structs.replace(cell, nbytes=nbytes, reply_nbytes=reply_nbytes))
    assert desk.answered == load.answered >= 8  # a window in each phase
    assert 4 <= cost.messages == len(load.latencies_ns) <= load.answered
    assert min(load.latencies_ns) > 0
    assert cost.elapsed_s >= 0.05
    assert cost.cpu_s > 0
    assert list(Path(cell.directory).glob("*.sock")) == []


@pytest.mark.parametrize("spoiled", ["corrupt_question", "corrupt_answer"])
async def test_what_a_peer_corrupts_is_noticed(peer: RequestPeer, cell: Cell, spoiled: str) -> None:
    what = "request" if spoiled == "corrupt_question" else "reply"
    with pytest.raises(BaseExceptionGroup) as caught:
        await asked(peer, msgspec.structs.replace(cell, **{spoiled: 5}))
    found = [str(innermost(error)) for error in caught.value.exceptions]
    assert any(f"{what} 5 of client 0 holds" in text for text in found), found


def test_a_package_that_is_not_installed_is_missing() -> None:
    class Absent(type(REQUEST_PEERS["pyzmq"])):  # type: ignore[misc]
        requires = "shmring-absent"

    assert Absent().missing() == "not installed: pip install shmring-absent"
    assert Absent().version() is None
    assert REQUEST_PEERS[BASELINE].missing() is None


# -- the meter -----------------------------------------------------------------------------------------------------------


async def test_a_phase_lasts_until_enough_has_happened() -> None:
    done = 0

    async def happen() -> None:
        nonlocal done
        while True:
            await asyncio.sleep(0.02)
            done += 1

    cell = msgspec.structs.replace(SMALL, warm_up_s=0.0, timed_s=0.0, in_flight=3)
    task = asyncio.create_task(happen())
    phases = Phases(cell, lambda: done)
    cost = await phases.measure(time.perf_counter_ns())
    task.cancel()
    assert cost.messages >= 3
    assert done >= 6
    assert cost.elapsed_s >= 2 * 0.02
    assert not phases.timing


async def test_the_load_begins_when_the_process_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0, 9_000_000, 9_000_000, 9_000_001, 10_000_000, 19_000_000, 20_000_000, 20_000_001, 21_000_000, 21_000_001,
                    22_000_000, 22_000_001])  # fmt: skip
    monkeypatch.setattr("bench.request.load.time.process_time_ns", lambda: next(moments))
    await come_to_rest()
    assert next(moments, None) is None  # busy, at rest, busy, then at rest three times


# -- scaling -------------------------------------------------------------------------------------------------------------


def ring() -> shmring.Ring:
    """The one that is open in this process."""
    (found,) = (one for one in gc.get_objects() if type(one) is shmring.Ring and not one._closed)
    return found


@pytest.mark.parametrize(("asking", "submitted"), [(1, [0, 0, 6]), (3, [2, 2, 2])])
async def test_so_many_clients_are_connected_and_so_many_ask(cell: Cell, asking: int, submitted: list[int]) -> None:
    desk = Desk(cell)
    async with connected(ConnectedClients(3, asking), cell, desk) as ask:
        question = Question(cell)
        for sequence in range(6):
            question.stamp(Header(0, sequence))
            question.check(Header(0, sequence), await ask(Header(0, sequence), question.tensor))
        assert ring().statistics().clients == 3
        clients = [one for one in gc.get_objects() if type(one) is shmring.RingClient and not one.closed]
        assert sorted(client.statistics().submitted for client in clients) == submitted
    assert desk.answered == 6


async def test_so_many_slots_are_in_use_and_as_many_holes_between_them(cell: Cell) -> None:
    desk = Desk(cell)
    async with connected(SlotsInUse(250), cell, desk) as ask:
        question = Question(cell)
        question.stamp(Header(0, 0))
        question.check(Header(0, 0), await ask(Header(0, 0), question.tensor))
        assert ring().statistics().slots_claimed == 250
        (client,) = (one for one in gc.get_objects() if type(one) is shmring.RingClient and not one.closed)
        assert client.statistics().slots_in_use == 250  # the holes between them are free
        slots = sorted(slot.start for client in ring()._book.clients.values() for slot in client.slots.values())
        gaps = np.diff(slots)
        assert (gaps[: len(gaps) // 2] > 2).all()  # a slot of 4 KiB and its header take two blocks
    assert desk.answered == 1


# -- processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_measure_and_fail_as_a_whole(cell: Cell) -> None:
    two = msgspec.structs.replace(cell, clients=2)
    with RequestGroup(REQUEST_PEERS["shmring"], 2) as group:
        group.start()
        for in_flight in (1, 8):
            measurement = group.run(msgspec.structs.replace(two, in_flight=in_flight))
            assert len(measurement.clients) == 2
            assert min(cost.messages for cost in measurement.clients) >= in_flight
            assert measurement.requests == len(measurement.latencies_ns)
            assert measurement.requests_per_s > 0
            assert measurement.engine_us > 0
            assert measurement.client_us > 0
        with pytest.raises(
            BenchError, match=r"^shmring.*the engine failed: CheckError: request 20 of client . holds"
        ) as caught:
            group.run(msgspec.structs.replace(two, corrupt_question=20))
        assert "4 KB, 4 in flight of 2 clients" in str(caught.value)
        assert not any(process.is_alive() for process in group.processes)
        with pytest.raises(BenchError, match="were ended after a failure"):
            group.run(two)


@pytest.mark.slow
@pytest.mark.usefixtures("no_new_segments")
def test_the_command_measures_reports_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(REQUEST_PEERS["pyzmq"]), "requires", "shmring-absent")
    path = tmp_path / "results.json"
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process goes on after the command
    options = ["--size", "4KiB", "--size", "64KiB", "--in-flight", "16", "--clients", "1", "--peer", "pyzmq"]
    options += ["--repetitions", "2", "--seconds", "0.05", "--json", str(path)]
    result = CliRunner().invoke(request_command, options)
    assert result.exit_code == 0, result.output
    assert "64 KB, 16 in flight of 1 client, repetition 2 of 2: shmring" in result.stderr
    assert "1.00 x" in result.stdout
    assert "pip install shmring-absent" in result.stdout

    stored = json.loads(path.read_bytes())
    assert stored["mode"] == "request"
    (table,) = stored["tables"]
    assert [row[:2] for row in table["rows"]] == [
        ["4 KB", "shmring, client.request"],
        ["64 KB", "shmring, client.request"],
    ]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert stored["coverage"]["gaps"][0]["reason"] == "not installed: pip install shmring-absent"
    assert [entry["nbytes"] for entry in stored["results"]] == [4096, 65536]
    assert [(gap["case"], gap["subject"], gap["status"]) for gap in stored["coverage"]["gaps"]] == [
        ("4 KB, 16 in flight of 1 client", "pyzmq", "not possible"),
        ("64 KB, 16 in flight of 1 client", "pyzmq", "not possible"),
    ]
    assert len(stored["results"][0]["repetitions"]) == 2
    assert stored["results"][0]["shmring_ratio"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    assert [target["asked"] for target in stored["targets"]] == [">= 20,000/s"]
    assert stored["machine"].keys() >= {"cpu", "cores", "kernel", "python", "torch", "shmring", "commit"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "4097"], "multiple of 4 bytes"),
        (["--clients", "65"], "is not in the range"),
        (["--scaling", "--peer", "pyzmq"], "--scaling measures shmring alone"),
        (["--scaling", "--size", "64KiB"], "--scaling takes sizes up to 8,000 bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(request_command, options)
    assert result.exit_code == 2
    assert message in result.output


def planned(*sizes: int) -> Plan[Case]:
    return Plan(rounds=rounds([["shmring", "pyzmq"]], sizes, [16], [1], 64), repetitions=2, timed_s=1.0, warm_up_s=0.1)


def test_a_cell_that_does_not_fit_says_so_and_each_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.memory.available_nbytes", lambda: 1 << 30)
    monkeypatch.setattr("bench.request.plan._checks", lambda case: Checks(case.nbytes, 1.0, 1.0))
    kept: list[Results] = []
    results = run(planned(1 << 30, 2 << 30), REQUEST_PEERS, lambda line: None, kept.append)
    assert results.results == []
    reasons = [f"{size}.0 GiB would be in flight, and 1.0 GiB of memory are available" for size in (48, 96)]
    assert [[gap.reason for gap in each.coverage.gaps if gap.subject == "shmring"] for each in (*kept, results)] == [
        [reasons[0], ""], reasons, reasons,
    ]  # fmt: skip
    assert report(results).coverage == results.coverage


class Pretended:
    """Processes that there are none of: pyzmq's fail with the larger size."""

    def __init__(self, peer: RequestPeer, clients: int) -> None:
        self.name = peer.name

    def start(self) -> None:
        pass

    def run(self, cell: Cell) -> Measurement:
        if self.name == "pyzmq" and cell.nbytes > 4096:
            raise BenchError("broke")
        return Measurement(cost_of(10, 1.0, 0.001), [cost_of(10, 1.0, 0.002)], np.full(10, 1000, np.int64))

    def close(self) -> None:
        pass

    kill = close


def test_a_peer_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.request.plan.RequestGroup", Pretended)
    monkeypatch.setattr(type(REQUEST_PEERS["pyzmq"]), "requires", None)
    results = run(planned(4096, 8192), REQUEST_PEERS, lambda line: None, lambda results: None)
    assert [(one.peer, one.nbytes, one.baseline) for one in results.results] == [
        ("shmring", 4096, "shmring"), ("pyzmq", 4096, "shmring"), ("shmring", 8192, "shmring"),
    ]  # fmt: skip
    assert [(gap.subject, gap.reason, gap.measured) for gap in results.coverage.gaps] == [("pyzmq", "broke", 0)]


# -- the report ----------------------------------------------------------------------------------------------------------


def same(value: float) -> Spread:
    return Spread(value, value, value)


def result(peer: str, per_s: float, ratio: float, clients: int = 1) -> Result:
    return Result(
        peer=peer,
        baseline=BASELINE,
        nbytes=65536,
        reply_nbytes=64,
        in_flight=16,
        clients=clients,
        requests=100,
        requests_per_s=Spread(per_s, per_s * 0.9, per_s * 1.25),
        shmring_ratio=same(ratio),
        round_trip_p50_us=500.0,
        round_trip_p99_us=1234.5,
        round_trip_p999_us=2000.0,
        engine_us=same(20.04),
        client_us=same(21.0),
        engine_ratio=same(ratio),
        client_ratio=same(ratio),
        cpu_ratio=same(ratio),
        repetitions=[Repetition(per_s, 20.0, 21.0)],
    )


def results(*some: Result) -> Results:
    return Results(Machine.here(), 64, 1.0, {"pyzmq": "1.2.3"}, [*some], [Checks(65536, 3.0, 2.0)], Coverage([], []))


def test_the_report_has_a_table_for_each_number_of_clients() -> None:
    found = report(
        results(result("shmring", 25_000, 1.0), result("pyzmq", 4_000, 6.25), result("shmring", 30_000, 1.0, clients=4))
    )
    assert [table.title for table in found.tables] == [
        "requests of a tensor, 16 in flight of 1 client, replies of 64 B",
        "requests of a tensor, 16 in flight of each of 4 clients, replies of 64 B",
    ]
    assert found.tables[0].rows[1] == [
        "64 KB", "pyzmq DEALER/ROUTER", "4,000", "-10% +25%", "6.25 x", "500", "1,234", "2,000", "20.0", "21.0",
    ]  # fmt: skip
    assert "pyzmq 1.2.3" in found.notes
    assert found.tables[0].rich().row_count == 2


@pytest.mark.parametrize(("per_s", "ratio", "verdict"), [(20_000, 5.0, "met"), (19_999, 4.9, "missed")])
def test_the_report_says_whether_the_targets_are_met(per_s: float, ratio: float, verdict: str) -> None:
    found = report(results(result("shmring", per_s, 1.0), result("pyzmq", per_s / ratio, ratio)))
    assert [(target.word, target.asked, target.measured) for target in found.targets] == [
        (verdict, ">= 20,000/s", f"{per_s:,.0f}/s"),
        (verdict, ">= 5 x", f"{ratio:.2f} x"),
    ]


def test_a_run_says_nothing_of_targets_that_it_did_not_measure() -> None:
    assert report(results(result("shmring", 25_000, 1.0, clients=4))).targets == []
    (only,) = report(results(result("shmring", 25_000, 1.0))).targets  # pyzmq is missing
    assert only.met


def cost_of(messages: int, elapsed_s: float, cpu_s: float) -> Cost:
    return Cost(messages, elapsed_s, cpu_s, resident_nbytes=0, descriptors=0, lag=None)


def test_cpu_of_a_request_is_what_each_side_took_for_its_own_count() -> None:
    measurement = Measurement(
        engine=cost_of(200, 1.0, 0.004),
        clients=[cost_of(60, 0.5, 0.003), cost_of(40, 1.0, 0.001)],
        latencies_ns=np.ones(100, np.int64),
    )
    assert measurement.requests == 100
    assert measurement.requests_per_s == pytest.approx(160)
    assert measurement.engine_us == pytest.approx(20)
    assert measurement.client_us == pytest.approx(40)


def test_the_report_of_scaling_compares_with_the_first_of_each_group() -> None:
    (one, _, many), (few_slots, many_slots) = VARIANT_GROUPS
    some = [
        msgspec.structs.replace(result(peer, 100.0, 1.0), baseline=baseline, cpu_ratio=same(ratio))
        for peer, baseline, ratio in ((one, one, 1.0), (many, one, 1.21), (many_slots, few_slots, 1.2))
    ]
    found = scaling_report(results(*some))
    assert [(target.what, target.measured, target.met) for target in found.targets] == [
        ("CPU time per request with 32 clients connected, all ask", "1.21 x", False),
        ("CPU time per request with 10,000 slots in use", "1.20 x", True),
    ]
    assert [len(row) for row in found.tables[0].rows] == [len(found.tables[0].columns)] * 3
