"""Steps of an executor, in a process of their own; for ``steps.py``, which says more.

It runs with the ``shmring`` of any checkout, so it imports nothing of ``bench``: that would be the other checkout's, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shmring.engine import protocol
from shmring.engine.executors import create_executor
from shmring.engine.executors.checkpoint import LoadSettings, load_checkpoint
from shmring.engine.executors.interface import Executor, ExecutorOptions, StepInput
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.executors.sampling import Sampler, find_likeliest

#: Tokens of a prompt, and answers that are written at the same time.
CASES = ((32, 1), (32, 16), (512, 16), (3000, 4))

_TOKENS = 128  # of an answer: when the last prompt has been read, piece by piece, the first answer goes on for some time
_MEASURED = 24  # steps; the first in which each of the answers gets a token and no prompt is read
_STREAMS, _JOINING = 4, 12  # answers, and questions about a picture that come meanwhile
_CALLERS, _TEXTS, _CHARACTERS = 16, 4, 32  # who have texts embedded

#: How the tokens of a step are chosen; those of so many answers, with the vocabulary of Qwen.
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "every option": {
        "temperature": 0.7,
        "top_k": 100_000,
        "top_p": 0.9,
        "min_p": 0.001,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
        "logit_bias": {7 * number: 1.0 for number in range(300)},
        "min_tokens": _TOKENS,
        "logprobs": 20,
    },
}
_CHOSEN, _VOCABULARY = 16, 151_936

#: transformers' own continuous batching.
CONTINUOUS = "generate_batch"
_BLOCKS = 128  # of 256 tokens: room for the contexts of any case. Otherwise it takes most of the machine's memory
_PASS_TOKENS = 2048  # of prompts; with 128 or 512, it takes a quarter more time


class _Step(NamedTuple):
    """What a step cost, and of how many requests it was."""

    wall_s: float
    cpu_s: float
    requests: int


def measure_steps(model: str, name: str) -> dict[str, float]:
    """Measures everything once; returns numbers by what they are of."""
    torch.set_num_threads(1)
    executor = create_executor(name, ExecutorOptions(model=model, options={"max_num_seqs": 32}))
    _execute(executor, [_question("x" * 16, 4)])
    gc.collect()
    gc.freeze()  # as the engine does when it has started: looking through all that was imported stops a step for 0.1 s and more
    found: dict[str, float] = {}
    for prompt, streams in CASES:
        found |= _measure_case(executor, prompt, streams, _TOKENS)
    joining = [_question("What is it?", 8, _picture(seed)) for seed in range(_JOINING)]
    steps = _execute(executor, [_question("x" * 32, 4 * _TOKENS) for _ in range(_STREAMS)], joining)
    found[f"longest step in ms, {_JOINING} pictures join {_STREAMS}"] = 1000 * max(step.wall_s for step in steps[1:])
    texts = [protocol.EncodeRequest([protocol.Text(chr(97 + caller) * _CHARACTERS)] * _TEXTS) for caller in range(_CALLERS)]
    steps = _execute(executor, texts)
    found[f"embeddings/s of CPU, {_CALLERS} callers"] = _CALLERS * _TEXTS / sum(step.cpu_s for step in steps)
    executor.close()
    return found | measure_choosing()


def measure_choosing(vocabulary: int = _VOCABULARY) -> dict[str, float]:
    """Measures how long the tokens of a step are chosen: of peaked logits, in which some hundred tokens are likely."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((_CHOSEN, vocabulary), generator=generator) * 1.5
    likely = torch.randint(0, vocabulary, (_CHOSEN, 200), generator=generator)
    logits.scatter_add_(1, likely, 14 * torch.rand(likely.shape, generator=generator))
    found: dict[str, float] = {}
    for name, options in OPTIONS.items():
        params = protocol.SamplingParams(**options)
        samplers = [Sampler(params, likely[number], {1, 2}, number) for number in range(_CHOSEN)]
        steps: list[float] = []
        for _ in range(_MEASURED):
            before = time.process_time()
            for sampler, row in zip(samplers, logits, strict=True):
                token = sampler.choose(row)
                if params.logprobs is not None:
                    find_likeliest(row, token, params.logprobs)
            steps.append(time.process_time() - before)
        found[f"CPU ms to choose {_CHOSEN} tokens, {name}"] = 1000 * statistics.median(steps)
    return found


