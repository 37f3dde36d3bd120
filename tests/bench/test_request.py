"""``bench request``: every peer passes its checks and fails them when it should; processes, command and report.

The adapters run with both ends in this process; real processes are started twice, since each takes seconds to import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import shmring
from bench.children import BenchError
from bench.groups import Groups, PeerGroup
from bench.messages import Answer, Ask, Cell, Header, Measurement, Phase
from bench.meter import Cost
from bench.peers import BASELINE, REQUEST_PEERS, RequestPeer
from bench.peers.in_flight import Pending
from bench.peers.shmring_ring import ShmringRequest
from bench.plan import Runs, Timing
from bench.questions import Case, Client, Desk
from bench.request import CASES, PLAN, request_command
from bench.stamps import CheckError
from tests.bench.conftest import command_of, made_run
from tests.tables import for_each

SMALL = Cell(nbytes=4096, reply_nbytes=64, window=4, warm_up_s=0.01, timed_s=0.05, limit_s=60.0, directory="")

LONG = msgspec.structs.replace(SMALL, warm_up_s=60.0)  # which never comes to its timed phase


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield msgspec.structs.replace(SMALL, directory=directory)


# -- questions and answers ---------------------------------------------------------------------------------------------


def test_an_answer_belongs_to_its_question() -> None:
    client, desk = Client(LONG, 0), Desk(LONG)
    for _ in range(3000):  # past where the moving places have been everywhere
        header = client.source.stamp()
        client.check(header, Answer(header, desk.answer(header, client.source.tensor)))


def question(sequence: int, client: int = 0, cell: Cell = SMALL) -> tuple[Header, torch.Tensor]:
    """A client's question of a number."""
    source = Client(cell, client).source
    for _ in range(sequence):
        source.stamp()
    return source.stamp(), source.tensor


def test_a_question_that_is_not_what_was_sent_is_noticed() -> None:
    header, tensor = question(7)
    with pytest.raises(CheckError, match=r"message 8 holds -8 at 0, not -9: it is corrupted"):
        Desk(SMALL).answer(header._replace(sequence=8), tensor)
    for wrong in (tensor[1:], tensor.to(torch.float64)):
        with pytest.raises(CheckError, match=r"not torch\.float32"):
            Desk(SMALL).answer(header, wrong)


@for_each("place", [0, 1023, 7 * 40_503 % 1024, (7 * 9_973 + 512) % 1024])
def test_every_stamped_place_is_looked_at(place: int) -> None:
    header, tensor = question(7)
    tensor[place] = 1.0
    with pytest.raises(CheckError, match=f"at {4 * place}, not"):
        Desk(SMALL).answer(header, tensor)


def test_questions_of_two_clients_differ() -> None:
    two = msgspec.structs.replace(SMALL, producers=2)
    header, tensor = question(7)
    with pytest.raises(CheckError, match=r"message 7 holds .* \(of producer 1\)"):
        Desk(two).answer(header._replace(producer=1), tensor)


@for_each("order", [(0, 0), (1, 1), (0, 2, 1, 2), (2, 1, 0, 0), (1, 0, 1)])
def test_a_question_that_comes_twice_is_noticed(order: tuple[int, ...]) -> None:
    desk = Desk(SMALL)
    for sequence in order[:-1]:
        desk.answer(*question(sequence))
    with pytest.raises(CheckError, match="came twice"):
        desk.answer(*question(order[-1]))


def test_an_answer_that_is_not_the_question_s_is_noticed() -> None:
    client, desk = Client(SMALL, 0), Desk(SMALL)
    first, second = client.source.stamp(), client.source.stamp()
    reply = desk.answer(*question(0))
    with pytest.raises(CheckError, match="request 1 of client 0 got the reply of"):
        client.check(second, Answer(first, reply))
    with pytest.raises(CheckError, match=r"reply 1 holds .* \(of client 0\)"):
        client.check(second, Answer(second, reply))
    reply[-1] = 1.0
    with pytest.raises(CheckError, match="at 60, not"):
        client.check(first, Answer(first, reply))


