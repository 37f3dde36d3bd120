"""What callers have used of an engine's steps: one account for each owner, in seconds.

A step is shared by all whose requests are in it, and what they take of it is time, whatever they ask for: a long prompt, a
form, a seed. So each owner of requests (a key, or else an address) has an account of the seconds that its requests took.
Wherever there is less than is asked for, the owner who has used least comes first: in the line before the steps, for seats in a
step, and in the order in which an executor gets the requests of a step.

An owner who comes begins with what the least of those who are there has, less a little credit: nobody saves up time by staying
away, or pays for what others used before. Whoever leaves in debt finds it again, as long as others have less.

An account is a book: no clock, no loop. Who charges accounts says first what time it is, once for all of them; so a charge is
two additions.

Invariant: an owner who has requests has an account; of one without them a debt is known, while others have less.

Source: start-time fair queueing (Goyal, Vin and Cheng, 1996), and the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (2024), which counts tokens where seconds are measured here.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["NOW_S", "Account", "Accounts", "Caller"]

#: Seconds of steps that a newcomer may use before the others: it is answered at once, beside whoever was there before.
_CREDIT_S = 0.1

_MAX_DEBTORS = 1024  # owners without requests: callers may come from any number of addresses

#: The last seconds that are "now" for people.
NOW_S = 10
_MINUTE_S = 60
_TOLD, _MAX_TOLD = 10, 4096  # owners that are told of, and among which they are found
_MAX_TOTALS = 1024  # owners whose sums are kept: keys, usually. A scrape reads all of them


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """What people are told of an owner.

    Attributes:
        owner: who.
        seconds: of steps that its requests took in the last ten seconds, about.
        beside_s: of threads that prepared something for them beside steps, likewise.
        decoding_s: of decoders of frontends, likewise.
        share: of all three that the requests of all owners took then.
        minute_s: of all three together, in the last minute.
        requests: that it has now, those that are being prepared in frontends included.
        preparing: how many of them are.
    """

    owner: str
    seconds: float
    beside_s: float
    decoding_s: float
    share: float
    minute_s: float
    requests: int
    preparing: int


class Account:
    """The account of an owner who has requests.

    Attributes:
        owner: whose it is.
        used: where it stands, in seconds of steps: the owner with less comes first.
        requests: that wait or run.
        waiting: of these, how many wait: for the scheduler.
        open: answers that are being written: for the scheduler, too.
        recent_s, recent_beside_s: seconds that people have not been told of so far: of steps, and beside them.
    """

    __slots__ = ("open", "owner", "recent_beside_s", "recent_s", "requests", "used", "waiting")

    def __init__(self, owner: str, used: float) -> None:
        self.owner = owner
        self.used = used
        self.requests = self.waiting = self.open = 0
        self.recent_s = self.recent_beside_s = 0.0

    def charge(self, seconds: float, beside_s: float = 0.0) -> None:
        """Requests of the owner have taken so many seconds of a step, which has ended when :meth:`Accounts.turn` said, and so
        many of other threads beside steps."""
        self.used += seconds
        self.recent_s += seconds
        if beside_s:
            self.used += beside_s
            self.recent_beside_s += beside_s


class _Recent:
    """What owners used in the last seconds, about: of two fixed windows, all of this one and a share of the one before."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._window = 0
        self._used: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def add(self, owner: str, seconds: float) -> None:
        if seconds and (owner in self._used or len(self._used) < _MAX_TOLD):
            self._used[owner] = self._used.get(owner, 0.0) + seconds

    def sums(self, now: float) -> dict[str, float]:
        """Returns the seconds of each owner."""
        share = 1 - now % self._window_s / self._window_s
        owners = self._used.keys() | self._before.keys()
        return {owner: self._used.get(owner, 0.0) + share * self._before.get(owner, 0.0) for owner in owners}

    def turn(self, now: float) -> None:
        """Begins another window, if it is time."""
        window = int(now // self._window_s)
        if window != self._window:
            self._used, self._before = {}, self._used if window == self._window + 1 else {}
            self._window = window


class Accounts:
    """The accounts of an engine."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}  # of owners who have requests
        self._debts: dict[str, float] = {}  # where others stood when they left
        # For people.
        self._now, self._beside, self._decoding = _Recent(NOW_S), _Recent(NOW_S), _Recent(NOW_S)
        self._minute = _Recent(_MINUTE_S)
        self._turns_at = 0.0  # when the next of their windows begins
        self._totals: dict[str, float] = {}  # of the first owners that came

    def __len__(self) -> int:
        """How many owners have requests."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        """Iterates over their accounts."""
        return iter(self._accounts.values())

    def used(self, owner: str) -> float:
        """Returns where an owner stands: the one with less comes first."""
        account = self._accounts.get(owner)
        return self._debts.get(owner, 0.0) if account is None else account.used

    def waiting(self, owner: str) -> int:
        """Returns how many requests of an owner wait."""
        account = self._accounts.get(owner)
        return 0 if account is None else account.waiting

    def enter(self, owner: str) -> Account:
        """A request of an owner has come. Returns the owner's account, which is this one until its last request has ended."""
        account = self._accounts.get(owner)
        if account is None:
            account = Account(owner, max(self._debts.pop(owner, 0.0), self._least() - _CREDIT_S))
            self._accounts[owner] = account
        account.requests += 1
        return account

    def leave(self, owner: str) -> None:
        """A request of an owner has ended."""
        account = self._accounts[owner]
        account.requests -= 1
        if account.requests:
            return
        del self._accounts[owner]
        self._tell(account)
        if not self._accounts:  # nobody has waited for anybody
            self._debts.clear()
            return
        self._debts[owner] = account.used
        if len(self._debts) > _MAX_DEBTORS:
            self._forgive()

    def turn(self, now: float) -> None:
        """What is charged from now on is charged at this time."""
        if now < self._turns_at:
            return
        for account in self._accounts.values():
            self._tell(account)
        for recent in (self._now, self._beside, self._decoding, self._minute):
            recent.turn(now)
        self._turns_at = now - now % NOW_S + NOW_S  # a minute begins with ten seconds

    def charge(self, owner: str, seconds: float, now: float) -> None:
        """Requests of an owner, of which none may be left, have taken so many seconds."""
        self.turn(now)
        account = self._accounts.get(owner) or Account(owner, 0.0)
        account.charge(seconds)
        self._tell(account)

    def note_decoding(self, owner: str, seconds: float, now: float) -> None:
        """An owner had decoders of a frontend for so long. They are no part of steps, so the order of these is the same."""
        if seconds:
            self.turn(now)
            self._decoding.add(owner, seconds)
            self._minute.add(owner, seconds)

    def totals(self, now: float) -> Mapping[str, float]:
        """Returns the seconds that the requests of each owner have taken since the start, of steps and beside them; of a
        thousand owners."""
        self.turn(now)
        for account in self._accounts.values():
            self._tell(account)
        return self._totals

    def describe(
        self, now: float, preparing: Counter[str] | None = None, working_s: Iterable[Mapping[str, float]] = ()
    ) -> list[Caller]:
        """Returns who uses most, who has used most in the last minute and who has most requests: a few owners, the first one
        uses most.

        Args:
            now: the time, in seconds.
            preparing: by owner, the requests that are being prepared in frontends.
            working_s: by owner, seconds that work beside steps takes already, and that it has not been charged for.
        """
        self.turn(now)
        for account in self._accounts.values():
            self._tell(account)
        preparing = preparing or Counter()
        beside = self._beside.sums(now)
        for each in working_s:
            for owner, taken_s in each.items():
                beside[owner] = beside.get(owner, 0.0) + min(taken_s, NOW_S)
        used = [self._now.sums(now), beside, self._decoding.sums(now)]
        minute = self._minute.sums(now)
        requests = preparing + Counter({owner: account.requests for owner, account in self._accounts.items()})
        most = [heapq.nlargest(_TOLD, each, key=each.__getitem__) for each in (*used, minute)]
        owners = {owner for each in most for owner in each} | {owner for owner, _ in requests.most_common(_TOLD)}
        whole = sum(sum(each.values()) for each in used) or 1.0
        callers = []
        for owner in owners:
            used_s, beside_s, decoding_s = taken = [each.get(owner, 0.0) for each in used]
            share, minute_s = sum(taken) / whole, minute.get(owner, 0.0)
            callers.append(Caller(owner, used_s, beside_s, decoding_s, share, minute_s, requests[owner], preparing[owner]))
        return sorted(callers, key=lambda each: (-each.share, -each.minute_s, -each.requests, each.owner))

    def _tell(self, account: Account) -> None:
        """Counts for people, and for numbers, what an account was charged."""
        owner, seconds, beside_s = account.owner, account.recent_s, account.recent_beside_s
        if taken := seconds + beside_s:
            account.recent_s = account.recent_beside_s = 0.0
            if owner in self._totals or len(self._totals) < _MAX_TOTALS:
                self._totals[owner] = self._totals.get(owner, 0.0) + taken
            self._now.add(owner, seconds)
            self._beside.add(owner, beside_s)
            self._minute.add(owner, taken)

    def _forgive(self) -> None:
        """Forgets the debts of those who have gone, unless they are few and others have less."""
        least = self._least()
        debts = {owner: used for owner, used in self._debts.items() if used > least}
        self._debts = debts if len(debts) < _MAX_DEBTORS else {}

    def _least(self) -> float:
        return min(account.used for account in self._accounts.values()) if self._accounts else 0.0
