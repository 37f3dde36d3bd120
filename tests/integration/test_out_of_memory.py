"""A failed allocation in the middle of a call loses nothing: each allocation of each call, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Without the calls in which a record is being read when memory is missing: it is read then, and not handled.
CALLS = (
    *(
        "slot_nowait",
        "slot",
        "tensor_in_slot",
        "leaving_slot",
        "submit_nowait",
        "submit_in_place",
        "submit",
        "request",
        "abort",
    ),
    *("reply_nowait", "reply", "done", "done_with_reply", "kept_payload", "broadcast_nowait", "gather", "leaving_message"),
)


@pytest.mark.slow
def test_a_failed_allocation_loses_nothing() -> None:
    """In a process of its own: the interpreter may end where it finds no memory."""
    pytest.importorskip("_testcapi")
    command = [sys.executable, "-m", "tests.integration.programs.out_of_memory", *CALLS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [line for line in lines if line.startswith("LOST")]
    assert [line.partition(":")[0] for line in lines] == list(CALLS)
