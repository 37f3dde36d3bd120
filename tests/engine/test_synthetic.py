"""The synthetic executor: what it streams, how long it takes, what it verifies, and that it says what it is."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from shmring.engine.executors.interface import ContextLengthError, ExecutorOptions, StepInput
from shmring.engine.executors.synthetic import SyntheticExecutor
from shmring.engine.protocol import (
    ChatMessage,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    MediumPart,
    Picture,
    SamplingParams,
    Spectrogram,
    Text,
    TextPart,
    Video,
    Waveform,
    checksum_of,
)
from tests.tables import for_each


def executor(**options: Any) -> SyntheticExecutor:
    return SyntheticExecutor(ExecutorOptions(options=options))


def picture(value: int) -> Picture:
    pixels = torch.full((20, 30, 3), value, dtype=torch.uint8)
    return Picture(pixels, checksum=checksum_of(pixels))


def answer(synthetic: SyntheticExecutor, request: GenerateRequest, number: int = 1) -> list[GenerateReply]:
    replies: list[GenerateReply] = []
    payload: GenerateRequest | None = request
    while True:
        [output] = synthetic.execute([StepInput(number, payload)])
        assert not isinstance(output, Exception)
        assert isinstance(output.reply, GenerateReply)
        assert not output.keep_inputs
        replies.append(output.reply)
        if output.finished:
            return replies
        payload = None


def test_it_streams_as_many_tokens_as_it_is_asked_for() -> None:
    message = ChatMessage("user", [TextPart("two words"), MediumPart(0)])
    replies = answer(executor(), GenerateRequest([message], [picture(1)], SamplingParams(max_tokens=4)))
    assert "".join(reply.text for reply in replies) == "[synthetic] token2 token3 token4"
    assert [reply.completion_tokens for reply in replies] == [1, 2, 3, 4]
    assert [reply.finish_reason for reply in replies] == [None, None, None, "length"]
    assert {reply.prompt_tokens for reply in replies} == {2 + 64}


def test_an_answer_has_a_set_length_unless_it_is_asked_for_another() -> None:
    assert len(answer(executor(tokens=7), GenerateRequest([]))) == 7
    assert len(answer(executor(), GenerateRequest([]))) == 128


@for_each(
    ("stop", "text", "reason"),
    [(["token3"], "[synthetic] token2 ", "stop"), (["synth"], "[", "stop"), (["token4 token5 or"], None, "length")],
)
def test_an_answer_ends_at_a_stop_text(stop: list[str], text: str | None, reason: str) -> None:
    replies = answer(executor(), GenerateRequest([], [], SamplingParams(max_tokens=5, stop=stop)))
    assert "".join(reply.text for reply in replies) == (text or "[synthetic] token2 token3 token4 token5")
    assert (replies[-1].finish_reason, replies[-1].stop_text) == (reason, stop[0] if reason == "stop" else None)


@for_each("max_tokens", [0, -1])
def test_an_answer_has_a_token_at_least(max_tokens: int) -> None:
    synthetic = executor()
    [output] = synthetic.execute([StepInput(1, GenerateRequest([], [], SamplingParams(max_tokens=max_tokens)))])
    assert isinstance(output, ValueError)
    assert synthetic._answers == {}


def test_prompt_and_answer_are_bounded_as_a_models_are() -> None:
    request = GenerateRequest([ChatMessage("user", [TextPart("two words")])], [], SamplingParams(max_tokens=10**9))
    [output] = executor(max_model_len=10).execute([StepInput(1, request)])
    assert isinstance(output, ContextLengthError)
    assert (output.prompt_tokens, output.max_tokens, output.max_model_len) == (2, 10**9, 10)
    assert "the prompt has 2 tokens, media included, and max_tokens is 1000000000; the model takes 10 tokens" in str(output)
    request.sampling.max_tokens = None
    assert len(answer(executor(max_model_len=10), request)) == 8


def test_several_answers_are_told_apart_and_forgotten() -> None:
    synthetic = executor()
    batch = [StepInput(number, GenerateRequest([], [], SamplingParams(max_tokens=number))) for number in (1, 2, 3)]
    assert [output.finished for output in synthetic.execute(batch)] == [True, False, False]  # type: ignore[union-attr]
    synthetic.forget(1)
    outputs = synthetic.execute([StepInput(3, None), StepInput(2, None)])
    assert [output.reply.text for output in outputs] == [" token2", " token2"]  # type: ignore[union-attr]
    for number in (2, 3, 99):
        synthetic.forget(number)
    assert synthetic._answers == {}


def test_steps_and_new_items_take_their_time() -> None:
    synthetic = executor(step_s=0.02, item_s=0.03)
    started = time.monotonic()
    synthetic.execute([StepInput(1, GenerateRequest([], [picture(1), picture(2)]))])
    first_s = time.monotonic() - started
    synthetic.execute([StepInput(1, None)])
    second_s = time.monotonic() - started - first_s
    assert first_s >= 0.08
    assert second_s >= 0.02


MEDIA = {
    "picture": lambda tensor, checksum: Picture(tensor, checksum=checksum),
    "waveform": lambda tensor, checksum: Waveform(tensor.float(), 16_000, checksum=checksum and checksum_of(tensor.float())),
    "spectrogram": lambda tensor, checksum: Spectrogram(tensor.float(), 1.0, checksum=checksum and checksum_of(tensor.float())),
    "video": lambda tensor, checksum: Video(tensor, [0.0], 1.0, checksum=checksum),
}


@for_each("kind", MEDIA)
def test_every_medium_must_be_as_it_was_sent(kind: str) -> None:
    tensor = torch.arange(240, dtype=torch.uint8).reshape(1, 8, 10, 3)
    good = MEDIA[kind](tensor, checksum_of(tensor))
    [fine] = executor().execute([StepInput(1, EncodeRequest([good]))])
    assert not isinstance(fine, Exception)
    [unsigned] = executor().execute([StepInput(1, EncodeRequest([MEDIA[kind](tensor, None)]))])
    assert isinstance(unsigned, ValueError)
    assert "checksum_of" in str(unsigned)
    good.checksum ^= 1
    other = StepInput(2, EncodeRequest([Text("beside it")]))
    wrong, beside = executor().execute([StepInput(1, EncodeRequest([good])), other])
    assert isinstance(wrong, ValueError)
    assert f"a {kind} of {240 if kind in ('picture', 'video') else 960} bytes arrived with checksum" in str(wrong)
    assert wrong.__traceback__ is None
    assert not isinstance(beside, Exception)


def test_embeddings_are_unit_vectors_that_tell_inputs_apart() -> None:
    inputs = [picture(1), picture(2), picture(1), Text("a text"), Text("another")]
    [output] = executor(embedding_size=64).execute([StepInput(1, EncodeRequest(inputs))])
    embeddings = output.reply.embeddings  # type: ignore[union-attr]
    assert embeddings.shape == (5, 64)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(5))
    alike = embeddings @ embeddings.T
    assert alike[0, 2] == pytest.approx(1.0)
    assert (alike.fill_diagonal_(0).abs() > 0.9).sum() == 2
    assert output.reply.prompt_tokens == 3  # type: ignore[union-attr]


def test_it_says_that_it_is_synthetic() -> None:
    description = executor().describe()
    assert description.synthetic
    assert "synthetic" in description.model
    assert description.input.checksum


@for_each(
    ("options", "complaint"),
    [
        (ExecutorOptions(options={"steps": 1}), "unknown field.*it takes step_s, item_s"),
        (ExecutorOptions(options={"step_s": "soon"}), r"Expected `float`.*\$\.step_s"),
        (ExecutorOptions(options={"step_s": -1}), "can't be negative"),
        (ExecutorOptions(options={"tokens": 0}), "less than 1"),
        (ExecutorOptions(mm_processor_kwargs={"pixels": 1}), "it takes num_frames, max_pixels"),
        (ExecutorOptions(model="some/model"), "leave --model out"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: ExecutorOptions, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SyntheticExecutor(options)


def test_media_are_prepared_as_the_options_say() -> None:
    spec = SyntheticExecutor(ExecutorOptions(mm_processor_kwargs={"num_frames": 3, "max_pixels": 99})).describe().input
    assert spec.video is not None
    assert spec.picture is not None
    assert (spec.video.num_frames, spec.video.max_pixels, spec.picture.max_pixels) == (3, 99, 99)
