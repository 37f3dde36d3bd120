"""What the connector for encoder outputs reads of vLLM's configuration, made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def configuration() -> Any:
    """What is read of vLLM's, as it is by default."""
    media = SimpleNamespace(
        mm_processor_cache_gb=4.0,
        mm_processor_kwargs=None,
        media_io_kwargs={},
        video_pruning_rate=None,
        video_pruning_method="evs",
        mm_device_do_normalize=True,
        mm_encoder_attn_dtype=None,
        mm_encoder_fp8_scale_path=None,
    )
    model = SimpleNamespace(
        model="llava-hf/llava-1.5-7b-hf",
        model_weights="",
        revision=None,
        hf_config=SimpleNamespace(),
        hf_overrides={},
        dtype=torch.bfloat16,
        quantization=None,
        is_encoder_decoder=False,
        multimodal_config=media,
    )
    return SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=True), lora_config=None)
