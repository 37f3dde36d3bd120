"""The GPU that is measured: what it is, and the few calls by which it is measured.

The calls are a protocol, so that all of the measuring can be run, and its bookkeeping tested, where no GPU is.

Invariant: nothing here makes a CUDA context before a :class:`TorchGpu` is made; :func:`missing` only asks whether one could be.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

import shmring
from shmring.memory.cuda import TorchCuda

__all__ = ["Accelerator", "Gpu", "TorchGpu", "missing"]

# torch annotates some of these and not others, and not the same in every version.
_cuda: Any = torch.cuda

_UNKNOWN = "unknown"
_SMI_TIMEOUT_S = 20.0  # it loads the driver where nothing else keeps it loaded
_MODULE = Path("/proc/driver/nvidia/version")
_MODULE_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")


class Accelerator(msgspec.Struct, frozen=True):
    """What a result depends on beside the machine.

    Attributes:
        name: of the GPU.
        memory_nbytes: of its own.
        driver: version.
        cuda: version that torch was built for.
        torch: version.
        link: to the host, as far as the driver says.
    """

    name: str
    memory_nbytes: int
    driver: str
    cuda: str
    torch: str
    link: str = _UNKNOWN


class Gpu(Protocol):
    """What measuring asks of a GPU; all of it on the calling thread's current stream.

    Attributes:
        device: where tensors go.
    """

    device: torch.device

    def describe(self) -> Accelerator:
        """Says what it is."""

    def serve(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Ring]:
        """Opens a ring whose claims go to this GPU; as :func:`shmring.serve`."""

    def connect(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.RingClient]:
        """Attaches to a ring, with slots on this GPU if it has a device slab; as :func:`shmring.connect`."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Returns host memory that CUDA has allocated for copies: ``uint8 (nbytes,)``."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor in such memory."""

    def finish(self) -> None:
        """Waits until what is queued is over. Spins, so that being woken is no part of what is measured."""

    def watch(self) -> Callable[[], bool]:
        """Returns what says, without waiting, whether all that is queued by now is over."""


class TorchGpu:
    """A GPU by way of torch: the first that this process sees. Making one makes a context on it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)  # every thread's own, as long as none chooses another
        torch.zeros(1, device=self.device)

    def describe(self) -> Accelerator:
        properties = _cuda.get_device_properties(self.device)
        driver, link = _driver(str(getattr(properties, "uuid", "")))
        return Accelerator(
            name=str(properties.name),
            memory_nbytes=int(properties.total_memory),
            driver=driver,
            cuda=str(torch.version.cuda),
            torch=str(torch.__version__),
            link=link,
        )

    def serve(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Ring]:
        return shmring.serve(name, **options)

    def connect(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.RingClient]:
        return shmring.connect(name, **options)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def finish(self) -> None:
        self._recorded().synchronize()

    def watch(self) -> Callable[[], bool]:
        event = self._recorded()
        return lambda: bool(event.query())

    def _recorded(self) -> Any:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        return event


def missing() -> str | None:
    """Returns why no GPU can be measured here, and what to do about it; None if one can."""
    reason = TorchCuda().unavailable()
    if reason is None:
        return None
    needed = "it needs an NVIDIA GPU, its driver, and a torch built for CUDA"
    return f"no GPU can be measured here: {reason} (torch {torch.__version__}); {needed}"


def _driver(uuid: str) -> tuple[str, str]:
    """The driver's version and the link to a GPU, in words; each "unknown" where nobody says."""
    chosen = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    command = [
        "nvidia-smi",
        *chosen,
        "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        version, generation, width = (field.strip() for field in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # not installed, or it says something else
        return _module_version(), _UNKNOWN
    return version, f"PCIe {generation} x{width}"


def _module_version() -> str:
    """The version of the kernel's module."""
    try:
        version_text = _MODULE_VERSION.search(_MODULE.read_text())
    except OSError:
        return _UNKNOWN
    return _UNKNOWN if version_text is None else version_text.group()
