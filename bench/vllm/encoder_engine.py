"""One engine of vLLM in this process, which encodes pictures, or uses what another engine has encoded, or neither."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench.vllm.server import QUIET_ENVIRONMENT

#: Where vLLM loads our connector from.
CONNECTOR = {
    "ec_connector": "ShmringECConnector",
    "ec_connector_module_path": "shmring.integrations.vllm.ec_connector",
}

_OPTIONS: Mapping[str, Any] = {
    "load_format": "dummy",
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "limit_mm_per_prompt": {"image": 3},
    "mm_processor_cache_gb": 0.5,
    "enable_prefix_caching": False,  # so that a picture's encoder output is needed each time
    "skip_mm_profiling": True,
}


class Answered(msgspec.Struct, frozen=True):
    """What came of requests.

    Attributes:
        answers: of each: its tokens, with those that were likely and how likely they were.
        encoded: media that were encoded for them.
        cpu_ms: of this process, all threads.
    """

    answers: list[Any]
    encoded: int
    cpu_ms: float


class Order(msgspec.Struct, frozen=True):
    """Requests, one after the other.

    Attributes:
        pictures: the picture of each, by its number.
    """

    pictures: list[int]


class Seen(msgspec.Struct, frozen=True):
    """What requests have cost, each number by request.

    Attributes:
        request_ms: CPU of a request, with preparing its picture.
        save_ms: CPU of keeping an output.
        save_wall_ms: the time that the model waited for that.
        load_ms: CPU of getting an output to where the model reads it.
        look_ms: CPU of looking an output up for the first time.
        again_us: time of looking it up again, in microseconds.
        copy_ms: the time of one memcpy of an output.
        nbytes: of an output.
        encoded: pictures that were encoded.
        digest: of all answers and logprobs.
    """

    request_ms: list[float]
    save_ms: list[float]
    save_wall_ms: list[float]
    load_ms: list[float]
    look_ms: list[float]
    again_us: list[float]
    copy_ms: list[float]
    nbytes: int
    encoded: int
    digest: str


class EncoderEngine:
    """See the head of this file.

    Args:
        model: its directory, made by ``tests/vllm/tiny_model.py``.
        transfer: the fields of vLLM's ``ECTransferConfig``; None: there is no connector.
        options: of ``LLM``, beside those that keep the tiny model tiny.

    Attributes:
        scheduler, worker: both halves of the connector; None: there is none, or it is in a process of several workers.
        encoded: media that were encoded so far, in this process.
    """

    def __init__(self, model: str, transfer: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        os.environ |= {**QUIET_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        from vllm import LLM
        from vllm.config import ECTransferConfig
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

        config = None if transfer is None else ECTransferConfig(**transfer)
        self._llm: Any = LLM(model, **{**_OPTIONS, "ec_transfer_config": config, **options})
        self._tokens = 1 if transfer is not None and transfer["ec_role"] == "ec_producer" else 4
        core = self._llm.llm_engine.engine_core.engine_core
        self._side = core.vllm_config.model_config.hf_config.vision_config.image_size
        self.scheduler: Any = core.scheduler.ec_connector
        self.worker: Any = get_ec_transfer() if has_ec_transfer() else None
        self.encoded = 0
        if not hasattr(core.model_executor, "driver_worker"):
            return
        runner = core.model_executor.driver_worker.worker.model_runner
        execute = runner._execute_mm_encoder

        def counted(output: Any) -> Any:
            self.encoded += sum(len(indices) for indices in output.scheduled_encoder_inputs.values())
            return execute(output)

        runner._execute_mm_encoder = counted

    def ask(self, requests: Sequence[Sequence[int]]) -> Answered:
        """Asks about pictures, given by their numbers: so many in each request."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=self._tokens, temperature=0, ignore_eos=True, logprobs=2)
        prompts: list[Any] = [
            {
                "prompt": f"user: {'<image>' * len(pictures)}What is it?<|end|>\nassistant: ",
                "multi_modal_data": {"image": [picture_of(number, self._side) for number in pictures]},
            }
            for pictures in requests
        ]
        encoded, began_s = self.encoded, time.process_time()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        cpu_ms = (time.process_time() - began_s) * 1e3
        answers = [
            [
                [[token, round(probability.logprob, 6)] for token, probability in sorted(step.items())]
                for answer in output.outputs
                for step in answer.logprobs or ()
            ]
            for output in outputs
        ]
        return Answered(answers, self.encoded - encoded, cpu_ms)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function in each worker, behind which it has that; returns what it has returned there."""
        called: list[Any] = self._llm.collective_rpc(function, args=arguments)
        return called

    def close(self) -> None:
        """Ends it, and its connector with it."""
        self._llm.llm_engine.engine_core.shutdown()


def picture_of(number: int, side: int) -> Any:
    """Returns a picture that no other number has."""
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(number).integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
    return Image.fromarray(numbers).resize((side, side), Image.Resampling.NEAREST)
