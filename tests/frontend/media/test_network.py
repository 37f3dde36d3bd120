"""Fetching over HTTP, from a real server on the loopback device: what is listed and acceptable comes back, within its bounds;
everything else is a MediaError, and no connection is made that should not be.

Names of hosts are given addresses by a resolver of these tests; nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import logging
import socket
import ssl
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shmring.frontend.callers.caller import caller
from shmring.frontend.media import network
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.network import Connector, RemoteClient, is_acceptable, parse_networks
from shmring.frontend.media.urls import AllowedHosts
from tests.tables import for_each
from tests.waiting import eventually

LIMIT = 1 << 20

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """An HTTP server that sends the bytes that a test gives it, exactly.

    Attributes:
        requests: the heads of the requests it got.
        connections: how many were made to it.
        answers: by path: bytes to send before the connection is closed, or a function that sends something.
        greeting: does everything instead, if it is there.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.connections = 0
        self.answers: dict[str, bytes | Answer] = {}
        self.port = 0
        self.greeting: Answer | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def url(self, path: str = "/", host: str = "media.test") -> str:
        return f"http://{host}:{self.port}{path}"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if self.greeting is not None:
                await self.greeting(reader, writer)
                return
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            answer = self.answers[head.split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)


def answer_of(body: bytes = b"", status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def redirect_to(location: str, status: str = "302 Found") -> bytes:
    return answer_of(b"moved", status, f"Location: {location}")


@contextlib.asynccontextmanager
async def serving(address: str = "127.0.0.1", **options: Any) -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.accept, address, 0, **options)
    async with listener:
        server.port = listener.sockets[0].getsockname()[1]
        yield server
    for task in server.tasks:
        task.cancel()
    outcomes = await asyncio.gather(*server.tasks, return_exceptions=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as running:
        yield running


class Names:
    """A resolver: each answer is given once, the last one again and again."""

    def __init__(self, **addresses: Sequence[Sequence[str]]) -> None:
        self.addresses = {name.replace("_", "."): list(answers) for name, answers in addresses.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.addresses.get(host)
        if not answers:
            raise OSError(f"{host} is not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
async def open_client(server: Server) -> AsyncIterator[Callable[..., RemoteClient]]:
    """``open_client(names, "other.test")``: a client that may fetch from those, and from media.test, at the server's port.

    Or ``hosts`` says from where alone, and ``allowed`` the networks that these may be in.
    """
    async with contextlib.AsyncExitStack() as stack:

        def open_client(
            names: Names | None = None,
            *domains: str,
            hosts: Sequence[str] | None = None,
            allowed: Sequence[str] = ("127.0.0.1/32",),
            **options: Any,
        ) -> RemoteClient:
            listed = AllowedHosts(hosts or [f"{domain}:{server.port}" for domain in ("media.test", *domains)])
            resolver = Names(media_test=[["127.0.0.1"]]) if names is None else names
            options = {"timeout_s": 10.0, "max_redirects": 3, "ssl_context": ssl.create_default_context()} | options
            client = RemoteClient(listed, parse_networks(allowed), resolver=resolver, **options)
            stack.push_async_callback(client.close)
            return client

        yield open_client


# -- what comes back ----------------------------------------------------------------------------------------------------


async def test_a_medium_arrives_unchanged(server: Server, open_client: Any) -> None:
    server.answers["/a?b=c"] = answer_of(b"some bytes")
    assert await open_client().get(server.url("/a?b=c#d"), LIMIT) == b"some bytes"
    (request,) = server.requests
    line, *headers = request.strip().split("\r\n")
    assert line == "GET /a?b=c HTTP/1.1"
    assert sorted(headers) == [
        "Accept-Encoding: identity",
        "Accept: */*",
        "Connection: close",
        f"Host: media.test:{server.port}",
        "User-Agent: shmring",
    ]


async def test_chunks_are_joined_and_large_bodies_arrive_up_to_the_limit_itself(server: Server, open_client: Any) -> None:
    body = bytes(range(256)) * 2048
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[i : i + 999] for i in range(0, len(body), 999)))
    server.answers["/"] = answer_of(body)
    server.answers["/chunks"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    server.answers["/until-the-end"] = b"HTTP/1.0 200 OK\r\n\r\n" + body
    client = open_client()
    for path in server.answers:
        assert await client.get(server.url(path), len(body)) == body


async def test_fetches_have_nothing_in_common(server: Server, open_client: Any) -> None:
    server.answers["/"] = answer_of(b"x", "200 OK", "Set-Cookie: a=b", "Connection: keep-alive")
    client = open_client()
    for _ in range(2):
        assert await client.get(server.url(), LIMIT) == b"x"
    assert server.connections == 2
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answer_of(bytes(101)), "has 101 bytes, more than the 100"),
        (answer_of(length=10**15), "more than the 100"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(101), "more than the 100"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + bytes(101) + b"\r\n0\r\n\r\n", "more than the 100"),
        (answer_of(b"short", length=50), "ended the connection"),
        (answer_of(b"x", "200 OK", "Content-Length: 2"), "broke the rules"),
        (answer_of(b"x", "200 OK", "Content-Length: -1"), "broke the rules"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "broke the rules"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broke the rules"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "broke the rules"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n", "broke the rules"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "broke the rules"),
        (b"", "ended the connection"),
        (answer_of(gzip.compress(b"x", mtime=0), "200 OK", "Content-Encoding: gzip"), "compressed"),
        (answer_of(b"x", "200 OK", "Content-Encoding: identity, br"), "compressed"),
        (answer_of(b"secret", "404 Not Found"), "status 404"),
        (answer_of(b"secret", "500 secret"), "status 500"),
        (answer_of(b"", "204 No Content"), "status 204"),
        (answer_of(b"x", "206 Partial Content"), "status 206"),
        (answer_of(b"", "304 Not Modified"), "status 304"),
        (answer_of(b"", "101 Switching Protocols"), "broke the rules"),
        (answer_of(b"  <!doctype html>secret", "200 OK", "Content-Type: Text/HTML; charset=utf-8"), "web page"),
    ],
)
async def test_answers_that_are_refused(server: Server, open_client: Any, answer: bytes, reason: str) -> None:
    server.answers["/"] = answer
    with pytest.raises(MediaError, match=reason) as caught:
        await open_client().get(server.url(), 100)
    assert "secret" not in str(caught.value)