async def test_an_unexpected_reply_fails_all_waiting_requests() -> None:
    tensor = torch.empty(0)
    first, third = Header(1, Phase.TIMED, 0, 0), Header(3, Phase.TIMED, 0, 0)
    pending = Pending(lambda header, tensor: pending.settle(Answer(header._replace(sequence=header.sequence + 1), tensor)))
    with pytest.raises(ConnectionError, match="which nobody waits for"):
        await pending.ask(first, tensor)
    with pytest.raises(ConnectionError):
        await pending.ask(third, tensor)


# -- peers -----------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(peer: RequestPeer, cell: Cell, desk: Desk) -> AsyncIterator[Ask]:
    """Both ends of a peer in this process; what the engine raises comes out of this."""
    listening = asyncio.Event()
    async with asyncio.timeout(cell.limit_s), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(peer.serve(cell, desk, listening.set))
        await listening.wait()
        async with peer.connect(cell) as ask:
            yield ask
        serving.cancel()


async def asked(peer: RequestPeer, cell: Cell) -> tuple[Client, Desk]:
    """The load of a cell, in this process."""
    client, desk = Client(cell, 0), Desk(cell)
    async with connected(peer, cell, desk) as ask:
        await client.ask_all(ask)
    return client, desk


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Those of a group and of the groups in it, or the one."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from errors_in(each)
    else:
        yield error


@pytest.fixture(params=REQUEST_PEERS)
def peer(request: pytest.FixtureRequest) -> RequestPeer:
    found = REQUEST_PEERS[request.param]
    if (reason := found.missing()) is not None:
        pytest.skip(reason)
    return found


@pytest.mark.parametrize(("nbytes", "reply_nbytes"), [(4096, 64), (1 << 20, 4), (4, 256 << 10)])
async def test_every_peer_answers_every_question(peer: RequestPeer, cell: Cell, nbytes: int, reply_nbytes: int) -> None:
    client, desk = await asked(peer, msgspec.structs.replace(cell, nbytes=nbytes, reply_nbytes=reply_nbytes))
    measurement, cost = desk.measurement(), client.source.meter.cost
    assert cost is not None
    assert desk._sequences == [client.source._sequence] >= [16 + 1]  # two windows in each phase, and the last one
    assert 8 <= cost.messages == len(client.latencies_ns)
    assert measurement.messages == cost.messages - 1
    assert min(client.latencies_ns) > 0
    assert measurement.consumer_us
    assert list(Path(cell.directory).glob("*.sock")) == []


@pytest.mark.parametrize("what", ["message", "reply"])
async def test_what_a_peer_corrupts_is_noticed(peer: RequestPeer, cell: Cell, what: str, spoil: Callable[..., None]) -> None:
    spoil(5, what)
    with pytest.raises(BaseExceptionGroup) as caught:
        await asked(peer, cell)
    # Whoever asks next may be the first to find the engine gone, which then is ended before it has said why.
    found = [str(error) for error in errors_in(caught.value)]
    assert any(f"{what} 5 holds" in text for text in found), found


def test_a_package_that_is_not_installed_is_missing() -> None:
    class Absent(type(REQUEST_PEERS["pyzmq"])):  # type: ignore[misc]
        requires = "shmring-absent"

    assert Absent().missing() == "not installed: pip install shmring-absent"
    assert Absent().version() is None
    assert REQUEST_PEERS[BASELINE].missing() is None


# -- scaling -------------------------------------------------------------------------------------------------------------


def ring() -> shmring.Ring:
    """The one that is open in this process."""
    (found,) = (one for one in gc.get_objects() if type(one) is shmring.Ring and not one._shell.life.home.is_closed)
    return found


