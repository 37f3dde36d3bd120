"""When words are said: the path through a model's weights is transformers' own, and so are the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions, StepInput
from tests.engine.test_speech import RATE, ask, hear, segments_of
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors import speech_windows, word_times  # noqa: E402
from shmring.engine.executors.speech import SpeechExecutor  # noqa: E402


def reference(weights: torch.Tensor) -> list[int]:
    """As transformers makes moments of weights."""
    from transformers.models.whisper import generation_whisper  # here: it imports torch's compilers, for seconds

    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    matrix = generation_whisper._median_filter((weights - mean) / deviation, 7).mean(0)
    rows, moments = generation_whisper._dynamic_time_warping(-matrix.double().numpy())
    return moments[np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)].tolist()


@for_each("shape", [(1, 1, 5), (1, 5, 1), (2, 3, 4), (3, 40, 9), (4, 9, 40), (2, 30, 150), (1, 225, 300)])
def test_the_path_is_that_of_transformers(shape: tuple[int, int, int]) -> None:
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    if shape[1] == 1:
        assert word_times.first_moments(weights).tolist() == [0]
    else:
        assert word_times.first_moments(weights).tolist() == reference(weights)


def test_tokens_that_look_at_one_moment_each_begin_there() -> None:
    weights = torch.full((2, 4, 60), 0.01)
    for token, moment in enumerate((0, 12, 13, 40)):
        weights[:, token, moment : (12, 13, 40, 60)[token]] = 1.0
    assert word_times._warped(-weights.mean(0).double().numpy()).tolist() == [0, 12, 13, 40]


def test_the_weights_are_those_of_transformers(
    speech_executor: SpeechExecutor, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each token that was read to choose one of the text, where the recording has something."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        whisper, local_files_only=True, attn_implementation="eager"
    ).eval()
    seen: list[torch.Tensor] = []
    find = word_times.first_moments
    monkeypatch.setattr(word_times, "first_moments", lambda weights: seen.append(weights) or find(weights))
    windows: list[speech_windows.Window] = []
    opened = speech_windows.SpeechModel.open

    def keep(self: Any, transcript: Any) -> Any:
        windows.append(opened(self, transcript))
        return windows[-1]

    monkeypatch.setattr(speech_windows.SpeechModel, "open", keep)
    request = ask(12.0, language="en", words=True)
    hear(speech_executor, request)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(whisper)
    features = extractor(request.media[0].samples.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    [window], [found] = windows, seen
    with torch.inference_mode():
        output = model(features, decoder_input_ids=torch.tensor([window.tokens]), output_attentions=True)
    weights = torch.stack([output.cross_attentions[layer][0, head] for layer, head in ((0, 1), (1, 0))])[..., :600]
    weights = (weights / weights.sum(-1, keepdim=True))[:, window.begin - 1 :][:, : found.shape[1]]
    assert found.shape[1] >= len(window.tokens) - window.begin
    torch.testing.assert_close(found, weights, rtol=1e-2, atol=1e-3)


def test_words_are_said_in_their_order_and_are_the_text(speech_executor: SpeechExecutor) -> None:
    assert speech_executor.describe().word_times
    plain = segments_of(hear(speech_executor, ask(75.0, language="en")))
    assert [segment.words for segment in plain] == [[]] * len(plain)
    replies = hear(speech_executor, ask(75.0, language="en", words=True))
    segments = segments_of(replies)
    assert [segment.text for segment in segments] == [segment.text for segment in plain]
    words = [word for segment in segments for word in segment.words]
    assert len(words) >= len(segments)
    for segment in segments:
        assert "".join(word.text for word in segment.words) == "".join(segment.text.split())
        times = [time for word in segment.words for time in (word.start_s, word.end_s)]
        assert times == sorted(times)
        assert all(segment.window_s <= time <= min(75.0, segment.window_s + 30) for time in times)
    assert len({word.start_s for word in words}) > len(words) // 2


def test_words_last_until_what_follows_begins(speech_executor: SpeechExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark of time is something that follows, and a token of a word is not."""
    tokenizer = speech_executor._checkpoint.tokenizer
    parts = ["<|0.00|>", *tokenizer.tokenize(" the boat is"), "<|4.00|>", "<|4.00|>", *tokenizer.tokenize(" red"), "<|6.00|>"]
    script = iter([*tokenizer.convert_tokens_to_ids(parts), tokenizer.eos_token_id])
    monkeypatch.setattr(speech_executor, "_next_token", lambda *_: (next(script), -0.1))
    times_s = [0.1 * number for number in range(len(parts) + 1)]
    monkeypatch.setattr(speech_executor, "_time_tokens", lambda *_: times_s)
    first, second = segments_of(hear(speech_executor, ask(10.0, language="en", words=True)))
    assert (first.text, second.text) == (" the boat is", " red")
    words = [*first.words, *second.words]
    assert [word.text for word in words] == ["the", "boat", "is", "red"]
    marks = [times_s[number] for number, token in enumerate(parts) if token.startswith("<|")]
    assert [word.end_s for word in words] == [words[1].start_s, words[2].start_s, marks[1], marks[3]]
    assert (words[0].start_s, words[3].start_s) == (times_s[1], times_s[parts.index("<|4.00|>") + 2])


def test_a_model_that_does_not_name_its_heads_says_nothing_of_words(whisper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = speech_windows.SpeechModel.__init__

    def without_heads(self: Any, name: str, tokenizer: Any, extractor: Any, config: Any, *rest: Any) -> None:
        load(self, name, tokenizer, extractor, config, *rest)
        del config.alignment_heads

    monkeypatch.setattr(speech_windows.SpeechModel, "__init__", without_heads)
    speech_executor = create_executor("transformers", ExecutorOptions(model=str(whisper)))
    assert not speech_executor.describe().word_times
    [output] = speech_executor.execute([StepInput(1, ask(words=True))])
    assert isinstance(output, ValueError)
    assert "does not say when words are said" in str(output)
