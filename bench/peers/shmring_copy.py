"""shmring, one copy: ``client.submit(payload)``, which copies the tensor into a slot; read in place by the engine.

By default a tensor of up to 8 KiB travels in the message instead, as it does here; ``inline_nbytes`` says why.

How its users use it: a frontend submits payloads and awaits the end of each (here: of the oldest, once the window is
full); an engine iterates over the ring, reads ``claim.payload`` in place, and leaves the claim, which releases the slot and
tells the frontend that the request is done. Both ends have the default configuration, but for the size of the slab: twice
what is in flight. This is what every other peer is compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import shmring
from bench.messages import Cell, Header, Sink, Source
from bench.peers.peer import Peer

__all__ = ["ShmringCopy", "connected", "see_to_its_end"]

_RING = "bench"
_MIN_SLAB_NBYTES = 64 << 20
_LEAVE_POLL_S = 0.01  # a hundred times a second, when nothing is measured any more


class ShmringCopy(Peer):
    """See the head of this file.

    Attributes:
        busy_poll_s: of both ends' configurations.
    """

    name = "shmring"
    title = "shmring, one copy"
    busy_poll_s: ClassVar[float] = 0.0

    def idle_s(self, cell: Cell) -> float:
        """Returns for how long both ends stay connected after the last message, to see what that costs."""
        return 0.0

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        async with connected(cell, source, self.busy_poll_s) as client:
            in_flight: deque[shmring.Submission] = deque()
            while not source.finished:
                if len(in_flight) == cell.window:
                    await see_to_its_end(in_flight.popleft())
                header = source.stamp()
                in_flight.append(await client.submit({"header": header, "tensor": source.tensor}))
            for submission in in_flight:
                await see_to_its_end(submission)
            if idle_s := self.idle_s(cell):
                await source.meter.watch_idling(idle_s)

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        slab_nbytes = max(_MIN_SLAB_NBYTES, 2 * cell.producers * cell.window * cell.nbytes)
        async with shmring.serve(
            _RING, slab_nbytes=slab_nbytes, socket_dir=cell.directory, busy_poll_s=self.busy_poll_s
        ) as ring:
            listening()
            finished = False
            while not finished:
                with await ring.claim() as claim:
                    finished = sink.take(Header(*claim.payload["header"]), claim.payload["tensor"])
            if idle_s := self.idle_s(cell):
                await sink.meter.watch_idling(idle_s)
                while ring.statistics().clients:  # noqa: ASYNC110 # until the producers, which began a moment later, have idled
                    await asyncio.sleep(_LEAVE_POLL_S)


@contextlib.asynccontextmanager
async def connected(cell: Cell, source: Source, busy_poll_s: float = 0.0) -> AsyncIterator[shmring.RingClient]:
    """Connects to the consumer's ring for the time of a ``with``, and says how long that took.

    A server runs for days: the mapping of the slab's pages, some 0.2 s per GB once, is over before anything is measured.
    """
    started_s = time.perf_counter()
    async with shmring.connect(_RING, socket_dir=cell.directory, busy_poll_s=busy_poll_s) as client:
        source.meter.connect_s = time.perf_counter() - started_s
        await client.wait_prefaulted()
        yield client


async def see_to_its_end(submission: shmring.Submission) -> None:
    """Waits until the engine has left the claim of a submission that has no reply."""
    try:
        await submission.next()
    except StopAsyncIteration:
        return
    raise RuntimeError("the benchmark's engine replies to nothing")
