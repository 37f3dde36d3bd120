"""Embedding the inputs of a request: its media through the slab, its texts beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator

import torch

from shmring.engine.client import EngineClientProtocol
from shmring.engine.protocol import EncodeRequest, InputSpec, Medium, Text, tensor_of
from shmring.frontend.admission import Admitted
from shmring.frontend.errors import ApiError
from shmring.frontend.media.loader import MediaSource
from shmring.frontend.multimodal import MediaIntake, shortfalls_of
from shmring.frontend.openai.embeddings import (
    EmbeddingRequest,
    check_dimensions,
    count_inputs,
    encode_response,
    take_inputs,
)
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings

__all__ = ["Embedded", "EmbeddingService"]

_PART_CHARACTERS = 256 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """An answer, and its cost.

    Attributes:
        response: for the caller: an :class:`~shmring.frontend.openai.embeddings.EmbeddingResponse` as JSON, in pieces.
        slab_nbytes: bytes of tensors that crossed through the slab.
        copies: tensors that this process copied for sending while the request was with the engine. Exact if it was
            alone, and otherwise an upper bound: the ring's client counts for all requests together.
        synthetic: whether it is made up.
        shortfalls: what of the request's media was damaged or missing, for its caller.
    """

    response: list[bytes]
    slab_nbytes: int
    copies: int
    synthetic: bool
    shortfalls: str


class EmbeddingService:
    """Answers embedding requests.

    Args:
        engine: who embeds.
        model: what it is called, and what it takes.
        intake: for media; its owner closes it.
        settings: limits.
    """

    def __init__(
        self, engine: EngineClientProtocol, model: ServedModel, intake: MediaIntake, settings: FrontendSettings
    ) -> None:
        self._engine = engine
        self._model = model
        self._intake = intake
        self._settings = settings
        self._encoding = asyncio.Lock()

    async def embed(self, request: EmbeddingRequest, admitted: Admitted, request_id: str) -> Embedded:
        """Embeds the inputs of a request, which is left without them.

        Raises:
            ApiError: what the caller did wrong, or that there is no space.
            shmring.ShmringError, TimeoutError: from the engine.
        """
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(request.model, "encode")
            check_dimensions(request, description.embedding_size)
            param = "messages" if request.messages else "input"
            inputs = take_inputs(request, self._settings.max_inputs)
            counts = count_inputs(inputs)
            if not description.input.text and any(isinstance(item, Text) for item in inputs):
                message = "this model does not embed text; send media, as messages or as data: URLs"
                raise ApiError(400, message, code="unsupported_input", param=param)
            async with self._filled(inputs, description.input, admitted, param) as (filled, slab_nbytes, shortfalls):
                before = self._engine.copies
                encode_request = EncodeRequest(filled, priority=request.priority or 0)
                embeddings, prompt_tokens = await self._encode(encode_request, admitted, request_id)
                copies = self._engine.copies - before
        response = await encode_response(embeddings, request, prompt_tokens, counts, self._encoding)
        return Embedded(response, slab_nbytes, copies, description.synthetic, shortfalls)

    @contextlib.asynccontextmanager
    async def _filled(
        self, inputs: list[Text | MediaSource], spec: InputSpec, admitted: Admitted, param: str
    ) -> AsyncIterator[tuple[list[Text | Medium], int, str]]:
        """Yields the inputs with media in place of sources, the media's bytes in the slab, and what is missing of them.

        The list is emptied at the end.
        """
        sources = [item for item in inputs if isinstance(item, MediaSource)]
        texts = [item if isinstance(item, Text) else None for item in inputs]
        inputs.clear()
        async with self._intake.take(sources, spec, admitted, param) as media:
            in_order = iter(media)
            filled: list[Text | Medium] = [next(in_order) if text is None else text for text in texts]
            slab_nbytes = sum(tensor_of(medium).nbytes for medium in media)
            try:
                yield filled, slab_nbytes, shortfalls_of(media)
            finally:
                filled.clear()

    async def _encode(self, request: EncodeRequest, admitted: Admitted, request_id: str) -> tuple[torch.Tensor, int]:
        parts, prompt_tokens = [], 0
        for number, some in enumerate(_in_parts(request)):
            timeout = admitted.deadline - asyncio.get_running_loop().time()
            answering = self._engine.encode(
                some, request_id=f"{request_id}-{number}" if number else request_id, timeout=timeout
            )
            async with contextlib.aclosing(answering) as outputs:
                collected = [output async for output in outputs]
            parts += [output.embeddings for output in collected]
            prompt_tokens += collected[-1].prompt_tokens
        return torch.cat(parts), prompt_tokens


def _in_parts(request: EncodeRequest) -> Iterator[EncodeRequest]:
    """Yields a request in parts whose texts take a millisecond of the loops that they pass: two thousand may have 12 MB."""
    inputs: list[Text | Medium] = []
    characters = 0
    if all(isinstance(item, Text) for item in request.inputs):
        for item in request.inputs:
            assert isinstance(item, Text)
            characters += len(item.text)
            if inputs and characters > _PART_CHARACTERS:
                yield EncodeRequest(inputs, request.priority)
                inputs, characters = [], len(item.text)
            inputs.append(item)
    yield EncodeRequest(inputs, request.priority) if inputs else request
