"""The ``vllm`` executor: answers and embeddings by vLLM's engine (:mod:`.vllm_engine`).

vLLM is given requests with what frontends prepared (:mod:`.vllm_requests`).

Requests with media, and long texts, are prepared beside steps (:mod:`.preparing`). A request to encode is prepared in pieces: a
medium at a time, or some texts. Those of other requests come between, and so do steps. vLLM has only so many of its inputs at a
time, or all others would wait behind them. A request keeps its slots until all of it is prepared. vLLM is given what was made
of its media, and its slots go back."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from shmring.engine.executors.callers_texts import count_characters
from shmring.engine.executors.detokenizer import TokenBytes
from shmring.engine.executors.forms import form_of
from shmring.engine.executors.interface import COMES_AGAIN, GOES_ON, ExecutorOptions, StepInput, StepOutput
from shmring.engine.executors.preparing import LATER, MEDIA, Stages, is_long, thread_for
from shmring.engine.executors.tool_calls import ResponseReader, read
from shmring.engine.executors.trials import FormTokens, Trials
from shmring.engine.executors.vllm_engine import VllmLoop, VllmRequest, number_of
from shmring.engine.executors.vllm_requests import RequestBuilder
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeReply,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    Text,
    TokenLogprobs,
)

__all__ = ["VllmExecutor"]

_PIECE_TEXTS = 8  # to be embedded, which are made into tokens in one go
_TEXT_CHARACTERS = 64  # as which a text counts, beside its own: what else is done for it takes as long
_MOST_AHEAD = 64  # inputs of a request that vLLM has: as many as its steps take together, or nearly so


@dataclasses.dataclass(slots=True)
class _Answer:
    """One of a request's answers, so far.

    Attributes:
        reader: tells tool calls from text; None: all of it is text.
        logprobs: how many of the likeliest tokens replies have.
        completion_tokens: how many it has.
        ended: whether it is complete.
    """

    reader: ResponseReader | None
    logprobs: int
    completion_tokens: int = 0
    ended: bool = False


#: Prompts as vLLM takes them; or what is told of tokens.
_Prepared: TypeAlias = list[dict[str, Any]] | StepOutput


@dataclasses.dataclass(slots=True)
class _Request(VllmRequest):
    """A request that runs; its ``names`` are those of its prompts, in their order.

    Attributes:
        inputs: how many prompts it has.
        turn: its place among those of which prompts are made in a step; a later one when it has had its turn.
        prompt_tokens: how many it has.
        answers: that are written; none for a request to encode.
        embeddings: of its inputs, by their order, so far.
    """

    inputs: int = 1
    turn: int = 0
    prompt_tokens: int = 0
    answers: list[_Answer] = dataclasses.field(default_factory=list)
    embeddings: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def is_ahead(self) -> bool:
        """Whether vLLM has so many of its inputs that further ones are to wait."""
        return len(self.names) - len(self.embeddings) >= _MOST_AHEAD

    @property
    def weight(self) -> int:
        """About what it takes of a step: tokens. A prompt is read in one or several, and its request pays in each of them."""
        if any(answer.completion_tokens for answer in self.answers):
            return sum(not answer.ended for answer in self.answers)
        return self.prompt_tokens


class VllmExecutor(VllmLoop[_Request]):
    """Answers conversations and embeds with vLLM.

    Args:
        options: ``model`` is a directory or a name on the hub. ``mm_processor_kwargs`` and ``options`` are vLLM's engine
            arguments.

    Raises:
        ImportError: vLLM is not installed, or it is one that this executor does not know.
        OSError: vLLM can't start with this model.
        ValueError: an option is unknown or makes no sense.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        # Of vLLM's libraries for forms, the one that counts what it does; each form is tried first.
        super().__init__(options, {"structured_outputs_config": {"backend": "guidance"}})
        self._builder = RequestBuilder(self._name, self._engine, options.mm_processor_kwargs)
        config, tasks = self._engine.model_config, self._engine.get_supported_tasks()
        can = {
            "generate": "generate" in tasks and self._builder.texts.has_template,
            "complete": "generate" in tasks,
            "tokenize": True,
            "encode": "embed" in tasks,
        }
        self._description = ModelDescription(
            executor="vllm",
            model=self._name,
            tasks=[task for task, possible in can.items() if possible],
            input=msgspec.structs.replace(self._builder.input, text=can["encode"]),
            max_batch_size=self._max_num_seqs,
            embedding_size=int(config.embedding_size) if can["encode"] else None,
            max_model_len=config.max_model_len,
            tools=self._builder.texts.has_tools,
            template_options=self._builder.texts.has_template,
            reasoning_effort=self._builder.texts.has_effort,
            capabilities=[name for name in CAPABILITIES if name != "tool_choice"],
        )
        self._pooling = importlib.import_module("vllm").PoolingParams(task="embed") if can["encode"] else None
        self._turns = itertools.count()
        self._contents = TokenBytes(self._builder.tokenizer)
        self._trials = Trials(FormTokens(self._builder.tokenizer))

    def describe(self) -> ModelDescription:
        """Says what it does."""
        return self._description

    def reset_mm_cache(self) -> None:
        """Has vLLM forget media, while the thread that prepares them has none."""
        self._preparing.threads[MEDIA].submit("", self._engine.reset_mm_cache).result()

    def close(self) -> None:
        """Ends vLLM's workers, if it has any, and gives the memory of accelerators back; the rest goes with the process."""
        super().close()
        self._trials.close()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _in_turn(self, batch: Sequence[StepInput]) -> list[StepInput]:
        """Returns the parts of a step in the order in which prompts are made: by owner as they stand, of each owner in turn."""
        owners: dict[str, int] = {}

        def turn_of(part: StepInput) -> tuple[int, float]:
            owner = "" if part.payload is None else part.payload.owner
            request = self._requests.get(part.request_id)
            return owners.setdefault(owner, len(owners)), math.inf if request is None else request.turn

        return sorted(batch, key=turn_of)

    def _enter(self, part: StepInput) -> StepOutput:
        """Gives a request to vLLM, in its first step or as far as it is prepared."""
        request, payload = self._requests.get(part.request_id), part.payload
        if payload is None:
            if request is None:
                raise RuntimeError(f"request {part.request_id} goes on, and was not begun")
            return GOES_ON
        if request is None:
            if isinstance(payload, EncodeRequest) and self._pooling is None:
                raise ValueError(f"the model {self._name!r} answers prompts; it does not embed")
            request = _Request(inputs=len(payload.inputs) if isinstance(payload, EncodeRequest) else 1, turn=next(self._turns))
            self._requests[part.request_id] = request
            self._preparing.begin(part.request_id, payload.owner, self._stages(part.request_id, request, payload))
        prepared = self._preparing.take(part.request_id)
        return COMES_AGAIN if prepared is None else prepared

    def _stages(self, request_id: int, request: _Request, payload: EncodeRequest | GenerateRequest) -> Stages[StepOutput]:
        """Prepares a request, in pieces that vLLM is given at once. One whose answer has a form waits for its trial first."""
        if isinstance(payload, GenerateRequest) and (structure := payload.sampling.structured_outputs) is not None:
            yield from self._trials.stages(form_of(structure), payload.owner)
        while len(request.names) < request.inputs:
            while request.is_ahead():
                yield LATER
            prepared = yield from self._next_piece(request, payload)
            if isinstance(prepared, StepOutput):
                return prepared
            self._add(request_id, request, payload, prepared)
        return StepOutput(finished=False, prompt_tokens=request.prompt_tokens)

    def _next_piece(self, request: _Request, payload: EncodeRequest | GenerateRequest) -> Stages[_Prepared]:
        """Prepares the next prompts of a request."""
        items: Sequence[Text | Medium] = []
        if isinstance(payload, GenerateRequest):
            characters, has_media = count_characters(payload), bool(payload.media)
        else:
            items = _next_inputs(payload, len(request.names))
            characters = sum(len(item.text) for item in items if isinstance(item, Text))
            has_media = not isinstance(items[0], Text)
        thread = thread_for(characters, has_media=has_media)
        if thread is None:
            yield from self._preparing.room_for(payload.owner, characters + _TEXT_CHARACTERS * len(items))
            request.turn = next(self._turns)
            return self._prepare(payload, items)
        work = functools.partial(self._prepare, payload, items)
        return (yield from self._preparing.on_thread(thread, payload.owner, work))

    def _prepare(self, payload: EncodeRequest | GenerateRequest, items: Sequence[Text | Medium]) -> _Prepared:
        if isinstance(payload, EncodeRequest):
            return [self._builder.build_input(item) for item in items]
        if payload.tokenize:
            return self._builder.texts.tell_tokens(payload, lambda payload: self._builder.build(payload)["prompt_token_ids"])
        return [self._builder.build(payload)]

    def _add(
        self, request_id: int, request: _Request, payload: EncodeRequest | GenerateRequest, prompts: list[dict[str, Any]]
    ) -> None:
        counts = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        request.prompt_tokens += sum(counts)
        if isinstance(payload, EncodeRequest):
            params = self._pooling
        else:
            tokens = prompts[0]["prompt_token_ids"]
            params = self._builder.sampling_of(payload, counts[0])
            readers = self._builder.texts.readers_of(payload, tokens)
            request.answers += [_Answer(reader, params.logprobs or 0) for reader in readers]
        for prompt in prompts:
            name = f"{request_id}-{len(request.names)}"
            request.names.append(name)
            self._engine.add_request(name, prompt, params)

    # -- what goes -----------------------------------------------------------------------------------------------------

    def _take(self, request: _Request, made: Sequence[Any]) -> StepOutput:
        replies: list[GenerateReply] = []
        for output in made:
            if request.answers:
                replies += _replies(request, output, self._contents)
            else:
                request.embeddings[number_of(output)] = output.outputs.data
        return _output(request, replies)


