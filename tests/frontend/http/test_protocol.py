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

from shmring.frontend.http import protocol as http_protocol
from shmring.frontend.http.cross_origin import CrossOrigin
from shmring.frontend.http.protocol import BoundedHttpProtocol
from shmring.frontend.http.watch import watch_of
from shmring.frontend.settings import CorsSettings
from tests.tables import for_each
from tests.waiting import eventually, pass_time, turns

LATE = asyncio.Event()
TOLD: list[int] = []  # sizes of the bodies of /gone
WHOLE: list[bool] = []  # of each request: whether all of it was there before it was read
WATCHED: list[str] = []  # paths of /watched requests
CALLED: list[str] = []  # of those, whose callers hung up
PIECES: list[int] = []  # sizes of the pieces in which bodies came
OPENED: list[asyncio.StreamWriter] = []  # by callers


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body.

    /never does not, /late not before LATE is set, /early before the body, /large with 32 MB, /gone to who has gone, and /pieces
    without a length. /begun begins at once, and ends when LATE is set. /watched is told when its caller hangs up, and goes on
    after its answer until LATE is set. /longer and /shorter say so of themselves, and are not, and /broken has a header that is
    two.
    """
    if scope["type"] == "lifespan":
        return
    WHOLE.append(watch_of(scope).has_all)
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
    if pieces := {"/begun": (b"one", b""), "/pieces": (b"one ", b"", b"two ", b"three")}.get(scope["path"]):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for number, piece in enumerate(pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
            if scope["path"] == "/begun":
                await LATE.wait()
        return
    if scope["path"] == "/gone":
        while (await receive())["type"] != "http.disconnect":
            pass
        TOLD.append(nbytes)
        return
    if scope["path"].startswith("/watched"):
        watch_of(scope).on_hang_up = lambda: CALLED.append(scope["path"])
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
async def late() -> AsyncIterator[None]:
    """Sets LATE back, for the loop of this test, and empties what is noted; at the end, closes connections of callers."""
    global LATE
    LATE = asyncio.Event()
    for noted in (TOLD, WHOLE, WATCHED, CALLED, PIECES):
        noted.clear()
    yield
    while OPENED:
        OPENED.pop().close()


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


async def connect(port: int, *pieces: bytes, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection, and sends a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    OPENED.append(writer)
    writer.write(b"".join(pieces))
    return reader, writer


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
EMPTY = b"content-length: 0\r\n" + CLOSE + b"\r\n"


def get(path: bytes = b"/", fields: bytes = b"") -> bytes:
    return b"GET %s HTTP/1.1\r\nhost: x\r\n%s\r\n" % (path, fields)


async def answer_to(port: int, *pieces: bytes) -> tuple[bytes, bytes]:
    """The head and the body of the only answer to a request."""
    head, _, body = (await exchange(port, *pieces)).partition(b"\r\n\r\n")
    return head, body


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
    reader, writer = await connect(port, beginning)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 64 << 20 and not reader.at_eof():
            writer.write(b"a" * 65536)
            sent += 65536
            await writer.drain()
    assert sent < 16 << 20, "what sockets buffer, and no more"


async def test_a_head_that_is_too_large_gets_an_answer(port: int) -> None:
    head, body = await answer_to(port, HEAD, *[b"x-some: " + b"a" * 4000 + b"\r\n"] * 90)
    if head:  # unless the reset that follows overtook it
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "head_too_large"


async def test_a_head_has_a_number_of_headers(port: int) -> None:
    """Each costs something, however short it is."""
    for count, status in ((200, 200), (257, 431), (12_000, 431)):
        head, body = await answer_to(port, HEAD + b"x: y\r\n" * count + EMPTY)
        assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"more than 256 headers" in body


IN_CHUNKS = b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"
FRAMING = (b"content-length", b"connection", b"transfer-encoding")


@for_each(
    ("request_", "lines", "body"),
    [
        (b"GET /pieces HTTP/1.0\r\n\r\n", [b"connection: close"], b"one two three"),
        (b"GET / HTTP/1.0\r\n\r\n", [b"content-length: 1", b"connection: close"], b"0"),
        (get(b"/pieces", CLOSE), [b"connection: close", b"transfer-encoding: chunked"], IN_CHUNKS),
        (get(b"/", CLOSE).replace(b"GET", b"HEAD"), [b"content-length: 1", b"connection: close"], b""),
        (get(b"/pieces", CLOSE).replace(b"GET", b"HEAD"), [b"connection: close"], b""),
    ],
)
async def test_an_answer_is_sent_as_its_caller_can_read_it(port: int, request_: bytes, lines: list[bytes], body: bytes) -> None:
    """In HTTP/1.0 there are no chunks, and an answer to HEAD has no body."""
    head, sent = await answer_to(port, request_)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert ([line for line in head.split(b"\r\n") if line.split(b":")[0] in FRAMING], sent) == (lines, body)


async def half_closed(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(port, request)
    writer.write_eof()
    return reader, writer


@pytest.mark.parametrize("ahead", [0, 3])
async def test_who_closes_one_half_gets_an_answer(server: uvicorn.Server, port: int, ahead: int) -> None:
    request = get(b"/late")
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
    reader, _writer = await half_closed(port, HEAD + b"content-length: 2\r\n\r\na")
    assert await asyncio.wait_for(reader.read(), 20) == b""


async def test_who_closes_one_half_and_then_the_other_has_gone(server: uvicorn.Server, port: int) -> None:
    reader, writer = await half_closed(port, b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    assert await asyncio.wait_for(reader.readline(), 20) == b"HTTP/1.1 100 Continue\r\n"  # which clients skip
    assert TOLD == []
    writer.close()
    await eventually(lambda: TOLD == [3])
    await eventually(lambda: not server.server_state.connections)


async def test_no_body_is_read_after_its_caller_has_gone(port: int) -> None:
    """Else bodies that nobody asks about any more would be decoded one after the other, and others would wait."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    await eventually(lambda: TOLD)
    assert TOLD == [0]


