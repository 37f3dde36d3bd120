"""What the frontend's tests share: requests, engines in the test's process, and the application as it runs, over httpx.

There are two engines: a real ring with a small handler, for what an executor might do, and the real engine core with the
synthetic executor, for what depends on its steps.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors.interface import ExecutorOptions
from shmring.engine.executors.synthetic import SyntheticExecutor
from shmring.engine.protocol import (
    Calls,
    EncodeReply,
    EncodeRequest,
    EngineRequestPayload,
    InputSpec,
    ModelDescription,
    Picture,
    PictureSpec,
)
from shmring.frontend.app import create_app
from shmring.frontend.http.protocol import BoundedHttpProtocol
from shmring.frontend.intake import MediaIntake
from shmring.frontend.settings import FrontendSettings
from tests.frontend.talking import MODEL, Talk, say_yes

JSON = {"content-type": "application/json"}

Handler = Callable[[shmring.Claim], Awaitable[None]]
Pixels = np.ndarray[Any, Any]

DESCRIPTION = ModelDescription(
    executor="test",
    model="shmring-fingerprints",
    tasks=["encode"],
    input=InputSpec(picture=PictureSpec()),
    max_batch_size=8,
    embedding_size=4,
)


@dataclasses.dataclass
class RunningEngine:
    """Both ends of an engine that lives in the test's process."""

    client: EngineClient
    ring: shmring.Ring
    core: EngineCore | None = None


OpenEngine = Callable[..., Awaitable[RunningEngine]]


# -- requests ---------------------------------------------------------------------------------------------------------


def _encoded(pixels: Pixels, name: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, name, **options)
    return file.getvalue()


def _body(*pictures: Pixels | bytes, **fields: Any) -> dict[str, Any]:
    files = [picture if isinstance(picture, bytes) else _encoded(picture) for picture in pictures]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode('ascii')}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "shmring-fingerprints", "messages": [{"role": "user", "content": parts}], **fields}


def _embedding(pixels: Pixels) -> list[float]:
    means = torch.from_numpy(pixels.copy()).double().mean(dim=(0, 1))
    vector = torch.cat([means, torch.tensor([float(pixels[0, -1, 0])])])
    numbers: list[float] = torch.nn.functional.normalize(vector, dim=0).float().tolist()
    return numbers


@pytest.fixture
def encoded() -> Callable[..., bytes]:
    """``encoded(pixels, "PNG")``: the file of a picture."""
    return _encoded


@pytest.fixture
def body_of() -> Callable[..., dict[str, Any]]:
    """``body_of(pixels, file, dimensions=2)``: the JSON of a request for the embeddings of pictures."""
    return _body


@pytest.fixture
def chat_of() -> Callable[..., dict[str, Any]]:
    """``chat_of(pixels, file, stream=True)``: the JSON of a conversation about pictures, with the synthetic model."""

    def make(*pictures: Pixels | bytes, **fields: Any) -> dict[str, Any]:
        body = _body(*pictures) | {"model": "shmring-synthetic"}
        body["messages"][0]["content"].insert(0, {"type": "text", "text": "What is this?"})
        return body | fields

    return make


@pytest.fixture
def embedding_of() -> Callable[[Pixels], list[float]]:
    """``embedding_of(pixels)``: what the engine of these tests makes of a picture: anything that tells them apart."""
    return _embedding


# -- both ends ----------------------------------------------------------------------------------------------------------


async def _embed(claim: shmring.Claim) -> None:
    request: EncodeRequest = claim.payload
    pictures = [medium for medium in request.inputs if isinstance(medium, Picture)]
    await claim.reply(EncodeReply(torch.tensor([_embedding(picture.pixels.numpy()) for picture in pictures])))


@pytest.fixture
async def open_engine(serve: Any, socket_dir: Path) -> AsyncIterator[OpenEngine]:
    """``await open_engine(handler, description, **ring_options)``: an engine in this process, and a client of it."""
    async with AsyncExitStack() as stack:

        async def open_ring(
            handler: Handler = _embed, description: ModelDescription = DESCRIPTION, **options: Any
        ) -> RunningEngine:
            async def health() -> None:
                return None

            async def describe() -> Any:
                return msgspec.to_builtins(description)

            async def statistics() -> dict[str, float]:
                return {"ring_slots_in_use": ring.statistics().slots_in_use}

            async def times() -> dict[str, Any]:
                return {}

            async def is_paused() -> bool:
                return False

            calls = {
                Calls.HEALTH: health,
                Calls.DESCRIBE: describe,
                Calls.STATISTICS: statistics,
                Calls.TIMES: times,
                Calls.IS_PAUSED: is_paused,
            }
            ring = await serve(handler, payload_type=EngineRequestPayload, calls=calls, **{"slab_nbytes": "4MiB", **options})
            client = await EngineClient.connect("test", socket_dir=str(socket_dir), lease_nbytes="64KiB")
            return RunningEngine(await stack.enter_async_context(client), ring)

        yield open_ring


