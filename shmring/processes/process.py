"""A process, seen by the program that starts or watches it: when it is ready, its signals and its end.

A pidfd shows when the process has ended. Signals are sent through it, too, because another process may have got the pid
meanwhile. A program that is started here writes one line of JSON to a pipe when it is ready
(:func:`shmring.processes.child.say_ready`). If it dies before that, the kernel closes the pipe, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import msgspec

__all__ = ["Process", "ProcessError"]

_PIECE_NBYTES = 4096  # of a ready line, read at once

_Word = TypeVar("_Word")


class ProcessError(Exception):
    """A process ended before it was ready, or was not ready in time."""


class Process:
    """A child of this process (:meth:`start`), or any other process. At the end of a ``with`` block it is killed.

    Args:
        pid: of a process that lives.
        popen: of a child.
        word_fd: the pipe of a child's ready line.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int, popen: subprocess.Popen[Any] | None = None, word_fd: int = -1) -> None:
        self.pid = pid
        self._popen = popen
        self._word_fd = word_fd
        self._pidfd = os.pidfd_open(pid)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_end: list[Callable[[], object]] = []

    @classmethod
    def start(cls, command: Sequence[str], *, ready_flag: str = "", pass_fds: Sequence[int] = (), **options: Any) -> Self:
        """Starts a program.

        Args:
            command: the program and its arguments.
            ready_flag: the option by which it is told the descriptor for its ready line, such as ``--ready-fd=``. With the
                number, this is its last argument. Empty: there is no ready line.
            pass_fds: descriptors that it inherits.
            options: of :class:`subprocess.Popen`.
        """
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            word_fd = -1
            if ready_flag:
                word_fd, theirs = os.pipe()
                on_failure.callback(os.close, word_fd)
                always.callback(os.close, theirs)
                command, pass_fds = [*command, f"{ready_flag}{theirs}"], (*pass_fds, theirs)
            popen = subprocess.Popen(command, pass_fds=pass_fds, **options)
            on_failure.callback(popen.wait)
            on_failure.callback(popen.kill)
            process = cls(popen.pid, popen, word_fd)
            on_failure.pop_all()
            return process

    @property
    def lives(self) -> bool:
        """Whether it has not ended. False after :meth:`close`."""
        return self._pidfd >= 0 and not _is_readable(self._pidfd, 0)

    @property
    def returncode(self) -> int | None:
        """Of a child that has ended: its exit code, or minus the number of the signal that killed it. Else ``None``."""
        return None if self._popen is None else self._popen.poll()

    def wait_until_ready(self, kind: type[_Word], limit_s: float | None = None) -> _Word:
        """Blocks until it is ready; returns its ready line.

        Raises:
            ProcessError: it has ended, or was not ready in time.
        """
        if not _is_readable(self._word_fd, limit_s):
            raise ProcessError(_late(limit_s))
        return self._read_word(kind)

    async def until_ready(self, kind: type[_Word], limit_s: float) -> _Word:
        """Does the same, without blocking the loop.

        Raises:
            ProcessError: as above.
        """
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._word_fd, readable.set)
        try:
            async with asyncio.timeout(limit_s):
                await readable.wait()
        except TimeoutError:
            raise ProcessError(_late(limit_s)) from None
        finally:
            loop.remove_reader(self._word_fd)
        return self._read_word(kind)

    def _read_word(self, kind: type[_Word]) -> _Word:
        os.set_blocking(self._word_fd, True)  # uvloop has changed that
        word = b""
        while not word.endswith(b"\n") and (piece := os.read(self._word_fd, _PIECE_NBYTES)):
            word += piece
        if not word:
            raise ProcessError("did not start")
        try:
            return msgspec.json.decode(word, type=kind)
        except msgspec.DecodeError as error:
            raise ProcessError(f"said {word[:80]!r} where it says that it is ready: {error}") from None

    def line(self) -> str:
        """Returns the next line that a child writes to its pipe, without the newline; empty at the end."""
        assert self._popen is not None
        assert self._popen.stdout is not None, "a child with a pipe"
        line: str = self._popen.stdout.readline()
        return line.rstrip("\n")

    def write(self, text: str) -> None:
        """Writes to a child's standard input."""
        assert self._popen is not None
        assert self._popen.stdin is not None, "a child with a pipe"
        self._popen.stdin.write(text)
        self._popen.stdin.flush()

    def rest(self, limit_s: float) -> str:
        """Closes a child's standard input; returns what it writes to its pipe until its end.

        Raises:
            subprocess.TimeoutExpired: it takes longer.
        """
        assert self._popen is not None, "a child"
        rest, _ = self._popen.communicate(timeout=limit_s)
        return rest or ""

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still lives."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Calls back once, in the running loop, when it has ended."""
        self._on_end.append(call)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pidfd, self._ended)

    async def ended(self) -> int | None:
        """Returns its :attr:`returncode` when it has ended."""
        if self.lives:
            over = asyncio.Event()
            self.when_ended(over.set)
            await over.wait()
        return self.returncode

    def wait(self, limit_s: float | None = None) -> int | None:
        """Blocks until it has ended; returns its :attr:`returncode`.

        Raises:
            TimeoutError: it takes longer.
        """
        if self.lives and not _is_readable(self._pidfd, limit_s):
            raise TimeoutError(f"process {self.pid} did not end within {limit_s:g} s")
        return None if self._popen is None else self._popen.wait()

    def stop(self, limit_s: float) -> int | None:
        """Tells it to end (SIGTERM), and kills it if it takes longer; returns its :attr:`returncode`."""
        self.send(signal.SIGTERM)
        try:
            return self.wait(limit_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            return self.wait()

    def describe_end(self) -> str:
        """Says how a child has ended; its name stands before this."""
        code = self.returncode
        assert code is not None, "it has ended, and is a child"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"

    def close(self) -> None:
        """Stops watching it, and closes a child's pipes. Nothing may be waiting for its end. Twice is once."""
        self._stop_watching()
        for fd in (self._pidfd, self._word_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._word_fd = -1
        for pipe in () if self._popen is None else (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # it has not read all that was written
                    pipe.close()

    def kill(self) -> None:
        """Kills it, waits for its end and closes it. Twice is once."""
        if self._pidfd >= 0:
            self.send(signal.SIGKILL)
            self.wait()
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _ended(self) -> None:
        self._stop_watching()
        for call in self._on_end:
            call()
        self._on_end.clear()

    def _stop_watching(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        self._loop = None


def _late(limit_s: float | None) -> str:
    return f"was not ready within {limit_s:g} s"


def _is_readable(fd: int, limit_s: float | None) -> bool:
    """Waits until a descriptor can be read, or is at its end; a pidfd, until the process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else max(0.0, limit_s) * 1e3))
