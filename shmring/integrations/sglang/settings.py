"""What the environment says: SGLang is configured so, and its processes inherit it.

Each variable is a field of :class:`Settings`, checked when SGLang starts. ``docs/sglang.md`` has a table of them, which a
test compares with this file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from shmring.integrations.environment import Reader, choice, ring_name, run_variable

__all__ = ["NAMES", "PREFIX", "Settings"]

PREFIX = "SHMRING_SGLANG"
NAMES = ("SLAB", "COPY")  # each behind the prefix and "_"

_MIN_SLAB_NBYTES = 16 << 20  # a slab of a few pictures; less is a typing error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The plug-in's settings.

    Attributes:
        slab_nbytes: ``SHMRING_SGLANG_SLAB``, the slab of each scheduler, in bytes.
        copies: ``SHMRING_SGLANG_COPY``, whether each rank copies tensors out of the slab.
        name: what rings are called, followed by the scheduler's number. The first process of a server makes it up; see
            :meth:`of_server`.
    """

    slab_nbytes: int = 1 << 30
    copies: bool = False
    name: str = "sglang"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads and checks all of them.

        Raises:
            SettingError: one can't be used.
        """
        environment = os.environ if environment is None else environment
        read = Reader(environment, PREFIX, NAMES)
        return cls(
            slab_nbytes=read.nbytes("SLAB", cls.slab_nbytes, _MIN_SLAB_NBYTES, "a size of 16MiB or more, such as 4GiB"),
            copies=read.value("COPY", "0", choice("0", "1"), "0 or 1") == "1",
            name=environment.get(run_variable(PREFIX), cls.name),
        )

    def of_server(self, instance_id: str) -> Settings:
        """Returns those of one server, of several that may have this name: one process can make several.

        Args:
            instance_id: SGLang's, of all processes of that server.

        Raises:
            ValueError: it is none.
        """
        if not instance_id:
            raise ValueError("this server has no instance_id")
        return dataclasses.replace(self, name=ring_name(f"{self.name}-{instance_id}"))

    def ring_name(self, place: int) -> str:
        """What the ring of a scheduler is called, by its data-parallel rank."""
        return f"{self.name}-{place}"
