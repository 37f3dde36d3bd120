"""The processes of a run: one for the copies, and an engine and a frontend for the hand-overs.

The parent makes no CUDA context, and its progress bar takes no turn of a process that is measured. A child opens what it is to
measure once, since pinning half a gigabyte takes longer than copying it; says so; and carries out one command after another,
each bounded in time by the parent. What fails in a command is its result, in words: the next may still work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from bench.children import Child, Children, Parent, described
from bench.gpu.device import Accelerator, Gpu

__all__ = ["SPAWN", "Opened", "Process", "Refused", "opened"]

_OPEN_LIMIT_S = 180.0  # a context, and half a dozen buffers of half a GB, on a machine that does much else
_COMMAND_LIMIT_S = 120.0  # hundreds of times what the slowest command takes
_END_LIMIT_S = 30.0  # to unpin and unmap

SPAWN = get_context("spawn")  # CUDA can't be used in a process that was forked

_Thing = TypeVar("_Thing")


class Opened(NamedTuple):
    """What a child could not open, and why; what it carries out: of what was opened, at a size in bytes, so much of it."""

    absent: Mapping[str, str]
    commands: Mapping[str, Callable[[str, int, Any], Awaitable[Any]]]


class Refused(NamedTuple):
    """A command has failed: what happened, in words."""

    error: str


@dataclasses.dataclass(frozen=True)
class _Open:
    """The one cell of a child; it has no limit of its own."""

    limit_s: float | None = None


#: What a child does: opens something on its GPU, for as long as it is measured.
_Role: TypeAlias = Callable[[Gpu], AbstractAsyncContextManager[Opened]]


@contextlib.asynccontextmanager
async def opened(
    openers: Mapping[str, Callable[[], AbstractAsyncContextManager[_Thing]]],
) -> AsyncIterator[tuple[dict[str, _Thing], dict[str, str]]]:
    """Opens things for the time of a ``with``; yields those that could be, and why others could not, by name."""
    things: dict[str, _Thing] = {}
    absent: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, opener in openers.items():
            try:
                things[name] = await stack.enter_async_context(opener())
            except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
                absent[name] = described(error)
        yield things, absent


class Process(Children):
    """One of the processes. Use it with ``with``: :meth:`open`, :meth:`carry_out`, :meth:`finish`; each raises
    :class:`~bench.children.BenchError` if the process failed, died or took too long. Its role travels to it with what processes
    share, which can be handed over at their start only.
    """

    def __init__(self, name: str, role: _Role) -> None:
        super().__init__("GPU")
        self._children.append(Child(SPAWN, name, "gpu", functools.partial(_play, role)))

    def open(self) -> tuple[Accelerator, dict[str, str]]:
        """Waits until it has opened everything; returns its GPU, and what could not be opened, by name."""
        self.start()
        gpu, absent = self._answer(_Open(), _OPEN_LIMIT_S, "opening")
        return gpu, absent

    def carry_out(self, command: str, name: str, nbytes: int, amount: float) -> Any:
        """Has a command of :class:`Opened` carried out; returns its result, or that it was :class:`Refused`."""
        return self._answer((command, name, nbytes, amount), _COMMAND_LIMIT_S, f"{command}, {name}, {nbytes:,} bytes")

    def finish(self) -> None:
        """Has everything closed."""
        self._answer(None, _END_LIMIT_S, "closing")

    def _answer(self, message: object, limit_s: float, what: str) -> Any:
        with self._playing(limit_s) as deadline:
            self._tell(self._children, message, what)
            (answer,) = self._hear(self._children, deadline, what)
        return answer


async def _play(role: _Role, parent: Parent, _: _Open) -> None:
    """In the child."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a clone takes by itself; vLLM leaves it less
    gpu = Gpu()
    async with role(gpu) as (absent, commands):
        parent.tell((gpu.describe(), absent))
        while (message := await parent.hear()) is not None:
            command, *arguments = message
            try:
                result = await commands[command](*arguments)
            except Exception as error:  # noqa: BLE001 # it is the command's result
                result = Refused(described(error))
            parent.tell(result)