async def test_a_request_is_told_whether_all_of_its_body_is_there(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
    _, writer = await connect(port, head, b"ab", head, b"a")
    await eventually(lambda: WHOLE == [True, False])
    writer.write(b"b" + head + b"ab")
    await eventually(lambda: WHOLE == [True, False, True])


async def test_who_hangs_up_is_told_to_whoever_watches_and_only_before_the_answer_is_complete(
    server: uvicorn.Server, port: int
) -> None:
    with socket.create_connection(("127.0.0.1", port)) as late:
        late.sendall(get(b"/watched/late"))
        await eventually(lambda: WATCHED)
    await eventually(lambda: CALLED == ["/watched/late"])
    assert (await exchange(port, get(b"/watched", CLOSE))).endswith(b"\r\n\r\n0")
    await eventually(lambda: not server.server_state.connections)
    assert server.server_state.tasks, "its handler goes on"
    assert CALLED == ["/watched/late"]
    LATE.set()
    await eventually(lambda: not server.server_state.tasks)


async def test_who_hangs_up_after_a_large_last_part_of_a_body_is_noticed(server: uvicorn.Server, port: int) -> None:
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
    answer = await exchange(port, get(path, CLOSE))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in answer


@pytest.mark.adjustable_clock
async def test_a_connection_that_is_not_used_ends_after_a_while_and_one_that_is_used_does_not(
    server: uvicorn.Server, port: int
) -> None:
    reader, writer = await connect(port)
    for path in (b"/", b"/", b"/late", b"/"):
        writer.write(get(path))
        if path == b"/late":
            while not server.server_state.tasks:
                await asyncio.sleep(0)
            await pass_time(20)
            LATE.set()
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        await pass_time(4)
    await pass_time(2)
    assert await reader.read() == b""


@pytest.mark.adjustable_clock
async def test_a_connection_ends_soon_after_the_answer_within_which_a_shutdown_began(server: uvicorn.Server, port: int) -> None:
    reader, writer = await connect(port)
    the_connection(server).timeout_keep_alive = 60
    writer.write(get())
    await reader.readuntil(b"\r\n\r\n0")
    writer.write(get(b"/begun"))
    await reader.readuntil(b"one")
    the_connection(server).shutdown()
    LATE.set()
    await reader.readuntil(b"0\r\n\r\n")
    await pass_time(2)
    assert await reader.read() == b""


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
    assert (await exchange(port, get() * 10 + get(b"/", CLOSE))).count(b"HTTP/1.1 200") == 11
    answers = await exchange(port, get() * 200)  # the connection ends, and the rest can be sent again
    assert 17 <= answers.count(b"HTTP/1.1 200") < 200
    assert answers.count(b"connection: close") == 1
    assert b"connection: close" in answers.rpartition(b"HTTP/1.1 200")[2]


async def test_what_was_sent_ahead_and_is_too_much_takes_no_memory(server: uvicorn.Server, port: int) -> None:
    reader, writer = await connect(port)
    request = get()
    writer.write(get(b"/late") + request * 5000)
    await eventually(lambda: server.server_state.connections)
    connection = the_connection(server)
    await eventually(lambda: connection._is_full)
    writer.write(request * 100_000)
    await writer.drain()
    assert len(connection.pipeline) == 16
    LATE.set()
    assert (await asyncio.wait_for(reader.read(), 20)).count(b"HTTP/1.1 200") == 17


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"])
async def test_a_head_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.05)
    assert await exchange(port, sent) == b""


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (get(), b"\r\n"),
        (b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n", b"a"),
    ],
    ids=["an empty line after an answer", "a part of a body that was not waited for"],
)
async def test_bytes_that_are_no_request_keep_no_connection_open(
    port: int, monkeypatch: pytest.MonkeyPatch, request_: bytes, more: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 0.1)
    reader, writer = await connect(port, request_)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), 20)).startswith(b"HTTP/1.1 200")
    writer.write(more)
    assert await asyncio.wait_for(reader.read(), 3) == b"", "sooner than by the 5 s between requests"