def _replies(request: _Request, output: Any, contents: TokenBytes) -> list[GenerateReply]:
    """Returns what is new of a request's answers."""
    replies = []
    for piece in output.outputs:
        answer = request.answers[piece.index]
        if not answer.ended and (piece.text or piece.token_ids or piece.finish_reason is not None):
            replies.append(_reply(request, answer, piece, contents))
    return replies


def _reply(request: _Request, answer: _Answer, piece: Any, contents: TokenBytes) -> GenerateReply:
    """Returns what is new of an answer.

    Raises:
        RuntimeError: vLLM ended it for another reason than answers end.
    """
    if piece.finish_reason not in (None, "stop", "length"):
        raise RuntimeError(f"vLLM ended the answer: {piece.finish_reason}")
    answer.completion_tokens += len(piece.token_ids)
    stop_text = piece.stop_reason if isinstance(piece.stop_reason, str) else None  # a number is a token
    parts, finish_reason = read(answer.reader, piece.text, piece.finish_reason, stopped=stop_text is not None)
    answer.ended = finish_reason is not None
    return GenerateReply(
        parts.text,
        list(piece.token_ids),
        request.prompt_tokens,
        answer.completion_tokens,
        finish_reason,
        parts.tool_calls,
        parts.reasoning,
        piece.index,
        [
            _token_logprobs(contents, token, likely, answer.logprobs)
            for token, likely in zip(piece.token_ids, piece.logprobs or [], strict=False)
        ],
        stop_text,
    )


