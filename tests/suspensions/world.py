"""A ring with a handler and a worker, and two clients, all of them small; and what a call must leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import torch

import shmring

KEY = bytes(32)
OFFLOAD_NBYTES = 20_000  # so that copies leave the loop early, and an interruption can hit one
LIMIT_S = 60.0  # that only a hang reaches

_Result = TypeVar("_Result")

#: What must be zero when nothing is going on.
_OF_RINGS = (
    "waiting", "running", "slots_published", "slots_claimed", "slots_draining", "replies_waiting", "lease_requests_waiting",
    "kept_pinned", "protocol_errors", "quarantined_nbytes", "broadcasts_outstanding",
)  # fmt: skip
_OF_CLIENTS = (
    "slots_writing", "slots_submitted", "slots_draining", "waiting", "in_flight", "reply_slots_held", "kept_pins",
    "stale_releases",
)  # fmt: skip


def tensor(nbytes: int) -> torch.Tensor:
    """Returns some bytes."""
    return torch.ones(nbytes, dtype=torch.uint8)


async def within(work: Awaitable[_Result]) -> _Result:
    """Awaits something that must come to its end."""
    async with asyncio.timeout(LIMIT_S):
        return await work


class World:
    """See the head of this file. Made by :meth:`open`.

    Attributes:
        directory: of sockets.
        ring: whose name is ``w``.
        client: that calls are made with.
        other: another one.
    """

    ring: shmring.Ring
    client: shmring.Client
    other: shmring.Client

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, directory: Path, *, handles: bool) -> AsyncIterator[World]:
        """Opens a world.

        Args:
            directory: of its sockets.
            handles: whether a handler answers requests.
        """
        world = cls(directory)
        sizes: Any = {"slab_nbytes": "1MiB", "reply_nbytes": "384KiB", "broadcast_nbytes": "128KiB", "worker_backlog": 4}
        options: Any = {"socket_dir": world.directory, "copy_offload_nbytes": OFFLOAD_NBYTES, "lease_idle_s": 0.05}
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            world.ring = await enter(
                shmring.serve("w", socket_dir=world.directory, calls={"slow": _slow}, max_inflight=8, **sizes)
            )
            world.client, world.other = [
                await enter(shmring.connect("w", connect_timeout_s=LIMIT_S, **options)) for _ in range(2)
            ]
            worker: shmring.Worker[Any] = await enter(shmring.join("w", 0, socket_dir=world.directory))
            await world.ring.wait_workers(1, timeout=LIMIT_S)
            works = [_reply_to_all(worker), *([world.ring.run(_echo)] if handles else [])]
            tasks = [asyncio.ensure_future(work) for work in works]
            try:
                yield world
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, count: int) -> list[shmring.Submission]:
        """The other client submits requests; returns them when the engine has them."""
        submissions = [await self.other.submit({"x": tensor(5000), "number": number}) for number in range(count)]
        while self.ring.statistics().waiting < count:
            await asyncio.sleep(0)
        return submissions

    async def finish(self, submissions: list[shmring.Submission]) -> None:
        """Each of these requests ends in some way; those that nobody has claimed are answered."""
        answering = asyncio.ensure_future(self._answer_all())
        try:
            for submission in submissions:
                with contextlib.suppress(shmring.RemoteError, shmring.AbortedError):
                    await within(submission.result())
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            submissions.clear()

    async def _answer_all(self) -> None:
        async for claim in self.ring:
            with claim:
                await claim.reply("one of the rest")

    async def is_clean(self) -> None:
        """Waits until nothing is left of what was done.

        Raises:
            AssertionError: something stays.
        """
        ends_s = time.monotonic() + LIMIT_S
        while left := self._left():
            assert time.monotonic() < ends_s, f"it leaves behind: {left}"
            gc.collect()
            await asyncio.sleep(0.002)

    def _left(self) -> list[tuple[str, str, Any]]:
        ring = self.ring.statistics()
        left = [("ring", name, getattr(ring, name)) for name in _OF_RINGS if getattr(ring, name)]
        for memory in ("reply", "broadcast"):
            free, whole = getattr(ring, f"{memory}_free_nbytes"), getattr(ring, f"{memory}_nbytes")
            if free != whole:
                left.append(("ring", memory, whole - free))
        for name, client in (("client", self.client), ("other", self.other)):
            counts = client.statistics()
            left += [(name, field, getattr(counts, field)) for field in _OF_CLIENTS if getattr(counts, field)]
        return left


async def _slow() -> str:
    for _ in range(3):
        await asyncio.sleep(0)
    return "slow"


async def _echo(claim: shmring.Claim) -> None:
    payload = claim.payload
    if "fails" in payload:
        raise ValueError("as it is told")
    await claim.reply(payload)
    if "twice" in payload:
        await claim.reply(payload)


async def _reply_to_all(worker: shmring.Worker[Any]) -> None:
    async for message in worker:
        with message:
            if message.wants_reply:
                await message.reply("replied")
