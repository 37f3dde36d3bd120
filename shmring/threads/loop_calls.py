"""How threads have calls carried out in an event loop, and wait for them. Subclasses decide which thread runs the loop.

Theory of operation. A ring or client lives in the loop, and no code outside of the loop touches it. A thread has a
:class:`LoopCall` begun in the loop, and waits until it is answered. A call without a result is *posted*, and the thread does
not wait; the posted calls of one thread are carried out in order. The loop is run by a thread of its own
(:mod:`shmring.threads.loop_thread`) or by the calling threads (:mod:`shmring.threads.callers_loop`).

Posting never waits, so a finaliser may do it in any thread and at any moment: also when the garbage collector runs it in the
middle of the loop, or inside another call of this file. (The queue is a deque, whose ends are atomic.)

A call is answered once, and only in the loop. If its thread stops waiting (``KeyboardInterrupt``, or another exception from
outside), the thread posts this: then the call's task is cancelled, or its result is undone. So nothing stays held.

Invariants: a queued call is answered, at the latest when the loop has ended; then by the thread that finds it in the queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from _thread import allocate_lock
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

from shmring.core.compiled import Home
from shmring.errors import ClosedError
from shmring.memory.limits import check_open_files
from shmring.threads.greenlets import check_threads

__all__ = ["LOOK_UP_S", "LoopCall", "LoopEnd", "LoopRunner", "OPEN_FILES", "keep", "within"]

_Result = TypeVar("_Result")


#: A signal that comes just before a thread falls asleep does not wake it, and an exception that another thread sets never does.
#: So a waiting thread looks for them this often.
LOOK_UP_S = 1.0

#: Files that a loop opens, and as many for the ring, client or worker in it.
OPEN_FILES = 16

_NONE_NAMED: dict[str, Any] = {}  # it is never written to


class LoopEnd(Protocol):
    """The object that lives in the loop."""

    @property
    def close(self) -> Callable[..., Awaitable[None]]:
        """Ends it."""


def keep(result: Any) -> None:
    """For calls whose result needs no undoing."""


class LoopCall:
    """A call that the loop carries out for a waiting thread.

    Args:
        function: what to do, in the loop.
        arguments: of it.
        undo: called in the loop with a result that the thread does not take.
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
        """Carries it out. It was not left before: its thread asks for that later, in the same queue or inside the loop."""
        try:
            result = self.function(*self.arguments, **self.named)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer(error=error)
            return
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
        """Lets the thread go on; if the thread has stopped waiting, or got another answer, the result is undone."""
        if self.is_ended:
            if error is None:
                self._undo(result)
            return
        self.result, self.error = result, error
        try:
            self._end()
        finally:
            self._answered.release()

    def leave(self) -> None:
        """Its thread no longer waits, and takes no result."""
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
        try:
            while self.on_end:
                self.on_end.pop(0)()
        finally:
            if self.on_end:  # one has failed: the others are called as well
                self._end()

    # -- in the thread that waits ------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Sleeps until it is answered, and looks up now and then."""
        while not self._answered.acquire(timeout=LOOK_UP_S):
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
        timeout: seconds until it is answered with a TimeoutError, as :func:`~shmring.door.timeout_of` returns them.
        what: the name of what is waited for, for that error.
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
        try:
            self.function(self, *self.arguments)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer(error=error)
        if self._timeout is not None and not self.is_ended:
            timer = asyncio.get_running_loop().call_later(self._timeout, self._time_out, self._timeout)
            self.on_end.append(timer.cancel)

    def _time_out(self, timeout: float) -> None:
        self.answer(error=_timeout_error(timeout, self._what))


