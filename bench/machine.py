"""The machine a result comes from: what it is, how fast it copies, and what importing torch takes.

What a transport that copies once can reach is about one ``memcpy`` into shared memory that has been touched before, and is in
no cache: glibc's, into a mapping of the kind that a slab is.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import mmap
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from shmring.memory.copying import last_level_cache_nbytes

ROOT = Path(__file__).resolve().parents[1]

_GIT_TIMEOUT_S = 60.0
_IMPORT_TIMEOUT_S = 120.0  # for torch, on a machine that does much else
_CACHES_ROTATED = 4  # the region that copies rotate through, in caches: little of it is left there on the next turn
_ALIGNMENT = 64  # of every payload in a slab; glibc's memcpy is up to 15 times slower at some other distances


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
    date: str = ""  # ISO, UTC
    libc: str = ""
    cache_nbytes: int = 0

    @property
    def software(self) -> str:
        """In words; of the kernel without its build."""
        return (
            f"Linux {self.kernel.partition('-')[0]}, {self.libc}, Python {self.python}, torch {self.torch}, "
            f"numpy {self.numpy}, msgspec {self.msgspec}, uvloop {self.uvloop}"
        )

    @classmethod
    def here(cls) -> Machine:
        """Describes this machine, the versions in use, and the commit if this is a checkout."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            python=platform.python_version(),
            commit=commit_of(ROOT),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            libc=" ".join(platform.libc_ver()),
            cache_nbytes=last_level_cache_nbytes(),
            **{name: version(name) for name in ("torch", "numpy", "msgspec", "uvloop", "shmring")},
        )


def _cpu() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()  # ARM has no model names there


def commit_of(root: Path) -> str | None:
    """Returns the commit of a checkout, with ``-dirty`` if what is measured has changes since; None: it is no checkout.

    Results, and the pages that are made from them, are not measured: the next command runs where the last one has stored them.
    """
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changes = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs")
    return commit + "-dirty" * (changes != "")


def git(root: Path, *arguments: str) -> str | None:
    """Returns what git says of a checkout; None if there is none, or no git, or it fails."""
    if not (root / ".git").exists():
        return None  # installed, or an sdist; a repository further up would be somebody else's
    command = ["git", "-C", os.fspath(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def torch_resident_nbytes() -> int:
    """Returns what a process that has only imported torch has resident, as :func:`bench.meter.resident_nbytes` counts it."""
    code = "import torch, bench.meter; print(bench.meter.resident_nbytes())"
    command = [sys.executable, "-P", "-c", code]  # nothing is imported from the working directory
    done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=True)
    return int(done.stdout)


class Copies:
    """Copies of one size, each to the next place in four last-level caches of memory; both ends are touched before."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._source = np.full(nbytes + _ALIGNMENT, 0, np.uint8)  # which touches it, as np.zeros does not
        stride = nbytes + -nbytes % _ALIGNMENT
        places = max(1, -(-_CACHES_ROTATED * last_level_cache_nbytes() // stride))
        self._region = np.frombuffer(mmap.mmap(-1, places * stride), np.uint8)  # shared and anonymous: tmpfs, as a slab is
        self._region[:] = 0
        first = int(self._region.ctypes.data)
        self._places = itertools.cycle(range(first, first + places * stride, stride))

    def measure(self, seconds: float) -> tuple[int, float]:
        """Copies for so long; returns how often, and the seconds that it took."""
        source = int(self._source.ctypes.data)
        source += -source % _ALIGNMENT
        started_s = time.perf_counter()
        copies, elapsed_s = 0, 0.0
        while elapsed_s < seconds:
            ctypes.memmove(next(self._places), source, self._nbytes)
            copies, elapsed_s = copies + 1, time.perf_counter() - started_s
        return copies, elapsed_s
