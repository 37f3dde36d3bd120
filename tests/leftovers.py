"""Fails if a test run has left anything behind: memory in /dev/shm, a socket, a process of ours. Run by ``make test``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]

_GRACE_S = 10.0  # a server of forks ends when it sees that its parent has, and unloads torch, a moment later


def leftovers() -> list[str]:
    """Returns a line for each thing that should not be there."""
    lines = [f"memory: {path}" for path in Path("/dev/shm").glob(f"shmring-{os.getuid()}-*")]
    for process in psutil.process_iter(["pid", "exe", "cmdline", "cwd", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        is_ours = str(ROOT / ".venv") in command or (process.info["cwd"] or "").startswith(str(ROOT / "tests"))
        ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        if is_ours and process.info["pid"] not in ancestors and process.info["status"] != psutil.STATUS_ZOMBIE:
            lines.append(f"process {process.info['pid']}: {command}")
    return lines


if __name__ == "__main__":
    deadline = time.monotonic() + _GRACE_S
    while (lines := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    print("\n".join(["left behind:", *lines]) if lines else "nothing is left behind")
    sys.exit(bool(lines))
