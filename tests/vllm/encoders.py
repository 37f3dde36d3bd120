"""A program: one engine of vLLM in this process, which encodes, or uses what another one has encoded, or neither; asked by lines.

``python -m tests.vllm.encoders '{"model": DIRECTORY, "transfer": {...}, "options": {...}}'``: ``transfer`` has the fields of
``ECTransferConfig``; None: there is no connector. Each line that comes is JSON, and is answered by a line that begins with
``answer``:

* ``{"ask": [[1], [2, 3]]}``: one request with picture 1, another with pictures 2 and 3. The answer has their tokens with
  logprobs, how many media were encoded for it, and CPU milliseconds.
* ``{"lose": true}``: the next look-up of a worker finds nothing, as when the store ends in that moment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Engine:
    """vLLM, with what its encoder did."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig

        self.role = (transfer or {}).get("ec_role")
        self.llm: Any = LLM(
            model,
            **{
                "load_format": "dummy",
                "enforce_eager": True,
                "dtype": "bfloat16",
                "max_model_len": 512,
                "max_num_seqs": 8,
                "limit_mm_per_prompt": {"image": 3},
                "mm_processor_cache_gb": 0.5,
                "enable_prefix_caching": False,
                "skip_mm_profiling": True,
                "ec_transfer_config": transfer and ECTransferConfig(**transfer),
            }
            | options,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.side = core.vllm_config.model_config.hf_config.vision_config.image_size
        self.encoded = 0
        runner = core.model_executor.driver_worker.worker.model_runner
        execute = runner._execute_mm_encoder

        def counted(output: Any) -> Any:
            self.encoded += sum(len(indices) for indices in output.scheduled_encoder_inputs.values())
            return execute(output)

        runner._execute_mm_encoder = counted

    def ask(self, requests: list[list[int]]) -> dict[str, Any]:
        from vllm import SamplingParams

        tokens = 1 if self.role == "ec_producer" else 4
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
        prompts: list[Any] = [
            {
                "prompt": f"user: {'<image>' * len(seeds)}What is it?<|end|>\nassistant: ",
                "multi_modal_data": {"image": [picture(seed, self.side) for seed in seeds]},
            }
            for seeds in requests
        ]
        encoded, began_s = self.encoded, time.process_time()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        cpu_ms = (time.process_time() - began_s) * 1e3
        answers = [
            [
                [(token, round(probability.logprob, 6)) for token, probability in sorted(step.items())]
                for answer in output.outputs
                for step in answer.logprobs or ()
            ]
            for output in outputs
        ]
        return {"answers": answers, "encoded": self.encoded - encoded, "cpu_ms": cpu_ms}

    def lose(self) -> dict[str, Any]:
        from vllm.distributed.ec_transfer import get_ec_transfer

        store = get_ec_transfer()._worker._store
        find = store.find

        def find_nothing(keys: list[bytes], timeout_s: float) -> list[None]:
            store.find = find
            return [None] * len(keys)

        store.find = find_nothing
        return {}


def picture(seed: int, side: int) -> Any:
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(seed).integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
    return Image.fromarray(numbers).resize((side, side), Image.Resampling.NEAREST)


def main(model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
    from bench.vllm.server import QUIET_ENVIRONMENT

    os.environ |= {**QUIET_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = Engine(model, transfer, options)
    print("answer", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        print("answer", json.dumps(engine.lose() if said.get("lose") else engine.ask(said["ask"])), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
