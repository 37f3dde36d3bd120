"""``shmring serve --data-parallel-size 2`` with real processes: one engine is killed or stopped, and the other goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shmring.frontend.app import _METRICS_AGE_S
from tests.integration.test_http_server import NAME, SAMPLES, Server, chat_body, lives, messages_of, serving

pytestmark = pytest.mark.slow  # processes that import torch, again and again

FIRST, SECOND = NAMES = [f"{NAME}-0", f"{NAME}-1"]
MODEL = "shmring-synthetic"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that tests share, and which they leave whole."""
    options = ("--data-parallel-size=2", "--slab-nbytes=64MiB", "--api-server-count=2", "--executor=synthetic")
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        serving(Path(place), *options, '--executor-options={"step_s": 0.02}', "--heartbeat-timeout=0") as running,
    ):
        yield running
        assert running.stop() == 0
        assert not [pid for pid in (*running.engines, *running.frontends) if lives(pid)]


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_keepalive_connections=0)  # so that both frontends get some
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        await all_are_well(client)
        yield client


async def metrics_of(http: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """What /metrics says now, by name and engine."""
    await asyncio.sleep(_METRICS_AGE_S)  # so old may an answer be
    response = await http.get("/metrics")
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {(sample.name, sample.labels.get("engine", "")): sample.value for each in families for sample in each.samples}


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Polls until it is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (result := await condition()):
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.02)
    return result


async def all_are_well(http: httpx.AsyncClient) -> None:
    """Each frontend has both engines. Which of them answers is the kernel's choice: it is asked until both have."""
    well: set[int] = set()

    async def both() -> bool:
        for answer in await asyncio.gather(*(http.get("/health") for _ in range(4))):
            if answer.status_code == 200 and set(answer.json()["engines"].values()) == {"running"}:
                well.add(answer.json()["pid"])
        return len(well) == 2

    await until(both)


def pid_of(server: Server, rank: int) -> int:
    """The pid of an engine's process of now: its lock names it."""
    [lock] = Path(server.metrics_dir.parent).glob(f"{NAMES[rank]}.lock")
    return int(lock.read_text().split()[0])


def stream_body(tokens: int) -> dict[str, Any]:
    return chat_body(stream=True, max_tokens=tokens) | {"model": MODEL}


class Stream:
    """A chat that is read to its end."""

    def __init__(self, http: httpx.AsyncClient, tokens: int) -> None:
        self.begun = asyncio.Event()
        self.lines: list[str] = []
        self.reading = asyncio.create_task(self._read(http, tokens))

    async def _read(self, http: httpx.AsyncClient, tokens: int) -> None:
        async with http.stream("POST", "/v1/chat/completions", json=stream_body(tokens)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self.lines.append(line)
                if "token2" in line:
                    self.begun.set()

    @property
    def is_broken(self) -> bool:
        return any("engine_unavailable" in line for line in self.lines)

    def is_whole(self, tokens: int) -> bool:
        return any(f"token{tokens}" in line for line in self.lines) and "data: [DONE]" in self.lines


async def test_a_killed_engine_breaks_its_own_streams_and_is_replaced(server: Server, http: httpx.AsyncClient) -> None:
    tokens = 120
    streams = [Stream(http, tokens) for _ in range(8)]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    before = await metrics_of(http)
    running = {name: before["shmring_num_requests_running", name] for name in NAMES}
    assert sum(running.values()) == 8
    assert min(running.values()) >= 1
    victim = pid_of(server, 0)
    os.kill(victim, signal.SIGKILL)

    async def one_is_left() -> bool:
        answer = await http.get("/health")
        assert answer.status_code == 200
        assert answer.json()["engines"][SECOND] == "running"
        return bool(answer.json()["engines"][FIRST] == "down")

    await until(one_is_left)
    seen = await metrics_of(http)
    assert (seen["shmring_engine_up", FIRST], seen["shmring_engine_up", SECOND]) == (0, 1)
    assert ("shmring_engine_steps_total", FIRST) not in seen
    answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=stream_body(2)) for _ in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    await asyncio.gather(*(stream.reading for stream in streams))
    assert sum(stream.is_broken for stream in streams) == running[FIRST]
    assert sum(stream.is_whole(tokens) for stream in streams) == running[SECOND]
    await all_are_well(http)
    assert server.process.lives
    assert pid_of(server, 0) != victim
    reconnections = {name: before["shmring_frontend_reconnections_total", name] for name in NAMES}

    async def both_frontends_have_said_so() -> bool:  # each a second later at most
        after = await metrics_of(http)
        assert after["shmring_engine_up", FIRST] == 1
        assert after["shmring_frontend_reconnections_total", SECOND] == reconnections[SECOND]
        return after["shmring_frontend_reconnections_total", FIRST] == reconnections[FIRST] + 2

    await until(both_frontends_have_said_so)
    answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=stream_body(2)) for _ in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    assert (await metrics_of(http))["shmring_engine_finished_requests_total", FIRST] >= 1, "it is used again"


async def test_pictures_that_a_killed_engine_had_are_answered_by_the_other(server: Server, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": messages_of((SAMPLES / "coffee.jpg").read_bytes())}
    assert (await http.post("/v1/embeddings", json=body)).status_code == 200  # one of the engines keeps it
    engines = [pid_of(server, rank) for rank in range(2)]
    for pid in engines:  # so that requests are in flight when it dies
        os.kill(pid, signal.SIGSTOP)
    try:
        asking = [asyncio.create_task(http.post("/v1/embeddings", json=body)) for _ in range(10)]

        async def are_being_answered() -> bool:
            return (await metrics_of(http))["shmring_http_in_flight", ""] >= 10

        await until(are_being_answered)
        os.kill(engines[0], signal.SIGKILL)
    finally:
        os.kill(engines[1], signal.SIGCONT)
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 10
    await all_are_well(http)


async def test_a_stopped_engine_is_unresponsive_and_the_other_one_answers(server: Server, http: httpx.AsyncClient) -> None:
    pid = pid_of(server, 1)
    os.kill(pid, signal.SIGSTOP)
    try:

        async def is_noticed() -> bool:
            answer = await http.get("/health")
            assert answer.status_code == 200
            return bool(answer.json()["engines"] == {FIRST: "running", SECOND: "unresponsive"})

        await until(is_noticed)
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["engine"]) == (200, "running")
        before = (await metrics_of(http))["shmring_engine_finished_requests_total", FIRST]
        asking = [asyncio.create_task(http.post("/v1/chat/completions", json=stream_body(2))) for _ in range(12)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        after = (await metrics_of(http))["shmring_engine_finished_requests_total", FIRST]
        assert after > before
    finally:
        os.kill(pid, signal.SIGCONT)
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    await all_are_well(http)


async def test_without_any_engine_it_is_503_until_one_is_back(server: Server, http: httpx.AsyncClient) -> None:
    for rank in range(2):
        os.kill(pid_of(server, rank), signal.SIGKILL)

    async def is_noticed() -> bool:
        answer = await http.get("/health")
        return answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"

    await until(is_noticed)
    answer = await http.post("/v1/chat/completions", json=stream_body(2))
    assert answer.status_code in (200, 503)  # 200: an engine was back meanwhile
    await all_are_well(http)
    assert (await http.post("/v1/chat/completions", json=stream_body(2))).status_code == 200
    assert server.process.lives