def _measure_case(executor: Executor, prompt: int, streams: int, answer_tokens: int) -> dict[str, float]:
    """Measures steps of which each of the answers gets a token, and all CPU time from the first prompt to the last answer."""
    steps = _execute(executor, [_question("x" * prompt, answer_tokens) for _ in range(streams)])
    # An answer gets a token a step: so many steps before the last one, the last prompt had been read.
    full = [step.cpu_s for step in steps[len(steps) - answer_tokens + 1 :] if step.requests == streams]
    if not full:
        raise RuntimeError(f"{prompt} x {streams}: the first answer has ended before the last one began")
    return {
        f"CPU ms a step, {prompt} x {streams}": 1000 * statistics.median(full[:_MEASURED]),
        _all_cpu(prompt, streams, answer_tokens): sum(step.cpu_s for step in steps),
    }


def measure_continuous(model: str, cases: Sequence[tuple[int, int]] = CASES, answer_tokens: int = _TOKENS) -> dict[str, float]:
    """Measures transformers' continuous batching with the same prompts, which it does not read once for several answers."""
    torch.set_num_threads(1)
    transformers: Any = importlib.import_module("transformers")
    checkpoint = load_checkpoint(model, LoadSettings())
    prompts = PromptBuilder(checkpoint, {})
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=_BLOCKS, max_batch_tokens=_PASS_TOKENS, allow_block_sharing=False
    )

    def generate(prompt: int, streams: int, tokens: int) -> float:
        inputs = prompts.build(_question("x" * prompt, tokens))["input_ids"][0].tolist()
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1)
        before = time.process_time()
        answers = checkpoint.model.generate_batch(
            [inputs] * streams, generation_config=config, continuous_batching_config=batching
        )
        after = time.process_time()
        if [len(answer.generated_tokens) for answer in answers.values()] != [tokens] * streams:
            raise RuntimeError(f"{prompt} x {streams}: not all tokens have come")
        return after - before

    generate(16, 1, 4)
    return {_all_cpu(prompt, streams, answer_tokens): generate(prompt, streams, answer_tokens) for prompt, streams in cases}


def _all_cpu(prompt: int, streams: int, answer_tokens: int) -> str:
    return f"all CPU s, {prompt} x {streams} + {answer_tokens}"


def _question(text: str, max_tokens: int, picture: protocol.Picture | None = None) -> protocol.GenerateRequest:
    parts = ([] if picture is None else [protocol.MediumPart(0)]) + [protocol.TextPart(text)]
    sampling = protocol.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return protocol.GenerateRequest([protocol.ChatMessage("user", parts)], [] if picture is None else [picture], sampling)


def _picture(seed: int) -> protocol.Picture:
    generator = torch.Generator().manual_seed(seed)
    return protocol.Picture(torch.randint(0, 256, (600, 800, 3), dtype=torch.uint8, generator=generator))


def _execute(executor: Executor, requests: Sequence[Any], joining: Sequence[Any] = ()) -> list[_Step]:
    """Executes steps until all requests are over, as the engine does; some join at the tenth."""
    batch = [StepInput(number, request) for number, request in enumerate(requests)]
    steps: list[_Step] = []
    while batch:
        if len(steps) == 10:
            batch += [StepInput(len(requests) + number, request) for number, request in enumerate(joining)]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = executor.execute(batch)
        steps.append(_Step(time.perf_counter() - wall, time.process_time() - cpu, len(batch)))
        following = []
        for part, output in zip(batch, outputs, strict=True):
            if isinstance(output, Exception):
                raise output
            if output.finished:
                executor.forget(part.request_id)
            else:
                following.append(StepInput(part.request_id, part.payload if output.keep_inputs else None))
        batch = following
    return steps


if __name__ == "__main__":
    of_all = measure_continuous(sys.argv[1]) if sys.argv[2] == CONTINUOUS else measure_steps(sys.argv[1], sys.argv[2])
    print(json.dumps(of_all))  # some say something before
