"""The processes of a run: one for the copies, and an engine and a frontend for the hand-overs.

The parent makes no CUDA context, and its progress bar takes no turn of a process that is measured. A child opens what it is to
measure once, since pinning half a gigabyte takes longer than copying it; says so; and carries out one command after another,
each bounded in time. What fails in a command is its result, in words: the next may still work.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing import get_context
from multiprocessing.context import SpawnContext
from typing import Any

import torch

from bench.children import Child, Children, Parent, described
from bench.gpu.device import Accelerator, Gpu, TorchGpu

__all__ = ["Carry", "Opened", "Process", "Ready", "Refused", "Role", "Setting", "spawning"]

_OPEN_LIMIT_S = 180.0  # a context, and half a dozen buffers of half a GB, on a machine that does much else
_COMMAND_LIMIT_S = 120.0  # hundreds of times what the slowest command takes
_END_LIMIT_S = 30.0  # to unpin and unmap

#: Carries a command out, and returns its result.
Carry = Callable[[Any], Awaitable[Any]]


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


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a child has opened.

    Attributes:
        gpu: where.
        absent: what could not be, by name, and why.
    """

    gpu: Accelerator
    absent: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Opened:
    """The same in the child, and what uses it."""

    ready: Ready
    carry_out: Carry


@dataclasses.dataclass(frozen=True)
class Refused:
    """A command has failed.

    Attributes:
        error: what happened, in words.
    """

    error: str


@dataclasses.dataclass(frozen=True)
class _Open:
    """Everything is to be opened; each command is limited in time by the parent."""

    limit_s: float | None = None


@dataclasses.dataclass(frozen=True)
class _Over:
    """Everything was closed again."""


#: What a child does: opens something, for as long as it is measured.
Role = Callable[[Gpu, Setting], AbstractAsyncContextManager[Opened]]


def spawning() -> SpawnContext:
    """Returns how processes are made here: CUDA can't be used in one that was forked."""
    return get_context("spawn")


class Process(Children):
    """One of the processes. Use it with ``with``: :meth:`open`, :meth:`carry_out`, :meth:`finish`.

    Args:
        name: for people.
        role: what it does; travels to it.
        setting: for the role; travels with it, since what processes share can be handed over at their start only.
    """

    def __init__(self, name: str, role: Role, setting: Setting) -> None:
        super().__init__("GPU")
        self._children.append(Child(spawning(), name, "gpu", functools.partial(_play, role, setting)))

    def open(self) -> Ready:
        """Waits until it has opened everything.

        Raises:
            BenchError: it could not.
        """
        self.start()
        ready = self._asked(_Open(), _OPEN_LIMIT_S, "opening")
        assert isinstance(ready, Ready)
        return ready

    def carry_out(self, command: object) -> Any:
        """Has a command carried out; returns its result, or that it was :class:`Refused`.

        Raises:
            BenchError: the process died, or took too long.
        """
        return self._asked(command, _COMMAND_LIMIT_S, str(command))

    def finish(self) -> None:
        """Has everything closed.

        Raises:
            BenchError: it could not be.
        """
        self._asked(None, _END_LIMIT_S, "closing")

    def _asked(self, message: object, limit_s: float, what: str) -> Any:
        with self._playing(limit_s) as deadline:
            self._tell(self._children, message, what)
            (answer,) = self._hear(self._children, deadline, what)
        return answer


# -- in the child ------------------------------------------------------------------------------------------------------


async def _play(role: Role, setting: Setting, parent: Parent, _: _Open) -> _Over:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a clone takes by itself; vLLM leaves it less
    async with role(TorchGpu(), setting) as opened:
        parent.tell(opened.ready)
        while (command := await parent.hear()) is not None:
            parent.tell(await _result(opened.carry_out, command))
    return _Over()


async def _result(carry_out: Carry, command: object) -> Any:
    try:
        return await carry_out(command)
    except Exception as error:  # noqa: BLE001 # it is the command's result
        return Refused(described(error))
