"""The processes of a run: one for the copies, and an engine and a frontend for the hand-overs.

The parent makes no CUDA context, and its progress bar takes no turn of a process that is measured. A child opens what it is to
measure once, since pinning half a gigabyte takes longer than copying it; says so; and carries out one command after another,
each bounded in time by the parent. What fails in a command is its result, in words: the next may still work.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from bench.children import Child, Children, Parent, described
from bench.gpu.device import Accelerator, Gpu

__all__ = ["SPAWN", "Opened", "Process", "Refused", "Role", "Setting"]

_OPEN_LIMIT_S = 180.0  # a context, and half a dozen buffers of half a GB, on a machine that does much else
_COMMAND_LIMIT_S = 120.0  # hundreds of times what the slowest command takes
_END_LIMIT_S = 30.0  # to unpin and unmap

SPAWN = get_context("spawn")  # CUDA can't be used in a process that was forked


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a child is to open.

    Attributes:
        directory: for sockets.
        sizes: of all tensors, in bytes.
        ways, routes: of which copies, and hand-overs.
        shared: what engine and frontend share, by route.
    """

    directory: str
    sizes: tuple[int, ...]
    ways: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)


class Opened(NamedTuple):
    """What a child has opened.

    Attributes:
        absent: what could not be, by name, and why.
        carry_out: carries a command out, and returns its result.
    """

    absent: dict[str, str]
    carry_out: Callable[[Any], Awaitable[Any]]


class Refused(NamedTuple):
    """A command has failed: what happened, in words."""

    error: str


@dataclasses.dataclass(frozen=True)
class _Open:
    """The one cell of a child; it has no limit of its own."""

    limit_s: float | None = None


#: What a child does: opens something, for as long as it is measured.
Role = Callable[[Gpu, Setting], AbstractAsyncContextManager[Opened]]


class Process(Children):
    """One of the processes. Use it with ``with``: :meth:`open`, :meth:`carry_out`, :meth:`finish`; each raises
    :class:`~bench.children.BenchError` if the process failed, died or took too long.

    Args:
        name: for people.
        role: what it does; travels to it.
        setting: for the role; travels with it, since what processes share can be handed over at their start only.
    """

    def __init__(self, name: str, role: Role, setting: Setting) -> None:
        super().__init__("GPU")
        self._children.append(Child(SPAWN, name, "gpu", functools.partial(_play, role, setting)))

    def open(self) -> tuple[Accelerator, dict[str, str]]:
        """Waits until it has opened everything; returns its GPU, and what could not be opened, by name."""
        self.start()
        gpu, absent = self._answer(_Open(), _OPEN_LIMIT_S, "opening")
        return gpu, absent

    def carry_out(self, command: object) -> Any:
        """Has a command carried out; returns its result, or that it was :class:`Refused`."""
        return self._answer(command, _COMMAND_LIMIT_S, str(command))

    def finish(self) -> None:
        """Has everything closed."""
        self._answer(None, _END_LIMIT_S, "closing")

    def _answer(self, message: object, limit_s: float, what: str) -> Any:
        with self._playing(limit_s) as deadline:
            self._tell(self._children, message, what)
            (answer,) = self._hear(self._children, deadline, what)
        return answer


# -- in the child --------------------------------------------------------------------------------------------------------


async def _play(role: Role, setting: Setting, parent: Parent, _: _Open) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a clone takes by itself; vLLM leaves it less
    gpu = Gpu()
    async with role(gpu, setting) as opened:
        parent.tell((gpu.describe(), opened.absent))
        while (command := await parent.hear()) is not None:
            try:
                result = await opened.carry_out(command)
            except Exception as error:  # noqa: BLE001 # it is the command's result
                result = Refused(described(error))
            parent.tell(result)
