"""Limits of keys with real frontends: they hold for the server, and a killed frontend takes nothing along."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.test_http_server import Server, serving

pytestmark = pytest.mark.slow  # processes that import torch

KEYS = """\
alice-1 name=alice max-concurrent-requests=2
alice-2 name=alice max-concurrent-requests=2
bob-1 name=bob max-requests-per-minute=1
free
"""
CHAT: dict[str, Any] = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place:
        file = Path(place) / "keys"
        file.touch(0o600)
        file.write_text(KEYS)
        options = ("--slab-nbytes=32MiB", "--executor=synthetic", '--executor-options={"step_s": 0.01}', "--api-server-count=2")
        with serving(Path(place), *options, f"--api-key-file={file}", "--heartbeat-timeout=0") as running:
            yield running
            assert running.stop() == 0


async def ask(http: httpx.AsyncClient, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}, headers=headers)).status_code


@contextlib.asynccontextmanager
async def streaming(http: httpx.AsyncClient, key: str) -> AsyncIterator[None]:
    body = CHAT | {"max_tokens": 100_000, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_bytes()  # without a variable, it is closed at once, and the connection with it
        await anext(pieces)
        yield


async def until_let_in(http: httpx.AsyncClient, key: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):  # a frontend that was killed
                if await ask(http, key) == 200:
                    return
            await asyncio.sleep(0.05)


async def test_requests_at_once_count_whichever_frontend_has_them(server: Server, http: httpx.AsyncClient) -> None:
    async with streaming(http, "alice-1"), streaming(http, "alice-2"):
        for key in ("alice-1", "alice-2"):
            assert {await ask(http, key) for _ in range(8)} == {429}
        assert {await ask(http, "free") for _ in range(8)} == {200}
    await until_let_in(http, "alice-1")


async def test_requests_a_minute_count_whichever_frontend_has_them(http: httpx.AsyncClient) -> None:
    assert await ask(http, "bob-1") == 200
    assert {await ask(http, "bob-1") for _ in range(8)} == {429}


async def test_the_official_client_knows_the_error(server: Server, http: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="alice-2", max_retries=0)
    async with client, streaming(http, "alice-1"), streaming(http, "alice-1"):
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(**CHAT)
    assert (raised.value.code, raised.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    await until_let_in(http, "alice-1")


async def test_a_killed_frontend_gives_its_places_back(server: Server, http: httpx.AsyncClient) -> None:
    with contextlib.suppress(httpx.TransportError):  # the streams break off
        async with streaming(http, "alice-1"), streaming(http, "alice-2"):
            for pid in server.frontends:
                os.kill(pid, signal.SIGKILL)
            for _ in range(2):
                await until_let_in(http, "alice-1")
