"""The scheduler: order and bounds of a step, the line before it, and a model that it must agree with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmring.engine.accounts import Account
from shmring.engine.executors.interface import OverloadedError
from shmring.engine.scheduler import Scheduler, SchedulerConfig
from tests.tables import for_each


@dataclasses.dataclass(eq=False)
class Request:
    """All that a scheduler asks of a request."""

    name: str = ""
    owner: str = ""
    priority: int = 0
    nbytes: int = 1
    num_seqs: int = 1
    account: Account = dataclasses.field(init=False)


def admitted(config: SchedulerConfig, *requests: Request) -> list[str]:
    scheduler: Scheduler[Request] = Scheduler(config)
    for request in requests:
        scheduler.add(request, request.owner)
    return [request.name for request in scheduler.admit()]


def of(name: str, **fields: Any) -> Request:
    """A request whose name begins with its owner."""
    return Request(name, name[0], **fields)


def names(requests: list[Request]) -> list[str]:
    return [request.name for request in requests]


def test_requests_of_one_owner_go_in_order_of_arrival() -> None:
    assert admitted(SchedulerConfig(), *(Request(name) for name in "abc")) == ["a", "b", "c"]


def test_owners_take_turns() -> None:
    arrivals = [of(name) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert admitted(SchedulerConfig(), *arrivals) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=1))  # where nobody has an answer open at a turn
    for request in arrivals:
        scheduler.add(request, request.owner)
    turns = []
    while scheduler.waiting:
        [request] = scheduler.admit()
        turns.append(request.name)
        scheduler.finish(request)
    assert turns == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_line_that_is_empty_is_not_kept() -> None:
    """Callers may send any number of priorities."""
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig())
    requests = [of("a", priority=priority) for priority in range(9)]
    for request in requests:
        scheduler.add(request, "a")
    scheduler.withdraw(requests[8])
    scheduler.admit()
    assert scheduler._lines == {}


def test_who_has_used_least_comes_first_in_the_line_and_in_the_step() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=4))
    for name in ("a1", "b1", "a2", "b2"):
        scheduler.add(of(name), name[0])
    scheduler.accounts.charge("a", 1.0, 0.0)
    assert names(scheduler.admit()) == ["b1", "a1", "b2", "a2"]
    assert names(scheduler.step()) == ["b1", "b2", "a1", "a2"]
    scheduler.accounts.charge("b", 2.0, 0.0)
    assert names(scheduler.step()) == ["a1", "a2", "b1", "b2"]


def test_an_owner_with_fewer_answers_open_comes_before_one_that_has_used_less() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3))
    for name in ("a1", "a2", "a3"):
        scheduler.add(of(name), "a")
    scheduler.admit()
    scheduler.add(of("a4"), "a")
    scheduler.add(of("b1"), "b")
    scheduler.accounts.charge("b", 1.0, 0.0)
    scheduler.finish(next(iter(scheduler)))
    assert names(scheduler.admit()) == ["b1"]


def test_seats_are_given_out_in_turn_where_requests_can_be_paused() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=4), pauses=True)
    for number in range(8):
        scheduler.add(of(f"a{number}"), "a")
    assert names(scheduler.admit()) == ["a0", "a1", "a2", "a3"]
    for number in range(3):
        scheduler.add(of(f"b{number}"), "b")
    assert names(scheduler.admit()) == ["b0", "b1"], "an equal share of the seats, and no more"
    assert scheduler.admit() == []
    scheduler.accounts.charge("a", 1.0, 0.0)
    assert names(scheduler.step()) == ["b0", "b1", "a0", "a1"]
    assert names(scheduler.step()) == ["b0", "b1", "a2", "a3"], "who had no seat is first of its owner's"
    assert names(scheduler.step()) == ["b0", "b1", "a0", "a1"]
    for request in scheduler.all():
        if request.name in ("b0", "b1"):
            scheduler.finish(request)
    assert names(scheduler.admit()) == ["b2"]
    assert names(scheduler.step())[0] == "b2"


def test_without_pauses_nobody_is_begun_beyond_the_seats() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=2))
    for name in ("a1", "a2", "b1"):
        scheduler.add(of(name), name[0])
    assert names(scheduler.admit()) == ["a1", "b1"]
    assert scheduler.admit() == []


def test_requests_that_are_paused_are_bounded_however_many_owners_there_are() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=2), pauses=True)
    for name in "abcdefgh":
        scheduler.add(Request(name), name)
    scheduler.admit()
    scheduler.admit()
    assert scheduler.running == 4
    seen = set()
    for _ in range(2):
        step = scheduler.step()
        assert len(step) == 2
        seen |= {request.name for request in step}
        for request in step:
            scheduler.accounts.charge(request.name, 1.0, 0.0)
    assert seen == set("abcd"), "each has its turn"


def test_a_request_with_many_answers_is_not_left_out_because_seats_are_fewer() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=4), pauses=True)
    scheduler.add(of("a", num_seqs=4), "a")
    scheduler.admit()
    scheduler.add(of("b"), "b")
    assert names(scheduler.admit()) == ["b"]
    scheduler.accounts.charge("a", 1.0, 0.0)
    assert names(scheduler.step()) == ["b", "a"]


def test_more_urgent_requests_go_first_whoever_sent_them() -> None:
    arrivals = [Request("low", "1", 10), Request("usual", "2", 0), Request("high", "1", -5), Request("usual too", "1", 0)]
    assert admitted(SchedulerConfig(), *arrivals) == ["high", "usual", "usual too", "low"]


def test_the_less_urgent_do_not_wait_for_ever() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=1))
    scheduler.add(Request("usual"), "b")
    served: list[str] = []
    for _ in range(8):
        scheduler.add(Request("urgent", priority=-9), "a")
        scheduler.add(Request("urgent", priority=-9), "a")
        (request,) = scheduler.admit()
        scheduler.finish(request)
        served.append(request.name)
    assert served == ["urgent"] * 7 + ["usual"]


def test_the_line_is_told_in_the_order_of_admission() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=8))
    for name, priority in (("a1", 0), ("a2", 0), ("b1", 0), ("c1", -1), ("b2", 0)):
        scheduler.add(of(name, priority=priority), name[0])
    scheduler.accounts.charge("b", 1.0, 0.0)
    told = names(scheduler.line())
    assert told == ["c1", "a1", "b1", "a2", "b2"]
    assert names(scheduler.admit()) == told
    assert scheduler.line() == []


def test_what_runs_counts_toward_max_num_seqs_until_it_is_finished() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=2))
    requests = [Request(name) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert scheduler.admit() == requests[:2]
    assert scheduler.admit() == []
    scheduler.finish(requests[0])
    assert scheduler.admit() == requests[2:]
    assert list(scheduler) == requests[1:]


def test_the_answers_of_a_request_take_places_one_by_one_and_let_others_pass() -> None:
    first, several, last = Request("a"), Request("b", num_seqs=3), Request("c")
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3))
    for request in (first, several, last):
        scheduler.add(request)
    assert scheduler.admit() == [first, several, last], "it does not wait for three places, nor do others for it"
    assert scheduler.begun(several) == 1
    assert scheduler.admit() == []
    scheduler.finish(first)
    newcomer = Request("d")
    scheduler.add(newcomer)
    assert scheduler.admit() == []
    assert scheduler.begun(several) == 2, "its second answer came before the newcomer"
    scheduler.end_answer(several)
    assert scheduler.admit() == [newcomer], "the third stands behind those that came before the second was begun"
    scheduler.end_answer(several)
    assert scheduler.admit() == []
    assert scheduler.begun(several) == 3
    scheduler.end_answer(several)
    scheduler.end_answer(several)  # an executor that counts wrongly frees no place of others
    scheduler.add(Request("e"))
    scheduler.add(Request("f"))
    assert [request.name for request in scheduler.admit()] == ["e"]


def test_a_request_alone_has_all_answers_at_once_and_gives_back_all_places_when_it_ends() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3))
    several = Request("a", num_seqs=3)
    scheduler.add(several)
    assert scheduler.admit() == [several]
    assert scheduler.begun(several) == 3
    scheduler.finish(several)
    for name in "bcd":
        scheduler.add(Request(name))
    assert [request.name for request in scheduler.admit()] == ["b", "c", "d"]


def test_a_running_request_with_answers_in_line_is_not_waiting() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=2, max_waiting=1))
    other, several = Request("b"), Request("a", num_seqs=2)
    scheduler.add(other)
    scheduler.admit()
    scheduler.add(several)
    assert scheduler.admit() == [several]
    assert (scheduler.waiting, scheduler.running) == (0, 2)
    assert not scheduler.withdraw(several)
    assert scheduler.all() == [other, several]
    scheduler.add(waiting := Request("c"))
    assert scheduler.waiting == 1
    scheduler.finish(other)
    scheduler.admit_answers()
    assert scheduler.begun(several) == 2, "also where no waiting request is admitted"
    assert scheduler.withdraw_all() == [waiting]
    scheduler.finish(several)
    assert scheduler._lines == {}


@for_each("num_seqs", [0, -1, 4])
def test_a_request_whose_answers_can_never_run_is_refused(num_seqs: int) -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3))
    with pytest.raises(ValueError, match=f"n is {num_seqs}; this server takes at most 3"):
        scheduler.add(Request("a", num_seqs=num_seqs))
    assert scheduler.waiting == 0


def test_a_step_admits_nothing_more_once_it_has_max_batch_nbytes() -> None:
    sizes = [Request("a", nbytes=60), Request("b", nbytes=60), Request("c", nbytes=60)]
    assert admitted(SchedulerConfig(max_batch_nbytes=100), *sizes) == ["a", "b"]


def test_a_request_larger_than_a_step_goes_alone() -> None:
    assert admitted(SchedulerConfig(max_batch_nbytes=100), Request("a", nbytes=500), Request("b")) == ["a"]


def test_a_full_line_refuses_and_is_not_changed() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_waiting=2))
    scheduler.add(Request("a"))
    scheduler.add(Request("b"))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        scheduler.add(Request("c", priority=-1))
    assert [request.name for request in scheduler.admit()] == ["a", "b"]
    scheduler.add(Request("d"))
    assert scheduler.waiting == 1


def test_of_a_full_line_whoever_has_most_loses_the_last_to_an_owner_who_has_fewer() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_waiting=4))
    for name in ("a1", "a2", "a3", "b1"):
        assert scheduler.add(of(name, priority=int(name == "a2")), name[0]) is None
    displaced = scheduler.add(of("c1"), "c")
    assert displaced is not None
    assert displaced.name == "a2", "the least urgent of them"
    assert scheduler.waiting == 4
    with pytest.raises(OverloadedError, match="4 requests are waiting"):
        scheduler.add(of("b2"), "b")
    assert sorted(names(scheduler.admit())) == ["a1", "a3", "b1", "c1"]


def test_what_was_withdrawn_is_not_admitted_and_what_runs_can_not_be() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig())
    kept, withdrawn = Request("kept"), Request("withdrawn", "other", priority=-1)
    scheduler.add(kept)
    scheduler.add(withdrawn, "other")
    assert scheduler.withdraw(withdrawn)
    assert not scheduler.withdraw(withdrawn)
    assert scheduler.admit() == [kept]
    assert not scheduler.withdraw(kept)
    assert not scheduler.withdraw(Request("never seen", priority=77))


def test_a_priority_that_nobody_waits_with_costs_nothing() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=10_000))
    for priority in range(1000):
        scheduler.add(Request(priority=priority))
        scheduler.add(Request(priority=-priority))
        assert not scheduler.withdraw(Request(priority=priority))
        scheduler.admit()
    assert scheduler.waiting == 0
    assert scheduler._lines == {}
    scheduler.add(Request(priority=7))
    assert [other.priority for other in scheduler.withdraw_all()] == [7]
    assert scheduler._lines == {}


@for_each("option", ["max_num_seqs", "max_batch_nbytes", "max_waiting"])
def test_a_bound_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        SchedulerConfig(**{option: 0})


class SchedulerMachine(RuleBasedStateMachine):
    """Beside the scheduler stands the simplest model: one list, searched for the request that is next."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[Request] = Scheduler(
            SchedulerConfig(max_num_seqs=3, max_batch_nbytes=100, max_waiting=8), pauses=True
        )
        self.line: list[Request] = []
        self.running: list[Request] = []
        self.begun: dict[Request, int] = {}
        self.ended: dict[Request, int] = {}
        self.turns: dict[int, list[str]] = {}  # of each priority, the owners in line
        self.admissions = 0

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.line if request not in self.running]

    def open_of(self, *owners: str) -> int:
        return sum(self.begun[request] - self.ended[request] for request in self.running if request.owner in owners)

    @property
    def num_seqs(self) -> int:
        return self.open_of("a", "b", "c")

    def may_open(self, owner: str) -> bool:
        owners = {request.owner for request in [*self.line, *self.running]}
        return self.num_seqs < 3 or (self.num_seqs < 6 and self.open_of(owner) < 3 // len(owners))

    def next(self) -> tuple[int, str] | None:
        """Who is next, by looking at everybody."""
        priorities = sorted({request.priority for request in self.line})
        groups = [[priority] for priority in priorities]
        if len(priorities) > 1 and self.admissions % 8 == 7:
            groups.insert(0, priorities[1:])
        for group in groups:
            candidates = [
                (self.open_of(owner), self.scheduler.accounts.used(owner), group.index(priority), turn, owner)
                for priority in group
                for turn, owner in enumerate(self.turns[priority])
                if self.may_open(owner)
            ]
            if candidates:
                *_, place, _, owner = min(candidates)
                return group[place], owner
        return None

    def enter_line(self, request: Request) -> None:
        self.line.append(request)
        turns = self.turns.setdefault(request.priority, [])
        if request.owner not in turns:
            turns.append(request.owner)

    def leave_line(self, request: Request) -> None:
        self.line.remove(request)
        others = [other for other in self.line if (other.owner, other.priority) == (request.owner, request.priority)]
        if not others:
            self.turns[request.priority].remove(request.owner)

    def begin(self, request: Request) -> None:
        self.begun[request] += 1
        if self.begun[request] < request.num_seqs:
            self.enter_line(request)

    @rule(
        owner=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        nbytes=st.sampled_from([0, 10, 60, 500]),
        num_seqs=st.integers(1, 3),
    )
    def arrive(self, owner: str, priority: int, nbytes: int, num_seqs: int) -> None:
        request = Request("", owner, priority, nbytes, num_seqs)
        if len(self.waiting) == 8:
            counts = {name: sum(other.owner == name for other in self.waiting) for name in "abc"}
            if counts[owner] + 1 >= max(counts.values()):
                with pytest.raises(OverloadedError):
                    self.scheduler.add(request, owner)
                return
            displaced = self.scheduler.add(request, owner)
            assert displaced in self.waiting
            assert counts[displaced.owner] == max(counts.values())
            self.leave_line(displaced)
        else:
            assert self.scheduler.add(request, owner) is None
        self.enter_line(request)

    @rule(owner=st.sampled_from("abc"), seconds=st.sampled_from([0.01, 0.5]))
    def charge(self, owner: str, seconds: float) -> None:
        self.scheduler.accounts.charge(owner, seconds, 0.0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        assert self.scheduler.withdraw(request)
        self.leave_line(request)

    @rule()
    def step(self) -> None:
        expected: list[Request] = []
        nbytes = 0
        while nbytes < 100 and (chosen := self.next()) is not None:
            priority, owner = chosen
            self.turns[priority].remove(owner)
            self.turns[priority].append(owner)
            request = next(other for other in self.line if (other.priority, other.owner) == chosen)
            self.leave_line(request)
            if request not in self.running:
                self.admissions += 1
                self.running.append(request)
                self.begun[request] = self.ended[request] = 0
                expected.append(request)
                nbytes += request.nbytes
            self.begin(request)
        assert self.scheduler.admit() == expected
        step = self.scheduler.step()
        used = [self.scheduler.accounts.used(request.owner) for request in step]
        assert used == sorted(used)
        seats = sum(self.begun[request] - self.ended[request] for request in step)
        if self.num_seqs <= 3:
            assert set(step) == set(self.running)
        else:
            last = min(self.begun[request] - self.ended[request] for request in step)
            assert seats - 3 < max(self.begun[request] for request in step)
            assert seats >= 3 or last == 0

    @rule()
    def step_while_paused(self) -> None:
        for request in self.running:
            while self.num_seqs < 3 and self.begun[request] < request.num_seqs:
                self.leave_line(request)
                self.begin(request)
        self.scheduler.admit_answers()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_answer(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.scheduler.end_answer(request)
        self.ended[request] = min(self.ended[request] + 1, self.begun[request])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.scheduler.finish(request)
        self.running.remove(request)
        if request in self.line:
            self.leave_line(request)

    @invariant()
    def agrees(self) -> None:
        assert (self.scheduler.waiting, self.scheduler.running) == (len(self.waiting), len(self.running))
        assert set(self.scheduler) == set(self.running)
        assert [self.scheduler.begun(request) for request in self.running] == [self.begun[one] for one in self.running]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
