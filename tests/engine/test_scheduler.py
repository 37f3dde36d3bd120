"""The scheduler: order and bounds of a step, the line before it, and a model that it must agree with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmring.engine.scheduler import OverloadedError, Scheduler, SchedulerConfig
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


def test_a_request_with_several_answers_takes_as_many_places() -> None:
    requests = [Request("a"), Request("b", num_seqs=3), Request("c")]
    scheduler: Scheduler[Request] = Scheduler(SchedulerConfig(max_num_seqs=3))
    for request in requests:
        scheduler.add(request)
    assert [request.name for request in scheduler.admit()] == ["a"], "those behind it wait, or it would wait for ever"
    scheduler.finish(requests[0])
    assert [request.name for request in scheduler.admit()] == ["b"]
    scheduler.finish(requests[1])
    assert [request.name for request in scheduler.admit()] == ["c"]


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
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.turns: dict[int, list[int]] = {}  # of each priority, the frontends in line

    @rule(client_id=st.integers(1, 3), priority=st.integers(-1, 1), nbytes=st.sampled_from([0, 10, 60, 500]))
    def arrive(self, client_id: int, priority: int, nbytes: int) -> None:
        request = Request("", client_id, priority, nbytes)
        if len(self.waiting) == 8:
            with pytest.raises(OverloadedError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.waiting.append(request)
        turns = self.turns.setdefault(priority, [])
        if client_id not in turns:
            turns.append(client_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        assert self.scheduler.withdraw(request)
        self.waiting.remove(request)
        self.leave_line(request)

    def leave_line(self, request: Request) -> None:
        others = [other for other in self.waiting if (other.client_id, other.priority) == (request.client_id, request.priority)]
        if not others:
            self.turns[request.priority].remove(request.client_id)

    @rule()
    def step(self) -> None:
        expected: list[Request] = []
        nbytes = 0
        while self.waiting and len(self.running) < 3 and nbytes < 100:
            priority = min(request.priority for request in self.waiting)
            client_id = self.turns[priority].pop(0)
            self.turns[priority].append(client_id)
            request = next(other for other in self.waiting if (other.priority, other.client_id) == (priority, client_id))
            self.waiting.remove(request)
            self.leave_line(request)
            self.running.append(request)
            expected.append(request)
            nbytes += request.nbytes
        assert self.scheduler.admit() == expected

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.scheduler.finish(request)
        self.running.remove(request)

    @invariant()
    def agrees(self) -> None:
        assert (self.scheduler.waiting, self.scheduler.running) == (len(self.waiting), len(self.running))
        assert list(self.scheduler) == self.running


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
