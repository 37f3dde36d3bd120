"""What is prepared for requests before steps can begin with them: tokens of their texts, and what a model makes of their media.

Short texts are made into tokens within a step, as many as take some ten milliseconds; further requests come again. Media have
a thread of their own, and so do long texts. Both do one piece of work after the other, and steps go on meanwhile. A request has
one piece of work at a time, so those of others come between. Both are shared by owner (:mod:`.shared_threads`).

Invariant: a request that has ended leaves nothing behind: the queue of a thread does not keep what it was to prepare.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from shmring.engine.executors.shared_threads import SharedThreads, summed

__all__ = ["LOOKING_S", "MEDIA", "TEXTS", "Preparing", "is_long", "thread_for"]

_Prepared = TypeVar("_Prepared")

#: The threads.
MEDIA, TEXTS = "media", "texts"

#: A text of more characters is made into tokens beside steps. Those of a step have no more together, which take some ten
#: milliseconds.
_LONG_CHARACTERS = 16 << 10

#: A step with nothing to do waits so long for something that is being prepared. Requests that come wait, too.
LOOKING_S = 0.01


def is_long(characters: int) -> bool:
    """Whether a text, or several, are too long for a step."""
    return characters > _LONG_CHARACTERS


def thread_for(characters: int, *, has_media: bool) -> str | None:
    """Returns which thread prepares something; None: it is prepared within a step."""
    if has_media:
        return MEDIA
    return TEXTS if is_long(characters) else None


class Preparing(Generic[_Prepared]):
    """What is being prepared. All methods are called from one thread, that of steps."""

    def __init__(self) -> None:
        self.threads = {name: SharedThreads(1, f"shmring-{name}") for name in (MEDIA, TEXTS)}
        self._jobs: dict[int, _Job[_Prepared]] = {}  # of threads, by request
        self._ready: dict[int, _Prepared] = {}  # what was prepared within a step, until it is taken
        self._seconds: dict[int, float] = {}  # that requests have not paid for
        self._characters = 0  # of texts that this step has made into tokens

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._jobs or request_id in self._ready

    def begin_step(self) -> None:
        """A step may make texts into tokens again."""
        self._characters = 0

    def has_room(self, characters: int) -> bool:
        """Whether this step can make so many characters into tokens besides; the first ones always."""
        return not self._characters or not is_long(self._characters + characters)

    def begin(
        self, request_id: int, work: Callable[[], _Prepared], characters: int, thread: str | None, owner: str = ""
    ) -> None:
        """Has something prepared for a request.

        Args:
            request_id: which; nothing else is being prepared for it.
            work: prepares it, and keeps nothing else alive that is needed only for that.
            characters: of its texts.
            thread: one of the two; None: it is prepared at once.
            owner: of the request.

        Raises:
            Exception: the work, done at once, has raised it.
        """
        if thread is None:
            self._characters += characters
            self._ready[request_id] = work()
            return
        job = self._jobs[request_id] = _Job(work)
        self.threads[thread].submit(owner, job.run)

    def take(self, request_id: int) -> _Prepared | None:
        """Returns what was prepared for a request; None if nothing is ready.

        Raises:
            Exception: the work, done by a thread, has raised it.
        """
        if (prepared := self._ready.pop(request_id, None)) is not None:
            return prepared
        if request_id not in self._jobs or not self._jobs[request_id].future.done():
            return None
        job = self._jobs.pop(request_id)
        self._seconds[request_id] = self._seconds.get(request_id, 0.0) + job.seconds
        return job.future.result()

    def take_seconds(self, request_id: int) -> float:
        """Returns how many seconds of a thread a request has taken, beside steps, since this was asked last."""
        return self._seconds.pop(request_id, 0.0)

    def working_s(self) -> dict[str, float]:
        """Returns how long work that has not ended takes already, by owner. From any thread."""
        return summed(threads.working_s() for threads in self.threads.values())

    def wait(self, request_ids: Iterable[int], others: Iterable[concurrent.futures.Future[Any]] = ()) -> None:
        """Waits a little until something is ready for one of the requests, or another future is."""
        mine = [self._jobs[request_id].future for request_id in request_ids if request_id in self._jobs]
        concurrent.futures.wait([*mine, *others], LOOKING_S, concurrent.futures.FIRST_COMPLETED)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        if (job := self._jobs.pop(request_id, None)) is not None:
            job.cancel()
        self._ready.pop(request_id, None)
        self._seconds.pop(request_id, None)

    def close(self) -> None:
        """All requests have ended. The threads go with this object."""
        for request_id in [*self._jobs, *self._ready]:
            self.forget(request_id)


class _Job(Generic[_Prepared]):
    """A piece of work of a thread.

    Attributes:
        future: what comes of it.
        seconds: of a processor that it took.
    """

    def __init__(self, work: Callable[[], _Prepared]) -> None:
        self.future: concurrent.futures.Future[_Prepared] = concurrent.futures.Future()
        self._work = [work]  # until it has begun, or is cancelled
        self.seconds = 0.0

    def run(self) -> tuple[None, float]:
        if self.future.set_running_or_notify_cancel():
            began_s = time.thread_time()
            try:
                prepared = self._work.pop()()
                self.seconds = time.thread_time() - began_s
                self.future.set_result(prepared)
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
                self.future.set_exception(error)
        return None, 0.0  # used elsewhere

    def cancel(self) -> None:
        if self.future.cancel():
            self._work.clear()
