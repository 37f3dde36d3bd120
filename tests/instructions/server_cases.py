"""The cases of the server: a frontend and an engine as they run, but in one thread, and a caller on a connection of its own.

The executor is the synthetic one, so what is counted is everything around a model. What usually runs on other threads is done
where it is asked for: how often a loop looks for messages while it waits for a thread is chance.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors.interface import ExecutorOptions
from shmring.engine.executors.synthetic import SyntheticExecutor
from shmring.frontend.app import create_app
from shmring.frontend.processes.server import Server
from shmring.frontend.settings import FrontendSettings

from . import meter
from .case import Case

_NAME = "instructions-server"
_STALE_S = 1.01  # what /metrics answers is a second old at most


class _InTheLoop:
    """In place of ``ExecutorThread``."""

    def __init__(self, name: str) -> None:
        pass

    async def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def close(self) -> None:
        pass


def _submit(_: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
    """In place of ``ThreadPoolExecutor.submit``."""
    future = Future[Any]()
    try:
        future.set_result(function(*arguments, **named))
    except Exception as error:  # noqa: BLE001 - it is raised where the result is taken
        future.set_exception(error)
    return future


class _Caller:
    """A connection on which one request follows the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def cases(self) -> dict[str, Case]:
        """Returns all cases, by name."""
        text = "What is a ring buffer?"
        pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        picture = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        return {
            "chat": Case(lambda n: self._ask(n, _chat(text, max_tokens=4)), messages=16),
            "streamed token": Case(lambda n: self._stream(n, text), messages=256),
            "chat with a kept picture": Case(lambda n: self._ask(n, _chat(picture, max_tokens=4)), messages=16),
            "/metrics": Case(self._metrics, messages=4),
        }

    async def _ask(self, n: int, request: bytes) -> None:
        for _ in range(n):
            assert await self._exchange(request)

    async def _stream(self, n: int, text: str) -> None:
        answer = await self._exchange(_chat(text, max_tokens=n, stream=True))
        assert answer.count(b"data: {") >= n, answer

    async def _metrics(self, n: int) -> None:
        for _ in range(n):
            meter.let_pass(_STALE_S)
            assert b"shmring_" in await self._exchange(b"GET /metrics HTTP/1.1\r\nhost: test\r\n\r\n")

    async def _exchange(self, request: bytes) -> bytes:
        """Sends a request; returns the body of its answer, or the chunks of that."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200 "), head
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        nbytes = head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        return await self._reader.readexactly(int(nbytes))


def _chat(content: object, **fields: object) -> bytes:
    """Returns the HTTP request of a chat with one message."""
    chat = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": content}], **fields}
    body = json.dumps(chat).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[dict[str, Case]]:
    """Starts an engine and a frontend, and returns all cases, by name."""
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ir-"))
        executor = SyntheticExecutor(ExecutorOptions())
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(mock.patch("shmring.engine.core.ExecutorThread", _InTheLoop))
        core = await EngineCore.create(_NAME, executor, slab_nbytes="64MiB", socket_dir=directory)
        await stack.enter_async_context(core)
        running = asyncio.create_task(core.run())
        stack.push_async_callback(_ended, running)
        engine = await stack.enter_async_context(await EngineClient.connect(_NAME, socket_dir=directory))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        started = asyncio.Event()
        server = Server(
            create_app(engine, FrontendSettings()),
            host="127.0.0.1",
            port=0,
            log_level="warning",
            shutdown_timeout_s=1,
            on_started=started.set,
        )
        serving = asyncio.create_task(server.serve([listening]))
        stack.push_async_callback(_stopped, server, serving)
        await asyncio.wait([serving, waiting := asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED)
        await waiting
        reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=1 << 20)
        stack.callback(writer.close)
        yield _Caller(reader, writer).cases()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _stopped(server: Server, serving: asyncio.Task[None]) -> None:
    server.force_exit = True
    server.stop()
    while not serving.done():
        meter.let_pass(0.1)
        await asyncio.sleep(0)
