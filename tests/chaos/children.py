"""The driver's side of its processes: starting them fast, asking them, and killing exactly the one that is meant.

They are forked from a process that has imported everything, so that one starts in milliseconds and a killed one is replaced
at once. Signals go through a pidfd: a pid may be another's by the time that it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos import control
from tests.chaos.child import Channel, run_child

__all__ = ["Child", "ChildError", "Nursery"]

_START_LIMIT_S = 120.0  # the first one waits for the import of torch, on a machine that does much else
_ANSWER_LIMIT_S = 60.0
_OPENED_ONCE = ("anon_inode:[io_uring]", "/dev/null")

Program = Callable[[Any, Channel], Awaitable[None]]


class ChildError(Exception):
    """A process of the run has died by itself, or does not answer: the run has no result."""


class Nursery:
    """Starts processes, and knows those that live."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.engine_process", "tests.chaos.frontend_process"])
        self.living: set[Child] = set()

    async def start(self, title: str, program: Program, assignment: Any) -> Child:
        """Starts a process and waits until it says that it is ready.

        Raises:
            ChildError: it does not.
        """
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=run_child, args=(program, assignment, theirs), name=title, daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        assert process.pid is not None
        child = Child(self, title, process, pipe)
        self.living.add(child)
        ready = await child.hear(_START_LIMIT_S)
        if not isinstance(ready, control.Ready):
            raise ChildError(f"{title} said {ready} instead of being ready")
        return child

    async def kill_all(self) -> None:
        """Ends whatever lives."""
        for child in list(self.living):
            await child.kill()


class Child:
    """A process of the run. Made by :meth:`Nursery.start`.

    Attributes:
        title: for people.
        pid: its pid.
        dying: whether the driver has killed it, or told it to leave.
    """

    def __init__(self, nursery: Nursery, title: str, process: Any, pipe: Connection) -> None:
        self.title = title
        self.pid: int = process.pid
        self.dying = False
        self._nursery = nursery
        self._process = process
        self._pipe = pipe
        self._pidfd = os.pidfd_open(self.pid)
        self._answers: asyncio.Queue[control.Answer | None] = asyncio.Queue()
        self._dead = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._died)

    def _readable(self) -> None:
        try:
            self._answers.put_nowait(control.decode_answer(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._answers.put_nowait(None)

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._dead.set()

    @property
    def lives(self) -> bool:
        """Whether its death has not been noticed."""
        return not self._dead.is_set()

    async def hear(self, limit_s: float = _ANSWER_LIMIT_S) -> control.Answer:
        """Waits for its next answer.

        Raises:
            ChildError: it died, or took too long.
        """
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise ChildError(f"{self.title} (pid {self.pid}) has not answered within {limit_s:g} s") from None
        if answer is None:
            await self._dead.wait()
            raise ChildError(f"{self.title} (pid {self.pid}) has died by itself; its last words are above")
        return answer

    async def ask(self, question: control.Question, limit_s: float = _ANSWER_LIMIT_S) -> control.Answer:
        """Says something, and waits for the answer."""
        self.tell(question)
        return await self.hear(limit_s)

    def tell(self, question: control.Question) -> None:
        """Says something that has no answer."""
        self._pipe.send_bytes(msgspec.msgpack.encode(question))

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        if self.lives:
            signal.pidfd_send_signal(self._pidfd, number)

    def descriptors(self) -> int:
        """Returns how many descriptors it has open, but for those that the libraries under it open once, at some time."""
        count = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                count += os.readlink(entry) not in _OPENED_ONCE
        return count

    async def kill(self) -> int:
        """Kills it, and returns when that was (``time.monotonic_ns``); returns when it is dead."""
        self.dying = True
        killed_ns = time.monotonic_ns()
        self.signal(signal.SIGKILL)
        await self.gone()
        return killed_ns

    async def gone(self) -> None:
        """Waits for its death, and forgets it."""
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                await self._dead.wait()
        except TimeoutError:
            raise ChildError(f"{self.title} (pid {self.pid}) does not end") from None
        if self not in self._nursery.living:
            return
        self._nursery.living.remove(self)
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        os.close(self._pidfd)
        await asyncio.to_thread(self._process.join)
