"""What happens in the midst of calls: small scenarios are sound in every state; what is broken, or crashes, is found."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any

import msgspec
import pytest

from shmring.client.life import SessionLife
from shmring.client.session import Session as RealSession
from shmring.ring.shell import Shell
from tests.simulation.exploration import explore
from tests.simulation.failure import replay
from tests.simulation.scenario import IN_CODE, Kind, Scenario
from tests.simulation.simulation import Simulation
from tests.simulation.walk import choose, walk

# What computes for ever is ended by its CPU time (crash.py), and some seconds of that are minutes on a crowded machine.
pytestmark = pytest.mark.timeout(600)

Patch = pytest.MonkeyPatch


def require_sound(name: str) -> None:
    """Visits every state of a scenario."""
    found = explore(name, max_states=20_000)
    assert found.failure is None, "\n".join(found.failure.lines())
    assert found.complete
    assert found.states > 10
    assert found.settled > 5


# Each is named in ``tests/mutants/`` for the looks that it can't do without.


def test_what_a_call_hears_may_end_its_session() -> None:
    require_sound("looking")


def test_slots_may_go_as_their_caller_looks_for_one() -> None:
    require_sound("looking for slots")


def test_code_of_a_shape_may_leave_the_slot() -> None:
    require_sound("code of shapes")


@pytest.mark.slow  # seconds of computing
def test_code_of_a_message_to_workers_may_leave_the_claim() -> None:
    require_sound("code of messages")


def test_code_of_a_reply_may_end_its_request() -> None:
    require_sound("code of handlers")


@pytest.mark.slow  # seconds of computing
def test_code_of_a_payload_may_leave_its_slot_before_a_copy_that_is_cancelled() -> None:
    require_sound("code before copies")


def test_a_reply_or_an_end_may_come_as_its_caller_looks() -> None:
    require_sound("looking for replies")


@pytest.mark.slow  # seconds of computing
def test_code_of_a_payload_may_end_its_session_or_send_another() -> None:
    require_sound("code")


def test_code_of_an_answer_may_leave_its_message() -> None:
    require_sound("code of answers")


@pytest.mark.slow  # most of a minute each
@pytest.mark.parametrize(
    "name",
    [
        "looking for recalls",
        "claiming",
        "code in slots",
        "code of content",
    ],
)
def test_every_state_of_what_happens_in_the_midst_of_calls_is_sound(name: str) -> None:
    require_sound(name)


def test_something_happens_in_the_midst_of_every_call_that_lets_it() -> None:
    """Else an action would say that it does, and nothing would be tried."""
    unseen = {
        Kind.REQUEST, Kind.REQUEST_NOW, Kind.SUBMIT, Kind.READ, Kind.TENSOR, Kind.CLAIM, Kind.REPLY, Kind.REPLY_NOW,
        Kind.BROADCAST, Kind.TURN,
    }  # fmt: skip
    for seed in (28, 7, 5, 3, 2, 1, 0, *range(32)):  # the first of them are enough, as long as worlds are drawn as they are
        random = Random(seed)
        scenario = msgspec.structs.replace(Scenario.draw(random), looks=True, in_code=IN_CODE)
        with closing(Simulation(scenario)) as simulation:
            for _ in range(250):
                simulation.happen(choose(random, simulation.enabled()))
            unseen.difference_update(kind for kind, _ in simulation.midst.happened)
        if not unseen:
            return
    raise AssertionError(f"nothing happens in the midst of {unseen}")


# -- what is broken on purpose -------------------------------------------------------------------------------------------


def nobody_looks_whether_a_claim_goes_on(patch: Patch) -> None:
    patch.setattr(Shell, "refuse", lambda shell, claim: None)


def nobody_looks_whether_a_session_goes_on(patch: Patch) -> None:
    patch.setattr(SessionLife, "check_alive", lambda life: None)


@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (nobody_looks_whether_a_claim_goes_on, "code of handlers"),
        (nobody_looks_whether_a_session_goes_on, "code"),
    ],
)
def test_what_is_broken_is_found_with_the_fewest_actions(mutation: Callable[[Patch], Any], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore(name, max_states=20_000)
        assert found.failure is not None
        print(f"{mutation.__name__}: {found.states} states, {len(found.failure.trace)} actions: {found.failure.text}")
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None


# -- crashes -------------------------------------------------------------------------------------------------------------


def a_refusal_crashes(patch: Patch) -> None:
    """As where a look is missing in what is compiled."""
    handle_message = RealSession.handle_message

    def mutated(session: RealSession, record: bytes) -> None:
        handle_message(session, record)
        if session.error is not None:
            os.kill(os.getpid(), signal.SIGSEGV)

    patch.setattr(RealSession, "handle_message", mutated)


def test_a_crash_is_a_failure_with_the_actions_that_lead_to_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_refusal_crashes(patch)
        found = explore("looking", max_states=1_000)
        assert found.failure is not None
        assert found.failure.crashes
        assert found.failure.text == "it crashes: SIGSEGV"
        assert found.failure.trace[0].kind is Kind.ENGINE_HANGS_UP
        assert len(found.failure.trace) == 2
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None


@pytest.mark.slow  # it is shortened, in processes
def test_a_crash_of_a_walk_comes_down_to_a_few_actions() -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_refusal_crashes(patch)
        walked = walk(5_000, seed=8)
        assert walked.failure is not None
        assert walked.failure.text == "it crashes: SIGSEGV"
        assert len(walked.failure.trace) <= 8
