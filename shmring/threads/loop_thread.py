"""An event loop in a thread of its own, and how other threads have things done there.

Theory of operation. One end of shmring lives in the loop, and nothing of it is touched by another thread. A thread that wants
something puts a :class:`LoopCall` in a queue, wakes the loop, and sleeps until it is answered. What nobody waits for is
*posted*: it goes through the same queue, so that what one thread asks for is done in that order.

Posting never waits and takes no lock, so a finaliser may do it in any thread and at any moment: also when the garbage collector
runs it in the loop's thread, or inside another call of this file. (The queue is a deque, whose ends are atomic.)

A call is answered once, and by the loop alone. Whoever leaves it early (``KeyboardInterrupt``, or another exception that was
raised from outside) posts that it was left: then its task is cancelled, or what it was given is undone. So nothing stays held,
and a thread that is interrupted never leaves a book half changed: the loop's thread is never interrupted.

Invariants: a call that was queued is answered, at the latest when the loop has ended; then by whoever finds it in the queue.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import uvloop

from shmring.core.compiled import Origin
from shmring.errors import ClosedError, LocalProtocolError
from shmring.threads.greenlets import check_threads

__all__ = ["LoopCall", "LoopThread", "keep", "within"]

_Result = TypeVar("_Result")


#: A signal that comes just before a thread falls asleep does not wake it, and an exception that another thread sets never does.
#: So whoever waits looks for them this often.
_LOOK_UP_S = 1.0

_NONE_NAMED: dict[str, Any] = {}  # nobody writes to it


class _End(Protocol):
    """What lives in the loop."""

    @property
    def close(self) -> Callable[..., Awaitable[None]]:
        """Ends it."""


def keep(result: Any) -> None:
    """What a call gives needs no undoing."""


class LoopCall:
    """Something that the loop does for a thread, which waits for it.

    Args:
        function: what to do, in the loop.
        arguments: of it.
        undo: what to do, in the loop, with a result that nobody takes.
        named: its further arguments, by name.

    Attributes:
        result, error: the answer; one of them.
        on_end: what the loop calls when this is answered, or was left.
    """

    __slots__ = ("_answered", "_task", "_undo", "arguments", "error", "function", "is_ended", "named", "on_end", "result")

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        undo: Callable[[Any], object],
        named: dict[str, Any] = _NONE_NAMED,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.named = named
        self._undo = undo
        self._answered = allocate_lock()
        self._answered.acquire()
        self.is_ended = False
        self.on_end: list[Callable[[], object]] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None

    # -- in the loop -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Does it, unless it was left before."""
        if self.is_ended:
            return
        try:
            result = self.function(*self.arguments, **self.named)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer(error=error)
            return
        finally:
            self.arguments, self.named = (), _NONE_NAMED  # the caller's payload, for example
        if isinstance(result, Awaitable):
            waiting = result if isinstance(result, Coroutine) else _awaited(result)
            self._task = asyncio.get_running_loop().create_task(waiting)
            self._task.add_done_callback(self._task_ended)
        else:
            self.answer(result)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        if task.cancelled():
            self.answer(error=asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.answer(error=error)
        else:
            self.answer(task.result())

    def answer(self, result: Any = None, *, error: BaseException | None = None) -> None:
        """Lets the thread go on; if it has gone, or was answered, the result is undone."""
        if self.is_ended:
            if error is None:
                self._undo(result)
            return
        self.result, self.error = result, error
        self._end()
        self._answered.release()

    def leave(self) -> None:
        """Its thread waits no more, and takes nothing."""
        if not self.is_ended:
            self._end()
            self.cancel()
        elif self.error is None:
            result, self.result = self.result, None
            self._undo(result)

    def cancel(self) -> None:
        """Ends its task, if it has one."""
        if self._task is not None:
            self._task.cancel()

    def _end(self) -> None:
        self.is_ended = True
        for callback in self.on_end:
            callback()
        self.on_end.clear()

    # -- in the thread that waits ------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Sleeps until it is answered, and looks up now and then."""
        while not self._answered.acquire(timeout=_LOOK_UP_S):
            pass

    def raise_error(self) -> NoReturn:
        """Raises what it was answered with."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error, self  # the error's traceback holds this frame


async def _awaited(waiting: Awaitable[_Result]) -> _Result:
    return await waiting


class _Question(LoopCall):
    """A call whose function gets the call, and has it answered, then or later.

    Args:
        timeout: seconds until it is answered with a TimeoutError.
        what: is waited for, for that error.
        function, arguments, undo: as of :class:`LoopCall`.
    """

    __slots__ = ("_timeout", "_what")

    def __init__(
        self,
        timeout: float | None,
        what: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        undo: Callable[[Any], object],
    ) -> None:
        super().__init__(function, arguments, undo)
        self._timeout = timeout
        self._what = what

    def begin(self) -> None:
        if self.is_ended:
            return
        try:
            self.function(self, *self.arguments)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer(error=error)
        if self._timeout is not None and not self.is_ended:
            timer = asyncio.get_running_loop().call_later(max(0.0, self._timeout), self._time_out, self._timeout)
            self.on_end.append(timer.cancel)

    def _time_out(self, timeout: float) -> None:
        self.answer(error=_timeout_error(timeout, self._what))


class LoopThread:
    """A loop in a thread of its own, and the end of shmring that lives in it.

    Args:
        what: the end, for messages: ``ring 'vision'``.
        make: makes it, in the loop.

    Raises:
        LocalProtocolError: threads are greenlets here.
    """

    def __init__(self, what: str, make: Callable[[], Awaitable[_End]]) -> None:
        check_threads()
        self._what = what
        self._make = make
        self._origin = Origin()
        self._loop = uvloop.new_event_loop()
        self._queue: deque[LoopCall | tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._opening = LoopCall(make, (), keep)
        self._life: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[tuple[Any, ...]] | None = None
        self._running: dict[LoopCall, None] = {}  # those that are not answered yet; only the loop's thread uses it
        self._is_closed = False
        self._is_over = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"shmring {what}", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether calls are taken."""
        return not (self._is_closed or self._origin.forked)

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked child."""
        return self._origin.forked

    def open(self) -> None:
        """Starts the thread, and waits until the end is there.

        Raises:
            BaseException: whatever making it raises; then the thread has ended.
        """
        try:
            try:
                self._thread.start()
            except RuntimeError:  # there are too many threads
                self._loop.close()
                raise
            self._opening.wait()
        except BaseException:
            self.post(self._abandon)
            raise
        if self._opening.error is not None:
            self._thread.join()
            self._opening.raise_error()

    def _abandon(self) -> None:
        self._is_closed = True
        if self._life is not None:
            self._life.cancel()

    def close(self, *arguments: Any) -> None:
        """Closes the end, and waits until its thread has ended. Whoever waits for something gets a ClosedError at once.

        In a forked child, where there is neither, nothing happens; nor in a finaliser while the interpreter ends.

        Args:
            arguments: of its ``close``.
        """
        self._check_thread()
        if self._origin.forked or sys.is_finalizing():  # its thread is not here, or never runs again
            return
        self._is_closed = True
        self.post(self._close, arguments)
        while (
            not self._is_over
        ):  # a signal handler may do the same in the middle of it, where Thread.join would wait for itself
            self._thread.join(_LOOK_UP_S)
        self._thread.join(_LOOK_UP_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- from any thread ---------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *arguments: Any, undo: Callable[[Any], object] = keep) -> Any:
        """Has a function called in the loop, or a coroutine run, and waits for its result.

        Args:
            function: a coroutine function, or one that never waits.
            arguments: of it.
            undo: what the loop does with the result if this thread is interrupted before it takes it.

        Raises:
            ClosedError: the end is closed, or is being closed meanwhile; or it belongs to the process that forked this one.
            LocalProtocolError: this is the loop's own thread, which would wait for itself.
            BaseException: whatever the function raises.
        """
        return self.result_of(LoopCall(function, arguments, undo))

    def ask(
        self,
        timeout: float | None,
        what: str,
        function: Callable[..., None],
        *arguments: Any,
        undo: Callable[[Any], object] = keep,
    ) -> Any:
        """Has the loop find something, and waits for it.

        Args:
            timeout: seconds.
            what: is waited for, for the error.
            function: called in the loop, with a :class:`LoopCall` and the arguments. It has the call answered, then or later.
            arguments, undo: as of :meth:`call`.

        Raises:
            TimeoutError: it took longer.
            ClosedError, LocalProtocolError: as :meth:`call`.
            BaseException: whatever the function raises, or answers with.
        """
        return self.result_of(_Question(timeout, what, function, arguments, undo))

    def result_of(self, call: LoopCall) -> Any:
        """Has a call carried out in the loop, and waits for its result. Raises what :meth:`call` does."""
        self.check_open()
        self._check_thread()
        try:
            self._queue.append(call)
            self._wake()
            call.wait()
            if call.error is None:  # no call from here on: an interruption comes before this or in the caller's code
                result, call.result = call.result, None
                return result
        except BaseException:
            self.post(call.leave)
            raise
        return call.raise_error()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has a function called in the loop, and does not wait. Where the loop has ended, nothing happens.

        From any thread, the loop's own included, and from finalisers.
        """
        if self._origin.forked:
            return
        self._queue.append((function, arguments))
        self._wake()

    def check_open(self) -> None:
        """Raises ClosedError unless this process may use the end."""
        self.check_process()
        if self._is_closed or sys.is_finalizing():
            raise self._closed_error()

    def check_process(self) -> None:
        """Raises ClosedError in a forked child."""
        if self._origin.forked:
            raise self._origin.stray(self._what, "open your own here")

    def _check_thread(self) -> None:
        if threading.get_ident() == self._thread.ident:
            raise LocalProtocolError(
                f"{self._what} was asked to wait in its own thread, which carries out what others wait for; callbacks and "
                "finalisers that run there may use what does not wait, or hand their work to another thread"
            )

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"{self._what} is closed")

    def _wake(self) -> None:
        if not self._is_over:
            try:
                self._loop.call_soon_threadsafe(self._carry_out)
                if not self._is_over:
                    return
            except RuntimeError:  # the loop was closed just now
                pass
        self._turn_away()

    def _turn_away(self) -> None:
        """The loop has ended: answers what nobody will carry out. Several threads may do this at once."""
        while True:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if isinstance(item, LoopCall):
                item.answer(error=self._closed_error())

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:
            pass  # whoever opened it was interrupted
        except Exception as error:  # noqa: BLE001 - it is raised where this is closed
            self._failure = error
        finally:
            self._is_closed = self._is_over = True
            self._turn_away()

    async def _live(self) -> None:
        self._life = asyncio.current_task()
        self._closing = asyncio.get_running_loop().create_future()
        if self._is_closed:  # whoever opens it was interrupted already
            return
        try:
            end = await self._make()
        except BaseException as error:  # noqa: BLE001 - it is raised where this is opened
            self._is_closed = True
            self._opening.answer(error=error)
            return
        arguments: tuple[Any, ...] = ()
        try:
            self._opening.answer()
            if not self._is_closed:
                arguments = await self._closing
        finally:
            self._is_closed = True
            for call in tuple(self._running):
                call.answer(error=self._closed_error())
                call.cancel()
            await end.close(*arguments)

    def _close(self, arguments: tuple[Any, ...]) -> None:
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(arguments)

    def _carry_out(self) -> None:
        # All that is there, and not only what this wake-up is for: a thread can be interrupted before it has woken the loop.
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if not isinstance(item, LoopCall):
                function, arguments = item
                function(*arguments)
            elif self._is_closed:
                item.answer(error=self._closed_error())
            else:
                item.begin()
                if not item.is_ended:
                    self._running[item] = None
                    item.on_end.append(functools.partial(self._running.pop, item))


async def within(timeout: float | None, what: Callable[[], str], waiting: Awaitable[_Result]) -> _Result:
    """Awaits something for so many seconds at most.

    Args:
        timeout: seconds; None: as long as it takes.
        what: says what is waited for when the time is over, for the error.
        waiting: for it.

    Raises:
        TimeoutError: it took longer, and was given up.
    """
    if timeout is None:
        return await waiting
    bound = asyncio.timeout(timeout)
    try:
        async with bound:
            return await waiting
    except TimeoutError:
        if not bound.expired():
            raise
    raise _timeout_error(timeout, what())


def _timeout_error(timeout: float, what: str) -> TimeoutError:
    return TimeoutError(f"it took longer than the {timeout:g} s it was given: {what}")
