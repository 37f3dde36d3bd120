"""Limits of keys: of several frontends together, over time, and through the application."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from shmring.frontend.callers.key_usage import KeyStatistics, OwnerUsage, UsageTable
from shmring.frontend.callers.keys import KeyOwner
from shmring.frontend.errors import ApiError
from tests.tables import for_each


class Clock:
    def __init__(self, now: float = 6000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("keys")
    yield fd
    os.close(fd)


def usages(owner: KeyOwner, fd: int, clock: Clock, frontends: int = 2) -> list[OwnerUsage]:
    """One of each frontend, in the memory that they share; another owner stands before it."""
    UsageTable(2, frontends, fd)
    return [OwnerUsage(owner, UsageTable(2, None, fd).of(1), row, KeyStatistics(), clock) for row in range(frontends)]


def refused(usage: OwnerUsage) -> ApiError:
    with pytest.raises(ApiError) as raised:
        usage.enter()
    assert (raised.value.status, raised.value.code) == (429, "rate_limit_exceeded")
    assert raised.value.envelope().error.type == "rate_limit_error"
    return raised.value


def test_requests_at_once_count_in_all_frontends(fd: int, clock: Clock) -> None:
    first, second = usages(KeyOwner(name="a", max_concurrent_requests=3), fd, clock)
    for usage in (first, second, first):
        usage.enter()
    for usage in (first, second, first):
        assert refused(usage).headers["retry-after"] == "1"
    second.leave()
    first.enter()
    refused(second)
    for usage in (first, first, first):
        usage.leave()
    assert [usage._sum(0) for usage in (first, second)] == [0, 0]


def test_what_a_dead_frontend_had_running_is_forgotten_and_its_minute_is_not(fd: int, clock: Clock) -> None:
    owner = KeyOwner(name="a", max_concurrent_requests=1, max_requests_per_minute=2)
    first, second = usages(owner, fd, clock)
    first.enter()
    first.hold(100)
    refused(second)
    UsageTable(2, None, fd).forget(0)
    assert (second._sum(0), second._sum(1)) == (0, 0)
    assert second.enter()["x-ratelimit-remaining-requests"] == "0"
    second.leave()
    assert "2 requests a minute" in str(refused(second))


def test_requests_a_minute_slide(fd: int, clock: Clock) -> None:
    """60 s after a burst, and not before, there may be another one; in between, as many as have left the window."""
    first, second = usages(KeyOwner(name="a", max_requests_per_minute=4), fd, clock)
    clock.now += 30
    remaining = [usage.enter()["x-ratelimit-remaining-requests"] for usage in (first, second, first, second)]
    assert remaining == ["3", "2", "1", "0"]
    error = refused(first)
    assert error.headers["x-ratelimit-limit-requests"] == "4"
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    wait_s = int(error.headers["retry-after"])
    clock.now += wait_s - 1
    refused(second)
    clock.now += 1
    assert second.enter()["x-ratelimit-remaining-requests"] == "0"
    refused(first)
    clock.now += 120
    assert first.enter()["x-ratelimit-remaining-requests"] == "3"


@for_each("most", [1, 2, 7, 600, 999_999_999])
@for_each("elapsed", [0.0, 0.001, 29.5, 59.999])
def test_after_the_wait_that_is_named_there_is_room(most: int, elapsed: float) -> None:
    clock = Clock(60_000.0 + elapsed)
    usage = OwnerUsage(KeyOwner(name="a", max_requests_per_minute=most), UsageTable(1).of(0), 0, KeyStatistics(), clock)
    for _ in range(min(most, 600)):
        usage.enter()
    if most > 600:
        return
    for _ in range(3):
        wait_s = int(refused(usage).headers["retry-after"])
        assert 1 <= wait_s <= 120
        clock.now += wait_s
        usage.enter()
        while True:
            try:
                usage.enter()
            except ApiError:
                break


def test_a_refused_request_is_not_counted(fd: int, clock: Clock) -> None:
    first, second = usages(KeyOwner(name="a", max_concurrent_requests=1, max_requests_per_minute=2), fd, clock)
    first.enter()
    for _ in range(5):
        refused(second)
    first.leave()
    second.enter()
    second.leave()
    for _ in range(5):
        refused(first)
    assert first._sum(0) == 0


def test_bytes_of_media_count_in_all_frontends(fd: int, clock: Clock) -> None:
    first, second = usages(KeyOwner(name="a", max_slab_nbytes=1000), fd, clock)
    first.hold(600)
    with pytest.raises(ApiError) as busy:
        second.hold(401)
    assert (busy.value.status, busy.value.headers) == (429, {"retry-after": "1"})
    second.hold(400)
    with pytest.raises(ApiError) as never:
        second.hold(1001)
    assert (never.value.status, never.value.code) == (413, "media_too_large")
    first.let_go(600)
    second.let_go(400)
    first.hold(1000)


# -- through the application --------------------------------------------------------------------------------------------

ALICE = KeyOwner(name="alice", keys=("a1", "a2"), max_concurrent_requests=1)
BOB = KeyOwner(name="bob", keys=("b",), max_requests_per_minute=2)
CAROL = KeyOwner(name="carol", keys=("c",), max_slab_nbytes=64 * 64 * 3)


@pytest.fixture
async def http(open_core: Any, open_app: Any) -> httpx.AsyncClient:
    client: httpx.AsyncClient = await open_app(
        await open_core({"step_s": 0.005}), api_keys=("a1", "a2", "b", "c", "free"), key_owners=(ALICE, BOB, CAROL)
    )
    return client


async def ask(http: httpx.AsyncClient, key: str, body: dict[str, Any]) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})


def series(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name)]


@pytest.mark.usefixtures("fresh_metrics")
async def test_one_owner_at_the_limit_costs_others_nothing(http: httpx.AsyncClient, chat_of: Any) -> None:
    long = asyncio.create_task(ask(http, "a1", chat_of(max_tokens=10_000)))
    metrics = ""

    async def runs() -> bool:
        nonlocal metrics
        metrics = (await http.get("/metrics")).text
        return 'shmring_key_requests_running{key="alice"} 1.0' in metrics

    while not await runs():
        await asyncio.sleep(0.01)
    refused = await ask(http, "a2", chat_of(max_tokens=1))  # another key of the same owner
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    for key in ("free", "b", "c"):
        assert (await ask(http, key, chat_of(max_tokens=1))).status_code == 200
    long.cancel()
    await asyncio.wait([long])
    while (await ask(http, "a2", chat_of(max_tokens=1))).status_code == 429:
        await asyncio.sleep(0.01)
    metrics = (await http.get("/metrics")).text
    assert 'shmring_key_requests_total{key="alice",status="200"} 1.0' in metrics
    assert 'shmring_key_refusals_total{key="alice",limit="max-concurrent-requests"}' in metrics
    assert 'shmring_key_generation_tokens_total{key="bob"} 1.0' in metrics
    assert 'key="free"' not in metrics
    for key in ("a1", "a2"):
        assert f'"{key}"' not in metrics


async def test_headers_say_how_far_a_key_is_from_its_limit(http: httpx.AsyncClient, chat_of: Any) -> None:
    answers = [await ask(http, "b", chat_of(max_tokens=1, stream=stream)) for stream in (True, False, True)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    assert "x-ratelimit-limit-requests" not in (await ask(http, "free", chat_of(max_tokens=1))).headers
    assert (await http.get("/v1/models", headers={"authorization": "Bearer b"})).status_code == 200  # it computes nothing


async def test_media_beyond_the_limit_are_refused_before_they_are_decoded(
    http: httpx.AsyncClient, chat_of: Any, open_core: Any
) -> None:
    small, large = (np.zeros((side, side, 3), dtype=np.uint8) for side in (32, 200))
    assert (await ask(http, "c", chat_of(small, max_tokens=1))).status_code == 200
    refused = await ask(http, "c", chat_of(large, max_tokens=1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "media_too_large")
    assert (await ask(http, "free", chat_of(large, max_tokens=1))).status_code == 200
    assert (await ask(http, "c", chat_of(small + 1, max_tokens=1))).status_code == 200  # nothing was left behind
    assert 'shmring_key_slab_bytes{key="carol"} 0.0' in (await http.get("/metrics")).text


async def test_a_request_that_fails_or_is_given_up_is_counted_back(http: httpx.AsyncClient, chat_of: Any) -> None:
    for body in ({"model": "another", "messages": []}, chat_of(b"no picture"), chat_of(max_tokens=0)):
        assert (await ask(http, "a1", body)).status_code in (400, 404)
    for _ in range(3):
        task = asyncio.create_task(ask(http, "a1", chat_of(max_tokens=10_000)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert (await ask(http, "a1", chat_of(max_tokens=1))).status_code == 200


async def test_tokens_of_all_prompts_count_and_those_of_who_hangs_up(open_core: Any, open_server: Any, chat_of: Any) -> None:
    """With a server: a client of the application alone has a stream when that has ended, and can't hang up before."""

    async def counted(what: str) -> float:
        lines = series((await http.get("/metrics")).text, f'shmring_key_{what}_tokens_total{{key="alice"}}')
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    address = await open_server(await open_core({"step_s": 0.005}), api_keys=("a1", "a2"), key_owners=(ALICE,))
    async with httpx.AsyncClient(base_url=address, timeout=30, headers={"authorization": "Bearer a1"}) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": ["a b", "c d e", "f"], "max_tokens": 2}
        usage = (await http.post("/v1/completions", json=body)).json()["usage"]
        assert await counted("prompt") == usage["prompt_tokens"]
        assert await counted("generation") == usage["completion_tokens"]
        async with http.stream("POST", "/v1/chat/completions", json=chat_of(max_tokens=10_000, stream=True)) as answer:
            lines = answer.aiter_lines()
            for _ in range(8):
                await anext(lines)
        while await counted("prompt") == usage["prompt_tokens"]:
            await asyncio.sleep(0.01)
        assert usage["completion_tokens"] < await counted("generation") < 10_000


def test_a_stack_lets_go_of_what_was_held() -> None:
    usage = OwnerUsage(KeyOwner(name="a", max_slab_nbytes=10), UsageTable(1).of(0), 0, KeyStatistics())
    with ExitStack() as stack:
        usage.hold(10)
        stack.callback(usage.let_go, 10)
        with pytest.raises(ApiError):
            usage.hold(1)
    usage.hold(10)
