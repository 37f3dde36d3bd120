"""Recordings in text: requests and answers of ``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``.

A request is a form with a file (:mod:`shmring.frontend.openai.forms`). The engine says what was said as segments with their
times, so all forms of an answer are written of the same: a text, JSON with or without segments, and subtitles.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shmring.engine.protocol import (
    GenerateReply,
    GenerateRequest,
    ModelDescription,
    SamplingParams,
    SpeechParams,
    SpeechSegment,
    SpeechWord,
)
from shmring.frontend.answer import Answer
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import invalid_value
from shmring.frontend.http.sse import event
from shmring.frontend.inference import Generation, Words
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.forms import Form, names_of
from shmring.frontend.openai.messages import INT64, Priority
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "SpeechEvent",
    "SpeechTask",
    "SpeechWriter",
    "Transcription",
    "TranscriptionRequest",
    "TranslationRequest",
    "VerboseTranscription",
    "read_form",
    "read_speech",
]

SpeechTask: TypeAlias = Literal["transcribe", "translate"]

_MAX_NAME_CHARACTERS = 64


class TranslationRequest(msgspec.Struct, kw_only=True):
    """The form of `POST /v1/audio/translations`: what is said in a recording, in English."""

    file: Annotated[
        Any, Meta(description="The recording, as a file.", extra_json_schema={"type": "string", "format": "binary"})
    ]
    model: str
    prompt: Annotated[str | None, Meta(description="What was said before; it guides how the answer is written.")] = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    priority: Priority | None = None
    hotwords: Annotated[Any, only("")] = None
    to_language: Annotated[Any, only("en")] = None
    use_beam_search: Annotated[Any, only("false")] = None
    n: Annotated[Any, only("1")] = None
    length_penalty: Annotated[Any, only("1", "1.0")] = None
    include_stop_str_in_output: Annotated[Any, only("false")] = None
    max_completion_tokens: Annotated[Any, only()] = None
    watermarking: Annotated[Any, only("false")] = None
    stream_include_usage: Annotated[Any, only("true")] = None
    stream_continuous_usage_stats: Annotated[Any, only("false")] = None


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """The form of `POST /v1/audio/transcriptions`: what is said in a recording."""

    language: Annotated[str | None, Meta(description="As ISO 639-1 has it, such as `en`. Without it, it is found out.")] = None
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None, Meta(description="Of `verbose_json`, which has segments by default.")
    ] = None
    include: Annotated[Any, only([])] = None
    chunking_strategy: Annotated[Any, only("auto")] = None
    known_speaker_names: Annotated[Any, only([])] = None
    known_speaker_references: Annotated[Any, only([])] = None
    top_p: Annotated[Any, only("1", "1.0")] = None
    top_k: Annotated[Any, only("0", "-1")] = None
    min_p: Annotated[Any, only("0", "0.0")] = None
    frequency_penalty: Annotated[Any, only("0", "0.0")] = None
    presence_penalty: Annotated[Any, only("0", "0.0")] = None
    repetition_penalty: Annotated[Any, only("1", "1.0")] = None
    vllm_xargs: Annotated[Any, only("{}")] = None


class SpeechUsage(msgspec.Struct):
    """How long the recording is, in whole seconds."""

    seconds: int
    type: Literal["duration"] = "duration"


class SpeechTokens(msgspec.Struct):
    """Tokens that were read before the answer, and those that were written, marks of time included."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class Transcription(msgspec.Struct):
    """The answer to a recording, with `response_format` `json`."""

    text: str
    usage: SpeechUsage


class Segment(msgspec.Struct):
    """A part of what is said: its times in seconds, its tokens, and how sure the model was of them."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Word(msgspec.Struct):
    """A word, and when it is said, in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    """The answer to a recording, with `response_format` `verbose_json`: what `timestamp_granularities` ask for."""

    task: SpeechTask
    language: str
    duration: float
    text: str
    segments: list[Segment] | UnsetType = UNSET
    words: list[Word] | UnsetType = UNSET
    usage: SpeechUsage


