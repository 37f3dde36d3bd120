"""The executor ``vllm`` with a speech model: recordings into text, as :mod:`.speech_windows` says. The models are Whisper's.

Each window is a request of vLLM's, so the windows of all recordings share its steps. What the model hears of a window is made
of its samples beside steps. vLLM then writes the language and the task, which are given, and the text, by the rules of marks of
time (:mod:`.vllm_marks`). So the model hears each window once. How likely it is that nobody speaks is how likely the token for
that was in the place of the language.

How likely a token was is said before these rules here, since vLLM says it so; the executor ``transformers`` says it after them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from shmring.engine.executors.checkpoint import SPEECH_MODEL, find_model_type
from shmring.engine.executors.interface import GOES_ON, ExecutorOptions, StepInput, StepOutput
from shmring.engine.executors.preparing import MEDIA
from shmring.engine.executors.speech_windows import SpeechModel, Transcript, load_generation_config
from shmring.engine.executors.vllm import VllmExecutor
from shmring.engine.executors.vllm_engine import VllmLoop, VllmRequest
from shmring.engine.protocol import GenerateReply, ModelDescription

__all__ = ["VllmSpeechExecutor", "executor_for"]

_MARKS = "shmring.engine.executors.vllm_marks"  # imports vLLM


def executor_for(options: ExecutorOptions) -> VllmSpeechExecutor | VllmExecutor:
    """Makes the executor ``vllm`` that a model needs; as its constructor."""
    return VllmSpeechExecutor(options) if find_model_type(options.model) == SPEECH_MODEL else VllmExecutor(options)


@dataclasses.dataclass(slots=True)
class _Request(VllmRequest):
    """A request that runs; its only name is that of its window.

    Attributes:
        transcript: of it, so far.
        owner: whose it is.
        first: for each of the next tokens, those that it may be; none: the text is written.
        heard_tokens: as many as hearing a window takes.
        windows: how many vLLM was given.
        is_heard: whether vLLM has heard the window, and has begun to write.
        finds_language: whether the window is heard only for its language.
    """

    transcript: Transcript
    owner: str
    heard_tokens: int
    first: list[list[int]] = dataclasses.field(default_factory=list)
    windows: int = 0
    is_heard: bool = False
    finds_language: bool = False

    @property
    def weight(self) -> int:
        """What is heard of a window is part of its first step."""
        return len(self.names) * (1 if self.is_heard else self.heard_tokens)


class VllmSpeechExecutor(VllmLoop[_Request]):
    """Writes down what is said in recordings, with a Whisper model in vLLM's engine.

    Args:
        options: as for :class:`~shmring.engine.executors.vllm.VllmExecutor`.

    Raises:
        ImportError, OSError, ValueError: as there; or the model lacks something that such models have.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        if "logits_processors" in options.options:
            raise ValueError("with a speech model, logits_processors are the executor's own")
        # Before vLLM is imported. Its other runner takes no logits processors of this kind.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        super().__init__(options, {"logits_processors": [f"{_MARKS}:Marks"]})
        assert options.model is not None
        self._argument: str = importlib.import_module(_MARKS).ARGUMENT
        self._params = importlib.import_module("vllm").SamplingParams
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._max_model_len: int = self._engine.model_config.max_model_len
        self._speech = SpeechModel(
            self._name,
            self._engine.renderer.get_tokenizer(),
            self._engine.renderer.mm_processor.info.get_feature_extractor(),
            load_generation_config(options.model),
            self._max_model_len,
        )
        self._heard_tokens: int = self._engine.model_config.hf_config.max_source_positions

    def describe(self) -> ModelDescription:
        """Says what it does."""
        return self._speech.describe("vllm", self._max_num_seqs, pauses=False)

    # -- what comes --------------------------------------------------------------------------------------------------------

    def _enter(self, part: StepInput) -> StepOutput:
        """Has the next window of a request prepared, or gives it to vLLM."""
        request = self._requests.get(part.request_id)
        if request is None:
            if part.payload is None:
                raise RuntimeError(f"request {part.request_id} goes on, and was not begun")
            transcript = self._speech.begin(part.payload)
            if transcript.params.words:
                raise ValueError("vLLM does not say when words are said")
            request = self._requests[part.request_id] = _Request(transcript, part.payload.owner, self._heard_tokens)
        if not request.names:
            if part.request_id not in self._preparing:
                prompt = self._begin_window(request)
                work = functools.partial(self._prepare, self._speech.samples_of(request.transcript), prompt)
                stages = self._preparing.on_thread(MEDIA, request.owner, work)
                self._preparing.begin(part.request_id, request.owner, stages)
            if (prepared := self._preparing.take(part.request_id)) is not None:
                self._add(part.request_id, request, prepared)
        return GOES_ON

    def _begin_window(self, request: _Request) -> list[int]:
        """Returns the tokens before those that vLLM writes of the next window."""
        transcript = request.transcript
        # What was said before says nothing of the language: it is found without.
        request.finds_language = self._speech.must_find_language(transcript)
        if request.finds_language:
            request.first = [list(self._speech.languages.values())]
            return [self._speech.begin_of_text]
        window = self._speech.open(transcript)
        places = self._speech.places(transcript)
        request.first = [[token] for token in places]
        return window.tokens[: len(window.tokens) - len(places)]

    def _prepare(self, samples: torch.Tensor, prompt: list[int]) -> dict[str, Any]:
        """Makes of samples what the model hears."""
        sound = {"prompt": "", "multi_modal_data": {"audio": (samples.numpy(), self._speech.sample_rate)}}
        whole = {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": prompt}}
        renderer = self._engine.renderer
        [inputs] = renderer.render_cmpl([whole], renderer.default_cmpl_tok_params)
        # vLLM puts the begin of the text before a prompt that begins with anything else, such as what was said before.
        inputs["decoder_prompt"]["prompt_token_ids"] = prompt
        return dict(inputs)

    def _add(self, request_id: int, request: _Request, inputs: dict[str, Any]) -> None:
        transcript = request.transcript
        room = self._max_model_len - len(inputs["decoder_prompt"]["prompt_token_ids"])
        params = self._params(
            temperature=0.0 if request.finds_language else transcript.temperature,
            seed=int(torch.randint(1 << 62, (), generator=transcript.generator)),
            max_tokens=1 if request.finds_language else room,
            stop_token_ids=sorted(self._speech.eos_token_ids),
            logprob_token_ids=[self._speech.no_speech],
            extra_args={self._argument: list(request.first)},
            detokenize=False,
            output_kind=self._delta,
        )
        request.names = [f"{request_id}-{request.windows}"]
        request.windows += 1
        request.is_heard = False
        self._engine.add_request(request.names[0], inputs, params)

    # -- what goes ---------------------------------------------------------------------------------------------------------

    def _take(self, request: _Request, made: Sequence[Any]) -> StepOutput:
        """Takes what vLLM wrote of a window.

        Raises:
            RuntimeError: vLLM ended it for another reason than windows end.
        """
        piece = next((each.outputs[0] for each in made if each.request_id in request.names), None)
        if piece is None:
            return GOES_ON
        if piece.finish_reason not in (None, "stop", "length"):
            raise RuntimeError(f"vLLM ended the window: {piece.finish_reason}")
        transcript = request.transcript
        replies: list[GenerateReply] = []
        finished = False
        for token, likely in zip(piece.token_ids, piece.logprobs or [], strict=True):
            if request.finds_language:
                transcript.language = next(name for name, each in self._speech.languages.items() if each == token)
                self._end_window(request)
                break
            window = transcript.window
            assert window is not None
            if not request.is_heard:
                window.no_speech = math.exp(likely[self._speech.no_speech].logprob)
                request.is_heard = True
            if request.first:
                request.first.pop(0)
                continue
            output = self._speech.take(transcript, token, likely[token].logprob)
            if isinstance(output.reply, GenerateReply):
                replies.append(output.reply)
            finished = output.finished
            if transcript.window is None:
                self._end_window(request)
                break
        return StepOutput.of(replies, finished=finished)

    def _end_window(self, request: _Request) -> None:
        self._engine.abort_request(request.names)
        request.names = []
