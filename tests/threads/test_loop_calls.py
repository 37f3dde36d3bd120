"""How threads have calls carried out in a loop: what is answered, undone, cancelled and forgotten, whoever runs the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import shmring
from shmring.threads import callers_loop
from shmring.threads.callers_loop import CallersLoop
from shmring.threads.loop_calls import LoopCall, LoopRunner, _Question
from shmring.threads.loop_thread import LoopThread
from tests.garbage import uncollected
from tests.running_threads import Thread
from tests.tables import for_each
from tests.waiting import until


class End:
    """An end of shmring that does what a test says when it closes."""

    def __init__(self) -> None:
        self.closing: Callable[[], Awaitable[None]] | None = None

    async def close(self) -> None:
        if self.closing is not None:
            await self.closing()


@pytest.fixture
def end() -> End:
    return End()


@pytest.fixture(params=["thread", "callers"])
def runner(end: End, request: pytest.FixtureRequest) -> Iterator[LoopRunner]:
    async def make() -> End:
        return end

    opened: Any = LoopThread("this end", make) if request.param == "thread" else CallersLoop("this end", make, stands_by=False)
    opened.open()
    yield opened
    opened.close()


class Held:
    """A runner whose loop does nothing else inside this block."""

    def __init__(self, runner: LoopRunner) -> None:
        self._runner = runner
        self._go_on = threading.Event()

    def __enter__(self) -> None:
        inside = threading.Event()
        self._thread = Thread(self._runner.at_once, lambda: (inside.set(), self._go_on.wait(20)))
        assert inside.wait(20)

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.ended(20)


class Odd(Exception):
    """Raised by what is called."""


async def forever() -> None:
    await asyncio.Event().wait()


# -- one call ----------------------------------------------------------------------------------------------------------


async def test_what_comes_of_a_call_that_was_left_is_undone() -> None:
    """Its task ends with a result though it is cancelled."""
    undone: list[str] = []

    async def stubborn() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            return "a slot"

    call = LoopCall(stubborn, (), undone.append)
    call.begin()
    await asyncio.sleep(0)
    call.leave()
    for _ in range(3):
        await asyncio.sleep(0)
    assert undone == ["a slot"]


def test_who_calls_what_is_cancelled_is_told(runner: LoopRunner) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        Thread(runner.call, cancelled).ended()


def test_a_question_that_was_answered_in_time_is_forgotten(runner: LoopRunner) -> None:
    def questions() -> int:
        return sum(isinstance(thing, _Question) for thing in gc.get_objects())

    before = questions()
    later: list[LoopCall] = []
    asking = Thread(runner.ask, 3600.0, "an answer", later.append)
    until(lambda: later)
    runner.at_once(later.pop().answer, "answered")
    assert asking.ended() == "answered"
    del asking
    until(lambda: questions() == before)


def test_an_error_is_freed_with_the_last_that_holds_it(runner: LoopRunner) -> None:
    def fail() -> None:
        raise Odd

    with uncollected():
        with pytest.raises(Odd) as caught:
            runner.call(fail)
        error = weakref.ref(caught.value)
        del caught
        assert error() is None


def test_what_one_thread_posts_fails_in_no_other(runner: LoopRunner) -> None:
    """And keeps nothing else from being carried out."""
    done: list[int] = []
    reported: list[dict[str, Any]] = []
    runner._loop.set_exception_handler(lambda _, context: reported.append(context))

    def fail() -> None:
        raise Odd

    with Held(runner):
        runner.post(fail)
        runner.post(done.append, 1)
    until(lambda: done == [1])
    assert [type(context["exception"]) for context in reported] == [Odd]


def test_a_loop_that_sleeps_is_woken_by_what_another_thread_does(runner: LoopRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.threads.callers_loop.LOOK_UP_S", 15.0)  # longer than this waits for anything
    later: list[LoopCall] = []
    asking = Thread(runner.ask, None, "an answer", later.append)
    until(lambda: later and getattr(runner, "_is_asleep", True))
    runner.at_once(later.pop().answer, "answered")
    assert asking.ended() == "answered"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_what_waits_is_cancelled_before_its_end_closes(runner: LoopRunner, end: End) -> None:
    order: list[str] = []

    async def wait() -> None:
        try:
            await forever()
        finally:
            order.append("cancelled")

    async def close() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        order.append("closed")

    end.closing = close
    waiting = Thread(runner.call, wait)
    until(lambda: runner._running)
    runner.close()
    with pytest.raises(shmring.ClosedError):
        waiting.ended()
    assert order == ["cancelled", "closed"]


def test_a_call_that_comes_while_its_end_closes_is_not_carried_out(runner: LoopRunner) -> None:
    done: list[int] = []
    with Held(runner):
        late = Thread(runner.call, done.append, 1)
        if not runner.is_direct:
            until(lambda: runner._queue)
        closing = Thread(runner.close)
        until(lambda: not runner.is_open)
    closing.ended()
    with pytest.raises(shmring.ClosedError):
        late.ended()
    assert done == []


@for_each("ask", [lambda runner: runner.call(int), CallersLoop.turn], ids=["a call", "a turn"])
def test_a_thread_that_comes_to_a_loop_closed_since_it_asked_gives_it_no_turn(
    ask: Callable[[CallersLoop], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make() -> End:
        return End()

    def close_before() -> None:
        """Another thread is faster, just before this one asks for the lock."""
        monkeypatch.undo()
        Thread(runner.close).ended()

    runner = CallersLoop("this end", make, stands_by=False)
    runner.open()
    monkeypatch.setattr(callers_loop, "_TURN_S", -1.0)  # the loop is due a turn
    monkeypatch.setattr(runner, "_check_thread", close_before)
    with contextlib.suppress(shmring.ClosedError):
        ask(runner)
    assert runner._loop.is_closed()


def test_tasks_that_nobody_waits_for_end_with_the_loop(runner: LoopRunner) -> None:
    tasks: list[asyncio.Task[None]] = []
    runner.call(lambda: tasks.append(asyncio.get_running_loop().create_task(forever())))
    runner.close()
    assert tasks[0].cancelled()


def test_an_error_of_closing_is_raised_where_it_is_closed(runner: LoopRunner, end: End) -> None:
    async def close() -> None:
        raise Odd

    end.closing = close
    with pytest.raises(Odd):
        runner.close()
    runner.close()


def test_a_loop_whose_thread_does_not_start_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def make() -> End:
        return End()

    thread = LoopThread("this end", make)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        thread.open()
    assert thread._loop.is_closed()
