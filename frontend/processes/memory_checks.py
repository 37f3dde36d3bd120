"""Whether there is memory for a server, and whether the kernel killed a process for lack of it; for the doctor and a server's
start.

Nothing here imports torch: the supervisor asks before it starts anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from shmring.door import parse_nbytes
from shmring.engine.settings import EngineSettings
from shmring.frontend.processes.accelerators import count_gpus
from shmring.frontend.settings import FrontendSettings
from shmring.memory.available import CGROUPS, MEMBERSHIP, MEMINFO, groups, limits, size_of, sizes_of, text_of

__all__ = [
    "Check",
    "Status",
    "check_cgroup",
    "check_memory",
    "describe_kill",
    "memory_checks",
    "needs_of",
    "oom_kills",
    "slabs_nbytes_of",
]

Status = Literal["ok", "warning", "problem"]

_CGROUP_CHECK = "cgroup memory"

# What processes take for themselves: 20 MB, 160 (they import torch), 180 with what forks decoders, and 60 at a picture of 12
# megapixels were measured. Libraries' pages, which they share, come on top.
_SUPERVISOR_NBYTES = 50 << 20
_ENGINE_NBYTES = 250 << 20
_FRONTEND_NBYTES = 300 << 20
_DECODER_NBYTES = 64 << 20


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


def needs_of(engines: Sequence[EngineSettings], http: FrontendSettings, frontends: int) -> dict[str, int]:
    """Returns the bytes of memory that a server takes, by what takes them: as many as its options allow.

    Media that are kept lie in the slabs. Not counted are files that are being fetched, and decoded media of a request that is
    larger than the memory for them: it is decoded alone.

    Args:
        engines: its engines.
        http: of each frontend.
        frontends: how many.
    """
    each_nbytes = _FRONTEND_NBYTES + http.decoders * _DECODER_NBYTES
    return {
        "slabs": slabs_nbytes_of(engines),
        "processes": _SUPERVISOR_NBYTES + len(engines) * _ENGINE_NBYTES + frontends * each_nbytes,
        "bodies": frontends * http.max_bodies_nbytes,
        "decoded media": frontends * http.max_decoded_nbytes,
        "responses": http.response_store_nbytes if http.response_lifetime_s else 0,
        "models": 0 if count_gpus() else sum(_weights_nbytes(engine.model) for engine in engines),
    }


def slabs_nbytes_of(engines: Sequence[EngineSettings]) -> int:
    """Returns the bytes of all engines' slabs."""
    return sum(parse_nbytes(engine.ring.slab_nbytes) for engine in engines)


def _weights_nbytes(model: str | None) -> int:
    """Returns how large the files of a model are that lies in a directory. Of one on a hub, that is not known here; whether a
    file can be read, its engine says.
    """
    nbytes = 0
    for path in Path(os.path.expanduser(model)).glob("*.safetensors") if model else ():
        with contextlib.suppress(OSError):
            nbytes += path.stat().st_size
    return nbytes


def memory_checks(needs: Mapping[str, int]) -> list[Check]:
    """Compares this machine's memory, and this container's limit, with what a server needs (:func:`needs_of`)."""
    return [
        check_memory(text_of(MEMINFO) or "", needs),
        check_cgroup(MEMBERSHIP, CGROUPS, needs),
    ]


def check_memory(meminfo: str, needs: Mapping[str, int]) -> Check:
    """Compares the machine's memory with what a server needs; ``meminfo`` is the text of ``/proc/meminfo``."""
    sizes = sizes_of(meminfo)
    if "MemAvailable" not in sizes:
        return Check("memory", "warning", "/proc/meminfo does not say what is available", "mount /proc")
    available, total = sizes["MemAvailable"], sizes.get("MemTotal", 0)
    text = f"{size_of(available)} of {size_of(total)} are available"
    return Check("memory", *_compare(text, available, needs, "lower --slab-nbytes, or take a machine with more"))


def _compare(finding: str, available_nbytes: int, needs: Mapping[str, int], advice: str) -> tuple[Status, str, str]:
    """Returns status, finding and advice about memory that must hold a server: slabs at its start, and the rest in time."""
    needed_nbytes = sum(needs.values())
    parts = ", ".join(f"{what} {size_of(nbytes)}" for what, nbytes in needs.items() if nbytes)
    finding = f"{finding}; a server takes {size_of(needed_nbytes)} ({parts})"
    if available_nbytes >= needed_nbytes:
        return "ok", finding, ""
    return "problem" if available_nbytes < needs["slabs"] else "warning", finding, advice


def check_cgroup(membership: Path, root: Path, needs: Mapping[str, int]) -> Check:
    """Compares a container's memory limit with what a server needs. The slab is charged to who touches it first: the engine.

    Args:
        membership: ``/proc/self/cgroup``.
        root: where the control groups are mounted.
        needs: of the server.
    """
    found = list(limits(text_of(membership) or "", root))
    if not found:
        return Check(_CGROUP_CHECK, "ok", "not limited")
    limit, file = min(found)
    advice = "raise the container's memory limit (docker run --memory=, resources.limits.memory), or lower --slab-nbytes"
    return Check(_CGROUP_CHECK, *_compare(f"limited to {size_of(limit)} by {file}", limit, needs, advice))


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
