"""What the routes of ``/v1`` do: answer a conversation or go on from a prompt, whole or in pieces, and embed inputs. Media go
through the slab.

The slots of a conversation's media are left when the first piece has come. By then the request has been sent. The engine needs
the media only for the first step, and gives their memory back after it. From then on, only the texts of the request are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import operator
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import msgspec
import torch
from msgspec import UNSET

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    SamplingParams,
    Text,
    Waveform,
    parameters_of,
    tensor_of,
)
from shmring.frontend.callers.admission import Admitted
from shmring.frontend.callers.caller import caller
from shmring.frontend.callers.key_usage import running_usage
from shmring.frontend.errors import ApiError, ErrorCode, api_error_of
from shmring.frontend.http.responses import new_id
from shmring.frontend.http.sse import DONE, event
from shmring.frontend.intake import MediaIntake
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.chat import CHAT_FORM, ChatRequest, engine_request
from shmring.frontend.openai.embeddings import (
    EmbeddingRequest,
    check_dimensions,
    count_inputs,
    encode_response,
    take_inputs,
)
from shmring.frontend.openai.generation import AnswerForm, GenerationRequest, Usage
from shmring.frontend.openai.scoring import RerankRequest, ScoreRequest, encode_reranked, score_response, take_pairs
from shmring.frontend.openai.speech import (
    SpeechEvent,
    SpeechTask,
    TranslationRequest,
    done_event,
    speech_request,
    whole_answer,
)
from shmring.frontend.openai.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenizing,
    tokenizing,
)
from shmring.frontend.openai.tools import other_tools
from shmring.frontend.operator.metrics import AnswerStatistics
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings
from shmring.service.tracing import note

__all__ = ["Answer", "AnswerWriter", "Facts", "Inference", "Keep", "WrittenEvent", "events_of", "heard", "written"]

_Request = TypeVar("_Request", bound=GenerationRequest)

#: Keeps an answer that is complete, if it is to be kept.
Keep: TypeAlias = Callable[[], Awaitable[None]]

_PART_CHARACTERS = 256 << 10
_values_of = operator.attrgetter(*(name if name == "tool_choice" else f"sampling.{name}" for name in CAPABILITIES))
_PLAIN_VALUES = _values_of(GenerateRequest())
_MAX_IGNORED = 16  # that a header names
_PROMPTS_AT_A_TIME = 8  # of one request: with more, one caller would take the engine from others
_MAX_TOLD = 8  # media of which a header says what is missing: 2 KB, a quarter of what proxies take for all headers


@dataclasses.dataclass(slots=True)
class Facts:
    """What the headers of an answer say of it.

    Attributes:
        synthetic: whether it is made up.
        slab_nbytes: bytes of tensors that crossed through the slab.
        sound_s: how long its recordings are, in seconds.
        ignored: parts of the request that have no effect with this model.
        shortfalls: what of the request's media was damaged or missing, for its caller.
        copies: tensors that this process copied for sending while a request with media was sent. Exact if it was alone, and
            otherwise an upper bound: the ring's client counts for all requests together.
    """

    synthetic: bool
    slab_nbytes: int
    shortfalls: str
    copies: int = 0
    sound_s: float = 0.0
    ignored: list[str] = dataclasses.field(default_factory=list)


class Answer:
    """An answer that has begun. Close it, or read it to its end.

    Attributes:
        count: of answers, to all prompts of the request.
        prompts: of the request.
        facts: about it.
    """

    def __init__(
        self,
        count: int,
        prompts: int,
        first: GenerateReply,
        others: AsyncGenerator[GenerateReply, None],
        facts: Facts,
        arrived_at: float,
        statistics: AnswerStatistics,
    ) -> None:
        self.count = count
        self.prompts = prompts
        self._first: GenerateReply | None = first
        self._last = first
        self._pieces: dict[int, GenerateReply] = {}  # the last one of each answer, by index
        self._others = others
        self._arrived_at = arrived_at
        self._first_at = first.first_at or time.monotonic()
        self._last_at: dict[int, float] = {}
        self._statistics = statistics
        self.facts = facts
        self._count(first, len(first.token_ids))
        statistics.first_token.add(self._first_at - arrived_at)
        note("gen_ai.latency.time_to_first_token", self._first_at - arrived_at)

    def __aiter__(self) -> Self:
        """Iterates over all pieces, the first one included; once."""
        return self

    async def __anext__(self) -> GenerateReply:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            self._last = last = await anext(self._others)
        except StopAsyncIteration:
            self._end()
            raise
        self._count(last)
        return last

    def _count(self, piece: GenerateReply, without: int = 0) -> None:
        """Counts the tokens of a piece, and the times between them, but for so many that have none before them."""
        now, before = time.monotonic(), self._last_at.get(piece.index, self._first_at)
        if piece.first_at:
            before, without = piece.first_at, 1
        if (count := len(piece.token_ids) - without) > 0:
            self._statistics.inter_token.add((now - before) / count, count)
        self._last_at[piece.index] = now
        self._pieces[piece.index] = piece

    def _end(self) -> None:
        self._count_tokens()
        last = self._last
        if last.finish_reason is not None:
            seconds = self._last_at[last.index] - self._arrived_at
            self._statistics.success[last.finish_reason,] += 1
            self._statistics.whole.add(seconds)
            note("gen_ai.latency.e2e", seconds)

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended."""
        await self._others.aclose()
        if self._pieces:
            self._count_tokens()

    def _count_tokens(self) -> None:
        """Counts them for the key, once; also if the caller hung up, as far as the engine has sent them."""
        pieces, self._pieces = self._pieces, {}
        if (usage := running_usage()) is None:
            return
        of_prompts = {index * self.prompts // self.count: piece.prompt_tokens for index, piece in pieces.items()}
        generated_tokens = sum(piece.completion_tokens for piece in pieces.values())
        usage.count_tokens(sum(of_prompts.values()), generated_tokens)


class WrittenEvent(Protocol):
    """An event of a stream that names its type."""

    @property
    def type(self) -> str:
        """What it is called."""


class AnswerWriter(Protocol):
    """Writes what a chat answers in another form, as events. Each shows what there is now: encode it before the next one."""

    @property
    def answer(self) -> msgspec.Struct:
        """The whole answer, so far."""

    def begin(self, first: GenerateReply) -> Iterator[WrittenEvent]:
        """Yields the first events, before those of the first piece."""

    def add(self, piece: GenerateReply) -> Iterator[WrittenEvent]:
        """Yields the events of a piece."""

    def finish(self, last: GenerateReply, reason: FinishReason) -> Iterator[WrittenEvent]:
        """Yields the events behind those of the last piece, but for the last one; the answer is complete then."""

    def end(self) -> WrittenEvent:
        """Returns the last event."""


class Inference:
    """Answers requests.

    Each method leaves its request without messages and inputs. It raises :class:`ApiError` if the caller did something wrong or
    if there is no space, and :class:`shmring.ShmringError` or ``TimeoutError`` if the engine does.

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
        self._encoding = asyncio.Lock()  # one piece of a large answer in a turn of the loop

    async def complete(
        self, form: AnswerForm[_Request], request: _Request, admitted: Admitted, request_id: str
    ) -> tuple[msgspec.Struct, Facts]:
        """Answers a request for text whole."""
        answer = await self.begin(form, request, admitted, request_id, stream=False)
        parts = [_Parts(form) for _ in range(answer.count)]
        try:
            async for piece in answer:
                _part_of(parts, piece).add(piece)
        finally:
            await answer.aclose()
        choices = [form.choice(part.pieces, part.finish_reason, index, part.logprobs) for index, part in enumerate(parts)]
        whole = form.whole(new_id(f"{form.prefix}-"), int(time.time()), request.model, choices, _usage(parts, answer.prompts))
        return whole, answer.facts

    async def respond(
        self, chat: ChatRequest, writer: AnswerWriter, admitted: Admitted, request_id: str, keep: Keep | None = None
    ) -> Facts:
        """Answers a chat whole, as the writer writes it; ``keep`` is as in :func:`written`."""
        answer = await self.begin(CHAT_FORM, chat, admitted, request_id, stream=False)
        async with contextlib.aclosing(answer):
            async for _ in written(answer, writer, keep):
                pass
        return answer.facts

    async def begin(
        self, form: AnswerForm[_Request], request: _Request, admitted: Admitted, request_id: str, *, stream: bool = True
    ) -> Answer:
        """Asks the engine, and returns when the first piece of the answer has come.

        Args:
            form: of the request and the answer.
            request: is taken apart.
            admitted: its admission.
            request_id: its name.
            stream: whether the other pieces are wanted as they are made.

        Whatever waits here has the request's deadline: for the model's description, for media, and for each piece. (One timeout
        for all of them takes as long as the rest of this function.)
        """
        description = await self._description(request.model, form.task, admitted)
        self._check_priority(request.priority)
        generate_requests, sources = form.engine_requests(request)
        ignored = _ignore(generate_requests[0], description, request) if isinstance(request, ChatRequest) else []
        _check_abilities(generate_requests[0], description, request)
        _check_logprobs(generate_requests)
        try:
            answer = await self._begin(generate_requests, sources, "messages", description, admitted, request_id, stream=stream)
        except shmring.RemoteError as error:
            if error.type_name != "FormRefusedError":
                raise
            refusal = api_error_of(error)
            refusal.param = _place_of_form(error.message, request)
            raise refusal from None
        answer.facts.ignored = ignored
        return answer

    async def begin_hearing(
        self, request: TranslationRequest, task: SpeechTask, file: bytes, admitted: Admitted, request_id: str, *, stream: bool
    ) -> Answer:
        """Has the engine write down what is said in a recording; as :meth:`begin`."""
        description = await self._description(request.model, task, admitted)
        self._check_priority(request.priority)
        generate_request, sources = speech_request(request, task, file)
        if generate_request.speech is not None and generate_request.speech.words and not description.word_times:
            text = f"the model {description.model!r} does not say when words are said: timestamp_granularities can be segment"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="timestamp_granularities")
        del file  # the source has it, until it is taken in
        return await self._begin([generate_request], sources, "file", description, admitted, request_id, stream=stream)

    async def hear(
        self, request: TranslationRequest, task: SpeechTask, file: bytes, admitted: Admitted, request_id: str
    ) -> tuple[msgspec.Struct | str, Facts]:
        """Returns what is said in a recording, whole."""
        answer = await self.begin_hearing(request, task, file, admitted, request_id, stream=False)
        async with contextlib.aclosing(answer):
            pieces = [piece async for piece in answer]
        if pieces[-1].finish_reason is None:
            raise _unfinished()
        return whole_answer(request, task, pieces, answer.facts.sound_s), answer.facts

    async def _begin(
        self,
        generate_requests: Sequence[GenerateRequest],
        sources: list[MediaSource],
        param: str,
        description: ModelDescription,
        admitted: Admitted,
        request_id: str,
        *,
        stream: bool,
    ) -> Answer:
        async with self._media(sources, description, admitted, param) as (media, facts):
            generate_requests[0].media = media  # not a copy: it is emptied when the block is left
            for generate_request in generate_requests:
                generate_request.stream = stream
                generate_request.owner = caller.get()
            outputs = self._outputs(generate_requests, request_id, admitted)
            try:
                first = await anext(outputs, None)
            except BaseException:
                await outputs.aclose()
                raise
        if first is None:
            raise _unfinished()
        prompts, count = len(generate_requests), len(generate_requests) * generate_requests[0].sampling.n
        return Answer(count, prompts, first, outputs, facts, admitted.arrived_at, self._statistics)

    async def _description(self, name: str, task: str, admitted: Admitted) -> ModelDescription:
        if (description := self._engine.description) is not None:
            return self._model.checked(description, name, task)
        async with asyncio.timeout_at(admitted.deadline):
            return await self._model.check(name, task)

    def _outputs(
        self, requests: Sequence[GenerateRequest], request_id: str, admitted: Admitted
    ) -> AsyncGenerator[GenerateReply, None]:
        """Asks the engine, and yields all pieces: answers to the second prompt are numbered behind those to the first."""

        def ask(number: int) -> AsyncGenerator[GenerateReply, None]:
            return self._engine.generate(requests[number], request_id=request_id, timeout=_seconds_left(admitted))

        return ask(0) if len(requests) == 1 else _merged(ask, len(requests), requests[0].sampling.n)

    async def tokenize(self, request: TokenizeRequest, admitted: Admitted, request_id: str) -> TokenizeResponse:
        """Returns the tokens of a text or conversation."""
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(request.model, "tokenize")
            generate_request = tokenizing(request)
            _check_abilities(generate_request, description)
            output = await self._ask_for_tokens(generate_request, admitted, request_id)
        return TokenizeResponse(output.token_ids, len(output.token_ids), description.max_model_len)

    async def count_tokens(self, chat: ChatRequest, admitted: Admitted, request_id: str) -> tuple[int, Facts]:
        """Returns how many tokens a conversation has, its media included."""
        description = await self._description(chat.model, "tokenize", admitted)
        generate_request, sources = engine_request(chat)
        generate_request.strict_tools = []  # they are for an answer
        ignored = _ignore(generate_request, description, chat)
        _check_abilities(generate_request, description, chat)
        generate_request.tokenize = True
        generate_request.tool_choice = "auto"
        generate_request.sampling = SamplingParams()
        async with self._media(sources, description, admitted, "messages") as (media, facts):
            generate_request.media = media  # not a copy: it is emptied when the block is left
            output = await self._ask_for_tokens(generate_request, admitted, request_id)
        facts.ignored = ignored
        return len(output.token_ids), facts

    async def detokenize(self, request: DetokenizeRequest, admitted: Admitted, request_id: str) -> DetokenizeResponse:
        """Returns the text of tokens."""
        async with asyncio.timeout_at(admitted.deadline):
            await self._model.check(request.model, "tokenize")
            return DetokenizeResponse((await self._ask_for_tokens(detokenizing(request), admitted, request_id)).text)

    async def _ask_for_tokens(self, request: GenerateRequest, admitted: Admitted, request_id: str) -> GenerateReply:
        request.owner = caller.get()
        admitted.release_turn()
        outputs = self._engine.generate(request, request_id=request_id, timeout=_seconds_left(admitted))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                return output
        raise _unfinished()

    async def embed(self, request: EmbeddingRequest, admitted: Admitted, request_id: str) -> tuple[list[bytes], Facts]:
        """Embeds the inputs of a request.

        Returns:
            An :class:`~shmring.frontend.openai.embeddings.EmbeddingResponse` as JSON, in pieces; and what its headers say.
        """
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(request.model, "encode")
            check_dimensions(request, description.embedding_size)
            param = "messages" if request.messages else "input"
            inputs = take_inputs(request, self._settings.max_inputs)
            counts = count_inputs(inputs)
            embeddings, prompt_tokens, facts = await self._embed(
                inputs, request.priority, description, admitted, request_id, param
            )
        return await encode_response(embeddings, request, prompt_tokens, counts, self._encoding), facts

    async def score(
        self, request: ScoreRequest | RerankRequest, admitted: Admitted, request_id: str
    ) -> tuple[list[bytes], Facts]:
        """Compares the inputs of a request; as :meth:`embed`, with another answer."""
        async with asyncio.timeout_at(admitted.deadline):
            description = await self._model.check(request.model, "encode")
            pairs = take_pairs(request, self._settings.max_inputs)
            embeddings, prompt_tokens, facts = await self._embed(
                pairs.inputs, request.priority, description, admitted, request_id, pairs.param
            )
            scores = await asyncio.to_thread(pairs.scores, embeddings)
        if isinstance(request, RerankRequest):
            return await encode_reranked(request, pairs, scores, prompt_tokens, self._encoding), facts
        return [msgspec.json.encode(score_response(request.model, scores, prompt_tokens))], facts

    async def _embed(
        self,
        inputs: list[Text | MediaSource],
        priority: int | None,
        description: ModelDescription,
        admitted: Admitted,
        request_id: str,
        param: str,
    ) -> tuple[torch.Tensor, int, Facts]:
        """Returns the embeddings of inputs, and how many tokens they have; empties the list of inputs."""
        self._check_priority(priority)
        if not description.input.text and any(isinstance(item, Text) for item in inputs):
            message = "this model does not embed text; send media, as messages or as data: URLs"
            raise ApiError(ErrorCode.UNSUPPORTED_INPUT, message, param=param)
        if not description.input.tokens and any(isinstance(item, Text) and isinstance(item.text, list) for item in inputs):
            message = "this model does not embed tokens; send the text"
            raise ApiError(ErrorCode.UNSUPPORTED_INPUT, message, param=param)
        sources = [item for item in inputs if isinstance(item, MediaSource)]
        texts = [item if isinstance(item, Text) else None for item in inputs]
        inputs.clear()
        async with self._media(sources, description, admitted, param) as (media, facts):
            in_order = iter(media)
            filled: list[Text | Medium] = [next(in_order) if text is None else text for text in texts]
            try:
                embeddings, prompt_tokens = await self._encode(
                    EncodeRequest(filled, priority=priority or 0, owner=caller.get()), admitted, request_id
                )
            finally:
                filled.clear()
        self._statistics.success["stop",] += 1
        self._statistics.whole.add(time.monotonic() - admitted.arrived_at)
        if (usage := running_usage()) is not None:
            usage.count_tokens(prompt_tokens, 0)
        return embeddings, prompt_tokens, facts

    def _check_priority(self, priority: int | None) -> None:
        """Refuses a request that says that it is more urgent than its caller's may be.

        Raises:
            ApiError: 400.
        """
        usage = running_usage()
        most = self._settings.max_priority if usage is None or usage.owner.max_priority is None else usage.owner.max_priority
        if priority is not None and priority < -most:
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
        return contextlib.nullcontext(([], Facts(description.synthetic, 0, "")))

    @contextlib.asynccontextmanager
    async def _media_in_slab(
        self, sources: list[MediaSource], description: ModelDescription, admitted: Admitted, param: str
    ) -> AsyncIterator[tuple[list[Medium], Facts]]:
        async with (
            asyncio.timeout_at(admitted.deadline),
            self._intake.take(sources, description.input, admitted, param) as media,
        ):
            slab_nbytes = sum(tensor_of(medium).nbytes for medium in media)
            sound_s = sum(len(medium.samples) / medium.sample_rate for medium in media if isinstance(medium, Waveform))
            facts = Facts(description.synthetic, slab_nbytes, _shortfalls_of(media), sound_s=sound_s)
            before = self._engine.copies
            yield media, facts
            facts.copies = self._engine.copies - before

    async def _encode(self, request: EncodeRequest, admitted: Admitted, request_id: str) -> tuple[torch.Tensor, int]:
        parts, prompt_tokens = [], 0
        for some in _in_parts(request):
            answering = self._engine.encode(some, request_id=request_id, timeout=_seconds_left(admitted))
            async with contextlib.aclosing(answering) as outputs:
                collected = [output async for output in outputs]
            parts += [output.embeddings for output in collected]
            prompt_tokens += collected[-1].prompt_tokens
        return torch.cat(parts), prompt_tokens


async def written(answer: Answer, writer: AnswerWriter, keep: Keep | None = None) -> AsyncGenerator[WrittenEvent, None]:
    """Yields the events of an answer as it comes. Each shows what there is now: encode it at once.

    Args:
        answer: stays its owner's, who closes it.
        writer: writes it.
        keep: is awaited when the answer is complete, before its last event; None: nothing is.
    """
    last: GenerateReply | None = None
    async for piece in answer:
        if last is None:
            for begun in writer.begin(piece):
                yield begun
        last = piece
        for added in writer.add(piece):
            yield added
    if last is None or last.finish_reason is None:
        raise _unfinished()
    for finished in writer.finish(last, last.finish_reason):
        yield finished
    if keep is not None:
        await keep()
    yield writer.end()


async def events_of(form: AnswerForm[_Request], answer: Answer, request: _Request) -> AsyncGenerator[bytes, None]:
    """Yields an answer as OpenAI's events: its opening, its text as it comes, why it ended, and its usage if wanted.

    Args:
        form: of the events.
        answer: stays its owner's, who closes it.
        request: says what else the stream includes.
    """
    include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    no_usage = None if include_usage else UNSET
    template = form.event(new_id(f"{form.prefix}-"), int(time.time()), request.model, [], no_usage)

    def chunk(choice: msgspec.Struct) -> bytes:
        return event(msgspec.structs.replace(template, choices=[choice]))

    parts = [_Parts(form, keep=False) for _ in range(answer.count)]
    if form.opening is not None:
        for index in range(len(parts)):
            yield chunk(form.opening(index))
    async for piece in answer:
        logprobs = _part_of(parts, piece).add(piece)
        if piece.text or piece.tool_calls or piece.reasoning or logprobs is not None:
            yield chunk(form.piece(piece, None, piece.index, logprobs))
        if piece.finish_reason is not None:
            yield chunk(form.piece(None, piece.finish_reason, piece.index, None))
    usage = _usage(parts, answer.prompts)
    if include_usage:
        yield event(msgspec.structs.replace(template, usage=usage))
    yield DONE


async def heard(answer: Answer) -> AsyncGenerator[SpeechEvent, None]:
    """Yields what is said in a recording as events."""
    texts: list[str] = []
    last: GenerateReply | None = None
    async for piece in answer:
        last = piece
        text = piece.text if texts else piece.text.lstrip()
        if text:
            texts.append(text)
            yield SpeechEvent(type="transcript.text.delta", delta=text)
    if last is None or last.finish_reason is None:
        raise _unfinished()
    yield done_event("".join(texts), last)


async def _merged(
    ask: Callable[[int], AsyncGenerator[GenerateReply, None]], prompts: int, answers: int
) -> AsyncGenerator[GenerateReply, None]:
    """Yields the pieces of the answers to several prompts as they come. The first failure of one ends all.

    Args:
        ask: returns the pieces of the answers to one of them.
        prompts: how many there are.
        answers: to each of them.
    """
    pieces: asyncio.Queue[GenerateReply | Exception | None] = asyncio.Queue(1)
    free = asyncio.Semaphore(_PROMPTS_AT_A_TIME)

    async def answer(number: int) -> None:
        try:
            async with free, contextlib.aclosing(ask(number)) as outputs:
                async for output in outputs:
                    output.index += number * answers
                    await pieces.put(output)
            await pieces.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised where the pieces are read
            await pieces.put(error)

    tasks = [asyncio.create_task(answer(number)) for number in range(prompts)]
    try:
        running = prompts
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


class _Parts:
    """What has come of one answer of a request.

    Attributes:
        pieces: all of them, or the last one.
        logprobs: of their tokens, if they were asked for.
    """

    def __init__(self, form: AnswerForm[Any], *, keep: bool = True) -> None:
        self._form = form
        self._keep = keep
        self._characters = 0
        self.pieces: list[GenerateReply] = []
        self.logprobs: Any = None

    def add(self, piece: GenerateReply) -> Any:
        """Takes the next piece; returns how likely its tokens were, as the form says it, or None."""
        logprobs = self._form.logprobs(piece.logprobs, self._characters) if piece.logprobs else None
        # A text may be held back, if it may become a stop text; its tokens are told at once.
        self._characters += sum(token.characters for token in piece.logprobs) if piece.logprobs else len(piece.text)
        piece.logprobs = []  # they are said in the form now, which is a half of their memory
        if not self._keep:
            self.pieces.clear()
        elif self.logprobs is None:
            self.logprobs = logprobs
        elif logprobs is not None:
            for name in logprobs.__struct_fields__:
                getattr(self.logprobs, name).extend(getattr(logprobs, name))
        self.pieces.append(piece)
        return logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended. Raises shmring.RemoteError if its last piece does not say so: the executor has a bug."""
        if not self.pieces or self.pieces[-1].finish_reason is None:
            raise _unfinished()
        return self.pieces[-1].finish_reason


def _part_of(parts: Sequence[_Parts], piece: GenerateReply) -> _Parts:
    """Returns what a piece belongs to. Raises shmring.RemoteError if that is no answer of the request, by an executor's bug."""
    if not 0 <= piece.index < len(parts):
        raise shmring.RemoteError("NoReply", f"the engine answers {piece.index}, where it was asked for {len(parts)} answers")
    return parts[piece.index]


def _check_abilities(request: GenerateRequest, description: ModelDescription, asked: GenerationRequest | None = None) -> None:
    """Refuses what the model can't do.

    Args:
        request: for the engine.
        description: of its model.
        asked: the caller's request, which may name a thing in another way.

    Raises:
        ApiError: it takes no tools, or its chat template no variables, or something else has no effect.
    """
    values = _values_of(request)
    for capability, value, plain in zip(CAPABILITIES, values, _PLAIN_VALUES, strict=True) if values != _PLAIN_VALUES else ():
        if value != plain and capability not in description.capabilities:
            is_format = capability == "structured_outputs" and asked is not None and asked.response_format is not None
            name = "response_format" if is_format else capability
            text = f"{name} is not supported by the model {description.model!r} (executor {description.executor})"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=name)
    if request.needs_tools and not description.tools:
        text = f"the model {description.model!r} takes no tools"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="tools" if request.tools else "messages")
    if request.tools and request.sampling.structured_outputs is not None and not description.strict_tools:
        text = f"the model {description.model!r} can't have tools and a form of the answer together: leave out one"
        is_format = asked is not None and asked.response_format is not None
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="response_format" if is_format else "structured_outputs")
    if request.template_options and not description.template_options:
        text = f"the model {description.model!r} has no chat template whose variables could be set"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="chat_template_kwargs")


