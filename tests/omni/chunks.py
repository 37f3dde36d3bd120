"""What stages pass on in these tests."""

from __future__ import annotations

from typing import Any

import torch

HANGS_S = 120.0  # only what hangs takes so long
MB = 1 << 20


def chunk(number: int, nbytes: int = MB) -> dict[str, Any]:
    """A chunk with a number that ``number_of`` finds again: less than 256."""
    return {"hidden": torch.full((nbytes // 2,), number, dtype=torch.bfloat16), "meta": {"finished": torch.tensor(False)}}


def number_of(data: dict[str, Any]) -> int:
    """The number of a chunk, read from its end."""
    return int(data["hidden"][-1])


def next_stage_input(request: Any, is_finished: bool, **_: Any) -> Any:
    """What vLLM-Omni asks a model for: makes a stage's payload of a request."""
    from vllm_omni.data_entry_keys import OmniPayloadStruct

    return OmniPayloadStruct(hidden=request.hidden)
