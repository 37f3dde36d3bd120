"""An event loop in which nothing happens by itself: the shells of the product run in it, one callback at a time.

Tasks, futures and timers are asyncio's own. What is ready runs in the order in which it became so, as in any loop; when the
next of it runs, and whether a timer fires, is an action of the simulation. So what other processes do can come between any two.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, cast

from tests.model.inside import inner_of
from tests.simulation.scenario import require

NOBODY_KNOCKS = -1  # the descriptor of a listening socket: whoever comes, comes by an action


class _Running:
    """Of a loop; a class, as loops are entered some ten times in each action."""

    __slots__ = ("_loop", "_outer")

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.is_touched = True
        self._outer = asyncio._get_running_loop()
        asyncio._set_running_loop(cast(Any, self._loop))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        asyncio._set_running_loop(self._outer)
        if kind is None:
            self._loop.look()
            self._loop._raise()


class SimulatedLoop:
    """See the head of this file.

    Args:
        never: names of callbacks whose timers never fire: those that only write to a log.

    Attributes:
        now: its time, which whoever has the loop moves on.
        ready: what runs next, in order.
        timers: that were set and neither fired nor were cancelled.
        is_touched: whether something has happened in it since somebody has set this to False.
    """

    def __init__(self, never: frozenset[str] = frozenset()) -> None:
        self.now = 0.0
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[asyncio.TimerHandle] = []
        self.is_touched = False
        self._never = never
        self._readers: dict[int, Callable[[], object]] = {}
        self._heard: set[int] = set()  # descriptors whose callback is ready
        self._poll = select.poll()
        self._error: BaseException | None = None
        self._is_over = False  # its process has ended

    # -- for the simulation ------------------------------------------------------------------------------------------------

    def running(self) -> _Running:
        """What happens inside happens in this loop, as a callback of it that nobody waits for."""
        return _Running(self)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Makes a task, and runs it as far as it comes at once."""
        task = asyncio.Task(coroutine, loop=cast(Any, self))
        try:
            self.run(self.ready.pop())
            return task
        finally:
            del task  # as in run()

    def run_next(self) -> None:
        """Runs one callback. What it raises comes out here."""
        self.run(self.ready.popleft())

    def fire(self) -> None:
        """Of the timers of no moments, that fires whose time comes first."""
        timer = self.other_timers[0]
        self.now = max(self.now, timer.when())
        self._fire(timer)

    def pass_moment(self) -> None:
        """Another moment has passed for those that wait. It is none of the simulation's clock."""
        self._fire(*self.moments)

    def _fire(self, timer: asyncio.TimerHandle) -> None:
        self.timers.remove(timer)
        try:
            self.run(timer)
        finally:
            del timer  # as in run()

    @property
    def moments(self) -> list[asyncio.TimerHandle]:
        """The timer of the next moment, if somebody waits for whom moments pass."""
        return [timer for timer in self.timers if _is_moment(timer)]

    @property
    def other_timers(self) -> list[asyncio.TimerHandle]:
        """All other timers, that whose time comes first before others."""
        return sorted((timer for timer in self.timers if not _is_moment(timer)), key=lambda timer: timer.when())

    def run(self, handle: asyncio.Handle) -> None:
        """Runs a callback that was taken from what is ready."""
        if handle.cancelled():
            return
        try:
            with self.running():
                handle._run()
        finally:
            # What a task has raised holds its frames; since Python 3.12 these hold their callers', and so this one. With the
            # handle here the task would hold itself, and what it was about would live on until there is a collection.
            del handle

    def run_all(self) -> None:
        """Runs what is ready, and what becomes so meanwhile."""
        while self.ready:
            self.run_next()

    def look(self) -> None:
        """What has become readable has its callback called."""
        if not self._readers:
            return
        for descriptor, _ in self._poll.poll(0):
            if descriptor not in self._heard:
                self._heard.add(descriptor)
                self.call_soon(self._hear, descriptor)

    def is_heard(self, name: str) -> bool:
        """Whether the callback of this name is about to be called for what has become readable."""
        return any(getattr(self._readers.get(descriptor), "__name__", "") == name for descriptor in self._heard)

    def _hear(self, descriptor: int) -> None:
        self._heard.discard(descriptor)
        if descriptor in self._readers:
            self._readers[descriptor]()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def tasks_ready(self) -> list[object]:
        """Returns whose turn it is next, in order: tasks, or None for what is none."""
        return [getattr(callback_of(handle), "__self__", None) for handle in self.ready]

    def plain_ready(self, tasks: Sequence[object]) -> list[Any]:
        """Returns what is ready as plain data: the places of tasks, and names of what is no task."""
        places = {id(task): place for place, task in enumerate(tasks) if task is not None}
        return [
            [places.get(id(task), -1), handle.cancelled(), "" if id(task) in places else _name_of(handle)]
            for task, handle in zip(self.tasks_ready(), self.ready, strict=True)
        ]

    def plain_timers(self, now: float) -> list[Any]:
        """Returns the timers of no moments in order as plain data, and whether their time has come."""
        return [[_name_of(timer), timer.when() <= now] for timer in self.other_timers]

    def clear(self) -> None:
        """Its process has ended."""
        self._is_over = True
        self.ready.clear()
        self.timers.clear()
        for descriptor in tuple(self._readers):
            self.remove_reader(descriptor)

    # -- for asyncio ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        return asyncio.Task(coroutine, loop=cast(Any, self), name=name)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, cast(Any, self), context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, cast(Any, self), context)
        if getattr(callback, "__name__", "") not in self._never:
            self.timers.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self.timers:
            self.timers.remove(handle)

    def add_reader(self, descriptor: int, callback: Callable[[], object]) -> None:
        if descriptor == NOBODY_KNOCKS:
            return
        self._readers[descriptor] = callback
        self._poll.register(descriptor, select.POLLIN)

    def remove_reader(self, descriptor: int) -> bool:
        if self._readers.pop(descriptor, None) is None:
            return False
        self._poll.unregister(descriptor)
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback has raised, or a task at whose error nobody has looked; who is dropped with its process has none."""
        error = context.get("exception")
        if error is not None and not self._is_over:
            self._error = error


def _is_moment(timer: asyncio.TimerHandle) -> bool:
    return _name_of(timer) == "_moment_passed"


def _name_of(handle: asyncio.Handle) -> str:
    return str(getattr(callback_of(handle), "__name__", ""))


def callback_of(handle: asyncio.Handle) -> Any:
    """Returns what a handle calls."""
    return cast(Any, handle)._callback


def waited_for(task: asyncio.Task[Any]) -> Any:
    """Returns the future that a task waits for; None: its turn to run has come."""
    return cast(Any, task)._fut_waiter


def came_to(task: asyncio.Task[Any]) -> Any:
    """Returns what has come to a task that has not run since; None: nothing, or an error."""
    future = waited_for(task)
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def require_obeyed(task: asyncio.Task[Any], who: str) -> None:
    """Raises if a task that has ended was cancelled by nobody, or has gone on though it was cancelled."""
    if task.cancelled():
        require(task.cancelling() > 0, f"a {who} was cancelled by nobody")
    else:
        require(task.exception() is not None or not task.cancelling(), "a cancellation was swallowed")


def local_of(task: Any, function: str, name: str) -> Any:
    """Returns what a local variable of a coroutine is, in which a task waits; None where there is none of it."""
    coroutine = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and frame.f_code.co_name == function:
            return frame.f_locals.get(name)
        coroutine = getattr(coroutine, "cr_await", None) or inner_of(coroutine)
    return None
