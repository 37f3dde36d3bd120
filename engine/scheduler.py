"""Which requests are part of the next step: by priority, then round robin over frontends, each in order of arrival.

Theory of operation: a request waits until a step has room for it, and is then part of every step until it ends. Admission is
bounded three ways: answers in a step, bytes of media that a step reads for the first time (decoding steps read none), and
requests that wait, beyond which a request is refused instead of being kept for longer than its caller would wait.

A request may have several answers. It is admitted for the first of them, and then stands in the line again, behind all others
of its frontend, for the next one. So it never waits for several places at once, and nobody waits for all of its answers. An
answer that ends gives its place to whoever is next.

The scheduler is a book like those of ``shmring.core``: no loop, no clock, no executor. A waiting request can be withdrawn at
any time. The scheduler never removes a running one: its step may be reading its slots.

Invariants: a request is waiting, or running, or neither; at most ``max_num_seqs`` answers run. Those of a running request that
were not begun stand in the line.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from shmring.engine.overload import OverloadedError

__all__ = ["Schedulable", "Scheduler", "SchedulerConfig"]


class Schedulable(Protocol):
    """What the scheduler needs of a request."""

    @property
    def client_id(self) -> int:
        """The frontend it came from."""

    @property
    def priority(self) -> int:
        """Lower is sooner."""

    @property
    def nbytes(self) -> int:
        """Bytes of media that its first step reads."""

    @property
    def num_seqs(self) -> int:
        """How many answers it has."""


_Request = TypeVar("_Request", bound=Schedulable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step, and of the line before it.

    Attributes:
        max_num_seqs: requests in a step, each counted as often as it has answers that are being written. More of them share its
            overhead, but all wait for its end.
        max_batch_nbytes: bytes of media from which a step admits no further request.
        max_waiting: requests that wait. 4096 is four times what one frontend may have in flight; their media are bounded by
            the slab anyway.
    """

    max_num_seqs: int = 32
    max_batch_nbytes: int = 256 << 20
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, not {getattr(self, field.name)}")


class _Line(Generic[_Request]):
    """The waiting requests of one priority: one queue for each frontend, served in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[int, OrderedDict[_Request, None]] = OrderedDict()

    def add(self, request: _Request) -> None:
        self._queues.setdefault(request.client_id, OrderedDict())[request] = None

    def remove(self, request: _Request) -> bool:
        queue = self._queues.get(request.client_id)
        if queue is None or request not in queue:
            return False
        del queue[request]
        if not queue:
            del self._queues[request.client_id]
        return True

    def pop(self) -> _Request:
        """Takes the first request of the frontend whose turn it is; the frontend goes to the end of the line."""
        client_id, queue = next(iter(self._queues.items()))
        request, _ = queue.popitem(last=False)
        if queue:
            self._queues.move_to_end(client_id)
        else:
            del self._queues[client_id]
        return request

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[_Request]:
        return (request for queue in self._queues.values() for request in queue)


@dataclasses.dataclass(slots=True)
class _Answers:
    """The answers of a running request: how many were begun, and how many of these have ended."""

    begun: int = 1
    ended: int = 0


class Scheduler(Generic[_Request]):
    """The book of waiting and running requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._lines: dict[int, _Line[_Request]] = {}  # by priority; only lines with requests
        self._waiting = 0
        self._running: dict[_Request, _Answers] = {}
        self._num_seqs = 0  # answers that are being written

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    def __iter__(self) -> Iterator[_Request]:
        """Iterates over running requests, in order of admission."""
        return iter(list(self._running))

    def all(self) -> list[_Request]:
        """Returns running and waiting requests."""
        waiting = (request for line in self._lines.values() for request in line if request not in self._running)
        return [*self._running, *waiting]

    def add(self, request: _Request) -> None:
        """Puts a request in line.

        Raises:
            OverloadedError: the line is full; nothing was changed.
            ValueError: the request has no answers, or more than can run.
        """
        if not 1 <= request.num_seqs <= self.config.max_num_seqs:
            raise ValueError(f"n is {request.num_seqs}; this server takes at most {self.config.max_num_seqs} (max_num_seqs)")
        if self._waiting >= self.config.max_waiting:
            raise OverloadedError(f"{self._waiting} requests are waiting in the engine, it takes no more; try again later")
        self._enter_line(request)
        self._waiting += 1

    def withdraw(self, request: _Request) -> bool:
        """Takes a waiting request out of the line. Returns whether it was there."""
        if request in self._running or not self._leave_line(request):
            return False
        self._waiting -= 1
        return True

    def withdraw_all(self) -> list[_Request]:
        """Takes everything out of the line; returns the waiting requests."""
        waiting = []
        while self._lines:
            request = self._pop()
            if request not in self._running:
                waiting.append(request)
        self._waiting = 0
        return waiting

    def is_running(self, request: _Request) -> bool:
        """Whether a request was admitted and has not been finished."""
        return request in self._running

    def begun(self, request: _Request) -> int:
        """Returns how many answers of a running request may have been begun by now."""
        return self._running[request].begun

    def admit(self) -> list[_Request]:
        """Admits the waiting requests that have room in the next step, and further answers of running ones.

        The request that crosses ``max_batch_nbytes`` is the last one admitted, so that one of any size can be.

        Returns:
            The requests that were admitted, in their order.
        """
        admitted: list[_Request] = []
        nbytes = 0
        while self._lines and self._num_seqs < self.config.max_num_seqs and nbytes < self.config.max_batch_nbytes:
            request = self._pop()
            if request in self._running:
                self._begin_another(request)
                continue
            self._waiting -= 1
            self._running[request] = _Answers()
            self._num_seqs += 1
            admitted.append(request)
            nbytes += request.nbytes
            if request.num_seqs > 1:
                self._enter_line(request)
        return admitted

    def admit_answers(self) -> None:
        """Admits further answers of running requests, and no waiting request."""
        for request, answers in self._running.items():
            while answers.begun < request.num_seqs and self._num_seqs < self.config.max_num_seqs:
                self._leave_line(request)
                self._begin_another(request)

    def end_answer(self, request: _Request) -> None:
        """An answer of a running request has ended. The request has not, before it is finished."""
        answers = self._running[request]
        if answers.ended < answers.begun:
            answers.ended += 1
            self._num_seqs -= 1

    def finish(self, request: _Request) -> None:
        """A running request has ended, and all of its answers with it."""
        answers = self._running.pop(request)
        self._num_seqs -= answers.begun - answers.ended
        self._leave_line(request)

    def _begin_another(self, request: _Request) -> None:
        answers = self._running[request]
        answers.begun += 1
        self._num_seqs += 1
        if answers.begun < request.num_seqs:
            self._enter_line(request)

    def _enter_line(self, request: _Request) -> None:
        self._lines.setdefault(request.priority, _Line()).add(request)

    def _leave_line(self, request: _Request) -> bool:
        """Takes a request out of the line; returns whether it was there."""
        line = self._lines.get(request.priority)
        if line is None or not line.remove(request):
            return False
        self._drop_if_empty(request.priority)
        return True

    def _pop(self) -> _Request:
        priority = min(self._lines)
        request = self._lines[priority].pop()
        self._drop_if_empty(priority)
        return request

    def _drop_if_empty(self, priority: int) -> None:
        """An empty line is not kept: callers may send any number of priorities."""
        if not self._lines[priority]:
            del self._lines[priority]
