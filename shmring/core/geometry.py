"""How the slab is divided and counted: blocks, and the limits of the books of both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shmring.core.messages import HOST_MEMORY, SLOT_HEADER_NBYTES, Memory

__all__ = [
    "BLOCK_NBYTES",
    "GENERATION_BITS",
    "ClientBookLimits",
    "EngineBookLimits",
    "Geometry",
    "blocks_for",
    "nbytes_for_slots",
    "slot_blocks",
]

#: The allocation granule: a page, so that a lease can be mapped and advised by itself.
BLOCK_NBYTES = 4096
#: Low bits of a generation that count a client's submissions; 2**40 last a year at 30,000 a second.
GENERATION_BITS = 40


def blocks_for(nbytes: int) -> int:
    """Returns the number of blocks that ``nbytes`` need, at least 1."""
    return max(1, -(-nbytes // BLOCK_NBYTES))


def slot_blocks(nbytes: int) -> int:
    """Returns the number of blocks of a slot with ``nbytes`` of content behind its header."""
    return -(-(nbytes + SLOT_HEADER_NBYTES) // BLOCK_NBYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How the slab is divided: one header block, the leasable part, the reply reserve; and the device slab behind it.

    All in blocks. The device slab is another memory, wholly leasable, in the same address space.
    """

    leasable_blocks: int
    reply_blocks: int
    device_blocks: int = 0

    LEASABLE_START = 1

    @classmethod
    def of(
        cls, slab_nbytes: int, reply_nbytes: int | None, device_nbytes: int = 0, *, page_nbytes: int = BLOCK_NBYTES
    ) -> Geometry:
        """Divides a slab.

        Args:
            slab_nbytes: what to divide.
            reply_nbytes: for replies; None: a sixteenth.
            device_nbytes: of the device slab.
            page_nbytes: the kernel's page, which is larger than a block on some machines. The reply reserve is mapped by
                itself, so it begins where a page does, and takes what that leaves over.

        Raises:
            ValueError: the slab is too small for a header, a lease and a reply.
        """
        blocks, page_blocks = slab_nbytes // BLOCK_NBYTES, page_nbytes // BLOCK_NBYTES
        reply_blocks = max(1, blocks // 16) if reply_nbytes is None else blocks_for(reply_nbytes)
        reply_start = (blocks - reply_blocks) // page_blocks * page_blocks
        if reply_start < 2:
            raise ValueError(
                f"a slab of {slab_nbytes} bytes has no room for leases beside {reply_blocks * BLOCK_NBYTES} bytes of "
                f"replies; make slab_nbytes at least {(reply_blocks + max(2, page_blocks)) * BLOCK_NBYTES}"
            )
        return cls(
            leasable_blocks=reply_start - 1,
            reply_blocks=blocks - reply_start,
            device_blocks=device_nbytes // BLOCK_NBYTES,
        )

    @property
    def slab_nbytes(self) -> int:
        """Size of the slab, and so where the device slab begins in the address space."""
        return self.device_start * BLOCK_NBYTES

    @property
    def reply_nbytes(self) -> int:
        """Size of the reply reserve."""
        return self.reply_blocks * BLOCK_NBYTES

    @property
    def device_start(self) -> int:
        return 1 + self.leasable_blocks + self.reply_blocks

    @property
    def reply_start(self) -> int:
        return self.LEASABLE_START + self.leasable_blocks


def nbytes_for_slots(sizes: Sequence[int]) -> int:
    """Returns the content size of one slot that can be split into slots of these sizes."""
    if len(sizes) == 1:
        return sizes[0]
    return sum(map(slot_blocks, sizes)) * BLOCK_NBYTES - SLOT_HEADER_NBYTES


@dataclasses.dataclass(frozen=True, slots=True)
class EngineBookLimits:
    """Bounds per client; see :class:`~shmring.config.RingConfig` for their reasons. Blocks where the name says so.

    ``quota_blocks`` is of the slab, ``device_quota_blocks`` of the device slab; ``max_leases`` holds in each. Of all clients
    together: ``kept_blocks`` and ``max_kept`` bound what is kept; a client has ``max_pins`` of it pinned at a time, of
    ``pinned_blocks`` at most, and waits for ``max_waits`` keys at most.
    """

    max_lease_blocks: int
    quota_blocks: int
    max_leases: int
    max_inflight: int
    device_quota_blocks: int = 0
    kept_blocks: int = 0
    max_kept: int = 0
    max_pins: int = 0
    pinned_blocks: int = 1 << 50  # more than there are
    max_waits: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientBookLimits:
    """The limits of a frontend's book: the engine's, and how this client sizes and keeps its leases.

    Leases of this ``memory`` lie in the ``leasable_nbytes`` from ``first_block`` on, in the engine's address space.
    """

    client_id: int
    leasable_nbytes: int
    max_leases: int
    lease_nbytes: int
    lease_idle_s: float
    memory: Memory = HOST_MEMORY
    first_block: int = Geometry.LEASABLE_START
