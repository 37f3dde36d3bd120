"""The measured program: the cases, of both ends on one event loop.

``callgrind.py`` also starts it with the ``shmring`` of an earlier commit, so it uses only what is public. Its arguments are the
names of cases; without any, it measures all. For each case it prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvloop

import shmring
import shmring.threads

_MESSAGES = 160
_TRACED = 16
_IN_PARTS = {
    "threads.request": 10
}  #: cases of several threads: how often these find nothing is chance, so the part that takes least counts
_WINDOW = 16
_KEY = b"k" * 32
_NAME = "instructions"

_METER = ctypes.CDLL(os.environ["METER"])

#: Carries out so many messages.
Case = Callable[[int], Awaitable[None]]


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
        return {
            "4 KB": lambda n: self._messages(n, 4 << 10),
            "64 KB copied": lambda n: self._messages(n, 64 << 10),
            "64 KB in place": lambda n: self._messages(n, 64 << 10, in_place=True),
            "request": lambda n: self._requests(n, [1, 1.0, 2]),
            "request, 16 in flight": lambda n: self._requests(n, [1, 1.0, 2], _WINDOW),
            "request of 64 KB": lambda n: self._requests(n, {"tensor": torch.zeros(1 << 14)}),
            "request of 64 KB, 16 in flight": lambda n: self._requests(n, {"tensor": torch.zeros(1 << 14)}, _WINDOW),
            "stream of ten": self._streams,
            "kept, found and sent": self._kept,
            "abort": self._aborts,
            "broadcast": self._broadcasts,
            "gather": self._gathers,
            "lease": self._leases,
            "threads.request": self._requests_of_threads,
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

    async def _messages(self, n: int, nbytes: int, *, in_place: bool = False) -> None:
        in_flight: collections.deque[shmring.Submission] = collections.deque()
        shape = (nbytes // 4,)
        content = torch.zeros(shape)

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
        """A slot that fits into no lease, so that the engine grants one, which comes back."""
        for _ in range(n):
            async with self._lessee.slot(1 << 20):
                pass
            while self._lessee.statistics().leases > 1:
                await asyncio.sleep(0)

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
async def _opened() -> AsyncIterator[_Ends]:
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
                yield _Ends(ring, client, worker, lessee, blocking)
            finally:
                await asyncio.to_thread(blocking.close)


async def _count(case: Case, parts: int) -> None:
    """Has callgrind write so many dumps, each of as many messages."""
    await case(_MESSAGES // 2)
    gc.collect()
    gc.freeze()
    _METER.meter_start()
    for _ in range(parts):
        await case(_MESSAGES // parts)
        _METER.meter_write()
    _METER.meter_stop()


async def _bytecodes(case: Case) -> dict[str, float]:
    """Returns how many bytecodes a message takes in each Python function."""
    counts: collections.Counter[str] = collections.Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            counts[f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}: {frame.f_code.co_qualname}"] += 1
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    await case(_TRACED)
    sys.settrace(None)
    threading.settrace(None)
    return {name: count / _TRACED for name, count in counts.items()}


async def main(names: list[str]) -> None:
    """Measures the cases of these names, or all."""
    checkout = Path(shmring.__file__).parents[1]
    assert checkout == Path.cwd(), f"shmring of {checkout} is imported"
    async with _opened() as ends:
        cases = ends.cases()
        gc.disable()
        _METER.meter_keep_clock()
        for name in names or cases:
            told: dict[str, object] = {"case": name}
            try:
                parts = _IN_PARTS.get(name, 1)
                await _count(cases[name], parts)
                told |= {"parts": parts, "messages": _MESSAGES // parts, "bytecodes": await _bytecodes(cases[name])}
            except Exception as error:  # noqa: BLE001 - an earlier commit may lack what it uses
                told["failed"] = f"{type(error).__name__}: {error}"
            print(json.dumps(told), flush=True)


sys.setswitchinterval(1000)  # threads go on until they wait
uvloop.run(main(sys.argv[1:]))
