"""Whether there is memory for the slabs, and whether the kernel killed a process for lack of it; for the doctor and a server's
start.

Nothing here imports torch: the supervisor asks before it starts anything.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from shmring.memory.available import CGROUPS, MEMBERSHIP, MEMINFO, groups, limits, size_of, sizes_of, text_of

__all__ = [
    "Check",
    "Status",
    "check_cgroup",
    "check_memory",
    "describe_kill",
    "memory_checks",
    "oom_kills",
]

Status = Literal["ok", "warning", "problem"]

_CGROUP_CHECK = "cgroup memory"

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


def memory_checks(slabs_nbytes: int) -> list[Check]:
    """Compares this machine's memory, and this container's limit, with the slabs."""
    return [
        check_memory(text_of(MEMINFO) or "", slabs_nbytes),
        check_cgroup(MEMBERSHIP, CGROUPS, slabs_nbytes),
    ]


def check_memory(meminfo: str, slabs_nbytes: int) -> Check:
    """Compares the machine's memory with the slabs; ``meminfo`` is the text of ``/proc/meminfo``."""
    sizes = sizes_of(meminfo)
    if "MemAvailable" not in sizes:
        return Check("memory", "warning", "/proc/meminfo does not say what is available", "mount /proc")
    available, total = sizes["MemAvailable"], sizes.get("MemTotal", 0)
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
    found = list(limits(text_of(membership) or "", root))
    if not found:
        return Check(_CGROUP_CHECK, "ok", "not limited")
    limit, file = min(found)
    advice = "raise the container's memory limit (docker run --memory=, resources.limits.memory), or lower --slab-nbytes"
    return Check(_CGROUP_CHECK, *_compare(f"limited to {size_of(limit)} by {file}", limit, slabs_nbytes, advice))


# -- processes that the kernel killed -----------------------------------------------------------------------------------


def oom_kills(membership: Path = MEMBERSHIP, root: Path = CGROUPS, vmstat: Path = Path("/proc/vmstat")) -> int:
    """Returns how many processes the kernel has killed for lack of memory: of our group, or else of the machine."""
    for version, group in groups(text_of(membership) or "", root):
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
    found = list(limits(text_of(membership) or "", root))
    if not found:
        return "the kernel did that, because the machine had no more memory; lower --slab-nbytes, or take a machine with more"
    limit, file = min(found)
    return (
        f"the kernel did that for lack of memory, of which {file} allows {size_of(limit)}; raise that, or lower --slab-nbytes"
    )
