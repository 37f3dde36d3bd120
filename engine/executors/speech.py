"""The executor ``transformers`` with a speech model: recordings into text, or into English text. The models are Whisper's.

Theory of operation: a model hears a window of 30 s, and writes what was said with the times at which sentences begin and end. A
window begins where the last sentence that was complete has ended, so no word is cut by a window's edge. A step takes each
request one token further, or to its next window; so a long recording keeps nobody waiting. What is written of a sentence is
given out when its end is written: what is behind the last end may be written anew in the next window.

A window in which the model hears nobody, and of which it is not sure what was said, has no text: of silence, these models write
what they have read most.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 3.8, which says how windows
follow each other, and the thresholds of silence.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shmring.engine.executors.checkpoint import SPEECH_MODEL, Checkpoint, find_model_type, load_checkpoint
from shmring.engine.executors.failures import report
from shmring.engine.executors.interface import ExecutorOptions, StepInput, StepOutput, priced
from shmring.engine.executors.transformers import TransformersExecutor, parse_options
from shmring.engine.inputs import InputSpec, SoundSpec
from shmring.engine.protocol import (
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    ModelDescription,
    SpeechParams,
    SpeechSegment,
    Waveform,
)

__all__ = ["SpeechExecutor", "executor_for"]

_TIMESTAMP_S = 0.02  # from one mark of time to the next
_SILENCE = 0.6  # of a window: how likely it is that nobody speaks, from which on its text must be likely
_LEAST_LOGPROB = -1.0  # of such a text's tokens, on average

_GOES_ON = StepOutput(finished=False)


def executor_for(options: ExecutorOptions) -> SpeechExecutor | TransformersExecutor:
    """Makes the executor ``transformers`` that a model needs; as its constructor."""
    return SpeechExecutor(options) if find_model_type(options.model) == SPEECH_MODEL else TransformersExecutor(options)


@dataclasses.dataclass
class _Window:
    """A part of a recording that is being written down.

    Attributes:
        start_s: where it begins.
        length_s: of what there is of the recording in it.
        heard: what the encoder made of it.
        tokens: those before the text, and of the text so far.
        begin: where the text begins.
        cache: keys and values of the tokens that were read.
        read: how many those are.
        logprobs: how likely each token of the text was.
        no_speech: how likely it is that nobody speaks.
        written: up to which token segments were made of the text.
        segments: those that were not given out yet.
        end_s: of the last one, from the window's beginning.
    """

    start_s: float
    length_s: float
    heard: Any
    tokens: list[int]
    begin: int
    cache: Any
    read: int = 0
    logprobs: list[float] = dataclasses.field(default_factory=list)
    no_speech: float = 0.0
    written: int = 0
    segments: list[SpeechSegment] = dataclasses.field(default_factory=list)
    end_s: float = 0.0


@dataclasses.dataclass
class _Transcript:
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
    window: _Window | None = None
    generated: int = 0


class SpeechExecutor:
    """Writes down what is said in recordings, with a Whisper model of transformers.

    Args:
        options: as for :class:`~shmring.engine.executors.transformers.TransformersExecutor`.

    Raises:
        ImportError: transformers is not installed.
        OSError: the model can't be loaded.
        ValueError: an option is unknown or makes no sense, or the model lacks something that such models have.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        settings = parse_options(options.options)
        if options.mm_processor_kwargs:
            raise ValueError("mm_processor_kwargs are not for speech models: their recordings are prepared in one way")
        self._checkpoint: Checkpoint = load_checkpoint(options.model, settings)
        self._max_num_seqs = settings.max_num_seqs
        self._model = self._checkpoint.model
        config = self._model.generation_config
        self._languages: Mapping[str, int] = getattr(config, "lang_to_id", None) or {}  # by names such as <|en|>
        self._tasks: Mapping[str, int] = getattr(config, "task_to_id", None) or {}
        self._begin_of_text: int = self._model.config.decoder_start_token_id
        no_timestamps: int | None = getattr(config, "no_timestamps_token_id", None)
        if no_timestamps is None:
            raise ValueError(f"the model {self._checkpoint.name!r} is not said to have marks of time (no_timestamps_token_id)")
        self._first_mark, self._no_speech = no_timestamps + 1, no_timestamps - 1
        self._suppressed = list(getattr(config, "suppress_tokens", None) or [])
        processor: Any = self._checkpoint.processor
        self._extractor = processor.feature_extractor
        self._sample_rate: int = self._extractor.sampling_rate
        self._window_s = float(self._extractor.chunk_length)
        names = importlib.import_module("transformers.models.whisper.tokenization_whisper")
        self._language_names: Mapping[str, str] = names.LANGUAGES
        self._language_codes: Mapping[str, str] = names.TO_LANGUAGE_CODE
        self._processors = importlib.import_module("transformers.generation.logits_process")
        self._caches = importlib.import_module("transformers.cache_utils")
        self._transcripts: dict[int, _Transcript] = {}

    def describe(self) -> ModelDescription:
        """Says what it does."""
        return ModelDescription(
            executor="transformers",
            model=self._checkpoint.name,
            tasks=["transcribe", *(["translate"] if "translate" in self._tasks else [])],
            input=InputSpec(sound=SoundSpec("waveform", self._sample_rate)),
            max_batch_size=self._max_num_seqs,
            pauses=True,
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Executes a step: of each request the next token, or the beginning of its next window."""
        outputs: list[StepOutput | Exception] = []
        for part in batch:
            began = time.perf_counter()
            try:
                if part.payload is not None:
                    self._transcripts[part.request_id] = self._begin(part.payload)
                output = self._advance(self._transcripts[part.request_id])
                outputs.append(priced(output, time.perf_counter() - began))
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
                outputs.append(report(error))
            last = outputs[-1]
            if isinstance(last, Exception) or last.finished:
                self.forget(part.request_id)
        return outputs

    def forget(self, request_id: int) -> None:
        """Lets go of a request's recording, keys and values."""
        self._transcripts.pop(request_id, None)

    def close(self) -> None:
        """Lets go of all requests."""
        self._transcripts.clear()

    # -- a request ---------------------------------------------------------------------------------------------------------

    def _begin(self, request: EncodeRequest | GenerateRequest) -> _Transcript:
        """Begins with a request.

        Raises:
            ValueError: it is not what this model does.
        """
        params = request.speech if isinstance(request, GenerateRequest) else None
        if params is None or not isinstance(request, GenerateRequest):
            raise ValueError(f"the model {self._checkpoint.name!r} writes down what is said in a recording, and nothing else")
        if len(request.media) != 1 or not isinstance(recording := request.media[0], Waveform):
            raise ValueError("a request for a transcript has one recording")
        if recording.sample_rate != self._sample_rate or not len(recording.samples):
            raise ValueError(f"a recording has samples, at {self._sample_rate} Hz")
        if params.task == "translate" and "translate" not in self._tasks:
            raise ValueError(f"the model {self._checkpoint.name!r} does not translate")
        generator = torch.Generator()
        if request.sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.sampling.seed)
        return _Transcript(
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
        if not self._languages and code == "en":
            return None
        if f"<|{code}|>" not in self._languages:
            raise ValueError(f"the model {self._checkpoint.name!r} does not know the language {asked!r}")
        return f"<|{code}|>"

    def _prompt_of(self, prompt: str | list[int] | None) -> list[int]:
        """Returns the end of what a caller says that was said before, as far as there is room for it."""
        if not prompt or not isinstance(prompt, str):
            return []
        tokenizer = self._checkpoint.tokenizer
        tokens: list[int] = tokenizer(f" {prompt.strip()}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [tokenizer.convert_tokens_to_ids("<|startofprev|>"), *tokens[-(self._checkpoint.max_model_len // 2 - 1) :]]

    def _advance(self, transcript: _Transcript) -> StepOutput:
        """Goes on by a token, or to the next window."""
        window = transcript.window
        if window is None:
            transcript.window = self._open(transcript)
            return _GOES_ON
        token = self._next_token(transcript, window)
        transcript.generated += 1
        room = self._checkpoint.max_model_len - len(window.tokens)
        is_last = token in self._checkpoint.eos_token_ids
        if not is_last:
            window.tokens.append(token)
            self._write(transcript, window)
        is_last = is_last or room <= 1 or len(window.tokens) - window.begin >= self._checkpoint.max_model_len // 2
        if is_last:
            self._leave(transcript, window)
        if not is_last and window.no_speech > _SILENCE:
            return _GOES_ON
        segments, window.segments = window.segments, []
        finished = is_last and transcript.next_s * self._sample_rate >= len(transcript.samples)
        if not segments and not finished:
            return _GOES_ON
        reply = GenerateReply(
            "".join(segment.text for segment in segments),
            [token for segment in segments for token in segment.tokens],
            len(transcript.prompt),
            transcript.generated,
            "stop" if finished else None,
            segments=segments,
            language=self._language_names.get((transcript.language or "<|en|>")[2:-2]),
        )
        return StepOutput(reply, finished=finished)

    # -- a window ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _open(self, transcript: _Transcript) -> _Window:
        """Has the model hear the next window."""
        start = round(transcript.next_s * self._sample_rate)
        samples = transcript.samples[start : start + round(self._window_s * self._sample_rate)]
        features = self._extractor(samples.numpy(), sampling_rate=self._sample_rate, return_tensors="pt")
        heard = self._model.model.encoder(features["input_features"].to(self._model.device, self._model.dtype))
        if self._languages and transcript.language is None:
            transcript.language = self._find_language(heard)
        tokens = [*(transcript.prompt if transcript.next_s == 0 else []), self._begin_of_text]
        if transcript.language is not None:
            tokens.append(self._languages[transcript.language])
        if self._tasks:
            tokens.append(self._tasks[transcript.params.task])
        cache = self._caches.EncoderDecoderCache(self._caches.DynamicCache(), self._caches.DynamicCache())
        length_s = len(samples) / self._sample_rate
        return _Window(transcript.next_s, length_s, heard, tokens, len(tokens), cache)

    def _find_language(self, heard: Any) -> str:
        first = torch.tensor([[self._begin_of_text]], device=self._model.device)
        logits = self._model(decoder_input_ids=first, encoder_outputs=heard).logits[0, -1]
        return max(self._languages, key=lambda name: float(logits[self._languages[name]]))

    @torch.inference_mode()
    def _next_token(self, transcript: _Transcript, window: _Window) -> int:
        """Has the model read what it has not read yet, and chooses a token."""
        unread = torch.tensor([window.tokens[window.read :]], device=self._model.device)
        output = self._model(
            decoder_input_ids=unread, encoder_outputs=window.heard, past_key_values=window.cache, use_cache=True
        )
        logits = output.logits[0].float().cpu()
        if window.read == 0:
            at_begin = logits[window.tokens.index(self._begin_of_text)].softmax(0)
            window.no_speech = float(at_begin[self._no_speech])
        window.read = len(window.tokens)
        scores = logits[-1]
        scores[self._suppressed] = -torch.inf
        marks = self._processors.WhisperTimeStampLogitsProcessor(self._model.generation_config, begin_index=window.begin)
        scores = marks(torch.tensor([window.tokens]), scores[None])[0]
        if transcript.temperature == 0:
            token = int(scores.argmax())
        else:
            shares = (scores / transcript.temperature).softmax(0)
            token = int(torch.multinomial(shares, 1, generator=transcript.generator))
        window.logprobs.append(float(scores.log_softmax(0)[token]))
        return token

    def _write(self, transcript: _Transcript, window: _Window) -> None:
        """Makes a segment of the text if its last token is the mark of a sentence's end."""
        text = window.tokens[window.begin + window.written :]
        if len(text) >= 2 and text[-1] >= self._first_mark and text[-2] < self._first_mark:
            self._add_segment(transcript, window, text, self._seconds_of(text[-1]))

    def _leave(self, transcript: _Transcript, window: _Window) -> None:
        """Has the next window begin behind the last sentence that is complete; at the end of this one if it is the last one."""
        text = window.tokens[window.begin + window.written :]
        is_open = any(token < self._first_mark for token in text)
        if is_open and window.end_s == 0:
            self._add_segment(transcript, window, text, window.length_s)
        mark_s = self._seconds_of(text[-1]) if text and not is_open else window.end_s
        goes_on = (is_open or bool(text)) and 0 < mark_s < window.length_s
        transcript.next_s = window.start_s + (mark_s if goes_on else window.length_s)
        if window.no_speech > _SILENCE and sum(window.logprobs) / len(window.logprobs) < _LEAST_LOGPROB:
            window.segments.clear()
        transcript.window = None

    def _add_segment(self, transcript: _Transcript, window: _Window, text: list[int], end_s: float) -> None:
        start_s = self._seconds_of(text[0]) if text[0] >= self._first_mark else window.end_s
        said = self._checkpoint.tokenizer.decode(
            [token for token in text if token < self._first_mark], skip_special_tokens=True
        )
        logprobs = window.logprobs[window.written : window.written + len(text)]
        segment = SpeechSegment(
            start_s=window.start_s + min(start_s, window.length_s),
            end_s=window.start_s + min(max(start_s, end_s), window.length_s),
            text=said,
            tokens=text,
            window_s=window.start_s,
            avg_logprob=sum(logprobs) / len(logprobs),
            no_speech_prob=window.no_speech,
        )
        window.written += len(text)
        window.end_s = end_s
        if said.strip():
            window.segments.append(segment)

    def _seconds_of(self, mark: int) -> float:
        return (mark - self._first_mark) * _TIMESTAMP_S
