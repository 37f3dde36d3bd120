"""The interface of each memory in which frontends hand slots to an engine; and the slab: its views, and copies to GPUs.

Each memory reports when a slot is no longer in use, and frees itself at the end. The device slab's is
:class:`~shmring.gpu.device_claims.DeviceClaims`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from shmring.config import RingConfig
from shmring.core.compiled import Lending, Regions
from shmring.core.loggers import logger_of
from shmring.core.states import Lease
from shmring.gpu.cuda import Cuda
from shmring.gpu.pinned import PinnedSlab
from shmring.gpu.upload import Uploads
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.ring import limits

__all__ = ["ClaimedMemory", "HostClaims"]

logger = logger_of("shmring.ring")


class ClaimedMemory(Protocol):
    """One memory in which frontends hand slots to an engine."""

    def collect(self) -> list[tuple[int, int]]:
        """Returns the slots that are no longer used here since the last call, by client and generation."""

    def statistics(self, lending: Lending) -> dict[str, Any]:
        """Returns the fields of :class:`~shmring.statistics.RingStatistics` that are about this memory.

        Args:
            lending: what the book says of it.
        """

    async def close(self) -> None:
        """Waits until no GPU uses it any more, and frees it, unless another process may still use it."""


class HostClaims:
    """The slab in host memory. Lives in a loop.

    Args:
        slab: taken over.
        pinned: what of it is registered with CUDA.
        cuda: how to call CUDA.
        copier: has the threads.
        config: of the ring.

    Attributes:
        slab: see above.
        regions: what may be viewed, by client and generation.
        uploads: copies to GPUs.
    """

    def __init__(self, slab: Slab, pinned: PinnedSlab, cuda: Cuda, copier: Copier, config: RingConfig) -> None:
        self.slab = slab
        self.regions = Regions()
        self.uploads = Uploads(
            cuda,
            pinned,
            copier,
            staging_nbytes=int(config.staging_nbytes),
            offload_nbytes=limits.COPY_OFFLOAD_NBYTES,
        )
        self._pinned = pinned

    def collect(self) -> list[tuple[int, int]]:
        """See :class:`ClaimedMemory`."""
        return self.regions.collect()

    def statistics(self, lending: Lending) -> dict[str, Any]:
        """See :class:`ClaimedMemory`."""
        return {
            "shm_nbytes": self.slab.shm_nbytes,
            "free_nbytes": lending.free_nbytes,
            "leased_nbytes": lending.leased_nbytes(Lease.LEASED),
            "quarantined_nbytes": lending.leased_nbytes(Lease.QUARANTINED),
            "pinned_nbytes": self._pinned.nbytes,
            "pin_seconds": self._pinned.seconds,
            "device_copies": self.uploads.copies,
            "device_copied_nbytes": self.uploads.copied_nbytes,
        }

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Unpins the slab when no GPU reads it any more. It stays mapped until :meth:`unmap`."""
        if not await self.uploads.close():
            logger.error("a GPU has not said that it is done reading: the slab stays pinned until this process ends")
        elif self._pinned.nbytes:
            await asyncio.get_running_loop().run_in_executor(None, self._pinned.close)

    def unmap(self) -> None:
        """Gives the slab up. Views of it may live on; their death is not reported any more."""
        self.regions.close()
        self.slab.close()
