"""shmring: ``client.submit`` for streams, copied or in place or with busy polling, and ``client.request`` for requests.

How its users use it: a frontend submits payloads and awaits the end of each (here: of the oldest, once the window is
full); an engine iterates over the ring, reads ``claim.payload`` in place, and leaves the claim, which releases the slot and
tells the frontend that the request is done. Both ends have the default configuration, but for the size of the slab: twice
what is in flight. By default a tensor of up to 8 KiB travels in the message, as it does here.

- ``shmring``: ``client.submit(payload)`` copies the tensor into a slot. This is what every other peer is compared with.
- ``shmring-in-place``: a decoder asks for ``client.slot(nbytes)``, writes its result into ``slot.tensor(...)``, submits that
  and leaves the slot. A slot for each message, as a server has one for each picture. Only the stamps are written here: this is
  what the transport costs where the content is produced in place.
- ``shmring-busy-poll``: ``busy_poll_s`` in both configurations, with the 200 microseconds that the configuration recommends,
  where latency counts for more than a core. What it must not cost is a core that has nothing to do, so in the smallest cell
  both ends stay connected for a while after the last message and say what CPU time that takes.

Requests: a frontend awaits ``client.request`` from as many tasks as it has requests; the engine replies and leaves the claim. A
reply of up to 8 KiB travels in the message, a larger one in a slot of the reply reserve, where the client views it. The slab is
no larger than the default, so that the largest cells wait for space, as they do in a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import torch

import shmring
from bench.messages import Answer, Ask, Cell, Header, Sink, Source
from bench.peers.peer import Peer, RequestPeer
from bench.questions import Desk

RING = "bench"

_MIN_SLAB_NBYTES = 64 << 20
_MAX_REQUEST_SLAB_NBYTES = 1 << 30  # shmring's default
_BLOCK_NBYTES = 4096  # of a slot; its header takes part of the first

_IDLE_S = 2.0  # long enough for what happens once a second to be seen; each repetition takes so much longer
_IDLE_NBYTES = 4 << 10  # of the messages before it, on which it does not depend
_LEAVE_POLL_S = 0.01  # a hundred times a second, when nothing is measured any more


# -- streams -------------------------------------------------------------------------------------------------------------


class ShmringCopy(Peer):
    """See the head of this file."""

    name = "shmring"
    title = "shmring, one copy"
    busy_poll_s: ClassVar[float] = 0.0  # of both ends

    def idle_s(self, cell: Cell) -> float:
        """Returns for how long both ends stay connected after the last message, to see what that costs."""
        return 0.0

    def submit(self, client: shmring.Client, cell: Cell, source: Source) -> Awaitable[shmring.Submission]:
        """Stamps the next message and sends it."""
        header = source.stamp()
        return client.submit({"header": header, "tensor": source.tensor})

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        started_s = time.perf_counter()
        async with shmring.connect(RING, socket_dir=cell.directory, busy_poll_s=self.busy_poll_s) as client:
            source.meter.connect_s = time.perf_counter() - started_s
            await client.wait_prefaulted()  # some 0.2 s per GB once: a server runs for days
            in_flight: deque[shmring.Submission] = deque()
            while not source.finished:
                if len(in_flight) == cell.window:
                    await in_flight.popleft().wait()
                in_flight.append(await self.submit(client, cell, source))
            for submission in in_flight:
                await submission.wait()
            if idle_s := self.idle_s(cell):
                await source.meter.watch_idling(idle_s)

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        slab_nbytes = max(_MIN_SLAB_NBYTES, 2 * cell.producers * cell.window * cell.nbytes)
        async with shmring.serve(
            RING, slab_nbytes=slab_nbytes, socket_dir=cell.directory, busy_poll_s=self.busy_poll_s
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


class ShmringInPlace(ShmringCopy):
    """The consumer is that of :class:`ShmringCopy`."""

    name = "shmring-in-place"
    title = "shmring, in place"
    in_place = True

    async def submit(self, client: shmring.Client, cell: Cell, source: Source) -> shmring.Submission:
        async with client.slot(cell.nbytes) as slot:
            tensor = slot.tensor(cell.shape, cell.torch_dtype)
            header = source.stamp(tensor)
            submission = await client.submit({"header": header, "tensor": tensor})
            del tensor  # or the slot would wait for the next message to let go of it
        return submission


class ShmringBusyPoll(ShmringCopy):
    name = "shmring-busy-poll"
    title = "shmring, busy polling"
    busy_poll_s = 0.0002

    def idle_s(self, cell: Cell) -> float:
        return _IDLE_S if (cell.nbytes, cell.window, cell.producers) == (_IDLE_NBYTES, 1, 1) else 0.0


# -- requests ------------------------------------------------------------------------------------------------------------


class ShmringRequest(RequestPeer):
    """One client, or several in a process, which ask in turn, or of which one asks."""

    def __init__(self, clients: int = 1, asking: int = 1) -> None:
        self.name = "shmring" if clients == 1 else f"shmring-{clients}-{asking}"
        who = "all ask" if asking == clients else "one asks"
        self.title = "shmring, client.request" if clients == 1 else f"{clients} clients connected, {who}"
        self._clients, self._asking = clients, asking

    async def serve(self, cell: Cell, desk: Desk, listening: Callable[[], None]) -> None:
        async with shmring.serve(RING, _configuration(cell)) as ring:
            listening()
            async for claim in ring:
                with claim:
                    await claim.reply(_answer(claim.payload, desk))

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell) -> AsyncIterator[Ask]:
        async with contextlib.AsyncExitStack() as stack:
            opening = [shmring.connect(RING, socket_dir=cell.directory) for _ in range(self._clients)]
            clients = [await stack.enter_async_context(each) for each in opening]
            for connected in clients:
                await connected.wait_prefaulted()
            turns = itertools.cycle(clients[: self._asking])
            yield lambda header, tensor: _request(next(turns), header, tensor)


def _configuration(cell: Cell) -> shmring.RingConfig:
    """Sizes of the slab, and of its reserve for replies: twice what is in flight, within reason, but two of each at least."""

    def twice(nbytes: int) -> int:
        each = 2 * cell.producers * (nbytes + _BLOCK_NBYTES)
        return max(each, min(each * cell.window, _MAX_REQUEST_SLAB_NBYTES))

    reply_nbytes = max(_MIN_SLAB_NBYTES // 16, twice(cell.reply_nbytes))
    slab_nbytes = max(_MIN_SLAB_NBYTES, twice(cell.nbytes)) + reply_nbytes
    return shmring.RingConfig(slab_nbytes=slab_nbytes, reply_nbytes=reply_nbytes, socket_dir=cell.directory)


def _answer(payload: Any, desk: Desk) -> dict[str, Any]:
    """Returns the reply to a payload. A function, so that no view of the slot outlives its claim."""
    header = payload["header"]
    return {"header": header, "tensor": desk.answer(Header(*header), payload["tensor"])}


async def _request(client: shmring.Client, header: Header, tensor: torch.Tensor) -> Answer:
    reply = await client.request({"header": header, "tensor": tensor})
    return Answer(Header(*reply["header"]), reply["tensor"])
