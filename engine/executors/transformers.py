"""The ``transformers`` executor: answers about pictures and clips, and embeddings, by a model of Hugging Face transformers.

A step reads one token of each answer that is being written, and a piece of the prompts that wait, all in one pass of the model
(see :mod:`.generation`). With the last token of its prompt, a request has the first token of its answer. What it needs from
step to step is its :class:`_Answer`, most of which is the model's keys and values. :meth:`TransformersExecutor.forget` lets go
of it.

A request with media is prepared beside steps (:mod:`.preparing`): the processor scales pictures, and the model looks at them.
Its media are copied before, in its first step, and then its slots go back. A step copies no more than some ten milliseconds
take; further requests keep their slots, and come again. Long texts are made into tokens beside steps as well; the library that
does it lets go of the interpreter.

A request with a seed is read by itself, so that it gives the same answer, bit for bit, whatever else is running.
``{"batch_decode": false}`` has all read so. With a model that :meth:`~.generation.LanguageModel.check` finds unfit for steps of
several requests, all are read so, too, and their prompts are prepared and read whole in the first step.

Of what is to be embedded (see :mod:`.embedding`), a step computes as many texts together as some hundred tokens, or one medium.
Requests to encode take turns, and those that wait for theirs keep their slots and come again. A step is over for all of its
requests at the same time, so a thousand pictures embedded within one would stop every answer for as long as they take. This way
a token waits for one of them at most, and so do aborts and deadlines. (A new answer waits for a seat, though: ``max_num_seqs``
counts requests to encode, too.)

Invariants:

- no view of the slab outlives the step it came with. Errors are therefore returned as new ones with the text of what was
  raised: the frames of a traceback hold views;
- a request that fails takes no other with it, and leaves no state.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
import torch

from shmring.core.loggers import logger_of
from shmring.engine.executors.callers_texts import count_characters
from shmring.engine.executors.checkpoint import Checkpoint, LoadSettings, load_checkpoint
from shmring.engine.executors.detokenizer import Detokenizer, TokenBytes
from shmring.engine.executors.embedding import POOLINGS, Embedder
from shmring.engine.executors.encoding import Encoded, EncodingLine
from shmring.engine.executors.failures import report, shortened
from shmring.engine.executors.generation import Context, LanguageModel, Prompt
from shmring.engine.executors.grammars import Grammar, Grammars
from shmring.engine.executors.interface import (
    ExecutorDeadError,
    ExecutorOptions,
    StepInput,
    StepOutput,
    priced,
)
from shmring.engine.executors.preparing import LOOKING_S, MEDIA, TEXTS, Preparing, is_long, thread_for
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.executors.sampling import Choice, Sampler, choose_together, longest_answer
from shmring.engine.executors.stopping import StopTexts
from shmring.engine.executors.tool_calls import Parts, ResponseReader, read
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    Picture,
    SamplingParams,
    Text,
    TokenLogprobs,
    tensor_of,
)

__all__ = ["TransformersExecutor", "TransformersOptions"]

logger = logger_of("shmring.engine.executors.transformers")

# Keys and values of this many contexts fit beside a model of some billions of parameters; the model's own option says better.
_MAX_NUM_SEQS = 16

# The estimated cost of an input to encode, in seconds: with any model, requests with one input come first.
_FORWARD_S = 0.003
_TEXTS = 64  # to be embedded, which a step is offered; as many of them as fit a pass are computed together

# Tokens of prompts in a step: while answers are written, and at most while none is. With a model of which a token takes a
# millisecond, an answer pauses for an eighth of a second. A prompt that is read by itself has pieces of the first length.
_PIECE_TOKENS = 128
_IDLE_TOKENS = 2048
_IDLE_S = 0.025  # that tokens of prompts take about, while no answer is written: whoever comes meanwhile waits for their end

# What choosing the tokens of one owner's answers may take of a step that others are in: as long as a pass of a small model.
_CHOOSING_S = 0.004

_LONE_PASSES = 2  # in a step, of answers that are read by themselves: each takes as long as one of all others together

# Media that a step copies, while answers wait: some ten milliseconds. One that is larger has a step to itself.
_COPIED_NBYTES = 32 << 20

_GOES_ON = StepOutput(finished=False)
_WAITS = StepOutput(finished=False, keep_inputs=True)  # for the form of its answer
_COMES_AGAIN = StepOutput(finished=False, keep_inputs=True)

_SIDE = 64  # pixels; of the picture that a model is tried with

_DESCRIBED = 64  # tokens with logprobs that wait for their text: a call of a tool may be long, and a message has a bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersOptions(LoadSettings):
    """What ``options`` may hold, beside how the model is loaded.

    Attributes:
        max_num_seqs: requests that run at the same time.
        batch_decode: whether they are read together where possible.
        pooling: which hidden states make an embedding: ``"last"`` or ``"mean"``, see :mod:`.embedding`.
    """

    max_num_seqs: int = _MAX_NUM_SEQS
    batch_decode: bool = True
    pooling: str = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_num_seqs) is not int or self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be a whole number of at least 1, got {self.max_num_seqs!r}")
        if type(self.batch_decode) is not bool:
            raise ValueError(f"batch_decode must be true or false, got {self.batch_decode!r}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")


class _Answer:
    """An answer that is being written.

    Args:
        sampling: how; checked here.
        owner: of the request.
        prompt: its tokens, shape (tokens,).
        checkpoint: the model.
        contents: of its tokens.
        reader: tells tool calls from text; None: all of it is text.
        grammar: what it may be, or what each call in it may be behind its opening mark, if the reader looks for these; None:
            anything.
        index: which of the request's answers it is.

    Raises:
        ValueError: the sampling parameters make no sense.
        ContextLengthError: the model has no room for the answer.

    Attributes:
        index: as given.
        context: what the model knows of it; set when its prompt is ready.
        logits: of its next token, while its grammar does not know which ones may be next.
        request_id: whose it is; set then, too.
        sampler: chooses its tokens.
        grammar: what says which tokens may be next, if anything does.
        twins: the answers behind it, until they are begun: the prompt is read once for all of them.
        owner: as given.
        repeatable: whether it must be the same again, bit for bit.
        turn: its last one, where not all answers are read in a step.
        choosing_s: what its last token took to choose.
    """

    context: Context
    request_id: int

    def __init__(
        self,
        sampling: SamplingParams,
        owner: str,
        prompt: torch.Tensor,
        checkpoint: Checkpoint,
        contents: TokenBytes,
        reader: ResponseReader | None = None,
        grammar: Grammar | None = None,
        index: int = 0,
    ) -> None:
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        self.repeatable = sampling.seed is not None
        self.owner = owner
        self.turn = 0
        self.choosing_s = 0.0
        self.twins: list[_Answer] = []
        self.index = index
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= checkpoint.eos_token_ids
        self.sampler = Sampler(sampling, prompt, self._ends, index)
        self._of_calls = grammar if reader is not None and reader.opening else None
        self.grammar = None if self._of_calls is not None else grammar
        self._min_tokens = sampling.min_tokens
        self.logits: torch.Tensor | None = None
        self._stops = StopTexts(sampling.stop)
        self._reader = reader
        self._detokenizer = Detokenizer(checkpoint.tokenizer, skip_special_tokens=reader is None)
        self._contents = contents
        self._limit = longest_answer(sampling, len(prompt), checkpoint.max_model_len)
        self._prompt_tokens = len(prompt)
        self._completion_tokens = 0
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprobs] = []

    def is_ready(self) -> bool:
        """Whether it is known which tokens may be next."""
        return self.grammar is None or self.grammar.is_ready()

    def advance(self, choice: Choice) -> GenerateReply | None:
        """Goes on with a token that was chosen; returns what is new, if it can be let go yet.

        Raises:
            FormError: the grammar is too complex.
        """
        token = self.context.token = choice.token
        self._completion_tokens += 1
        self._unsent.append(token)
        if self.sampler.logprobs is not None:
            tokens, logprobs = zip(*choice.likeliest, strict=True) if choice.likeliest else ((), ())
            content, *others = self._contents.of([token, *tokens])
            self._unsent_logprobs.append(TokenLogprobs(content, choice.logprob, list(zip(others, logprobs, strict=True))))
        finish_reason: FinishReason | None = None
        if token in self._ends:
            text, stopped = self._push(self._detokenizer.flush())
            finish_reason = "stop"
        else:
            if self.grammar is not None:
                self.grammar.take(token)
            text, stopped = self._push(self._detokenizer.push(token))
            is_complete = self.grammar is not None and self.grammar.complete and self._of_calls is None
            if stopped:
                finish_reason = "stop"
            elif is_complete or self._completion_tokens >= self._limit:
                rest, stopped = self._push(self._detokenizer.flush())
                text += rest
                finish_reason = "stop" if stopped or is_complete else "length"
        if finish_reason is not None and not stopped:
            text += self._stops.flush()
        return self._reply(text, finish_reason)

    def _push(self, text: str) -> tuple[str, bool]:
        """Looks for stop texts, of which none ends the answer too early."""
        return (text, False) if self._completion_tokens <= self._min_tokens else self._stops.push(text)

    def _constrain_call(self, grammar: Grammar) -> None:
        """Has a grammar say what is next while the answer is within a call.

        A token may have the end of a call's opening mark and more. If the call can't go on with that, it is left as it is.
        """
        assert self._reader is not None, "it has found the call"
        if self.grammar is not None and grammar.complete:
            self.grammar = None
        if self.grammar is None and (begun := self._reader.begun_call()) is not None and grammar.begin(begun):
            self.grammar = grammar

    def _reply(self, text: str, finish_reason: FinishReason | None) -> GenerateReply | None:
        parts, finish_reason = read(self._reader, text, finish_reason, stopped=self._stops.found is not None)
        if self._of_calls is not None:
            self._constrain_call(self._of_calls)
        if parts == Parts() and finish_reason is None and len(self._unsent_logprobs) < _DESCRIBED:
            return None
        reply = GenerateReply(
            parts.text,
            self._unsent,
            self._prompt_tokens,
            self._completion_tokens,
            finish_reason,
            parts.tool_calls,
            parts.reasoning,
            self.index,
            self._unsent_logprobs,
            self._stops.found,
        )
        self._unsent, self._unsent_logprobs = [], []
        return reply


class TransformersExecutor:
    """Answers conversations and embeds with a model of transformers.

    Args:
        options: ``model`` is a directory or a name on the hub. ``mm_processor_kwargs`` go to the processor's call.
            ``options`` may hold ``dtype``, ``device``, ``attn_implementation``, ``max_model_len`` (see
            :class:`~shmring.engine.executors.checkpoint.LoadSettings`), ``max_num_seqs``, ``batch_decode`` and ``pooling``.

    Raises:
        ImportError: transformers, or what the model needs beside it, is not installed.
        OSError: the model can't be loaded.
        ValueError: an option is unknown or makes no sense, or the model is none that answers.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        settings = parse_options(options.options)
        self._checkpoint = load_checkpoint(options.model, settings)
        self._contents = TokenBytes(self._checkpoint.tokenizer)
        self._max_num_seqs = settings.max_num_seqs
        self._prompts = PromptBuilder(self._checkpoint, options.mm_processor_kwargs)
        self._prompts.offer_processor()
        self._model = LanguageModel(self._checkpoint.model)
        self._batch_decode = settings.batch_decode
        if (reason := self._model.check(self._make_examples)) is not None:
            logger.info("%s reads one request at a time: %s", self._checkpoint.name, reason)
        #: Of prompts that are prepared on a thread, by its name; None: within a step.
        self._prompts_of: dict[str | None, PromptBuilder] = {None: self._prompts}
        for thread in (MEDIA, TEXTS):
            self._prompts_of[thread] = PromptBuilder(_copied(self._checkpoint), options.mm_processor_kwargs)
            self._prompts_of[thread].input = self._prompts.input
        self._preparing = Preparing[_Prepared]()
        # Of requests to encode, by their numbers: in tokens, or None until then.
        self._long_texts: dict[int, dict[int, Text | None]] = {}
        self._taken: defaultdict[int, float] = defaultdict(float)  # seconds of this step, by request
        self._turns = itertools.count(1)
        self._token_s = _IDLE_S / _IDLE_TOKENS  # of a token, in the last pass of many
        #: What steps were spent on so far, in seconds: laying prompts out, passes of the model for prompts, for answers, and
        #: for answers that are read alone; choosing tokens; embedding; waiting for what is prepared beside them. And what other
        #: threads spent on forms, and on laying long prompts out.
        parts = ("layout", "prompts", "answers", "alone", "choosing", "embedding", "waiting", "forms", "preparing")
        self.spent_s = dict.fromkeys(parts, 0.0)
        self._embedder: Embedder | None = None
        if self._model.can_read:
            self._embedder = Embedder(self._prompts, self._model, settings.pooling, self._checkpoint.max_model_len)
        self._answers: dict[int, list[_Answer]] = {}  # that are being written
        # By request: the next answer, which waits for room, and the logits behind the prompt.
        self._waiting: dict[int, tuple[_Answer, torch.Tensor]] = {}
        self._grammars = Grammars(self._checkpoint)
        # Once in a step: a token of each answer is beside it.
        self._line = EncodingLine(self._embed, lambda _: _FORWARD_S, _report, together=_TEXTS, slice_s=0)

    def _make_examples(self) -> list[dict[str, Any]]:
        """Returns a prompt with a picture, if the model takes any."""
        if self._prompts.input.picture is None:
            return []
        return [self._prompts.build_single(Picture(torch.arange(3 * _SIDE**2).reshape(_SIDE, _SIDE, 3).to(torch.uint8)))]

    def describe(self) -> ModelDescription:
        """Says what it does."""
        can = {
            "generate": self._prompts.has_template,
            "complete": True,
            "tokenize": True,
            "encode": self._embedder is not None,
        }
        return ModelDescription(
            executor="transformers",
            model=self._checkpoint.name,
            tasks=[task for task, possible in can.items() if possible],
            input=msgspec.structs.replace(self._prompts.input, text=self._embedder is not None),
            max_batch_size=self._max_num_seqs,
            pauses=True,
            embedding_size=None if self._embedder is None else self._embedder.size,
            max_model_len=self._checkpoint.max_model_len,
            tools=self._prompts.has_tools,
            template_options=self._prompts.has_template,
            reasoning_effort=self._prompts.has_effort,
            strict_tools=self._prompts.can_require_calls and self._grammars.missing() is None,
            capabilities=list(CAPABILITIES),
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Executes a step: one token of each answer, a piece of prompts, and some inputs to encode.

        Raises:
            ExecutorDeadError: the accelerator has failed.
        """
        outputs: dict[int, StepOutput | Exception] = {}
        to_encode: dict[int, EncodeRequest] = {}
        copied_nbytes = 0
        self._preparing.begin_step()
        self._taken.clear()
        for part in batch:
            if isinstance(part.payload, EncodeRequest):
                self._begin_encoding(part.request_id, part.payload, to_encode, outputs)
                continue
            nbytes = 0 if part.payload is None else sum(tensor_of(medium).nbytes for medium in part.payload.media)
            if nbytes and copied_nbytes and copied_nbytes + nbytes > _COPIED_NBYTES:
                outputs[part.request_id] = _COMES_AGAIN
                continue
            outputs[part.request_id] = _GOES_ON
            if part.payload is not None:
                with self._taking(part.request_id, "layout"):
                    self._begin(part.request_id, part.payload, outputs)
                copied_nbytes += nbytes if outputs[part.request_id] is _GOES_ON else 0
            elif part.request_id not in self._answers and part.request_id not in self._preparing:
                outputs[part.request_id] = RuntimeError(f"request {part.request_id} goes on, and was not begun")
        self._enter(outputs, is_idle=not to_encode)
        self._advance(outputs, {part.request_id: part.answers for part in batch})
        with self._spending("embedding"):
            outputs.update(self._line.execute(to_encode))
        for request_id, output in outputs.items():
            for beside, take_seconds in (("forms", self._grammars.take_seconds), ("preparing", self._preparing.take_seconds)):
                if (beside_s := take_seconds(request_id)) > 0:
                    self._take(request_id, beside, beside_s)
            if isinstance(output, Exception) or output.finished:
                self.forget(request_id)
        return [priced(outputs[part.request_id], self._taken.get(part.request_id, 0.0)) for part in batch]

    def waits_for(self, request_id: int) -> str:
        """Says what a request of the step waits for; nothing, if its answer is being written. From any thread."""
        if self._grammars.is_preparing(request_id):
            return "its form is being prepared"
        if request_id in self._preparing:
            return "its prompt is being prepared"
        answers = self._answers.get(request_id, [])
        if any(answer.logits is not None for answer in answers):
            return "its form is being looked up"
        for answer in answers:
            if (prompt := answer.context.prompt) is not None:
                return f"its prompt is being read: {answer.context.length:,} of {len(prompt):,} tokens"
        return ""

    def working_s(self) -> dict[str, dict[str, float]]:
        """Says for how long threads have worked beside steps on what has not ended, by part and owner. From any thread."""
        return {"forms": self._grammars.working_s(), "preparing": self._preparing.working_s()}

    @contextlib.contextmanager
    def _taking(self, request_id: int, part: str) -> Iterator[None]:
        """Counts the time of a block as what a request took of the step, and what the step was spent on."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._take(request_id, part, time.perf_counter() - began)

    @contextlib.contextmanager
    def _spending(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s[part] += time.perf_counter() - began

    def _take(self, request_id: int, part: str, seconds: float) -> None:
        self._taken[request_id] += seconds
        self.spent_s[part] += seconds

    def forget(self, request_id: int) -> None:
        """Lets go of a request's keys and values, or of its embeddings so far."""
        self._preparing.forget(request_id)
        waiting, _ = self._waiting.pop(request_id, (None, None))
        for answer in [*self._answers.pop(request_id, ()), *([waiting] if waiting is not None else [])]:
            self._model.close(answer.context)
        self._long_texts.pop(request_id, None)
        self._grammars.forget(request_id)
        self._line.forget(request_id)

    def close(self) -> None:
        """Lets go of everything but the model and threads that wait, which go with this object."""
        for request_id in [*self._answers, *self._long_texts]:
            self.forget(request_id)
        self._preparing.close()
        self._grammars.close()

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _begin(self, request_id: int, request: GenerateRequest, outputs: dict[int, StepOutput | Exception]) -> None:
        """Prepares a prompt; or has that done, if it takes long. A request whose answer has a form waits for that first."""
        try:
            grammars: Sequence[Grammar | None] = [None] * request.sampling.n
            if request.needs_form:
                ready = self._grammars.ready(
                    request_id, lambda: self._prompts.form_of(request), request.sampling.n, request.owner
                )
                if ready is None:
                    outputs[request_id] = _WAITS
                    return
                grammars = ready
            self._prompts.check_length(request)
            characters = count_characters(request)
            thread = thread_for(characters, has_media=bool(request.media) and self._model.flat)
            if thread is not None:
                request = msgspec.structs.replace(request, media=[_copy(medium) for medium in request.media])
            elif not self._preparing.has_room(characters):
                outputs[request_id] = _COMES_AGAIN
                return
            work = functools.partial(self._prepare, request, self._prompts_of[thread], grammars)
            self._preparing.begin(request_id, work, characters, thread, request.owner)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            outputs[request_id] = _report(error)

    def _prepare(self, request: GenerateRequest, prompts: PromptBuilder, grammars: Sequence[Grammar | None]) -> _Prepared:
        if request.tokenize:
            token_ids, text = prompts.tokenize(request)
            return StepOutput(GenerateReply(text, token_ids, len(token_ids), 0, "stop"))
        inputs = prompts.build(request)
        tokens = inputs["input_ids"][0]
        answers = [
            _Answer(request.sampling, request.owner, tokens, self._checkpoint, self._contents, reader, grammar, index)
            for index, (reader, grammar) in enumerate(zip(prompts.readers_of(request, tokens), grammars, strict=True))
        ]
        return answers, self._model.prepare(inputs)

    def _open(self, request_id: int, answers: Sequence[_Answer], prompt: Prompt) -> None:
        """Begins with the first answer, which reads the prompt for all of them."""
        for answer in answers:
            answer.request_id = request_id
        first, *first.twins = answers
        first.context = self._model.open(prompt)
        self._answers[request_id] = [first]

    def _enter(self, outputs: dict[int, StepOutput | Exception], *, is_idle: bool) -> None:
        """Takes the prompts that are ready by now; waits for one a little if there is nothing else to do."""
        if is_idle and outputs and all(output is _WAITS for output in outputs.values()):
            with self._spending("waiting"):
                self._grammars.wait(LOOKING_S)
        if is_idle and not any(self._answers.get(request_id) for request_id in outputs):
            with self._spending("waiting"):
                self._preparing.wait(outputs)
        for request_id in [request_id for request_id, output in outputs.items() if output is _GOES_ON]:
            try:
                prepared = self._preparing.take(request_id)
                if isinstance(prepared, StepOutput):
                    outputs[request_id] = prepared
                elif isinstance(prepared, tuple):
                    self._open(request_id, *prepared)
            except Exception as error:  # noqa: BLE001 - as in the request's first step
                outputs[request_id] = _report(error)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _advance(self, outputs: dict[int, StepOutput | Exception], room: Mapping[int, int | None]) -> None:
        """Reads a token of each answer, and pieces of prompts: together as far as possible.

        Args:
            outputs: of the step.
            room: for how many answers of each request.
        """
        running = [request_id for request_id, output in outputs.items() if output is _GOES_ON and request_id in self._answers]
        written = [answer for request_id in running for answer in self._answers[request_id]]
        chosen = [(answer, answer.logits) for answer in written if answer.logits is not None]
        answers = [answer for answer in written if answer.logits is None]
        pieces = self._choose_pieces(self._share_choosing([answer for answer in answers if self._can_batch(answer)]))
        passes = [list(pieces)] if pieces else []
        for answer in self._choose_lone([answer for answer in answers if not self._can_batch(answer)]):
            pieces[answer] = min(answer.context.unread, _PIECE_TOKENS) if self._model.flat else answer.context.unread
            passes.append([answer])
        replies: dict[int, list[GenerateReply]] = {request_id: [] for request_id in running}
        begun = [self._waiting.pop(request_id) for request_id in running if self._has_room(request_id, room)]
        for answer, _ in begun:
            self._answers[answer.request_id].append(answer)
        chosen += begun
        while passes:
            answers = passes.pop()
            is_together, tokens = self._can_batch(answers[0]), sum(pieces[answer] for answer in answers)
            of_prompts = sum(pieces[answer] for answer in answers if answer.context.prompt is not None)
            began = time.perf_counter()
            try:
                logits = self._model.advance([(answer.context, pieces[answer]) for answer in answers])
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a step fails the requests in it
                if len(answers) > 1 and not isinstance(error, torch.AcceleratorError):  # one may be at fault for all
                    logger.warning(
                        "a step of %d answers failed, and they are read one by one: %s", len(answers), shortened(error)
                    )
                    passes += [[answer] for answer in answers]
                else:
                    outputs.update(dict.fromkeys((answer.request_id for answer in answers), _report(error)))
                continue
            token_s = (time.perf_counter() - began) / tokens
            self.spent_s["prompts" if is_together else "alone"] += token_s * of_prompts
            self.spent_s["answers" if is_together else "alone"] += token_s * (tokens - of_prompts)
            if tokens >= _PIECE_TOKENS:
                self._token_s = token_s
            for answer in answers:
                self._taken[answer.request_id] += token_s * pieces[answer]
            chosen += [(answer, row) for answer, row in zip(answers, logits, strict=True) if row is not None]
        if chosen and not pieces and not any(answer.is_ready() for answer, _ in chosen):
            with self._spending("waiting"):
                self._grammars.wait(LOOKING_S)
        chosen = self._those_ready(chosen)
        twins: list[tuple[_Answer, torch.Tensor]] = []
        for answer, row in chosen:
            if not answer.twins:
                continue
            try:
                with self._taking(answer.request_id, "choosing"):
                    twins += [(twin, row) for twin in self._begin_twins(answer, row, room[answer.request_id])]
            except Exception as error:  # noqa: BLE001 - if it were raised, other requests would lose their token
                outputs[answer.request_id] = _report(error)
        chosen += twins
        choices = choose_together([(answer.sampler, row, answer.grammar) for answer, row in chosen])
        now = time.perf_counter()
        for (answer, _), choice in zip(chosen, choices, strict=True):
            began = now
            try:
                replies[answer.request_id] += self._go_on(answer, choice)
            except Exception as error:  # noqa: BLE001 - as above
                outputs[answer.request_id] = _report(error)
            now = time.perf_counter()
            answer.choosing_s = now - began + (0.0 if isinstance(choice, Exception) else choice.seconds)
            self._take(answer.request_id, "choosing", answer.choosing_s)
        for request_id in running:
            if outputs[request_id] is _GOES_ON:
                first, others = next(iter(replies[request_id]), None), replies[request_id][1:]
                finished = not self._answers[request_id] and request_id not in self._waiting
                outputs[request_id] = StepOutput(first, finished=finished, others=others)

    def _those_ready(self, chosen: Sequence[tuple[_Answer, torch.Tensor]]) -> list[tuple[_Answer, torch.Tensor]]:
        """Returns the answers whose next token can be chosen. The others wait for their grammars, and keep their logits."""
        ready = []
        for answer, row in chosen:
            if answer.is_ready():
                answer.logits = None
                ready.append((answer, row))
            elif answer.logits is None:
                answer.logits = row.clone()
        return ready

    def _has_room(self, request_id: int, room: Mapping[int, int | None]) -> bool:
        """Whether an answer of a request waits, and need not any more."""
        if request_id not in self._waiting:
            return False
        answers = room[request_id]
        return answers is None or self._waiting[request_id][0].index < answers

    def _begin_twins(self, answer: _Answer, logits: torch.Tensor, room: int | None) -> list[_Answer]:
        """Returns the answers behind one whose prompt was read, for which there is room; the first of the others waits."""
        begun = []
        while answer.twins:
            twin = answer.twins.pop(0)
            twin.context = self._model.fork(answer.context)
            if room is not None and twin.index >= room:
                twin.twins, answer.twins = answer.twins, []
                self._waiting[answer.request_id] = twin, logits.clone()
                break
            self._answers[answer.request_id].append(twin)
            begun.append(twin)
        return begun

    def _go_on(self, answer: _Answer, choice: Choice | Exception) -> list[GenerateReply]:
        """Returns what is new of an answer whose next token was chosen.

        Raises:
            Exception: none could be.
        """
        if isinstance(choice, Exception):
            raise choice
        reply = answer.advance(choice)
        if reply is None:
            return []
        if reply.finish_reason is not None:
            self._answers[answer.request_id].remove(answer)
            self._model.close(answer.context)
        return [reply]

    def _choose_pieces(self, answers: Sequence[_Answer]) -> dict[_Answer, int]:
        """Returns how many tokens of each answer's context are read together in this step; those of none are missing.

        Of the tokens of prompts, half are given out in the order of the step, and the others to the shortest prompts: so none
        waits for all long ones, and none waits for ever. While nothing is written, those that can be read to their ends are,
        and what is longer gets no more beside them than beside answers, since answers begin in this step.
        """
        pieces = {answer: 1 for answer in answers if answer.context.prompt is None}
        prompts = [answer for answer in answers if answer.context.prompt is not None]
        left = _PIECE_TOKENS
        shortest_first = sorted(prompts, key=lambda answer: answer.context.unread)
        if not pieces:
            left = max(_PIECE_TOKENS, min(_IDLE_TOKENS, int(_IDLE_S / self._token_s)))
            for answer in shortest_first:
                if answer.context.unread > left - _PIECE_TOKENS // 2:
                    break
                pieces[answer] = answer.context.unread
                left -= pieces[answer]
            if pieces:
                left = min(left, _PIECE_TOKENS)
        for line, kept in ((prompts, left // 2), (shortest_first, 0)):
            for answer in line:
                count = min(answer.context.unread - pieces.get(answer, 0), left - kept)
                if count > 0:
                    pieces[answer] = pieces.get(answer, 0) + count
                    left -= count
        return pieces

    def _choose_lone(self, answers: Sequence[_Answer]) -> list[_Answer]:
        """Returns the answers that are read alone in this step: the first one, and of the others the one whose turn is next."""
        chosen = [*answers[:1], *sorted(answers[1:], key=lambda answer: answer.turn)[: _LONE_PASSES - 1]]
        for answer in chosen:
            answer.turn = next(self._turns)
        return chosen

    def _share_choosing(self, answers: Sequence[_Answer]) -> Sequence[_Answer]:
        """Returns the answers that are read in this step: all of them, if they are one owner's. Otherwise, of each owner, as
        many as take some milliseconds to choose tokens for, in turn.
        """
        left = dict.fromkeys((answer.owner for answer in answers), _CHOOSING_S)
        if len(left) < 2 or sum(answer.choosing_s for answer in answers) <= _CHOOSING_S:
            return answers
        chosen = set()
        for answer in sorted(answers, key=lambda answer: answer.turn):
            if left[answer.owner] > 0:
                left[answer.owner] -= answer.choosing_s
                answer.turn = next(self._turns)
                chosen.add(answer)
        return [answer for answer in answers if answer in chosen]

    def _can_batch(self, answer: _Answer) -> bool:
        return self._model.flat and self._batch_decode and not answer.repeatable

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def _begin_encoding(
        self,
        request_id: int,
        request: EncodeRequest,
        to_encode: dict[int, EncodeRequest],
        outputs: dict[int, StepOutput | Exception],
    ) -> None:
        """Has a request encoded in this step, or its long texts made into tokens first, one by one."""
        try:
            if request_id not in self._long_texts:
                self._long_texts[request_id] = self._find_long_texts(request)
            long = self._long_texts[request_id]
            if (tokens := self._preparing.take(request_id)) is not None:
                assert isinstance(tokens, Text), "nothing else is prepared for a request to encode"
                long[_next_number(long)] = tokens
            if None not in long.values():
                inputs = [long.get(number) or item for number, item in enumerate(request.inputs)] if long else request.inputs
                to_encode[request_id] = msgspec.structs.replace(request, inputs=inputs)
                return
            if request_id not in self._preparing:
                text = cast("Text", request.inputs[_next_number(long)])
                work = functools.partial(_read_text, self._prompts_of[TEXTS], text)
                self._preparing.begin(request_id, work, len(text.text), TEXTS, request.owner)
            outputs[request_id] = _COMES_AGAIN
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            outputs[request_id] = _report(error)

    def _find_long_texts(self, request: EncodeRequest) -> dict[int, Text | None]:
        long: dict[int, Text | None] = {}
        for number, item in enumerate(request.inputs):
            if isinstance(item, Text) and is_long(len(item.text)):
                self._prompts.check_length(len(item.text) if isinstance(item.text, str) else 0)
                long[number] = None
        return long

    def _embed(self, items: Sequence[Text | Medium]) -> list[Encoded | Exception]:
        if self._embedder is None:
            raise ValueError(f"the model {self._checkpoint.name!r} answers conversations; it does not embed")
        return self._embedder.embed(items)


#: The answers of a request, and their prompt; or what is told of tokens; or a text to be embedded, in tokens.
_Prepared: TypeAlias = tuple[list[_Answer], Prompt] | StepOutput | Text


def _next_number(long: Mapping[int, Text | None]) -> int:
    """Returns the number of the first text that is not tokens yet."""
    return next(number for number, tokens in long.items() if tokens is None)


def _read_text(prompts: PromptBuilder, text: Text) -> Text:
    """Returns a text in tokens: in an array, which takes a ninth of a list's memory."""
    return Text(cast("list[int]", array("i", prompts.read_text(text))))


def _copied(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with a processor and tokenizer of its own: neither is for two threads."""
    if checkpoint.processor is None:
        return dataclasses.replace(checkpoint, tokenizer=copy.deepcopy(checkpoint.tokenizer))
    processor = copy.deepcopy(checkpoint.processor)
    return dataclasses.replace(checkpoint, processor=processor, tokenizer=processor.tokenizer)


def _copy(medium: Medium) -> Medium:
    """Returns a medium that is no view of the slab."""
    tensors = {name: value for name, value in msgspec.structs.asdict(medium).items() if isinstance(value, torch.Tensor)}
    return msgspec.structs.replace(medium, **{name: tensor.clone() for name, tensor in tensors.items()})


def _report(error: Exception) -> Exception:
    """Returns an error of the same meaning that holds no frames.

    Raises:
        ExecutorDeadError: nothing can be computed any more.
    """
    reported = report(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return RuntimeError(f"out of memory ({shortened(error)}); try a lower max_num_seqs or max_model_len")
    if isinstance(error, torch.AcceleratorError):
        raise ExecutorDeadError(f"the accelerator has failed: {shortened(error)}") from None
    return reported


def parse_options(options: Mapping[str, Any]) -> TransformersOptions:
    """Returns what ``options`` of an executor hold.

    Raises:
        ValueError: an option is unknown or makes no sense.
    """
    known = [field.name for field in dataclasses.fields(TransformersOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"the transformers executor has no option {unknown[0]!r}; it knows {', '.join(sorted(known))}")
    return TransformersOptions(**options)
