"""The tensors of vLLM's requests: which there are, and what their bytes sum up to."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from shmring.integrations.vllm.on_gpu import gpu_of

__all__ = ["checksum", "large_tensors", "tensors_in"]


_EMBEDS = "prompt_embeds"  # as a modality: an encoder's output, which vLLM keeps where it is


def large_tensors(request: Any, least_nbytes: int, *, on_gpus: bool = False) -> list[torch.Tensor]:
    """Returns the tensors of an ``EngineCoreRequest`` that are dense, lie in host memory and take so many bytes or more.

    They are the processed media (``mm_features``) and ``prompt_embeds``; everything else in a request is small.

    Args:
        on_gpus: whether to return processed media on a GPU, too. What is an embedding already, vLLM reads otherwise.
    """
    found: dict[int, torch.Tensor] = {}
    for feature in request.mm_features or ():
        if feature.data is not None:  # else the engine core has it in its cache
            is_wanted_on_gpus = on_gpus and getattr(feature, "modality", None) != _EMBEDS
            for element in feature.data.values():
                for tensor in tensors_in(element.data):
                    if _is_on_host(tensor) or (is_wanted_on_gpus and gpu_of(tensor) is not None):
                        found[id(tensor)] = tensor
    if request.prompt_embeds is not None and _is_on_host(request.prompt_embeds):
        found[id(request.prompt_embeds)] = request.prompt_embeds
    return [tensor for tensor in found.values() if tensor.layout is torch.strided and tensor.nbytes >= least_nbytes]


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and gpu_of(tensor) is None


def tensors_in(data: object) -> Iterator[torch.Tensor]:
    """vLLM's ``NestedTensors``: a tensor, a number, or a sequence of such."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for part in data:
            yield from tensors_in(part)


def checksum(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
