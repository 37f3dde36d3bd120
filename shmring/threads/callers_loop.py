"""An event loop that the calling threads run themselves, so that no message wakes another thread, or waits for one.

Theory of operation. There is one lock. The thread that has it is *inside*: it may use all objects of the loop. A call is
carried out inside, by the thread that makes it. Most calls end there. A call that has to wait *leads*: its thread runs the loop
until the call is answered. Whenever the loop sleeps (in epoll: for bells, for deaths of processes, for its next timer) the lock
is free, and other threads get in. If another thread leads already, a call *follows*: it sleeps until the thread that is inside
has answered it, or until the leader stops and it can lead.

Between calls no thread runs the loop, so rare events (a worker joins, a process dies, a frontend wants a lease) wait for the
next call. Each call gives the loop a turn if it had none for a moment. If that is not enough, a thread can *stand by*: it leads
when there was no call for a while, and stops leading when calls come again.

Posting acquires the lock if it is free. If not, its holder looks into the queue once more after it has released the lock.

Interruptions. A thread that sleeps may be interrupted (by a signal handler that raises): this only ends its call. A thread that
is interrupted in the middle of the loop may have left a book half changed. Then each further call raises an error that says so,
and the ring can only be closed.

Invariants: one thread at a time is inside; one thread at a time leads; a call is answered, and the ring is used, only inside.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from asyncio import events
from collections.abc import Awaitable, Callable
from threading import get_ident
from typing import Any

from shmring.errors import ClosedError, LocalProtocolError
from shmring.threads.loop_calls import LOOK_UP_S, LoopCall, LoopEnd, LoopRunner, keep

__all__ = ["CallersLoop"]

_NOBODY = 0
_STANDING = -1  # the leader, if it is the thread that stands by

_TURN_S = 0.001  # after which a call gives the loop a turn, which takes some ten microseconds if there is no work
_LED_S = 0.2  # after which it looks again, while another thread leads, perhaps for hours
_IDLE_S = 0.02  # without a call, after which the thread that stands by leads: longer than most steps of an engine


class _Loop(asyncio.SelectorEventLoop):
    """A loop that notes whether it got work since it fell asleep.

    Attributes:
        is_changed: see above. The thread that falls asleep clears it.
    """

    is_changed = False

    def call_soon(self, *arguments: Any, **named: Any) -> asyncio.Handle:  # type: ignore[override]  # all that it is given
        self.is_changed = True
        return super().call_soon(*arguments, **named)

    def call_at(self, *arguments: Any, **named: Any) -> asyncio.TimerHandle:  # type: ignore[override]  # as above
        self.is_changed = True
        return super().call_at(*arguments, **named)

    def run_in_executor(  # type: ignore[override]  # as above
        self, executor: Any, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Calls it here: a ring that is served by its callers has no thread for slow work."""
        if executor is not None:
            return super().run_in_executor(executor, function, *arguments)
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - it is for whoever awaits it
            future.set_exception(error)
        return future

    def stop(self) -> None:
        self.is_changed = True
        super().stop()

    def __del__(self) -> None:
        """Closes nothing: in a forked child, that would take descriptors out of the epoll of its parent."""


class _Selector(selectors.EpollSelector):
    """Lets its owner act before and after a sleep.

    Args:
        sleep: called with a function and a number of seconds, or ``None`` for any number; it calls the function, which sleeps
            for so long at most, and returns its result.
    """

    def __init__(self, sleep: Callable[[Callable[[float | None], Any], float | None], Any]) -> None:
        super().__init__()
        self._sleep = sleep

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        came: list[tuple[selectors.SelectorKey, int]] = self._sleep(super().select, timeout)
        return came


