"""The tensors of vLLM's requests: which there are, and what their bytes sum up to."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["checksum", "large_tensors"]


def large_tensors(request: Any, least_nbytes: int) -> list[torch.Tensor]:
    """Returns the tensors of an ``EngineCoreRequest`` that are dense, lie in host memory and take so many bytes or more.

    They are the processed media (``mm_features``) and ``prompt_embeds``; everything else in a request is small.
    """
    found: dict[int, torch.Tensor] = {}
    for feature in request.mm_features or ():
        if feature.data is not None:  # else the engine core has it in its cache
            for element in feature.data.values():
                found.update((id(tensor), tensor) for tensor in _tensors_in(element.data))
    if request.prompt_embeds is not None:
        found[id(request.prompt_embeds)] = request.prompt_embeds
    dense = [tensor for tensor in found.values() if tensor.is_cpu and tensor.layout is torch.strided]
    return [tensor for tensor in dense if tensor.nbytes >= least_nbytes]


def _tensors_in(data: object) -> Iterator[torch.Tensor]:
    """vLLM's ``NestedTensors``: a tensor, a number, or a sequence of such."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for part in data:
            yield from _tensors_in(part)


def checksum(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
