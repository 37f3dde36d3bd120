"""The machine a result comes from: what it is, and how fast it copies."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch

import shmring

__all__ = ["Machine", "copies_per_s"]

_GIT_TIMEOUT_S = 5.0


class Machine(msgspec.Struct, frozen=True):
    """What a result depends on, beside what was measured."""

    cpu: str
    cores: int
    memory_nbytes: int
    kernel: str
    python: str
    torch: str
    numpy: str
    msgspec: str
    uvloop: str
    shmring: str
    commit: str | None

    @classmethod
    def here(cls) -> Machine:
        """Describes this machine, the versions in use, and the commit if this is a checkout."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            python=platform.python_version(),
            torch=str(torch.__version__),
            numpy=np.__version__,
            msgspec=msgspec.__version__,
            uvloop=version("uvloop"),
            shmring=shmring.__version__,
            commit=_commit(),
        )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM has no model names there


def _commit() -> str | None:
    """The checkout's commit, marked if files differ from it; None where there is no checkout or no git."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None  # installed; a repository further up would be somebody else's
    command = ["git", "-C", os.fspath(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def copies_per_s(nbytes: int, seconds: float) -> float:
    """Returns how often a second this machine copies so many bytes into a warm buffer: what no copying transport exceeds.

    Args:
        nbytes: size of both buffers; each is 64-byte aligned, touched before, and the same all the time.
        seconds: how long to measure.
    """
    source, target = (_aligned(nbytes) for _ in range(2))
    source_address, target_address = int(source.ctypes.data), int(target.ctypes.data)
    copies = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not copies:
        ctypes.memmove(target_address, source_address, nbytes)
        copies += 1
    return copies / elapsed


def _aligned(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    buffer = np.ones(nbytes + 64, np.uint8)
    skip = -int(buffer.ctypes.data) % 64
    return buffer[skip : skip + nbytes]