def _place_of_form(message: str, asked: GenerationRequest) -> str:
    """Returns which part of a caller's request has the form that an executor has refused."""
    for index, tool in enumerate(asked.tools or [] if isinstance(asked, ChatRequest) else []):
        if tool.function is not None and parameters_of(tool.function.name) in message:
            return f"tools[{index}].function.parameters"
    if asked.response_format is not None:
        return "response_format.json_schema.schema"
    return "tools" if asked.structured_outputs is None else "structured_outputs"


def _ignore(request: GenerateRequest, description: ModelDescription, asked: ChatRequest) -> list[str]:
    """Takes what has no effect with a model out of a request; returns the fields of the caller's that said so.

    These are what clients send to every model: tools of other types, strict tools where calls can't be kept to schemas, and an
    effort of which its template knows nothing.
    """
    tools = asked.tools or []
    ignored = [f"tools[{index}]" for index in other_tools(tools)] if request.tools else []
    if request.strict_tools and not description.strict_tools:
        strict, request.strict_tools = request.strict_tools, []
        ignored += [
            f"tools[{index}].function.strict"
            for index, tool in enumerate(tools)
            if tool.function is not None and tool.function.name in strict
        ]
    if (
        asked.reasoning_effort is not None
        and not description.reasoning_effort
        and "reasoning_effort" not in (asked.chat_template_kwargs or {})
    ):
        del request.template_options["reasoning_effort"]
        ignored.append("reasoning_effort")
    return ignored[:_MAX_IGNORED]


