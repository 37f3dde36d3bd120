"""What one connection may cost, with a real server around a small application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from frontend import http_protocol
from frontend.http_protocol import BoundedHttpProtocol


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body; /never does not."""
    if scope["type"] == "lifespan":
        return
    nbytes, more = 0, True
    while more:
        message = await receive()
        nbytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/never":
        await asyncio.Event().wait()
    body = str(nbytes).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(answer, http=BoundedHttpProtocol, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    listening = socket.create_server(("127.0.0.1", 0))
    await server.startup([listening])
    yield listening.getsockname()[1]
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    for task in list(server.server_state.tasks):
        task.cancel()
    await server.shutdown([listening])


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Sends pieces until the other end has closed, and returns what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n"


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /",
        HEAD + b"x-long: ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;x=",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["url", "header", "chunk extension", "trailer"],
)
async def test_what_does_not_end_is_cut_off(port: int, beginning: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(beginning)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 64 << 20 and not reader.at_eof():
            writer.write(b"a" * 65536)
            sent += 65536
            await writer.drain()
    assert sent < 16 << 20, "what sockets buffer, and no more"
    writer.close()


async def test_a_head_that_is_too_large_is_told(port: int) -> None:
    answer = await exchange(port, HEAD, *[b"x-some: " + b"a" * 4000 + b"\r\n"] * 90)
    if answer:  # unless the reset that follows overtook it
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


async def test_what_is_no_http_gets_the_envelope(port: int) -> None:
    answer = await exchange(port, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_body_passes(port: int, chunked: bool) -> None:
    body = bytes(8 << 20)
    if chunked:
        head = HEAD + CLOSE + b"transfer-encoding: chunked\r\n\r\n"
        pieces = [b"%x\r\n" % 65536 + body[:65536] + b"\r\n"] * 128 + [b"0\r\n\r\n"]
        answer = await exchange(port, head, *pieces)
    else:
        answer = await exchange(port, HEAD + CLOSE + b"content-length: %d\r\n\r\n" % len(body), body)
    assert answer.endswith(b"\r\n\r\n%d" % len(body))


async def test_a_few_requests_may_be_sent_ahead_and_many_may_not(port: int) -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\n"
    few = (request + b"\r\n") * 10 + request + CLOSE + b"\r\n"
    assert (await exchange(port, few)).count(b"HTTP/1.1 200") == 11
    many = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n" + (request + b"\r\n") * 5000
    assert await exchange(port, many) == b""


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"])
async def test_a_head_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.05)
    assert await exchange(port, sent) == b""


async def test_a_slow_body_is_not_a_slow_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + CLOSE + b"content-length: 2\r\n\r\na")
    await asyncio.sleep(0.15)  # longer than a head may take
    writer.write(b"b")
    assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"\r\n\r\n2")
    writer.close()