class CallersLoop(LoopRunner):
    """See the head of this file.

    Args:
        what, make: as of :class:`LoopRunner`.
        stands_by: whether there is a thread that leads when nobody has called for a while.

    Raises:
        LocalProtocolError: threads are greenlets here.
    """

    is_direct = True

    def __init__(self, what: str, make: Callable[[], Awaitable[LoopEnd]], *, stands_by: bool) -> None:
        self._loop: _Loop
        super().__init__(what, make, lambda: _Loop(_Selector(self._sleep)))
        self._loop.set_debug(False)  # asyncio's debug mode allows only one thread to use a loop
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a call was answered, or there is no leader any more
        self._insider = _NOBODY  # the thread that has the lock, and does not sleep
        self._leader = _NOBODY
        self._is_asleep = False  # the leader
        self._is_broken = False
        self._called_s = self._turned_s = 0.0
        self._ending: LoopCall | None = None
        self._closes_later = False  # a call of this thread, in the middle of the loop, will close it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stand_by, name=f"shmring {what}", daemon=True) if stands_by else None

    # -- its life ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Makes the end.

        Raises:
            BaseException: whatever making it raises; then the loop is closed.
        """
        _kept.add(self)
        try:
            self._do(self._make_end)
            if self._opening.error is None and self._thread is not None:
                self._thread.start()
        except BaseException:
            self._do(self._abandon)
            self._do(self._end)
            raise
        if self._opening.error is not None:
            self._do(self._end)
            self._opening.raise_error()

    def _make_end(self) -> None:
        self._opening.on_end.append(self._wake_waiting)
        self._life = self._context.run(self._loop.create_task, self._live())
        self._see_through(self._opening)

    def close(self, *arguments: Any) -> None:
        """Closes the ring at once. If this thread is in the middle of a call (and now runs a signal handler), that call closes
        it."""
        if self.home.forked or sys.is_finalizing() or self._is_over:
            return
        self._check_thread()
        self.home.is_closed = True
        self._do(self._close, arguments)
        if self._leader == get_ident():
            self._closes_later = True
            return
        self._do(self._end)
        if self._thread is not None:
            self._thread.join()

    def _end(self) -> None:
        """Runs the loop until the end is closed; then the loop is closed, too."""
        if self._ending is None:
            self._ending = LoopCall(self._finish, (), keep)
            self._ending.on_end.append(self._wake_waiting)
            self._ending.begin()
        self._see_through(self._ending)
        if self._is_over:
            return  # another thread was faster
        self._is_over = True
        self._over.set()
        self._changed.notify_all()
        self._loop.close()
        self._turn_away()
        _kept.discard(self)
        if self._ending.error is not None:
            self._ending.raise_error()

    async def _finish(self) -> None:
        assert self._life is not None
        try:
            await asyncio.wait([self._life])
            if not self._life.cancelled():
                self._life.result()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _closed_error(self) -> ClosedError:
        if self._is_broken and not self._is_over:
            return ClosedError(
                f"{self.home.what} was interrupted in the middle of its work (a signal handler raised); it can only be closed"
            )
        return super()._closed_error()

    # -- inside ------------------------------------------------------------------------------------------------------

    def at_once(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls a function that never waits.

        Raises:
            ClosedError, LocalProtocolError: as :meth:`call`.
            BaseException: whatever the function raises.
        """
        self.check_open()
        self._check_thread()
        return self._do(self._do_and_turn, function, arguments, named)

    def turn(self) -> None:
        """Lets the loop deliver records and run due callbacks, if no other thread leads."""
        self.check_open()
        self._check_thread()
        self._do(self._turn)

    def _carry_through(self, call: LoopCall) -> None:
        call.on_end.append(self._wake_waiting)
        try:
            self._do(self._begin_and_see_through, call)
        finally:
            if self._closes_later and self._leader != get_ident():
                self._closes_later = False
                self._do(self._end)

    def _begin_and_see_through(self, call: LoopCall) -> None:
        self._begin(call)
        if call.is_ended:
            self._check_whole(call.error)
            self._turn_if_due()
        else:
            self._see_through(call)

    def _check_whole(self, error: BaseException | None) -> None:
        """An exception has ended the work in the middle of the loop."""
        if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
            self._is_broken = self.home.is_closed = True

    def _do_and_turn(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = function(*arguments, **named)
        self._turn_if_due()
        return result

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in this thread, as if the loop called it: nobody else runs the loop meanwhile."""
        try:
            with self._lock:
                self._check_thread()
                self._insider = get_ident()
                running = events._get_running_loop()
                events._set_running_loop(self._loop)
                try:
                    return function(*arguments)
                finally:
                    events._set_running_loop(running)
                    self._insider = _NOBODY
                    self._tell_leader()
        finally:
            if self._queue:  # of threads that found the lock taken
                self._wake()

    def _tell_leader(self) -> None:
        """Wakes the leader if it sleeps and the loop has got work."""
        if self._is_asleep and self._loop.is_changed:
            self._loop.is_changed = False
            self._loop.call_soon_threadsafe(keep, None)

    def _check_thread(self) -> None:
        if self._insider == get_ident():
            raise LocalProtocolError(
                f"{self.home.what} was asked to wait by a thread that is in the middle of it; callbacks, finalisers and hooks "
                "that run there may use what does not wait, or hand their work to another thread"
            )

    def _wake(self) -> None:
        """Carries out the calls in the queue. If a thread is inside, that thread does it afterwards."""
        while self._queue and self._lock.acquire(blocking=False):
            try:
                if self._insider != _NOBODY:  # this thread is inside, and does it afterwards
                    return
                if self._is_over:
                    self._turn_away()
                    return
                self._do(self._carry_out)
            finally:
                self._lock.release()

    def _carry_out(self) -> None:
        while self._queue:
            try:
                super()._carry_out()
            except BaseException as error:
                self._check_whole(error)
                raise

    # -- running the loop --------------------------------------------------------------------------------------------

    def _wake_waiting(self) -> None:
        """A call was answered, or given up: each waiting thread checks whether it was its own."""
        self._loop.stop()
        self._changed.notify_all()

    def _see_through(self, call: LoopCall) -> None:
        """Waits until a call is answered."""
        me = get_ident()
        while not call.is_ended:
            if self._leader == me:
                raise LocalProtocolError(
                    f"{self.home.what} was asked to wait by a thread that waits for it already, and runs a signal handler "
                    "meanwhile"
                )
            if self._leader == _NOBODY:
                self._lead(me)
            else:
                self._follow()

    def _lead(self, who: int) -> None:
        self._leader = who
        self._called_s = time.monotonic()
        try:
            self._run_loop()
        finally:
            self._leader = _NOBODY
            self._turned_s = self._called_s = time.monotonic()
            self._changed.notify_all()

    def _follow(self) -> None:
        """Sleeps until a call was answered, or there is no leader."""
        if self._leader == _STANDING:
            self._loop.stop()
        self._insider = _NOBODY
        try:
            self._tell_leader()
            self._changed.wait(LOOK_UP_S)
        finally:
            self._insider = get_ident()

    def _run_loop(self) -> None:
        """Runs the loop until it is stopped."""
        if self._queue:
            self._carry_out()
        events._set_running_loop(None)
        try:
            self._loop.run_forever()
        except BaseException as error:
            if not self._is_asleep:
                self._check_whole(error)
            raise
        finally:
            self._is_asleep = False
            events._set_running_loop(self._loop)

    def _turn_if_due(self) -> None:
        self._called_s = now_s = time.monotonic()
        if now_s - self._turned_s > _TURN_S:
            self._turn()

    def _turn(self) -> None:
        if self._is_over:  # another thread has closed the loop since this one asked for the lock
            return
        if self._leader == _NOBODY:
            self._loop.stop()
            self._lead(get_ident())
        else:
            self._called_s = time.monotonic()
            if self._leader == _STANDING:
                self._loop.stop()

    def _sleep(self, select: Callable[[float | None], Any], seconds: float | None) -> Any:
        """For the selector: lets other threads in while the loop sleeps."""
        if self._leader != _STANDING:  # nobody interrupts the thread that stands by
            seconds = LOOK_UP_S if seconds is None else min(seconds, LOOK_UP_S)
        if self._queue:
            self._carry_out()
            if self._loop.is_changed:
                seconds = 0.0
        self._loop.is_changed = False
        self._is_asleep, self._insider = True, _NOBODY
        self._lock.release()
        try:
            # A thread that posts a call from now on carries it out itself. Calls that were posted before are carried out
            # here.
            came = select(0.0 if self._queue else seconds)
        finally:
            self._take_lock()
        self._is_asleep = False  # not if this was interrupted: epoll reports the same events again
        return came

    def _take_lock(self) -> None:
        """Acquires the lock again, even if it is interrupted meanwhile."""
        interruption: BaseException | None = None
        while True:
            try:
                self._lock.acquire()
                break
            except BaseException as error:  # noqa: BLE001 - it is raised when the lock is acquired
                interruption = error
        self._insider = get_ident()
        if interruption is not None:
            raise interruption

    # -- the thread that stands by -----------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        idle_s = _IDLE_S
        while not self._over.wait(idle_s):
            idle_s = self._do(self._lead_if_idle)

    def _lead_if_idle(self) -> float:
        """Leads until there is a call, if there was none for a while; returns after how many seconds to look again."""
        if self._leader != _NOBODY:
            return _LED_S
        idle_s = self._called_s + _IDLE_S - time.monotonic()
        if idle_s > 0:
            return idle_s
        if not self.home.is_closed:
            self._lead(_STANDING)
        return _IDLE_S


_kept: set[CallersLoop] = set()  # loops that are not closed are kept until the process ends, as in a thread