def _check_logprobs(requests: Sequence[GenerateRequest]) -> None:
    try:
        requests[0].sampling.max_described_tokens(len(requests))
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), param="max_tokens") from None


def _shortfalls_of(media: Sequence[Medium]) -> str:
    """Returns what a request's caller is told of media that are not all there, by their order; nothing if all are."""
    texts = [f"{number} of {len(media)}: {medium.shortfall}" for number, medium in enumerate(media, 1) if medium.shortfall]
    more = [f"and of {len(texts) - _MAX_TOLD} more"] if len(texts) > _MAX_TOLD else []
    return " | ".join([*texts[:_MAX_TOLD], *more])


def _unfinished() -> shmring.RemoteError:
    return shmring.RemoteError("NoReply", "the engine ended the answer without saying why")


def _usage(parts: Sequence[_Parts], prompts: int) -> Usage:
    """Returns what answers cost. A prompt, which as many of them have in common, counts once. All must have ended."""
    last = [part.pieces[-1] for part in parts if part.finish_reason]
    prompt_tokens = sum(piece.prompt_tokens for piece in last[:: len(parts) // prompts])
    completion_tokens = sum(piece.completion_tokens for piece in last)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def _seconds_left(admitted: Admitted) -> float:
    return admitted.deadline - asyncio.get_running_loop().time()


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
