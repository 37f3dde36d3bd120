"""How much memory there is for what a peer needs in a cell: it is said beforehand, lest a SIGBUS or the kernel end the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["available_nbytes", "meminfo_nbytes", "memory_shortage", "shared_memory_shortage"]


def meminfo_nbytes(field: str) -> int:
    """Returns a size that the kernel tells in ``/proc/meminfo``, such as ``MemTotal``."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[field].split()[0]) << 10


def available_nbytes() -> int:
    """Returns how much memory processes can take."""
    return meminfo_nbytes("MemAvailable")


def memory_shortage(nbytes: int) -> str | None:
    """Returns that so much memory for what is in flight is not there, if it is not."""
    available = available_nbytes()
    if nbytes <= available:
        return None
    return f"{nbytes / 2**30:.1f} GiB would be in flight, and {available / 2**30:.1f} GiB of memory are available"


def shared_memory_shortage(nbytes: int, whose: str) -> str | None:
    """Returns that so much shared memory is not there, if it is not: in the mount, or in the machine.

    Args:
        nbytes: needed.
        whose: what takes it, in the plural.
    """
    available = min(shutil.disk_usage(SHM_DIRECTORY).free, available_nbytes())
    if nbytes <= available:
        return None
    return f"{whose} take {nbytes / 2**30:.1f} GiB of shared memory, {available / 2**30:.1f} GiB are available"
