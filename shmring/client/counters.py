"""What a client counts over all its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmring.core.compiled import ClientEnd
from shmring.statistics import ClientStatistics, counted_in

__all__ = ["ClientCounters"]

_NAMES = counted_in(ClientStatistics)


class ClientCounters:
    """Counters that outlive a session: those of :class:`~shmring.statistics.ClientStatistics`, by their names there."""

    __slots__ = _NAMES

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

        def __setattr__(self, name: str, value: int) -> None: ...

    def __init__(self, **counts: int) -> None:
        for name in _NAMES:
            setattr(self, name, counts.get(name, 0))

    def with_those_of(self, end: ClientEnd) -> ClientCounters:
        """Returns the sum of these and what a session's end has counted."""
        return ClientCounters(**{name: getattr(self, name) + getattr(end, name, 0) for name in _NAMES})

    def as_dict(self) -> dict[str, int]:
        """Returns the counters by name."""
        return {name: getattr(self, name) for name in _NAMES}
