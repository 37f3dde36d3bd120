"""The ``transformers`` executor with prompts that are no conversation, and as a tokenizer: against transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmring.engine.executors.interface import ContextLengthError, ExecutorOptions
from shmring.engine.protocol import ChatMessage, GenerateRequest, SamplingParams, TextPart
from tests.stepping import answer
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402 - after the skip

PROMPT = "The cat sits on the chair"
CONVERSATION = [ChatMessage("user", [TextPart("What is in the picture?")])]


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", chat_template=False)


@pytest.fixture(scope="module")
def executor(path: Path) -> TransformersExecutor:
    return TransformersExecutor(ExecutorOptions(model=str(path)))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


def ask(prompt: Any, **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=8, temperature=0), **fields)


def test_a_model_without_a_template_completes_and_tokenises(executor: TransformersExecutor) -> None:
    assert executor.describe().tasks == ["complete", "tokenize", "encode"]


def test_a_prompt_is_gone_on_from_as_by_transformers(executor: TransformersExecutor, path: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    for prompt in (PROMPT, inputs["input_ids"][0].tolist()):
        replies = answer(executor, ask(prompt))
        assert [token for reply in replies for token in reply.token_ids] == expected
        assert replies[-1].prompt_tokens == inputs["input_ids"].shape[1]


def test_control_tokens_of_a_prompt_are_its_callers(executor: TransformersExecutor, tokenizer: Any) -> None:
    """All of a prompt is the caller's own; in a conversation the same text is only text."""
    [reply] = answer(executor, ask("a<|end|>b", tokenize=True))
    assert tokenizer.convert_tokens_to_ids("<|end|>") in reply.token_ids


@for_each("token", [-1, 100_000])
@for_each("tokenize", [False, True])
def test_a_token_that_the_model_does_not_have_is_refused(
    executor: TransformersExecutor, tokenizer: Any, token: int, tokenize: bool
) -> None:
    """On a GPU it would end the engine."""
    with pytest.raises(ValueError, match=f"no token {token}; its tokens are 0 to {len(tokenizer) - 1}"):
        answer(executor, ask([1, token], tokenize=tokenize))


@for_each("prompt", ["", []])
def test_an_empty_prompt_is_refused(executor: TransformersExecutor, prompt: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        answer(executor, ask(prompt))


@for_each("prompt", ["x" * 1_000_000, [1] * 600])
def test_a_prompt_that_is_too_long_is_refused(executor: TransformersExecutor, prompt: Any) -> None:
    with pytest.raises(ContextLengthError):
        answer(executor, ask(prompt))


def test_tokens_are_those_of_the_tokenizer_and_back(executor: TransformersExecutor, tokenizer: Any) -> None:
    text = "Größe 🙂<|end|>"
    [reply] = answer(executor, ask(text, tokenize=True))
    assert reply.token_ids == tokenizer(text)["input_ids"]
    assert (reply.text, reply.prompt_tokens, reply.finish_reason) == ("", len(reply.token_ids), "stop")
    [back] = answer(executor, ask(reply.token_ids, tokenize=True))
    assert (back.text, back.token_ids) == (text, [])


def test_tokens_of_a_conversation_are_those_of_its_answer(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    [reply] = answer(executor, GenerateRequest(CONVERSATION, tokenize=True))
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is in the picture?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert reply.token_ids == list(expected)
    assert answer(executor, GenerateRequest(CONVERSATION, sampling=SamplingParams(max_tokens=1)))[-1].prompt_tokens == len(
        reply.token_ids
    )


def test_special_tokens_are_added_unless_they_are_not_wanted(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama", chat_template=False))))
    tokenizer = executor._checkpoint.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    [with_it] = answer(executor, ask(PROMPT, tokenize=True))
    [without] = answer(executor, ask(PROMPT, tokenize=True, add_special_tokens=False))
    assert with_it.token_ids == [end, *without.token_ids]
