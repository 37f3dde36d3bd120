"""Makes a call, interrupts it, and looks what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from shmring.ring import limits
from tests.suspensions.calls import CALLS, HANDLERS
from tests.suspensions.interrupting import Interrupted, Interruption, Thrown
from tests.suspensions.world import OFFLOAD_NBYTES, World, within

_IN_VAIN = 2  # numbers in a row that a call did not reach, after which it has no more suspensions: their number may vary


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """Makes limits of an engine so small that calls meet them."""
    with mock.patch.multiple(limits, COPY_OFFLOAD_NBYTES=OFFLOAD_NBYTES, MAX_CALLS=2):
        yield


class Trial:
    """One call, in a world of its own.

    Args:
        name: of the call.
        directory: of sockets.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self._name = name
        self._call = CALLS.get(name) or HANDLERS[name]
        self._claims = name in HANDLERS
        self._directory = directory

    async def each(self, how: Interruption, most: int = 200) -> int:
        """Interrupts the call at each of its suspensions, and then makes it once more.

        Args:
            how: it is interrupted.
            most: suspensions.

        Returns:
            How often it was interrupted.

        Raises:
            AssertionError: something is left, or it was never interrupted: then this has tried nothing.
        """
        times = vain = 0
        async with World.open(self._directory, handles=not self._claims) as world:
            for number in range(1, most + 1):
                if await self._once(world, number, how):
                    times, vain = times + 1, 0
                elif (vain := vain + 1) == _IN_VAIN:
                    break
            await self._once(world, 0, how)
        assert times, f"{self._name} has no suspension at which it could be interrupted"
        return times

    async def at(self, numbers: list[int], how: Interruption) -> None:
        """Interrupts the call at some of its suspensions, and then makes it once more."""
        async with World.open(self._directory, handles=not self._claims) as world:
            for number in (*numbers, 0):
                await self._once(world, number, how)

    async def _once(self, world: World, number: int, how: Interruption) -> bool:
        """Makes the call; returns whether it was interrupted."""
        submissions = await world.submit(3) if self._claims else []
        call = Interrupted(self._call(world), number, how)
        try:
            await self._end_of(call)
            await world.finish(submissions)
            await world.is_clean()
        except Exception as error:
            error.add_note(f"{self._name}, interrupted at its suspension {number}: {how.value}")
            raise
        return call.has_happened

    async def _end_of(self, call: Interrupted[None]) -> None:
        """Makes the call in a task of its own. When this returns, nothing knows its errors, whose frames have what it had."""
        task = asyncio.ensure_future(_awaited(call))
        await within(asyncio.wait([task]))
        if task.cancelled():
            assert call.has_happened, "it was cancelled by nobody"
            return
        with contextlib.suppress(Thrown):
            task.result()


async def _awaited(call: Interrupted[None]) -> None:
    await call
