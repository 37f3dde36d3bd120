"""A program: asks vLLM's ``LLM`` about four pictures, twice; prints a digest of the answers, and the engine core's report.

``python -m tests.vllm.offline DIRECTORY``
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.vllm.server import IN_PROCESS, QUIET_ENVIRONMENT, RING, model

SIDE = 1344


def main(directory: Path) -> None:
    os.environ |= {**QUIET_ENVIRONMENT, "XDG_RUNTIME_DIR": str(directory), "SHMRING_VLLM_NAME": RING}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model(SIDE)),
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 1},
        mm_processor_cache_gb=0,
        distributed_executor_backend=IN_PROCESS,
    )
    prompts: list[Any] = [
        {"prompt": "user: <image>What is it?<|end|>\nassistant: ", "multi_modal_data": {"image": picture}}
        for picture in pictures()
    ]
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    for _ in range(2):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answers = [
        [
            (token, round(probability.logprob, 6))
            for step in output.outputs[0].logprobs
            for token, probability in sorted(step.items())
        ]
        for output in outputs
    ]
    print("digest", hashlib.sha256(repr(answers).encode()).hexdigest())
    if os.environ.get("SHMRING_VLLM") == "1":
        import shmring.threads

        with shmring.threads.connect(f"{RING}-0", lease_nbytes=4096) as client:
            print("report", json.dumps(client.call("report")))
    logging.getLogger("vllm").info("the program has ended")


def pictures() -> list[Any]:
    from PIL import Image

    numbers = np.random.default_rng(0)
    return [Image.fromarray(numbers.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(4)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
