"""Waiting in tests, for what happens: a condition is polled, and fails when its time is up. Nothing sleeps to synchronise."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import shmring


def until(condition: Callable[[], Any], timeout_s: float = 600.0) -> Any:
    """Without a loop: polls a condition until it is true; returns what it said. When the time is up, which only a hang reaches,
    it fails."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not (result := condition()):
        assert time.monotonic() < deadline, f"still {result!r} after {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return result


async def eventually(condition: Callable[[], Any], timeout: float = 30.0) -> Any:
    """Polls until a condition is true, and returns what it said; fails when the time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    pause_s = 0.002
    while not (result := condition()):
        assert loop.time() < deadline, f"not true within {timeout} s: {inspect.getsource(condition).strip()}"
        await asyncio.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.02)  # what takes long is not looked for all the time, nor heard much later
    return result


async def turns(count: int = 50) -> None:
    """Whatever both ends have to do now is done, for what must not happen by itself.

    It counts rounds of the loop, not time: what one end writes, the other reads in its next round. For what threads do, wait
    for a condition.
    """
    for _ in range(count):
        await asyncio.sleep(0)


async def cancel(*tasks: asyncio.Future[Any]) -> bool:
    """Cancels tasks, and waits until they have ended; returns whether that ended all of them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return all(task.cancelled() for task in tasks)


class AdjustableLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward by minutes, beside which it does not matter how long a test takes."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        """What timers go by."""
        return super().time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Makes timers due."""
        self._ahead_s += seconds


async def pass_time(seconds: float) -> None:
    """In a test with the marker ``adjustable_clock``: what is due by then has been done."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AdjustableLoop)
    await turns()
    loop.advance(seconds)
    await turns()


def hold(link: Any) -> Callable[[], None]:
    """``go_on = hold(link)``: this end reads nothing, and hears no bells and no end, until ``go_on()``."""
    from tests.model.inside import hold_reader, let_read  # which is compiled, and not everywhere

    loop = asyncio.get_running_loop()
    loop.remove_reader(link._fd)
    hold_reader(link.reader)

    def go_on() -> None:
        let_read(link.reader)
        loop.add_reader(link._fd, link._hear)
        link.reader.rouse()

    return go_on


async def settled(ring: shmring.Ring, timeout: float = 30.0) -> None:
    """Waits until every client is gone and the slab is wholly free, but for kept content; and checks the book."""

    def is_whole() -> bool:
        now = ring.statistics()
        books = (now.waiting, now.running, now.slots_in_use, now.clients, now.departed_clients, now.replies_waiting)
        free = (now.free_nbytes + now.kept_nbytes, now.reply_free_nbytes)
        return books == (0,) * 6 and now.kept_pinned == 0 and free == (now.leasable_nbytes, now.reply_nbytes)

    try:
        await eventually(is_whole, timeout)
    except AssertionError:
        raise AssertionError(f"the slab did not become whole within {timeout} s: {ring.statistics()}") from None
    ring._shell._book.check()
