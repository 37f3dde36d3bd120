"""What the routes of ``/v1`` have done: text that goes on from a conversation, a prompt or a recording, tokens, and embeddings.

A route is three parts. It *reads* a body: a :class:`Generation` or an :class:`Encoding` is what it asks for, and the words of
its API end there. That is *done* here, and nothing here knows of any API: what a caller has called a thing is for its
:class:`Words` to say. The answer is *written* of what the engine has sent (:mod:`shmring.frontend.answer`): there the words of
the API begin again.

The slots of a conversation's media are left when the first piece has come. By then the request has been sent. The engine needs
the media only for the first step, and gives their memory back after it. From then on, only the texts of the request are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import operator
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import torch

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    SamplingParams,
    Text,
)
from shmring.frontend.answer import Answer, Facts, unfinished
from shmring.frontend.callers.admission import Admitted
from shmring.frontend.callers.caller import caller
from shmring.frontend.callers.key_usage import OwnerUsage, running_usage
from shmring.frontend.errors import ApiError, ErrorCode, api_error_of
from shmring.frontend.intake import MediaIntake
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.operator.metrics import AnswerStatistics
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings

__all__ = ["Embedded", "Encoding", "Generation", "Inference", "Words", "check_dimensions"]

_PART_CHARACTERS = 256 << 10
_values_of = operator.attrgetter(*(name if name == "tool_choice" else f"sampling.{name}" for name in CAPABILITIES))
_PLAIN_VALUES = _values_of(GenerateRequest())
_PROMPTS_AT_A_TIME = 8  # of one request: with more, one caller would take the engine from others


class Words:
    """How a caller has called what it asks for. These are the engine's own names, for a request that has no others."""

    def check(self, request: GenerateRequest, description: ModelDescription) -> list[str]:
        """Takes what has no effect with a model out of a request; returns what the caller calls that.

        Raises:
            ApiError: the model can't do what is asked for.
        """
        return []

    def name_of(self, capability: str) -> str:
        """Returns the field that asks for something that only some models can."""
        return capability

    def place_of_form(self, message: str) -> str:
        """Returns where the form stands that an executor has refused with this message."""
        return "structured_outputs"

    def place_of(self, param: str | None) -> str | None:
        """Returns where in the caller's request stands what an error names."""
        return param


@dataclasses.dataclass(slots=True)
class Generation:
    """What a caller wants to be written.

    Attributes:
        task: of a model, which it asks for.
        model: what it calls the model.
        requests: for the engine, one for each prompt, still without media. They are taken out when it is done.
        sources: of the first prompt's media, in order; taken out likewise.
        stream: whether pieces are wanted as they are made.
        words: of the caller.
        media_param: the parameter that errors about all media together name.
    """

    task: str
    model: str
    requests: list[GenerateRequest]
    sources: list[MediaSource] = dataclasses.field(default_factory=list)
    stream: bool = False
    words: Words = dataclasses.field(default_factory=Words)
    media_param: str = "messages"


@dataclasses.dataclass(slots=True)
class Encoding:
    """What a caller wants to be embedded.

    Attributes:
        model: what it calls the model.
        inputs: texts, and where media come from; emptied when it is done.
        priority: lower is sooner.
        param: where the inputs stand, for errors.
        dimensions: how many of the embeddings are wanted; None: all.
    """

    model: str
    inputs: list[Text | MediaSource]
    priority: int
    param: str
    dimensions: int | None = None


class Embedded(NamedTuple):
    """What was embedded.

    Attributes:
        embeddings: of shape (inputs, embedding size), float32.
        prompt_tokens: of all inputs.
        facts: about the answer.
    """

    embeddings: torch.Tensor
    prompt_tokens: int
    facts: Facts


