"""Answering a conversation: its media go through the slab, and the answer comes whole or in pieces.

The slot is left when the first piece has come. By then the request has been sent. The engine needs the media only for the first
step, and gives their memory back after it. From then on, only the texts of the request are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec import UNSET

import shmring
from shmring.engine.client import EngineClientProtocol, GenerateOutput
from shmring.engine.protocol import FinishReason, GenerateRequest, InputSpec, tensor_of
from shmring.frontend.admission import Admitted
from shmring.frontend.media.loader import MediaSource
from shmring.frontend.multimodal import MediaIntake, shortfalls_of
from shmring.frontend.openai.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Choice,
    ChunkChoice,
    Delta,
    ResponseMessage,
    Usage,
    engine_request,
)
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings
from shmring.frontend.sse import DONE, event

__all__ = ["Answer", "ChatService", "Completed", "events_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    """A whole answer, and its cost: as :class:`shmring.frontend.embedding_service.Embedded`."""

    response: ChatCompletion
    slab_nbytes: int
    copies: int
    synthetic: bool
    shortfalls: str


class Answer:
    """An answer that has begun. Close it, or read it to its end.

    Attributes:
        slab_nbytes: bytes of tensors that crossed through the slab.
        synthetic: whether it is made up.
        shortfalls: what of the request's media was damaged or missing, for its caller.
    """

    def __init__(
        self,
        first: GenerateOutput,
        others: AsyncGenerator[GenerateOutput, None],
        slab_nbytes: int,
        synthetic: bool,
        shortfalls: str,
    ) -> None:
        self._first = first
        self._others = others
        self.slab_nbytes = slab_nbytes
        self.synthetic = synthetic
        self.shortfalls = shortfalls

    async def __aiter__(self) -> AsyncIterator[GenerateOutput]:
        """Iterates over all pieces, the first one included; once."""
        yield self._first
        async for output in self._others:
            yield output

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended."""
        await self._others.aclose()


class ChatService:
    """Answers conversations.

    Args:
        engine: who generates.
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

    async def complete(self, request: ChatRequest, admitted: Admitted, request_id: str) -> Completed:
        """Answers a request whole; it is left without its messages.

        Raises:
            ApiError: what the caller did wrong, or that there is no space.
            shmring.ShmringError, TimeoutError: from the engine.
        """
        before = self._engine.copies
        async with asyncio.timeout_at(admitted.deadline):
            answer = await self.begin(request, admitted, request_id)
            async with contextlib.aclosing(answer):
                pieces = [piece async for piece in answer]
        copies = self._engine.copies - before
        choice = Choice(ResponseMessage("".join(piece.text for piece in pieces)), _finish_reason(pieces[-1]))
        completion = ChatCompletion(_new_id(), int(time.time()), request.model, [choice], _usage(pieces[-1]))
        return Completed(completion, answer.slab_nbytes, copies, answer.synthetic, answer.shortfalls)

    async def begin(self, request: ChatRequest, admitted: Admitted, request_id: str) -> Answer:
        """Asks the engine, and returns when the first piece of the answer has come.

        Arguments and errors are those of :meth:`complete`.
        """
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(request.model, "generate")
            generate_request, sources = engine_request(request)
            return await self._begin(generate_request, sources, description.input, admitted, request_id, description.synthetic)

    async def _begin(
        self,
        request: GenerateRequest,
        sources: list[MediaSource],
        spec: InputSpec,
        admitted: Admitted,
        request_id: str,
        synthetic: bool,
    ) -> Answer:
        async with self._intake.take(sources, spec, admitted, "messages") as media:
            slab_nbytes = sum(tensor_of(medium).nbytes for medium in media)
            shortfalls = shortfalls_of(media)
            request.media = media  # not a copy: it is emptied when the block is left
            timeout = admitted.deadline - asyncio.get_running_loop().time()
            outputs = self._engine.generate(request, request_id=request_id, timeout=timeout)
            try:
                first = await anext(outputs, None)
            except BaseException:
                await outputs.aclose()
                raise
        if first is None:
            raise _unfinished()
        return Answer(first, outputs, slab_nbytes, synthetic, shortfalls)


async def events_of(answer: Answer, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    """Yields an answer as OpenAI's events: its role, its text as it comes, why it ended, and its usage if wanted.

    Args:
        answer: stays its owner's, who closes it.
        request: says what else the stream includes.
    """
    include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    no_usage = None if include_usage else UNSET
    template = ChatCompletionChunk(_new_id(), int(time.time()), request.model, [], no_usage)

    def chunk(delta: Delta, reason: FinishReason | None = None) -> bytes:
        return event(msgspec.structs.replace(template, choices=[ChunkChoice(delta, reason)]))

    yield chunk(Delta("assistant", ""))
    async for piece in answer:
        last = piece
        if last.text:
            yield chunk(Delta(content=last.text))
    yield chunk(Delta(), _finish_reason(last))
    if include_usage:
        yield event(msgspec.structs.replace(template, usage=_usage(last)))
    yield DONE


def _finish_reason(last: GenerateOutput) -> FinishReason:
    """Why an answer ended. Raises shmring.RemoteError if its last piece does not say so: the executor has a bug."""
    if last.finish_reason is None:
        raise _unfinished()
    return last.finish_reason


def _unfinished() -> shmring.RemoteError:
    return shmring.RemoteError("NoReply", "the engine ended the answer without saying why")


def _usage(last: GenerateOutput) -> Usage:
    return Usage(last.prompt_tokens, last.completion_tokens, last.prompt_tokens + last.completion_tokens)


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"
