"""The cases of the transport: both ends on one event loop, and what threads ask of a client.

They are measured with the ``shmring`` of an earlier commit, too, so they use only what is public.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import torch

import shmring
import shmring.threads

from . import meter  # measured, it is another package's: no other part of tests can be imported there
from .case import Case

_WINDOW = 16
_KEY = b"k" * 32
_NAME = "instructions"
_TURNS = 3  # of the loop, until a lease has come back


class _Ends:
    """Both ends, and a worker.

    Args:
        ring, client, worker: the ends of most cases.
        lessee: a client whose lease is small, and which gives further leases back at once.
        blocking: a client for threads.
    """

    def __init__(
        self,
        ring: shmring.Ring,
        client: shmring.Client,
        worker: shmring.Worker,
        lessee: shmring.Client,
        blocking: shmring.threads.Client,
    ) -> None:
        self._ring = ring
        self._client = client
        self._worker = worker
        self._lessee = lessee
        self._blocking = blocking

    def cases(self) -> dict[str, Case]:
        """Returns all cases, by name."""
        small, little, much = [1, 1.0, 2], torch.zeros(1 << 10), torch.zeros(1 << 14)
        large = {"tensor": much}
        return {
            "4 KB": Case(lambda n: self._messages(n, little)),
            "64 KB copied": Case(lambda n: self._messages(n, much)),
            "64 KB in place": Case(lambda n: self._messages(n, much, in_place=True)),
            "request": Case(lambda n: self._requests(n, small)),
            "request, 16 in flight": Case(lambda n: self._requests(n, small, _WINDOW)),
            "request of 64 KB": Case(lambda n: self._requests(n, large), messages=80),
            "request of 64 KB, 16 in flight": Case(lambda n: self._requests(n, large, _WINDOW)),
            "stream of ten": Case(self._streams, messages=48),
            "kept, found and sent": Case(self._kept),
            "kept, found without asking": Case(self._found_nowait),
            "kept, 16 found at once": Case(self._found_many),
            "abort": Case(self._aborts),
            "broadcast": Case(self._broadcasts),
            "gather": Case(self._gathers),
            "lease": Case(self._leases),
            "threads.request": Case(self._requests_of_threads, messages=4, parts=40),
        }

    async def _both(
        self, n: int, handle: Callable[[shmring.Claim], Awaitable[object]], act: Callable[[int], Awaitable[object]]
    ) -> None:
        """Has the frontend act so often, and the engine handle as many claims."""

        async def engine() -> None:
            for _ in range(n):
                with await self._ring.claim() as claim:
                    await handle(claim)

        async def frontend() -> None:
            for number in range(n):
                await act(number)

        await asyncio.gather(engine(), frontend())

    async def _messages(self, n: int, content: torch.Tensor, *, in_place: bool = False) -> None:
        in_flight: collections.deque[shmring.Submission] = collections.deque()
        nbytes, shape = content.nbytes, tuple(content.shape)

        async def submit(number: int) -> None:
            if len(in_flight) == _WINDOW:
                await in_flight.popleft().wait()
            if in_place:
                async with self._client.slot(nbytes) as slot:
                    tensor = slot.tensor(shape, torch.float32)
                    in_flight.append(await self._client.submit({"header": [number, 1.0, 2], "tensor": tensor}))
            else:
                in_flight.append(await self._client.submit({"header": [number, 1.0, 2], "tensor": content}))

        await self._both(n, _look, submit)
        for submission in in_flight:
            await submission.wait()

    async def _requests(self, n: int, payload: object, window: int = 1) -> None:
        """Sends requests whose reply is what was sent."""

        async def frontend(share: int) -> None:
            for _ in range(share):
                await self._client.request(payload)

        async def engine() -> None:
            for _ in range(n):
                with await self._ring.claim() as claim:
                    await claim.reply(claim.payload)

        await asyncio.gather(engine(), *(frontend(n // window) for _ in range(window)))

    async def _streams(self, n: int) -> None:
        async def handle(claim: shmring.Claim) -> None:
            for number in range(10):
                await claim.reply([number])

        async def act(_: int) -> None:
            async for _ in self._client.stream([1, 1.0, 2]):
                pass

        await self._both(n, handle, act)

    async def _kept(self, n: int) -> None:
        async def act(_: int) -> None:
            found = await self._client.find(_KEY)
            assert found is not None
            with found:
                await (await self._client.submit({"tensor": found.payload})).wait()

        if (kept := await self._client.find(_KEY)) is None:
            kept = await self._client.keep(_KEY, torch.zeros(1 << 14))
        assert kept is not None
        with kept:
            await self._both(n, _look, act)

    async def _found_nowait(self, n: int) -> None:
        with await self._client.keep(_KEY, torch.zeros(1 << 14)):
            for _ in range(n):
                self._client.find_nowait(_KEY).close()

    async def _found_many(self, n: int) -> None:
        """As many as messages are in flight, none of which is pinned; each time with one round trip."""
        keys = [bytes([number]) * 32 for number in range(_WINDOW)]
        for key in keys:
            (await self._client.keep(key, torch.zeros(1 << 10))).close()
        for _ in range(n):
            for kept in await self._client.find_many(keys):
                assert kept is not None
                kept.close()

    async def _aborts(self, n: int) -> None:
        claimed = asyncio.Event()

        async def handle(claim: shmring.Claim) -> None:
            gone = asyncio.Event()
            claim.on_abort(gone.set)
            claimed.set()
            await gone.wait()

        async def act(number: int) -> None:
            submission = await self._client.submit([number])
            await claimed.wait()
            claimed.clear()
            submission.abort()

        await self._both(n, handle, act)

    async def _broadcasts(self, n: int) -> None:
        content = torch.zeros(1 << 10)
        for step in range(n):
            await self._ring.broadcast({"step": step, "pixels": content})
            with await self._worker.receive() as message:
                message.payload["pixels"]

    async def _gathers(self, n: int) -> None:
        async def worker() -> None:
            for _ in range(n):
                with await self._worker.receive() as message:
                    await message.reply(message.payload["step"])

        async def engine() -> None:
            for step in range(n):
                assert await self._ring.gather({"step": step}) == [step]

        await asyncio.gather(worker(), engine())

    async def _leases(self, n: int) -> None:
        """A slot that fits into no lease, so that the engine grants one, which comes back as soon as time passes."""
        for _ in range(n):
            async with self._lessee.slot(1 << 20):
                pass
            meter.let_pass(0.01)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        assert self._lessee.statistics().leases == 0

    async def _requests_of_threads(self, n: int) -> None:
        async def engine() -> None:
            for _ in range(n):
                with await self._ring.claim() as claim:
                    await claim.reply(claim.payload)

        def frontend() -> None:
            for _ in range(n):
                self._blocking.request([1, 1.0, 2])

        await asyncio.gather(engine(), asyncio.to_thread(frontend))


async def _look(claim: shmring.Claim) -> None:
    claim.payload["tensor"]


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[dict[str, Case]]:
    """Opens both ends, and returns all cases, by name."""
    with tempfile.TemporaryDirectory(prefix="ir-") as directory:
        async with (
            shmring.serve(_NAME, slab_nbytes="64MiB", socket_dir=directory) as ring,
            shmring.connect(_NAME, socket_dir=directory) as client,
            shmring.join(_NAME, rank=0, socket_dir=directory) as worker,
            shmring.connect(_NAME, socket_dir=directory, lease_nbytes="64KiB", lease_idle_s=1e-6) as lessee,
        ):
            await client.wait_prefaulted()
            await lessee.wait_prefaulted()
            blocking = await asyncio.to_thread(shmring.threads.connect, _NAME, socket_dir=directory)
            await asyncio.to_thread(blocking.wait_prefaulted)
            try:
                yield _Ends(ring, client, worker, lessee, blocking).cases()
            finally:
                await asyncio.to_thread(blocking.close)
