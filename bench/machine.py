"""The machine a result comes from: what it is, how fast it copies and reads, and what importing torch takes.

What a copying transport can reach at most is one ``memcpy`` into shared memory that has been touched before. How fast that
is depends on whether the target is in a cache: a slot that was just used is, the next one of many is not. Both are measured,
with glibc's memcpy, into a mapping of the kind that a slab is; and how fast a consumer could read what is in no cache.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
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
_ABSENT = 0xA5  # a byte that the source has none of


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
    libc: str = ""
    cache_nbytes: int = 0

    @classmethod
    def here(cls) -> Machine:
        """Describes this machine, the versions in use, and the commit if this is a checkout."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            python=platform.python_version(),
            commit=git(ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
            libc=" ".join(platform.libc_ver()),
            cache_nbytes=last_level_cache_nbytes(),
            **{name: version(name) for name in ("torch", "numpy", "msgspec", "uvloop", "shmring")},
        )


def _cpu() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()  # ARM has no model names there


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


class CopyLimits:
    """Times copies and reads of one size. Use it with ``with``: it holds up to four last-level caches of memory.

    Args:
        nbytes: size of a copy; both ends are 64-byte aligned and touched before.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._source = np.full(nbytes + _ALIGNMENT, 0, np.uint8)  # which touches it, as np.zeros does not
        self._source_address = int(self._source.ctypes.data)
        self._source_address += -self._source_address % _ALIGNMENT
        self._stride = nbytes + -nbytes % _ALIGNMENT
        self._places = max(1, -(-_CACHES_ROTATED * last_level_cache_nbytes() // self._stride))
        self._region = mmap.mmap(-1, self._places * self._stride)  # shared and anonymous: tmpfs, as a slab is
        touched = np.frombuffer(self._region, np.uint8)
        touched[:] = 0
        self._region_address = int(touched.ctypes.data)
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

    def measure(self, seconds: float) -> tuple[float, float, float]:
        """Returns how often a second so many bytes are copied to another place each time, through more than the cache; to the
        same place; and read at another place each time, by ``memchr``, in vain.

        Args:
            seconds: for each of the three.
        """
        cold = self._per_s(lambda turn: self._copy(turn % self._places), seconds)
        hot = self._per_s(lambda turn: self._copy(0), seconds)
        return cold, hot, self._per_s(self._read, seconds)

    def __enter__(self) -> CopyLimits:
        return self

    def __exit__(self, *exception: object) -> None:
        self._region.close()

    def _copy(self, place: int) -> None:
        ctypes.memmove(self._region_address + place * self._stride, self._source_address, self._nbytes)

    def _read(self, turn: int) -> None:
        self._memchr(self._region_address + turn % self._places * self._stride, _ABSENT, self._nbytes)

    def _per_s(self, once: Callable[[int], None], seconds: float) -> float:
        turn = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds or not turn:
            once(turn)
            turn += 1
        return turn / elapsed
