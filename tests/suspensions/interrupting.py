"""Interrupts a call the k-th time that it suspends."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar, cast

_Result = TypeVar("_Result")


class Thrown(Exception):
    """What a test throws into a call."""


class Interruption(enum.Enum):
    """How a call is interrupted."""

    BEFORE = "before"  # cancelled while what it awaits has not happened
    AFTER = "after"  # cancelled when that has just happened, and the call has not gone on
    TWICE = "twice"  # cancelled, and again at its next suspension
    THROWN = "thrown"  # by another exception than a cancellation


class Interrupted(Generic[_Result]):
    """Awaits a call, and interrupts it.

    Args:
        call: that is awaited.
        at: the number of the suspension, from 1 on.
        how: see there.

    Attributes:
        suspensions: so far.
        has_happened: whether the call was interrupted.
    """

    def __init__(self, call: Awaitable[_Result], at: int, how: Interruption) -> None:
        self._call = call
        self._at = at
        self._how = how
        self.suspensions = 0
        self.has_happened = False

    def __await__(self) -> Generator[Any, Any, _Result]:
        steps = cast(Generator[Any, Any, _Result], self._call.__await__())
        task = asyncio.current_task()
        assert task is not None
        error: BaseException | None = None
        value: Any = None
        while True:
            try:
                awaited = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as ended:
                return cast(_Result, ended.value)
            value = error = None
            self.suspensions += 1
            if self._is_here():
                self.has_happened = True
                if self._how is Interruption.THROWN:
                    if awaited is not None:
                        awaited._asyncio_future_blocking = False  # else the task takes it for awaited
                        awaited.cancel()  # as a cancellation does: else a loop goes on looking at a socket that is closed
                    error = Thrown("thrown in")
                    continue
                self._cancel(task, awaited)
            try:
                value = yield awaited
            except BaseException as raised:  # noqa: BLE001 - it is the call's
                error = raised

    def _is_here(self) -> bool:
        again = self._how is Interruption.TWICE and self.suspensions == self._at + 1
        return self.suspensions == self._at or again

    def _cancel(self, task: asyncio.Task[Any], awaited: Any) -> None:
        if self._how is Interruption.AFTER and awaited is not None:
            awaited.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)
