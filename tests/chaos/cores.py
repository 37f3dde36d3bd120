"""How long processes have waited for a core: what a crowded machine adds to a latency, and no transport can take away.

Linux counts, for each thread, the time in which it could have run and did not (``/proc/<pid>/schedstat``). The event loops
of a run are their processes' main threads, which that file is about.
"""

from __future__ import annotations

from pathlib import Path


def waited_ns(pid: int) -> int:
    """Returns for how long the main thread of a process has waited for a core in its life; 0 if it cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0  # it has gone, or the kernel does not count
