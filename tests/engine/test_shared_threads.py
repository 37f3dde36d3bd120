"""Threads that owners share: who has used least is next, and nobody has two jobs at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from shmring.engine.executors import shared_threads
from shmring.engine.executors.shared_threads import SharedThreads

_LIMIT_S = 60


@pytest.fixture
def threads() -> Iterator[Callable[[int], SharedThreads]]:
    made: list[SharedThreads] = []

    def make(count: int) -> SharedThreads:
        made.append(SharedThreads(count, "test"))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each._threads.shutdown(wait=True)
        assert (each._working, each._waiting, each._busy, len(each._accounts)) == (0, {}, set(), 0)


class Jobs:
    """Work that ends when it is told to, and the order in which it was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end: dict[str, threading.Event] = {}
        self._began = threading.Condition()

    def make(self, name: str) -> Callable[[], str]:
        self._may_end[name] = threading.Event()

        def work() -> str:
            with self._began:
                self.begun.append(name)
                self._began.notify_all()
            assert self._may_end[name].wait(_LIMIT_S)
            return name

        return work

    def end(self, name: str) -> None:
        self._may_end[name].set()

    def wait_for(self, count: int) -> list[str]:
        with self._began:
            assert self._began.wait_for(lambda: len(self.begun) >= count, _LIMIT_S)
            return list(self.begun)


def test_an_owner_has_one_job_at_a_time_and_others_come_between(threads: Callable[[int], SharedThreads]) -> None:
    pool, jobs = threads(3), Jobs()
    many = [pool.submit("many", jobs.make(f"many {number}")) for number in range(4)]
    assert jobs.wait_for(1) == ["many 0"]
    few = pool.submit("few", jobs.make("few"))
    assert jobs.wait_for(2) == ["many 0", "few"]
    for number, future in enumerate(many):
        jobs.end(f"many {number}")
        assert future.result(_LIMIT_S) == f"many {number}"
    jobs.end("few")
    assert few.result(_LIMIT_S) == "few"
    assert jobs.begun == ["many 0", "few", "many 1", "many 2", "many 3"]


def test_work_is_told_of_while_it_is_done(threads: Callable[[int], SharedThreads], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(shared_threads.time, "monotonic", lambda: now_s)
    pool, jobs = threads(1), Jobs()
    first, second = pool.submit("a", jobs.make("a")), pool.submit("b", jobs.make("b"))
    jobs.wait_for(1)
    now_s = 130.0
    assert pool.working_s() == {"a": 30.0}
    jobs.end("a")
    first.result(_LIMIT_S)
    jobs.wait_for(2)
    assert pool.working_s() == {"b": 0.0}
    jobs.end("b")
    second.result(_LIMIT_S)


def test_who_has_used_least_is_next(threads: Callable[[int], SharedThreads]) -> None:
    """Of one thread, after both owners have had it."""
    pool, jobs = threads(1), Jobs()
    futures = [pool.submit("dear", jobs.make(f"dear {number}")) for number in range(3)]
    jobs.wait_for(1)
    futures += [pool.submit("frugal", jobs.make(f"frugal {number}")) for number in range(5)]
    for job in futures:
        job.seconds = {"dear": 2.0, "frugal": 0.5}[job.owner]  # used elsewhere
    for name in [*(f"dear {number}" for number in range(3)), *(f"frugal {number}" for number in range(5))]:
        jobs.end(name)
    for future in futures:
        future.result(_LIMIT_S)
    order = [name.split()[0] for name in jobs.begun]
    assert order == ["dear", "frugal", "frugal", "frugal", "frugal", "frugal", "dear", "dear"]


def test_what_is_cancelled_is_not_done_and_what_fails_takes_nothing_with_it(threads: Callable[[int], SharedThreads]) -> None:
    pool, jobs = threads(1), Jobs()
    first = pool.submit("a", jobs.make("first"))
    jobs.wait_for(1)

    def fail() -> None:
        raise ZeroDivisionError

    cancelled, failed, last = (
        pool.submit("a", jobs.make("cancelled")),
        pool.submit("a", fail),
        pool.submit("a", jobs.make("last")),
    )
    assert cancelled.cancel()
    jobs.end("first")
    jobs.end("last")
    assert isinstance(failed.exception(_LIMIT_S), ZeroDivisionError)
    assert (first.result(_LIMIT_S), last.result(_LIMIT_S)) == ("first", "last")
    assert jobs.begun == ["first", "last"]


def test_after_closing_nothing_is_begun(threads: Callable[[int], SharedThreads]) -> None:
    pool, jobs = threads(1), Jobs()
    running, waiting = pool.submit("a", jobs.make("running")), pool.submit("b", jobs.make("waiting"))
    jobs.wait_for(1)
    pool.close()
    assert waiting.cancelled()
    jobs.end("running")
    assert running.result(_LIMIT_S) == "running"
    pool._threads.shutdown(wait=True)
    assert pool.submit("c", jobs.make("late")).cancelled()


def test_a_job_keeps_nothing_of_its_work_and_is_paid_for_once_by_its_owner(threads: Callable[[int], SharedThreads]) -> None:
    pool, jobs = threads(1), Jobs()
    works = [jobs.make("done"), jobs.make("cancelled")]
    gone = [weakref.ref(work) for work in works]
    done, cancelled = (pool.submit("a", work) for work in works)
    del works
    assert cancelled.cancel()
    assert gone[1]() is None
    jobs.end("done")
    assert done.result(_LIMIT_S) == "done"
    assert done.take_seconds("b") == 0
    assert 0 < done.take_seconds("a") < 5
    assert done.take_seconds("a") == 0
    pool.submit("a", lambda: None).result(_LIMIT_S)
    assert gone[0]() is None
