"""Which engine a request goes to: load, turns and keys, without any engine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shmring.client.routing import EngineLoad, LoadEstimate, Route, Router
from tests.tables import for_each

NAMES = ["vision-0", "vision-1", "vision-2", "vision-3"]


def load(in_flight: int, waiting: int = 0, *, responds: bool = True) -> EngineLoad:
    return EngineLoad(in_flight, waiting, responds)


def routed(router: Router, loads: dict[str, int], count: int) -> Counter[str]:
    """Where so many requests go that nobody finishes."""
    loads = dict(loads)
    chosen: Counter[str] = Counter()
    for _ in range(count):
        name = router.choose({name: load(in_flight) for name, in_flight in loads.items()})
        loads[name] += 1
        chosen[name] += 1
    return chosen


# -- by load ------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), min_size=1), st.integers(0, 200), st.integers(0, 3))
def test_a_burst_is_spread_until_all_have_as_much(loads: dict[str, int], count: int, first: int) -> None:
    chosen = routed(Router(NAMES, "least_loaded", first), loads, count)
    after = {name: in_flight + chosen[name] for name, in_flight in loads.items()}
    raised = [name for name in loads if chosen[name]]
    assert sum(chosen.values()) == count
    if raised:
        assert max(after[name] for name in raised) - min(after.values()) <= 1


@given(st.integers(1, 4), st.integers(0, 100), st.sampled_from(["least_loaded", "round_robin"]), st.integers(0, 3))
def test_equals_take_turns(engines: int, count: int, route: Route, first: int) -> None:
    router = Router(NAMES[:engines], route, first)
    chosen = Counter(router.choose({name: load(7, 3) for name in NAMES[:engines]}) for _ in range(count))
    assert max(chosen.values(), default=0) - min((chosen[name] for name in NAMES[:engines]), default=0) <= 1


def test_of_two_that_have_as_much_the_one_in_which_less_waits_is_chosen() -> None:
    router = Router(NAMES[:2], "least_loaded")
    assert all(router.choose({"vision-0": load(4, 3), "vision-1": load(4, 1)}) == "vision-1" for _ in range(3))


def test_turns_do_not_mind_the_load() -> None:
    router = Router(NAMES[:3], "round_robin")
    loads = {"vision-0": load(100), "vision-1": load(0), "vision-2": load(50)}
    assert [router.choose(loads) for _ in range(4)] == ["vision-0", "vision-1", "vision-2", "vision-0"]


@for_each("route", ["least_loaded", "round_robin"])
def test_an_engine_that_does_not_respond_gets_nothing_while_another_one_does(route: Route) -> None:
    router = Router(NAMES[:2], route)
    loads = {"vision-0": load(0, responds=False), "vision-1": load(1000)}
    assert {router.choose(loads) for _ in range(5)} == {"vision-1"}
    loads = {"vision-0": load(0, responds=False), "vision-1": load(0, responds=False)}
    assert {router.choose(loads) for _ in range(5)} == {"vision-0", "vision-1"}


# -- what a client sees of an engine ----------------------------------------------------------------------------------------


class Engine:
    """What a client can see of an engine."""

    def __init__(self) -> None:
        self.estimate = LoadEstimate()
        self.published = self.own = self.sent_nbytes = self.taken_nbytes = 0

    def look(self, now: float = 0.0) -> EngineLoad:
        return self.estimate.look(
            published=self.published,
            waiting=0,
            own=self.own,
            unread_nbytes=self.sent_nbytes - self.taken_nbytes,
            taken_nbytes=self.taken_nbytes,
            now=now,
        )


def test_what_was_sent_since_the_engine_spoke_last_comes_on_top() -> None:
    engine = Engine()
    engine.published = 10  # of others
    assert engine.look().in_flight == 10
    engine.own = 3
    assert engine.look().in_flight == 13
    engine.published = 13  # it has heard of them
    assert engine.look().in_flight == 13
    engine.own = 5
    assert engine.look().in_flight == 15


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 1000)), min_size=1))
def test_whatever_an_engine_publishes_what_is_known_to_be_there_counts(seen: list[tuple[int, int]]) -> None:
    engine = Engine()
    for engine.published, engine.own in seen:
        assert engine.look().in_flight >= engine.own


def test_an_engine_that_leaves_what_was_sent_unread_does_not_respond() -> None:
    engine = Engine()
    assert engine.look(0.0).responds
    engine.sent_nbytes = 100
    assert engine.look(50.0).responds, "that may have been sent just now"
    assert engine.look(50.09).responds
    assert not engine.look(50.2).responds
    engine.taken_nbytes = 60
    assert engine.look(50.3).responds, "it reads"
    assert not engine.look(50.5).responds
    engine.taken_nbytes = 100
    assert engine.look(99.0).responds, "nothing is unread"


# -- by key ---------------------------------------------------------------------------------------------------------------

keys = st.text() | st.binary() | st.text(st.characters(codec=None))  # lone surrogates, too
names = st.lists(st.sampled_from([f"engine-{number}" for number in range(12)]), min_size=2, max_size=12, unique=True)


@given(names, st.lists(keys), st.data())
def test_an_engine_that_goes_moves_its_own_keys_only_and_gets_them_back(
    names: list[str], keys: list[str | bytes], data: st.DataObject
) -> None:
    router = Router(names, "least_loaded")
    before = [router.choose_for(key, names) for key in keys]
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for key, owner in zip(keys, before, strict=True):
        now = router.choose_for(key, left)
        assert now != gone
        assert owner in (now, gone)
    assert [router.choose_for(key, data.draw(st.permutations(names))) for key in keys] == before


@given(names, keys)
def test_which_order_engines_are_named_in_does_not_matter(names: list[str], key: str | bytes) -> None:
    other = Router(names[::-1], "round_robin", 1)
    assert Router(names, "least_loaded").choose_for(key, names) == other.choose_for(key, names[::-1])


def test_keys_are_spread_evenly() -> None:
    router = Router(NAMES, "least_loaded")
    owners = Counter(router.choose_for(f"session-{number}", NAMES) for number in range(4000))
    assert min(owners[name] for name in NAMES) > 850, owners  # always the same ones


def test_other_processes_have_the_same_opinion() -> None:
    program = (
        "from shmring.client.routing import Router; names = [f'vision-{n}' for n in range(4)];"
        "print(','.join(Router(names, 'least_loaded').choose_for(f'session-{n}', names) for n in range(50)))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    router = Router(NAMES, "least_loaded")
    assert answers == {",".join(router.choose_for(f"session-{number}", NAMES) for number in range(50))}
