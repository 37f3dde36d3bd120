"""The ``vllm`` executor: vLLM's engine, in this process.

A step is a step of vLLM's, in which it chooses what to compute: a token of each answer, and pieces of prompts. Before it, vLLM
is given the new requests, with what frontends prepared (:mod:`.vllm_requests`). vLLM's engine has no process of its own, so no
tensor crosses to it in a message: what it computes with is made here.

Requests with media, and long texts, are prepared beside steps (:mod:`.preparing`). A request to encode is prepared in pieces: a
medium at a time, or some texts. Those of other requests come between, and so do steps. vLLM has only so many of its inputs at a
time, or all others would wait behind them. A request keeps its slots until all of it is prepared. vLLM is given what was made
of its media, and its slots go back.

Invariants:

- vLLM has what was prepared of the requests in ``_requests``. Whatever ends a request ends it in both;
- a request that vLLM refuses fails alone, with vLLM's reason. A step that fails ends the engine, since what is left of it is
  unknown;
- the cache of vLLM's processor keeps whole media, and does not count on another cache behind it. A request that is refused or
  aborted after it was prepared never reaches that one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import importlib
import itertools
import math
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from shmring.core.loggers import logger_of
from shmring.engine.executors.callers_texts import count_characters
from shmring.engine.executors.detokenizer import TokenBytes
from shmring.engine.executors.failures import report, shortened
from shmring.engine.executors.forms import form_of
from shmring.engine.executors.interface import (
    ExecutorDeadError,
    ExecutorOptions,
    StepInput,
    StepOutput,
    priced,
)
from shmring.engine.executors.preparing import MEDIA, Preparing, is_long, thread_for
from shmring.engine.executors.tool_calls import ResponseReader, read
from shmring.engine.executors.trials import FormTokens, Trial, Trials
from shmring.engine.executors.vllm_requests import RequestBuilder, model_name
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
from shmring.integrations.promises import broken, parameters_differ, uses_are_missing

__all__ = ["CHECKS", "VllmExecutor", "find_engine", "share_seconds", "start_engine", "step_engine"]

logger = logger_of("shmring.engine.executors.vllm")

_GOES_ON = StepOutput(finished=False)
_WAITS = StepOutput(finished=False, keep_inputs=True)

_PAUSE_S = 0.001  # after a step of which nothing came: vLLM may wait for a grammar, and this thread must not spin meanwhile
_PIECE_TEXTS = 8  # to be embedded, which are made into tokens in one go
_TEXT_CHARACTERS = 64  # as which a text counts, beside its own: what else is done for it takes as long
_MOST_AHEAD = 64  # inputs of a request that vLLM has: as many as its steps take together, or nearly so

# What is said elsewhere: with --model, --mm-processor-kwargs, --data-parallel-size and --log-level.
_SAID_ELSEWHERE = frozenset({"model", "mm_processor_kwargs", "data_parallel_size", "disable_log_stats"})


def find_engine() -> Any:
    """Imports vLLM's engine.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    return importlib.import_module("vllm.v1.engine.llm_engine")


def _methods(module: Any) -> Iterator[str]:
    engine, renderer = module.LLMEngine, importlib.import_module("vllm.renderers").BaseRenderer
    yield from parameters_differ(
        [
            (engine.__init__, ["self", "vllm_config", "executor_class", "log_stats"]),
            (engine.add_request, ["self", "request_id", "prompt", "params"]),
            (engine.abort_request, ["self", "request_ids"]),
            (engine.step, ["self"]),
            (renderer.render_messages, ["self", "messages", "params"]),
            (renderer.render_cmpl, ["self", "prompts", "tok_params"]),
        ]
    )
    yield from uses_are_missing(
        [
            (renderer._process_multimodal, ["_mm_processor_only_cache", "_mm_processor_cache", "_process_mm_uuids"]),
            (engine.add_request, ["process_inputs", "output_processor", "engine_core"]),
        ]
    )


