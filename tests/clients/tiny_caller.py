"""A tiny model that calls tools: ``python -m tests.clients.tiny_caller DIRECTORY`` writes it.

It is a Llama that knows by heart which token follows which, and looks at nothing before the last one. If the prompt has tools
and nothing that a tool returned, it calls ``Weather`` for Ulm, or what it was written to call; otherwise it says that it rains.
Its template marks which it is.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken

CONTEXT_LENGTH = 400_000  # agents describe themselves and their tools at length, and each letter is a token

# Each piece is a token, so that it tells which piece is next.
_CALLS = (
    "<|calls|>",
    "I look.",
    "<tool_call>",
    '{"name": "Weather", ',
    '"arguments": {"city": "Ulm", ',
    '"days": 3}}',
    "</tool_call>",
)
_SAYS = ("<|says|>", "It rains", " in Ulm.")
CALL, ANSWER = "".join(_CALLS[1:]), "".join(_SAYS[1:])

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if tools and messages[-1].role != 'tool' %}<|calls|>{% else %}<|says|>"
    "{% endif %}{% endif %}"
)

RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|calls|>", "<|says|>"],
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def write(directory: Path, call: Sequence[str] = _CALLS[3:-1]) -> None:
    """Writes the model, and what it calls: JSON in pieces, of which each is a token."""
    calls = (*_CALLS[:3], *call, _CALLS[-1])
    with tempfile.TemporaryDirectory() as untrained:
        path = _tiny_models().write_tiny_model(Path(untrained) / "llama", "llama")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        tokenizer.add_special_tokens({"additional_special_tokens": [calls[0], _SAYS[0]]})
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (*calls[1:], *_SAYS[1:])])
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), CONTEXT_LENGTH
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    _learn(model, tokenizer, calls, _SAYS)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tiny_models() -> Any:
    place = Path(__file__).parents[1] / "engine" / "tiny_models.py"
    specification = importlib.util.spec_from_file_location("tiny_models", place)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@torch.no_grad()
def _learn(model: Any, tokenizer: Any, *texts: Sequence[str]) -> None:
    """Layers add nothing, and the head has a piece's own direction at the token that follows it."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.zero_()
    for pieces in texts:
        tokens = [*map(tokenizer.convert_tokens_to_ids, pieces), tokenizer.eos_token_id]
        for token, following in itertools.pairwise(tokens):
            direction = model.model.embed_tokens.weight[token]
            model.lm_head.weight[following] += 20 * direction / direction.norm()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
