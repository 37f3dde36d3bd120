"""A load that asks nothing of a server: what a small caller's times are beside another load is compared with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from shmring.processes.process import Process

__all__ = ["neutral_load"]

_PROCESSES = 2


@contextlib.contextmanager
def neutral_load() -> Iterator[None]:
    """Has two processes compute, which take a core each if there are as many."""
    with contextlib.ExitStack() as computing:
        for _ in range(_PROCESSES):
            computing.enter_context(Process.start([sys.executable, "-c", "while True: pass"]))
        yield
