"""What a client counts over all its sessions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shmring.core.compiled import ClientEnd

__all__ = ["ClientCounters"]


@dataclass(slots=True)
class ClientCounters:
    """Counters that outlive a session; see :class:`~shmring.statistics.ClientStatistics`."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    copies: int = 0
    copied_nbytes: int = 0
    in_place: int = 0
    in_place_nbytes: int = 0
    inline_payloads: int = 0
    slot_nbytes_submitted: int = 0
    replies: int = 0
    reply_copies: int = 0
    reply_copied_nbytes: int = 0
    stale_releases: int = 0
    reconnections: int = 0
    kept_hits: int = 0
    kept_misses: int = 0

    def with_those_of(self, end: ClientEnd) -> ClientCounters:
        """Returns the sum of these and what a session's end has counted."""
        counted = {field.name: getattr(end, field.name, 0) for field in dataclasses.fields(self)}
        return ClientCounters(**{name: getattr(self, name) + count for name, count in counted.items()})

    def as_dict(self) -> dict[str, int]:
        """Returns the counters by name."""
        return dataclasses.asdict(self)
