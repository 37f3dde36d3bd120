"""The driver's side of its processes: starting them fast, asking them, and killing exactly the one that is meant.

They are forked from a process that has imported everything, so that one starts in milliseconds and a killed one is replaced
at once. Signals go through a pidfd: a pid may be another's by the time that it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from shmring.processes.process import Process
from tests.fleet.child import Program, run_child
from tests.fleet.footprint import descriptors

_START_LIMIT_S = 120.0  # the first one waits for the import of torch, on a machine that does much else
_ANSWER_LIMIT_S = 60.0


class ChildError(Exception):
    """A process of the run has died by itself, or does not answer: the run has no result."""


class Fleet:
    """Starts processes, and knows those that live.

    Args:
        preloaded: modules that every process has imported before it is forked.
        question_type, answer_type: what is said to processes and what they answer, one message at a time, as msgpack.
    """

    def __init__(self, preloaded: Sequence[str], question_type: Any, answer_type: Any) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))
        self._question_type = question_type
        self.answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer_type)
        self.living: set[Child] = set()

    async def start(self, title: str, program: Program, assignment: Any) -> Child:
        """Starts a process and waits until it says that it is ready, by a first answer.

        Raises:
            ChildError: it does not.
        """
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(
            target=run_child, args=(program, assignment, theirs, self._question_type), name=title, daemon=True
        )
        await asyncio.to_thread(process.start)
        theirs.close()
        assert process.pid is not None
        child = Child(self, title, process, pipe)
        self.living.add(child)
        await child.hear(_START_LIMIT_S)
        return child

    async def kill_all(self) -> None:
        """Ends whatever lives."""
        for child in list(self.living):
            await child.kill()


class Child:
    """A process of the run. Made by :meth:`Fleet.start`.

    Attributes:
        title: for people.
        pid: its pid.
        dying: whether the driver has killed it, or told it to leave.
    """

    def __init__(self, fleet: Fleet, title: str, process: Any, pipe: Connection) -> None:
        self.title = title
        self.pid: int = process.pid
        self.dying = False
        self._fleet = fleet
        self._process = process
        self._pipe = pipe
        self._watched = Process(self.pid)
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            self._answers.put_nowait(self._fleet.answers.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._answers.put_nowait(None)

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._watched.lives

    async def hear(self, limit_s: float = _ANSWER_LIMIT_S) -> Any:
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
            await self._watched.ended()
            raise ChildError(f"{self.title} (pid {self.pid}) has died by itself; its last words are above")
        return answer

    async def ask(self, question: msgspec.Struct, limit_s: float = _ANSWER_LIMIT_S) -> Any:
        """Says something, and waits for the answer."""
        self.tell(question)
        return await self.hear(limit_s)

    def tell(self, question: msgspec.Struct) -> None:
        """Says something that has no answer; to one that has just died, nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send_bytes(msgspec.msgpack.encode(question))

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        if self.lives:
            self._watched.send(number)

    def descriptors(self) -> int:
        """Returns how many descriptors it has open."""
        return descriptors(self.pid)

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
                await self._watched.ended()
        except TimeoutError:
            raise ChildError(f"{self.title} (pid {self.pid}) does not end") from None
        if self not in self._fleet.living:
            return
        self._fleet.living.remove(self)
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._watched.close()
        await asyncio.to_thread(self._process.join)
