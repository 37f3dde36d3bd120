"""How the server of a frontend process ends, with a small application."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shmring.frontend.http.listening import listen, url_of
from shmring.frontend.processes.server import Server
from shmring.frontend.settings import ProcessSettings, TlsSettings
from shmring.service import supervision
from tests.waiting import eventually, pass_time


class Application:
    """Answers ``/slow`` once it may, ``/stream`` with a piece at once and the rest once it may; what is cancelled says so."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.in_flight = 0
        self.told_of_shutdown = False
        self.scope: Any = None
        self.left_at_the_end: int | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
                self.left_at_the_end = self.in_flight
            return
        self.in_flight += 1
        self.scope = scope
        try:
            await self._answer(scope["path"].endswith("/stream"), send)
        finally:
            self.in_flight -= 1

    def begin_shutdown(self) -> None:
        self.told_of_shutdown = True

    def end_watching(self) -> None:
        pass

    def headers_for(self, request_headers: Any) -> list[tuple[bytes, bytes]]:
        return [(b"asked", value) for name, value in request_headers if name == b"origin"]

    async def _answer(self, streamed: bool, send: Any) -> None:
        if streamed:
            await self._say(send, 200, b"first ", more=True)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            if not streamed:
                await self._say(send, 503, b"")
                return
            await asyncio.sleep(0.05)  # telling callers may take a moment
            await send({"type": "http.response.body", "body": b"cancelled"})
            return
        if streamed:
            await send({"type": "http.response.body", "body": b"last"})
        else:
            await self._say(send, 200, b"done")

    @staticmethod
    async def _say(send: Any, status: int, body: bytes, *, more: bool = False) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"transfer-encoding", b"chunked")]})
        await send({"type": "http.response.body", "body": body, "more_body": more})


AT_ANY_PORT = ProcessSettings(port=0)

OpenServer = Callable[..., Awaitable[tuple[Server, Application, httpx.AsyncClient]]]


