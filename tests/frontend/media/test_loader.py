"""Loading on threads: into the caller's memory, cancel-safe, and without a view outliving its use."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shmring
from frontend.media import loader as loader_module
from frontend.media.errors import MediaError
from frontend.media.image import PictureHeader, PictureLimits
from frontend.media.loader import MediaLoader


@pytest.fixture
def loader() -> Iterator[MediaLoader]:
    made = MediaLoader(2, PictureLimits())
    yield made
    made.close()


def picture(width: int = 40, height: int = 30) -> tuple[np.ndarray[Any, Any], str]:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pixels, f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


async def test_a_picture_is_decoded_into_the_callers_memory(loader: MediaLoader) -> None:
    pixels, url = picture()
    loaded = await loader.load(url)
    assert loaded.header.shape == (30, 40, 3)
    target = np.zeros(loaded.header.shape, np.uint8)
    await loader.decode(loaded, target)
    np.testing.assert_array_equal(target, pixels)
    assert loaded.data == b""  # its file is let go of


async def test_bad_media_is_a_media_error(loader: MediaLoader) -> None:
    with pytest.raises(MediaError, match="only data"):
        await loader.load("http://127.0.0.1/")
    loaded = await loader.load(picture()[1])
    loaded.data = loaded.data[:-40]
    with pytest.raises(MediaError, match="truncated"):
        await loader.decode(loaded, np.zeros(loaded.header.shape, np.uint8))


async def test_a_cancelled_decode_keeps_its_slot_until_the_thread_is_done(
    loader: MediaLoader,
    serve: Callable[..., Awaitable[shmring.Ring]],
    connect: Callable[..., Awaitable[shmring.RingClient]],
    eventually: Callable[..., Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, proceed = threading.Event(), threading.Event()

    def slow_decode(data: bytes, header: PictureHeader, target: np.ndarray[Any, Any]) -> None:
        entered.set()
        assert proceed.wait(30)
        target[:] = 9  # into memory that must not be somebody else's yet

    monkeypatch.setattr(loader_module, "decode_into", slow_decode)
    await serve()
    client = await connect()
    loaded = await loader.load(picture()[1])
    async with client.slot(shmring.nbytes_for((loaded.header.shape, torch.uint8)), drain=True) as slot:
        decoding = asyncio.create_task(loader.decode(loaded, slot.tensor(loaded.header.shape, torch.uint8).numpy()))
        await eventually(entered.is_set)
        decoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await decoding
    del decoding
    assert client.statistics().slots_draining == 1
    proceed.set()
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_an_error_does_not_keep_the_slot(
    loader: MediaLoader,
    serve: Callable[..., Awaitable[shmring.Ring]],
    connect: Callable[..., Awaitable[shmring.RingClient]],
    eventually: Callable[..., Awaitable[Any]],
) -> None:
    await serve()
    client = await connect()
    loaded = await loader.load(picture()[1])
    loaded.data = loaded.data[:-40]
    slot = await client.slot(shmring.nbytes_for((loaded.header.shape, torch.uint8)), drain=True)
    with pytest.raises(MediaError) as kept:  # as a log or a debugger would keep it
        await loader.decode(loaded, slot.array(loaded.header.shape, np.uint8))
    slot.close()
    await eventually(lambda: client.statistics().slots_in_use == 0)
    assert "truncated" in str(kept.value)