class LoopRunner:
    """A loop, the ring or client that lives in it, and the calls of threads. A subclass decides which thread runs the loop.

    Args:
        what: the end, for messages: ``ring 'vision'``.
        make: makes it, in the loop.
        make_loop: makes an event loop.

    Attributes:
        home: where it lives; threads ask it whether they may use it.
        is_direct: whether a call is carried out by the thread that makes it.

    Raises:
        LocalProtocolError: threads are greenlets here.
        OSError: this process has too few open files left.
    """

    is_direct = False

    def __init__(
        self, what: str, make: Callable[[], Awaitable[LoopEnd]], make_loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        check_threads()
        check_open_files(OPEN_FILES, what)
        self.home = Home(what, "open your own here")
        self._make = make
        self._context = contextvars.copy_context()  # of who opens the end; what it calls for others sees these variables
        self._loop = make_loop()
        self._queue: deque[LoopCall | tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._opening = LoopCall(make, (), keep)
        self._life: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[tuple[Any, ...]] | None = None
        self._running: dict[LoopCall, None] = {}  # those that are not answered yet; used in the loop
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether calls are taken."""
        return not (self.home.is_closed or self.home.forked)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *arguments: Any, undo: Callable[[Any], object] = keep) -> Any:
        """Has a function called in the loop, or a coroutine run, and waits for its result.

        Args:
            function: a coroutine function, or one that never waits.
            arguments: of it.
            undo: called in the loop with the result if this thread is interrupted before it takes it.

        Raises:
            ClosedError: the end is closed, or is being closed meanwhile; or it belongs to the process that forked this one.
            LocalProtocolError: this thread is in the middle of the loop, which would wait for itself.
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
        """Lets the loop find an object, and waits for it.

        Args:
            timeout: seconds, as :func:`~shmring.door.timeout_of` returns them.
            what: the name of the object, for the error.
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
            self._carry_through(call)
            if call.error is None:  # no call from here on: an interruption comes before this or in the caller's code
                result, call.result = call.result, None
                return result
        except BaseException:
            self.post(call.leave)
            raise
        return call.raise_error()

    def at_once(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls a function that never waits, in the loop. Raises what :meth:`call` does."""
        return self.result_of(LoopCall(function, arguments, keep, named))

    def turn(self) -> None:
        """Lets the loop deliver records, if it has no thread that does so."""

    def _carry_through(self, call: LoopCall) -> None:
        """Has a call carried out, and waits until it is answered."""
        raise NotImplementedError

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has a function called in the loop, without waiting. If the loop has ended, nothing happens.

        From any thread, from the middle of the loop, and from finalisers.
        """
        if self.home.forked:
            return
        self._queue.append((function, arguments))
        self._wake()

    def _wake(self) -> None:
        """A call was put into the queue."""
        raise NotImplementedError

    def close(self, *arguments: Any) -> None:
        """Closes the ring, client or worker. Each call that waits raises a ClosedError at once.

        In a forked child, where there is neither loop nor end, nothing happens; nor in a finaliser while the interpreter ends.

        Args:
            arguments: of its ``close``.
        """
        raise NotImplementedError

    def check_open(self) -> None:
        """Raises ClosedError unless this process may use the end."""
        self.home.check_process()
        if self.home.is_closed or sys.is_finalizing():
            raise self._closed_error()

    def _check_thread(self) -> None:
        """Raises LocalProtocolError if this thread may not wait for the loop."""

    def _closed_error(self) -> ClosedError:
        return self.home.closed_error()

    def _turn_away(self) -> None:
        """The loop has ended: answers all queued calls, which will not be carried out. Several threads may do this at once."""
        while True:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if isinstance(item, LoopCall):
                item.answer(error=self._closed_error())

    # -- in the loop ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        self._life = asyncio.current_task()
        self._closing = asyncio.get_running_loop().create_future()
        if self.home.is_closed:  # the thread that opens it was interrupted already
            return
        try:
            end = await self._make()
        except BaseException as error:  # noqa: BLE001 - it is raised where this is opened
            self.home.is_closed = True
            self._opening.answer(error=error)
            return
        arguments: tuple[Any, ...] = ()
        try:
            self._opening.answer()
            if not self.home.is_closed:
                arguments = await self._closing
        finally:
            self.home.is_closed = True
            for call in tuple(self._running):
                call.answer(error=self._closed_error())
                call.cancel()
            await end.close(*arguments)

    def _close(self, arguments: tuple[Any, ...]) -> None:
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(arguments)

    def _abandon(self) -> None:
        self.home.is_closed = True
        if self._life is not None:
            self._life.cancel()

    def _begin(self, call: LoopCall) -> None:
        if self.home.is_closed:
            call.answer(error=self._closed_error())
            return
        try:
            call.begin()
        except BaseException as error:  # noqa: BLE001 - whatever it is, no thread waits for ever
            call.answer(error=error)
        if not call.is_ended:
            self._running[call] = None
            call.on_end.append(functools.partial(self._running.pop, call))

    def _carry_out(self) -> None:
        # All queued calls, not only the one of this wake-up: a thread can be interrupted before it has woken the loop. One that
        # fails keeps no other from being carried out.
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            try:
                if isinstance(item, LoopCall):
                    self._begin(item)
                else:
                    function, arguments = item
                    function(*arguments)
            except Exception as error:  # noqa: BLE001 - it does not concern the thread that happens to be here
                self._loop.call_exception_handler({"message": f"what was asked of {self.home.what} failed", "exception": error})


async def within(timeout: float | None, what: Callable[[], str], waiting: Awaitable[_Result]) -> _Result:
    """Awaits an object for so many seconds at most.

    Args:
        timeout: seconds, as :func:`~shmring.door.timeout_of` returns them.
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
