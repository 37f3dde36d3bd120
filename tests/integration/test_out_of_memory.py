"""A failed allocation in the middle of a call loses nothing: each allocation of each call, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_failed_allocation_loses_nothing() -> None:
    """In a process of its own: the interpreter may end where it finds no memory."""
    pytest.importorskip("_testcapi")
    from tests.integration.programs.out_of_memory import CALLS, LEFT_OUT

    command = [sys.executable, "-m", "tests.integration.programs.out_of_memory"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [line for line in lines if line.startswith("LOST")]
    tried = {line.partition(":")[0]: [int(number) for number in line.partition(":")[2].split(",")] for line in lines}
    assert list(tried) == [name for name in CALLS if name not in LEFT_OUT]
    assert sum(seen for _, seen, _ in tried.values()) > 400
