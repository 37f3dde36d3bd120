"""A program: writes down recordings with a speech model in vLLM's engine, and with transformers; prints what each has written.

``python -m tests.vllm.heard MODEL``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench.vllm.server import QUIET_ENVIRONMENT
from shmring.engine.executors import ExecutorOptions, StepInput, create_executor
from shmring.engine.executors.vllm_speech import VllmSpeechExecutor
from shmring.engine.protocol import EncodeRequest, GenerateReply, GenerateRequest, SamplingParams, SpeechParams, Text, Waveform

RATE = 16_000
#: Tokens of a step: a window's are 1500, and vLLM takes no window in pieces.
ENGINE = {"enforce_eager": True, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 4096}


def ask(
    seconds: float = 3.0, *, prompt: str | None = None, temperature: float = 0.0, seed: int | None = 1, **speech: Any
) -> Any:
    times = torch.arange(round(RATE * seconds)) / RATE
    samples = 0.3 * torch.sin(2 * torch.pi * 440 * times * (1 + 0.3 * torch.sin(times)))
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return GenerateRequest(media=[Waveform(samples, RATE)], sampling=sampling, prompt=prompt, speech=SpeechParams(**speech))


def main() -> None:
    os.environ.update(QUIET_ENVIRONMENT)
    requests = {
        "english": ask(language="en"),
        "german, in English": ask(language="German", task="translate"),
        "language unknown": ask(),
        "long": ask(75.0, language="en"),
        "after a prompt": ask(prompt="The boat is red.", language="en"),
        "after a prompt, language unknown": ask(35.0, prompt="The boat is red."),
    }
    executor = create_executor("vllm", ExecutorOptions(model=sys.argv[1], options=ENGINE))
    assert isinstance(executor, VllmSpeechExecutor)
    description = executor.describe()
    seen: dict[str, Any] = {
        "tasks": description.tasks,
        "alone": {name: told(hear(executor, [request])[0]) for name, request in requests.items()},
        "together": dict(zip(requests, map(told, hear(executor, list(requests.values()))), strict=True)),
        "by chance": [
            told(hear(executor, [ask(language="en", temperature=1.0, seed=seed)])[0])["tokens"] for seed in (1, 1, 2)
        ],
        "refused": [
            f"{type(error).__name__}: {error}"
            for error in hear(
                executor, [ask(language="xx"), GenerateRequest(prompt="a"), EncodeRequest([Text("a")]), ask(words=True)]
            )
        ],
        "forgotten": forget(executor),
    }
    executor.close()
    other = create_executor("transformers", ExecutorOptions(model=sys.argv[1], options={"dtype": "float32"}))
    seen["by transformers"] = {name: told(hear(other, [request])[0]) for name, request in requests.items()}
    print("seen", json.dumps(seen))


def hear(executor: Any, requests: Sequence[Any]) -> list[Any]:
    """The replies to requests that come at the same time, or the error of each."""
    payloads: dict[int, Any] = dict(enumerate(requests))
    replies: dict[int, Any] = {number: [] for number in payloads}
    running = list(payloads)
    for _ in range(20_000):
        outputs = executor.execute([StepInput(number, payloads.pop(number, None)) for number in running])
        for number, output in zip(list(running), outputs, strict=True):
            if isinstance(output, Exception):
                replies[number] = output
            else:
                assert output.seconds >= 0
                replies[number] += [reply for reply in (output.reply, *output.others) if reply is not None]
            if isinstance(output, Exception) or output.finished:
                running.remove(number)
        if not running:
            return list(replies.values())
    raise AssertionError("it does not end")


def told(replies: Sequence[GenerateReply]) -> dict[str, Any]:
    segments = [segment for reply in replies for segment in reply.segments]
    return {
        "text": "".join(reply.text for reply in replies),
        "tokens": [segment.tokens for segment in segments],
        "times": [[segment.start_s, segment.end_s] for segment in segments],
        "no speech": [segment.no_speech_prob for segment in segments],
        "language": replies[-1].language,
        "counts": [replies[-1].prompt_tokens, replies[-1].completion_tokens],
        "reasons": [reply.finish_reason for reply in replies],
    }


def forget(executor: VllmSpeechExecutor) -> Any:
    """What is left of a request that its caller has aborted: while it is prepared, and while it is written."""
    left: list[Any] = []

    def look() -> None:
        left.append([len(executor._requests), executor._engine.has_unfinished_requests()])

    for is_written in (False, True):
        executor.execute([StepInput(99, ask(65.0))])
        while is_written and not executor._engine.has_unfinished_requests():
            executor.execute([StepInput(99, None)])
        look()
        executor.forget(99)
        executor.forget(99)
        look()
    return left


if __name__ == "__main__":
    main()
