"""The processes of a run: one for the copies, and an engine and a frontend for the hand-overs.

The parent makes no CUDA context. A child opens what it is to measure once, since pinning half a gigabyte takes longer than
copying it; says so; and measures what it is asked for, each time bounded by the parent. What fails is a result, in words: the
next may still work.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from bench.children import BenchError, Child, Children, Parent, described
from bench.gpu.device import Gpu

_OPEN_LIMIT_S = 180.0  # a context, and half a dozen buffers of half a GB, on a machine that does much else
_COMMAND_LIMIT_S = 120.0  # hundreds of times what the slowest command takes
_END_LIMIT_S = 30.0  # to unpin and unmap

SPAWN = get_context("spawn")  # CUDA can't be used in a process that was forked

#: What is measured, each for the time of a ``with``, by name.
Openers: TypeAlias = Mapping[str, Callable[[], AbstractAsyncContextManager[Any]]]
#: What was measured: numbers, by what they are.
Numbers: TypeAlias = dict[str, list[float]]
#: Measures what was opened, on a GPU, at a size in bytes, and so much of it.
Measure: TypeAlias = Callable[..., Awaitable[Numbers]]


@contextlib.asynccontextmanager
async def opened(openers: Openers) -> AsyncIterator[tuple[dict[str, Any], dict[str, str]]]:
    """Opens things for the time of a ``with``; yields those that could be, and why others could not, by name."""
    things: dict[str, Any] = {}
    absent: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, opener in openers.items():
            try:
                things[name] = await stack.enter_async_context(opener())
            except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
                absent[name] = described(error)
        yield things, absent


class Process(Children):
    """One of the processes. Use it with ``with``: :meth:`open`, :meth:`measure`, :meth:`finish`; each raises
    :class:`~bench.children.BenchError` if the process failed, died or took too long.

    ``openers`` is called in the process with its GPU, and ``measure`` for each measurement; a process without it only answers
    others. Both travel to it with what processes share, which can be handed over at their start only.
    """

    def __init__(self, name: str, openers: Callable[[Gpu], Openers], measure: Measure | None = None) -> None:
        super().__init__("GPU")
        self.children.append(Child(SPAWN, name, "gpu", functools.partial(_play, openers, measure)))

    def open(self) -> tuple[str, dict[str, str]]:
        """Waits until it has opened everything; returns its GPU, and what could not be opened, by name."""
        self.start()
        gpu, absent = self._answer(SimpleNamespace(limit_s=None), _OPEN_LIMIT_S, "opening")  # its one cell, without a limit
        return gpu, absent

    def measure(self, name: str, nbytes: int, *amounts: float) -> Numbers:
        """Has it measure what was opened by that name. What has failed may work the next time."""
        answer: Numbers | str = self._answer((name, nbytes, *amounts), _COMMAND_LIMIT_S, f"{name}, {nbytes:,} bytes")
        if isinstance(answer, str):
            raise BenchError(answer)
        return answer

    def finish(self) -> None:
        self._answer(None, _END_LIMIT_S, "closing")

    def _answer(self, message: object, limit_s: float, what: str) -> Any:
        with self._playing(limit_s) as deadline:
            self._tell(self.children, message, what)
            (answer,) = self._hear(self.children, deadline, what)
        return answer


async def _play(openers: Callable[[Gpu], Openers], measure: Measure | None, parent: Parent, _: object) -> None:
    """In the child."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a clone takes by itself; vLLM leaves it less
    gpu = Gpu()
    async with opened(openers(gpu)) as (things, absent):
        parent.tell((gpu.describe(), absent))
        while (message := await parent.hear()) is not None:
            assert measure is not None, "it is asked for nothing else"
            name, *amounts = message
            try:
                parent.tell(await measure(gpu, things[name], *amounts))
            except Exception as error:  # noqa: BLE001 # it is the result
                parent.tell(described(error))
