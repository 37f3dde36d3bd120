"""Threads for work beside steps that callers choose: their time is shared by owner.

The next job is one of the owner that has used least. An owner has one job at a time, and its jobs are done in the order in
which they came. So whoever sends many, or long ones, waits for its own; others wait for one job at most, and only if as many
owners as there are threads have one.

Invariant: as long as a job could be begun, as many threads work as there are.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from shmring.engine.accounts import Accounts

__all__ = ["SharedThreads", "summed"]

_Result = TypeVar("_Result")
_Job = tuple[Future[Any], Callable[[], tuple[Any, float]]]


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of seconds by owner."""
    sums = defaultdict[str, float](float)
    for part in parts:
        for owner, seconds in part.items():
            sums[owner] += seconds
    return dict(sums)


class SharedThreads:
    """Some threads, and who has used how much of them.

    Args:
        count: of threads.
        name: of theirs.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._lock = Lock()  # for what follows
        self._accounts = Accounts()
        self._waiting: dict[str, deque[_Job]] = {}  # by owner, in the order in which owners came
        self._busy: set[str] = set()  # owners
        self._began: dict[str, float] = {}  # when the job of each of these was begun
        self._working = 0  # threads
        self._closed = False

    def submit(self, owner: str, work: Callable[[], tuple[_Result, float]]) -> Future[_Result]:
        """Has something done.

        Args:
            owner: for whom.
            work: returns its result, and the seconds of a processor that it has used elsewhere: those of its thread are
                counted.

        Returns:
            The result. Work that has not begun can be cancelled.
        """
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._accounts.enter(owner)
            self._waiting.setdefault(owner, deque()).append((future, work))
            if self._working < self._count and owner not in self._busy:
                self._working += 1
                self._threads.submit(self._work)
        return future

    def working_s(self) -> dict[str, float]:
        """Returns, by owner, the seconds since its job was begun, which nobody has been charged for yet. From any thread."""
        with self._lock:
            now = time.monotonic()
            return {owner: now - began for owner, began in self._began.items()}

    def close(self) -> None:
        """Begins nothing more, and waits for nothing."""
        with self._lock:
            self._closed = True
            futures = [future for jobs in self._waiting.values() for future, _ in jobs]
        for future in futures:
            future.cancel()
        self._threads.shutdown(wait=False)

    def _work(self) -> None:
        """Does jobs, as long as one can be begun."""
        while (job := self._next()) is not None:
            owner, future, work = job
            used_s = 0.0
            if future.set_running_or_notify_cancel():
                began_s = time.thread_time()
                try:
                    result, used_s = work()
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(result)
                used_s += time.thread_time() - began_s
            del future, work, job  # the results and what they were made of are their owners' alone
            with self._lock:
                self._busy.remove(owner)
                del self._began[owner]
                self._accounts.charge(owner, used_s, time.monotonic())
                self._accounts.leave(owner)

    def _next(self) -> tuple[str, Future[Any], Callable[[], tuple[Any, float]]] | None:
        with self._lock:
            free = [owner for owner in self._waiting if owner not in self._busy]
            owner = min(free, key=self._accounts.used, default=None)
            if owner is None:
                self._working -= 1
                return None
            future, work = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            self._busy.add(owner)
            self._began[owner] = time.monotonic()
            return owner, future, work
