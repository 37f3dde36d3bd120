"""``python -m bench.vllm.embeds_program MODEL``: vLLM's ``LLM`` with an engine core and two workers, and long prompts."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any, Literal

import msgspec
import psutil
import torch

from bench.meter import cpu_s_of
from bench.programs import orders
from bench.vllm.server import QUIET_ENVIRONMENT

#: 24,000 tokens of 8,192 bytes, as of models with 8 billion parameters.
TOKENS, WIDTH = 24_000, 4096

Kind = Literal["embeddings", "token ids"]
#: How its processes name themselves; the first is this one.
PROCESSES = ("LLM", "EngineCore", "Worker")


class Order(msgspec.Struct, frozen=True):
    """A prompt.

    Attributes:
        kind: how it is given.
        number: another number is another prompt.
    """

    kind: Kind
    number: int


class Answered(msgspec.Struct, frozen=True):
    """What came of a prompt.

    Attributes:
        wall_ms: until its first token.
        cpu_ms: by kind of process.
        digest: of the token and the logprobs.
    """

    wall_ms: float
    cpu_ms: dict[str, float]
    digest: str


class Engine:
    """``LLM``, and its processes.

    Args:
        model: the tiny one's directory; it is made as wide as needed.
    """

    def __init__(self, model: str) -> None:
        os.environ |= QUIET_ENVIRONMENT
        from vllm import LLM

        text = {"hidden_size": WIDTH, "intermediate_size": 32, "head_dim": 32, "max_position_embeddings": 2 * TOKENS}
        self._llm: Any = LLM(
            model,
            hf_overrides={"text_config": text},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            enable_prompt_embeds=True,
            enable_prefix_caching=False,
            max_model_len=TOKENS + 32,
            max_num_batched_tokens=TOKENS + 32,
            max_num_seqs=1,
            limit_mm_per_prompt={"image": 0},
            load_format="dummy",
            enforce_eager=True,
            dtype="bfloat16",
        )
        self._embeddings = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        children = psutil.Process().children(recursive=True)
        self._pids = {
            kind: [child.pid for child in children if any(kind in word for word in child.cmdline()[:1])]
            for kind in PROCESSES[1:]
        } | {PROCESSES[0]: [os.getpid()]}

    def ask(self, order: Order) -> Answered:
        from vllm import SamplingParams

        prompt: Any = {"prompt_token_ids": [(number + order.number) % 256 for number in range(TOKENS)]}
        if order.kind == "embeddings":
            prompt = {"prompt_embeds": self._embeddings.roll(order.number, 0)}
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=4)
        before, began_s = self._cpu_s(), time.perf_counter()
        (output,) = self._llm.generate([prompt], sampling, use_tqdm=False)
        wall_s, after = time.perf_counter() - began_s, self._cpu_s()
        (step,) = output.outputs[0].logprobs
        likely = sorted((token, round(probability.logprob, 4)) for token, probability in step.items())
        cpu_ms = {kind: (after[kind] - before[kind]) * 1e3 for kind in PROCESSES}
        return Answered(wall_s * 1e3, cpu_ms, hashlib.sha256(json.dumps(likely).encode()).hexdigest()[:8])

    def _cpu_s(self) -> dict[str, float]:
        return {kind: cpu_s_of(pids) for kind, pids in self._pids.items()}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    engine = Engine(sys.argv[1])
    for order, answer in orders(Order):
        try:
            answer(engine.ask(order))
        except Exception as error:  # noqa: BLE001 # it has its place among the results
            answer(error)
    engine.close()


if __name__ == "__main__":
    main()
