"""The scheduler: order and bounds of a step, the line before it, and a model that it must agree with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmring.engine.executors.interface import OverloadedError
from shmring.engine.scheduler import Scheduler, SchedulerConfig
from tests.tables import for_each


@dataclasses.dataclass(eq=False)
class Request:
    """All that a scheduler asks of a request."""

    name: str = ""
    client_id: int = 0
    priority: int = 0
    nbytes: int = 1
    num_seqs: int = 1


def admitted(config: SchedulerConfig, *requests: Request) -> list[str]:
    scheduler: Scheduler[Request] = Scheduler(config)
    for request in requests:
        scheduler.add(request)
    return [request.name for request in scheduler.admit()]


def test_requests_of_one_frontend_go_in_order_of_arrival() -> None:
    assert admitted(SchedulerConfig(), *(Request(name) for name in "abc")) == ["a", "b", "c"]


def test_frontends_take_turns() -> None:
    arrivals = [Request(name, client_id=int(name[0])) for name in ("1a", "1b", "1c", "2a", "3a", "3b")]
    assert admitted(SchedulerConfig(), *arrivals) == ["1a", "2a", "3a", "1b", "3b", "1c"]


def test_a_frontend_that_was_served_goes_behind_the_others_in_the_next_step_too() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_batch_nbytes=1))
    for name in ("1a", "1b", "2a"):
        scheduler.add(Request(name, client_id=int(name[0])))
    assert [request.name for _ in range(3) for request in scheduler.admit()] == ["1a", "2a", "1b"]


def test_lower_priorities_go_first_whoever_sent_them() -> None:
    arrivals = [Request("low", 1, 10), Request("usual", 2, 0), Request("high", 1, -5), Request("usual too", 1, 0)]
    assert admitted(SchedulerConfig(), *arrivals) == ["high", "usual", "usual too", "low"]


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


def test_what_was_withdrawn_is_not_admitted_and_what_runs_can_not_be() -> None:
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig())
    kept, withdrawn = Request("kept"), Request("withdrawn", client_id=1, priority=-1)
    scheduler.add(kept)
    scheduler.add(withdrawn)
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
        self.scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3, max_batch_nbytes=100, max_waiting=8))
        self.line: list[Request] = []
        self.running: list[Request] = []
        self.begun: dict[Request, int] = {}
        self.ended: dict[Request, int] = {}
        self.turns: dict[int, list[int]] = {}  # of each priority, the frontends in line

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.line if request not in self.running]

    @property
    def room(self) -> int:
        return 3 - sum(self.begun[request] - self.ended[request] for request in self.running)

    def enter_line(self, request: Request) -> None:
        self.line.append(request)
        turns = self.turns.setdefault(request.priority, [])
        if request.client_id not in turns:
            turns.append(request.client_id)

    def leave_line(self, request: Request) -> None:
        self.line.remove(request)
        others = [other for other in self.line if (other.client_id, other.priority) == (request.client_id, request.priority)]
        if not others:
            self.turns[request.priority].remove(request.client_id)

    def begin(self, request: Request) -> None:
        self.begun[request] += 1
        if self.begun[request] < request.num_seqs:
            self.enter_line(request)

    @rule(
        client_id=st.integers(1, 3),
        priority=st.integers(-1, 1),
        nbytes=st.sampled_from([0, 10, 60, 500]),
        num_seqs=st.integers(1, 3),
    )
    def arrive(self, client_id: int, priority: int, nbytes: int, num_seqs: int) -> None:
        request = Request("", client_id, priority, nbytes, num_seqs)
        if len(self.waiting) == 8:
            with pytest.raises(OverloadedError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.enter_line(request)

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
        while self.line and self.room and nbytes < 100:
            priority = min(request.priority for request in self.line)
            client_id = self.turns[priority].pop(0)
            self.turns[priority].append(client_id)
            request = next(other for other in self.line if (other.priority, other.client_id) == (priority, client_id))
            self.leave_line(request)
            if request not in self.running:
                self.running.append(request)
                self.begun[request] = self.ended[request] = 0
                expected.append(request)
                nbytes += request.nbytes
            self.begin(request)
        assert self.scheduler.admit() == expected

    @rule()
    def step_while_paused(self) -> None:
        for request in self.running:
            while self.room and self.begun[request] < request.num_seqs:
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
        assert list(self.scheduler) == self.running
        assert [self.scheduler.begun(request) for request in self.running] == [self.begun[one] for one in self.running]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