@pytest.fixture
async def open_server() -> AsyncIterator[OpenServer]:
    """``await open_server(shutdown_timeout_s)``: a server in this process, its application, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_server(
            shutdown_timeout_s: float, settings: ProcessSettings = AT_ANY_PORT
        ) -> tuple[Server, Application, httpx.AsyncClient]:
            listening = stack.enter_context(listen(settings))
            url = "http://server" if settings.uds else url_of(listening, settings.tls)
            verify = True if settings.tls is None else ssl.create_default_context(cafile=settings.tls.certfile)
            transport = httpx.AsyncHTTPTransport(uds=settings.uds, verify=verify)
            application = Application()
            server = Server(
                application,
                host="127.0.0.1",
                port=0,
                log_level="warning",
                shutdown_timeout_s=shutdown_timeout_s,
                on_started=lambda: None,
                tls=settings.tls,
                root_path=settings.root_path,
                timeout_keep_alive_s=settings.timeout_keep_alive_s,
            )
            running = asyncio.create_task(server.serve([listening]))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, transport=transport))
            stack.push_async_callback(end, server, application, running)
            await eventually(lambda: server.started)
            return server, application, client

        async def end(server: Server, application: Application, running: asyncio.Task[None]) -> None:
            server.stop()
            await asyncio.wait_for(running, 30)
            assert application.left_at_the_end == 0

        yield start_server


@pytest.fixture
def open_busy(open_server: OpenServer) -> Callable[..., Awaitable[Any]]:
    """``await open_busy(shutdown_timeout_s, "/slow")``: a server, its application, and requests that are in flight there."""

    async def open_it(
        shutdown_timeout_s: float, *paths: str
    ) -> tuple[Server, Application, httpx.AsyncClient, list[asyncio.Task[httpx.Response]]]:
        server, application, client = await open_server(shutdown_timeout_s)
        requests = [asyncio.create_task(client.get(path)) for path in paths]
        await eventually(lambda: application.in_flight == len(paths))
        return server, application, client, requests

    return open_it


async def test_what_runs_may_end(open_busy: Any) -> None:
    server, application, client, requests = await open_busy(600, "/slow", "/stream")
    assert not application.told_of_shutdown
    server.stop()
    assert application.told_of_shutdown

    async def is_refused() -> bool:
        try:
            async with httpx.AsyncClient(base_url=client.base_url) as another:
                await another.get("/slow", timeout=1)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # accepted just before the port was closed
            pass
        return False

    while not await is_refused():
        await asyncio.sleep(0.01)
    assert not any(task.done() for task in requests)
    application.may_answer.set()
    assert [response.text for response in await asyncio.gather(*requests)] == ["done", "first last"]


@pytest.mark.parametrize("shutdown_timeout_s", [0, 0.05])
async def test_what_does_not_end_is_cancelled_and_can_say_so(open_busy: Any, shutdown_timeout_s: float) -> None:
    server, _, _, requests = await open_busy(shutdown_timeout_s, "/slow", "/stream")
    server.stop()
    slow, stream = await asyncio.wait_for(asyncio.gather(*requests), 30)
    assert (slow.status_code, stream.text) == (503, "first cancelled")


async def test_two_signals_at_once_count_as_a_single_one(open_busy: Any) -> None:
    """`timeout` and `tini -g` signal a process and then its group."""
    server, application, _, requests = await open_busy(600, "/slow")
    server.stop()
    server.stop()
    assert not server.force_exit
    application.may_answer.set()
    assert (await asyncio.wait_for(requests[0], 30)).text == "done"


async def test_draining_twice_is_no_hurry_and_after_a_second_signal_it_waits_no_longer(
    open_busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", -1.0)
    server, application, _, requests = await open_busy(600, "/slow")
    server.drain()
    server.drain()
    assert not application.told_of_shutdown, "the server goes on"
    server.stop()  # for the whole server; the first of its kind
    assert not server.force_exit
    server.stop()
    assert (await asyncio.wait_for(requests[0], 30)).status_code == 503


@pytest.mark.both_loops
async def test_connections_end_when_their_callers_know_or_have_not_used_them_for_a_moment(
    open_server: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.frontend.http.protocol._IDLE_GRACE_S", 600.0)
    server, application, client = await open_server(600, dataclasses.replace(AT_ANY_PORT, timeout_keep_alive_s=600.0))
    application.may_answer.set()
    assert (await client.get("/slow")).text == "done"
    application.may_answer.clear()
    stream = asyncio.create_task(client.get("/stream"))  # on the same connection; its head is sent at once
    await eventually(lambda: application.in_flight == 1)
    host, port = str(client.base_url).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))  # has not asked yet
    await eventually(lambda: len(server.server_state.connections) == 2)
    server.stop()
    await eventually(lambda: not server.servers or not any(each.is_serving() for each in server.servers))
    application.may_answer.set()
    assert (await stream).text == "first last"
    answer = await client.get("/slow")  # on that connection, once more
    assert (answer.text, answer.headers["connection"]) == ("done", "close")
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"connection: close" in await reader.read()  # to its end
    writer.close()
    await eventually(lambda: not server.server_state.connections)


async def test_it_goes_on_listening_for_a_while(open_server: OpenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server, application, client = await open_server(600)
    monkeypatch.setattr(server, "_shutdown_delay_s", 600.0)
    application.may_answer.set()
    server.stop()
    assert application.told_of_shutdown
    for _ in range(2):
        answer = await client.get("/slow")
        assert (answer.text, answer.headers["connection"]) == ("done", "close")
    assert not server.should_exit
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", -1.0)
    server.stop()
    assert server.should_exit


# -- where it listens ---------------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_it_answers_at_a_unix_socket(open_server: OpenServer, tmp_path: Path) -> None:
    server, application, client = await open_server(600, ProcessSettings(uds=str(tmp_path / "s")))
    application.may_answer.set()
    assert (await client.get("/slow")).text == "done"
    assert (await client.get("/stream")).text == "first last"
    server.stop()


@pytest.mark.both_loops
async def test_it_speaks_tls(open_server: OpenServer, certificate: tuple[Path, Path]) -> None:
    tls = TlsSettings(certfile=str(certificate[0]), keyfile=str(certificate[1]))
    _, application, client = await open_server(600, ProcessSettings(port=0, tls=tls))
    application.may_answer.set()
    assert (await client.get("/slow")).text == "done"
    assert (await client.get("/stream")).text == "first last"
    assert application.scope["scheme"] == "https"
    async with httpx.AsyncClient(base_url=str(client.base_url).replace("https", "http")) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get("/slow")
    assert (await client.get("/slow")).text == "done"
    await client.aclose()  # one that stays says no farewell, and TLS would wait ten seconds for it


@pytest.mark.both_loops
async def test_callers_may_have_to_have_a_certificate(open_server: OpenServer, certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = map(str, certificate)
    tls = TlsSettings(certfile=certfile, keyfile=keyfile, ca_certs=certfile, cert_reqs=2)
    _, application, client = await open_server(600, ProcessSettings(port=0, tls=tls))
    application.may_answer.set()
    with pytest.raises(httpx.TransportError):
        await client.get("/slow")
    context = ssl.create_default_context(cafile=certfile)
    context.load_cert_chain(certfile, keyfile)
    async with httpx.AsyncClient(base_url=client.base_url, verify=context) as known:
        assert (await known.get("/slow")).text == "done"


async def test_the_application_says_what_refusals_say_to_browsers(open_server: OpenServer) -> None:
    _, _, client = await open_server(0)
    answer = await client.get("/slow", headers={"host": "a/b", "origin": "https://chat.example.org"})
    assert (answer.status_code, answer.headers["asked"]) == (400, "https://chat.example.org")


async def test_a_prefix_that_a_proxy_strips_is_known(open_server: OpenServer) -> None:
    _, application, client = await open_server(600, dataclasses.replace(AT_ANY_PORT, root_path="/llm"))
    application.may_answer.set()
    assert (await client.get("/slow")).text == "done"
    assert (application.scope["root_path"], application.scope["path"]) == ("/llm", "/llm/slow")


@pytest.mark.adjustable_clock
async def test_a_connection_stays_open_for_as_long_as_it_is_told(open_server: OpenServer) -> None:
    server, application, client = await open_server(600, dataclasses.replace(AT_ANY_PORT, timeout_keep_alive_s=300.0))
    application.may_answer.set()
    assert (await client.get("/slow")).text == "done"
    [connection] = server.server_state.connections
    await pass_time(200.0)
    assert server.server_state.connections == {connection}
    assert (await client.get("/slow")).text == "done"
    assert server.server_state.connections == {connection}
    await pass_time(301.0)
    while server.server_state.connections:
        await asyncio.sleep(0)