#: What is relied on in vLLM, for :mod:`shmring.integrations.promises`. It has been the same in vLLM 0.32 and 0.33.
CHECKS = (_methods,)


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
class _Request:
    """A request that runs.

    Attributes:
        inputs: how many prompts it has.
        turn: its place among those of which prompts are made in a step; a later one when it has had its turn.
        trial: of the form of its answer, while it goes on.
        prompt_tokens: how many it has.
        answers: that are written; none for a request to encode.
        embeddings: of its inputs, by their order, so far.
        names: what vLLM knows its prompts by, so far.
    """

    inputs: int
    turn: int
    trial: Trial | None = None
    prompt_tokens: int = 0
    answers: list[_Answer] = dataclasses.field(default_factory=list)
    embeddings: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def weight(self) -> int:
        """About what it takes of a step: tokens. A prompt is read in one or several, and its request pays in each of them."""
        if any(answer.completion_tokens for answer in self.answers):
            return sum(not answer.ended for answer in self.answers)
        return self.prompt_tokens


class VllmExecutor:
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
        self._engine = start_engine(options, {"structured_outputs_config": {"backend": "guidance"}})
        assert options.model is not None
        self._name = model_name(options.model)
        self._builder = RequestBuilder(self._name, self._engine, options.mm_processor_kwargs)
        config, tasks = self._engine.model_config, self._engine.get_supported_tasks()
        can = {
            "generate": "generate" in tasks and self._builder.has_template,
            "complete": "generate" in tasks,
            "tokenize": True,
            "encode": "embed" in tasks,
        }
        self._description = ModelDescription(
            executor="vllm",
            model=self._name,
            tasks=[task for task, possible in can.items() if possible],
            input=msgspec.structs.replace(self._builder.input, text=can["encode"]),
            max_batch_size=self._engine.vllm_config.scheduler_config.max_num_seqs,
            embedding_size=int(config.embedding_size) if can["encode"] else None,
            max_model_len=config.max_model_len,
            tools=self._builder.has_tools,
            template_options=self._builder.has_template,
            reasoning_effort=self._builder.has_effort,
            capabilities=[name for name in CAPABILITIES if name != "tool_choice"],
        )
        self._pooling = importlib.import_module("vllm").PoolingParams(task="embed") if can["encode"] else None
        self._preparing = Preparing[_Prepared]()
        # Those that wait until the media's thread has time.
        self._resets: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._turns = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._contents = TokenBytes(self._builder.tokenizer)
        self._trials = Trials(FormTokens(self._builder.tokenizer))

    def describe(self) -> ModelDescription:
        """Says what it does."""
        return self._description

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Gives vLLM the requests that are ready, and executes a step of it.

        Raises:
            ExecutorDeadError: vLLM's engine has failed.
        """
        outputs: dict[int, StepOutput | Exception] = {}
        self._preparing.begin_step()
        for part in self._in_turn(batch):
            try:
                outputs[part.request_id] = self._enter(part)
            except ExecutorDeadError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
                self.forget(part.request_id)
                outputs[part.request_id] = _report(error)
        if self._engine.has_unfinished_requests():
            weights = {number: request.weight for number, request in self._requests.items() if request.names}
            began = time.perf_counter()
            outputs |= self._step()
            outputs |= share_seconds(outputs, weights, time.perf_counter() - began)
        elif any(output is _WAITS for output in outputs.values()):
            trials = [request.trial.future for request in self._requests.values() if request.trial is not None]
            self._preparing.wait(outputs, trials)
        # What was prepared for a request meanwhile is part of what it took.
        return [priced(outputs[part.request_id], self._preparing.take_seconds(part.request_id)) for part in batch]

    def forget(self, request_id: int) -> None:
        """Ends a request in vLLM's engine, unless it has ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.trial is not None:
            self._trials.leave(request.trial)
        self._preparing.forget(request_id)
        self._engine.abort_request(request.names)

    def reset_mm_cache(self) -> None:
        """Has vLLM forget media, when the one that is being prepared is done."""
        reset: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._resets.append(reset)
        self._preparing.threads[MEDIA].submit("", self._reset_in_turn)  # unless a medium comes first, which does it, too
        reset.result()

    def _reset_in_turn(self) -> tuple[None, float]:
        self._reset()
        return None, 0.0

    def _reset(self) -> None:
        """Has the media's thread do what cannot be done while it prepares a medium."""
        while self._resets:
            reset = self._resets.popleft()
            try:
                self._engine.reset_mm_cache()
            except Exception as error:  # noqa: BLE001 - it is raised where the reset was asked for
                reset.set_exception(error)
            else:
                reset.set_result(None)

    def close(self) -> None:
        """Ends vLLM's workers, if it has any, and gives the memory of accelerators back; the rest goes with the process."""
        self._preparing.close()
        self._trials.close()
        self._engine.model_executor.shutdown()

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
            return _GOES_ON
        if request is None:
            if isinstance(payload, EncodeRequest) and self._pooling is None:
                raise ValueError(f"the model {self._name!r} answers prompts; it does not embed")
            if isinstance(payload, EncodeRequest) and not payload.inputs:
                raise ValueError("a request to encode has at least one input")
            request = _Request(len(payload.inputs) if isinstance(payload, EncodeRequest) else 1, next(self._turns))
            self._requests[part.request_id] = request
            if isinstance(payload, GenerateRequest) and (structure := payload.sampling.structured_outputs) is not None:
                request.trial = self._trials.enter(form_of(structure), payload.owner)
        if (trial := request.trial) is not None:
            if not trial.future.done():
                return _WAITS
            if seconds := trial.take_seconds(payload.owner):
                return msgspec.structs.replace(_WAITS, seconds=seconds)  # a request that fails in a step pays for nothing in it
            request.trial = None
            self._trials.look(trial)
        while len(request.names) < request.inputs:
            if part.request_id not in self._preparing and not self._begin_piece(part.request_id, request, payload):
                return _WAITS
            if (prepared := self._preparing.take(part.request_id)) is None:
                return _WAITS
            if isinstance(prepared, StepOutput):
                self.forget(part.request_id)
                return prepared
            self._add(part.request_id, request, payload, prepared)
        return _GOES_ON

    def _begin_piece(self, request_id: int, request: _Request, payload: EncodeRequest | GenerateRequest) -> bool:
        """Prepares the next prompts of a request, or has that done; returns whether it is time for that."""
        items: Sequence[Text | Medium] = []
        if isinstance(payload, GenerateRequest):
            characters, has_media = count_characters(payload), bool(payload.media)
        else:
            if len(request.names) - len(request.embeddings) >= _MOST_AHEAD:
                return False
            items = _next_inputs(payload, len(request.names))
            characters = sum(len(item.text) for item in items if isinstance(item, Text))
            has_media = not isinstance(items[0], Text)
        cost = characters + _TEXT_CHARACTERS * len(items)
        thread = thread_for(characters, has_media=has_media)
        if thread is None and not self._preparing.has_room(cost):
            return False
        if thread is None:
            request.turn = next(self._turns)
        prepare = self._prepare_media if thread == MEDIA else self._prepare
        self._preparing.begin(request_id, functools.partial(prepare, payload, items), cost, thread, payload.owner)
        return True

    def _prepare_media(self, payload: EncodeRequest | GenerateRequest, items: Sequence[Text | Medium]) -> _Prepared:
        self._reset()
        return self._prepare(payload, items)

    def _prepare(self, payload: EncodeRequest | GenerateRequest, items: Sequence[Text | Medium]) -> _Prepared:
        if isinstance(payload, EncodeRequest):
            return [self._builder.build_input(item) for item in items]
        if payload.tokenize:
            tokens, text = self._builder.tokenize(payload)
            return StepOutput(GenerateReply(text, tokens, len(tokens), 0, "stop"))
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
            readers = self._builder.readers_of(payload, tokens)
            request.answers += [_Answer(reader, params.logprobs or 0) for reader in readers]
        for prompt in prompts:
            name = f"{request_id}-{len(request.names)}"
            request.names.append(name)
            self._engine.add_request(name, prompt, params)

    # -- what goes -----------------------------------------------------------------------------------------------------

    def _step(self) -> dict[int, StepOutput | Exception]:
        """Executes a step; returns the outputs of the requests for which something came of it."""
        made = step_engine(self._engine)
        replies: dict[int, list[GenerateReply]] = {}
        outputs: dict[int, StepOutput | Exception] = {}
        for output in made:
            name, _, number = output.request_id.partition("-")
            request_id = int(name)
            request = self._requests.get(request_id)
            if request is None or isinstance(outputs.get(request_id), Exception):
                continue
            try:
                if request.answers:
                    replies.setdefault(request_id, []).extend(_replies(request, output, self._contents))
                else:
                    request.embeddings[int(number)] = output.outputs.data
            except Exception as error:  # noqa: BLE001 - it fails the request that it is about
                outputs[request_id] = _report(error)
        for request_id in {int(output.request_id.partition("-")[0]) for output in made} - outputs.keys():
            if (request := self._requests.get(request_id)) is not None:
                outputs[request_id] = _output(request, replies.get(request_id, []))
        for request_id, result in outputs.items():
            if isinstance(result, Exception) or result.finished:
                self.forget(request_id)
        return outputs


