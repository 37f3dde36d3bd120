"""shmring, in place: the producer writes into a slot of the slab, and nothing is copied.

How its users use it: a decoder asks for ``client.slot(nbytes)``, writes its result into ``slot.tensor(...)``, submits
that, and leaves the slot; it is free again when the engine has released it. A slot for each message, as a server has one
for each picture. Only the stamps are written here: this is what the transport costs where the content is produced in place.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import shmring
from bench.messages import Cell, Source
from bench.peers.shmring_copy import ShmringCopy, connected, see_to_its_end

__all__ = ["ShmringInPlace"]


class ShmringInPlace(ShmringCopy):
    """See the head of this file. The consumer is that of :class:`ShmringCopy`."""

    name = "shmring-in-place"
    title = "shmring, in place"
    in_place = True

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        async with connected(cell, source) as client:
            in_flight: deque[shmring.Submission] = deque()
            while not source.finished:
                if len(in_flight) == cell.window:
                    await see_to_its_end(in_flight.popleft())
                async with client.slot(cell.nbytes) as slot:
                    tensor = slot.tensor(cell.shape, cell.torch_dtype)
                    header = source.stamp(tensor)
                    in_flight.append(await client.submit({"header": header, "tensor": tensor}))
                    del tensor  # or the slot would wait for the next message to let go of it
            for submission in in_flight:
                await see_to_its_end(submission)
