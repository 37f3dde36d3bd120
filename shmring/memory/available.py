"""How much memory there is, as the kernel says it: in the machine, for this process's control groups, and in ``/dev/shm``.

A slab is reserved as a whole. If nothing limits its file, asking for more than there is does not fail: the kernel kills
processes to get the memory. So what can't be had is refused before anything is reserved, with all that is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "CGROUPS",
    "MEMBERSHIP",
    "MEMINFO",
    "SHM_DIRECTORY",
    "groups",
    "lack_of_memory",
    "limits",
    "size_of",
    "sizes_of",
    "text_of",
]

SHM_DIRECTORY = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def text_of(path: Path) -> str | None:
    """Returns a file's text, or None if the kernel has no such file or does not show it."""
    try:
        return path.read_text()
    except OSError:
        return None


def size_of(nbytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def sizes_of(meminfo: str) -> dict[str, int]:
    """Returns the sizes in the text of ``/proc/meminfo``, in bytes."""
    return {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}


def limits(membership: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the memory limits of our group and of all above it, each with its file.

    Args:
        membership: the text of ``/proc/self/cgroup``.
        root: where the control groups are mounted.
    """
    for version, group in groups(membership, root):
        file = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        text = text_of(file)
        # "max" is no limit; version 1 says the largest multiple of a page instead.
        if text is not None and text.strip().isdigit() and int(text) < 1 << 62:
            yield int(text), file


def groups(membership: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the version and the directory of our group and of all above it: version 2 has one tree, 1 one per controller."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, top = (1, root / "memory") if controllers else (2, root)
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            if place == top.parent:
                break
            yield version, place


def lack_of_memory(nbytes: int, slabs: str = "a slab", option: str = "slab_nbytes") -> str:
    """Says what memory there is, and what to do, if a slab can't be had. Empty: nothing is known that speaks against it.

    Args:
        nbytes: of the slab, or of all slabs.
        slabs: what to call it.
        option: how its size is set.
    """
    sizes = sizes_of(text_of(MEMINFO) or "")
    limited = min(limits(text_of(MEMBERSHIP) or "", CGROUPS), default=None)
    lacks = limited is not None and limited[0] < nbytes
    known, advice = [], f"lower {option}"
    if (available := sizes.get("MemAvailable")) is not None:
        swap = sizes.get("SwapFree", 0)
        lacks |= available + swap < nbytes
        known.append(f"{size_of(available)} of the machine's {size_of(sizes.get('MemTotal', 0))} are available")
        if swap:
            known.append(f"{size_of(swap)} of swap are free")
    if limited is not None:
        known.append(f"{limited[1]} allows this container {size_of(limited[0])}")
        advice += ", or raise the container's memory limit (docker run --memory=, resources.limits.memory)"
    if not lacks:
        return ""
    try:
        shm = os.statvfs(SHM_DIRECTORY)
    except OSError:
        known.append(f"there is no {SHM_DIRECTORY}")
    else:
        known.append(
            f"{SHM_DIRECTORY} has {size_of(shm.f_bavail * shm.f_frsize)} of {size_of(shm.f_blocks * shm.f_frsize)} free"
        )
    return f"{slabs} of {size_of(nbytes)} can't be had: {', '.join(known)}; {advice}"
