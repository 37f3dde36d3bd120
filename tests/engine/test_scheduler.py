"""The scheduler: order and bounds of a step, the line before it, and a model that it must agree with."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


def named(requests: Iterable[Request]) -> str:
    return " ".join(request.name for request in requests)


class Line:
    """A scheduler whose requests are known by name; a name begins with its owner. Of several names, blanks are between them."""

    def __init__(self, *, pauses: bool = False, **bounds: int) -> None:
        self.scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(**bounds), pauses=pauses)
        self.requests: dict[str, Request] = {}

    def __getitem__(self, name: str) -> Request:
        return self.requests[name]

    def add(self, names: str, **fields: int) -> str:
        """Puts requests in line; returns who has lost a place to them."""
        displaced = []
        for name in names.split():
            self.requests[name] = Request(name, name[0], **fields)
            displaced.append(self.scheduler.add(self.requests[name], name[0]))
        return named(request for request in displaced if request is not None)

    def admit(self) -> str:
        return named(self.scheduler.admit())

    def step(self) -> str:
        return named(self.scheduler.step())

    def finish(self, names: str) -> None:
        for name in names.split():
            self.scheduler.finish(self[name])

    def begun(self, name: str) -> int:
        return self.scheduler.begun(self[name])

    def charge(self, owner: str, seconds: float = 1.0) -> None:
        self.scheduler.accounts.charge(owner, seconds, 0.0)


def test_owners_take_turns_and_requests_of_one_go_in_order_of_arrival() -> None:
    line, one_seat = Line(), Line(max_num_seqs=1)  # in the second, nobody has an answer open at a turn
    line.add("a1 a2 a3 b1 c1 c2")
    assert line.admit() == "a1 b1 c1 a2 c2 a3"
    one_seat.add("a1 a2 a3 b1 c1 c2")
    for name in ("a1", "b1", "c1", "a2", "c2", "a3"):
        assert one_seat.admit() == name
        one_seat.finish(name)


def test_a_line_that_is_empty_is_not_kept() -> None:
    """Callers may send any number of priorities."""
    line = Line(max_num_seqs=10_000)
    for priority in range(1000):
        line.add("a", priority=priority)
        assert not line.scheduler.withdraw(Request(priority=priority))
        assert line.admit() == "a"
    assert line.scheduler._lines == {}
    line.add("a", priority=7)
    assert line.scheduler.withdraw(line["a"])
    assert line.scheduler._lines == {}
    line.add("a", priority=7)
    assert line.scheduler.withdraw_all() == [line["a"]]
    assert (line.scheduler._lines, line.scheduler.waiting) == ({}, 0)


def test_who_has_used_least_comes_first_in_the_line_and_in_the_step() -> None:
    line = Line(max_num_seqs=4)
    line.add("a1 b1 a2 b2")
    line.charge("a")
    assert line.admit() == "b1 a1 b2 a2"
    assert line.step() == "b1 b2 a1 a2"
    line.charge("b", 2.0)
    assert line.step() == "a1 a2 b1 b2"


def test_an_owner_with_fewer_answers_open_comes_before_one_that_has_used_less() -> None:
    line = Line(max_num_seqs=3)
    line.add("a1 a2 a3")
    line.admit()
    line.add("a4 b1")
    line.charge("b")
    line.finish("a1")
    assert line.admit() == "b1"


def test_seats_are_given_out_in_turn_where_requests_can_be_paused() -> None:
    line = Line(max_num_seqs=4, pauses=True)
    line.add("a0 a1 a2 a3 a4")
    assert line.admit() == "a0 a1 a2 a3"
    line.add("b0 b1 b2")
    assert line.admit() == "b0 b1", "an equal share of the seats, and no more"
    assert line.admit() == ""
    assert line.step() == "a0 a1 b0 b1"
    assert line.step() == "a2 a3 b0 b1", "who had no seat is first of its owner's"
    line.charge("a")
    assert line.step() == "b0 b1 a0 a1"
    line.finish("b0 b1")
    assert line.admit() == "b2"
    assert line.step()[:2] == "b2"


def test_requests_that_are_paused_are_bounded_however_many_owners_there_are() -> None:
    line = Line(max_num_seqs=2, pauses=True)
    line.add("a b c d e f g h")
    line.admit()
    line.admit()
    assert line.scheduler.running == 4
    first = line.step()
    for name in first.split():
        line.charge(name)
    assert (first, line.step()) == ("a b", "c d"), "each has its turn"


def test_a_request_with_many_answers_is_not_left_out_because_seats_are_fewer() -> None:
    line = Line(max_num_seqs=4, pauses=True)
    line.add("a", num_seqs=4)
    line.admit()
    line.add("b")
    assert line.admit() == "b"
    line.charge("a")
    assert line.step() == "b a"


def test_each_answer_takes_a_seat() -> None:
    line = Line(max_num_seqs=4, pauses=True)
    line.add("a", num_seqs=3)
    line.add("b")
    assert line.admit() == "a b"
    line.add("c")
    assert line.admit() == "c"
    assert (line.step(), line.step()) == ("a b", "c a")


def test_more_urgent_requests_go_first_whoever_sent_them() -> None:
    line = Line()
    for name, priority in (("a low", 10), ("b usual", 0), ("a high", -5), ("a usual", 0)):
        line.add(name.replace(" ", "_"), priority=priority)
    assert line.admit() == "a_high b_usual a_usual a_low"


@for_each("num_seqs", [1, 2])
def test_the_less_urgent_do_not_wait_for_ever(num_seqs: int) -> None:
    """One request of eight is theirs, however many answers the others have."""
    line = Line(max_num_seqs=num_seqs)
    line.add("b")
    served: list[str] = []
    for turn in range(8):
        line.add(f"a{turn}", priority=-9, num_seqs=num_seqs)
        admitted = line.admit()
        line.finish(admitted)
        served += admitted.split()
    assert served[:8] == [*(f"a{turn}" for turn in range(7)), "b"]


def test_the_line_is_told_in_the_order_of_admission() -> None:
    line = Line(max_num_seqs=8)
    line.add("a1 a2 b1")
    line.add("c1", priority=-1)
    line.add("b2")
    line.charge("b")
    assert named(line.scheduler.line()) == "c1 a1 b1 a2 b2" == line.admit()
    assert line.scheduler.line() == []


def test_what_runs_counts_toward_max_num_seqs_until_it_is_finished() -> None:
    line = Line(max_num_seqs=2)
    line.add("a1 a2 a3")
    assert (line.admit(), line.admit()) == ("a1 a2", "")
    line.finish("a1")
    assert line.admit() == "a3"
    assert named(line.scheduler) == "a2 a3"


def test_the_answers_of_a_request_take_places_one_by_one_and_let_others_pass() -> None:
    line = Line(max_num_seqs=3)
    line.add("a1")
    line.add("a2", num_seqs=3)
    line.add("a3")
    assert line.admit() == "a1 a2 a3", "it does not wait for three places, nor do others for it"
    assert (line.begun("a2"), line.admit()) == (1, "")
    line.finish("a1")
    line.add("a4")
    assert (line.admit(), line.begun("a2")) == ("", 2), "its second answer came before the newcomer"
    line.scheduler.end_answer(line["a2"])
    assert line.admit() == "a4", "the third stands behind those that came before the second was begun"
    line.scheduler.end_answer(line["a2"])
    assert (line.admit(), line.begun("a2")) == ("", 3)
    line.scheduler.end_answer(line["a2"])
    line.scheduler.end_answer(line["a2"])  # an executor that counts wrongly frees no place of others
    line.add("a5 a6")
    assert line.admit() == "a5"


def test_a_request_alone_has_all_answers_at_once_and_gives_back_all_places_when_it_ends() -> None:
    line = Line(max_num_seqs=3)
    line.add("a1", num_seqs=3)
    assert (line.admit(), line.begun("a1")) == ("a1", 3)
    line.finish("a1")
    line.add("a2 a3 a4")
    assert line.admit() == "a2 a3 a4"


def test_a_running_request_with_answers_in_line_is_not_waiting() -> None:
    line = Line(max_num_seqs=2, max_waiting=1)
    line.add("b")
    line.admit()
    line.add("a", num_seqs=2)
    assert line.admit() == "a"
    assert (line.scheduler.waiting, line.scheduler.running) == (0, 2)
    assert not line.scheduler.withdraw(line["a"])
    assert named(line.scheduler.all()) == "b a"
    line.add("c")
    assert line.scheduler.waiting == 1
    line.scheduler.admit_answers()
    assert line.begun("a") == 1
    line.finish("b")
    line.scheduler.admit_answers()
    assert line.begun("a") == 2, "also where no waiting request is admitted"
    assert named(line.scheduler.withdraw_all()) == "c"
    line.finish("a")
    assert line.scheduler._lines == {}


@for_each("num_seqs", [0, -1, 4])
def test_a_request_whose_answers_can_never_run_is_refused(num_seqs: int) -> None:
    line = Line(max_num_seqs=3)
    with pytest.raises(ValueError, match=f"n is {num_seqs}; this server takes at most 3"):
        line.add("a", num_seqs=num_seqs)
    assert line.scheduler.waiting == 0


def test_a_step_admits_nothing_more_once_it_has_max_batch_nbytes() -> None:
    line = Line(max_batch_nbytes=100)
    line.add("a1 a2 a3", nbytes=50)
    line.add("a4 a5", nbytes=500)  # more than a step has alone
    assert [line.admit() for _ in range(3)] == ["a1 a2", "a3 a4", "a5"]


def test_a_full_line_refuses_and_is_not_changed() -> None:
    line = Line(max_waiting=2)
    line.add("a1 a2")
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        line.add("a3", priority=-1)
    assert line.admit() == "a1 a2"
    line.add("a4")
    assert line.scheduler.waiting == 1


def test_of_a_full_line_whoever_has_most_loses_the_last_to_an_owner_who_has_fewer() -> None:
    line = Line(max_waiting=4, max_num_seqs=2)
    line.add("b0")
    line.add("a0", num_seqs=2, priority=2)  # its second answer is in line, but it runs
    assert line.admit() == "b0 a0"
    line.add("a1")
    line.add("a2", priority=1)
    assert line.add("a3 b1") == ""
    assert line.add("c1") == "a2", "the least urgent of them"
    assert line.scheduler.waiting == 4
    with pytest.raises(OverloadedError, match="4 requests are waiting"):
        line.add("b2")
    assert sorted(request.name for request in line.scheduler.line()) == ["a1", "a3", "b1", "c1"]


@for_each("option", ["max_num_seqs", "max_batch_nbytes", "max_waiting"])
def test_a_bound_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        SchedulerConfig(**{option: 0})


class SchedulerMachine(RuleBasedStateMachine):
    """Beside the scheduler stands the simplest model: one list, searched for the request that is next.

    Who has a seat in a step, and the order of ``line``, it could only say as the scheduler does: tests above have these.
    """

    @initialize(pauses=st.booleans())
    def begin(self, pauses: bool) -> None:
        self.most_open = 6 if pauses else 3
        self.scheduler: Scheduler[Request] = Scheduler(
            SchedulerConfig(max_num_seqs=3, max_batch_nbytes=100, max_waiting=8), pauses=pauses
        )
        self.line: list[Request] = []
        self.running: dict[Request, list[int]] = {}  # how many of its answers were begun, and how many of these have ended
        self.turns: dict[int, list[str]] = {}  # of each priority, the owners in line
        self.admissions = 0

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.line if request not in self.running]

    def open_of(self, owners: str = "abc") -> int:
        return sum(begun - ended for request, (begun, ended) in self.running.items() if request.owner in owners)

    def may_open(self, owner: str) -> bool:
        owners = {request.owner for request in [*self.line, *self.running]}
        return self.open_of() < 3 or (self.open_of() < self.most_open and self.open_of(owner) < 3 // len(owners))

    def next(self) -> Request | None:
        """Who is next, by looking at everybody."""
        priorities = sorted({request.priority for request in self.line})
        groups = [[priority] for priority in priorities]
        if len(priorities) > 1 and self.admissions % 8 == 7:
            groups.insert(0, priorities[1:])
        for group in groups:
            candidates = [
                (self.open_of(owner), self.scheduler.accounts.used(owner), priority, turn, owner)
                for priority in group
                for turn, owner in enumerate(self.turns[priority])
                if self.may_open(owner)
            ]
            if candidates:
                *_, priority, _, owner = min(candidates)
                return next(request for request in self.line if (request.priority, request.owner) == (priority, owner))
        return None

    def enter_line(self, request: Request) -> None:
        self.line.append(request)
        turns = self.turns.setdefault(request.priority, [])
        if request.owner not in turns:
            turns.append(request.owner)

    def leave_line(self, request: Request) -> None:
        self.line.remove(request)
        if (request.owner, request.priority) not in {(other.owner, other.priority) for other in self.line}:
            self.turns[request.priority].remove(request.owner)

    def open_answer(self, request: Request) -> None:
        self.leave_line(request)
        self.running.setdefault(request, [0, 0])[0] += 1
        if self.running[request][0] < request.num_seqs:
            self.enter_line(request)

    @rule(
        owner=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        nbytes=st.sampled_from([0, 10, 60, 500]),
        num_seqs=st.integers(1, 3),
    )
    def arrive(self, owner: str, priority: int, nbytes: int, num_seqs: int) -> None:
        request = Request("", owner, priority, nbytes, num_seqs)
        counts = Counter(other.owner for other in self.waiting)
        if len(self.waiting) == 8 and counts[owner] + 1 >= max(counts.values()):
            with pytest.raises(OverloadedError, match="8 requests are waiting"):
                self.scheduler.add(request, owner)
            return
        displaced = self.scheduler.add(request, owner)
        if len(self.waiting) == 8:
            assert displaced is not None
            assert counts[displaced.owner] == max(counts.values())
            assert displaced == max(
                (other for other in self.waiting if other.owner == displaced.owner),
                key=lambda other: (other.priority, self.line.index(other)),
            )
            self.leave_line(displaced)
        else:
            assert displaced is None
        self.enter_line(request)

    @rule(owner=st.sampled_from("abc"), seconds=st.sampled_from([0.01, 0.5]))
    def charge(self, owner: str, seconds: float) -> None:
        self.scheduler.accounts.charge(owner, seconds, 0.0)

    @precondition(lambda self: self.line or self.running)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        request = data.draw(st.sampled_from([*self.waiting, *self.running, Request(priority=7)]))
        is_waiting = request in self.waiting
        assert self.scheduler.withdraw(request) == is_waiting
        if is_waiting:
            self.leave_line(request)

    @rule()
    def step(self) -> None:
        expected: list[Request] = []
        while sum(request.nbytes for request in expected) < 100 and (request := self.next()) is not None:
            turns = self.turns[request.priority]
            turns.append(turns.pop(turns.index(request.owner)))
            if request not in self.running:
                self.admissions += 1
                expected.append(request)
            self.open_answer(request)
        assert self.scheduler.admit() == expected
        step = self.scheduler.step()
        used = [self.scheduler.accounts.used(request.owner) for request in step]
        assert used == sorted(used)
        if self.open_of() <= 3:
            assert set(step) == set(self.running)
        else:
            open_answers = [begun - ended for begun, ended in map(self.running.__getitem__, step)]
            assert sum(open_answers) >= 3 or min(open_answers) == 0
            assert sum(open_answers) - 3 < max(self.running[request][0] for request in step)

    @rule()
    def step_while_paused(self) -> None:
        for request in self.scheduler:  # in its order: who had no seat is first
            while self.open_of() < 3 and self.running[request][0] < request.num_seqs:
                self.open_answer(request)
        self.scheduler.admit_answers()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_answer(self, data: Any) -> None:
        """An executor that counts wrongly frees no place of others."""
        request = data.draw(st.sampled_from(list(self.running)))
        self.scheduler.end_answer(request)
        begun, ended = self.running[request]
        self.running[request][1] = min(ended + 1, begun)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        request = data.draw(st.sampled_from(list(self.running)))
        self.scheduler.finish(request)
        if request in self.line:
            self.leave_line(request)
        del self.running[request]

    @invariant()
    def agrees(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.waiting, scheduler.running, scheduler.seats_taken) == (
            len(self.waiting),
            len(self.running),
            self.open_of(),
        )
        assert set(scheduler) == set(self.running)
        assert len(scheduler.all()) == len({*self.waiting, *self.running}) == len({*scheduler.all(), *self.waiting})
        assert [scheduler.begun(request) for request in self.running] == [begun for begun, _ in self.running.values()]
        assert {account.owner: (account.waiting, account.open) for account in scheduler.accounts} == {
            owner: (sum(request.owner == owner for request in self.waiting), self.open_of(owner))
            for owner in {request.owner for request in [*self.waiting, *self.running]}
        }
        assert set(scheduler._lines) == {priority for priority, owners in self.turns.items() if owners}, "none that is empty"

    def teardown(self) -> None:
        assert self.scheduler.withdraw_all() == self.waiting
        assert not any(account.waiting for account in self.scheduler.accounts)
        assert (self.scheduler.waiting, self.scheduler._lines) == (0, {})


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
