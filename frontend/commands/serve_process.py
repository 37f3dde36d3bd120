"""``shmring serve`` as a process, for programs that start a server: the demonstration, benchmarks and tests.

It ends with whoever started it, even if that is killed: it sees the end of its standard input. Its supervisor takes engines and
frontends with it, also if it is killed itself. What it says on stdout is for people; whoever started it is told on a descriptor
of its own (``--ready-fd``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from shmring.frontend.commands.serve import without_options
from shmring.frontend.processes.supervisor import Serving
from shmring.processes.process import Process, ProcessError
from shmring.service.import_path import without_working_directory

__all__ = ["PROGRAM", "ServerError", "ServerProcess"]

#: The program, as Python takes it. -P: nothing is imported from the working directory.
PROGRAM = ("-P", "-m", "shmring.frontend.cli", "serve", "--stop-with-stdin")

_LAST_WORDS_LENGTH = 2000  # of what a server that failed wrote to stderr


class ServerError(RuntimeError):
    """The server did not start."""


class ServerProcess:
    """A server. Made by :meth:`start`; used with ``with``, which stops it with all of its processes.

    Attributes:
        process: of its supervisor.
        url: where it serves, when it is ready.
        health_url: of its supervisor, likewise, with ``--health-port``.
        engines, frontends: their pids, likewise.
        killed: pids of those that did not stop when they were told to.
    """

    def __init__(self, process: Process, errors: Path | None, stop_limit_s: float) -> None:
        self.process = process
        self.url = ""
        self.health_url: str | None = None
        self.engines: list[int] = []
        self.frontends: list[int] = []
        self.killed: list[int] = []
        self._errors = errors
        self._stop_limit_s = stop_limit_s
        self._parts: list[Process] = []

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] = os.environ,
        errors: Path | None = None,
        stop_limit_s: float = 10.0,
        **options: Any,
    ) -> Self:
        """Starts one.

        Args:
            arguments: of ``shmring serve``. Its options don't come from variables.
            program: that is started.
            environment: its own; it gets no variables for options from there.
            errors: a file for what it writes to stderr. None: to ours.
            stop_limit_s: how long it may take to stop, before it is killed.
            options: of :class:`subprocess.Popen`.
        """
        with contextlib.ExitStack() as stack:
            process = Process.start(
                [sys.executable, *program, *arguments],
                ready_flag="--ready-fd=",
                env=without_options(without_working_directory(environment)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=None if errors is None else stack.enter_context(errors.open("wb")),
                **options,
            )
        return cls(process, errors, stop_limit_s)

    def wait_until_ready(self, limit_s: float | None = None) -> None:
        """Blocks until it serves. How long that may take is also its own limit (``--start-timeout``).

        Raises:
            ServerError: it does not.
        """
        with self._starting():
            self._serves(self.process.wait_until_ready(Serving, limit_s))

    async def until_ready(self, limit_s: float) -> None:
        """Does the same, without blocking the loop.

        Raises:
            ServerError: as above.
        """
        with self._starting():
            self._serves(await self.process.until_ready(Serving, limit_s))

    @property
    def is_whole(self) -> bool:
        """Whether all processes live that it had when it was ready."""
        return all(process.lives for process in (self.process, *self._parts))

    @property
    def last_words(self) -> str:
        """The end of what it wrote to its file of errors."""
        return "" if self._errors is None else self._errors.read_text(errors="replace").strip()[-_LAST_WORDS_LENGTH:]

    def stop(self) -> int | None:
        """Tells it to stop, and kills whatever does not; returns its exit code. Twice is once."""
        until_s = time.monotonic() + self._stop_limit_s
        self.process.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            for process in (self.process, *self._parts):  # these end by themselves when their supervisor was killed
                process.wait(until_s - time.monotonic())
        for process in (self.process, *self._parts):
            self.killed += [process.pid] * process.lives
            process.kill()
        self._parts.clear()
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self.process.kill()  # if stopping was interrupted

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except ProcessError as error:
            self.stop()
            words = "; its own message is above" if self._errors is None else f":\n{self.last_words}" * bool(self.last_words)
            raise ServerError(f"the server {error}{words}") from None

    def _serves(self, word: Serving) -> None:
        self.url, self.engines, self.frontends = word.url, word.engines, word.frontends
        self.health_url = word.health_url
        for pid in (*word.engines, *word.frontends):
            with contextlib.suppress(ProcessLookupError):  # a frontend that has died already is replaced
                self._parts.append(Process(pid))
