"""``python -m frontend`` as a process attached to a ring of this process; and how its server ends, with a small application."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import shmring
from frontend import __main__ as frontend_main
from frontend.__main__ import _Place, _Server

ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start(socket_dir: Path) -> AsyncIterator[Start]:
    """``await start("--port=0", pass_fds=())``: a frontend of the engine "test"."""
    processes: list[asyncio.subprocess.Process] = []

    async def run(*arguments: str, pass_fds: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
        command = ("-m", "frontend", "--name=test", f"--socket-dir={socket_dir}", "--log-level=warning", *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, *command, env=environment, pass_fds=pass_fds, stderr=asyncio.subprocess.PIPE
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_serves_on_an_inherited_socket_until_a_signal_ends_it(
    start: Start, open_engine: Any, body_of: Any, embedding_of: Any, eventually: Any
) -> None:
    engine = await open_engine()
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = await start(
            f"--listen-fd={listening.fileno()}", f"--ready-fd={writing}", pass_fds=(listening.fileno(), writing)
        )
        os.close(writing)
        with os.fdopen(reading) as ready:
            assert await asyncio.to_thread(ready.read) == "\n"
        assert engine.ring.statistics().clients == 2
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
            response = await http.post("/v1/embeddings", json=body_of(pixels))
        [item] = response.json()["data"]
        np.testing.assert_allclose(item["embedding"], embedding_of(pixels), rtol=1e-6)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    await eventually(lambda: engine.ring.statistics().clients == 1)
    assert engine.ring.statistics().departed_clients == 0  # it said goodbye


@pytest.mark.parametrize("parent_pid", [1, 2**22 + 1])  # one that lives and is another's parent; one that can't be
async def test_it_ends_at_once_if_its_parent_has_gone(start: Start, open_engine: Any, parent_pid: int) -> None:
    await open_engine()
    process = await start("--port=0", f"--parent-pid={parent_pid}")
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGTERM


async def test_a_port_in_use_is_a_clear_line(start: Start, open_engine: Any) -> None:
    await open_engine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(f"--port={taken.getsockname()[1]}")
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    assert b"address already in use" in errors
    assert b"Traceback" not in errors


async def test_it_waits_for_an_engine_that_is_late(start: Start, open_engine: Any, eventually: Any) -> None:
    process = await start("--port=0", "--connect-timeout=60")
    await eventually(lambda: b"uvloop" in Path(f"/proc/{process.pid}/maps").read_bytes(), 60)  # it has been imported
    engine = await open_engine()
    await eventually(lambda: engine.ring.statistics().clients == 2, 60)


async def test_it_does_not_wait_for_ever(start: Start) -> None:
    process = await start("--port=0", "--connect-timeout=0.1")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert errors.startswith(b"shmring frontend: no engine")
    assert b"Traceback" not in errors


async def test_it_leaves_with_an_answer_for_whoever_still_waits(
    start: Start, open_engine: Any, body_of: Any, eventually: Any
) -> None:
    release = asyncio.Event()

    async def wait(claim: shmring.Claim) -> None:
        await release.wait()

    engine = await open_engine(wait)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        process = await start(f"--listen-fd={listening.fileno()}", "--shutdown-timeout=0.25", pass_fds=(listening.fileno(),))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}", timeout=60) as http:
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body_of(np.zeros((4, 4, 3), np.uint8))))
            await eventually(lambda: engine.ring.statistics().running == 1, 60)
            process.send_signal(signal.SIGTERM)
            response = await asyncio.wait_for(asking, 30)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert await asyncio.wait_for(process.wait(), 30) == 0
    release.set()
    await eventually(lambda: engine.ring.statistics().slots_in_use == 0)
    assert engine.ring.statistics().departed_clients == 0  # it said goodbye


# -- how a server ends --------------------------------------------------------------------------------------------------


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


OpenServer = Callable[..., Awaitable[tuple[_Server, Application, httpx.AsyncClient]]]


@pytest.fixture
async def open_server(eventually: Any) -> AsyncIterator[OpenServer]:
    """``await open_server(shutdown_timeout_s)``: a server in this process, its application, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(shutdown_timeout_s: float) -> tuple[_Server, Application, httpx.AsyncClient]:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            application = Application()
            place = _Place(
                name="test",
                socket_dir=None,
                host="127.0.0.1",
                port=0,
                listen_fd=None,
                ready_fd=None,
                parent_pid=None,
                connect_timeout_s=1.0,
                shutdown_timeout_s=shutdown_timeout_s,
                log_level="warning",
            )
            server = _Server(application, place)
            running = asyncio.create_task(server.serve([listening]))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            stack.push_async_callback(end, server, application, running)
            await eventually(lambda: server.started)
            return server, application, client

        async def end(server: _Server, application: Application, running: asyncio.Task[None]) -> None:
            server.stop()
            await asyncio.wait_for(running, 30)
            assert application.left_at_the_end == 0

        yield open_one


async def test_what_runs_may_end(open_server: OpenServer, eventually: Any) -> None:
    server, application, client = await open_server(600)
    asking = [asyncio.create_task(client.get(path)) for path in ("/slow", "/stream")]
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
    assert not any(task.done() for task in asking)
    application.may_answer.set()
    assert [response.text for response in await asyncio.gather(*asking)] == ["done", "first last"]


@pytest.mark.parametrize("shutdown_timeout_s", [0, 0.05])
async def test_what_does_not_end_is_cancelled_and_can_say_so(
    open_server: OpenServer, eventually: Any, shutdown_timeout_s: float
) -> None:
    server, application, client = await open_server(shutdown_timeout_s)
    asking = [asyncio.create_task(client.get(path)) for path in ("/slow", "/stream")]
    await eventually(lambda: application.in_flight == 2)
    server.stop()
    slow, stream = await asyncio.wait_for(asyncio.gather(*asking), 30)
    assert (slow.status_code, stream.text) == (503, "first cancelled")


async def test_told_twice_at_once_it_was_told_once(open_server: OpenServer, eventually: Any) -> None:
    """`timeout` and `tini -g` signal a process and then its group."""
    server, application, client = await open_server(600)
    asking = asyncio.create_task(client.get("/slow"))
    await eventually(lambda: application.in_flight == 1)
    server.stop()
    server.stop()
    assert not server.force_exit
    application.may_answer.set()
    assert (await asyncio.wait_for(asking, 30)).text == "done"


async def test_told_twice_it_waits_no_longer(open_server: OpenServer, eventually: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_main, "_SAME_SIGNAL_S", -1.0)
    server, application, client = await open_server(600)
    asking = asyncio.create_task(client.get("/slow"))
    await eventually(lambda: application.in_flight == 1)
    server.stop()
    assert not server.force_exit
    server.stop()
    assert (await asyncio.wait_for(asking, 30)).status_code == 503
