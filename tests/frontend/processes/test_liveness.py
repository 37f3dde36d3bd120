"""``/health`` of the supervisor, at a port of its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shmring.frontend.processes import liveness
from shmring.frontend.processes.liveness import EngineLife, Life, answering
from shmring.service.supervision import FrontendState
from tests.tables import for_each

SERVING = FrontendState(0, 7, "serving", 0)
STARTING = FrontendState(1, 8, "starting", 0)
HANGING = FrontendState(1, 8, "unresponsive", 0)


@for_each(
    ("engines", "frontends", "alive"),
    [
        *((["running"], frontends, True) for frontends in ([SERVING], [HANGING], [SERVING, STARTING])),
        *((engines, [SERVING], True) for engines in (["unresponsive"], ["stuck", "running"], ["restarting", "running"])),
        *((engines, [SERVING], False) for engines in (["stuck"], ["restarting"], ["stuck", "restarting"])),
        *((["running"], frontends, False) for frontends in ([STARTING], [])),
        (["starting"], [STARTING], False),
    ],
)
def test_only_what_a_restart_would_help_is_no_life(
    engines: list[EngineLife], frontends: list[FrontendState], alive: bool
) -> None:
    named = {f"engine-{number}": state for number, state in enumerate(engines)}
    assert Life.of(named, frontends, 3) == Life(alive=alive, engines=named, frontends=frontends, log_lines_dropped=3)


@pytest.fixture
def life() -> dict[str, Life]:
    return {"now": Life.of({"shmring": "running"}, [SERVING], 0)}


@pytest.fixture
async def port(life: dict[str, Life]) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    async with answering(listening, lambda: life["now"]):
        yield listening.getsockname()[1]


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:  # it was not read to its end
        return b""
    finally:
        writer.close()


def said(answer: bytes) -> tuple[int, Any]:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in head
    return int(head.split()[1]), json.loads(content)


async def test_a_probe_is_told_how_the_processes_are(port: int, life: dict[str, Life]) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: 10.0.0.1:8001\r\nuser-agent: kube-probe/1.31\r\nconnection: close\r\n\r\n"
    status, content = said(await ask(port, request))
    assert (status, content["alive"], content["engines"]) == (200, True, {"shmring": "running"})
    assert content["frontends"] == [{"index": 0, "pid": 7, "state": "serving", "restarts": 0}]
    life["now"] = Life.of({"shmring": "stuck"}, [SERVING], 0)
    status, content = said(await ask(port, request))
    assert (status, content["alive"], content["engines"]) == (503, False, {"shmring": "stuck"})
    head, _, content = (await ask(port, b"HEAD /health HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert content == b""


@for_each(
    ("request_", "status"),
    [(b"GET / HTTP/1.1\r\n\r\n", 404), (b"POST /health HTTP/1.1\r\n\r\n", 405), (b"GET /health?x HTTP/1.0\r\n\r\n", 200)],
)
async def test_there_is_nothing_else(port: int, request_: bytes, status: int) -> None:
    assert said(await ask(port, request_))[0] == status


async def test_who_sends_no_request_keeps_nobody_from_asking(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(port, b"x" * 20_000) == b"", "no head"
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(liveness._MAX_CONNECTIONS)]
    assert await ask(port, b"GET /health HTTP/1.1\r\n\r\n") == b"", "there are too many"
    for _, writer in silent:
        writer.close()
    async with asyncio.timeout(20):
        while not await ask(port, b"GET /health HTTP/1.1\r\n\r\n"):
            await asyncio.sleep(0)
    monkeypatch.setattr(liveness, "_LIMIT_S", 0.01)
    assert await ask(port, b"GET /health") == b""
