"""What the YAML says of the connector: ``extra`` of a connector of vLLM-Omni, in which ours begin with ``shmring_``.

Others are vLLM-Omni's own, which it reads itself. One of ours that is not known, or has a value that can't be used, is an
error: a server that runs with another setting than was meant is worse than one that does not start.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self

from shmring.client.starting import store_name
from shmring.door import parse_nbytes, seconds_of, shown, validate_name
from shmring.integrations.environment import name_the_run, run_variable

__all__ = ["Settings", "name_this_run"]

_PREFIX = "shmring_"
_OF_RUNS = "SHMRING_OMNI"


def name_this_run() -> None:
    """Gives the stages that this process starts, and those that these start, a name in common. Twice is once."""
    name_the_run(_OF_RUNS, "omni")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one connector.

    Attributes:
        store: the name of the store; the same in all stages.
        start: whether to start the store if there is none.
        slab_nbytes: the memory of a store that is started here.
        socket_dir: where its socket lies; None: the user's runtime directory.
        namespace: which stages belong together: requests of two servers may have one name. Those that one process has started
            have one without being told.
        wait_s: seconds that ``put`` waits for room.
        poll_wait_s: seconds that ``get`` waits for something to arrive, when all that is asked for was asked for in vain.
    """

    store: str = ""
    start: bool = True
    slab_nbytes: int = 1 << 30
    socket_dir: str | None = None
    namespace: str = ""
    wait_s: float = 5.0
    poll_wait_s: float = 0.002

    @classmethod
    def of(cls, extra: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Self:
        """Reads and checks them.

        Args:
            extra: of the connector.
            environment: of this process.

        Raises:
            ValueError, TypeError: one is not known, or can't be used.
        """
        environment = os.environ if environment is None else environment
        given = {name.removeprefix(_PREFIX): value for name, value in extra.items() if name.startswith(_PREFIX)}
        known = {"slab" if field.name == "slab_nbytes" else field.name for field in dataclasses.fields(cls)}
        if unknown := given.keys() - known:
            names = ", ".join(_PREFIX + name for name in sorted(known))
            raise ValueError(f"{_PREFIX}{min(unknown)} is no setting of this connector; it has {names}")
        if not isinstance(given.get("start", True), bool):
            raise TypeError(f"{_PREFIX}start is true or false, not {shown(given['start'])}")
        for name in ("store", "socket_dir", "namespace"):
            if not isinstance(given.get(name, ""), str):
                raise TypeError(f"{_PREFIX}{name} is a text, not {shown(given[name])}")
        return cls(
            store=validate_name(given.get("store") or store_name()),
            start=given.get("start", cls.start),
            slab_nbytes=parse_nbytes(given.get("slab", cls.slab_nbytes), f"{_PREFIX}slab"),
            socket_dir=given.get("socket_dir"),
            namespace=given.get("namespace") or environment.get(run_variable(_OF_RUNS), ""),
            wait_s=seconds_of(given.get("wait_s", cls.wait_s), f"{_PREFIX}wait_s"),
            poll_wait_s=seconds_of(given.get("poll_wait_s", cls.poll_wait_s), f"{_PREFIX}poll_wait_s"),
        )