async def test_a_medium_that_is_called_a_web_page_is_still_one(server: Server, open_client: Any) -> None:
    server.answers["/"] = answer_of(b"\xff\xd8picture", "200 OK", "Content-Type: text/html")
    assert await open_client().get(server.url(), LIMIT) == b"\xff\xd8picture"


async def test_an_endless_body_is_cut_off_and_costs_no_more_than_the_limit(server: Server, open_client: Any) -> None:
    left: list[str] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        try:
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        except ConnectionError:
            left.append("the client")

    server.answers["/"] = endless
    client = open_client()
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match="more than the 4194304"):
            await client.get(server.url(), 4 << 20)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 10 << 20
    await eventually(lambda: left)


async def test_tiny_pieces_let_the_loop_go_on(server: Server, open_client: Any) -> None:
    server.answers["/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = await open_client().get(server.url(), LIMIT)
    counting.cancel()
    assert body == b"x" * 20_000
    assert turns > 1000  # the 120 KB are a handful of reads


# -- time ---------------------------------------------------------------------------------------------------------------


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client has gone


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not reader.at_eof():
        writer.write(b"x")
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.02)


@pytest.mark.both_loops
@pytest.mark.parametrize(("scheme", "answer"), [("http", hang), ("http", drip), ("https", hang)])
async def test_a_slow_host_is_given_up(server: Server, open_client: Any, answer: Answer, scheme: str) -> None:
    ended: list[bool] = []

    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            ended.append(True)

    if scheme == "https":  # it does not even shake hands
        server.greeting = watched
    server.answers["/"] = watched
    client = open_client(timeout_s=0.2)
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.timeout(60):
        with pytest.raises(MediaError, match=r"within 0\.2 s"):
            await client.get(f"{scheme}://media.test:{server.port}/", LIMIT)
    assert loop.time() - start > 0.15
    await eventually(lambda: ended)