def _token_logprobs(contents: TokenBytes, chosen: int, likely: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Returns how likely a token was, and the likeliest ones. vLLM puts the chosen one beside these."""
    top = sorted((token for token, each in likely.items() if each.rank <= count), key=lambda token: likely[token].rank)
    return contents.describe(chosen, likely[chosen].logprob, [(token, likely[token].logprob) for token in top])


def _output(request: _Request, replies: list[GenerateReply]) -> StepOutput:
    if request.answers:
        return StepOutput.of(replies, request.prompt_tokens, finished=all(answer.ended for answer in request.answers))
    if len(request.names) < request.inputs:
        return COMES_AGAIN
    if len(request.embeddings) < request.inputs:
        return GOES_ON
    embeddings = torch.stack([request.embeddings[number] for number in range(len(request.names))]).float()
    return StepOutput(EncodeReply(torch.nn.functional.normalize(embeddings, dim=1), request.prompt_tokens))


def _next_inputs(request: EncodeRequest, start: int) -> Sequence[Text | Medium]:
    """Returns the inputs that are prepared in one go: a medium, or some texts, or one that is long."""
    items: list[Text | Medium] = []
    characters = 0
    for item in request.inputs[start : start + _PIECE_TEXTS]:
        characters += len(item.text) if isinstance(item, Text) else 0
        if items and (not isinstance(item, Text) or is_long(characters)):
            break
        items.append(item)
        if not isinstance(item, Text):
            break
    return items
