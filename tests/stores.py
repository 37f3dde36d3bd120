"""Stores that somebody has started: they are nobody's children."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shmring.processes.process import Process


def store_pids(socket_dir: Path) -> list[int]:
    """Of the stores of a directory, and of the processes that start one."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read().split(b"\0")
            if b"shmring.engine.store" in words and os.fsencode(socket_dir) in words:
                found.append(int(pid))
    return found


def end_stores(socket_dir: Path) -> None:
    """Kills them. Nobody may start another one."""
    for pid in store_pids(socket_dir):
        with contextlib.suppress(ProcessLookupError), Process(pid) as process:
            process.kill()
