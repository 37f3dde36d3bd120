"""An event loop in a thread of its own, which carries out calls of other threads, and is never interrupted.

Theory of operation. A thread puts a call in the queue, wakes the loop, and sleeps until the call is answered. So an interrupted
thread never leaves a book half changed. Posting needs no lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from shmring.errors import LocalProtocolError
from shmring.threads.loop_calls import LOOK_UP_S, LoopCall, LoopEnd, LoopRunner

__all__ = ["LoopThread"]


class LoopThread(LoopRunner):
    """A loop in a thread of its own, and the end of shmring that lives in it.

    Args:
        what, make: as of :class:`LoopRunner`.

    Raises:
        LocalProtocolError: threads are greenlets here.
    """

    def __init__(self, what: str, make: Callable[[], Awaitable[LoopEnd]]) -> None:
        super().__init__(what, make, uvloop.new_event_loop)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"shmring {what}", daemon=True)

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

    def close(self, *arguments: Any) -> None:
        """Closes the ring or client, and waits until the thread has ended."""
        self._check_thread()
        if self.home.forked or sys.is_finalizing():  # its thread is not here, or never runs again
            return
        self.home.is_closed = True
        self.post(self._close, arguments)
        while (
            not self._is_over
        ):  # a signal handler may do the same in the middle of it, where Thread.join would wait for itself
            self._thread.join(LOOK_UP_S)
        self._thread.join(LOOK_UP_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _carry_through(self, call: LoopCall) -> None:
        self._queue.append(call)
        self._wake()
        call.wait()

    def _check_thread(self) -> None:
        if threading.get_ident() == self._thread.ident:
            raise LocalProtocolError(
                f"{self.home.what} was asked to wait in its own thread, which carries out what others wait for; callbacks and "
                "finalisers that run there may use what does not wait, or hand their work to another thread"
            )

    def _wake(self) -> None:
        if not self._is_over:
            try:
                self._loop.call_soon_threadsafe(self._carry_out)
                if not self._is_over:
                    return
            except RuntimeError:  # the loop was closed just now
                pass
        self._turn_away()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live(), context=self._context)
        except asyncio.CancelledError:
            pass  # the thread that opened it was interrupted
        except Exception as error:  # noqa: BLE001 - it is raised where this is closed
            self._failure = error
        finally:
            self.home.is_closed = self._is_over = True
            self._turn_away()
