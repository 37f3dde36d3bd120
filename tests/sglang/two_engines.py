"""A program: two of SGLang's ``Engine`` in one process, as a reward and a policy model; asks each about a picture, and says how
its tensors went.

``python -m tests.sglang.two_engines MODEL``
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from bench.servers import picture
from bench.sglang.ends import QUIET_ENVIRONMENT

SIDE = 672
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
ASK_S = 600.0  # only a hang takes so long
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "bfloat16",
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "context_length": 8192,
    "max_total_tokens": 16384,
    "max_running_requests": 2,
    "log_level": "info",
}


def main(model: str) -> None:
    import sglang
    from sglang.srt.managers import mm_utils

    logging.getLogger("sglang.shmring").setLevel("INFO")
    engines = [sglang.Engine(model_path=model, **OPTIONS) for _ in range(2)]
    for number, engine in enumerate(engines):
        until_s = time.monotonic() + ASK_S
        while True:
            print("answer", number, json.dumps(answer(engine, number)), flush=True)
            traffic = mm_utils.ShmPointerMMData.ends.sender._traffic.tensors
            if traffic["copied", ""] or time.monotonic() > until_s:
                break
        ways = sorted(f"{way} {reason}".strip() for (way, reason), count in traffic.items() if count)
        print("tensors", number, json.dumps(ways), flush=True)
    for engine in engines:
        engine.shutdown()


def answer(engine: Any, number: int) -> str:
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    return str(engine.generate(PROMPT, image_data=picture(SIDE, number), sampling_params=sampling)["text"])


if __name__ == "__main__":
    os.environ |= QUIET_ENVIRONMENT
    main(sys.argv[1])
