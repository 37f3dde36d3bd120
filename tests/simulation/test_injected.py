"""Requests of the engine's own process in the simulator: a small scenario is sound, and what is broken on purpose is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmring.ring import injecting
from shmring.ring.injecting import Injected, Injector
from tests.simulation.exploration import explore
from tests.simulation.failure import replay

# As test_midst: what computes for ever is ended by its CPU time.
pytestmark = pytest.mark.timeout(600)

Patch = pytest.MonkeyPatch


@pytest.mark.slow  # most of a minute
def test_every_state_of_a_small_scenario_is_sound() -> None:
    found = explore("injected", max_states=20_000)
    assert found.failure is None, "\n".join(found.failure.lines())
    assert found.complete
    assert found.settled > 100


def what_is_read_stays_unread(patch: Patch) -> None:
    count = injecting.Unread.count
    patch.setattr(injecting.Unread, "count", lambda unread, nbytes: count(unread, max(0, nbytes)))


def who_reads_is_not_told_of_the_end(patch: Patch) -> None:
    def end(request: Injected, error: Exception | None) -> None:
        request.ended, request._error = True, error

    patch.setattr(Injected, "end", end)


def the_book_is_not_told_of_an_abort(patch: Patch) -> None:
    patch.setattr(Injector, "abort", lambda injector, request: injector._requests.pop(request.request_id, None))


def room_is_not_given_back(patch: Patch) -> None:
    def count(unread: injecting.Unread, nbytes: int) -> None:
        unread._nbytes += nbytes
        if not unread.can_write:
            unread._room.clear()

    patch.setattr(injecting.Unread, "count", count)


@pytest.mark.parametrize(
    ("mutation", "text"),
    [
        (what_is_read_stays_unread, "unread replies are counted that are not there, or the reverse"),
        (who_reads_is_not_told_of_the_end, "a request of the engine's process never ended"),
        (the_book_is_not_told_of_an_abort, "RemoteProtocolError: more than max_inflight (1) requests were submitted"),
        (room_is_not_given_back, "a request of the engine's process never ended"),
    ],
)
def test_what_is_broken_is_found_with_the_fewest_actions(mutation: Callable[[Patch], None], text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore("injected", max_states=20_000)
        assert found.failure is not None
        print(f"{mutation.__name__}: {found.states} states, {len(found.failure.trace)} actions: {found.failure.text}")
        assert found.failure.text == text
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None
