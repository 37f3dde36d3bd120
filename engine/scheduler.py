"""Which requests make the next step: first come, first served, up to what a step may hold.

Requests that are not in a step stay unclaimed in the ring, in order of arrival over all frontends, where an abort ends
them at once and costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.request import EngineRequest

__all__ = ["Scheduler", "SchedulerConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step.

    Attributes:
        max_num_seqs: requests in a step. More share its overhead, and all wait for its end.
        max_batch_nbytes: bytes of tensors from which a step takes no further request.
    """

    max_num_seqs: int = 32
    max_batch_nbytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_batch_nbytes < 1:
            raise ValueError("max_num_seqs and max_batch_nbytes must be at least 1")


class Scheduler:
    """First in, first out."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def fill(self, first: EngineRequest, take_next: Callable[[], EngineRequest | None]) -> list[EngineRequest]:
        """Returns a step's batch, in order of arrival.

        Args:
            first: a request that was waited for.
            take_next: claims the next waiting request, or returns None.
        """
        batch, nbytes = [first], first.nbytes
        while len(batch) < self.config.max_num_seqs and nbytes < self.config.max_batch_nbytes:
            request = take_next()
            if request is None:
                break
            batch.append(request)
            nbytes += request.nbytes
        return batch
