"""The ``transformers`` executor: answers about pictures and clips, and embeddings, by a model of Hugging Face transformers.

A request's first step computes its prompt, media included, and chooses the first token; afterwards the slots of its media go
back. Each further step chooses one token. What a request needs from step to step is its :class:`_Answer`, most of which is the
model's keys and values; :meth:`TransformersExecutor.forget` lets go of it.

Requests that run at the same time are decoded together where the model allows it (see :mod:`.generation`). One with a seed is
decoded by itself, so that it gives the same answer, bit for bit, whatever else is running. ``{"batch_decode": false}`` has all
decoded so.

Of what is to be embedded (see :mod:`.embedding`), a step computes one input. Requests to encode take turns, and those that wait
for theirs keep their slots and come again. A step is over for all of its requests at the same time, so a thousand pictures
embedded within one would stop every answer for as long as they take. This way a token waits for one of them at most, and so do
aborts and deadlines. (A new answer waits for a seat, though: ``max_num_seqs`` counts requests to encode, too.) Inputs are
computed one by one anyway, so all that is lost is the engine's turn between two steps: a tenth of a millisecond, where the
smallest of models takes one for an input.

Invariants:

- no view of the slab outlives the step it came with. Errors are therefore returned as new ones with the text of what was
  raised: the frames of a traceback hold views;
- a request that fails takes no other with it, and leaves no state.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from shmring.engine.answers import without_frames
from shmring.engine.executors.checkpoint import Checkpoint, LoadSettings, load_checkpoint
from shmring.engine.executors.detokenizer import Detokenizer
from shmring.engine.executors.embedding import POOLINGS, Embedder
from shmring.engine.executors.encoding import Encoded, EncodingLine
from shmring.engine.executors.generation import Context, LanguageModel
from shmring.engine.executors.interface import ContextLengthError, ExecutorDeadError, ExecutorOptions, StepInput, StepOutput
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.executors.sampling import Sampler
from shmring.engine.executors.stopping import StopTexts
from shmring.engine.protocol import (
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
    SamplingParams,
    Text,
)

__all__ = ["TransformersExecutor", "TransformersOptions"]

logger = logging.getLogger("shmring.engine.executors.transformers")

# Keys and values of this many contexts fit beside a model of some billions of parameters; the model's own option says better.
_MAX_NUM_SEQS = 16

# The estimated cost of an input to encode, in seconds: with any model, requests with one input come first.
_FORWARD_S = 0.003

_MAX_ERROR_CHARACTERS = 500  # of what a library says; some print whole tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersOptions(LoadSettings):
    """What ``options`` may hold, beside how the model is loaded.

    Attributes:
        max_num_seqs: requests that run at the same time.
        batch_decode: whether they are decoded together where possible.
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
        prompt: its tokens, shape (tokens,).
        checkpoint: the model.

    Raises:
        ValueError: the sampling parameters make no sense.
        ContextLengthError: the model has no room for the answer.

    Attributes:
        context: what the model knows of it; None until its prompt was computed.
        last_token: the token to go on with.
        repeatable: whether it must be the same again, bit for bit.
    """

    def __init__(self, sampling: SamplingParams, prompt: torch.Tensor, checkpoint: Checkpoint) -> None:
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        self.context: Context | None = None
        self.last_token = -1
        self.repeatable = sampling.seed is not None
        self._sampler = Sampler(sampling, prompt)
        self._stops = StopTexts(sampling.stop)
        self._detokenizer = Detokenizer(checkpoint.tokenizer)
        self._eos_token_ids = frozenset() if sampling.ignore_eos else checkpoint.eos_token_ids
        self._limit = ContextLengthError.check(len(prompt), sampling.max_tokens, checkpoint.max_model_len)
        self._prompt_tokens = len(prompt)
        self._completion_tokens = 0
        self._unsent: list[int] = []

    def advance(self, logits: torch.Tensor) -> StepOutput:
        """Chooses the next token; returns what is new, if it can be let go yet.

        Raises:
            RuntimeError: the logits are no numbers.
        """
        token = self._sampler.choose(logits)
        self.last_token = token
        self._completion_tokens += 1
        self._unsent.append(token)
        finish_reason: FinishReason | None = None
        if token in self._eos_token_ids:
            text, stopped = self._stops.push(self._detokenizer.flush())
            finish_reason = "stop"
        else:
            text, stopped = self._stops.push(self._detokenizer.push(token))
            if stopped:
                finish_reason = "stop"
            elif self._completion_tokens >= self._limit:
                rest, stopped = self._stops.push(self._detokenizer.flush())
                text += rest
                finish_reason = "stop" if stopped else "length"
        if finish_reason is not None and not stopped:
            text += self._stops.flush()
        return self._output(text, finish_reason)

    def _output(self, text: str, finish_reason: FinishReason | None) -> StepOutput:
        if not text and finish_reason is None:
            return StepOutput(finished=False)
        reply = GenerateReply(text, self._unsent, self._prompt_tokens, self._completion_tokens, finish_reason)
        self._unsent = []
        return StepOutput(reply, finished=finish_reason is not None)


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
        settings = _parse_options(options.options)
        self._checkpoint = load_checkpoint(options.model, settings)
        self._max_num_seqs = settings.max_num_seqs
        self._prompts = PromptBuilder(self._checkpoint, options.mm_processor_kwargs)
        self._model = LanguageModel(self._checkpoint.model)
        if settings.batch_decode and not self._model.check_batching():
            logger.info("%s is decoded one request at a time: it does not take batches of contexts", self._checkpoint.name)
        self._embedder: Embedder | None = None
        if self._model.can_read:
            self._embedder = Embedder(self._prompts, self._model, settings.pooling, self._checkpoint.max_model_len)
        self._answers: dict[int, _Answer] = {}
        self._line = EncodingLine(self._embed, lambda _: _FORWARD_S, _report, slice_s=0)  # a token of each answer beside it

    def describe(self) -> ModelDescription:
        """Says what it does."""
        can = {"generate": self._prompts.has_template, "encode": self._embedder is not None}
        return ModelDescription(
            executor="transformers",
            model=self._checkpoint.name,
            tasks=[task for task, possible in can.items() if possible],
            input=msgspec.structs.replace(self._prompts.input, text=self._embedder is not None),
            max_batch_size=self._max_num_seqs,
            embedding_size=None if self._embedder is None else self._embedder.size,
            max_model_len=self._checkpoint.max_model_len,
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Executes a step: one token of each answer, and one input to encode.

        Raises:
            ExecutorDeadError: the accelerator has failed.
        """
        outputs = self._decode([part.request_id for part in batch if part.payload is None])
        to_encode: dict[int, EncodeRequest] = {}
        for part in batch:
            if isinstance(part.payload, GenerateRequest):
                outputs[part.request_id] = self._begin(part.request_id, part.payload)
            elif isinstance(part.payload, EncodeRequest):
                to_encode[part.request_id] = part.payload
        outputs.update(self._line.execute(to_encode))
        for request_id, output in outputs.items():
            if isinstance(output, Exception) or output.finished:
                self.forget(request_id)
        return [outputs[part.request_id] for part in batch]

    def forget(self, request_id: int) -> None:
        """Lets go of a request's keys and values, or of its embeddings so far."""
        self._answers.pop(request_id, None)
        self._line.forget(request_id)

    def close(self) -> None:
        """Lets go of everything but the model, whose memory goes with this object."""
        self._answers.clear()

    # -- the first step ------------------------------------------------------------------------------------------------

    def _begin(self, request_id: int, request: GenerateRequest) -> StepOutput | Exception:
        try:
            inputs = self._prompts.build(request)
            answer = _Answer(request.sampling, inputs["input_ids"][0], self._checkpoint)
            answer.context, logits = self._model.prefill(inputs)
            output = answer.advance(logits)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            return _report(error)
        self._answers[request_id] = answer
        return output

    # -- further steps -------------------------------------------------------------------------------------------------

    def _decode(self, request_ids: Sequence[int]) -> dict[int, StepOutput | Exception]:
        """Adds a token to each request, together as far as possible."""
        together = [request_id for request_id in request_ids if self._can_batch(self._answers.get(request_id))]
        outputs = self._decode_together(together) if len(together) > 1 else {}
        for request_id in request_ids:
            if request_id not in outputs:
                outputs[request_id] = self._decode_alone(request_id)
        return outputs

    def _can_batch(self, answer: _Answer | None) -> bool:
        return (
            answer is not None
            and answer.context is not None
            and not answer.repeatable
            and self._model.can_batch(answer.context)
        )

    def _decode_together(self, request_ids: Sequence[int]) -> dict[int, StepOutput | Exception]:
        answers = [self._answers[request_id] for request_id in request_ids]
        contexts = [answer.context for answer in answers if answer.context is not None]
        try:
            logits = self._model.decode(contexts, [answer.last_token for answer in answers])
        except torch.OutOfMemoryError:
            logger.warning("%d requests do not fit into memory together; they are decoded one by one", len(contexts))
            return {}
        except Exception as error:  # noqa: BLE001 - as for one request
            failure = _report(error)
            return dict.fromkeys(request_ids, failure)
        return {request_id: _advance(answer, row) for request_id, answer, row in zip(request_ids, answers, logits, strict=True)}

    def _decode_alone(self, request_id: int) -> StepOutput | Exception:
        answer = self._answers.get(request_id)
        if answer is None or answer.context is None:
            return RuntimeError(f"request {request_id} goes on, and was not begun")
        try:
            logits = self._model.decode_alone(answer.context, answer.last_token)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
            return _report(error)
        return _advance(answer, logits)

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def _embed(self, item: Text | Medium) -> Encoded:
        if self._embedder is None:
            raise ValueError(f"the model {self._checkpoint.name!r} answers conversations; it does not embed")
        return self._embedder.embed(item)


def _advance(answer: _Answer, logits: torch.Tensor) -> StepOutput | Exception:
    try:
        return answer.advance(logits)
    except Exception as error:  # noqa: BLE001 - if it were raised, other requests of the step would lose their token
        return _report(error)


def _report(error: Exception) -> Exception:
    """Returns an error of the same meaning that holds no frames.

    Raises:
        ExecutorDeadError: nothing can be computed any more.
    """
    if isinstance(error, ContextLengthError):
        return without_frames(error)
    text = str(error)[:_MAX_ERROR_CHARACTERS]
    if isinstance(error, ValueError):
        return ValueError(text)
    logger.error("a request failed\n%s", "".join(traceback.format_exception(error)))
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return RuntimeError(f"out of memory ({text}); try a lower max_num_seqs or max_model_len")
    if isinstance(error, torch.AcceleratorError):
        raise ExecutorDeadError(f"the accelerator has failed: {text}") from None
    return RuntimeError(f"{type(error).__name__}: {text}")


def _parse_options(options: Mapping[str, Any]) -> TransformersOptions:
    known = [field.name for field in dataclasses.fields(TransformersOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"the transformers executor has no option {unknown[0]!r}; it knows {', '.join(sorted(known))}")
    return TransformersOptions(**options)
