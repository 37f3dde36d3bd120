"""From a recording to its text with a Whisper model: windows, the tokens of each, and segments with their times. An executor
computes the tokens; here is what they mean.

A model hears a window of 30 s, and writes what was said with the times at which sentences begin and end. A window begins where
the last sentence that was complete has ended, so no word is cut by a window's edge. What is written of a sentence is given out
when its end is written: what is behind the last end may be written anew in the next window.

A window in which the model hears nobody, and of which it is not sure what was said, has no text: of silence, these models write
what they have read most.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 3.8, which says how windows
follow each other, and the thresholds of silence.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shmring.engine.executors.checkpoint import ModelSource, find_eos
from shmring.engine.executors.interface import GOES_ON, StepOutput
from shmring.engine.inputs import InputSpec, SoundSpec
from shmring.engine.protocol import (
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    ModelDescription,
    SpeechParams,
    SpeechSegment,
    SpeechWord,
    Waveform,
)

__all__ = ["SpeechModel", "TimeTokens", "Transcript", "Window", "load_generation_config"]

#: Returns when the tokens of a window's text begin, in seconds from the window's beginning, and when the last one ends.
TimeTokens: TypeAlias = "Callable[[Window], Sequence[float]]"

_TIMESTAMP_S = 0.02  # from one mark of time to the next
_SILENCE = 0.6  # of a window: how likely it is that nobody speaks, from which on its text must be likely
_LEAST_LOGPROB = -1.0  # of such a text's tokens, on average


def load_generation_config(model: str) -> Any:
    """Returns what transformers knows of how a model writes.

    Args:
        model: a directory, or a name on the hub.

    Raises:
        OSError: it has none.
    """
    place = ModelSource.of(model)
    return importlib.import_module("transformers").GenerationConfig.from_pretrained(
        place.source, local_files_only=place.is_local
    )


@dataclasses.dataclass
class Window:
    """A part of a recording that is being written down.

    Attributes:
        start_s: where it begins.
        length_s: of what there is of the recording in it.
        tokens: those before the text, and of the text so far.
        begin: where the text begins.
        logprobs: how likely each token of the text was.
        no_speech: how likely it is that nobody speaks.
        written: up to which token segments were made of the text.
        segments: those that were not given out yet.
        places: where their tokens begin in the text.
        end_s: of the last one, from the window's beginning.
        heard: what an executor's model has of it.
    """

    start_s: float
    length_s: float
    tokens: list[int]
    begin: int
    logprobs: list[float] = dataclasses.field(default_factory=list)
    no_speech: float = 0.0
    written: int = 0
    segments: list[SpeechSegment] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    end_s: float = 0.0
    heard: Any = None


@dataclasses.dataclass
class Transcript:
    """A request that is being answered.

    Attributes:
        samples: of the recording, shape (samples,), float32.
        params: what is to be made of them.
        language: as the model's tokens name it; None: not known yet, or the model knows one only.
        prompt: tokens that stand before the first window's text.
        temperature: 0 is greedy.
        generator: of random numbers.
        next_s: where the next window begins.
        window: the one that is being written down.
        generated: how many tokens were chosen.
    """

    samples: torch.Tensor
    params: SpeechParams
    language: str | None
    prompt: list[int]
    temperature: float
    generator: torch.Generator
    next_s: float = 0.0
    window: Window | None = None
    generated: int = 0


class SpeechModel:
    """What the tokens of a Whisper model mean.

    Args:
        name: of the model, for errors.
        tokenizer: of transformers.
        extractor: of transformers: makes of samples what the model hears.
        config: of transformers: how the model writes.
        max_model_len: tokens of a window and of what stands before it.

    Attributes:
        languages: tokens by names such as ``<|en|>``; none: the model knows one language.
        tasks: tokens by ``"transcribe"`` and ``"translate"``; none: the model only writes down.
        begin_of_text: the token with which the text of a window begins.
        no_speech: the token that says that nobody speaks.
        suppressed: tokens that are never chosen.
        eos_token_ids: tokens that end a window.
        sample_rate: of recordings, in Hz.

    Raises:
        ValueError: it lacks something that such models have.
    """

    def __init__(self, name: str, tokenizer: Any, extractor: Any, config: Any, max_model_len: int) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self.eos_token_ids = find_eos(config, tokenizer)
        self._max_model_len = max_model_len
        self.languages: Mapping[str, int] = getattr(config, "lang_to_id", None) or {}
        self.tasks: Mapping[str, int] = getattr(config, "task_to_id", None) or {}
        self.begin_of_text: int = config.decoder_start_token_id
        no_timestamps: int | None = getattr(config, "no_timestamps_token_id", None)
        if no_timestamps is None:
            raise ValueError(f"the model {name!r} is not said to have marks of time (no_timestamps_token_id)")
        self._first_mark, self.no_speech = no_timestamps + 1, no_timestamps - 1
        self.suppressed = list(getattr(config, "suppress_tokens", None) or [])
        self.sample_rate: int = extractor.sampling_rate
        self._window_s = float(extractor.chunk_length)
        names = importlib.import_module("transformers.models.whisper.tokenization_whisper")
        self._language_names: Mapping[str, str] = names.LANGUAGES
        self._language_codes: Mapping[str, str] = names.TO_LANGUAGE_CODE
        self._into_words = names._combine_tokens_into_words

    def describe(self, executor: str, max_batch_size: int, *, pauses: bool, word_times: bool = False) -> ModelDescription:
        """Says what it does, for an executor."""
        return ModelDescription(
            executor=executor,
            model=self._name,
            tasks=["transcribe", *(["translate"] if "translate" in self.tasks else [])],
            input=InputSpec(sound=SoundSpec("waveform", self.sample_rate)),
            max_batch_size=max_batch_size,
            pauses=pauses,
            word_times=word_times,
        )

    # -- a request ---------------------------------------------------------------------------------------------------------

    def begin(self, request: EncodeRequest | GenerateRequest) -> Transcript:
        """Begins with a request. The recording is copied.

        Raises:
            ValueError: it is not what this model does.
        """
        params = request.speech if isinstance(request, GenerateRequest) else None
        if params is None or not isinstance(request, GenerateRequest):
            raise ValueError(f"the model {self._name!r} writes down what is said in a recording, and nothing else")
        if len(request.media) != 1 or not isinstance(recording := request.media[0], Waveform):
            raise ValueError("a request for a transcript has one recording")
        if recording.sample_rate != self.sample_rate or not len(recording.samples):
            raise ValueError(f"a recording has samples, at {self.sample_rate} Hz")
        if params.task == "translate" and "translate" not in self.tasks:
            raise ValueError(f"the model {self._name!r} does not translate")
        generator = torch.Generator()
        if request.sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.sampling.seed)
        return Transcript(
            samples=recording.samples.clone(),
            params=params,
            language=self._language_of(params.language),
            prompt=self._prompt_of(request.prompt),
            temperature=request.sampling.temperature,
            generator=generator,
        )

    def _language_of(self, asked: str | None) -> str | None:
        if asked is None:
            return None
        code = self._language_codes.get(asked.lower(), asked.lower())
        if not self.languages and code == "en":
            return None
        if f"<|{code}|>" not in self.languages:
            raise ValueError(f"the model {self._name!r} does not know the language {asked!r}")
        return f"<|{code}|>"

    def _prompt_of(self, prompt: str | list[int] | None) -> list[int]:
        """Returns the end of what a caller says that was said before, as far as there is room for it."""
        if not prompt or not isinstance(prompt, str):
            return []
        tokenizer = self._tokenizer
        tokens: list[int] = tokenizer(f" {prompt.strip()}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [tokenizer.convert_tokens_to_ids("<|startofprev|>"), *tokens[-(self._max_model_len // 2 - 1) :]]

    def must_find_language(self, transcript: Transcript) -> bool:
        """Whether it is to be found out first which language is spoken."""
        return bool(self.languages) and transcript.language is None

    # -- a window ------------------------------------------------------------------------------------------------------------

    def samples_of(self, transcript: Transcript) -> torch.Tensor:
        """Returns the samples of the next window."""
        start = round(transcript.next_s * self.sample_rate)
        return transcript.samples[start : start + round(self._window_s * self.sample_rate)]

    def open(self, transcript: Transcript) -> Window:
        """Begins the next window, when the language is known: its tokens are those that stand before its text."""
        prompt = transcript.prompt if transcript.next_s == 0 else []
        tokens = [*prompt, self.begin_of_text, *self.places(transcript)]
        length_s = len(self.samples_of(transcript)) / self.sample_rate
        transcript.window = Window(transcript.next_s, length_s, tokens, len(tokens))
        return transcript.window

    def places(self, transcript: Transcript) -> list[int]:
        """Returns the tokens between the begin of a window's text and its first mark: language and task."""
        language = [] if transcript.language is None else [self.languages[transcript.language]]
        return language + ([self.tasks[transcript.params.task]] if self.tasks else [])

    def take(self, transcript: Transcript, token: int, logprob: float, time_tokens: TimeTokens | None = None) -> StepOutput:
        """Takes the next token of the window.

        Args:
            transcript: has a window. When it has none any more, the window has ended.
            token: that was chosen.
            logprob: how likely it was.
            time_tokens: of an executor that can say when words are said; it is called when the window has ended.

        Returns:
            What is new.
        """
        window = transcript.window
        assert window is not None
        window.logprobs.append(logprob)
        transcript.generated += 1
        room = self._max_model_len - len(window.tokens)
        is_last = token in self.eos_token_ids
        if not is_last:
            window.tokens.append(token)
            self._write(transcript, window)
        is_last = is_last or room <= 1 or len(window.tokens) - window.begin >= self._max_model_len // 2
        if is_last:
            self._leave(transcript, window)
        if not is_last and (window.no_speech > _SILENCE or transcript.params.words):
            return GOES_ON
        if transcript.params.words and time_tokens is not None and window.segments:
            self._add_words(transcript, window, time_tokens(window))
        segments, window.segments = window.segments, []
        finished = is_last and transcript.next_s * self.sample_rate >= len(transcript.samples)
        if not segments and not finished:
            return GOES_ON
        return StepOutput(self._reply(transcript, segments, "stop" if finished else None), finished=finished)

    def _reply(
        self, transcript: Transcript, segments: list[SpeechSegment], finish_reason: FinishReason | None
    ) -> GenerateReply:
        return GenerateReply(
            "".join(segment.text for segment in segments),
            [token for segment in segments for token in segment.tokens],
            len(transcript.prompt),
            transcript.generated,
            finish_reason,
            segments=segments,
            language=self._language_name(transcript),
        )

    def _language_name(self, transcript: Transcript) -> str | None:
        return self._language_names.get((transcript.language or "<|en|>")[2:-2])

    def _write(self, transcript: Transcript, window: Window) -> None:
        """Makes a segment of the text if its last token is the mark of a sentence's end."""
        text = window.tokens[window.begin + window.written :]
        if len(text) >= 2 and text[-1] >= self._first_mark and text[-2] < self._first_mark:
            self._add_segment(window, text, self._seconds_of(text[-1]))

    def _leave(self, transcript: Transcript, window: Window) -> None:
        """Has the next window begin behind the last sentence that is complete; at the end of this one if it is the last one."""
        text = window.tokens[window.begin + window.written :]
        is_open = any(token < self._first_mark for token in text)
        if is_open and window.end_s == 0:
            self._add_segment(window, text, window.length_s)
        mark_s = self._seconds_of(text[-1]) if text and not is_open else window.end_s
        goes_on = (is_open or bool(text)) and 0 < mark_s < window.length_s
        transcript.next_s = window.start_s + (mark_s if goes_on else window.length_s)
        if window.no_speech > _SILENCE and sum(window.logprobs) / len(window.logprobs) < _LEAST_LOGPROB:
            window.segments.clear()
            window.places.clear()
        transcript.window = None

    def _add_segment(self, window: Window, text: Sequence[int], end_s: float) -> None:
        start_s = self._seconds_of(text[0]) if text[0] >= self._first_mark else window.end_s
        said = self._tokenizer.decode([token for token in text if token < self._first_mark], skip_special_tokens=True)
        logprobs = window.logprobs[window.written : window.written + len(text)]
        segment = SpeechSegment(
            start_s=window.start_s + min(start_s, window.length_s),
            end_s=window.start_s + min(max(start_s, end_s), window.length_s),
            text=said,
            tokens=list(text),
            window_s=window.start_s,
            avg_logprob=sum(logprobs) / len(logprobs),
            no_speech_prob=window.no_speech,
        )
        if said.strip():
            window.segments.append(segment)
            window.places.append(window.written)
        window.written += len(text)
        window.end_s = end_s

    def _add_words(self, transcript: Transcript, window: Window, times_s: Sequence[float]) -> None:
        """Says when each word of the segments is said."""
        language = self._language_name(transcript)
        for segment, place in zip(window.segments, window.places, strict=True):
            places = [place + number for number, token in enumerate(segment.tokens) if token < self._first_mark]
            tokens = [token for token in segment.tokens if token < self._first_mark]
            words, _, numbers = self._into_words(self._tokenizer, tokens, language)
            segment.words = [
                SpeechWord(
                    word.strip(),
                    window.start_s + min(times_s[places[of_word[0]]], window.length_s),
                    window.start_s + min(times_s[places[of_word[-1]] + 1], window.length_s),
                )
                for word, of_word in zip(words, numbers, strict=True)
                if of_word and word.strip()
            ]

    def _seconds_of(self, mark: int) -> float:
        return (mark - self._first_mark) * _TIMESTAMP_S