@pytest.mark.parametrize(("some", "submitted"), [(1, [0, 0, 6]), (3, [2, 2, 2])])
async def test_so_many_clients_are_connected_and_so_many_ask(cell: Cell, some: int, submitted: list[int]) -> None:
    desk = Desk(cell)
    async with connected(ShmringRequest(3, some), cell, desk) as ask:
        asking = Client(cell, 0)
        for _ in range(6):
            header = asking.source.stamp()
            asking.check(header, await ask(header, asking.source.tensor))
        assert ring().statistics().clients == 3
        clients = [one for one in gc.get_objects() if type(one) is shmring.Client and not one.closed]
        assert sorted(client.statistics().submitted for client in clients) == submitted
    assert desk._sequences == [6]


# -- processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_measure_and_fail_as_a_whole(cell: Cell) -> None:
    two = msgspec.structs.replace(cell, producers=2)
    with PeerGroup(REQUEST_PEERS["shmring"], 2) as group:
        group.start()
        for in_flight in (1, 8):
            measurement = group.run(msgspec.structs.replace(two, window=in_flight))
            assert len(measurement.producers) == 2
            assert min(cost.messages for cost in measurement.producers) >= in_flight
            assert sum(cost.messages for cost in measurement.producers) == len(measurement.latencies_ns)
            assert measurement.messages_per_s > 0
            assert measurement.both_us is not None
            assert measurement.both_us > 0
        with pytest.raises(BenchError, match=r"^shmring.*the engine failed: KeyError: 'nonsense'") as caught:
            group.run(msgspec.structs.replace(two, dtype="nonsense"))
        assert "4 KB, 2 producers, window 4" in str(caught.value)
        assert not any(child.process.is_alive() for child in group.children)
        with pytest.raises(BenchError, match="were ended after a failure"):
            group.run(two)


@pytest.mark.slow
@pytest.mark.usefixtures("no_new_segments")
def test_the_command_measures_reports_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(REQUEST_PEERS["pyzmq"]), "requires", "shmring-absent")
    path = tmp_path / "results.json"
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process goes on after the command
    cases = {Case(nbytes, reply_nbytes=64): ["shmring", "pyzmq"] for nbytes in (4096, 65536)}
    command = command_of(dataclasses.replace(PLAN, cases=cases), request_command)
    result = CliRunner().invoke(command, ["--repetitions", "2", "--seconds", "0.05", "--json", str(path)])
    assert result.exit_code in (0, 1), result.output
    assert "64 KB, 16 in flight of 1 client, shmring, client.request, repetition 2 of 2" in result.stderr
    assert "pip install shmring-absent" in result.stdout

    stored = json.loads(path.read_bytes())
    assert stored["mode"] == "request"
    (table,) = stored["tables"]
    assert [row[:2] for row in table["rows"]] == [
        ["4 KB, 16 in flight of 1 client", "shmring, client.request"],
        ["64 KB, 16 in flight of 1 client", "shmring, client.request"],
    ]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert stored["coverage"]["gaps"][0]["reason"] == "not installed: pip install shmring-absent"
    assert [(gap["case"], gap["subject"], gap["status"]) for gap in stored["coverage"]["gaps"]] == [
        ("4 KB, 16 in flight of 1 client", "pyzmq", "not possible"),
        ("64 KB, 16 in flight of 1 client", "pyzmq", "not possible"),
    ]
    assert stored["results"] is None, "nobody reads them"
    assert [target["asked"] for target in stored["targets"][:2]] == [">= 20000 /s", ">= 5 x"]
    assert stored["targets"][1]["met"] is None
    assert stored["machine"].keys() >= {"cpu", "cores", "kernel", "python", "torch", "shmring", "commit"}


def test_the_plan_has_every_cell() -> None:
    assert len(CASES) == 4 * 3 * 2 + 1
    assert next(iter(CASES)).title == "4 KB, 1 in flight of 1 client"
    assert list(CASES.values())[-1] == ["shmring", "shmring-32-1", "shmring-32-32"]


