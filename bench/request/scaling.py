"""``bench request --scaling``: whether a request costs more with many clients connected, or with many slots in use.

Method: that of ``bench request`` (:mod:`bench.request.command`), with one process of clients, and variants of shmring's adapter
in place of peers, all of the same slab, configuration and total of requests in flight. What is compared is CPU, since that
is what a book that scans, or a loop that polls, would spend more of.

- *Clients*: the process holds 32 connections, of which one asks, or all in turn. With all, requests that one connection
  would have carried in one write and one read take a write and a read each; that difference is the sockets', not the books'.
- *Slots*: before it asks, the client takes twice as many slots as are to be in use and gives every second one back, so that
  the free space lies in pieces between them. It submits the others, and the engine claims and keeps them: they are in use
  in both ends' books, and their views are alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

import shmring
from bench.messages import Ask, Cell
from bench.peers import RequestPeer
from bench.peers.shmring_ring import RING, answer, request
from bench.request.questions import Desk
from bench.stamps import ITEM_NBYTES
from shmring.opening import Opening

#: 20,000 slots of two blocks (4 KB and a header) take 164 MB; the rest is for replies and for what is asked.
_SLAB_NBYTES = 256 << 20
_LEASE_NBYTES = 4 << 20  # 32 clients have an eighth of a gigabyte together
_SLOTS_IN_A_REQUEST = 100  # so that 10,000 slots are 100 requests, well within max_inflight

_CLIENTS = 32
_SLOTS = 10_000
_FEW_SLOTS = 10


class _Variant(RequestPeer):
    """shmring, with everything as in the other variants; see the head of this file."""

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        kept: list[shmring.Claim] = []
        changed = asyncio.Condition()

        async def wait_until_kept(requests: int) -> None:
            async with changed:
                await changed.wait_for(lambda: len(kept) == requests)

        calls = {"wait_until_kept": wait_until_kept}
        async with shmring.serve(RING, socket_dir=cell.directory, slab_nbytes=_SLAB_NBYTES, calls=calls) as ring:
            listening()
            try:
                async for claim in ring:
                    if "kept" in claim.payload:
                        kept.append(claim)
                        async with changed:
                            changed.notify_all()
                        continue
                    with claim:
                        await claim.reply(answer(claim.payload, desk))
            finally:
                for claim in kept:
                    claim.done()


class ConnectedClients(_Variant):
    """So many connections, of which the first few ask, in turn."""

    def __init__(self, connections: int, asking: int) -> None:
        self.name = f"clients-{connections}-{asking}"
        who = "it asks" if connections == 1 else "all ask" if asking == connections else "one asks"
        self.title = f"{connections} client{'s' * (connections > 1)} connected, {who}"
        self._connections = connections
        self._asking = asking

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(_connect(cell)) for _ in range(self._connections)]
            for connected in clients:
                await connected.wait_prefaulted()
            turns = itertools.cycle(clients[: self._asking])
            yield lambda header, tensor: request(next(turns), header, tensor)


class SlotsInUse(_Variant):
    """One connection, with so many slots in the engine's hands."""

    def __init__(self, slots: int) -> None:
        self.name = f"slots-{slots}"
        self.title = f"{slots:,} slots in use"
        self._slots = slots

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with _connect(cell) as connected:
            await connected.wait_prefaulted()
            submissions = await self._submit(connected, cell.nbytes)
            await connected.call("wait_until_kept", len(submissions))
            yield lambda header, tensor: request(connected, header, tensor)
            for submission in submissions:
                submission.abort()

    async def _submit(self, client: shmring.Client, nbytes: int) -> list[shmring.Submission]:
        taken = [await client.slot(nbytes) for _ in range(2 * self._slots)]
        for slot in taken[1::2]:
            slot.close()
        in_use = taken[::2]
        submissions = []
        for start in range(0, len(in_use), _SLOTS_IN_A_REQUEST):
            some = in_use[start : start + _SLOTS_IN_A_REQUEST]
            tensors = [slot.tensor((nbytes // ITEM_NBYTES,), torch.float32) for slot in some]
            submissions.append(await client.submit({"kept": tensors}))
        for slot in in_use:
            slot.close()
        return submissions


def _connect(cell: Cell) -> Opening[shmring.Client]:
    return shmring.connect(RING, socket_dir=cell.directory, lease_nbytes=_LEASE_NBYTES)


_ONE, _FEW = ConnectedClients(1, 1), SlotsInUse(_FEW_SLOTS)
#: What is measured, with what it is compared with.
_COMPARED: tuple[tuple[RequestPeer, RequestPeer], ...] = (
    (_ONE, _ONE),
    (ConnectedClients(_CLIENTS, 1), _ONE),
    (ConnectedClients(_CLIENTS, _CLIENTS), _ONE),
    (_FEW, _FEW),
    (SlotsInUse(_SLOTS), _FEW),
)
#: By name; and the name of what each is compared with.
VARIANTS = {variant.name: variant for variant, _ in _COMPARED}
BASES = {variant.name: base.name for variant, base in _COMPARED}
