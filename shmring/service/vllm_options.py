"""Options of ``vllm serve`` that are called otherwise here, or are not there, by their names in vLLM 0.32. Whoever types one is
told what does the same. Options that have the same name and meaning are ordinary ones; other names for them are in their
:class:`~shmring.service.flags.Flag`.
"""

from __future__ import annotations

import re

__all__ = ["ADVICE", "OF_ITS_ENGINE", "advice_on", "parse_count"]

_TEMPLATE = "leave it out: chat templates are the model's own"
_TOOLS = "leave it out: tools work where the model's template takes them and transformers can read its calls"
_QUIET = "leave it out: prompts and answers are never logged"

#: What to write in the place of an option.
ADVICE = {
    "allow-deprecated-quantization": "leave it out",
    "chat-template": _TEMPLATE,
    "chat-template-content-format": _TEMPLATE,
    "default-chat-template-kwargs": "callers send chat_template_kwargs",
    "disable-access-log-for-endpoints": "leave --access-log out, or filter the log",
    "disable-fastapi-docs": "leave it out: /docs loads nothing from elsewhere; a proxy can hide it",
    "disable-log-stats": "leave it out: numbers are in /metrics, not in the log",
    "enable-auto-tool-choice": _TOOLS,
    "enable-force-include-usage": "callers set stream_options.include_usage",
    "enable-log-deltas": _QUIET,
    "enable-log-outputs": _QUIET,
    "enable-log-requests": "--access-log writes a line for each request, without what is in it",
    "enable-offline-docs": "leave it out: /docs loads nothing from elsewhere",
    "enable-request-id-headers": "leave it out: each answer has X-Request-Id",
    "enable-server-load-tracking": "leave it out: /load is always there",
    "exclude-tools-when-tool-choice-none": "leave it out: it is always so",
    "h11-max-header-count": "leave it out: another parser is used",
    "h11-max-incomplete-event-size": "--max-body-nbytes bounds bodies",
    "kv-cache-memory-bytes": "--slab-nbytes is the memory for media; caches of contexts are the executor's",
    "log-config-file": "--log-level, --log-format and --access-log say what is logged",
    "logging-config": "--log-level, --log-format and --access-log say what is logged",
    "max-log-len": _QUIET,
    "max-num-queued-reqs": "--max-waiting bounds what waits in the engine, --max-queued-requests in a frontend",
    "middleware": "leave it out: put a proxy in front",
    "mm-processor-cache-type": "leave it out: prepared media are kept in the slab",
    "mm-shm-cache-max-object-size-mb": "leave it out: media of any size that fits the slab are kept",
    "mm-tensor-ipc": "leave it out: tensors always go through shared memory",
    "pooler-config": 'the executor\'s option pooling: --executor-options \'{"pooling": "mean"}\'',
    "profiler-config": "--profiler-dir",
    "response-role": "leave it out: it is always assistant",
    "ssl-ciphers": "leave it out: they are those of Python",
    "tool-call-parser": _TOOLS,
    "tool-parser-plugin": _TOOLS,
    "trust-request-chat-template": _TEMPLATE,
}

#: Of its engine: nothing here does the same.
OF_ITS_ENGINE = frozenset(
    {
        *("async-scheduling", "attention-backend", "block-size", "compilation-config", "convert", "cpu-offload-gb"),
        *("data-parallel-backend", "device-memory-utilization", "disable-custom-all-reduce", "distributed-executor-backend"),
        *("download-dir", "enable-chunked-prefill", "enable-eplb", "enable-expert-parallel", "enable-lora"),
        *("enable-prefix-caching", "enable-prompt-embeds", "enable-sleep-mode", "enforce-eager", "generation-config"),
        *("gpu-memory-utilization", "hf-config-path", "hf-overrides", "hf-token", "interleave-mm-strings", "kv-cache-dtype"),
        *("kv-transfer-config", "language-model-only", "load-format", "logits-processors", "lora-modules", "max-logprobs"),
        *("max-lora-rank", "max-loras", "max-num-batched-tokens", "mm-encoder-tp-mode", "model-impl", "nnodes", "node-rank"),
        *("num-gpu-blocks-override", "optimization-level", "override-generation-config", "pipeline-parallel-size"),
        *("quantization", "reasoning-parser", "revision", "runner", "scheduling-policy", "seed", "skip-mm-profiling"),
        *("speculative-config", "structured-outputs-config", "tensor-parallel-size", "tokenizer", "tokenizer-mode"),
        *("trust-remote-code", "worker-cls"),
    }
)
_THEIRS = "it is for vLLM's engine; what the executor takes is written in --executor-options (docs/reference.md)"

_MOST = 2**31
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_FACTORS = {"": 1, "k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}


def advice_on(option: str) -> str | None:
    """Returns what to do in the place of an option of vLLM's; None: vLLM has none of this name, or it is here.

    Args:
        option: as it was written, with or without dashes before it.
    """
    name = option.lstrip("-").replace("_", "-")
    positive = name.removeprefix("no-")
    for known in (name, positive):
        if known in ADVICE:
            return ADVICE[known]
    return _THEIRS if positive in OF_ITS_ENGINE else None


def parse_count(text: str) -> int:
    """Reads a number as vLLM does: 8192, 8k (8000), 8K (8192), 0.5m.

    Raises:
        ValueError: it is none, or not whole.
    """
    match = _COUNT.fullmatch(text.strip())
    number = float(match[1]) * _FACTORS[match[2]] if match else 0.0
    if match is None or not 1 <= number < _MOST or number != int(number):
        raise ValueError(f"{text[:64]!r} is no number of tokens; write 8192, or 8K")
    return int(number)
