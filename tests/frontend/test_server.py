"""How the server of a frontend process ends, with a small application."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from frontend import server as server_module
from frontend.server import Server


class Application:
    """Answers ``/slow`` once it may, ``/stream`` with a piece at once and the rest once it may; what is cancelled says so."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.in_flight = 0
        self.told_of_shutdown = False
        self.left_at_the_end: int | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
                self.left_at_the_end = self.in_flight
            return
        self.in_flight += 1
        try:
            await self._answer(scope["path"] == "/stream", send)
        finally:
            self.in_flight -= 1

    def begin_shutdown(self) -> None:
        self.told_of_shutdown = True

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


OpenServer = Callable[..., Awaitable[tuple[Server, Application, httpx.AsyncClient]]]


@pytest.fixture
async def open_server(eventually: Any) -> AsyncIterator[OpenServer]:
    """``await open_server(shutdown_timeout_s)``: a server in this process, its application, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_server(shutdown_timeout_s: float) -> tuple[Server, Application, httpx.AsyncClient]:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            application = Application()
            server = Server(
                application,
                host="127.0.0.1",
                port=0,
                log_level="warning",
                shutdown_timeout_s=shutdown_timeout_s,
                on_started=lambda: None,
            )
            running = asyncio.create_task(server.serve([listening]))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            stack.push_async_callback(end, server, application, running)
            await eventually(lambda: server.started)
            return server, application, client

        async def end(server: Server, application: Application, running: asyncio.Task[None]) -> None:
            server.stop()
            await asyncio.wait_for(running, 30)
            assert application.left_at_the_end == 0

        yield start_server


async def test_what_runs_may_end(open_server: OpenServer, eventually: Any) -> None:
    server, application, client = await open_server(600)
    requests = [asyncio.create_task(client.get(path)) for path in ("/slow", "/stream")]
    await eventually(lambda: application.in_flight == 2)
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
async def test_what_does_not_end_is_cancelled_and_can_say_so(
    open_server: OpenServer, eventually: Any, shutdown_timeout_s: float
) -> None:
    server, application, client = await open_server(shutdown_timeout_s)
    requests = [asyncio.create_task(client.get(path)) for path in ("/slow", "/stream")]
    await eventually(lambda: application.in_flight == 2)
    server.stop()
    slow, stream = await asyncio.wait_for(asyncio.gather(*requests), 30)
    assert (slow.status_code, stream.text) == (503, "first cancelled")


async def test_two_signals_at_once_count_as_a_single_one(open_server: OpenServer, eventually: Any) -> None:
    """`timeout` and `tini -g` signal a process and then its group."""
    server, application, client = await open_server(600)
    request = asyncio.create_task(client.get("/slow"))
    await eventually(lambda: application.in_flight == 1)
    server.stop()
    server.stop()
    assert not server.force_exit
    application.may_answer.set()
    assert (await asyncio.wait_for(request, 30)).text == "done"


async def test_after_a_second_signal_it_waits_no_longer(
    open_server: OpenServer, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_SAME_SIGNAL_S", -1.0)
    server, application, client = await open_server(600)
    request = asyncio.create_task(client.get("/slow"))
    await eventually(lambda: application.in_flight == 1)
    server.stop()
    assert not server.force_exit
    server.stop()
    assert (await asyncio.wait_for(request, 30)).status_code == 503
