"""Whether there is memory for the slabs, and whether the kernel killed a process for lack of it; for the doctor and a server's
start.

Nothing here imports torch: the supervisor asks before it starts anything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

__all__ = [
    "CGROUP_CHECK",
    "Check",
    "Status",
    "check_cgroup",
    "check_memory",
    "describe_kill",
    "memory_checks",
    "oom_kills",
    "size_of",
    "text_of",
]

Status = Literal["ok", "warning", "problem"]

#: The name of the check whether the kernel would kill a process because of the slabs.
CGROUP_CHECK = "cgroup memory"

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")

_PRIVATE_NBYTES = 1 << 30  # what the processes take beside the slab: some 250 MB each for an engine and three frontends


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A row of the report.

    Attributes:
        name: what was looked at.
        status: ``"ok"``, ``"warning"`` or ``"problem"``.
        finding: what the check found.
        advice: what to do; empty if there is nothing to do.
    """

    name: str
    status: Status
    finding: str
    advice: str = ""


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


def memory_checks(slabs_nbytes: int) -> list[Check]:
    """Compares this machine's memory, and this container's limit, with the slabs."""
    return [
        check_memory(text_of(Path("/proc/meminfo")) or "", slabs_nbytes),
        check_cgroup(MEMBERSHIP, CGROUPS, slabs_nbytes),
    ]


def check_memory(meminfo: str, slabs_nbytes: int) -> Check:
    """Compares the machine's memory with the slabs; ``meminfo`` is the text of ``/proc/meminfo``."""
    sizes_kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE))
    if "MemAvailable" not in sizes_kib:
        return Check("memory", "warning", "/proc/meminfo does not say what is available", "mount /proc")
    available, total = int(sizes_kib["MemAvailable"]) << 10, int(sizes_kib.get("MemTotal", 0)) << 10
    text = f"{size_of(available)} of {size_of(total)} are available"
    return Check("memory", *_compare(text, available, slabs_nbytes, "lower --slab-nbytes, or take a machine with more"))


def _compare(finding: str, available_nbytes: int, slabs_nbytes: int, advice: str) -> tuple[Status, str, str]:
    """Returns status, finding and advice about memory that must hold the slabs and the processes."""
    if available_nbytes < slabs_nbytes:
        return "problem", f"{finding}; slabs take {size_of(slabs_nbytes)}", advice
    if available_nbytes < slabs_nbytes + _PRIVATE_NBYTES:
        more = f"beside slabs of {size_of(slabs_nbytes)}, {size_of(available_nbytes - slabs_nbytes)} are left for the processes"
        return "warning", f"{finding}; {more}", advice
    return "ok", finding, ""


def check_cgroup(membership: Path, root: Path, slabs_nbytes: int) -> Check:
    """Compares a container's memory limit with the slabs. The process that touches it first is charged for it: the engine.

    Args:
        membership: ``/proc/self/cgroup``.
        root: where the control groups are mounted.
        slabs_nbytes: size of all slabs.
    """
    limits = list(_cgroup_limits(text_of(membership) or "", root))
    if not limits:
        return Check(CGROUP_CHECK, "ok", "not limited")
    limit, file = min(limits)
    advice = "raise the container's memory limit (docker run --memory=, resources.limits.memory), or lower --slab-nbytes"
    return Check(CGROUP_CHECK, *_compare(f"limited to {size_of(limit)} by {file}", limit, slabs_nbytes, advice))


def _cgroup_limits(membership: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the limits of our group and of all above it, each with its file."""
    for version, group in _groups(membership, root):
        file = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        text = text_of(file)
        # "max" is no limit; version 1 says the largest multiple of a page instead.
        if text is not None and text.strip().isdigit() and int(text) < 1 << 62:
            yield int(text), file


def _groups(membership: str, root: Path) -> Iterator[tuple[int, Path]]:
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


# -- processes that the kernel killed -----------------------------------------------------------------------------------


def oom_kills(membership: Path = MEMBERSHIP, root: Path = CGROUPS, vmstat: Path = Path("/proc/vmstat")) -> int:
    """Returns how many processes the kernel has killed for lack of memory: of our group, or else of the machine."""
    for version, group in _groups(text_of(membership) or "", root):
        kills = _kills_in(group / ("memory.events" if version == 2 else "memory.oom_control"))
        if kills is not None:
            return kills
    return _kills_in(vmstat) or 0


def _kills_in(file: Path) -> int | None:
    counted = re.search(r"^oom_kill (\d+)$", text_of(file) or "", re.MULTILINE)
    return int(counted[1]) if counted else None


def describe_kill(kills_before: int, membership: Path = MEMBERSHIP, root: Path = CGROUPS) -> str:
    """Says why a process was killed by a SIGKILL that this server did not send.

    Args:
        kills_before: what :func:`oom_kills` was before that.
        membership: ``/proc/self/cgroup``.
        root: where the control groups are mounted.
    """
    if oom_kills(membership, root) <= kills_before:
        return "nobody here did that: somebody else has, or the kernel for lack of memory (dmesg says so)"
    limits = list(_cgroup_limits(text_of(membership) or "", root))
    if not limits:
        return "the kernel did that, because the machine had no more memory; lower --slab-nbytes, or take a machine with more"
    limit, file = min(limits)
    return (
        f"the kernel did that for lack of memory, of which {file} allows {size_of(limit)}; raise that, or lower --slab-nbytes"
    )
