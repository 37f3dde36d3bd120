"""Timeouts of calls: one heap and one timer of the loop for all callers of a client.

A timer for each request takes as long as a small message, and hardly any of them ever goes off. Here a request with a
``timeout`` is an entry in a heap, which is marked when the request is over, and taken out when its time has come or when most
entries are marked.

A deadline ends its task's waiting by cancelling it, and turns that cancellation, and no other, into a ``TimeoutError``.

Source: telling one's own cancellation from others by ``cancelling`` and ``uncancel`` is how ``asyncio.timeout`` does it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from types import TracebackType

from shmring.core.compiled import NoDeadline, no_deadline
from shmring.door import timeout_of

__all__ = ["Deadline", "Deadlines"]

_EARLY_S = 0.001  # a loop's timer may go off too early by this much
_FEW = 64  # entries: so many may be kept after they are over


class Deadlines:
    """The deadlines of one client, in the loop that it is used in."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()
        self._over = 0  # entries of blocks that were left
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it goes off; uvloop's can't be asked if that is at once

    def within(
        self, timeout: float | None, waits_for: Callable[[], str], *, until_s: float | None = None
    ) -> Deadline | NoDeadline:
        """Bounds a ``with`` block in time. This is where a call's ``timeout`` comes in.

        Args:
            timeout: as of :func:`~shmring.door.timeout_of`: seconds, from now or up to ``until_s``.
            waits_for: says what the block waits for, for the error's text.
            until_s: the deadline, in the loop's time.

        Raises:
            TypeError, ValueError: this is no timeout.
            TimeoutError: on leaving the block, if it took longer. Its text says what was waited for.
        """
        seconds = None if timeout is None else timeout_of(timeout)
        return no_deadline if seconds is None else Deadline(self, seconds, waits_for, until_s)

    def add(self, deadline: Deadline, until_s: float) -> None:
        """For a deadline: its block is entered. If the loop can set no timer, nothing has changed."""
        if self._timer is None or until_s < self._timer_s:
            self._set_timer(until_s)
        heapq.heappush(self._heap, (until_s, next(self._numbers), deadline))

    def left(self) -> None:
        """For a deadline: its block was left."""
        self._over += 1
        if self._over > _FEW and self._over > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].task is not None]
            heapq.heapify(self._heap)
            self._over = 0

    def _set_timer(self, until_s: float) -> None:
        timer = asyncio.get_running_loop().call_at(until_s, self._expire)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = timer, until_s

    def _expire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        try:
            while self._heap and (self._heap[0][2].task is None or self._heap[0][0] <= now_s + _EARLY_S):
                deadline = heapq.heappop(self._heap)[2]
                if deadline.task is None:
                    self._over -= 1
                else:
                    deadline.expire()
        finally:  # if one of them can't say what it waits for, the others are still to come
            if self._heap:
                self._set_timer(self._heap[0][0])


class Deadline:
    """See :meth:`Deadlines.within`.

    Attributes:
        waits_for: as there; it may change while the block is entered.
        task: that is in the block; None: none is.
    """

    __slots__ = ("_cancelling", "_deadlines", "_timeout", "_until_s", "_waited_for", "task", "waits_for")

    def __init__(self, deadlines: Deadlines, timeout: float, waits_for: Callable[[], str], until_s: float | None) -> None:
        self._deadlines = deadlines
        self._timeout = timeout
        self._until_s = until_s
        self._waited_for: str | None = None  # when the time was over
        self._cancelling = 0
        self.waits_for = waits_for
        self.task: asyncio.Task[object] | None = None

    def __enter__(self) -> Deadline:
        self.task = asyncio.current_task()
        if self.task is None:
            raise RuntimeError("timeout= can be used in a task only")
        self._cancelling = self.task.cancelling()
        until_s = self._until_s
        if until_s is None:
            until_s = self.task.get_loop().time() + self._timeout
        self._deadlines.add(self, until_s)
        return self

    def expire(self) -> None:
        """The time of the task in the block is over: it waits no longer."""
        assert self.task is not None
        self._waited_for = ""
        try:
            self._waited_for = self.waits_for()
        finally:  # whatever the asking raises
            self.task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        task, self.task = self.task, None
        assert task is not None
        self.waits_for = _nothing  # the heap may keep this until its time has come
        if self._waited_for is None:
            self._deadlines.left()
        elif task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError(f"it took longer than the {self._timeout:g} s it was given: {self._waited_for}") from None


def _nothing() -> str:
    return ""