@pytest.mark.parametrize("number", [1, 2])
async def test_an_answer_that_nobody_takes_is_given_up(
    server: uvicorn.Server, port: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(http_protocol, "_STALL_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.sendall(get(b"/large") * number)
        await eventually(lambda: len(server.server_state.connections) == 1)
        await eventually(lambda: not server.server_state.connections)
        await eventually(lambda: not server.server_state.tasks)


def the_connection(server: uvicorn.Server) -> Any:
    [connection] = server.server_state.connections
    return connection


@pytest.mark.adjustable_clock
async def test_an_answer_that_is_taken_slowly_is_not_given_up(server: uvicorn.Server, port: int) -> None:
    assert http_protocol._STALL_TIMEOUT_S >= 30  # which no part of this test takes
    reader, _writer = await connect(port, get(b"/large", CLOSE), limit=64 << 10)
    nbytes, left_nbytes = 0, 32 << 20
    for _ in range(5):
        nbytes += len(await reader.readexactly(4 << 20))
        while (left_now_nbytes := the_connection(server).transport.get_write_buffer_size()) >= left_nbytes:
            await asyncio.sleep(0)
        left_nbytes = left_now_nbytes
        await pass_time(http_protocol._STALL_TIMEOUT_S)
    nbytes += len(await reader.read())
    assert nbytes > 32 << 20


@pytest.mark.parametrize("at_once", [True, False])
async def test_who_hangs_up_with_a_request_sent_ahead_is_noticed(server: uvicorn.Server, port: int, at_once: bool) -> None:
    _, writer = await connect(port)
    await eventually(lambda: server.server_state.connections)
    connection = the_connection(server)
    writer.write(b"POST /gone HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    if not at_once:
        await eventually(lambda: connection.cycle is not None)
        await turns()
    writer.write(get(b"/never"))
    await eventually(lambda: connection.pipeline)
    writer.close()
    await eventually(lambda: TOLD == [3])


@pytest.mark.adjustable_clock
async def test_a_slow_body_is_not_a_slow_head(server: uvicorn.Server, port: int) -> None:
    reader, writer = await connect(port, HEAD + CLOSE + b"content-length: 2\r\n\r\na")
    while not server.server_state.tasks:
        await asyncio.sleep(0)
    await pass_time(3 * http_protocol._HEAD_TIMEOUT_S)
    writer.write(b"b")
    assert (await reader.read()).endswith(b"\r\n\r\n2")


UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    "websocket": b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AA==\r\n",
    "Upgrade alone": b"upgrade: h2c\r\n",
}
ORIGIN = b"Origin: https://chat.example.org\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
NO_SIZE = CHUNKED + b"\r\nno size\r\n"
LAST = b"\r\n0\r\n\r\n"


@for_each(
    ("request_", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", 400, "invalid_host"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 501, "unknown_transfer_coding"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n" + LAST, 501, "unknown_transfer_coding"),
        (HEAD + b"transfer-encoding: gzip\r\n" + CHUNKED + LAST, 501, "unknown_transfer_coding"),
        (HEAD + b"transfer-encoding: chunked, chunked\r\n" + LAST, 400, "invalid_http"),
        (b"POST / HTTP/1.0\r\n" + CHUNKED + LAST, 400, "invalid_transfer_coding"),
        (HEAD + CHUNKED + b"content-length: 3\r\n" + LAST, 400, "invalid_http"),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "invalid_http"),
        (HEAD + b"content-length: +3\r\n\r\nabc", 400, "invalid_http"),
        (HEAD + NO_SIZE, 400, "invalid_http"),
        (HEAD + CHUNKED + b"\r\n3\r\nabcd\r\n", 400, "invalid_http"),
        (HEAD + b"x: y\r\nno colon\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_http"),
        # An upgrade is no way around these checks.
        (b"GET / HTTP/1.1\r\n" + UPGRADES["h2c"] + b"\r\n", 400, "invalid_host"),
        (HEAD + UPGRADES["h2c"] + b"host: y\r\n\r\n", 400, "invalid_host"),
        (HEAD + UPGRADES["h2c"] + CHUNKED + b"content-length: 3\r\n" + LAST, 400, "invalid_http"),
        (HEAD + UPGRADES["h2c"] + NO_SIZE, 400, "invalid_http"),
        # A head is refused from the limit on that the error names, also if all of it comes at once.
        (HEAD + b"x-long: " + b"a" * 70_000 + b"\r\n" + EMPTY, 431, "head_too_large"),
        (HEAD + b"x-long: " + b"a" * 200_000 + b"\r\n" + EMPTY, 431, "head_too_large"),
        # Of these, no header has come yet.
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, "head_too_large"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http"),
    ],
)
async def test_what_can_be_read_in_two_ways_or_not_at_all_is_refused(
    port: int, caplog: pytest.LogCaptureFixture, request_: bytes, status: int, code: str
) -> None:
    """Pages of allowed sites may read why, and no others. The log names the peer and the reason."""
    line, end, rest = request_.partition(b"\r\n")
    is_headless = line.startswith((b"GET /aaa", b"\x16"))
    allowed = [] if is_headless else [b"access-control-allow-origin: https://chat.example.org"]
    others = (b"", b"origin: https://b.example.org\r\n", b"origin: \xff\r\n")
    for origin, expected in ((ORIGIN, allowed), *((other, []) for other in others)):
        caplog.clear()
        head, body = await answer_to(port, line + end + origin + rest)
        error = json.loads(body)["error"]
        assert (int(head.split(b" ")[1]), error["code"]) == (status, code), (origin, error)
        assert [field for field in head.split(b"\r\n") if field.startswith(b"access-control-allow-origin")] == expected
        assert head.count(b"x-request-id: ") == 1
        assert caplog.messages == [f"a bad request of 127.0.0.1 was refused: {error['message']}"]
        assert status != 431 or "65536" in error["message"]


