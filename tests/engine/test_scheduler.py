"""The scheduler: order and bounds of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.request import EngineRequest
from engine.scheduler import Scheduler, SchedulerConfig


def requests(*sizes: int) -> list[EngineRequest]:
    """Requests of these sizes; a scheduler asks nothing else of a claim."""
    claims: list[Any] = [SimpleNamespace(nbytes=nbytes) for nbytes in sizes]
    return [EngineRequest(claim, 0.0) for claim in claims]


def fill(config: SchedulerConfig, waiting: list[EngineRequest]) -> list[EngineRequest]:
    rest = iter(waiting[1:])
    return Scheduler(config).fill(waiting[0], lambda: next(rest, None))


def test_a_step_takes_what_waits_in_order_of_arrival() -> None:
    waiting = requests(1, 2, 3)
    assert fill(SchedulerConfig(), waiting) == waiting


def test_a_step_is_bounded_by_max_num_seqs() -> None:
    waiting = requests(1, 1, 1, 1)
    assert fill(SchedulerConfig(max_num_seqs=3), waiting) == waiting[:3]


def test_a_step_takes_nothing_more_once_it_has_max_batch_nbytes() -> None:
    waiting = requests(60, 60, 60)
    assert fill(SchedulerConfig(max_batch_nbytes=100), waiting) == waiting[:2]


def test_a_request_larger_than_a_step_goes_alone() -> None:
    waiting = requests(500, 1)
    assert fill(SchedulerConfig(max_batch_nbytes=100), waiting) == waiting[:1]


def test_what_is_not_in_the_step_is_not_claimed() -> None:
    taken = []
    first, *rest = requests(1, 1, 1, 1)

    def take_next() -> EngineRequest:
        taken.append(rest[len(taken)])
        return taken[-1]

    Scheduler(SchedulerConfig(max_num_seqs=2)).fill(first, take_next)
    assert taken == rest[:1]


@pytest.mark.parametrize("option", ["max_num_seqs", "max_batch_nbytes"])
def test_a_bound_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        SchedulerConfig(**{option: 0})
