"""Several engines that look like one to a frontend: control calls go to all, requests to one, and states are each one's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.protocol import Calls, EngineRequestPayload, GenerateReply, GenerateRequest, InputSpec, ModelDescription
from shmring.frontend.media.decoder_pool import DecoderStatistics
from shmring.frontend.operator.health import HealthReporter
from tests.waiting import eventually

NAMES = ["engine-0", "engine-1"]
QUESTION = GenerateRequest([])


class Engine:
    """A ring with the control calls of an engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ring: Any = None
        self.described = 0
        self.paused = False
        self.ill = ""
        self.answers = asyncio.Event()
        self.answers.set()

    async def start(self, serve: Any) -> None:
        calls = {
            Calls.HEALTH: self.health,
            Calls.DESCRIBE: self.describe,
            Calls.STATISTICS: self.statistics,
            Calls.PAUSE: self.pause,
            Calls.IS_PAUSED: self.is_paused,
            Calls.COLLECTIVE_RPC: self.remote,
            Calls.STOP_PROFILE: self.stop_profile,
        }
        self.ring = await serve(self.answer, name=self.name, payload_type=EngineRequestPayload, calls=calls)

    async def answer(self, claim: shmring.Claim) -> None:
        await self.answers.wait()
        await claim.reply(GenerateReply(self.name, [], 1, 1, "stop"))

    async def health(self) -> None:
        await self.answers.wait()
        if self.ill:
            raise RuntimeError(self.ill)

    async def describe(self) -> dict[str, Any]:
        self.described += 1
        await self.answers.wait()
        description = ModelDescription("test", self.name, ["generate"], InputSpec(), 1)
        built: dict[str, Any] = msgspec.to_builtins(description)
        return built

    async def statistics(self) -> dict[str, float]:
        return {"steps": float(self.name[-1])}

    async def pause(self, wait: bool) -> None:
        self.paused = True

    async def is_paused(self) -> bool:
        return self.paused

    async def remote(self, method: str, arguments: list[Any], keywords: dict[str, Any]) -> list[Any]:
        if method == "fail":
            raise ValueError(self.name)
        return [[self.name, method, *arguments]]

    async def stop_profile(self) -> str:
        return f"/traces/{self.name}"


@pytest.fixture
async def engines(serve: Any) -> AsyncIterator[list[Engine]]:
    engines = [Engine(name) for name in NAMES]
    for engine in engines:
        await engine.start(serve)
    yield engines
    for engine in engines:
        engine.answers.set()


@pytest.fixture
async def client(engines: list[Engine], socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.setattr("shmring.client.pauses.LONGEST_S", 0.01)
    options: dict[str, Any] = {"lease_nbytes": "64KiB"}
    async with await EngineClient.connect(NAMES, socket_dir=str(socket_dir), retries=1, **options) as client:
        yield client


async def said(client: EngineClient) -> str:
    return "".join([output.text async for output in client.generate(QUESTION, timeout=10)])


async def test_requests_go_to_one_and_control_calls_to_all(client: EngineClient, engines: list[Engine]) -> None:
    assert {await said(client) for _ in range(4)} == set(NAMES)
    assert await client.collective_rpc("load", args=[1]) == [["engine-0", "load", 1], ["engine-1", "load", 1]]
    with pytest.raises(shmring.RemoteError, match="engine-"):
        await client.collective_rpc("fail")
    assert await client.stop_profile() == "/traces/engine-0\n/traces/engine-1"
    engines[0].paused = True
    assert not await client.is_paused()
    await client.pause_generation()
    assert engines[1].paused
    assert await client.is_paused()
    assert [await client.statistics(engine=name) for name in NAMES] == [{"steps": 0.0}, {"steps": 1.0}]
    with pytest.raises(ValueError, match="several engines have statistics"):
        await client.statistics()
    assert client.copies == 0
    await client.check_health()


async def test_an_engine_that_dies_is_missed_by_nobody(client: EngineClient, engines: list[Engine], serve: Any) -> None:
    for engine in engines:
        engine.answers.clear()
    asking = [asyncio.create_task(said(client)) for _ in range(4)]
    await eventually(lambda: all(each.statistics().in_flight == 2 for each in client.engines.values()))
    await engines[0].ring.close()
    engines[1].answers.set()
    assert await asyncio.gather(*asking) == ["engine-1"] * 4
    assert client.is_running
    assert not client.errored
    assert await client.states() == {"engine-0": "down", "engine-1": "running"}
    assert await client.collective_rpc("load") == [["engine-1", "load"]]
    with pytest.raises(shmring.EngineDeadError, match="engine-0"):
        await client.statistics(engine="engine-0")
    memory = client.media_memory()
    assert memory.name == "engine-1"
    memory.check_capacity(100)
    for slot in await memory.slots([100, 200]):
        assert slot.engine == "engine-1"
        slot.close()
    await engines[1].ring.close()
    await eventually(lambda: client.errored)
    with pytest.raises(shmring.EngineDeadError):
        await said(client)
    with pytest.raises(shmring.EngineDeadError):
        client.media_memory()


async def test_one_that_answers_is_asked_what_is_served_and_once(client: EngineClient, engines: list[Engine]) -> None:
    engines[0].answers.clear()
    assert (await client.describe()).model == "engine-1"
    assert (await client.describe()).model == "engine-1"
    assert [engine.described for engine in engines] == [1, 1]
    await engines[1].ring.close()
    with pytest.raises(TimeoutError):
        await client.describe(timeout=0.02)


@pytest.fixture
def health(client: EngineClient) -> HealthReporter:
    return HealthReporter(client, tuple, lambda: DecoderStatistics(total=1, free=1, waiting=0, waiting_s=0.0))


async def test_one_that_is_well_is_enough(client: EngineClient, engines: list[Engine], health: HealthReporter) -> None:
    first, second = engines
    assert (await health.check_health()).engines == {"engine-0": "running", "engine-1": "running"}
    first.ill = "a step takes long"
    second.paused = True
    answer = await health.check_health()
    assert (answer.engine, answer.engines) == ("paused", {"engine-0": "unhealthy", "engine-1": "paused"})
    with pytest.raises(Exception, match="the engine is paused") as caught:
        await health.check_ready()
    second.ill = "so does mine"
    with pytest.raises(Exception, match="no engine is well: engine-0 is unhealthy, engine-1 is unhealthy") as caught:
        await health.check_health()
    assert getattr(caught.value, "code", "") == "engine_unavailable"
    first.ill = ""
    second.answers.clear()
    answer = await health.check_ready()
    assert (answer.engine, answer.engines) == ("running", {"engine-0": "running", "engine-1": "unresponsive"})
    first.answers.clear()
    assert await client.states(timeout=0.05) == {"engine-0": "unresponsive", "engine-1": "unresponsive"}