@for_each(
    "request_",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost:\r\n" + CLOSE + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\n" + CLOSE + b"\r\n",
        b"POST / HTTP/1.1\r\nhost: a-b.example.org:80\r\n" + CLOSE + b"transfer-encoding: Chunked\r\n" + LAST,
        HEAD + b"x-long: " + b"a" * 60_000 + b"\r\n" + EMPTY,
    ],
)
async def test_what_is_as_it_should_be_passes(port: int, request_: bytes) -> None:
    assert (await exchange(port, request_)).startswith(b"HTTP/1.1 200")


async def test_a_refusal_never_stands_within_the_answer_before_it(port: int) -> None:
    assert await exchange(port, get(b"/never") + b"GET / HTTP/1.1\r\n\r\n") == b""


@for_each("upgrade", UPGRADES.values(), ids=UPGRADES)
async def test_an_upgrade_is_ignored_and_its_request_is_answered_with_its_body(port: int, upgrade: bytes) -> None:
    """As Java's HttpClient and ``curl --http2`` send it; the connection goes on, and requests behind it are read as before."""
    whole = HEAD + upgrade + b"content-length: 5\r\n\r\nhello"
    chunked = HEAD + b"transfer-encoding: chunked\r\n" + upgrade + b"\r\n3\r\nhel\r\n4\r\nlo!!\r\n0\r\n\r\n"
    together = whole + chunked + get(b"/", upgrade) + whole + get(b"/", CLOSE)
    expected = [b"5", b"7", b"0", b"5", b"0"]
    for pieces in ([together], [bytes([byte]) for byte in together], [together[:150], together[150:]]):
        answers = await exchange(port, *pieces)
        assert [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]] == expected
        assert answers.count(CLOSE) == 1


