"""What a Whisper model may write next, for vLLM, which knows no such rules: its engine imports this module by name, in each of
its workers.

The first tokens of a window are given, or one of some: language and task. The rules of marks of time follow: transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from shmring.engine.executors.speech_windows import load_generation_config

__all__ = ["ARGUMENT", "NAME", "Marks"]

#: As vLLM's engine is told of it.
NAME = f"{__name__}:Marks"

#: The name of a request's argument that says which tokens the first ones may be: a list for each place.
ARGUMENT = "shmring_first_tokens"


class Marks(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not in every environment
    """Keeps a request's tokens to the rules, if it has the argument."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._config = load_generation_config(vllm_config.model_config.model)
        self._suppressed = list(self._config.suppress_tokens or [])

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the likeliest."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
        """Returns what is done with the logits of a request; None: nothing."""
        first: Sequence[Sequence[int]] | None = (params.extra_args or {}).get(ARGUMENT)
        if first is None:
            return None

        def allow(prompt: list[int], written: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(written) < len(first):
                allowed = torch.full_like(logits, -torch.inf)
                allowed[first[len(written)]] = logits[first[len(written)]]
                return allowed
            logits[self._suppressed] = -torch.inf
            marks = WhisperTimeStampLogitsProcessor(self._config, begin_index=len(prompt) + len(first))
            rows: torch.Tensor = marks(torch.tensor([[*prompt, *written]], device=logits.device), logits[None])
            return rows[0]

        return allow
