"""Which GPUs each of several engines sees.

An engine takes the first GPU that it sees, or all of them. So that engines of one server do not take the same, each is started
with its own part of them in ``CUDA_VISIBLE_DEVICES``, as vLLM does. A single engine sees what its server sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["count_gpus", "environment_of"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus(driver: Path = _DRIVER) -> int:
    """Returns how many GPUs NVIDIA's driver has here, without asking CUDA, which would make a context."""
    try:
        return sum(1 for _ in driver.iterdir())
    except OSError:  # there is no driver
        return 0


def environment_of(rank: int, engines: int, environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Returns the variables of an engine's environment besides those of its server.

    Args:
        rank: of the engine, from 0.
        engines: how many there are.
        environment: the server's, which may say which GPUs it has.
        gpus: in this machine.
    """
    listed = environment.get(_VARIABLE)
    visible = (
        [str(number) for number in range(gpus)] if listed is None else [part for part in listed.split(",") if part.strip()]
    )
    if engines == 1 or not visible:
        return {}
    share = len(visible) // engines
    own = visible[rank * share : (rank + 1) * share] if share else [visible[rank % len(visible)]]
    return {_VARIABLE: ",".join(own)}
