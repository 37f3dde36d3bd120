"""The thread of an executor: what a call raises comes back, whatever it is; a thread that nobody closed keeps no process."""

from __future__ import annotations

import threading

import pytest

from shmring.engine.executor_thread import ExecutorThread
from tests.tables import for_each


def _raise(error: BaseException) -> None:
    raise error


@for_each("raised, seen", [(ValueError("no"), ValueError), (SystemExit(3), SystemExit), (StopIteration(), RuntimeError)])
async def test_what_a_call_raises_is_raised_to_its_caller(raised: BaseException, seen: type[BaseException]) -> None:
    thread = ExecutorThread("executor")
    with pytest.raises(seen):
        await thread.call(lambda: _raise(raised))
    assert await thread.call(lambda: 5) == 5
    thread.close()


async def test_one_that_nobody_closed_keeps_no_process() -> None:
    thread = ExecutorThread("executor")
    found = await thread.call(threading.current_thread)
    assert found.daemon
    thread.close()
    assert not found.is_alive()
