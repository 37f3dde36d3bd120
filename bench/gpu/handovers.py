"""From a submission in one process until its data is usable on the engine's stream in another.

The engine answers all routes for as long as it lives; the frontend is told which to go, and how often. A message is handed over
when the one before was answered: what is measured is the hand-over's own time, and no queue.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bench.children import described
from bench.gpu.device import Gpu
from bench.gpu.processes import Opened, Ready, Setting
from bench.gpu.routes import ROUTES, Ask

__all__ = ["HandOver", "answering", "asking"]

_WARM_UP = 5  # messages: a slot's first use, an event's first opening, a clock that had slowed down


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Asks how long hand-overs take, in nanoseconds each.

    Attributes:
        messages: timed.
    """

    route: str
    nbytes: int
    messages: int


@contextlib.asynccontextmanager
async def answering(gpu: Gpu, setting: Setting) -> AsyncIterator[Opened]:
    """The engine's process. Has no commands."""
    absent: dict[str, str] = {}

    async def carry_out(command: Any) -> Any:
        raise AssertionError("the engine is told nothing")

    async with contextlib.AsyncExitStack() as stack:
        for name in setting.routes:
            end = ROUTES[name].answering(gpu, setting.directory, setting.shared.get(name), max(setting.sizes))
            try:
                await stack.enter_async_context(end)
            except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
                absent[name] = described(error)
        yield Opened(Ready(gpu.describe(), absent), carry_out)


@contextlib.asynccontextmanager
async def asking(gpu: Gpu, setting: Setting) -> AsyncIterator[Opened]:
    """The frontend's process: carries out :class:`HandOver`."""
    asks: dict[str, Ask] = {}
    absent: dict[str, str] = {}
    numbers = itertools.count(1)

    async def carry_out(command: HandOver) -> list[int]:
        ask = asks[command.route]
        for _ in range(_WARM_UP):
            await ask(command.nbytes, next(numbers))
        return [await ask(command.nbytes, next(numbers)) for _ in range(command.messages)]

    async with contextlib.AsyncExitStack() as stack:
        for name in setting.routes:
            end = ROUTES[name].asking(gpu, setting.directory, setting.shared.get(name), max(setting.sizes))
            try:
                asks[name] = await stack.enter_async_context(end)
            except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
                absent[name] = described(error)
        yield Opened(Ready(gpu.describe(), absent), carry_out)
