"""The executor ``transformers`` with a speech model: recordings into text, or into English text. The models are Whisper's.

A step takes each request one token further, or to its next window (:mod:`.speech_windows`); so a long recording keeps nobody
waiting.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from shmring.engine.executors.checkpoint import SPEECH_MODEL, Checkpoint, find_model_type, load_checkpoint
from shmring.engine.executors.failures import report
from shmring.engine.executors.interface import GOES_ON, ExecutorOptions, StepInput, StepOutput, priced
from shmring.engine.executors.speech_windows import SpeechModel, Transcript, Window
from shmring.engine.executors.transformers import TransformersExecutor, parse_options
from shmring.engine.executors.word_times import Alignment, Queries
from shmring.engine.protocol import EncodeRequest, GenerateRequest, ModelDescription

__all__ = ["SpeechExecutor", "executor_for"]


def executor_for(options: ExecutorOptions) -> SpeechExecutor | TransformersExecutor:
    """Makes the executor ``transformers`` that a model needs; as its constructor."""
    return SpeechExecutor(options) if find_model_type(options.model) == SPEECH_MODEL else TransformersExecutor(options)


@dataclasses.dataclass
class _Heard:
    """What the model has of a window.

    Attributes:
        encoded: what the encoder made of it.
        cache: keys and values of the tokens that were read.
        read: how many those are.
        queries: of these tokens, if it is to be said when words are said.
    """

    encoded: Any
    cache: Any
    read: int = 0
    queries: Queries = dataclasses.field(default_factory=dict)


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
        processor: Any = self._checkpoint.processor
        self._extractor = processor.feature_extractor
        self._speech = SpeechModel(
            self._checkpoint.name,
            self._checkpoint.tokenizer,
            self._extractor,
            self._model.generation_config,
            self._checkpoint.max_model_len,
        )
        heads = getattr(self._model.generation_config, "alignment_heads", None)
        self._alignment = Alignment(self._model, heads) if heads else None
        self._moment_s = float(self._extractor.chunk_length) / self._model.config.max_source_positions
        self._processors = importlib.import_module("transformers.generation.logits_process")
        self._caches = importlib.import_module("transformers.cache_utils")
        self._transcripts: dict[int, Transcript] = {}

    def describe(self) -> ModelDescription:
        """Says what it does."""
        return self._speech.describe("transformers", self._max_num_seqs, pauses=True, word_times=self._alignment is not None)

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

    def _begin(self, request: EncodeRequest | GenerateRequest) -> Transcript:
        transcript = self._speech.begin(request)
        if transcript.params.words and self._alignment is None:
            raise ValueError(f"the model {self._checkpoint.name!r} does not say when words are said (alignment_heads)")
        return transcript

    def _advance(self, transcript: Transcript) -> StepOutput:
        """Goes on by a token, or to the next window."""
        window = transcript.window
        if window is None:
            self._open(transcript)
            return GOES_ON
        token, logprob = self._next_token(transcript, window, window.heard)
        return self._speech.take(transcript, token, logprob, self._time_tokens)

    @torch.inference_mode()
    def _time_tokens(self, window: Window) -> list[float]:
        """Returns when the tokens of a window's text begin, and when the last one ends."""
        assert self._alignment is not None, "a request without it is refused"
        num_moments = math.ceil(window.length_s / self._moment_s)
        # The first token is chosen after the last one that stands before the text; the end, after the last one of the text.
        moments = self._alignment.moments(window.heard.queries, window.heard.cache, window.begin - 1, num_moments)
        times_s = [float(moment) * self._moment_s for moment in moments]
        return times_s + [window.length_s] * (len(window.tokens) - window.begin + 1 - len(times_s))

    @torch.inference_mode()
    def _open(self, transcript: Transcript) -> None:
        """Has the model hear the next window."""
        samples = self._speech.samples_of(transcript)
        features = self._extractor(samples.numpy(), sampling_rate=self._speech.sample_rate, return_tensors="pt")
        encoded = self._model.model.encoder(features["input_features"].to(self._model.device, self._model.dtype))
        if self._speech.must_find_language(transcript):
            transcript.language = self._find_language(encoded)
        cache = self._caches.EncoderDecoderCache(self._caches.DynamicCache(), self._caches.DynamicCache())
        self._speech.open(transcript).heard = _Heard(encoded, cache)

    def _find_language(self, encoded: Any) -> str:
        first = torch.tensor([[self._speech.begin_of_text]], device=self._model.device)
        logits = self._model(decoder_input_ids=first, encoder_outputs=encoded).logits[0, -1]
        languages = self._speech.languages
        return max(languages, key=lambda name: float(logits[languages[name]]))

    @torch.inference_mode()
    def _next_token(self, transcript: Transcript, window: Window, heard: _Heard) -> tuple[int, float]:
        """Has the model read what it has not read yet, and chooses a token; returns it with how likely it was."""
        unread = torch.tensor([window.tokens[heard.read :]], device=self._model.device)
        output = self._model(
            decoder_input_ids=unread, encoder_outputs=heard.encoded, past_key_values=heard.cache, use_cache=True
        )
        if transcript.params.words and self._alignment is not None:
            self._alignment.keep(heard.queries)
        logits = output.logits[0].float().cpu()
        if heard.read == 0:
            at_begin = logits[window.tokens.index(self._speech.begin_of_text)].softmax(0)
            window.no_speech = float(at_begin[self._speech.no_speech])
        heard.read = len(window.tokens)
        scores = logits[-1]
        scores[self._speech.suppressed] = -torch.inf
        marks = self._processors.WhisperTimeStampLogitsProcessor(self._model.generation_config, begin_index=window.begin)
        scores = marks(torch.tensor([window.tokens]), scores[None])[0]
        if transcript.temperature == 0:
            token = int(scores.argmax())
        else:
            shares = (scores / transcript.temperature).softmax(0)
            token = int(torch.multinomial(shares, 1, generator=transcript.generator))
        return token, float(scores.log_softmax(0)[token])
