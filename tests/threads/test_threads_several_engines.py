"""Several engines for code without an event loop: the same client as asyncio programs have, asked from threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import threads
from shmring.threads import Client
from tests.waiting import until

NAMES = ["vision-0", "vision-1"]


class Engine:
    """A ring whose requests are answered by a thread, or held."""

    def __init__(self, name: str, socket_dir: str) -> None:
        async def who() -> str:
            return name

        self.name = name
        self.go_on = threading.Event()
        self.go_on.set()
        self.ring = threads.serve(name, slab_nbytes="1MiB", pin="off", socket_dir=socket_dir, calls={"who": who})
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(shmring.ShmringError):
            for claim in self.ring:
                with contextlib.suppress(shmring.AbortedError), claim:
                    for _ in range(claim.payload.get("first", 0)):
                        claim.reply(self.name)
                    self.go_on.wait()
                    claim.reply([self.name, float(claim.payload["x"].sum()) if "x" in claim.payload else 0.0])

    def stop(self) -> None:
        self.ring.close()
        self.go_on.set()
        self._thread.join()


@pytest.fixture
def engines(socket_dir: Path) -> Iterator[dict[str, Engine]]:
    engines = {name: Engine(name, str(socket_dir)) for name in NAMES}
    yield engines
    for engine in engines.values():
        engine.stop()


@pytest.fixture
def client(engines: dict[str, Engine], socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("shmring.client.pauses.LONGEST_S", 0.01)
    with threads.connect(NAMES, socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


def test_requests_go_where_they_are_routed(client: Client) -> None:
    owner = client.request({}, key="session-7", timeout=10)[0]
    assert {client.request({}, key="session-7")[0] for _ in range(5)} == {owner}
    for name in NAMES:
        assert client.request({}, engine=name, timeout=10) == [name, 0.0]
        assert list(client.stream({"first": 2}, engine=name, timeout=10)) == [name, name, [name, 0.0]]
        assert client.submit({}, engine=name).engine == name
        assert client.submit_nowait({}, engine=name).result(timeout=10) == [name, 0.0]
        assert client.call("who", engine=name, timeout=10) == name
        with client.slot(8192, engine=name, timeout=10) as slot, client.slot_nowait(10, engine=name) as other:
            assert slot.engine == other.engine == name
            assert client.request({"x": slot.tensor((2048,), torch.float32).fill_(1)}, timeout=10) == [name, 2048.0]
    with client.slot(10, key="session-7") as slot:
        assert slot.engine == owner
    until(lambda: {load.in_flight for load in client.loads().values()} == {0})
    assert set(client.engines) == set(NAMES)
    assert client.statistics().finished == sum(engine.statistics().finished for engine in client.engines.values())
    client.check_capacity(1000)
    assert client.choose(key="session-7") == owner
    assert client.kept_nbytes > 0
    slots = client.slots([10, 20], engine=owner, timeout=10)
    assert [(slot.nbytes, slot.engine) for slot in slots] == [(10, owner), (20, owner)]
    for slot in slots:
        slot.close()
    client.wait_prefaulted(10)
    assert client.connected
    with pytest.raises(ValueError, match="no engine 'c'"):
        client.request({}, engine="c")
    with pytest.raises(ValueError, match="leaves no other"):
        next(client.stream({}, engine="vision-0", retry=1))


def test_a_wait_for_an_engine_that_is_named_and_gone_says_that_it_is_not_attached(
    client: Client, engines: dict[str, Engine]
) -> None:
    told = pytest.raises(TimeoutError, match=r"at 'vision-0': space: .* callers hold 1 slots")
    with client.slot(500_000, engine="vision-0"), told:
        client.slot(500_000, engine="vision-0", timeout=0.02)
    engines["vision-0"].stop()
    until(lambda: set(client.loads()) == {"vision-1"} and not client.engines["vision-0"].connected)
    waits: list[Callable[[], Any]] = [
        lambda: client.request({}, engine="vision-0", timeout=0.02),
        lambda: client.submit({}, engine="vision-0", timeout=0.02),
        lambda: client.slot(100, engine="vision-0", timeout=0.02),
        lambda: client.find(b"k" * 32, engine="vision-0", timeout=0.02),
        lambda: client.call("who", engine="vision-0", timeout=0.02),
        lambda: client.wait_connected(0.02, engine="vision-0"),
    ]
    for wait in waits:
        with pytest.raises(TimeoutError, match="engine 'vision-0' to be attached"):
            wait()
    with pytest.raises(ValueError, match="no engine 'c'"):
        client.wait_connected(0.02, engine="c")


def test_an_engine_that_dies_takes_its_own_requests(client: Client, engines: dict[str, Engine], socket_dir: Path) -> None:
    for engine in engines.values():
        engine.go_on.clear()
    owner = client.submit({}, key="a")
    [other] = set(NAMES) - {owner.engine}
    answers: list[Any] = []
    asking = [
        threading.Thread(target=lambda: answers.append(client.request({}, key="a", retry=1))),
        threading.Thread(target=lambda: answers.extend(client.stream({}, key="a", retry=1))),
    ]
    for thread in asking:
        thread.start()
    until(lambda: client.engines[owner.engine].statistics().in_flight == 3)
    kept = client.submit({}, engine=other)
    closing = threading.Thread(target=engines[owner.engine].stop)
    closing.start()
    with pytest.raises(shmring.EngineDeadError, match=owner.engine) as caught:
        owner.result(timeout=10)
    assert caught.value.engine == owner.engine
    engines[other].go_on.set()
    for thread in [*asking, closing]:
        thread.join()
    assert answers == [[other, 0.0]] * 2
    assert client.resent == 2
    assert kept.result(timeout=10) == [other, 0.0]
    engines[owner.engine] = Engine(owner.engine, str(socket_dir))
    client.wait_connected(10, engine=owner.engine)
    client.wait_connected(10)
    assert client.request({}, key="a") == [owner.engine, 0.0]


def test_options_are_those_of_the_asyncio_twin(engines: dict[str, Engine], socket_dir: Path) -> None:
    with threads.connect(tuple(NAMES), route="round_robin", socket_dir=str(socket_dir)) as client:
        owners = [client.request({})[0] for _ in range(4)]
        assert owners[0] != owners[1]
        assert owners[:2] == owners[2:]
    with pytest.raises(TypeError, match="several engines"):
        threads.connect("vision-0", route="round_robin", socket_dir=str(socket_dir))  # type: ignore[call-overload]
    with pytest.raises(shmring.EngineDeadError, match="none of the engines"):
        threads.connect(["x", "y"], connect_timeout_s=0.01, socket_dir=str(socket_dir))


async def test_in_a_loop_it_is_the_same_client(engines: dict[str, Engine], socket_dir: Path) -> None:
    async with shmring.connect(NAMES, socket_dir=str(socket_dir)) as client:
        answers = await asyncio.gather(*(client.request({}) for _ in range(4)))
    assert {name for name, _ in answers} == set(NAMES)
