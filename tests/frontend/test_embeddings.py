"""The way of a request's pictures: sizes first, one slot, in place, and back whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import shmring
from frontend import embeddings as embeddings_module
from frontend.embeddings import EmbeddingService
from frontend.errors import ApiError
from frontend.openai import EmbeddingRequest
from frontend.settings import FrontendSettings

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 20, 30, 3), np.uint8)


@pytest.fixture
def request_of(body_of: Any) -> Any:
    """``request_of(pixels, ...)``: a parsed request."""

    def make(*pictures: Any, **fields: Any) -> EmbeddingRequest:
        return msgspec.convert(body_of(*pictures, **fields), EmbeddingRequest)

    return make


@pytest.fixture
def open_service() -> Iterator[Any]:
    """``open_service(engine, **settings)``: a service, closed at the end."""
    services: list[EmbeddingService] = []

    def make(engine: Any, **settings: Any) -> EmbeddingService:
        services.append(EmbeddingService(engine.client, FrontendSettings(**settings)))
        return services[-1]

    yield make
    for service in services:
        service.close()


async def test_all_pictures_share_one_slot_and_none_is_copied(
    open_engine: Any, open_service: Any, request_of: Any, embedding_of: Any, eventually: Any
) -> None:
    engine = await open_engine()
    request = request_of(*PIXELS)
    embedded = await open_service(engine).embed(request, "the-id")
    np.testing.assert_allclose(
        [item.embedding for item in embedded.response.data], [embedding_of(pixels) for pixels in PIXELS], rtol=1e-6
    )
    assert (embedded.slab_nbytes, embedded.copies) == (PIXELS.nbytes, 0)
    assert request.messages == []
    statistics = engine.client.ring.statistics()
    assert (statistics.in_place, statistics.copies, statistics.inline_payloads) == (3, 0, 0)
    assert statistics.slot_nbytes_submitted == 1856 * 2 + 1800  # 1800 bytes each, on cache lines: one slot
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_the_engine_knows_the_request_by_its_id(open_engine: Any, open_service: Any, request_of: Any) -> None:
    names = []

    async def note(claim: shmring.Claim) -> None:
        names.append(claim.name)
        raise ValueError("enough")

    with pytest.raises(shmring.RemoteError):
        await open_service(await open_engine(note)).embed(request_of(PIXELS[0]), "the-id")
    assert names == ["the-id"]


async def test_a_picture_that_is_damaged_behind_its_header_gives_the_slot_back(
    open_engine: Any, open_service: Any, request_of: Any, encoded: Any, eventually: Any
) -> None:
    engine = await open_engine()
    service = open_service(engine)
    with pytest.raises(ApiError, match="truncated") as raised:
        await service.embed(request_of(PIXELS[0], encoded(PIXELS[1])[:-30]), "x")
    assert raised.value.param == "messages[0].content[1].image_url"
    del raised  # its traceback has the frames that made the views
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    assert engine.client.ring.statistics().submitted == 0


async def test_no_slot_is_taken_for_what_is_no_picture(open_engine: Any, open_service: Any, request_of: Any) -> None:
    engine = await open_engine(slab_nbytes="1MiB")
    service = open_service(engine, slot_timeout_s=0.01)
    async with engine.client.slot(engine.ring.statistics().leasable_nbytes - (128 << 10)):
        with pytest.raises(ApiError, match="not a picture"):
            await service.embed(request_of(np.zeros((300, 300, 3), np.uint8), b"no picture"), "x")
        with pytest.raises(ApiError, match="no space for 270000 bytes"):
            await service.embed(request_of(np.zeros((300, 300, 3), np.uint8)), "x")


async def test_nothing_is_decoded_before_there_is_a_slot(
    open_engine: Any, open_service: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode(*arguments: object) -> None:
        raise AssertionError("there was no slot yet")

    engine = await open_engine(slab_nbytes="1MiB")
    service = open_service(engine, slot_timeout_s=0.05)
    monkeypatch.setattr(embeddings_module.MediaLoader, "decode", decode)
    async with engine.client.slot(engine.ring.statistics().leasable_nbytes - (128 << 10)):
        with pytest.raises(ApiError, match="no space"):
            await service.embed(request_of(np.zeros((300, 300, 3), np.uint8)), "x")


@pytest.mark.parametrize("moment", ["loading", "waiting for a slot", "decoding", "embedding"])
async def test_cancelling_at_any_moment_gives_everything_back(
    open_engine: Any, open_service: Any, request_of: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    reached = asyncio.Event()

    async def stay(*arguments: object) -> Any:
        reached.set()
        await asyncio.Event().wait()

    async def dawdle(claim: shmring.Claim) -> None:
        aborted = asyncio.Event()
        claim.on_abort(aborted.set)
        reached.set()
        await aborted.wait()

    engine = await open_engine(dawdle, slab_nbytes="1MiB")
    service = open_service(engine)
    blocker = None
    if moment == "loading":
        monkeypatch.setattr(embeddings_module.MediaLoader, "load", stay)
    elif moment == "decoding":
        monkeypatch.setattr(embeddings_module.MediaLoader, "decode", stay)
    elif moment == "waiting for a slot":
        blocker = await engine.client.slot(engine.ring.statistics().leasable_nbytes - (128 << 10))
    task = asyncio.create_task(service.embed(request_of(np.zeros((300, 300, 3), np.uint8)), "x"))
    if blocker is None:
        await reached.wait()
    else:
        await eventually(lambda: engine.client.ring.statistics().waiting == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    if blocker is not None:
        blocker.close()
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    await eventually(lambda: engine.ring.statistics().slots_in_use == 0)
    assert engine.client.ring.statistics().waiting == 0
