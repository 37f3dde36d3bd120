"""How many Python calls an operation makes in shmring, and how often it returns to a file that it had left.

Each call is a room that a reader passes, and each return a file that they open again. What is compiled isn't seen: it has a
gate of its own (tests/instructions). The bounds are what the operations take. Whoever passes one should look for what two
rooms do together; what an operation can't do without moves the bound, and the commit says why.

An operation is done several times, and the shortest counts: in a longer one, an end fell asleep or a timer was due.
``python -m tests.ends.test_journeys`` prints the rooms of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shmring

_PRODUCT = str(Path(shmring.__file__).parent)
_TIMES = 10
_KEY = bytes(32)


@dataclass
class Journey:
    """The Python functions of shmring that were called, in their order: file and name.

    Attributes:
        of: the folder whose files count; all of them, if it is empty.
    """

    of: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        place = str(Path(_PRODUCT, self.of))

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(place):
                self.calls.append((code.co_filename[len(_PRODUCT) + 1 :], code.co_qualname))

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def stays(self) -> list[tuple[str, list[str]]]:
        """The files, in the order in which they were entered, with what was called there."""
        stays: list[tuple[str, list[str]]] = []
        for file, name in self.calls:
            if not stays or stays[-1][0] != file:
                stays.append((file, []))
            stays[-1][1].append(name)
        return stays

    @property
    def returns(self) -> int:
        return len(self.stays) - len({file for file, _ in self.stays})

    def __str__(self) -> str:
        rooms = "\n".join(f"    {file}: {' '.join(names)}" for file, names in self.stays)
        return f"{len(self.calls)} calls, {self.returns} returns\n{rooms}"


@dataclass(frozen=True)
class Ends:
    """The two ends of the operations, in one loop, and a worker."""

    ring: shmring.Ring
    client: shmring.Client
    worker: shmring.Worker
    small: torch.Tensor = field(default_factory=lambda: torch.ones(10))
    large: torch.Tensor = field(default_factory=lambda: torch.ones(300_000))

    async def answer(self) -> None:
        with await self.ring.claim() as claim:
            await claim.reply({"y": claim.payload["x"]})


@contextlib.asynccontextmanager
async def _both(directory: str) -> AsyncIterator[Ends]:
    where: dict[str, Any] = {"socket_dir": directory}
    async with (
        shmring.serve("journeys", slab_nbytes="64MiB", **where) as ring,
        shmring.connect("journeys", **where) as client,
        shmring.join("journeys", rank=0, **where) as worker,
    ):
        yield Ends(ring, client, worker)


async def _request(ends: Ends, journey: Journey, tensor: torch.Tensor) -> None:
    answering = asyncio.ensure_future(ends.answer())
    await asyncio.sleep(0)
    with journey.traced():
        await ends.client.request({"x": tensor})
        await answering


async def small_request(ends: Ends, journey: Journey) -> None:
    await _request(ends, journey, ends.small)


async def large_request(ends: Ends, journey: Journey) -> None:
    await _request(ends, journey, ends.large)


async def new_lease(ends: Ends, journey: Journey) -> None:
    with journey.traced():
        async with ends.client.slot(40_000_000):
            pass
    async with ends.client.slot(50_000_000):  # its lease takes the place of the other one's
        pass


async def abort(ends: Ends, journey: Journey) -> None:
    async with ends.client.slot(40_000_000):  # takes the place of all other leases, and goes soon: the request waits for one
        pass
    await asyncio.sleep(0.1)
    with journey.traced():
        submission = await ends.client.submit({"x": ends.large})
        claim = await ends.ring.claim()
        submission.abort()
        with claim:
            while not claim.aborted:
                await asyncio.sleep(0)


async def keep_and_find(ends: Ends, journey: Journey) -> None:
    with journey.traced():
        kept = await ends.client.keep(_KEY, {"x": ends.large})
        found = await ends.client.find(_KEY)
        found.close()
        kept.close()


async def gather(ends: Ends, journey: Journey) -> None:
    with journey.traced():
        answers = asyncio.ensure_future(ends.ring.gather({"x": ends.small}))
        with await ends.worker.receive() as message:
            await message.reply({"y": 1})
        await answers


@dataclass(frozen=True)
class Bound:
    """Of an operation: how many calls, and returns to a file already left."""

    operation: Callable[[Ends, Journey], Awaitable[None]]
    calls: int
    returns: int


BOUNDS = [
    Bound(small_request, 6, 1),
    Bound(large_request, 25, 8),
    Bound(new_lease, 43, 22),
    Bound(abort, 95, 53),  # the client's link still looks, and hears in time that the request has ended
    Bound(keep_and_find, 69, 27),
    Bound(gather, 38, 13),
]


async def shortest(operation: Callable[[Ends, Journey], Awaitable[None]], directory: str) -> Journey:
    """Returns the journey of an operation that has the fewest calls."""
    journeys = []
    async with _both(directory) as ends:
        for _ in range(_TIMES):
            journeys.append(Journey())
            await operation(ends, journeys[-1])
            await asyncio.sleep(0.01)
    return min(journeys, key=lambda journey: (len(journey.calls), journey.returns))


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.operation.__name__)
async def test_an_operation_passes_no_more_rooms_than_it_did(bound: Bound, socket_dir: Path) -> None:
    journey = await shortest(bound.operation, str(socket_dir))
    is_within = len(journey.calls) <= bound.calls and journey.returns <= bound.returns
    assert is_within, f"more than {bound}:\n{journey}"


if __name__ == "__main__":
    import tempfile

    for one in BOUNDS:
        with tempfile.TemporaryDirectory() as made:
            print(f"{one.operation.__name__}: {asyncio.run(shortest(one.operation, made))}\n")
