"""shmring: ``client.request(payload)``, answered by ``claim.reply`` and the end of the claim.

How its users use it: a frontend awaits ``client.request`` once for each request, from as many tasks as it has requests;
the tensor is copied into a slot. An engine iterates over the ring, reads ``claim.payload`` in place, replies, and leaves the
claim, which releases the slot. A reply of up to 8 KiB travels in the message, a larger one in a slot of the reply reserve,
where the client views it. Both ends have the default configuration, but for the size of the slab: twice what is in flight,
and no more than the default, so that the largest cells wait for space, as they do in a server. This is what every other
peer is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

import shmring
from bench.request.peers.peer import Ask, Peer
from bench.request.questions import Answer, Cell, Desk, Header
from shmring.client import Connecting

__all__ = ["RING", "ShmringRequest", "answer", "request"]

RING = "bench"

_MIN_SLAB_NBYTES = 64 << 20
_MAX_SLAB_NBYTES = 1 << 30  # shmring's default
_BLOCK_NBYTES = 4096  # of a slot; its header takes part of the first


class ShmringRequest(Peer):
    """See the head of this file."""

    name = "shmring"
    title = "shmring, client.request"

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        async with shmring.serve(RING, _configuration(cell)) as ring:
            listening()
            async for claim in ring:
                with claim:
                    await claim.reply(answer(claim.payload, desk))

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with _connect(cell) as connected:
            yield lambda header, tensor: request(connected, header, tensor)


def _connect(cell: Cell) -> Connecting:
    return shmring.connect(RING, socket_dir=cell.directory)


def _configuration(cell: Cell) -> shmring.RingConfig:
    """Sizes of the slab, and of its reserve for replies: twice what is in flight, within reason, but two of each at least."""

    def twice(nbytes: int) -> int:
        each = 2 * cell.clients * (nbytes + _BLOCK_NBYTES)
        return max(each, min(each * cell.in_flight, _MAX_SLAB_NBYTES))

    reply_nbytes = max(_MIN_SLAB_NBYTES // 16, twice(cell.reply_nbytes))
    slab_nbytes = max(_MIN_SLAB_NBYTES, twice(cell.nbytes)) + reply_nbytes
    return shmring.RingConfig(slab_nbytes=slab_nbytes, reply_nbytes=reply_nbytes, socket_dir=cell.directory)


def answer(payload: Any, desk: Desk) -> dict[str, Any]:
    """Returns the reply to a payload. A function, so that no view of the slot outlives its claim."""
    header = payload["header"]
    return {"header": header, "tensor": desk.answer(Header(*header), payload["tensor"])}


async def request(client: shmring.RingClient, header: Header, tensor: torch.Tensor) -> Answer:
    """Asks one question."""
    reply = await client.request({"header": header, "tensor": tensor})
    return Answer(Header(*reply["header"]), reply["tensor"])
