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

__all__ = ["Job", "SharedThreads", "summed"]

_Result = TypeVar("_Result")
_AnyJob = TypeVar("_AnyJob", bound="Job[Any]")


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of seconds by owner."""
    sums = defaultdict[str, float](float)
    for part in parts:
        for owner, seconds in part.items():
            sums[owner] += seconds
    return dict(sums)


class Job(Future[_Result]):
    """What comes of a piece of work. A job that has not begun can be cancelled, and keeps nothing of its work then.

    Args:
        owner: for whom it is.
        work: is done once, on a thread.

    Attributes:
        owner: as given.
        seconds: of a processor that its thread took, and what the work itself has added; until somebody pays for them.
    """

    def __init__(self, owner: str, work: Callable[[], _Result]) -> None:
        super().__init__()
        self.owner = owner
        self.seconds = 0.0
        self._work: Callable[[], _Result] | None = work

    def cancel(self) -> bool:
        """Gives the work up, unless it has begun."""
        if cancelled := super().cancel():
            self._work = None
        return cancelled

    def run(self) -> float:
        """Does the work, unless it was cancelled; returns the seconds that it took."""
        if not self.set_running_or_notify_cancel():
            return 0.0
        work, self._work = self._work, None
        assert work is not None, "it is done once"
        began_s = time.thread_time()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self.seconds = seconds = self.seconds + time.thread_time() - began_s
            self.set_exception(error)
        else:
            self.seconds = seconds = self.seconds + time.thread_time() - began_s
            self.set_result(result)
        return seconds

    def take_seconds(self, owner: str) -> float:
        """Returns what an owner has to pay for, once."""
        seconds = self.seconds if owner == self.owner else 0.0
        self.seconds -= seconds
        return seconds


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
        self._waiting: dict[str, deque[Job[Any]]] = {}  # by owner, in the order in which owners came
        self._busy: set[str] = set()  # owners
        self._began: dict[str, float] = {}  # when the job of each of these was begun
        self._working = 0  # threads
        self._closed = False

    def submit(self, owner: str, work: Callable[[], _Result]) -> Job[_Result]:
        """Has something done for an owner."""
        return self.enter(Job(owner, work))

    def enter(self, job: _AnyJob) -> _AnyJob:
        """Has a job done."""
        owner = job.owner
        with self._lock:
            if self._closed:
                job.cancel()
                return job
            self._accounts.enter(owner)
            self._waiting.setdefault(owner, deque()).append(job)
            if self._working < self._count and owner not in self._busy:
                self._working += 1
                self._threads.submit(self._work)
        return job

    def working_s(self) -> dict[str, float]:
        """Returns, by owner, the seconds since its job was begun, which nobody has been charged for yet. From any thread."""
        with self._lock:
            now = time.monotonic()
            return {owner: now - began for owner, began in self._began.items()}

    def close(self) -> None:
        """Begins nothing more, and waits for nothing."""
        with self._lock:
            self._closed = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
        for job in waiting:
            job.cancel()
        self._threads.shutdown(wait=False)

    def _work(self) -> None:
        """Does jobs, as long as one can be begun."""
        while (job := self._next()) is not None:
            owner, used_s = job.owner, job.run()
            del job  # what came of it is its owner's alone
            with self._lock:
                self._busy.remove(owner)
                del self._began[owner]
                self._accounts.charge(owner, used_s, time.monotonic())
                self._accounts.leave(owner)

    def _next(self) -> Job[Any] | None:
        with self._lock:
            free = [owner for owner in self._waiting if owner not in self._busy]
            owner = min(free, key=self._accounts.used, default=None)
            if owner is None:
                self._working -= 1
                return None
            job = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            self._busy.add(owner)
            self._began[owner] = time.monotonic()
            return job