class Inference:
    """Does what callers ask for.

    Each method empties what it is given of requests and inputs. It raises :class:`ApiError` if the caller did something wrong
    or if there is no space, and :class:`shmring.ShmringError` or ``TimeoutError`` if the engine does.

    Args:
        engine: who computes.
        model: what it is called, and what it takes.
        intake: for media; its owner closes it.
        settings: limits.
        statistics: where answers are counted.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        intake: MediaIntake,
        settings: FrontendSettings,
        statistics: AnswerStatistics,
    ) -> None:
        self._engine = engine
        self._model = model
        self._intake = intake
        self._settings = settings
        self._statistics = statistics

    async def begin(self, generation: Generation, admitted: Admitted, request_id: str) -> Answer:
        """Asks the engine, and returns when the first piece of the answer has come.

        Args:
            generation: what is wanted.
            admitted: the admission of its request.
            request_id: the request's name.

        Whatever waits here has the request's deadline: for the model's description, for media, and for each piece. (One timeout
        for all of them takes as long as the rest of this function.)
        """
        try:
            return await self._begin(generation, admitted, request_id)
        except ApiError as error:
            error.param = generation.words.place_of(error.param)
            raise
        except shmring.RemoteError as error:
            if error.type_name != "FormRefusedError":
                raise
            refusal = api_error_of(error)
            refusal.param = generation.words.place_of(generation.words.place_of_form(error.message))
            raise refusal from None

    async def _begin(self, generation: Generation, admitted: Admitted, request_id: str) -> Answer:
        description = await self._description(generation.model, generation.task, admitted)
        requests, generation.requests = generation.requests, []  # which are most of its memory
        usage, ignored = running_usage(), generation.words.check(requests[0], description)
        self._check_priority(requests[0].priority, usage)
        _check_abilities(requests[0], description, generation.words)
        _check_logprobs(requests)
        async with self._media(generation.sources, description, admitted, generation.media_param) as (media, facts):
            requests[0].media = media  # not a copy: it is emptied when the block is left
            for request in requests:
                request.stream = generation.stream
                request.owner = caller.get()
            facts.ignored = ignored
            prompts, count = len(requests), len(requests) * requests[0].sampling.n
            if prompts == 1:
                outputs = self._engine.generate(requests[0], request_id=request_id, timeout=admitted.seconds_left())
            else:
                outputs = self._merged(requests, request_id, admitted)
            try:
                if (first := await anext(outputs, None)) is None:
                    raise unfinished()
                return Answer(count, prompts, first, outputs, facts, admitted.arrived_at, self._statistics)
            except BaseException:
                await outputs.aclose()
                raise

    async def _description(self, name: str, task: str, admitted: Admitted) -> ModelDescription:
        if (description := self._engine.description) is not None:
            return self._model.checked(description, name, task)
        async with asyncio.timeout_at(admitted.deadline):
            return await self._model.check(name, task)

    async def _merged(
        self, requests: Sequence[GenerateRequest], request_id: str, admitted: Admitted
    ) -> AsyncGenerator[GenerateReply, None]:
        """Yields the pieces of the answers to several prompts as they come. Answers to the second one are numbered behind those
        to the first. The first failure of one ends all."""
        pieces: asyncio.Queue[GenerateReply | Exception | None] = asyncio.Queue(1)
        free = asyncio.Semaphore(_PROMPTS_AT_A_TIME)

        async def answer(request: GenerateRequest, before: int) -> None:
            try:
                async with free:
                    outputs = self._engine.generate(request, request_id=request_id, timeout=admitted.seconds_left())
                    async with contextlib.aclosing(outputs):
                        async for output in outputs:
                            output.index += before
                            await pieces.put(output)
                await pieces.put(None)
            except Exception as error:  # noqa: BLE001 - it is raised where the pieces are read
                await pieces.put(error)

        answers = requests[0].sampling.n
        tasks = [asyncio.create_task(answer(request, number * answers)) for number, request in enumerate(requests)]
        try:
            running = len(requests)
            while running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    running -= 1
                else:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tokenize(self, generation: Generation, admitted: Admitted, request_id: str) -> tuple[GenerateReply, Facts]:
        """Returns the tokens of what an answer would go on from, its media included; of tokens, the text."""
        try:
            description = await self._description(generation.model, "tokenize", admitted)
            [request], generation.requests = generation.requests, []
            ignored = generation.words.check(request, description)
            _check_abilities(request, description, generation.words)
            request.tokenize = True
            request.tool_choice = "auto"
            request.sampling = SamplingParams()
            request.owner = caller.get()
            async with self._media(generation.sources, description, admitted, generation.media_param) as (media, facts):
                request.media = media  # not a copy: it is emptied when the block is left
                outputs = self._engine.generate(request, request_id=request_id, timeout=admitted.seconds_left())
                async with contextlib.aclosing(outputs):
                    output = await anext(outputs, None)
        except ApiError as error:
            error.param = generation.words.place_of(error.param)
            raise
        if output is None:
            raise unfinished()
        facts.ignored = ignored
        return output, facts

    async def embed(self, encoding: Encoding, admitted: Admitted, request_id: str) -> Embedded:
        """Embeds inputs."""
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(encoding.model, "encode")
            self._check_priority(encoding.priority, usage := running_usage())
            _check_inputs(encoding, description)
            inputs, encoding.inputs = encoding.inputs, []
            sources = [item for item in inputs if isinstance(item, MediaSource)]
            texts = [item if isinstance(item, Text) else None for item in inputs]
            del inputs
            async with self._media(sources, description, admitted, encoding.param) as (media, facts):
                in_order = iter(media)
                filled: list[Text | Medium] = [next(in_order) if text is None else text for text in texts]
                try:
                    request = EncodeRequest(filled, priority=encoding.priority, owner=caller.get())
                    embeddings, prompt_tokens = await self._encode(request, admitted, request_id)
                finally:
                    filled.clear()
        self._statistics.success["stop",] += 1
        self._statistics.whole.add(time.monotonic() - admitted.arrived_at)
        if usage is not None:
            usage.count_tokens(prompt_tokens, 0)
        return Embedded(embeddings, prompt_tokens, facts)

    def _check_priority(self, priority: int, usage: OwnerUsage | None) -> None:
        """Refuses a request that says that it is more urgent than its caller's may be.

        Raises:
            ApiError: 400.
        """
        most = self._settings.max_priority if usage is None or usage.owner.max_priority is None else usage.owner.max_priority
        if priority < -most:
            text = (
                f"priority is {priority}, and the least that your requests may have is {-most} (lower is sooner): the option "
                "max-priority of this server says so"
            )
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="priority")

    def _media(
        self, sources: list[MediaSource], description: ModelDescription, admitted: Admitted, param: str
    ) -> contextlib.AbstractAsyncContextManager[tuple[list[Medium], Facts]]:
        """Yields the media of a request, in a list that is emptied at the end, and what the headers of its answer say."""
        if sources:
            return self._media_in_slab(sources, description, admitted, param)
        admitted.release_turn()
        return contextlib.nullcontext(([], Facts(description.synthetic, description.max_model_len)))

    @contextlib.asynccontextmanager
    async def _media_in_slab(
        self, sources: list[MediaSource], description: ModelDescription, admitted: Admitted, param: str
    ) -> AsyncIterator[tuple[list[Medium], Facts]]:
        async with (
            asyncio.timeout_at(admitted.deadline),
            self._intake.take(sources, description.input, admitted, param) as media,
        ):
            facts, before = Facts.of(media, description), self._engine.copies
            yield media, facts
            facts.copies = self._engine.copies - before

    async def _encode(self, request: EncodeRequest, admitted: Admitted, request_id: str) -> tuple[torch.Tensor, int]:
        parts, prompt_tokens = [], 0
        for some in _in_parts(request):
            answering = self._engine.encode(some, request_id=request_id, timeout=admitted.seconds_left())
            async with contextlib.aclosing(answering) as outputs:
                collected = [output async for output in outputs]
            parts += [output.embeddings for output in collected]
            prompt_tokens += collected[-1].prompt_tokens
        return torch.cat(parts), prompt_tokens


def _check_abilities(request: GenerateRequest, description: ModelDescription, words: Words) -> None:
    """Refuses what the model can't do.

    Raises:
        ApiError: it takes no tools, or its chat template no variables, or something else has no effect.
    """
    values = _values_of(request)
    for capability, value, plain in zip(CAPABILITIES, values, _PLAIN_VALUES, strict=True) if values != _PLAIN_VALUES else ():
        if value != plain and capability not in description.capabilities:
            name = words.name_of(capability)
            text = f"{name} is not supported by the model {description.model!r} (executor {description.executor})"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=name)
    if request.needs_tools and not description.tools:
        text = f"the model {description.model!r} takes no tools"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="tools" if request.tools else "messages")
    if request.tools and request.sampling.structured_outputs is not None and not description.strict_tools:
        text = f"the model {description.model!r} can't have tools and a form of the answer together: leave out one"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=words.name_of("structured_outputs"))
    if request.template_options and not description.template_options:
        text = f"the model {description.model!r} has no chat template whose variables could be set"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="chat_template_kwargs")


def _check_logprobs(requests: Sequence[GenerateRequest]) -> None:
    try:
        requests[0].sampling.max_described_tokens(len(requests))
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), param="max_tokens") from None


def _check_inputs(encoding: Encoding, description: ModelDescription) -> None:
    check_dimensions(encoding.dimensions, description.embedding_size)
    if not description.input.text and any(isinstance(item, Text) for item in encoding.inputs):
        message = "this model does not embed text; send media, as messages or as data: URLs"
        raise ApiError(ErrorCode.UNSUPPORTED_INPUT, message, param=encoding.param)
    if not description.input.tokens and any(isinstance(item, Text) and isinstance(item.text, list) for item in encoding.inputs):
        message = "this model does not embed tokens; send the text"
        raise ApiError(ErrorCode.UNSUPPORTED_INPUT, message, param=encoding.param)


def check_dimensions(wanted: int | None, size: int | None) -> None:
    """Refuses a request for more dimensions than embeddings have.

    Raises:
        ApiError: they have fewer.
    """
    if wanted is not None and size is not None and wanted > size:
        message = f"dimensions is {wanted}, the model's embeddings have {size}"
        raise ApiError(ErrorCode.INVALID_VALUE, message, param="dimensions")


def _in_parts(request: EncodeRequest) -> Iterator[EncodeRequest]:
    """Yields a request in parts whose texts take a millisecond of the loops that they pass: two thousand may have 12 MB."""
    inputs: list[Text | Medium] = []
    characters = 0
    if all(isinstance(item, Text) for item in request.inputs):
        for item in request.inputs:
            assert isinstance(item, Text)
            characters += len(item.text)
            if inputs and characters > _PART_CHARACTERS:
                yield EncodeRequest(inputs, request.priority, owner=request.owner)
                inputs, characters = [], len(item.text)
            inputs.append(item)
    yield EncodeRequest(inputs, request.priority, owner=request.owner) if inputs else request
