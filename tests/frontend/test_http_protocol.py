"""What one connection may cost, with a real server around a small application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from shmring.frontend import http_protocol
from shmring.frontend.callers import on_hang_up
from shmring.frontend.cross_origin import CrossOrigin
from shmring.frontend.http_protocol import BoundedHttpProtocol
from shmring.frontend.settings import CorsSettings
from tests.tables import for_each

LATE = asyncio.Event()
TOLD: list[int] = []  # sizes of the bodies of /gone
WATCHED: list[str] = []  # paths of /watched requests
CALLED: list[str] = []  # of those, whose callers hung up
PIECES: list[int] = []  # sizes of the pieces in which bodies came


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body.

    /never does not, /late not before LATE is set, /early before the body, /large with 32 MB, /gone to who has gone, and /pieces
    without a length. /begun begins at once, and ends when LATE is set. /watched is told when its caller hangs up, and goes on
    after its answer until LATE is set. /longer and /shorter say so of themselves, and are not, and /broken has a header that is
    two.
    """
    if scope["type"] == "lifespan":
        return
    nbytes, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        nbytes += len(message.get("body", b""))
        PIECES.append(len(message.get("body", b"")))
        more = message.get("more_body", False)
    if scope["path"] == "/never":
        await asyncio.Event().wait()
    if scope["path"] == "/late":
        await LATE.wait()
    if scope["path"] == "/begun":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await LATE.wait()
        await send({"type": "http.response.body", "body": b""})
        return
    if scope["path"] == "/pieces":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for piece in (b"one ", b"", b"two ", b"three"):
            await send({"type": "http.response.body", "body": piece, "more_body": piece != b"three"})
        return
    if scope["path"] == "/gone":
        while (await receive())["type"] != "http.disconnect":
            pass
        TOLD.append(nbytes)
        return
    if scope["path"].startswith("/watched"):
        on_hang_up(receive, lambda: CALLED.append(scope["path"]))
        WATCHED.append(scope["path"])
    if scope["path"] == "/watched/late":
        await LATE.wait()
    body = bytes(32 << 20) if scope["path"] == "/large" else str(nbytes).encode()
    said = len(body) + {"/longer": 1, "/shorter": -1}.get(scope["path"], 0)
    headers = [(b"content-length", str(said).encode())]
    if scope["path"] == "/broken":
        headers.append((b"x-text", b"a\r\nset-cookie: b"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    if scope["path"] == "/watched":
        await LATE.wait()


@pytest.fixture(autouse=True)
async def late() -> None:
    """Sets LATE back, for the loop of this test."""
    global LATE
    LATE = asyncio.Event()


@pytest.fixture
async def server() -> AsyncIterator[uvicorn.Server]:
    cross_origin = CrossOrigin(answer, CorsSettings(allowed_origins=("https://chat.example.org",)))
    protocol: Any = functools.partial(BoundedHttpProtocol, headers_for=cross_origin.headers_for)
    config = uvicorn.Config(answer, http=protocol, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    listening = socket.create_server(("127.0.0.1", 0))
    await server.startup([listening])
    yield server
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    for task in list(server.server_state.tasks):
        task.cancel()
    await server.shutdown([listening])


@pytest.fixture
def port(server: uvicorn.Server) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1])


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
async def test_what_does_not_end_is_cut_off(port: int, beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.1)
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


async def test_a_head_that_is_too_large_gets_an_answer(port: int) -> None:
    answer = await exchange(port, HEAD, *[b"x-some: " + b"a" * 4000 + b"\r\n"] * 90)
    if answer:  # unless the reset that follows overtook it
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


@pytest.mark.parametrize("head", [b"x-long: " + b"a" * 70_000, b"x-long: " + b"a" * 200_000])
async def test_a_head_is_refused_from_the_limit_on_that_the_error_names(port: int, head: bytes) -> None:
    """Also if all of it comes at once."""
    request = HEAD + head.removesuffix(b"\r\n") + b"\r\ncontent-length: 0\r\n" + CLOSE + b"\r\n"
    answer = await exchange(port, request)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"65536" in answer
    assert answer.count(b"x-request-id: ") == 1
    assert (
        await exchange(port, HEAD + b"x-long: " + b"a" * 60_000 + b"\r\n" + CLOSE + b"content-length: 0\r\n\r\n")
    ).startswith(b"HTTP/1.1 200 ")


async def test_a_head_has_a_number_of_headers(port: int) -> None:
    """Each costs something, however short it is."""
    for count, status in ((200, 200), (257, 431), (12_000, 431)):
        answer = await exchange(port, HEAD + b"x: y\r\n" * count + b"content-length: 0\r\n" + CLOSE + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"more than 256 headers" in answer


async def test_who_speaks_http_1_0_gets_no_chunks(port: int) -> None:
    head, _, body = (await exchange(port, b"GET /pieces HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two three"
    head, _, body = (await exchange(port, b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert (b"content-length: 1" in head, body) == (True, b"0")
    head, _, body = (await exchange(port, b"GET /pieces HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head


async def half_closed(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    return reader, writer


@pytest.mark.parametrize("ahead", [0, 3])
async def test_who_closes_one_half_gets_an_answer(
    server: uvicorn.Server, port: int, eventually: Any, turns: Any, ahead: int
) -> None:
    request = b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, writer = await half_closed(port, request * (1 + ahead))
    await eventually(lambda: server.server_state.tasks)
    await turns()
    LATE.set()
    answers = await asyncio.wait_for(reader.read(), 20)
    assert answers.count(b"HTTP/1.1 200 ") == 1 + ahead
    assert answers.endswith(b"\r\n\r\n0")
    writer.close()
    await eventually(lambda: not server.server_state.connections)


async def test_who_closes_one_half_before_the_body_is_complete_has_gone(server: uvicorn.Server, port: int) -> None:
    reader, writer = await half_closed(port, HEAD + b"content-length: 2\r\n\r\na")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_who_closes_one_half_and_then_the_other_has_gone(server: uvicorn.Server, port: int, eventually: Any) -> None:
    TOLD.clear()
    reader, writer = await half_closed(port, b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    assert await asyncio.wait_for(reader.readline(), 20) == b"HTTP/1.1 100 Continue\r\n"  # which clients skip
    assert TOLD == []
    writer.close()
    await eventually(lambda: TOLD == [3])
    await eventually(lambda: not server.server_state.connections)


async def test_no_body_is_read_after_its_caller_has_gone(port: int, eventually: Any) -> None:
    """Else bodies that nobody asks about any more would be decoded one after the other, and others would wait."""
    TOLD.clear()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    await eventually(lambda: TOLD)
    assert TOLD == [0]


async def test_who_hangs_up_is_told_to_whoever_watches_and_only_before_the_answer_is_complete(
    server: uvicorn.Server, port: int, eventually: Any
) -> None:
    WATCHED.clear()
    CALLED.clear()
    with socket.create_connection(("127.0.0.1", port)) as late:
        late.sendall(b"GET /watched/late HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(lambda: WATCHED)
    await eventually(lambda: CALLED == ["/watched/late"])
    assert (await exchange(port, b"GET /watched HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")).endswith(b"\r\n\r\n0")
    await eventually(lambda: not server.server_state.connections)
    assert server.server_state.tasks, "its handler goes on"
    assert CALLED == ["/watched/late"]
    LATE.set()
    await eventually(lambda: not server.server_state.tasks)


async def test_who_hangs_up_after_a_large_last_part_of_a_body_is_noticed(
    server: uvicorn.Server, port: int, eventually: Any
) -> None:
    WATCHED.clear()
    CALLED.clear()
    with socket.create_connection(("127.0.0.1", port)) as late:
        late.sendall(b"POST /watched/late HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
        await eventually(lambda: server.server_state.tasks)
        for _ in range(10):  # until it waits for its body
            await asyncio.sleep(0)
        the_connection(server).data_received(b"a" * 200_000)  # as one part, of whatever size the kernel would make them
        await eventually(lambda: WATCHED)
        assert the_connection(server).transport.is_reading()
    await eventually(lambda: CALLED == ["/watched/late"])
    LATE.set()


@for_each("path", [b"/longer", b"/shorter", b"/broken"])
async def test_an_answer_that_is_not_as_its_head_says_is_not_sent(port: int, path: bytes) -> None:
    answer = await exchange(port, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in answer


async def test_a_head_alone_is_an_answer_to_who_asks_for_that(port: int) -> None:
    answer = await exchange(port, b"HEAD / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: 1\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")
    head, _, body = (await exchange(port, b"HEAD /pieces HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")).partition(b"\r\n\r\n")
    assert (b"200 OK" in head, body) == (True, b"")


@pytest.mark.adjustable_clock
async def test_a_connection_that_is_not_used_ends_after_a_while_and_one_that_is_used_does_not(
    server: uvicorn.Server, port: int, pass_time: Any
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for path in (b"/", b"/", b"/late", b"/"):
        writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        if path == b"/late":
            while not server.server_state.tasks:
                await asyncio.sleep(0)
            await pass_time(20)
            LATE.set()
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        await pass_time(4)
    await pass_time(2)
    assert await reader.read() == b""
    writer.close()


@pytest.mark.adjustable_clock
async def test_a_connection_ends_soon_after_the_answer_within_which_a_shutdown_began(
    server: uvicorn.Server, port: int, pass_time: Any
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    the_connection(server).timeout_keep_alive = 60
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n0")
    writer.write(b"GET /begun HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"one")
    the_connection(server).shutdown()
    LATE.set()
    await reader.readuntil(b"0\r\n\r\n")
    await pass_time(2)
    assert await reader.read() == b""
    writer.close()


async def test_what_is_no_http_gets_the_envelope(port: int) -> None:
    answer = await exchange(port, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


ORIGIN = b"Origin: https://chat.example.org\r\n"


@for_each(
    ("request_", "is_readable"),
    [
        (b"GET / HTTP/1.1\r\n" + ORIGIN + b"\r\n", True),
        (HEAD + ORIGIN + b"x-long: " + b"a" * 70_000 + b"\r\n\r\n", True),
        (HEAD + ORIGIN + b"x: y\r\nno colon\r\n\r\n", True),
        (HEAD + ORIGIN + b"transfer-encoding: gzip\r\n\r\n", True),
        (HEAD + ORIGIN + b"transfer-encoding: chunked\r\n\r\nno size\r\n", True),
        (b"GET / HTTP/1.1\r\norigin: https://another.example.org\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\norigin: \xff\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n" + ORIGIN + b"\r\n", False),  # it has not come yet
        (b"\x16\x03\x01 hello\r\n\r\n", False),
    ],
)
async def test_pages_of_allowed_sites_may_read_why_a_request_is_refused(port: int, request_: bytes, is_readable: bool) -> None:
    head, _, body = (await exchange(port, request_)).partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["message"]
    fields = [line for line in head.split(b"\r\n") if line.startswith(b"access-control-allow-origin")]
    assert fields == ([b"access-control-allow-origin: https://chat.example.org"] if is_readable else [])


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
    answers = await exchange(port, (request + b"\r\n") * 200)  # the connection ends, and the rest can be sent again
    assert 17 <= answers.count(b"HTTP/1.1 200") < 200
    assert answers.count(b"connection: close") == 1
    assert b"connection: close" in answers.rpartition(b"HTTP/1.1 200")[2]


async def test_what_was_sent_ahead_and_is_too_much_takes_no_memory(server: uvicorn.Server, port: int, eventually: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n" + request * 5000)
    await eventually(lambda: server.server_state.connections)
    connection = the_connection(server)
    await eventually(lambda: connection._is_full)
    writer.write(request * 100_000)
    await writer.drain()
    assert len(connection.pipeline) == 16
    LATE.set()
    assert (await asyncio.wait_for(reader.read(), 20)).count(b"HTTP/1.1 200") == 17
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"])
async def test_a_head_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.05)
    assert await exchange(port, sent) == b""


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
        (b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n", b"a"),
    ],
    ids=["an empty line after an answer", "a part of a body that was not waited for"],
)
async def test_bytes_that_are_no_request_keep_no_connection_open(
    port: int, monkeypatch: pytest.MonkeyPatch, request_: bytes, more: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), 20)).startswith(b"HTTP/1.1 200")
    writer.write(more)
    assert await asyncio.wait_for(reader.read(), 3) == b"", "sooner than by the 5 s between requests"
    writer.close()


@pytest.mark.parametrize("number", [1, 2])
async def test_an_answer_that_nobody_takes_is_given_up(
    server: uvicorn.Server, port: int, eventually: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(http_protocol, "_STALL_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * number)
        await eventually(lambda: len(server.server_state.connections) == 1)
        await eventually(lambda: not server.server_state.connections)
        await eventually(lambda: not server.server_state.tasks)


def the_connection(server: uvicorn.Server) -> Any:
    [connection] = server.server_state.connections
    return connection


@pytest.mark.adjustable_clock
async def test_an_answer_that_is_taken_slowly_is_not_given_up(server: uvicorn.Server, port: int, pass_time: Any) -> None:
    assert http_protocol._STALL_TIMEOUT_S >= 30  # which no part of this test takes
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 << 10)
    writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    nbytes, left_nbytes = 0, 32 << 20
    for _ in range(5):
        nbytes += len(await reader.readexactly(4 << 20))
        while (left_now_nbytes := the_connection(server).transport.get_write_buffer_size()) >= left_nbytes:
            await asyncio.sleep(0)
        left_nbytes = left_now_nbytes
        await pass_time(http_protocol._STALL_TIMEOUT_S)
    nbytes += len(await reader.read())
    assert nbytes > 32 << 20
    writer.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_who_hangs_up_with_a_request_sent_ahead_is_noticed(
    server: uvicorn.Server, port: int, eventually: Any, turns: Any, at_once: bool
) -> None:
    TOLD.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await eventually(lambda: server.server_state.connections)
    connection = the_connection(server)
    writer.write(b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    if not at_once:
        await eventually(lambda: connection.cycle is not None)
        await turns()
    writer.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
    await eventually(lambda: connection.pipeline)
    writer.close()
    await eventually(lambda: TOLD == [3])


@pytest.mark.adjustable_clock
async def test_a_slow_body_is_not_a_slow_head(server: uvicorn.Server, port: int, pass_time: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + CLOSE + b"content-length: 2\r\n\r\na")
    while not server.server_state.tasks:
        await asyncio.sleep(0)
    await pass_time(3 * http_protocol._HEAD_TIMEOUT_S)
    writer.write(b"b")
    assert (await reader.read()).endswith(b"\r\n\r\n2")
    writer.close()


async def refusal_of(port: int, request: bytes) -> tuple[int, str]:
    """Sends a request without an end of its connection; returns the status and the code that end it."""
    answer = await exchange(port, request)
    return int(answer.split(b" ", 2)[1]), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", 400, "invalid_host"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "unknown_transfer_coding"),
        (HEAD + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501, "unknown_transfer_coding"),
        (HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_transfer_coding"),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "invalid_http"),
        (HEAD + b"content-length: +3\r\n\r\nabc", 400, "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nno size\r\n", 400, "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n", 400, "invalid_http"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_http"),
    ],
)
async def test_what_can_be_read_in_two_ways_is_refused(port: int, request_: bytes, status: int, code: str) -> None:
    assert await refusal_of(port, request_) == (status, code)


@for_each(
    "head",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a-b.example.org:80\r\nconnection: close\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_as_it_should_be_passes(port: int, head: bytes) -> None:
    assert (await exchange(port, head)).startswith(b"HTTP/1.1 200")


async def test_a_refusal_never_stands_within_the_answer_before_it(port: int) -> None:
    assert await exchange(port, b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n") == b""


async def test_a_bad_request_is_logged_with_its_peer_and_reason(port: int, caplog: pytest.LogCaptureFixture) -> None:
    await exchange(port, b"\x16\x03\x01 hello\r\n\r\n")
    await exchange(port, b"GET / HTTP/1.1\r\n\r\n")
    first, second = caplog.messages
    assert first.startswith("a bad request of 127.0.0.1 was refused: this is not HTTP: ")
    assert second == "a bad request of 127.0.0.1 was refused: a request must have one Host header, this one has 0"


UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    "websocket": b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AA==\r\n",
    "Upgrade alone": b"upgrade: h2c\r\n",
}


@for_each("upgrade", UPGRADES.values(), ids=UPGRADES)
async def test_an_upgrade_is_ignored_and_its_request_is_answered_with_its_body(port: int, upgrade: bytes) -> None:
    """As Java's HttpClient and ``curl --http2`` send it; the connection goes on, and requests behind it are read as before."""
    whole = HEAD + upgrade + b"content-length: 5\r\n\r\nhello"
    chunked = HEAD + b"transfer-encoding: chunked\r\n" + upgrade + b"\r\n3\r\nhel\r\n4\r\nlo!!\r\n0\r\n\r\n"
    empty = b"GET / HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n"
    together = whole + chunked + empty + whole + last
    expected = [b"5", b"7", b"0", b"5", b"0"]
    for pieces in ([together], [bytes([byte]) for byte in together], [together[:150], together[150:]]):
        answers = await exchange(port, *pieces)
        assert [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]] == expected
        assert answers.count(CLOSE) == 1


async def test_an_upgrade_makes_no_way_around_the_checks_of_heads(port: int) -> None:
    upgrade = HEAD + UPGRADES["h2c"]
    assert await refusal_of(port, b"GET / HTTP/1.1\r\n" + UPGRADES["h2c"] + b"\r\n") == (400, "invalid_host")
    assert await refusal_of(port, upgrade + b"host: y\r\n\r\n") == (400, "invalid_host")
    both = b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n"
    assert await refusal_of(port, upgrade + both) == (400, "invalid_http")
    assert await refusal_of(port, upgrade + b"transfer-encoding: chunked\r\n\r\nno size\r\n") == (400, "invalid_http")


async def test_an_upgrade_is_a_line_of_the_log_that_says_nothing_about_installing(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + UPGRADES["websocket"] + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    messages = [record.getMessage() for record in caplog.records if record.name != "uvicorn.access"]
    assert messages == ["127.0.0.1 asked for an upgrade, which this server has none of"]


# -- chunks -----------------------------------------------------------------------------------------------------------------

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n" + CLOSE + b"\r\n"


def chunks(count: int, nbytes: int) -> bytes:
    return b"%x\r\n%s\r\n" % (nbytes, b"x" * nbytes) * count


@for_each(
    ("body", "status"),
    [
        (chunks(1000, 1), b"200"),
        (chunks(50_000, 1), b"400"),
        (chunks(200_000, 64), b"200"),
        (chunks(200_000, 32), b"400"),
        (chunks(10, 100_000) + chunks(10_000, 1), b"200"),
        (chunks(10, 100_000) + chunks(100_000, 1), b"400"),
    ],
    ids=[
        "some short ones",
        "of one byte",
        "short ones",
        "too short ones",
        "short ones behind long ones",
        "too many behind long ones",
    ],
)
async def test_chunks_have_a_price(port: int, body: bytes, status: bytes) -> None:
    """Whoever sends too many short ones gets the reason, and no reset, though most of what it has sent was not read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED + body + b"0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.split(b" ")[1] == status
    if status == b"400":
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "chunks_too_small"
    writer.close()


async def test_a_refused_caller_that_has_gone_leaves_nothing_behind(server: uvicorn.Server, port: int) -> None:
    """What it has sent is read, and its end is seen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED + chunks(700_000, 1))
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 ")
    assert len(server.server_state.connections) == 1
    writer.transport.abort()
    async with asyncio.timeout(http_protocol._LINGER_S - 1):
        while server.server_state.connections:
            await asyncio.sleep(0.01)


@pytest.mark.both_loops
async def test_a_turn_of_the_loop_parses_some_of_what_came_and_the_others_come_between(port: int) -> None:
    PIECES.clear()
    answer = await exchange(port, CHUNKED + chunks(20_000, 64) + b"0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n%d" % (20_000 * 64))
    assert max(PIECES) < 40_000, "a few hundred chunks in a turn"


@pytest.mark.both_loops
async def test_what_waits_to_be_parsed_is_bounded_because_nothing_more_is_read(server: uvicorn.Server, port: int) -> None:
    """Though the application asks for more, each time that it has got some."""
    sending = asyncio.create_task(exchange(port, CHUNKED + chunks(100_000, 64) + b"0\r\n\r\n"))
    longest = 0
    while not sending.done():
        for connection in server.server_state.connections:
            assert isinstance(connection, BoundedHttpProtocol)
            longest = max(longest, len(connection._unparsed or b""))
        await asyncio.sleep(0)
    assert sending.result().endswith(b"\r\n\r\n%d" % (100_000 * 64))
    assert 10_000 < longest <= 256 << 10, "what one read brings"


@pytest.mark.both_loops
@pytest.mark.parametrize("path", [b"/", b"/late"])
async def test_a_body_of_many_lines_comes_whole(port: int, path: bytes) -> None:
    LATE.set()
    body = b"[1,\n2]" * 500_000
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (path, len(body))
    answers = await exchange(port, head + b"\r\n" + body + head + CLOSE + b"\r\n" + body)
    assert answers.count(b"\r\n\r\n%d" % len(body)) == 2


async def test_a_caller_who_has_gone_leaves_nothing_behind_that_is_parsed(server: uvicorn.Server, port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED + chunks(20_000, 64))
    await writer.drain()
    writer.transport.abort()
    async with asyncio.timeout(20):
        while server.server_state.connections:
            await asyncio.sleep(0)
