"""Threads of tests: what they return, and how they are stopped from outside."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["Stop", "Thread"]


class Stop(BaseException):
    """Raised in another thread."""


class Thread(threading.Thread):
    """A thread that has begun, and what it returned or raised."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._work, self._arguments = work, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised where this thread is waited for
            self.error = error.with_traceback(None)

    def ended(self, timeout: float = 10.0) -> Any:
        """Waits for its end, and returns what it returned."""
        self.join(timeout)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self) -> None:
        """Sets an exception in it from outside."""
        assert self.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Stop))

    def is_stopped(self) -> None:
        """Checks that this exception has ended it."""
        with pytest.raises(Stop):
            self.ended()
