"""Which requests are part of the next step: those of the owners who have used least of the steps before.

Theory of operation: a request waits until a step has room for it, and is then *open* until it ends: part of every step, unless
others have their turn. Admission is bounded three ways: answers that are open, bytes of media that a step reads for the first
time (decoding steps read none), and requests that wait. Where more is asked for than there is, it is shared by the owners of
the requests (:mod:`.accounts`), whatever number of them each sends:

- *The line.* Next is a request of the owner who has fewest answers open; of equals, who has used least; of equals, in turn. The
  requests of one owner go in order of arrival. If the line is full, whoever has most requests in it loses the last of them to
  an owner who has fewer.
- *Seats.* A step takes ``max_num_seqs`` answers. With an executor that can pause requests, an owner who has less than an equal
  share of the seats need not wait for an answer of others to end: the request is opened, and the seats of each step are given
  out in turn, first to who has used least. Who has no seat in a step is first among its owner's in the next one.
- *The order in a step.* Requests of who has used least come first. Executors give out in this order what a step has too little
  of.

Operators may let callers say that requests are urgent. More urgent ones go first, whoever has used what; but one of some
admissions goes to those that are less so, and they do not wait for ever.

A request may have several answers. It is admitted for the first of them, and then stands in the line again, behind all others
of its owner, for the next one. So it never waits for several places at once, and nobody waits for all of its answers. An answer
that ends gives its place to whoever is next.

The scheduler is a book like those of ``shmring.core``: no loop, no clock, no executor. A waiting request can be withdrawn at
any time. The scheduler never removes a running one: its step may be reading its slots.

Invariants: a request is waiting, or running, or neither; at most ``max_num_seqs`` answers run, or twice as many if requests can
be paused. Those of a running request that were not begun stand in the line.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from shmring.engine.accounts import Account, Accounts
from shmring.engine.overload import OverloadedError

__all__ = ["Schedulable", "Scheduler", "SchedulerConfig"]

_LESS_URGENT = 8  # one of so many admissions goes to a request that is not among the most urgent


class Schedulable(Protocol):
    """What the scheduler needs of a request.

    Attributes:
        account: of its owner. The scheduler sets it when it puts the request in line.
    """

    account: Account

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

_used = operator.attrgetter("account.used")


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
    """The waiting requests of one priority: one queue for each owner. Owners who are equal are served in turn."""

    def __init__(self) -> None:
        self.queues: OrderedDict[Account, OrderedDict[_Request, None]] = OrderedDict()

    def add(self, request: _Request) -> None:
        queue = self.queues.get(request.account)
        if queue is None:
            queue = self.queues[request.account] = OrderedDict()
        queue[request] = None

    def remove(self, request: _Request) -> bool:
        queue = self.queues.get(request.account)
        if queue is None or request not in queue:
            return False
        del queue[request]
        if not queue:
            del self.queues[request.account]
        return True

    def pop(self, account: Account) -> _Request:
        """Takes the first request of an owner, who goes behind those that are equal."""
        queue = self.queues[account]
        request, _ = queue.popitem(last=False)
        if queue:
            self.queues.move_to_end(account)
        else:
            del self.queues[account]
        return request

    def __iter__(self) -> Iterator[_Request]:
        return (request for queue in self.queues.values() for request in queue)


@dataclasses.dataclass(slots=True)
class _Answers:
    """The answers of a running request: how many were begun, and how many of these have ended."""

    begun: int = 1
    ended: int = 0

    @property
    def open(self) -> int:
        return self.begun - self.ended


class Scheduler(Generic[_Request]):
    """The book of waiting and running requests.

    Args:
        config: bounds.
        pauses: whether a running request need not be part of each step.

    Attributes:
        config: as given.
        accounts: of the owners of requests. Whoever executes steps charges what they took.
    """

    def __init__(self, config: SchedulerConfig, *, pauses: bool = False) -> None:
        self.config = config
        self.accounts = Accounts()
        self._pauses = pauses
        self._requests: dict[_Request, None] = {}  # those that wait and those that run, in the order in which they came
        self._lines: dict[int, _Line[_Request]] = {}  # by priority; only lines with requests
        self._running: OrderedDict[_Request, _Answers] = OrderedDict()  # those that were paused last come first
        self._num_seqs = 0  # answers that are being written
        self._admissions = 0  # of requests

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._requests) - len(self._running)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def seats_taken(self) -> int:
        """How many answers are open: with an executor that can pause requests, there may be more than seats."""
        return self._num_seqs

    def __iter__(self) -> Iterator[_Request]:
        """Iterates over running requests, in order of admission but for those that were paused."""
        return iter(list(self._running))

    def all(self) -> list[_Request]:
        """Returns running and waiting requests."""
        return [*self._running, *(request for request in self._requests if request not in self._running)]

    def line(self) -> list[_Request]:
        """Returns the waiting requests in the order in which they would be admitted if nothing else happened."""
        ranks: Counter[Account] = Counter()
        places: list[tuple[tuple[int, int, float], _Request]] = []
        for priority in sorted(self._lines):
            for account, queue in self._lines[priority].queues.items():
                for request in queue:
                    if request not in self._running:
                        places.append(((priority, account.open + ranks[account], account.used), request))
                        ranks[account] += 1
        return [request for _, request in sorted(places, key=lambda place: place[0])]

    def add(self, request: _Request, owner: str = "") -> _Request | None:
        """Puts a request in line.

        Args:
            request: it.
            owner: whose it is.

        Returns:
            A request that must be refused in its place, and is no longer here: the line is full, and its owner has most in it.

        Raises:
            OverloadedError: the line is full; nothing was changed.
            ValueError: the request has no answers, or more than can run.
        """
        if not 1 <= request.num_seqs <= self.config.max_num_seqs:
            raise ValueError(f"n is {request.num_seqs}; this server takes at most {self.config.max_num_seqs} (max_num_seqs)")
        displaced = None
        if self.waiting >= self.config.max_waiting:
            displaced = self._last_of_the_most(owner)
            if displaced is None:
                raise OverloadedError(f"{self.waiting} requests are waiting in the engine, it takes no more; try again later")
            self.withdraw(displaced)
        request.account = self.accounts.enter(owner)
        request.account.waiting += 1
        self._requests[request] = None
        self._enter_line(request)
        return displaced

    def withdraw(self, request: _Request) -> bool:
        """Takes a waiting request out of the line. Returns whether it was there."""
        if request in self._running or request not in self._requests:
            return False
        self._leave_line(request)
        request.account.waiting -= 1
        self._forget(request)
        return True

    def withdraw_all(self) -> list[_Request]:
        """Takes everything out of the line; returns the waiting requests."""
        waiting = [request for request in self._requests if request not in self._running]
        self._lines.clear()
        for request in waiting:
            request.account.waiting -= 1
            self._forget(request)
        return waiting

    def is_running(self, request: _Request) -> bool:
        """Whether a request was admitted and has not been finished."""
        return request in self._running

    def begun(self, request: _Request) -> int:
        """Returns how many answers of a running request may have been begun by now."""
        return self._running[request].begun

    def admit(self) -> list[_Request]:
        """Admits the waiting requests that have room, and further answers of running ones.

        The request that crosses ``max_batch_nbytes`` is the last one admitted, so that one of any size can be.

        Returns:
            The requests that were admitted, in their order.
        """
        admitted: list[_Request] = []
        nbytes = 0
        while nbytes < self.config.max_batch_nbytes and (chosen := self._choose()) is not None:
            request = self._pop(*chosen)
            if request in self._running:
                self._begin_another(request)
                continue
            self._admissions += 1
            request.account.waiting -= 1
            self._running[request] = _Answers()
            self._count_open(request, 1)
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

    def step(self) -> list[_Request]:
        """Returns the running requests that are part of the next step, those of who has used least first.

        A request with several answers takes a seat for each, and is not left out because there are fewer.
        """
        requests = sorted(self._running, key=_used)
        if self._num_seqs <= self.config.max_num_seqs:
            return requests
        by_owner: dict[Account, list[_Request]] = {}
        for request in requests:
            by_owner.setdefault(request.account, []).append(request)
        counts = self._share_seats(list(by_owner.values()))
        shares = list(zip(by_owner.values(), counts, strict=True))
        for request in reversed([request for mine, count in shares for request in mine[count:]]):
            self._running.move_to_end(request, last=False)
        return [request for mine, count in shares for request in mine[:count]]

    def end_answer(self, request: _Request) -> None:
        """An answer of a running request has ended. The request has not, before it is finished."""
        answers = self._running[request]
        if answers.open:
            answers.ended += 1
            self._count_open(request, -1)

    def finish(self, request: _Request) -> None:
        """A running request has ended, and all of its answers with it."""
        answers = self._running.pop(request)
        self._count_open(request, -answers.open)
        self._leave_line(request)
        self._forget(request)

    def _share_seats(self, requests: list[list[_Request]]) -> list[int]:
        """Returns how many requests of each owner have seats: one more in each turn, as long as there are any."""
        counts = [0] * len(requests)
        seats = self.config.max_num_seqs
        while seats > 0 and any(count < len(mine) for count, mine in zip(counts, requests, strict=True)):
            for number, mine in enumerate(requests):
                if seats > 0 and counts[number] < len(mine):
                    seats -= self._running[mine[counts[number]]].open
                    counts[number] += 1
        return counts

    def _begin_another(self, request: _Request) -> None:
        answers = self._running[request]
        answers.begun += 1
        self._count_open(request, 1)
        if answers.begun < request.num_seqs:
            self._enter_line(request)

    def _count_open(self, request: _Request, number: int) -> None:
        request.account.open += number
        self._num_seqs += number

    def _forget(self, request: _Request) -> None:
        del self._requests[request]
        self.accounts.leave(request.account.owner)

    def _enter_line(self, request: _Request) -> None:
        line = self._lines.get(request.priority)
        if line is None:
            line = self._lines[request.priority] = _Line()
        line.add(request)

    def _leave_line(self, request: _Request) -> None:
        """Takes a request out of the line, if it is there."""
        line = self._lines.get(request.priority)
        if line is not None and line.remove(request):
            self._drop_if_empty(request.priority)

    def _choose(self) -> tuple[int, Account] | None:
        """Returns the priority and the owner of who is next; None: there is no room for any of them."""
        if not self._lines or not (most := self._most_open()):
            return None
        first, *others = sorted(self._lines)
        if others and self._admissions % _LESS_URGENT == _LESS_URGENT - 1 and (found := self._least_of(others, most)):
            return found
        for priority in (first, *others):
            if (found := self._least_of((priority,), most)) is not None:
                return found
        return None

    def _most_open(self) -> float:
        """Returns how many answers an owner may have open, to have another one."""
        if self._num_seqs < self.config.max_num_seqs:
            return math.inf
        if not self._pauses or self._num_seqs >= 2 * self.config.max_num_seqs:
            return 0
        return max(1, self.config.max_num_seqs // len(self.accounts))

    def _least_of(self, priorities: Iterable[int], most: float) -> tuple[int, Account] | None:
        least: tuple[int, Account] | None = None
        least_open, least_used = most, math.inf
        for priority in priorities:
            for account in self._lines[priority].queues:
                if account.open < least_open or (account.open == least_open < most and account.used < least_used):
                    least, least_open, least_used = (priority, account), account.open, account.used
        return least

    def _pop(self, priority: int, account: Account) -> _Request:
        request = self._lines[priority].pop(account)
        self._drop_if_empty(priority)
        return request

    def _last_of_the_most(self, owner: str) -> _Request | None:
        """Returns the last waiting request of the owner who has most; None: this one would have as many with a further one."""
        greatest = max(self.accounts, key=lambda account: account.waiting)
        if self.accounts.waiting(owner) + 1 >= greatest.waiting:
            return None
        waiting = [request for priority in sorted(self._lines) for request in self._lines[priority].queues.get(greatest, ())]
        return next(request for request in reversed(waiting) if request not in self._running)

    def _drop_if_empty(self, priority: int) -> None:
        """An empty line is not kept: callers may send any number of priorities."""
        if not self._lines[priority].queues:
            del self._lines[priority]
