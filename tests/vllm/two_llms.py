"""A program: two of vLLM's ``LLM`` in one process, as a reward and a policy model; asks each about a picture, and says how
its tensor went.

``python -m tests.vllm.two_llms DIRECTORY``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.vllm.server import IN_PROCESS, QUIET_ENVIRONMENT, model

SIDE = 1344


def main(directory: Path) -> None:
    os.environ |= {**QUIET_ENVIRONMENT, "XDG_RUNTIME_DIR": str(directory)}
    from vllm import LLM

    options: dict[str, Any] = {
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "limit_mm_per_prompt": {"image": 1},
        "skip_mm_profiling": True,
        "distributed_executor_backend": IN_PROCESS,
    }
    llms = [LLM(str(model(SIDE)), **options) for _ in range(2)]
    for number, llm in enumerate(llms):
        print("answer", number, json.dumps(answer(llm, number)), flush=True)
        print("tensors", number, json.dumps(counts(llm)), flush=True)


def answer(llm: Any, number: int) -> str:
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    image = Image.fromarray(np.full((SIDE, SIDE, 3), number, dtype=np.uint8))
    prompt = {"prompt": "user: <image>What is it?<|end|>\nassistant: ", "multi_modal_data": {"image": image}}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
    return str(output.outputs[0].text)


def counts(llm: Any) -> dict[str, int]:
    """What went which way, and why, between an ``LLM`` and its engine core."""
    tensors = llm.llm_engine.engine_core._shmring._traffic.tensors
    return {f"{way} {reason}".strip(): count for (way, reason), count in tensors.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