class SpeechEvent(msgspec.Struct, kw_only=True):
    """An event of a stream: what is new, or at the end all of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: SpeechTokens | UnsetType = UNSET


_KINDS = {"transcribe": TranscriptionRequest, "translate": TranslationRequest}
_UNSUPPORTED = {kind: Unsupported(kind) for kind in _KINDS.values()}
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")


def read_form(form: Form, task: SpeechTask) -> tuple[TranslationRequest, list[str]]:
    """Returns the request that a form is, without its file; and the names of its unknown fields, which were ignored.

    Raises:
        ApiError: it is none, or asks for something that is not implemented.
    """
    kind = _KINDS[task]
    known = kind.__struct_fields__
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, found in names_of(form.fields).items():
        if name not in known:
            ignored.append(quote(name[:_MAX_NAME_CHARACTERS])[:_MAX_NAME_CHARACTERS])
        elif name in _LISTS:
            values[name] = found
        elif len(found) > 1:
            raise ApiError(ErrorCode.INVALID_VALUE, "the form has this field several times", param=name)
        elif found[0]:
            values[name] = found[0]
    if form.file is None:
        raise ApiError(ErrorCode.INVALID_VALUE, "the form has no file: send the recording in the field 'file'", param="file")
    try:
        request = msgspec.convert(values | {"file": ""}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error)) from None
    check_supported(request, _UNSUPPORTED[kind])
    _check_format(request)
    return request, ignored


def _check_format(request: TranslationRequest) -> None:
    if _granularities(request) and request.response_format != "verbose_json":
        text = "timestamp_granularities are for the response_format verbose_json"
        raise ApiError(ErrorCode.INVALID_VALUE, text, param="timestamp_granularities")
    if request.stream and request.response_format not in (None, "json", "text"):
        text = f"a stream has no {request.response_format}: leave response_format out"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="response_format")


def _granularities(request: TranslationRequest) -> Sequence[str]:
    return (request.timestamp_granularities if isinstance(request, TranscriptionRequest) else None) or ()


class _SpeechWords(Words):
    """How a request has called what only some models can."""

    def check(self, request: GenerateRequest, description: ModelDescription) -> list[str]:
        """Refuses times of words, if the model does not say them."""
        if request.speech is not None and request.speech.words and not description.word_times:
            text = f"the model {description.model!r} does not say when words are said: timestamp_granularities can be segment"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="timestamp_granularities")
        return []


def read_speech(request: TranslationRequest, task: SpeechTask, form: Form) -> Generation:
    """Returns what a request asks for; takes the recording out of its form."""
    language = request.language if isinstance(request, TranscriptionRequest) else None
    sampling = SamplingParams(temperature=request.temperature or 0.0, seed=request.seed)
    speech = SpeechParams(task, language, "word" in _granularities(request))
    generate_request = GenerateRequest(
        sampling=sampling, priority=request.priority or 0, prompt=request.prompt or None, speech=speech
    )
    file, form.file = form.file or b"", None
    sources = [MediaSource("audio", "file", file=file)]
    return Generation(task, request.model, [generate_request], sources, bool(request.stream), _SpeechWords(), "file")


class SpeechWriter:
    """Writes what is said in a recording.

    Args:
        request: says in which form.
        task: what is to be written.
    """

    fail = None  # errors of streams are as everywhere

    def __init__(self, request: TranslationRequest, task: SpeechTask) -> None:
        self._request = request
        self._task: SpeechTask = task

    async def whole(self, answer: Answer) -> msgspec.Struct | str:
        """Returns the whole answer; a text, if that is wanted."""
        pieces = [piece async for piece in answer]
        return _whole_answer(self._request, self._task, pieces, answer.facts.sound_s)

    async def events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events."""
        texts: list[str] = []
        async for piece in answer:
            text = piece.text if texts else piece.text.lstrip()
            if text:
                texts.append(text)
                yield event(SpeechEvent(type="transcript.text.delta", delta=text))
        tokens = answer.prompt_tokens, answer.completion_tokens
        yield event(SpeechEvent(type="transcript.text.done", text="".join(texts), usage=SpeechTokens(*tokens, sum(tokens))))


def _whole_answer(
    request: TranslationRequest, task: SpeechTask, pieces: Sequence[GenerateReply], sound_s: float
) -> msgspec.Struct | str:
    text = "".join([piece.text for piece in pieces]).strip()
    segments = [segment for piece in pieces for segment in piece.segments]
    match request.response_format:
        case "text":
            return f"{text}\n"
        case "srt":
            return "".join(
                f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{_line(segment)}\n\n"
                for number, segment in enumerate(segments, 1)
            )
        case "vtt":
            cues = "".join(f"{_time(item.start_s, '.')} --> {_time(item.end_s, '.')}\n{_line(item)}\n\n" for item in segments)
            return f"WEBVTT\n\n{cues}"
        case "verbose_json":
            wanted = set(_granularities(request))
            return VerboseTranscription(
                task=task,
                language="english" if task == "translate" else next((piece.language for piece in pieces if piece.language), ""),
                duration=round(sound_s, 3),
                text=text,
                segments=_segments(segments, request.temperature or 0.0) if wanted != {"word"} else UNSET,
                words=[_word(word) for segment in segments for word in segment.words] if "word" in wanted else UNSET,
                usage=_usage(sound_s),
            )
    return Transcription(text, _usage(sound_s))


def _usage(sound_s: float) -> SpeechUsage:
    return SpeechUsage(math.ceil(sound_s))


def _segments(segments: Sequence[SpeechSegment], temperature: float) -> list[Segment]:
    return [_segment(number, segment, temperature) for number, segment in enumerate(segments)]


def _word(word: SpeechWord) -> Word:
    return Word(word.text, round(word.start_s, 3), round(word.end_s, 3))


def _segment(number: int, segment: SpeechSegment, temperature: float) -> Segment:
    said = segment.text.encode()
    return Segment(
        id=number,
        seek=round(segment.window_s * 100),  # in frames of the spectrogram that such models hear
        start=round(segment.start_s, 3),
        end=round(segment.end_s, 3),
        text=segment.text,
        tokens=segment.tokens,
        temperature=temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=len(said) / len(zlib.compress(said)),
        no_speech_prob=segment.no_speech_prob,
    )


def _line(segment: SpeechSegment) -> str:
    """Returns a segment's text as subtitles have it: neither an empty line nor an arrow can be in it."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