def test_a_cell_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    cases = [Case(size << 30, window=16, reply_nbytes=64) for size in (1, 2)]
    runs = Runs(dataclasses.replace(PLAN, cases=dict.fromkeys(cases, ("shmring",))))
    with Groups(REQUEST_PEERS, Timing(1)) as groups:
        groups.prepare(runs, cases)
    assert [gap.reason for gap in runs.coverage().gaps] == [
        f"{size}.0 GiB would be in flight, and 1.0 GiB of memory are available" for size in (48, 96)
    ]


# -- the report ----------------------------------------------------------------------------------------------------------


def requests(per_s: float, cpu_us: float = 20.0) -> list[Measurement]:
    """Three repetitions of 64 KB, 16 in flight."""
    return [made_run(per_s * factor, p50_us=500.0, cpu_us=cpu_us) for factor in (0.9, 1, 1.25)]


def one(clients: int = 1) -> Case:
    return Case(65536, producers=clients, reply_nbytes=64)


def test_the_report_has_a_row_for_each_peer_in_each_case() -> None:
    measured = {one(): {"shmring": requests(25_000), "pyzmq": requests(4_000)}, one(4): {"shmring": requests(30_000)}}
    (table,) = PLAN.findings(measured).tables
    assert [row[0] for row in table.rows] == [one().title, one().title, one(4).title]
    assert table.rows[1][1:] == [
        "pyzmq DEALER/ROUTER", "4,000", "-10% +25%", "6.25 x", "500", "500", "20.0", "20.0",
    ]  # fmt: skip
    assert f"pyzmq {REQUEST_PEERS['pyzmq'].version()}" in PLAN.findings(measured).notes


@for_each(("per_s", "ratio", "verdict"), [(20_000, 5.0, "met"), (19_999, 4.9, "missed")])
def test_the_report_says_whether_the_targets_are_met(per_s: float, ratio: float, verdict: str) -> None:
    measured = {one(): {"shmring": requests(per_s), "pyzmq": requests(per_s / ratio)}}
    assert [(target.word, target.asked) for target in PLAN.findings(measured).targets[:2]] == [
        (verdict, ">= 20000 /s"),
        (verdict, ">= 5 x"),
    ]


def test_a_run_says_nothing_of_targets_that_it_did_not_measure() -> None:
    assert [target.met for target in PLAN.findings({one(4): {"shmring": requests(25_000)}}).targets[:2]] == [None, None]
    assert [target.met for target in PLAN.findings({one(): {"shmring": requests(25_000)}}).targets[:2]] == [True, None]


def cost_of(messages: int, cpu_s: float) -> Cost:
    return Cost(messages, cpu_s, resident_nbytes=0, stall_ms=None)


def test_cpu_of_a_request_is_what_each_side_took_for_its_own_count() -> None:
    measurement = Measurement(
        messages=100,
        elapsed_s=0.625,
        latencies_ns=np.ones(100, np.int64),
        consumer=(cost_of(200, 0.004),),
        producers=(cost_of(60, 0.003), cost_of(40, 0.001)),
    )
    assert measurement.messages_per_s == pytest.approx(160)
    assert measurement.consumer_us == pytest.approx(20)
    assert measurement.producer_us == pytest.approx(40)


def test_many_clients_are_compared_with_one() -> None:
    cpu_us = {"shmring": 10.0, "shmring-32-1": 12.0, "shmring-32-32": 12.1}
    report = PLAN.findings({list(CASES)[-1]: {name: requests(100.0, cpu_us=us) for name, us in cpu_us.items()}})
    assert [(target.what, target.measured, target.met) for target in report.targets[2:]] == [
        ("CPU time per request with 32 clients connected, one asks", "1.2 x", True),
        ("CPU time per request with 32 clients connected, all ask", "1.21 x", False),
    ]
