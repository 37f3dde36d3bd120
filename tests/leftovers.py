"""Fails if a test run has left anything behind: memory in /dev/shm whose owner is dead, or a process. Run by ``make test``.

Which processes belong to a run is known by a variable that ``make`` sets, and that all processes of a run inherit. So other
runs, and whatever else happens in the same directory, are not blamed. Memory does not say whose it was: that of another run of
this user would be blamed on this one, if an engine there is killed in the moment in which its memory has a name.
"""

from __future__ import annotations

import os
import sys
import time

import psutil

from shmring.memory.slab import sweep

RUN = "TEST_RUN_OF_SHMRING"  # the variable

_GRACE_S = 60.0  # a server of forks ends when it sees that its parent has, and unloads torch, a moment later


def processes_of(run: str) -> list[str]:
    """Returns a line for each process of a run, apart from this one and those that have started it."""
    ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    lines = []
    for process in psutil.process_iter():
        try:
            if process.pid in ancestors or process.environ().get(RUN) != run or process.status() == psutil.STATUS_ZOMBIE:
                continue
            lines.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended, or is another user's
    return lines


def main() -> None:
    run = os.environ.get(RUN)
    if not run:
        sys.exit(f"{RUN} is not set: what has been left by whom? `make` sets it")
    deadline = time.monotonic() + _GRACE_S
    while (lines := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines += [f"memory: {name}" for name in sweep()]
    print("\n".join(["left behind:", *lines]) if lines else "nothing is left behind")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
