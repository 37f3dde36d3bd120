"""A program of the benchmark's in another environment, which carries out one order after the other.

Orders and answers are JSON, and travel through a pipe: the program's last argument is the number of its end. It says that it is
ready first, and ends with the pipe (:func:`orders`). It and all that it starts are one session, which is ended as a whole.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import msgspec

from bench.children import BenchError, described
from bench.machine import ROOT
from shmring.processes.process import Process

_READY, _FAILED = b"ready", b"failed: "  # the second before a reason, where an answer would be
_START_LIMIT_S = 900.0  # it imports vLLM, or SGLang, whose start takes 100 seconds of CPU
_GRACE_S = 30.0  # Ray Serve takes some seconds to end
_TIDYING_S = 5.0  # after it has ended, for what multiprocessing has started to remove shared memory
_LAST_WORDS_NBYTES = 600

_Answer = TypeVar("_Answer")
_Order = TypeVar("_Order")


class Program:
    """Started with the first order, and again after one that failed. Each order has a limit of time.

    ``environment`` has all of its variables, but for where this package is.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> None:
        self._command, self._environment, self._limit_s = command, environment, limit_s
        self._process: Process | None = None
        self._control: Connection

    def start(self) -> None:
        """Starts it, unless it runs; raises BenchError if it does not start."""
        if self._process is not None:
            return
        self._control, control = multiprocessing.Pipe()
        with control, tempfile.TemporaryFile() as log:
            self._process = Process.start(
                [*self._command, str(control.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**self._environment, "PYTHONPATH": str(ROOT)},
                pass_fds=[control.fileno()],
                start_new_session=True,
            )
            control.close()
            if not self._control.poll(_START_LIMIT_S) or self._heard() != _READY:
                self.end()
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_WORDS_NBYTES))
                raise BenchError(f"{' '.join(self._command)} does not start: {log.read().decode(errors='replace').strip()}")

    def order(self, order: msgspec.Struct, kind: type[_Answer]) -> _Answer:
        """Has it carry an order out; returns its answer, or raises BenchError if that failed, it has died or took too long."""
        self.start()
        with contextlib.suppress(OSError):
            self._control.send_bytes(msgspec.json.encode(order))
        if not self._control.poll(self._limit_s) or not (answer := self._heard()):
            self.end()
            raise BenchError("it did not end in time, or its program has died")
        if answer.startswith(_FAILED):
            raise BenchError(answer.removeprefix(_FAILED).decode())
        return msgspec.json.decode(answer, type=kind)

    def _heard(self) -> bytes:
        """What it says; nothing if it has ended."""
        try:
            return self._control.recv_bytes()
        except (EOFError, OSError):
            return b""

    def end(self) -> None:
        """Ends it, and all that it has started. Twice is once."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with process:
            self._control.close()  # which ends it, if it waits for an order
            with contextlib.suppress(TimeoutError):
                process.wait(_GRACE_S)
            until_s = time.monotonic() + _TIDYING_S
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < until_s:
                    os.killpg(process.pid, 0)  # is anybody there?
                    time.sleep(0.02)
                os.killpg(process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


# -- in the program ------------------------------------------------------------------------------------------------------


def orders(kind: type[_Order]) -> Iterator[tuple[_Order, Callable[[object], None]]]:
    """Says that the program is ready, and yields orders until nobody gives any, each with what takes its answer, or error."""
    control = Connection(int(sys.argv[-1]))

    def answer(found: object) -> None:
        control.send_bytes(_FAILED + described(found).encode() if isinstance(found, Exception) else msgspec.json.encode(found))

    control.send_bytes(_READY)
    with contextlib.suppress(EOFError):
        while True:
            yield msgspec.json.decode(control.recv_bytes(), type=kind), answer
