"""The thread of an executor: the loop gives it one call after the other.

``ThreadPoolExecutor`` makes two futures, a condition and a callback for each call. Here a call is a future of the loop and an
entry in a queue.

Invariant: neither the thread nor an error keeps anything of a call that is over: its frames would keep views of slots.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ExecutorThread"]

_Result = TypeVar("_Result")


class ExecutorThread:
    """See the head of this file. It is started by the first call.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)  # one that nobody closed keeps no process
        self._is_started = False

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Carries out a call, behind those that were made before. Cancelled, it waits for the end first."""
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        ended: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.put((ended, function))
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait([ended])
            raise

    def close(self) -> None:
        """Ends the thread, and waits for it. No call may be made any more."""
        self._calls.put(None)
        if self._is_started:
            self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            ended, function = call
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except StopIteration:  # no future takes it
                error = RuntimeError("the call raised StopIteration")
            except BaseException as raised:  # noqa: BLE001 - it is raised where the call was made
                error = raised
            ended.get_loop().call_soon_threadsafe(_end, ended, result, error)
            del call, ended, function, result, error


def _end(ended: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        ended.set_result(result)
    else:
        ended.set_exception(error)