@pytest.fixture
async def open_core(socket_dir: Path) -> AsyncIterator[OpenEngine]:
    """``await open_core({"tokens": 5}, **options)``: the engine core with the synthetic executor, and a client of it."""
    async with AsyncExitStack() as stack:

        async def open_engine_core(executor: dict[str, Any] | None = None, **options: Any) -> RunningEngine:
            settings: dict[str, Any] = {"slab_nbytes": "4MiB", "socket_dir": str(socket_dir), **options}
            core = await EngineCore.create("core", SyntheticExecutor(ExecutorOptions(options=executor or {})), **settings)
            await stack.enter_async_context(core)
            running = asyncio.create_task(core.run())
            stack.push_async_callback(_ended, running)
            client = await EngineClient.connect("core", socket_dir=str(socket_dir), lease_nbytes="64KiB")
            return RunningEngine(await stack.enter_async_context(client), core.ring, core)

        yield open_engine_core


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    """Runs an application as a server does: started before, and shut down after."""
    received: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert await sent.get() == {"type": "lifespan.startup.complete"}
    yield
    received.put_nowait({"type": "lifespan.shutdown"})
    assert await sent.get() == {"type": "lifespan.shutdown.complete"}
    await running


@pytest.fixture
async def start_app() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """``await start_app(engine, **settings)``: the application, started."""
    async with AsyncExitStack() as stack:

        async def start(engine: RunningEngine, **settings: Any) -> Any:
            app: Any = create_app(engine.client, FrontendSettings(**settings))
            await stack.enter_async_context(_lifespan(app))
            return app

        yield start


@pytest.fixture
async def open_app(start_app: Any) -> AsyncIterator[Callable[..., Awaitable[httpx.AsyncClient]]]:
    """``await open_app(engine, **settings)``: the application, started, and an HTTP client of it."""
    async with AsyncExitStack() as stack:

        async def open_application(engine: RunningEngine, **settings: Any) -> httpx.AsyncClient:
            app = await start_app(engine, **settings)
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30, headers=JSON)
            return await stack.enter_async_context(client)

        yield open_application


@pytest.fixture
def open_talk(open_engine: OpenEngine, open_app: Any) -> Callable[..., Awaitable[Talk]]:
    """``await open_talk(handler, description, **settings)``: the application with that handler as engine."""

    async def open_one(handler: Handler = say_yes, description: ModelDescription = MODEL, **settings: Any) -> Talk:
        requests: list[Any] = []

        async def note(claim: shmring.Claim) -> None:
            requests.append(claim.payload)
            await handler(claim)

        engine = await open_engine(note, description)
        return Talk(await open_app(engine, **settings), engine, requests)

    return open_one


class _QuietServer(uvicorn.Server):
    """Leaves the signals of the test's process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
async def open_server() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """``await open_server(engine, **settings)``: the application behind our protocol of uvicorn, as it runs; its address."""
    async with AsyncExitStack() as stack:

        async def open_http_server(engine: RunningEngine, **settings: Any) -> str:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            app: Any = create_app(engine.client, FrontendSettings(**settings))
            protocol: Any = BoundedHttpProtocol
            config = uvicorn.Config(app, http=protocol, ws="none", lifespan="on", log_config=None, timeout_graceful_shutdown=1)
            server = _QuietServer(config)
            stack.push_async_callback(_stopped, server, asyncio.create_task(server.serve([listening])))
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield open_http_server


async def _stopped(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    server.should_exit = True
    await task


@pytest.fixture
async def open_intake() -> AsyncIterator[Any]:
    """``open_intake(engine, **settings)``: an intake, closed at the end."""
    intakes: list[MediaIntake] = []

    def make(engine: Any, **settings: Any) -> MediaIntake:
        intakes.append(MediaIntake(engine.client, FrontendSettings(**settings)))
        return intakes[-1]

    yield make
    for intake in intakes:
        await intake.close()


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """Anthropic's client. It is made of three thousand modules, which only a worker that runs one of its tests imports."""
    import anthropic

    return anthropic


@pytest.fixture
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of ``/metrics`` is made anew."""
    monkeypatch.setattr("shmring.frontend.app._METRICS_AGE_S", 0.0)
