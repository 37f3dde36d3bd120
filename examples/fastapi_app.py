"""A FastAPI server in front of an engine: one client for the life of the server, errors as HTTP statuses.

    pip install fastapi pillow uvicorn
    python examples/embedder.py engine                      # in one terminal
    uvicorn --app-dir examples fastapi_app:app --workers 2  # in another
    curl --data-binary @picture.jpg http://127.0.0.1:8000/embed

Each of uvicorn's workers is a process, and has a client of its own. All of them share the engine.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, HTTPException, Request
from PIL import Image

import shmring

NAME = "embedder"
SHAPE = (224, 224, 3)
FORMATS = ("JPEG", "PNG", "WEBP")  # Pillow knows others, some of which start programs
MOST_NBYTES = 20_000_000  # of a picture as it is sent
MOST_PIXELS = 50_000_000  # of a picture as it is decoded
TIMEOUT_S = 30.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connects when the server starts. If the engine is restarted, the client attaches to the new one by itself."""
    async with shmring.connect(NAME, reconnect=True, connect_timeout_s=60) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


def decode(content: bytes, pixels: torch.Tensor) -> None:
    """Decodes a picture into a tensor of shape `SHAPE`.

    Raises:
        HTTPException: it is no picture, is damaged, or has too many pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:  # before anything is decoded
                raise HTTPException(400, f"the picture has more than {MOST_PIXELS} pixels")
            pixels.numpy()[:] = np.asarray(image.convert("RGB").resize((SHAPE[1], SHAPE[0])))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise HTTPException(400, "the body is no picture that can be decoded") from error


async def body_of(request: Request) -> bytes:
    """Reads a body, up to its limit: nothing is kept of one that is longer."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_NBYTES:
            raise HTTPException(413, f"more than {MOST_NBYTES} bytes")
    return bytes(content)


@app.post("/embed")
async def embed(request: Request) -> dict[str, Any]:
    """Embeds the picture in the body."""
    content = await body_of(request)
    client: shmring.Client = request.app.state.client
    try:
        # drain: if this is cancelled, the thread still writes, and the memory is not used again before it has ended.
        async with client.slot(shmring.nbytes_for((SHAPE, torch.uint8)), timeout=TIMEOUT_S, drain=True) as slot:
            pixels = slot.tensor(SHAPE, torch.uint8)
            await asyncio.to_thread(decode, content, pixels)
            # retry: if the engine dies, the next one gets the picture. It may be embedded twice, which harms nobody.
            reply = await client.request({"pixels": pixels}, timeout=TIMEOUT_S, retry=1)
    except TimeoutError as error:  # the engine has too much to do, or has not come back
        raise HTTPException(503, "too busy", headers={"Retry-After": "1"}) from error
    except shmring.EngineDeadError as error:  # twice
        raise HTTPException(503, "the engine has died", headers={"Retry-After": "1"}) from error
    return {"embedding": reply["embedding"].tolist()}


@app.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Whether an engine is attached now, and what this process has sent to it."""
    client: shmring.Client = request.app.state.client
    if not client.connected:
        raise HTTPException(503, "no engine")
    return {"engine": NAME, "requests": client.statistics().submitted}
