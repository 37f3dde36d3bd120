"""Becomes another program that is told to end (SIGTERM) when the process that started it has ended, however that ended.

``python leash.py PARENT_PID PROGRAM ARGUMENT...``. The kernel keeps the setting across ``execv``. So a load generator that is
killed leaves no server behind; and a server needs no option for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Becomes the command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
