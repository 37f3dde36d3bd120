"""What an encoder's output is kept under: a hash of everything that makes its bytes what they are.

A store outlives the engines that use it, and serves several of them. vLLM's identifier of a medium says what the medium is, and
how one request wanted it prepared. It does not say which encoder has seen it, nor how that engine is configured. So a key is
made of both. What only says *where* media are prepared (a device) is left out: instances that encode may do so on a GPU, and
those that compute text not.

An identifier may be no hash of a medium but a number that vLLM counts up, the same in all instances. Kept under that, one
caller's picture would be another caller's answer. vLLM counts where it has neither a cache for processed media nor one for
prefixes; there, the connector refuses to start.

Of vLLM's configuration only attributes are read, and nothing of vLLM is imported here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from shmring.integrations.vllm.encoder_settings import EncoderSettings

__all__ = ["EncoderKeys", "check_configuration"]

_FORMAT = 1  # of what is kept: another one is another key
_COUNTER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")  # behind an adapter's name, or at the start
_WHERE = ("device", "backend")  # options that say where media are prepared, and not how


def check_configuration(vllm_config: Any, settings: EncoderSettings) -> None:
    """Checks that an output can be found by what vLLM calls its medium.

    Args:
        vllm_config: vLLM's configuration.
        settings: the connector's.

    Raises:
        ValueError: it can't; the text says what to do.
    """
    model = vllm_config.model_config
    media = model.multimodal_config
    if media is None:
        raise ValueError("ShmringECConnector keeps what encoders of media make, and this model takes no media")
    if model.is_encoder_decoder:
        raise ValueError("ShmringECConnector can't serve an encoder-decoder model: vLLM hands its connectors no such outputs")
    if media.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "ShmringECConnector can't tell one picture from another here: without a processor cache and without prefix "
            "caching, vLLM counts media (renderer0-mm-1-image-0, the same in each instance) instead of hashing them. Start "
            "this instance with --mm-processor-cache-gb above 0 (a small one is enough), or with --enable-prefix-caching"
        )
    if _adapters_change_encoders(vllm_config) and not settings.adapters:
        raise ValueError(
            "ShmringECConnector needs to know what the names of LoRA adapters mean, since they change encoders here "
            '(enable_tower_connector_lora): add "adapters" to ec_connector_extra_config, a text that is equal in all instances '
            "whose adapters of one name are the same, and another one when an adapter changes"
        )


class EncoderKeys:
    """Makes the keys of one engine.

    Args:
        vllm_config: vLLM's configuration, which was checked.
        settings: the connector's.
        version: of vLLM.
    """

    def __init__(self, vllm_config: Any, settings: EncoderSettings, version: str) -> None:
        text = json.dumps(_encoder(vllm_config, settings, version), sort_keys=True, default=_shown)
        self._salt = hashlib.sha256(text.encode()).digest()

    def of(self, identifier: str) -> bytes | None:
        """Returns the key of an output.

        Args:
            identifier: what vLLM calls its medium.

        Returns:
            32 bytes; None: the identifier is a number that vLLM has counted up, and stands for nothing elsewhere.
        """
        if _COUNTER.search(identifier):
            return None
        return hashlib.sha256(self._salt + identifier.encode()).digest()


def _encoder(vllm_config: Any, settings: EncoderSettings, version: str) -> dict[str, Any]:
    """What an encoder's output depends on beside the medium."""
    model = vllm_config.model_config
    media = model.multimodal_config
    # Weights that are streamed from elsewhere have a directory of each instance's own; and "main" of a hub is no revision.
    of_config = getattr(model.hf_config, "_commit_hash", None)
    named = [getattr(model, "model_weights", "") or model.model, of_config or model.revision]
    return {
        "format": _FORMAT,
        "vllm": version.partition("+")[0],  # a build for CPUs has the same code
        "model": settings.model or named,
        "overrides": getattr(model, "hf_overrides", None) or {},
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "adapters": settings.adapters if _adapters_change_encoders(vllm_config) else "",
        "processor": _how(getattr(media, "mm_processor_kwargs", None) or {}),
        "reading": _how(getattr(media, "media_io_kwargs", None) or {}),
        "options": {name: getattr(media, name, None) for name in _MEDIA_OPTIONS},
    }


_MEDIA_OPTIONS = (
    *("video_pruning_rate", "video_pruning_method", "mm_device_do_normalize"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
)


def _how(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without what says where media are prepared, and without what is empty then."""
    kept = {name: _how(value) if isinstance(value, Mapping) else value for name, value in options.items() if name not in _WHERE}
    return {name: value for name, value in kept.items() if value != {}}


def _adapters_change_encoders(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False))


def _shown(value: Any) -> str:
    """What is no JSON: a function by its name, as its address is another one in each process."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
