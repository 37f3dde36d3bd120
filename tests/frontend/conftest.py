"""What the frontend's tests share: pictures made by Pillow, an engine that is a real ring with a small handler, and the
application as it runs, over httpx."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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

EMBEDDING_SIZE = 4

Handler = Callable[[shmring.Claim], Awaitable[None]]
OpenEngine = Callable[..., Awaitable[EngineClient]]


def noise(width: int, height: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Smooth noise: what JPEG keeps, and what no two rows or columns share."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encoded(picture: Image.Image, name: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


def data_url(file: bytes, media_type: str = "image/png") -> str:
    """A file as a URL."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"


def body_of(*files: bytes, **fields: Any) -> dict[str, Any]:
    """The JSON of a request for the embeddings of pictures."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {"model": "shmring-features", "messages": [{"role": "user", "content": parts}], **fields}


def embedding_of(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """What the engine of these tests makes of a picture: anything that tells pictures apart."""
    means = torch.from_numpy(pixels.copy()).double().mean(dim=(0, 1))
    return torch.nn.functional.normalize(torch.cat([means, torch.tensor([float(pixels[0, -1, 0])])]), dim=0).float()


async def embed_pictures(claim: shmring.Claim) -> None:
    """Answers a claim."""
    request: EncodeRequest = claim.payload
    await claim.reply(EncodeReply(torch.stack([embedding_of(picture.pixels.numpy()) for picture in request.pictures])))


@pytest.fixture
async def open_engine(serve: Any, socket_dir: Path) -> AsyncIterator[OpenEngine]:
    """``await open_engine(handler, **ring_options)``: an engine in this process, and a client of it."""
    clients: list[EngineClient] = []

    async def open_one(handler: Handler = embed_pictures, **options: Any) -> EngineClient:
        async def health() -> None:
            return None

        async def describe() -> ModelDescription:
            return ModelDescription("test", ["encode"], EMBEDDING_SIZE, 8)

        async def statistics() -> dict[str, float]:
            return {"ring_slots_in_use": ring.statistics().slots_in_use}

        calls = {CALL_HEALTH: health, CALL_DESCRIBE: describe, CALL_STATISTICS: statistics}
        ring = await serve(handler, payload_type=EncodeRequest, calls=calls, **{"slab_nbytes": "4MiB", **options})
        client = await EngineClient.connect("test", socket_dir=str(socket_dir), lease_nbytes="64KiB")
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        await client.close()


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
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
    exits: list[Any] = []

    async def open_one(engine: EngineClient, **settings: Any) -> httpx.AsyncClient:
        app = create_app(engine, FrontendSettings(**settings))
        running = lifespan(app)
        await running.__aenter__()
        exits.append(running)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)
        exits.append(client)
        return client

    yield open_one
    for manager in reversed(exits):
        await manager.__aexit__(None, None, None)
