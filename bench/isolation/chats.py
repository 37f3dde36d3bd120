"""A model whose vocabulary is as large as those in use, and what a heavy caller asks of it.

The model answers nothing that makes sense, and computes next to nothing: what remains of a step is what the server does with
the 150,000 logits of each answer, with prompts, forms and stop texts. So a caller who takes more than others of these shows.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.isolation.attacks import CHATS, NUMBER, Attack

MODEL = "shmring-large-vocabulary"
_VOCABULARY = 150_000
_CONTEXT = 16_384
_END = "<|end|>"
_TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(', ') }}" + _END + "\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}" + _END + "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": _END, "content": "text"},
    },
}
_COMPLETIONS = "/v1/completions"


def write_model(directory: Path) -> None:
    """Writes a Llama of two layers, with a byte-level tokenizer that knows 150,000 pieces of words."""
    import tokenizers
    import transformers
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    letters = string.ascii_lowercase
    pieces = itertools.chain.from_iterable(map("".join, itertools.product(letters, repeat=length)) for length in (2, 3, 4))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = list(itertools.islice(pieces, _VOCABULARY - len(alphabet)))
    vocabulary = {word: number for number, word in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(word[:-1], word[-1]) for word in words]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(_END, special=True)])
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token=_END, clean_up_tokenization_spaces=False)
    fast.chat_template, fast.response_template = _TEMPLATE, _RESPONSES
    fast.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=_CONTEXT,
            initializer_range=0.3,
            eos_token_id=fast.eos_token_id,
            bos_token_id=None,
            pad_token_id=fast.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(directory)


def _chat(max_tokens: int = 200, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
    return json.dumps(body | {"max_tokens": max_tokens} | fields).encode()


def small_chat() -> bytes:
    return _chat(4)


def _form(name: str, alternatives: int = 1, of: int = 1) -> dict[str, Any]:
    """A form of an answer: of some objects with one text each, all of which must be fulfilled."""

    def object_of(key: str) -> dict[str, Any]:
        return {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}

    every = [{"anyOf": [object_of(f"{name}_{group}_{number}") for number in range(alternatives)]} for group in range(of)]
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": {"allOf": every}}}


_KNOBS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 100_000,
    "min_p": 0.001,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": dict.fromkeys(range(300), 1.0),
}


def _tools(count: int) -> list[dict[str, Any]]:
    """Tools of three arguments each, described at some length."""
    arguments = {f"argument_{number}": {"type": "string", "description": "x" * 50} for number in range(3)}
    parameters = {"type": "object", "properties": arguments}
    functions = ({"name": f"tool_{number}", "description": "does " * 40, "parameters": parameters} for number in range(count))
    return [{"type": "function", "function": function} for function in functions]


def _every() -> Iterator[Attack]:
    def chats(
        title: str, connections: int, body: bytes, small: bytes = b"", *, hangs_up_after_s: float | None = None
    ) -> Attack:
        return Attack(title, connections, lambda: body, hangs_up_after_s, path=CHATS, small=small or small_chat())

    empty = [{"role": "user", "content": ""}] * 4096
    prompt = json.dumps({"model": MODEL, "prompt": list(range(100, 8100)), "max_tokens": 1, "temperature": 0}).encode()
    yield chats("chats that say that they are urgent", 64, _chat(50, priority=-9))
    yield chats("answers of 2000 tokens", 64, _chat(2000))
    yield chats("16 answers to each chat", 4, _chat(n=16))
    yield Attack("prompts of 8000 tokens", 4, lambda: prompt, path=_COMPLETIONS, small=small_chat())
    yield chats("answers with a seed", 14, _chat(seed=1, temperature=1))
    yield chats("answers with top_p", 16, _chat(temperature=1, top_p=0.9))
    yield chats("answers with every option of sampling", 16, _chat(**_KNOBS))
    yield chats("answers with 20 logprobs", 16, _chat(logprobs=True, top_logprobs=20))
    yield chats("answers with 16 stop texts of 1024 letters", 16, _chat(stop=[letter * 1024 for letter in "abcdefghijklmnop"]))
    yield chats("4096 empty messages", 16, _chat(messages=empty))
    yield chats("1024 tools", 16, _chat(8, tools=_tools(1024)))
    question = [{"role": "user", "content": "what " * 400}]
    yield chats("required calls of 32 tools", 16, _chat(8, messages=question, tools=_tools(32), tool_choice="required"))
    yield chats("chats that are hung up on after 20 ms", 16, _chat(2000), hangs_up_after_s=0.02)
    known = _chat(4, response_format=_form("known"))
    yield chats("new forms, beside a known one", 16, _chat(4, response_format=_form(f"f{NUMBER}", 12, 5)), known)
    refused = _chat(4, structured_outputs={"regex": f"(a{{1000}}){{200}}{NUMBER}"})
    yield chats("new forms that are refused after two seconds, beside a known one", 16, refused, known)
    yield chats("a pattern of 10,000 letters", 16, _chat(100, structured_outputs={"regex": "a{10000}"}))
    yield chats("a pattern of 100,000 letters", 4, _chat(structured_outputs={"regex": "a{100000}"}))


CHAT_ATTACKS = tuple(_every())