async def test_redirects_share_one_deadline(server: Server, open_client: Any) -> None:
    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        writer.write(redirect_to("/"))
        await writer.drain()

    server.answers["/"] = later
    with pytest.raises(MediaError, match=r"within 0\.25 s"):
        await open_client(timeout_s=0.25, max_redirects=1000).get(server.url(), LIMIT)


async def test_a_resolver_that_hangs_is_given_up(server: Server, open_client: Any) -> None:
    class Hanging(Names):
        async def __call__(self, host: str, port: int) -> Sequence[str]:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(MediaError, match=r"within 0\.1 s"):
        await open_client(Hanging(), timeout_s=0.1).get(server.url(), LIMIT)


async def test_a_caller_with_slow_hosts_keeps_no_other_caller_from_fetching(
    server: Server, open_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MAX_CONNECTIONS", 4)
    server.answers["/slow"] = hang
    server.answers["/fast"] = answer_of(b"x")
    client = open_client(timeout_s=60)

    async def get(who: str, path: str) -> bytes:
        caller.set(who)
        content: bytes = await client.get(server.url(path), LIMIT)
        return content

    slow = [asyncio.create_task(get("greedy", "/slow")) for _ in range(10)]
    await eventually(lambda: len(server.requests) == 2)
    assert await asyncio.wait_for(get("other", "/fast"), 20) == b"x"
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_names_that_nobody_resolves_hold_no_threads_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when those who have asked for them have given up: nobody can interrupt such a thread."""
    silent, asked = threading.Event(), []
    resolved = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "silent.test":
            asked.append(host)
            silent.wait()
            raise OSError("no such name")
        return resolved(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        async with serving() as server:
            connector = Connector(parse_networks(["127.0.0.0/8", "::1/128"]))

            async def connect(who: str, host: str) -> None:
                caller.set(who)
                stream = await connector.connect(host, server.port)
                await stream.aclose()

            for _ in range(2):
                asking = [asyncio.create_task(connect("greedy", "silent.test")) for _ in range(40)]
                await eventually(lambda: len(asked) == network._MAX_LOOKUPS // 2)
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)
            await asyncio.wait_for(connect("other", "localhost"), 20)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 20) == 7
            silent.set()
            await asyncio.wait_for(connect("greedy", "localhost"), 20)
            assert len(asked) == network._MAX_LOOKUPS // 2
    finally:
        silent.set()


async def test_waiting_for_a_turn_counts_and_a_cancelled_fetch_passes_its_turn_on(
    server: Server, open_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MAX_CONNECTIONS", 1)
    server.answers["/slow"] = hang
    server.answers["/fast"] = answer_of(b"x")
    client = open_client(timeout_s=0.2)
    slow = asyncio.create_task(client.get(server.url("/slow"), LIMIT))
    await eventually(lambda: server.requests)
    fast = [asyncio.create_task(client.get(server.url("/fast"), LIMIT)) for _ in range(3)]
    await asyncio.sleep(0)  # they are in line
    fast[0].cancel()
    for outcome in await asyncio.gather(slow, *fast[1:], return_exceptions=True):
        assert outcome == b"x" or (isinstance(outcome, MediaError) and "within 0.2 s" in str(outcome))
    assert fast[0].cancelled()
    assert server.connections <= 3
    monkeypatch.setattr(client, "_timeout_s", 10)
    assert await client.get(server.url("/fast"), LIMIT) == b"x"


async def test_closing_ends_what_is_under_way(server: Server, open_client: Any) -> None:
    server.answers["/"] = hang
    client = open_client()
    fetching = asyncio.create_task(client.get(server.url(), LIMIT))
    await eventually(lambda: server.requests)
    await client.close()
    with pytest.raises(MediaError, match="ended the connection"):
        await fetching


# -- redirects ----------------------------------------------------------------------------------------------------------


@for_each("status", ["301 x", "302 x", "303 x", "307 x", "308 x"])
async def test_redirects_are_followed(server: Server, open_client: Any, status: str) -> None:
    server.requests.clear()
    server.answers["/a"] = redirect_to("/b", status)
    server.answers["/b"] = redirect_to(f"http://other.test:{server.port}/c", status)
    server.answers["/c"] = redirect_to(f"//media.test:{server.port}/d", status)
    server.answers["/d"] = answer_of(b"here")
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    assert await open_client(names, "other.test").get(server.url("/a"), LIMIT) == b"here"
    assert len(server.requests) == 4


@for_each("max_redirects", [0, 3])
async def test_no_more_redirects_are_followed_than_are_accepted(server: Server, open_client: Any, max_redirects: int) -> None:
    server.requests.clear()
    for here, there in zip("abcd", "bcde", strict=True):
        server.answers[f"/{here}"] = redirect_to(there)
    server.answers |= {"/": redirect_to("/"), "/e": answer_of(b"here")}
    client = open_client(max_redirects=max_redirects)
    for path in ("/a", "/"):
        with pytest.raises(MediaError, match=f"more than {max_redirects} times"):
            await client.get(server.url(path), LIMIT)
    assert len(server.requests) == 2 * (max_redirects + 1)
    assert await client.get(server.url(f"/{'eb'[max_redirects > 0]}"), LIMIT) == b"here"


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "not of the form"),
        ("http://unlisted.test/secret", "fetches media from"),
        ("http://127.0.0.1:{port}/secret", "fetches media from"),
        ("http://media.test/secret", "fetches media from"),
        ("http://secret@media.test:{port}/", "user's name"),
        ("http://private.test:{port}/secret", "does not connect to"),
        ("http://mixed.test:{port}/secret", "does not connect to"),
        ("http://unknown.test:{port}/secret", "no address of the host"),
    ],
)
async def test_where_a_redirect_leads_is_checked_again(server: Server, open_client: Any, location: str, reason: str) -> None:
    server.answers["/"] = redirect_to(location.format(port=server.port))
    names = Names(media_test=[["127.0.0.1"]], private_test=[["10.0.0.1"]], mixed_test=[["127.0.0.1", "127.0.0.2"]])
    client = open_client(names, "private.test", "mixed.test", "unknown.test")
    with pytest.raises(MediaError, match=reason) as caught:
        await client.get(server.url(), LIMIT)
    assert "secret" not in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("headers", [(), ("Location: /a", "Location: /b")])
async def test_a_redirect_says_once_where_to(server: Server, open_client: Any, headers: tuple[str, ...]) -> None:
    server.answers["/"] = answer_of(b"", "302 Found", *headers)
    with pytest.raises(MediaError, match="does not say where to"):
        await open_client().get(server.url(), LIMIT)


# -- addresses ----------------------------------------------------------------------------------------------------------


async def test_a_host_that_is_not_listed_is_not_even_looked_up(server: Server, open_client: Any) -> None:
    names = Names(media_test=[["127.0.0.1"]])
    client = open_client(names)
    for url in (f"http://other.test:{server.port}/", f"http://localhost:{server.port}/", "http://media.test/"):
        with pytest.raises(MediaError, match="is not a host and port that this server fetches media from"):
            await client.get(url, LIMIT)
    assert names.asked == []
    assert server.connections == 0


async def test_a_listed_address_must_be_acceptable_too(server: Server, open_client: Any) -> None:
    server.answers["/"] = answer_of(b"x")
    client = open_client(Names(), "127.0.0.1", "127.0.0.2", "[::1]")
    assert await client.get(f"http://127.0.0.1:{server.port}/", LIMIT) == b"x"
    for host in ("127.0.0.2", "[::1]"):
        with pytest.raises(MediaError, match="does not connect to"):
            await client.get(f"http://{host}:{server.port}/", LIMIT)


async def test_addresses_of_the_sixth_version(open_client: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(serving("::1"))
        except OSError:
            pytest.skip("this machine has no IPv6")
        server.answers["/"] = answer_of(b"x")
        client = open_client(Names(), hosts=[f"[::1]:{server.port}"], allowed=["::1/128"])
        assert await client.get(server.url(host="[0::1]"), LIMIT) == b"x"
        assert f"\r\nHost: [::1]:{server.port}\r\n" in server.requests[0]


async def test_a_name_is_resolved_once_and_that_address_is_connected_to(server: Server, open_client: Any) -> None:
    server.answers["/"] = answer_of(b"x", "200 OK", "Connection: close")
    names = Names(media_test=[["127.0.0.1"], ["127.0.0.2"]])  # it would be refused, if it were asked for
    client = open_client(names)
    assert await client.get(server.url(), LIMIT) == b"x"
    assert names.asked == ["media.test"]
    with pytest.raises(MediaError, match="does not connect to"):  # another connection, another look
        await client.get(server.url(), LIMIT)
    assert server.connections == 1


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1", "10.0.0.1"],
        ["10.0.0.1", "127.0.0.1"],
        ["::1", "127.0.0.1"],
        ["127.0.0.1", "8.8.8.8", "169.254.169.254"],
        ["::ffff:127.0.0.2"],
        ["fe80::1%lo"],
    ],
)
async def test_every_address_must_be_acceptable(server: Server, open_client: Any, addresses: list[str]) -> None:
    with pytest.raises(MediaError, match="has an address that this server does not connect to") as caught:
        await open_client(Names(media_test=[addresses])).get(server.url(), LIMIT)
    assert not any(address in str(caught.value) for address in addresses), "callers need not know addresses of the inside"
    assert server.connections == 0


async def test_the_next_address_is_tried(server: Server, open_client: Any) -> None:
    server.answers["/"] = answer_of(b"x")
    client = open_client(Names(media_test=[["127.0.0.2", "127.0.0.1"]]), allowed=["127.0.0.0/8"])
    assert await client.get(server.url(), LIMIT) == b"x"


async def test_a_host_that_does_not_answer(open_client: Any) -> None:
    async with serving() as other:
        pass
    with pytest.raises(MediaError, match="connection to the host could not be made"):
        await open_client(hosts=[f"media.test:{other.port}"]).get(other.url(), LIMIT)


@pytest.mark.both_loops
async def test_the_default_resolver_is_the_systems() -> None:
    async with serving() as server:
        server.answers["/"] = answer_of(b"x")
        stream = await Connector(parse_networks(["127.0.0.0/8", "::1/128"])).connect("localhost", server.port)
        await stream.aclose()
        with pytest.raises(MediaError, match="does not connect to"):
            await Connector(()).connect("localhost", server.port)
        with pytest.raises(MediaError, match="no address"):
            await Connector(()).connect("nothing.invalid", server.port)


PUBLIC = ["8.8.8.8", "93.184.216.34", "2001:4860:4860::8888", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "169.254.169.254"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.9", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1"),
    *("198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("168.63.129.16", "::", "::1", "::2", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0.0.0.0"),
    *("::ffff:0:8.8.8.8", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1"),
    *("2001::1", "2001:0:5ef5:79fb::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::"),
    *("2002:808:808::1", "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1"),
    *("ff0e::1", "fe80::1%eth0"),
]


@pytest.mark.parametrize("address", [*PUBLIC, *NOT_PUBLIC])
def test_addresses_of_the_internet_are_acceptable_and_no_others(address: str) -> None:
    assert is_acceptable(ipaddress.ip_address(address)) is (address in PUBLIC)


@for_each(
    ("address", "expected"),
    [
        *(("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("64:ff9b::10.1.2.3", False), ("10.2.0.0", False)),
        *(("11.0.0.0", True), ("fd00::1", True), ("fd01::1", False), ("127.0.0.1", False)),  # the first one is public
    ],
)
def test_networks_can_be_allowed(address: str, expected: bool) -> None:
    assert is_acceptable(ipaddress.ip_address(address), parse_networks(["10.1.0.0/16", "fd00::/64"])) is expected


@for_each("text", ["", "10.0.0.0/33", "10.0.0.1/8", "example.org", "10.0/8"])
def test_other_networks_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_networks([text])


# -- what is said -------------------------------------------------------------------------------------------------------


async def test_logs_name_no_more_than_hosts(server: Server, open_client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.NOTSET, logger="httpcore")  # and back, afterwards
    server.answers["/secret?secret"] = redirect_to("/more-secrets")
    server.answers["/more-secrets"] = answer_of(b"secret", "200 OK", "X-Secret: secret")
    assert await open_client().get(server.url("/secret?secret"), LIMIT) == b"secret"
    assert "media.test" in caplog.text
    assert "secret" not in caplog.text.lower()


async def test_errors_hold_nothing_of_what_was_sent(server: Server, open_client: Any) -> None:
    server.answers["/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nsecret\r\nsecret"
    with pytest.raises(MediaError) as caught:
        await open_client().get(server.url(), LIMIT)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


# -- TLS ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(certificate_of: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    """A certificate for media.test, and its key."""
    return certificate_of("media.test", "DNS:media.test")


@pytest.fixture
async def tls_server(certificate: tuple[Path, Path]) -> AsyncIterator[Server]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with serving(ssl=context) as running:
        yield running


@pytest.fixture
def tls_client(tls_server: Server, certificate: tuple[Path, Path], open_client: Any) -> RemoteClient:
    """Trusts the certificate; both hosts are at the server."""
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    hosts = [f"{name}:{tls_server.port}" for name in ("media.test", "other.test")]
    client: RemoteClient = open_client(names, hosts=hosts, ssl_context=ssl.create_default_context(cafile=str(certificate[0])))
    return client


async def test_certificates_are_checked_against_the_name(tls_server: Server, tls_client: RemoteClient) -> None:
    tls_server.answers["/"] = answer_of(b"x")
    assert await tls_client.get(f"https://media.test:{tls_server.port}/", LIMIT) == b"x"
    with pytest.raises(MediaError, match="certificate is not valid"):
        await tls_client.get(f"https://other.test:{tls_server.port}/", LIMIT)


async def test_unknown_authorities_are_not_trusted(tls_server: Server, open_client: Any) -> None:
    client = open_client(hosts=[f"media.test:{tls_server.port}"], ssl_context=None)
    with pytest.raises(MediaError, match="certificate is not valid"):
        await client.get(f"https://media.test:{tls_server.port}/", LIMIT)


async def test_a_redirect_does_not_leave_tls(tls_server: Server, tls_client: RemoteClient) -> None:
    tls_server.answers["/"] = redirect_to(f"http://media.test:{tls_server.port}/")
    with pytest.raises(MediaError, match="from https: to http:"):
        await tls_client.get(f"https://media.test:{tls_server.port}/", LIMIT)


async def test_a_server_without_tls(server: Server, open_client: Any) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer_of(b"x"))
        await writer.drain()

    server.greeting = greet
    with pytest.raises(MediaError, match="connection to the host could not be made"):
        await open_client().get(f"https://media.test:{server.port}/", LIMIT)
