"""What the kernel says of a process: its memory, apart by kind, and its descriptors.

Private is what is anonymous: heaps, stacks, what Python and torch allocate. Everything else that is resident is shared: the
slab, of which each process maps all, and files. The kernel's own "private" would not do: a page of the slab that only one
process happens to have mapped at the moment counts as private to it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

#: Opened once, when the libraries under a loop first have use for it.
_OPENED_ONCE = ("anon_inode:[io_uring]", "/dev/null")


class Footprint(msgspec.Struct, frozen=True):
    """What a process takes: resident bytes, private and shared apart, and open descriptors."""

    private_nbytes: int
    shared_nbytes: int
    descriptors: int


def footprint(pid: int) -> Footprint:
    """Returns what a process takes now.

    Raises:
        FileNotFoundError: there is none of this pid.
    """
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) << 10
    return Footprint(sizes["Anonymous"], sizes["Rss"] - sizes["Anonymous"], descriptors(pid))


def descriptors(pid: int) -> int:
    """Returns how many descriptors a process has open, but for those that the libraries under it open once, at some time."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += os.readlink(entry) not in _OPENED_ONCE
    return count
