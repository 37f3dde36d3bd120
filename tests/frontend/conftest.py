"""What the frontend's tests share: requests, an engine that is a real ring with a small handler, and the application as it
runs, over httpx."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import shmring
from engine.client import EngineClient
from engine.protocol import CALL_DESCRIBE, CALL_HEALTH, CALL_STATISTICS, EncodeReply, EncodeRequest, ModelDescription
from frontend.app import create_app
from frontend.settings import FrontendSettings

Handler = Callable[[shmring.Claim], Awaitable[None]]
Pixels = np.ndarray[Any, Any]


@dataclasses.dataclass
class RunningEngine:
    """Both ends of an engine that lives in the test's process."""

    client: EngineClient
    ring: shmring.Ring


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
    return {"model": "shmring-features", "messages": [{"role": "user", "content": parts}], **fields}


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
def embedding_of() -> Callable[[Pixels], list[float]]:
    """``embedding_of(pixels)``: what the engine of these tests makes of a picture: anything that tells them apart."""
    return _embedding


# -- both ends ----------------------------------------------------------------------------------------------------------


async def _embed(claim: shmring.Claim) -> None:
    request: EncodeRequest = claim.payload
    await claim.reply(EncodeReply(torch.tensor([_embedding(picture.pixels.numpy()) for picture in request.pictures])))


@pytest.fixture
async def open_engine(serve: Any, socket_dir: Path) -> AsyncIterator[OpenEngine]:
    """``await open_engine(handler, **ring_options)``: an engine in this process, and a client of it."""
    async with AsyncExitStack() as stack:

        async def open_one(handler: Handler = _embed, **options: Any) -> RunningEngine:
            async def health() -> None:
                return None

            async def describe() -> ModelDescription:
                return ModelDescription("test", ["encode"], 4, 8)

            async def statistics() -> dict[str, float]:
                return {"ring_slots_in_use": ring.statistics().slots_in_use}

            calls = {CALL_HEALTH: health, CALL_DESCRIBE: describe, CALL_STATISTICS: statistics}
            ring = await serve(handler, payload_type=EncodeRequest, calls=calls, **{"slab_nbytes": "4MiB", **options})
            client = await EngineClient.connect("test", socket_dir=str(socket_dir), lease_nbytes="64KiB")
            return RunningEngine(await stack.enter_async_context(client), ring)

        yield open_one


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
async def open_app(open_engine: OpenEngine) -> AsyncIterator[Callable[..., Awaitable[httpx.AsyncClient]]]:
    """``await open_app(engine, **settings)``: the application, started, and an HTTP client of it."""
    async with AsyncExitStack() as stack:

        async def open_one(engine: RunningEngine, **settings: Any) -> httpx.AsyncClient:
            app: Any = create_app(engine.client, FrontendSettings(**settings))
            await stack.enter_async_context(_lifespan(app))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)
            return await stack.enter_async_context(client)

        yield open_one