def step_engine(engine: Any) -> list[Any]:
    """Executes a step of vLLM's; returns what came of it.

    Raises:
        ExecutorDeadError: it has failed.
    """
    try:
        made: list[Any] = engine.step()
    except Exception as error:  # noqa: BLE001 - any error of vLLM's engine is its end
        logger.critical("vLLM's engine has failed\n%s", traceback.format_exc())
        raise ExecutorDeadError(f"vLLM's engine has failed: {type(error).__name__}: {shortened(error)}") from None
    if not made:
        time.sleep(_PAUSE_S)
    return made


def share_seconds(
    outputs: Mapping[int, StepOutput | Exception], weights: Mapping[int, int], seconds: float
) -> dict[int, StepOutput | Exception]:
    """Returns the outputs of requests with what they took of a step."""
    whole = max(1, sum(weights.values()))
    return {
        number: priced(outputs[number], seconds * weight / whole) for number, weight in weights.items() if number in outputs
    }


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
    content, *others = contents.of([chosen, *top])
    logprobs = [(other, likely[token].logprob) for other, token in zip(others, top, strict=True)]
    return TokenLogprobs(content, likely[chosen].logprob, logprobs)


def _output(request: _Request, replies: list[GenerateReply]) -> StepOutput:
    if request.answers:
        finished = all(answer.ended for answer in request.answers)
        return StepOutput(replies[0] if replies else None, finished=finished, others=replies[1:])
    if len(request.names) < request.inputs:
        return _WAITS
    if len(request.embeddings) < request.inputs:
        return _GOES_ON
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


