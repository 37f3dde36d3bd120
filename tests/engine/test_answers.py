"""What executors answer: taken as the protocol has it, made float32, or turned into an error that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shmring.engine.answers import checked
from shmring.engine.executors.interface import StepOutput
from shmring.engine.protocol import ChatMessage, EncodeReply, EncodeRequest, GenerateReply, GenerateRequest, Text, TextPart
from tests.tables import for_each

ENCODE = EncodeRequest([Text("a"), Text("b")])
GENERATE = GenerateRequest([ChatMessage("user", [TextPart("hello")])])
TEXT = GenerateReply("x", [1], 1, 1, "stop")


def embeddings_of(output: object) -> torch.Tensor:
    assert isinstance(output, StepOutput), output
    assert isinstance(output.reply, EncodeReply)
    return output.reply.embeddings


def test_what_is_as_it_should_be_is_passed_on() -> None:
    for output, payload in (
        (StepOutput(EncodeReply(torch.ones(2, 3))), ENCODE),
        (StepOutput(EncodeReply(torch.ones(5, 3))), None),  # of a later step: how many inputs there were is not known here
        (StepOutput(TEXT), GENERATE),
        (StepOutput(TEXT), None),
        (StepOutput(None, finished=False), ENCODE),
    ):
        assert checked(output, payload) is output


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_embeddings_become_float32_and_the_rest_stays(dtype: torch.dtype) -> None:
    output = checked(StepOutput(EncodeReply(torch.full((2, 3), 0.5, dtype=dtype), 7), keep_inputs=True), ENCODE)
    assert torch.equal(embeddings_of(output), torch.full((2, 3), 0.5))
    assert isinstance(output, StepOutput)
    assert isinstance(output.reply, EncodeReply)
    assert (output.reply.prompt_tokens, output.finished, output.keep_inputs) == (7, True, True)


@for_each(
    ("reply", "payload", "message"),
    [
        (EncodeReply(torch.tensor([[1.0, float("nan")]] * 2)), ENCODE, "finite"),
        (EncodeReply(torch.tensor([[1.0, float("inf")]] * 2)), ENCODE, "finite"),
        (EncodeReply(torch.ones(8)), ENCODE, r"shape \(8,\)"),
        (EncodeReply(torch.ones(8)), None, r"\(inputs, size\)"),
        (EncodeReply(torch.ones(2, 4, dtype=torch.int64)), ENCODE, "torch.int64"),
        (EncodeReply([[1.0]]), ENCODE, "list"),  # type: ignore[arg-type]
        (EncodeReply(torch.ones(2, 4), -5), ENCODE, "-5 prompt tokens"),
        (EncodeReply(torch.ones(2, 4)), GENERATE, "EncodeReply to GenerateRequest"),
        (TEXT, ENCODE, "GenerateReply to EncodeRequest"),
        (GenerateReply("x", None, 1, 1), GENERATE, "token_ids"),  # type: ignore[arg-type]
        ("text", GENERATE, "str"),
    ],
)
def test_what_is_wrong_fails_its_request_and_says_why(reply: Any, payload: Any, message: str) -> None:
    error = checked(StepOutput(reply), payload)
    assert isinstance(error, Exception)
    assert not isinstance(error, ValueError), "it would be said to be the caller's fault"
    with pytest.raises(type(error), match=message):
        raise error


def test_an_error_comes_back_without_its_frames() -> None:
    def fail() -> Exception:
        try:
            raise RuntimeError("broken") from KeyError("why")
        except RuntimeError as error:
            return error

    error = checked(fail(), ENCODE)
    assert isinstance(error, RuntimeError)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_what_is_no_output_at_all_is_an_error() -> None:
    assert "StepOutput" in str(checked(None, ENCODE))
