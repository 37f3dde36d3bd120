"""Tensors that an API server has on a GPU: through an engine core's device slab, or vLLM's own way, and why.

Theory of operation: where media are processed on a GPU, a tensor is there before it is sent. It is copied on that GPU into a
slot of the engine core's device slab, by work that is queued on this thread's current stream; no thread waits for it. The
submission carries an event behind the copy, and the engine core's stream waits for it. What finds no device slab, or no place
in it, goes vLLM's own way: by CUDA IPC with ``--mm-tensor-ipc torch_shm``, else through host memory.

The engine core says in its report whether it has a device slab. It is mapped with the first tensor that is on a GPU, so an API
server without such tensors needs no context of CUDA for it.

Tested with a driver that is made up. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shmring.core.loggers import logger_of
from shmring.errors import SlabError

__all__ = ["NotOnThisGpuError", "OnGpu", "gpu_of", "place_in"]

logger = logger_of("vllm.shmring")


class NotOnThisGpuError(Exception):
    """A tensor on a GPU goes vLLM's own way: there is no device slab for it."""


def gpu_of(tensor: torch.Tensor) -> torch.device | None:
    """Returns the GPU that a tensor is on; None: it is on none."""
    return tensor.device if tensor.is_cuda else None


def place_in(slot: Any, tensor: torch.Tensor, gpu: torch.device) -> torch.Tensor:
    """Queues a tensor's copy into a slot of a device slab; returns where it will be.

    Args:
        slot: of :class:`shmring.Slot` or its twin for threads.
        tensor: which. It may be dropped at once.
        gpu: that both are on.
    """
    placed: torch.Tensor = slot.tensor(tuple(tensor.shape), tensor.dtype)
    placed.copy_(tensor, non_blocking=True)
    _keep_for_what_is_queued(tensor, gpu)
    return placed


def _keep_for_what_is_queued(tensor: torch.Tensor, gpu: torch.device) -> None:
    """Has a tensor's memory, when it is freed, wait for what this thread has queued, whatever stream it was made on."""
    tensor.record_stream(torch.cuda.current_stream(gpu))


class OnGpu:
    """Whether tensors on a GPU go through the device slab of one engine core.

    Args:
        name: of its ring.
        report: what that engine core's end says of itself.

    Attributes:
        reason: why they do not; empty: they do.
    """

    def __init__(self, name: str, report: Mapping[str, Any]) -> None:
        self.reason: str = report["no_device_slab"]
        self._name = name
        self._nbytes: int = report["device_slab_nbytes"]
        self._others: set[str] = set()

    def __str__(self) -> str:
        if self.reason:
            return f"tensors on a GPU go vLLM's own way, since {self.reason}"
        return f"tensors on a GPU go through a device slab of {self._nbytes >> 20} MiB"

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Around the way of one tensor into the device slab.

        Raises:
            NotOnThisGpuError: there is none for it. The log says so, once.
        """
        if self.reason:
            raise NotOnThisGpuError
        try:
            yield
        except SlabError as error:  # CUDA has failed, or this process does not see that GPU: the next tensor fares no better
            self.reason = str(error)
            logger.warning("shmring: from now on, %s (%s)", str(self), self._name)
            raise NotOnThisGpuError from None
        except ValueError as error:  # the tensor is on another GPU
            text = str(error)  # a log handler that keeps the error would keep its frames
            if text not in self._others:
                self._others.add(text)
                logger.warning("shmring: some tensors on a GPU go vLLM's own way: %s (%s)", text, self._name)
            raise NotOnThisGpuError from None
