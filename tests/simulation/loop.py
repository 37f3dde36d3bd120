"""An event loop in which nothing happens by itself: the shells of the product run in it, one callback at a time.

Tasks, futures and timers are asyncio's own. What is ready runs in the order in which it became so, as in any loop; when the
next of it runs, and whether a timer fires, is an action of the simulation. So what other processes do can come between any two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, cast

__all__ = ["SimulatedLoop", "callback_of"]


class SimulatedLoop:
    """See the head of this file.

    Attributes:
        now: its time, which only a timer that fires moves on.
        ready: what runs next, in order.
        timers: that were set and neither fired nor were cancelled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[asyncio.TimerHandle] = []
        self._error: BaseException | None = None

    # -- for the simulation ------------------------------------------------------------------------------------------------

    def run_next(self) -> None:
        """Runs one callback. What it raises comes out here."""
        self._run(self.ready.popleft())

    def run_last(self) -> None:
        """Runs what has become ready last, as if whoever made it so were that task itself."""
        self._run(self.ready.pop())

    def fire(self) -> None:
        """The timer whose time comes first fires."""
        timer = min(self.timers, key=lambda timer: timer.when())
        self.timers.remove(timer)
        self.now = max(self.now, timer.when())
        self._run(timer)

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio._set_running_loop(cast(Any, self))
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def tasks_ready(self) -> list[object]:
        """Returns whose turn it is next, in order: tasks, or None for what is none."""
        return [getattr(callback_of(handle), "__self__", None) for handle in self.ready]

    # -- for asyncio ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, cast(Any, self), context)
        self.ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, cast(Any, self), context)
        self.timers.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self.timers:
            self.timers.remove(handle)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback has raised. Of tasks that were dropped with their process nothing is said."""
        if "handle" in context:
            self._error = context["exception"]


def callback_of(handle: asyncio.Handle) -> Any:
    """Returns what a handle calls."""
    return cast(Any, handle)._callback
