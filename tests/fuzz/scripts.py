"""Scripts of the fuzzer: bytes that say what happens, step by step, and the stage on which it does.

One process has both ends, with real sockets, descriptors and message rings between them. The loop's clock stands still but
for steps that put it forward, so nothing depends on how fast a machine is. After a script, whatever went wrong where no
caller sees it counts as well, and no descriptor may be left.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.printable import printable_lines
from shmring.errors import ShmringError

NAME = "hostile"
_TURNS = 3  # of the loop after each step: a bell is heard, a record taken, and who waited for it goes on
MOST_TURNS = 200  # in which everybody must have come to an end

#: What stands in the place of a number: small ones, those at which something begins or ends, and those that no register has.
NUMBERS = (
    *(0, 1, 2, 3, 7, 64, 100, BLOCK_NBYTES - 1, BLOCK_NBYTES, 2 * BLOCK_NBYTES, 4 * BLOCK_NBYTES, 16 << 10),
    *(number * BLOCK_NBYTES for number in range(12, 17)),
    *(15 * BLOCK_NBYTES - 64, 1 << 20),
    *((1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 40) + 1, 1 << 44, 1 << 61),
    *((1 << 62) - BLOCK_NBYTES, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1),
)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still, but for who puts it forward."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.failures: list[dict[str, Any]] = []
        super().__init__()
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self.now_s


@functools.cache
def stage() -> _Loop:
    loop = _Loop()
    atexit.register(loop.close)
    gc.collect()
    gc.freeze()  # what was imported is no garbage of an input, and looking at it takes far longer than an input
    return loop


@functools.cache
def listening() -> tuple[socket.socket, str]:
    """A socket that clients find under the engine's name, and its directory; one for all inputs of this process."""
    directory = tempfile.mkdtemp(prefix="shmring-fuzz-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    atexit.register(listening.close)
    listening.bind(os.path.join(directory, f"{NAME}.sock"))
    listening.listen(8)
    listening.setblocking(False)
    return listening, directory


class _Log(logging.Handler):
    """Nothing that an engine says may reach a log as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.unprintable: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().isprintable():
            self.unprintable.append(record.getMessage())


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """What goes wrong where no caller sees it counts as well."""
    logger, log, unraisable = logging.getLogger("shmring"), _Log(), []
    before, propagates, hook = _descriptors(), logger.propagate, sys.unraisablehook
    logger.addHandler(log)
    logger.propagate, sys.unraisablehook = False, lambda what: unraisable.append(repr(what.exc_value))
    stage().failures.clear()
    try:
        yield
        gc.collect()
    finally:
        logger.removeHandler(log)
        logger.propagate, sys.unraisablehook = propagates, hook
    assert not unraisable, f"raised where nobody catches it: {unraisable}"
    assert not stage().failures, f"raised in a callback: {stage().failures}"
    assert not log.unprintable, f"a log has what a terminal would carry out: {log.unprintable}"
    assert _descriptors() == before, "descriptors are left"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def play(scene: Coroutine[Any, Any, None]) -> None:
    listening(), stage()  # which have descriptors
    with _watched():
        stage().run_until_complete(scene)


async def turns(count: int = _TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def over(tasks: list[asyncio.Future[Any]]) -> None:
    """Waits until all of them are done; whatever they wait for is a short time away, or never comes."""
    for _ in range(MOST_TURNS):
        if all(task.done() for task in tasks):
            return
        stage().now_s += 0.5
        await asyncio.sleep(0)
    raise AssertionError(f"still waiting: {[task for task in tasks if not task.done()]}")


def check_error(error: BaseException | None) -> None:
    """Callers get what they are told of, with a text that can be printed."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return
    assert isinstance(error, ShmringError | TimeoutError | msgspec.ValidationError), f"{type(error).__name__}: {error}"
    assert str(error) == printable_lines(str(error)), repr(error)


class Steps:
    """The bytes of a script, taken one after the other; when they are used up, they are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def bytes(self) -> bytes:
        """A length, and so many bytes."""
        length = self.byte()
        self._at += length
        return self._data[self._at - length : self._at]


def changed(message: list[Any], steps: Steps, numbers: Sequence[int]) -> list[Any]:
    """A message with some of its numbers replaced. None are if the script goes on with a zero."""
    for _ in range(steps.byte() % 4):
        place, chosen = steps.byte(), steps.byte()
        pool = numbers if numbers and chosen & 128 else NUMBERS
        number = pool[(chosen & 127) % len(pool)]
        at = 1 + place % max(1, len(message) - 1)
        if at >= len(message):
            continue
        value = message[at]
        if isinstance(value, Ext):
            data = bytearray(value.data)
            start = 8 * (place >> 4) % max(1, len(data) - 7)
            data[start : start + 8] = (number & (1 << 64) - 1).to_bytes(8, "little")
            message[at] = Ext(value.code, bytes(data))
        elif isinstance(value, list) and value:
            value[place % len(value)] = number
        elif isinstance(value, str):
            message[at] = chr(chosen) + value
        else:
            message[at] = number
    return message
