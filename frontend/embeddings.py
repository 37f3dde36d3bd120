"""Embedding the pictures of a request: load, acquire, decode in place, hand over, answer.

In this order: the pictures' files are taken out of the request, their sizes are read from their headers, one slot is
acquired for all of them, and each is decoded straight into it. So memory of the slab is what waits and not decoded pictures
in private memory, and the engine reads the very bytes that the decoder wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Sequence

import torch

import shmring
from engine.client import EngineClient
from engine.protocol import EncodeRequest, Picture
from frontend.errors import RETRY_AFTER_S, ApiError
from frontend.media.errors import MediaError
from frontend.media.loader import LoadedPicture, MediaLoader
from frontend.openai import EmbeddingRequest, EmbeddingResponse, PictureSource, embedding_response, take_pictures
from frontend.settings import FrontendSettings

__all__ = ["Embedded", "EmbeddingService"]


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """An answer, and what it took.

    Attributes:
        response: for the caller.
        slab_nbytes: bytes of tensors that crossed through the slab.
        copies: tensors that this process copied for sending while the request was with the engine. Exact if it was
            alone, and otherwise an upper bound: the ring's client counts for all requests together.
    """

    response: EmbeddingResponse
    slab_nbytes: int
    copies: int


class EmbeddingService:
    """Answers embedding requests.

    Args:
        engine: who embeds.
        settings: limits and the model's name.
    """

    def __init__(self, engine: EngineClient, settings: FrontendSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._loader = MediaLoader(settings.decode_threads, settings.picture_limits)

    def close(self) -> None:
        """Starts nothing more."""
        self._loader.close()

    async def embed(self, request: EmbeddingRequest, request_id: str) -> Embedded:
        """Embeds the pictures of a request, which is left without its messages.

        Raises:
            ApiError: what the caller did wrong, or that there is no space.
            shmring.ShmringError, TimeoutError: from the engine.
        """
        self._check_model(request.model)
        sources = take_pictures(request, self._settings.max_pictures)
        params = [source.param for source in sources]
        pictures = await self._load(sources)
        sources.clear()  # their URLs hold the files once more, in base64
        shapes = [picture.header.shape for picture in pictures]
        slot = await self._acquire(shmring.nbytes_for(*((shape, torch.uint8) for shape in shapes)))
        async with slot:
            tensors = [slot.tensor(shape, torch.uint8) for shape in shapes]
            try:
                await self._decode(pictures, tensors, params)
                before = self._engine.ring.statistics()
                embeddings = await self._encode(tensors, request_id)
                copies = self._engine.ring.statistics().copies - before.copies
            finally:
                tensors.clear()  # a slot that is left without views needs not wait for this frame to end
        return Embedded(embedding_response(embeddings, request), sum(map(math.prod, shapes)), copies)

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            message = f"the model {name!r} does not exist; this server has {self._settings.model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _load(self, sources: Sequence[PictureSource]) -> list[LoadedPicture]:
        loading = (self._loader.load(source.url) for source in sources)
        results = await asyncio.gather(*loading, return_exceptions=True)
        _raise_first(results, [source.param for source in sources])
        return [result for result in results if isinstance(result, LoadedPicture)]

    async def _acquire(self, nbytes: int) -> shmring.Slot:
        try:
            return await self._engine.slot(nbytes, timeout=self._settings.slot_timeout_s)
        except TimeoutError:
            message = f"no space for {nbytes} bytes came free in the slab within {self._settings.slot_timeout_s:g} s"
            raise ApiError(503, message, code="slab_full", retry_after_s=RETRY_AFTER_S) from None

    async def _decode(self, pictures: Sequence[LoadedPicture], tensors: Sequence[torch.Tensor], params: Sequence[str]) -> None:
        decoding = (self._loader.decode(picture, tensor.numpy()) for picture, tensor in zip(pictures, tensors, strict=True))
        _raise_first(await asyncio.gather(*decoding, return_exceptions=True), params)

    async def _encode(self, tensors: Sequence[torch.Tensor], request_id: str) -> torch.Tensor:
        request = EncodeRequest([Picture(tensor) for tensor in tensors])
        answering = self._engine.encode(request, request_id=request_id, timeout=self._settings.request_timeout_s)
        async with contextlib.aclosing(answering) as outputs:
            return torch.cat([output.embeddings async for output in outputs])


def _raise_first(results: Sequence[object], params: Sequence[str]) -> None:
    """Raises the error of the first picture that has one; which of several fails first is chance."""
    for result, param in zip(results, params, strict=True):
        if isinstance(result, MediaError):
            raise ApiError(400, str(result), code="invalid_image", param=param)
        if isinstance(result, BaseException):
            raise result
