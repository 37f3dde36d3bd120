"""A process that the supervisor started, and the other end of the socket that :mod:`shmring.service.supervision` describes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shmring.core.loggers import logger_of
from shmring.frontend.callers.keys import ADMIN_KEYS_VARIABLE, KEYS_VARIABLE
from shmring.processes.process import Process
from shmring.service.import_path import without_working_directory
from shmring.service.supervision import ALIVE, READY, STUCK, FrontendState

__all__ = ["Child", "end_children"]

logger = logger_of("shmring.frontend.processes.supervisor")

_READ_NBYTES = 4096  # from a child at a time


class Child:
    """A process that the supervisor has started, and the supervisor's end of the socket between them.

    Attributes:
        title: what to call it.
        process: the process.
        started_at: when, by the loop's clock.
        ready: set when it has said that it serves.
        is_stuck: whether it has said last that requests are not carried out any more.
        silent_heartbeats: how many heartbeats in a row it has missed.
        informed_of: the states of the frontends that it was last sent.
        killed_because: why the supervisor has killed it; empty: it has not.
    """

    def __init__(self, title: str, process: Process, writer: asyncio.StreamWriter) -> None:
        self.title = title
        self.process = process
        self.started_at = asyncio.get_running_loop().time()
        self.ready = asyncio.Event()
        self.is_stuck = False
        self.silent_heartbeats = 0
        self.informed_of: list[FrontendState] = []
        self.killed_because = ""
        self._writer = writer
        self._heard = False
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        title: str,
        command: Sequence[str],
        orders: bytes = b"",
        *,
        pass_fds: Iterable[int] = (),
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Starts ``python``.

        Args:
            title: what to call it.
            command: its arguments; the descriptor of its end of the socket is added to the last one.
            orders: the first message to it.
            pass_fds: descriptors that it inherits.
            environment: variables that it gets besides those of this process. It never gets the keys, which it does not need.
        """
        ours, theirs = socket.socketpair()
        environ = without_working_directory(os.environ)
        inherited = {name: value for name, value in environ.items() if name not in (KEYS_VARIABLE, ADMIN_KEYS_VARIABLE)}
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = Process.start(
                    [sys.executable, "-P", *command[:-1], f"{command[-1]}{theirs.fileno()}"],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *pass_fds),
                    env=inherited | (environment or {}),
                    process_group=0,
                )
            except BaseException:
                writer.close()
                raise
        child = cls(title, process, writer)
        child._listening = asyncio.create_task(child._listen(reader))
        writer.write(orders)
        return child

    @property
    def pid(self) -> int:
        """Its pid. No other process gets this number before :meth:`close`."""
        return self.process.pid

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.process.lives

    @property
    def ended_in_order(self) -> bool:
        """Whether it has ended because it was told to (``shmring drain``), and not of a fault."""
        return self.process.returncode == 0 and not self.killed_because

    def kill(self, reason: str) -> None:
        """Kills it, if it still lives; ``reason`` completes a sentence about it."""
        self.killed_because = reason
        self.process.send(signal.SIGKILL)
        logger.error("%s (pid %d) %s and is killed", self.title, self.pid, reason)

    async def wait_until_ready(self, timeout_s: float | None) -> None:
        """Returns when it serves, or has ended. Kills it if neither happens within so many seconds."""
        waiting = [asyncio.ensure_future(self.ready.wait()), asyncio.ensure_future(self.process.ended())]
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if not done:
            self.kill(f"was not ready within {timeout_s:g} s")

    def count_heartbeat(self) -> None:
        """Counts a missed heartbeat, unless it has shown a sign of life since the last call, or is not ready yet."""
        self.silent_heartbeats = 0 if self._heard or not self.ready.is_set() else self.silent_heartbeats + 1
        self._heard = False

    def inform_of(self, states: list[FrontendState]) -> None:
        """Sends it the states of the frontends if they have changed, and if it has read the message before."""
        if (
            self.lives
            and self.ready.is_set()
            and states != self.informed_of
            and not self._writer.is_closing()
            and not self._writer.transport.get_write_buffer_size()
        ):
            self._writer.write(msgspec.json.encode(states) + b"\n")
            self.informed_of = states

    def close(self) -> None:
        """Closes the socket, and stops watching the process. One that still lives takes this for the end of the supervisor."""
        if self._listening is not None:
            self._listening.cancel()
        self._writer.close()
        self.process.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while words := await reader.read(_READ_NBYTES):
                self._heard = True
                self.is_stuck = words.rfind(STUCK) > words.rfind(ALIVE)
                if READY in words:
                    self.ready.set()

    def describe_end(self) -> str:
        """Says how it ended."""
        how = f"{self.killed_because} and was killed" if self.killed_because else self.process.describe_end()
        return f"{self.title} (pid {self.pid}) {how}"


async def end_children(children: Iterable[Child], timeout_s: float, hurry: asyncio.Event) -> None:
    """Tells children to end. Kills those that still live after ``timeout_s``, or as soon as ``hurry`` is set."""
    living = [child for child in children if child.lives]
    if not living:
        return
    waiting: asyncio.Future[Any] = asyncio.gather(*(child.process.ended() for child in living))
    hurrying: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
    for child in living:
        child.process.send(signal.SIGTERM)
    await asyncio.wait([waiting, hurrying], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    for child in living:
        if child.lives:
            told = "there is a hurry" if hurry.is_set() else f"it did not end within {timeout_s:g} s after it was told to"
            child.process.send(signal.SIGKILL)
            logger.warning("%s (pid %d) is killed: %s", child.title, child.pid, told)
    await waiting
    for child in living:
        child.close()