def start_engine(options: ExecutorOptions, defaults: Mapping[str, Any]) -> Any:
    """Starts vLLM's engine.

    Args:
        options: of an executor.
        defaults: arguments of the engine that are not among the options.

    Raises:
        ImportError, OSError, ValueError: as :class:`VllmExecutor`.
    """
    # vLLM reads these when it is imported. Its engine is to be in this process, and its log is to be ours.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    if not options.model:
        raise ValueError("the vllm executor needs a model: a directory, or a name on the Hugging Face hub")
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ImportError(f"the vllm executor needs {error.name}: install shmring in vLLM's environment") from None
    if findings := broken(find_engine, CHECKS):
        raise ImportError(f"vLLM {vllm.__version__} is not as the vllm executor needs it: {'; '.join(findings)}")
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    known = {field.name for field in dataclasses.fields(arguments)} - _SAID_ELSEWHERE
    if unknown := sorted(set(options.options) - known):
        elsewhere = " here; it has an option of its own" if unknown[0] in _SAID_ELSEWHERE else ""
        raise ValueError(f"vLLM's engine takes no argument {unknown[0]!r}{elsewhere}")
    path = Path(options.model).expanduser()
    given = dict(defaults) | dict(options.options) | {"mm_processor_kwargs": dict(options.mm_processor_kwargs) or None}
    try:
        config = arguments(model=str(path) if path.is_dir() else options.model, **given).create_engine_config()
        executor = importlib.import_module("vllm.v1.executor").Executor.get_class(config)
        engine = find_engine().LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
    except (ImportError, OSError):
        raise
    except ValueError as error:
        raise ValueError(f"vLLM can't start with model {options.model!r}: {shortened(error)}") from error
    except Exception as error:  # noqa: BLE001 - whatever keeps it from starting is one line for the operator, and in the log
        logger.critical("vLLM can't start\n%s", traceback.format_exc())
        raise OSError(f"vLLM can't start with model {options.model!r}: {shortened(error)}") from None
    engine.renderer._mm_processor_cache = engine.renderer._mm_processor_only_cache
    return engine


def _report(error: Exception) -> Exception:
    """Returns an error of the same meaning that holds no frames, which hold media."""
    return report(error, (ValueError, importlib.import_module("vllm.exceptions").VLLMClientError))
