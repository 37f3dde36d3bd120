"""malloc gives memory back: in a process of its own, because it is set up once for each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
from shmring.frontend.processes.malloc import make_malloc_return_memory

def resident_nbytes():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * 4096

if sys.argv[1] == "set up":
    assert make_malloc_return_memory()
large, small = 400 << 10, 2000
filled = [b"x" * small for _ in range(2048)]  # the holes that the start of Python has left, or small ones would be put there
bytes(8 << 20)  # glibc raises its threshold when such a block is freed
before = resident_nbytes()
blocks, pins = [], []
for index in range(256):
    blocks.append(b"x" * large)
    pins.append(b"x" * small)  # stays above each of them
del blocks
print(resident_nbytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_large_blocks_are_returned_though_small_ones_lie_between() -> None:
    def kept_nbytes(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True))

    assert kept_nbytes("leave") > 20 << 20  # or there is nothing to show
    assert kept_nbytes("set up") < 5 << 20
