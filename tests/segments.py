"""What engines of tests leave in /dev/shm, told apart from what others have there: tests run beside each other."""

from __future__ import annotations

import os

from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY


def own_name(name: str) -> str:
    """Returns a name for the engines of a test file that those of no other process have."""
    return f"{name}-{os.getpid()}"


def segments_of(name: str) -> list[str]:
    """Returns the files of the engines of this name in /dev/shm."""
    return [path.name for path in SHM_DIRECTORY.glob(f"{NAME_PREFIX}-{os.getuid()}-{name}-*")]
