"""The GPU that is measured: what it is, the few calls by which it is measured, and how a tensor on it is checked.

Invariant: nothing here makes a CUDA context before a :class:`Gpu` is made; :func:`missing` only asks whether one could be.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeAlias

import torch

import shmring
from bench.children import described
from bench.stamps import CheckError
from shmring.gpu.cuda import TorchCuda

# torch annotates some of these and not others, and not the same in every version.
_cuda: Any = torch.cuda

_SLAB_SPARE_NBYTES = 16 << 20  # beside what is leased: a header, and replies, of which there are none
_UNKNOWN = "unknown"
_SMI_TIMEOUT_S = 20.0  # it loads the driver where nothing else keeps it loaded

DTYPE = torch.int32
ITEM_NBYTES = DTYPE.itemsize
_PLACES = 64
MIN_NBYTES = _PLACES * ITEM_NBYTES

#: What is measured, each for the time of a ``with``, by name.
Openers: TypeAlias = Mapping[str, Callable[[], AbstractAsyncContextManager[Any]]]
#: What was measured: numbers, by what they are.
Numbers: TypeAlias = dict[str, list[float]]


class Gpu:
    """The first GPU that this process sees, by way of torch; all on the calling thread's current stream. Makes a context on it.

    All measuring is done by these calls, so that a test can put host memory in its place.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)  # every thread's own, as long as none chooses another
        torch.zeros(1, device=self.device)

    def describe(self) -> str:
        """Returns in a sentence what it is, and the versions that a result depends on; of CUDA that which torch has."""
        properties = _cuda.get_device_properties(self.device)
        driver, link = _driver(str(getattr(properties, "uuid", "")))
        memory = f"{properties.total_memory / 2**30:.0f} GiB, {link} to the host"
        return f"{properties.name}, {memory}; driver {driver}, torch {torch.__version__} for CUDA {torch.version.cuda}."

    def serve(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Ring]:
        """Opens a ring whose claims go to this GPU."""
        return shmring.serve(name, **options)

    def connect(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Client]:
        """Attaches to a ring, with slots on this GPU if it has a device slab."""
        return shmring.connect(name, **options)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Returns host memory that CUDA has allocated for copies: ``uint8 (nbytes,)``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def finish(self) -> None:
        """Waits until what is queued is over. Spins, so that being woken is no part of what is measured."""
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        event.synchronize()


async def enter_all(stack: AsyncExitStack, openers: Openers) -> tuple[dict[str, Any], dict[str, str]]:
    """Opens things until the stack is left; returns those that could be, and why others could not, by name.

    Each is opened once: pinning half a gigabyte takes longer than copying it.
    """
    opened: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, opener in openers.items():
        try:
            opened[name] = await stack.enter_async_context(opener())
        except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
            absent[name] = described(error)
    return opened, absent


def missing() -> str | None:
    """Returns why no GPU can be measured here, and what to do about it; None if one can."""
    reason = TorchCuda().unavailable()
    if reason is None:
        return None
    needed = "it needs an NVIDIA GPU, its driver, and a torch built for CUDA"
    return f"no GPU can be measured here: {reason} (torch {torch.__version__}); {needed}"


def _driver(uuid: str) -> tuple[str, str]:
    """The driver's version and the link to a GPU, in words; each "unknown" where nvidia-smi does not say."""
    chosen = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    query = "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", *chosen, query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        version, generation, width = (field.strip() for field in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # not installed, or it says something else
        return _UNKNOWN, _UNKNOWN
    return version, f"PCIe {generation} x{width}"


def pinned_slab(leased_nbytes: int) -> dict[str, Any]:
    """Returns the options of a ring whose slab is pinned, and may be leased to one frontend in so large a part."""
    slab_nbytes = leased_nbytes * 9 // 8 + _SLAB_SPARE_NBYTES  # a sixteenth is for replies
    return {"slab_nbytes": slab_nbytes, "max_lease_nbytes": leased_nbytes, "staging_nbytes": leased_nbytes, "pin": "on"}


# -- what tensors are checked by -----------------------------------------------------------------------------------------


def marks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns places all over a tensor that hold the number of its message, as a view ``int32 (64,)``.

    They are as many whatever the size, so that checking 256 MB takes no longer than checking 64 KB. The tensor is in one piece,
    and has at least :data:`MIN_NBYTES`.
    """
    stride = (tensor.numel() - 1) // (_PLACES - 1)
    return tensor[(tensor.numel() - 1) - (_PLACES - 1) * stride :: stride]


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's marks: on a GPU, one small kernel that reads the data."""
    return marks(tensor).clone()


def check(samples: Sequence[int], number: int) -> None:
    """Compares what :func:`sample` found with the number of the message; raises CheckError if it is not what was written."""
    wrong = [value for value in samples if value != number]
    if wrong or len(samples) != _PLACES:
        raise CheckError(f"message {number} holds {wrong[:1]} in {len(wrong)} of {len(samples)} places: it is corrupted")
