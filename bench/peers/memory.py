"""How much memory there is for what a peer needs in a cell: it is said beforehand, lest a SIGBUS or the kernel end the run."""

from __future__ import annotations

import shutil

import psutil

from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["memory_shortage", "shared_memory_shortage"]


def memory_shortage(nbytes: int) -> str | None:
    """Returns that so much memory for what is in flight is not there, if it is not."""
    available = psutil.virtual_memory().available
    if nbytes <= available:
        return None
    return f"{nbytes / 2**30:.1f} GiB would be in flight, and {available / 2**30:.1f} GiB of memory are available"


def shared_memory_shortage(nbytes: int, whose: str) -> str | None:
    """Returns that so much shared memory is not there for something, in the plural: in the mount, or in the machine."""
    available = min(shutil.disk_usage(SHM_DIRECTORY).free, psutil.virtual_memory().available)
    if nbytes <= available:
        return None
    return f"{whose} take {nbytes / 2**30:.1f} GiB of shared memory, {available / 2**30:.1f} GiB are available"
