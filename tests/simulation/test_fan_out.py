"""Workers in the simulator: what is broken on purpose is found, and every small scenario is sound."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from shmring.core.compiled import Parcel
from shmring.ring import workers as workers_module
from shmring.ring.workers import Workers, _Worker
from tests.simulation.exploration import explore
from tests.simulation.failure import replay
from tests.simulation.fan_out import EngineWorker, FanOut, WorkerLink
from tests.simulation.walk import walk
from tests.simulation.wire import Link
from tests.simulation.worker import WorkerProcess

MOST_STEPS = 60_000  # in which a walk must find what is broken on purpose
_HANGS_S = 3600  # what computes for ever is ended by its CPU time (crash.py); a minute of a core is long on a busy machine

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("name", ["gathered", "stopped worker"])
def test_the_first_states_of_a_small_scenario_with_workers_are_sound(name: str) -> None:
    found = explore(name, max_states=400)
    assert found.failure is None
    assert not found.complete
    assert found.states >= 400


@pytest.mark.timeout(_HANGS_S)
@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize("name", ["gathered", "shared", "workers", "joining", "stopped worker"])
def test_every_state_of_a_small_scenario_with_workers_is_sound(name: str) -> None:
    found = explore(name, max_states=20_000)
    assert found.failure is None
    assert found.complete
    assert found.states > 1_000
    assert found.settled > 300


# -- what is broken on purpose ------------------------------------------------------------------------------------------


def a_worker_that_left_counts_as_dead(patch: Patch) -> None:
    part = Workers.part
    patch.setattr(Workers, "part", lambda workers, worker, how, **named: part(workers, worker, how, uses_nothing=True))


def a_death_frees_nothing(patch: Patch) -> None:
    def mutated(workers: Workers, worker: _Worker) -> None:
        workers.part(worker, "has died")

    patch.setattr(Workers, "_died", mutated)


def a_death_fails_no_gather(patch: Patch) -> None:
    def mutated(workers: Workers, worker: _Worker) -> None:
        workers.book.died(worker.record)
        workers.look()

    patch.setattr(Workers, "_died", mutated)
    patch.setattr(EngineWorker, "connection_lost", lambda worker: worker._workers.book.part(worker.record))


def nobody_looks_after_slots(patch: Patch) -> None:
    patch.setattr(Workers, "slots_are_kept", lambda workers: None)


def a_turn_is_not_passed_on(patch: Patch) -> None:
    patch.setattr(Workers, "_pass_turn", lambda workers, parcel: None)


def who_is_cancelled_is_in_line(patch: Patch) -> None:
    """Whoever is cancelled as its turn comes does not pass it on."""

    async def mutated(workers: Workers, parcel: Parcel) -> None:
        if not workers.is_behind(parcel):
            workers._sending[parcel] = None
            workers.end.is_crowded = True
            return
        await workers._line.enter(parcel)  # it stays in line, whatever becomes of it

    patch.setattr(Workers, "_take_turn", mutated)


def who_has_stopped_holds_up_all(patch: Patch) -> None:
    patch.setattr(workers_module, "_meet", lambda parcel, other: True)


def bells_are_not_heard(patch: Patch) -> None:
    patch.setattr(Workers, "hear", lambda workers: None)


def who_joins_late_gets_what_was_sent_before(patch: Patch) -> None:
    join = FanOut.join

    def mutated(fan_out: FanOut, process: WorkerProcess, rank: int) -> EngineWorker:
        worker = join(fan_out, process, rank)
        for other in fan_out.connections[:-1]:
            worker.wire.to_frontend.extend(other.wire.to_frontend)
        return worker

    patch.setattr(FanOut, "join", mutated)


def one_worker_gets_another_order(patch: Patch) -> None:
    def mutated(link: WorkerLink, record: bytes) -> None:
        Link.queue(link, record)
        link.arrived.append(record)
        if link.worker.rank == 1:
            link.records.rotate()

    patch.setattr(WorkerLink, "queue", mutated)


def a_message_is_left_though_it_is_viewed(patch: Patch) -> None:
    leave = WorkerProcess.leave

    def mutated(worker: WorkerProcess, index: int, is_viewed: int) -> None:
        sequence = worker.in_hands[index].sequence
        leave(worker, index, is_viewed)
        sent = worker.connection.fan_out.truth.sent.get(sequence)
        if sent is not None:
            struct.pack_into("<Q", memoryview(worker.connection.page), 2048 + 8 * sent.stamp, sequence)

    patch.setattr(WorkerProcess, "leave", mutated)


def a_message_goes_to_one_too_few(patch: Patch) -> None:
    def mutated(link: WorkerLink, record: bytes) -> None:
        if link.worker.rank != 1 or record[1] != 120:
            Link.queue(link, record)
            link.arrived.append(record)

    patch.setattr(WorkerLink, "queue", mutated)


def a_call_overtakes(patch: Patch) -> None:
    async def mutated(workers: Workers, parcel: Parcel) -> None:
        workers._sending[parcel] = None
        workers.end.is_crowded = True

    patch.setattr(Workers, "_take_turn", mutated)


def replies_are_mixed_up(patch: Patch) -> None:
    def mutated(worker: WorkerProcess, index: int) -> None:
        message = worker.in_hands[index]
        record = worker._end.pack_answer([message.payload[0], 0], message.sequence)
        worker._end.mark_answered(message)
        worker.wire.towards_engine.queue(record)

    patch.setattr(WorkerProcess, "reply", mutated)


@pytest.mark.timeout(_HANGS_S)
@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize(
    "mutation",
    [
        a_worker_that_left_counts_as_dead,
        a_death_frees_nothing,
        a_death_fails_no_gather,
        a_turn_is_not_passed_on,
        who_is_cancelled_is_in_line,
        bells_are_not_heard,
        who_joins_late_gets_what_was_sent_before,
        one_worker_gets_another_order,
        a_message_is_left_though_it_is_viewed,
        a_message_goes_to_one_too_few,
        a_call_overtakes,
    ],
)
def test_what_is_broken_is_found_and_comes_down_to_a_few_actions(mutation: Callable[[Patch], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        walked = walk(MOST_STEPS, seed=8, in_the_midst=mutation is not a_death_fails_no_gather)  # which then takes few actions
        assert walked.failure is not None
        print(f"{mutation.__name__}: step {walked.steps}, {len(walked.failure.trace)} actions: {walked.failure.text}")
        assert len(walked.failure.trace) <= 40
        assert str(replay(walked.failure)) == walked.failure.text
    assert replay(walked.failure) is None


@pytest.mark.slow  # the same
@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (nobody_looks_after_slots, "shared"),
        (replies_are_mixed_up, "gathered"),
        (who_has_stopped_holds_up_all, "stopped worker"),
    ],
)
def test_what_needs_few_actions_is_found_with_the_fewest(mutation: Callable[[Patch], Any], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore(name, max_states=20_000)
        assert found.failure is not None
        print(f"{mutation.__name__}: {found.states} states, {len(found.failure.trace)} actions: {found.failure.text}")
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None