async def test_an_upgrade_is_a_line_of_the_log_that_says_nothing_about_installing(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        answer = await exchange(port, get(b"/", CLOSE + UPGRADES["websocket"]))
    assert answer.startswith(b"HTTP/1.1 200")
    messages = [record.getMessage() for record in caplog.records if record.name != "uvicorn.access"]
    assert messages == ["127.0.0.1 asked for an upgrade, which this server has none of"]


# -- chunks -----------------------------------------------------------------------------------------------------------------

POST_CHUNKS = HEAD + CHUNKED + CLOSE + b"\r\n"


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
    ids=["some short", "of one byte", "short", "too short", "short ones behind long ones", "too many behind long ones"],
)
async def test_chunks_have_a_price(port: int, body: bytes, status: bytes) -> None:
    """Whoever sends too many short ones gets the reason, and no reset, though most of what it has sent was not read."""
    reader, _writer = await connect(port, POST_CHUNKS + body + b"0\r\n\r\n")
    head, _, answer = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert status == b"200" or json.loads(answer)["error"]["code"] == "chunks_too_small"


async def test_a_refused_caller_that_has_gone_leaves_nothing_behind(server: uvicorn.Server, port: int) -> None:
    """What it has sent is read, and its end is seen."""
    reader, writer = await connect(port, POST_CHUNKS + chunks(700_000, 1))
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 ")
    assert len(server.server_state.connections) == 1
    writer.transport.abort()
    async with asyncio.timeout(http_protocol._LINGER_S - 1):
        while server.server_state.connections:
            await asyncio.sleep(0.01)


@pytest.mark.both_loops
async def test_a_turn_of_the_loop_parses_some_of_what_came_and_the_others_come_between(port: int) -> None:
    answer = await exchange(port, POST_CHUNKS + chunks(20_000, 64) + b"0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n%d" % (20_000 * 64))
    assert max(PIECES) < 40_000, "a few hundred chunks in a turn"


@pytest.mark.both_loops
async def test_what_waits_to_be_parsed_is_bounded_because_nothing_more_is_read(server: uvicorn.Server, port: int) -> None:
    """Though the application asks for more, each time that it has got some."""
    sending = asyncio.create_task(exchange(port, POST_CHUNKS + chunks(100_000, 64) + b"0\r\n\r\n"))
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
    _, writer = await connect(port, POST_CHUNKS + chunks(20_000, 64))
    await writer.drain()
    writer.transport.abort()
    async with asyncio.timeout(20):
        while server.server_state.connections:
            await asyncio.sleep(0)
