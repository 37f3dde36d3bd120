"""The ``synthetic`` executor: made-up answers at a set pace, for load tests of everything around a model.

It streams as many tokens as it is asked for, one a step, and takes a set time for each step and for each medium that it
sees for the first time, sleeping where a model would compute. It really reads its input: every medium must arrive with the
checksum that its frontend made, and a wrong one fails the request. So a benchmark with it is also a test of the transport.

All its answers say that they are synthetic: in the text, the model's name and the description.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import torch

from shmring.engine.answers import without_frames
from shmring.engine.executors.interface import ContextLengthError, ExecutorOptions, StepInput, StepOutput
from shmring.engine.executors.stopping import StopTexts
from shmring.engine.protocol import (
    EncodeReply,
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    Medium,
    ModelDescription,
    PictureSpec,
    SoundSpec,
    Text,
    TextPart,
    VideoSpec,
    checksum_of,
    tensor_of,
)

__all__ = ["SyntheticExecutor", "SyntheticOptions"]

_Options = TypeVar("_Options", bound=msgspec.Struct)

_LABEL = "[synthetic]"
_TOKENS_PER_MEDIUM = 64  # for the counts in usage; a real model takes tens to thousands


class SyntheticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``--executor-options`` takes.

    Attributes:
        step_s: seconds that a step takes.
        item_s: seconds more for each medium in its first step.
        tokens: of an answer whose request does not say how many.
        embedding_size: of an embedding.
        max_batch_size: requests in a step.
        max_model_len: tokens of prompt and answer together, as a real model has such a limit.
    """

    step_s: float = 0.0
    item_s: float = 0.0
    tokens: int = 128
    embedding_size: int = 512
    max_batch_size: int = 256
    max_model_len: int = 131_072


class _MediaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``--mm-processor-kwargs`` takes here: frames of a clip, pixels of a picture or frame."""

    num_frames: int = 10
    max_pixels: int | None = None


class _Answer(msgspec.Struct):
    """An answer that is being streamed."""

    prompt_tokens: int
    max_tokens: int
    stops: StopTexts
    sent: int = 0


class SyntheticExecutor:
    """Answers without a model; see the head of this file.

    Args:
        options: as :class:`SyntheticOptions`.

    Raises:
        ValueError: an option is unknown or wrong.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = _converted(options.options, SyntheticOptions)
        self._media = _converted(options.mm_processor_kwargs, _MediaOptions)
        if options.model is not None:
            raise ValueError("the synthetic executor has no model; leave --model out")
        if min(self._options.step_s, self._options.item_s) < 0:
            raise ValueError("the synthetic executor's times can't be negative")
        if min(self._options.tokens, self._options.embedding_size, self._options.max_batch_size) < 1:
            raise ValueError("the synthetic executor's counts can't be less than 1")
        if self._options.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self._options.max_model_len}")
        self._answers: dict[int, _Answer] = {}

    def describe(self) -> ModelDescription:
        return ModelDescription(
            executor="synthetic",
            model="shmring-synthetic",
            tasks=["encode", "generate", "complete"],
            input=InputSpec(
                text=True,
                tokens=True,
                picture=PictureSpec(self._media.max_pixels),
                sound=SoundSpec("waveform"),
                video=VideoSpec(self._media.num_frames, self._media.max_pixels),
                checksum=True,
            ),
            max_batch_size=self._options.max_batch_size,
            pauses=True,
            embedding_size=self._options.embedding_size,
            max_model_len=self._options.max_model_len,
            synthetic=True,
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        media = sum(len(_media_of(part.payload)) for part in batch if part.payload is not None)
        if seconds := self._options.step_s + self._options.item_s * media:
            time.sleep(seconds)
        return [self._advance(part) for part in batch]

    def forget(self, request_id: int) -> None:
        self._answers.pop(request_id, None)

    def close(self) -> None:
        self._answers.clear()

    def _advance(self, part: StepInput) -> StepOutput | Exception:
        if part.payload is not None:
            try:
                for medium in _media_of(part.payload):
                    _verify(medium)
                if isinstance(part.payload, EncodeRequest):
                    return StepOutput(self._embed(part.payload))
                self._answers[part.request_id] = self._begin(part.payload)
            except ValueError as error:
                return without_frames(error)  # they would keep the media's slots
        return self._next_token(self._answers[part.request_id])

    def _begin(self, request: GenerateRequest) -> _Answer:
        max_tokens = request.sampling.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if request.tokenize:
            raise ValueError("the synthetic executor has no tokens: it counts words")
        texts = [part.text for message in request.messages for part in message.parts if isinstance(part, TextPart)]
        words = _count(request.prompt or "") + sum(map(_count, texts))
        prompt_tokens = words + _TOKENS_PER_MEDIUM * len(request.media)
        room = ContextLengthError.check(prompt_tokens, max_tokens, self._options.max_model_len)
        answer_tokens = min(room, self._options.tokens) if max_tokens is None else max_tokens
        return _Answer(prompt_tokens, answer_tokens, StopTexts(request.sampling.stop))

    def _next_token(self, answer: _Answer) -> StepOutput:
        answer.sent += 1
        text, stopped = answer.stops.push(_LABEL if answer.sent == 1 else f" token{answer.sent}")
        finished = stopped or answer.sent == answer.max_tokens
        reason: FinishReason | None = None
        if finished:
            text += answer.stops.flush()
            reason = "stop" if stopped else "length"
        reply = GenerateReply(text, [answer.sent], answer.prompt_tokens, answer.sent, reason, stop_text=answer.stops.found)
        return StepOutput(reply, finished=finished)

    def _embed(self, request: EncodeRequest) -> EncodeReply:
        """Random directions: the same for the same input, and without any other meaning."""
        rows = [torch.randn(self._options.embedding_size, generator=_generator(item)) for item in request.inputs]
        embeddings = torch.nn.functional.normalize(torch.stack(rows), dim=1)
        return EncodeReply(embeddings, sum(_count(item.text) for item in request.inputs if isinstance(item, Text)))


def _count(text: str | list[int]) -> int:
    return len(text.split() if isinstance(text, str) else text)


def _media_of(payload: EncodeRequest | GenerateRequest | None) -> list[Medium]:
    match payload:
        case EncodeRequest():
            return [item for item in payload.inputs if not isinstance(item, Text)]
        case GenerateRequest():
            return payload.media
    return []


def _verify(medium: Medium) -> None:
    tensor = tensor_of(medium)
    if medium.checksum is None:
        raise ValueError("the synthetic executor verifies its input; send each medium with its checksum_of()")
    checksum = checksum_of(tensor)
    if checksum != medium.checksum:
        raise ValueError(
            f"a {type(medium).__name__.lower()} of {tensor.nbytes} bytes arrived with checksum {checksum:08x}, "
            f"sent was {medium.checksum:08x}"
        )


def _generator(item: Text | Medium) -> torch.Generator:
    seed = zlib.crc32(str(item.text).encode()) if isinstance(item, Text) else item.checksum
    assert seed is not None, "verified before"
    return torch.Generator().manual_seed(seed)


def _converted(values: Mapping[str, object], kind: type[_Options]) -> _Options:
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"the synthetic executor's options: {error}; it takes {', '.join(kind.__struct_fields__)}") from None
