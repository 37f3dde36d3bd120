"""The ``transformers`` executor: answers about pictures and clips, and embeddings, by a model of Hugging Face transformers.

A step reads one token of each answer that is being written, and a piece of the prompts that wait, all in one pass of the model
(see :mod:`.generation`). With the last token of its prompt, a request has the first token of its answer. What it needs from
step to step is its answer (:mod:`.written`), most of which is the model's keys and values. :meth:`TransformersExecutor.forget`
lets go of it.

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

- no view of the slab outlives the steps in which its request keeps its slots. Errors are therefore returned as new ones with
  the text of what was raised: the frames of a traceback hold views;
- a request that fails takes no other with it, and leaves no state.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from shmring.core.loggers import logger_of
from shmring.engine.executors.callers_texts import count_characters
from shmring.engine.executors.checkpoint import Checkpoint, LoadSettings, load_checkpoint
from shmring.engine.executors.detokenizer import TokenBytes
from shmring.engine.executors.embedding import POOLINGS, Embedder
from shmring.engine.executors.encoding import Encoded, EncodingLine
from shmring.engine.executors.failures import report, shortened
from shmring.engine.executors.forms import can_require_calls
from shmring.engine.executors.generation import LanguageModel, Prompt
from shmring.engine.executors.grammars import Grammar, Grammars
from shmring.engine.executors.interface import (
    COMES_AGAIN,
    GOES_ON,
    ExecutorDeadError,
    ExecutorOptions,
    StepInput,
    StepOutput,
    priced,
)
from shmring.engine.executors.passes import Passes
from shmring.engine.executors.preparing import FORMS, MEDIA, TEXTS, Preparing, Stages, is_long, thread_for
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.executors.sampling import Choice, choose_together
from shmring.engine.executors.written import Answer
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    Picture,
    Text,
    tensor_of,
)

__all__ = ["TransformersExecutor", "TransformersOptions"]

logger = logger_of("shmring.engine.executors.transformers")

# Keys and values of this many contexts fit beside a model of some billions of parameters; the model's own option says better.
_MAX_NUM_SEQS = 16

# The estimated cost of an input to encode, in seconds: with any model, requests with one input come first.
_FORWARD_S = 0.003
_TEXTS = 64  # to be embedded, which a step is offered; as many of them as fit a pass are computed together

# Media that a step copies, while answers wait: some ten milliseconds. One that is larger has a step to itself.
_COPIED_NBYTES = 32 << 20


_SIDE = 64  # pixels; of the picture that a model is tried with


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
        if (reason := self._model.check(self._make_examples)) is not None:
            logger.info("%s reads one request at a time: %s", self._checkpoint.name, reason)
        #: Of prompts that are prepared on a thread, by its name; None: within a step.
        self._prompts_of: dict[str | None, PromptBuilder] = {None: self._prompts}
        for thread in (MEDIA, TEXTS):
            self._prompts_of[thread] = PromptBuilder(_copied(self._checkpoint), options.mm_processor_kwargs)
            self._prompts_of[thread].input = self._prompts.input
        self._preparing = Preparing[_Prepared]()
        self._long_texts: dict[int, _Tokens] = {}  # of requests to encode
        # Seconds of this step, by request, and of other threads.
        self._taken, self._beside = defaultdict[int, float](float), defaultdict[int, float](float)
        self._passes = Passes(self._model, may_batch=settings.batch_decode)
        #: What steps were spent on so far, in seconds: laying prompts out, passes of the model for prompts, for answers, and
        #: for answers that are read alone; choosing tokens; embedding; waiting for what is prepared beside them. And what other
        #: threads spent on forms, and on laying long prompts out.
        parts = ("layout", "prompts", "answers", "alone", "choosing", "embedding", "waiting", "forms", "preparing")
        self.spent_s = dict.fromkeys(parts, 0.0)
        self._embedder: Embedder | None = None
        if self._model.can_read:
            self._embedder = Embedder(self._prompts, self._model, settings.pooling, self._checkpoint.max_model_len)
        self._answers: dict[int, list[Answer]] = {}  # that are being written
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
        texts = self._prompts.texts
        can = {
            "generate": texts.has_template,
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
            tools=texts.has_tools,
            template_options=texts.has_template,
            reasoning_effort=texts.has_effort,
            strict_tools=can_require_calls(texts.response_template) and self._grammars.missing() is None,
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
        self._preparing.begin_step(self._owners_of(batch))
        self._taken.clear()
        self._beside.clear()
        for part in batch:
            if isinstance(part.payload, EncodeRequest):
                self._begin_encoding(part.request_id, part.payload, to_encode, outputs)
                continue
            nbytes = 0 if part.payload is None else sum(tensor_of(medium).nbytes for medium in part.payload.media)
            if nbytes and copied_nbytes and copied_nbytes + nbytes > _COPIED_NBYTES:
                outputs[part.request_id] = COMES_AGAIN
                continue
            outputs[part.request_id] = GOES_ON
            if part.payload is not None:
                with self._spending("layout", part.request_id):
                    outputs[part.request_id] = self._begin(part.request_id, part.payload)
                copied_nbytes += nbytes if outputs[part.request_id] is GOES_ON else 0
            elif part.request_id not in self._answers and part.request_id not in self._preparing:
                outputs[part.request_id] = RuntimeError(f"request {part.request_id} goes on, and was not begun")
        self._enter(outputs, is_idle=not to_encode)
        self._advance(outputs, {part.request_id: part.answers for part in batch})
        with self._spending("embedding"):
            outputs.update(self._line.execute(to_encode))
        for request_id, output in outputs.items():
            self._take(self._beside, request_id, FORMS, self._grammars.take_seconds(request_id))
            for what, seconds in self._preparing.take_seconds(request_id).items():
                self._take(self._beside, request_id, what, seconds)
            if isinstance(output, Exception) or output.finished:
                self.forget(request_id)
        numbers = [part.request_id for part in batch]
        return [priced(outputs[number], self._taken[number], self._beside[number]) for number in numbers]

    def _owners_of(self, batch: Sequence[StepInput]) -> set[str]:
        """Returns who begins with a request in a step, or has an answer in it."""
        owners = {part.payload.owner for part in batch if part.payload is not None}
        return owners | {answer.owner for part in batch for answer in self._answers.get(part.request_id, ())}

    def waits_for(self, request_id: int) -> str:
        """Says what a request of the step waits for; nothing, if its answer is being written. From any thread."""
        if (stage := self._preparing.stage_of(request_id)) is not None:
            return f"its {'form' if stage.part == FORMS else 'prompt'} is being prepared"
        answers = self._answers.get(request_id, [])
        if any(answer.waits_for_form() for answer in answers):
            return "its form is being looked up"
        for answer in answers:
            if (prompt := answer.context.prompt) is not None:
                return f"its prompt is being read: {answer.context.length:,} of {len(prompt):,} tokens"
        return ""

    def working_s(self) -> dict[str, dict[str, float]]:
        """Says for how long threads have worked beside steps on what has not ended, by part and owner. From any thread."""
        return {"forms": self._grammars.working_s(), "preparing": self._preparing.working_s()}

    @contextlib.contextmanager
    def _spending(self, part: str, request_id: int | None = None) -> Iterator[None]:
        """Counts the time of a block as what the step was spent on, and what a request took of it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.spent_s[part] += seconds
            if request_id is not None:
                self._taken[request_id] += seconds

    def _take(self, taken: dict[int, float], request_id: int, part: str, seconds: float) -> None:
        taken[request_id] += seconds
        self.spent_s[part] += seconds

    def forget(self, request_id: int) -> None:
        """Lets go of a request's keys and values, or of its embeddings so far."""
        self._preparing.forget(request_id)
        for answer in self._answers.pop(request_id, ()):
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

    def _begin(self, request_id: int, request: GenerateRequest) -> StepOutput | Exception:
        """Begins with a request, or goes on while it has its inputs."""
        if request_id not in self._preparing:
            self._preparing.begin(request_id, request.owner, self._stages(request_id, request))
        return self._open(request_id)

    def _open(self, request_id: int) -> StepOutput | Exception:
        """Goes on with what is prepared for a request. If it is ready, its first answer reads the prompt for all of them."""
        try:
            prepared = self._preparing.take(request_id)
            if isinstance(prepared, StepOutput):
                return prepared
            if isinstance(prepared, tuple):
                answers, prompt = prepared
                first, *first.twins = answers
                first.context = self._model.open(prompt)
                self._answers[request_id] = [first]
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            return _report(error)
        stage = self._preparing.stage_of(request_id)
        return COMES_AGAIN if stage is not None and stage.keeps_inputs else GOES_ON

    def _stages(self, request_id: int, request: GenerateRequest) -> Stages[_Prepared]:
        """Prepares a prompt. A request whose answer has a form waits for that first."""
        grammars: Sequence[Grammar | None] = [None] * request.sampling.n
        if request.needs_form:
            form = self._prompts.texts.form_of(request)
            grammars = yield from self._grammars.stages(request_id, form, request.sampling.n, request.owner)
        self._prompts.texts.check_length(request)
        characters = count_characters(request)
        thread = thread_for(characters, has_media=bool(request.media) and self._model.flat)
        if thread is None:
            yield from self._preparing.room_for(request.owner, characters)
            return self._prepare(request_id, request, self._prompts, grammars)
        request = msgspec.structs.replace(request, media=[_copy(medium) for medium in request.media])
        work = functools.partial(self._prepare, request_id, request, self._prompts_of[thread], grammars)
        return (yield from self._preparing.on_thread(thread, request.owner, work, keeps_inputs=False))

    def _prepare(
        self, request_id: int, request: GenerateRequest, prompts: PromptBuilder, grammars: Sequence[Grammar | None]
    ) -> _Prepared:
        if request.tokenize:
            return prompts.texts.tell_tokens(request, lambda request: prompts.build(request)["input_ids"][0].tolist())
        inputs = prompts.build(request)
        tokens = inputs["input_ids"][0]
        answers = [
            Answer(request_id, request, index, tokens, self._checkpoint, self._contents, reader, grammar)
            for index, (reader, grammar) in enumerate(zip(prompts.readers_of(request, tokens), grammars, strict=True))
        ]
        return answers, self._model.prepare(inputs)

    def _enter(self, outputs: dict[int, StepOutput | Exception], *, is_idle: bool) -> None:
        """Takes the prompts that are ready by now; waits for one a little if there is nothing else to do."""
        if is_idle and not any(self._answers.get(request_id) for request_id in outputs):
            with self._spending("waiting"):
                self._preparing.wait(outputs)
        for request_id, output in outputs.items():
            if output is GOES_ON and request_id in self._preparing:
                outputs[request_id] = self._open(request_id)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _advance(self, outputs: dict[int, StepOutput | Exception], room: Mapping[int, int | None]) -> None:
        """Reads a token of each answer, and pieces of prompts: together as far as possible.

        Args:
            outputs: of the step.
            room: for how many answers of each request.
        """
        running = [request_id for request_id, output in outputs.items() if output is GOES_ON and request_id in self._answers]
        written = [answer for request_id in running for answer in self._answers[request_id]]
        chosen = [(answer, answer.logits) for answer in written if answer.logits is not None]
        passes = self._passes.choose([answer for answer in written if answer.logits is None])
        chosen += self._read(passes, outputs)
        if chosen and not passes and not any(answer.is_ready() for answer, _ in chosen):
            with self._spending("waiting"):
                self._grammars.wait()
        chosen = self._those_ready(chosen, room)
        for answer, row in [*chosen]:
            try:
                with self._spending("choosing", answer.request_id):
                    chosen += self._begin_twins(answer, row, room)
            except Exception as error:  # noqa: BLE001 - if it were raised, other requests would lose their token
                outputs[answer.request_id] = _report(error)
        replies = self._choose(chosen, outputs)
        for request_id in running:
            if outputs[request_id] is GOES_ON:
                answers = self._answers[request_id]
                prompt_tokens = answers[0].prompt_tokens if answers else 0
                outputs[request_id] = StepOutput.of(replies[request_id], prompt_tokens, finished=not answers)

    def _read(self, passes: Sequence[dict[Answer, int]], outputs: dict[int, StepOutput | Exception]) -> list[_Chosen]:
        """Has the model read; returns the logits of next tokens."""
        found: list[_Chosen] = []
        left = [*passes]
        while left:
            pieces = left.pop()
            of_prompts = {answer for answer in pieces if answer.context.prompt is not None}
            began = time.perf_counter()
            try:
                logits = self._model.advance([(answer.context, count) for answer, count in pieces.items()])
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a step fails the requests in it
                if len(pieces) > 1 and not isinstance(error, torch.AcceleratorError):  # one may be at fault for all
                    logger.warning(
                        "a step of %d answers failed, and they are read one by one: %s", len(pieces), shortened(error)
                    )
                    left += [{answer: count} for answer, count in pieces.items()]
                else:
                    outputs.update(dict.fromkeys((answer.request_id for answer in pieces), _report(error)))
                continue
            self._note_pass(pieces, of_prompts, time.perf_counter() - began)
            found += [(answer, row) for answer, row in zip(pieces, logits, strict=True) if row is not None]
        return found

    def _note_pass(self, pieces: Mapping[Answer, int], of_prompts: Collection[Answer], seconds: float) -> None:
        """Notes what a pass took; some of its pieces were of prompts."""
        tokens = sum(pieces.values())
        self._passes.note(tokens, seconds)
        is_together = self._passes.can_batch(next(iter(pieces)))
        for answer, count in pieces.items():
            part = ("prompts" if answer in of_prompts else "answers") if is_together else "alone"
            self._take(self._taken, answer.request_id, part, seconds * count / tokens)

    def _choose(
        self, chosen: Sequence[_Chosen], outputs: dict[int, StepOutput | Exception]
    ) -> defaultdict[int, list[GenerateReply]]:
        """Chooses next tokens; returns what is new of each request's answers."""
        replies = defaultdict[int, list[GenerateReply]](list)
        choices = choose_together([(answer.sampler, row, answer.grammar) for answer, row in chosen])
        now = time.perf_counter()
        for (answer, _), choice in zip(chosen, choices, strict=True):
            began = now
            try:
                replies[answer.request_id] += self._go_on(answer, choice)
            except Exception as error:  # noqa: BLE001 - if it were raised, other requests would lose their token
                outputs[answer.request_id] = _report(error)
            now = time.perf_counter()
            answer.choosing_s = now - began + (0.0 if isinstance(choice, Exception) else choice.seconds)
            self._take(self._taken, answer.request_id, "choosing", answer.choosing_s)
        return replies

    def _those_ready(self, chosen: Sequence[_Chosen], room: Mapping[int, int | None]) -> list[_Chosen]:
        """Returns the answers whose next token can be chosen. Others wait for their grammars, or for room, and keep their
        logits."""
        ready = []
        for answer, row in chosen:
            if answer.is_ready() and _has_room(answer, room):
                answer.logits = None
                ready.append((answer, row))
            elif answer.logits is None:
                answer.logits = row.clone()
        return ready

    def _begin_twins(self, answer: Answer, logits: torch.Tensor, room: Mapping[int, int | None]) -> list[_Chosen]:
        """Returns the answers behind one whose prompt was read, for which there is room; the first of the others waits."""
        begun: list[_Chosen] = []
        while answer.twins:
            twin = answer.twins.pop(0)
            twin.context = self._model.fork(answer.context)
            self._answers[answer.request_id].append(twin)
            if not _has_room(twin, room):
                twin.twins, answer.twins = answer.twins, []
                twin.logits = logits.clone()
            else:
                begun.append((twin, logits))
        return begun

    def _go_on(self, answer: Answer, choice: Choice | Exception) -> list[GenerateReply]:
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
                if request_id not in self._preparing:
                    self._preparing.begin(request_id, request.owner, self._read_long_texts(request))
                if (tokens := self._preparing.take(request_id)) is None:
                    outputs[request_id] = COMES_AGAIN
                    return
                assert isinstance(tokens, dict), "nothing else is prepared for a request to encode"
                self._long_texts[request_id] = tokens
            if long := self._long_texts[request_id]:
                inputs = [long.get(number) or item for number, item in enumerate(request.inputs)]
                request = msgspec.structs.replace(request, inputs=inputs)
            to_encode[request_id] = request
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            outputs[request_id] = _report(error)

    def _read_long_texts(self, request: EncodeRequest) -> Stages[_Prepared]:
        texts = [(number, item) for number, item in enumerate(request.inputs) if isinstance(item, Text)]
        long = [(number, item) for number, item in texts if is_long(len(item.text))]
        for _, item in long:
            self._prompts.texts.check_characters(len(item.text) if isinstance(item.text, str) else 0, None)
        tokens: _Tokens = {}
        for number, item in long:
            work = functools.partial(self._prompts_of[TEXTS].read_text, item)
            tokens[number] = yield from self._preparing.on_thread(TEXTS, request.owner, work)
        return tokens

    def _embed(self, items: Sequence[Text | Medium]) -> list[Encoded | Exception]:
        if self._embedder is None:
            raise ValueError(f"the model {self._checkpoint.name!r} answers conversations; it does not embed")
        return self._embedder.embed(items)


#: An answer, and the logits of its next token.
_Chosen: TypeAlias = tuple[Answer, torch.Tensor]

#: Long texts of a request to encode, in tokens, by their numbers.
_Tokens: TypeAlias = dict[int, Text]

#: The answers of a request, and their prompt; or what is told of tokens; or a request's long texts.
_Prepared: TypeAlias = tuple[list[Answer], Prompt] | StepOutput | _Tokens


def _has_room(answer: Answer, room: Mapping[int, int | None]) -> bool:
    answers = room[answer.request_id]
    return answers is None or answer.index < answers


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
