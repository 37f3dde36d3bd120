"""Which of several engines of a cluster a request goes to: near ones first, within a bound. Without any engine."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from shmring.client.routing import EngineLoad, Router
from shmring.integrations.ray.routing import ROUTES, ClusterRouter

NAMES = ["vision-0", "vision-1", "vision-2", "vision-3"]
BOUND = 4

LOADS = st.dictionaries(
    st.sampled_from(NAMES), st.builds(EngineLoad, st.integers(0, 20), st.integers(0, 3), st.booleans()), min_size=1
)
SOME = st.frozensets(st.sampled_from(NAMES))


@given(LOADS, SOME)
@example(
    {"vision-0": EngineLoad(0, 0, False), "vision-1": EngineLoad(9, 0, True), "vision-2": EngineLoad(8, 0, True)},
    frozenset(["vision-1"]),
)
def test_a_near_engine_is_chosen_unless_it_has_much_more_to_do(loads: dict[str, EngineLoad], some: frozenset[str]) -> None:
    near = some & loads.keys()
    chosen = ClusterRouter(NAMES, "nearest", BOUND).choose(loads, near)
    responding = {name: load.in_flight for name, load in loads.items() if load.responds}
    if not responding:
        assert chosen in loads
        return
    least = min(responding.values())
    good = {name: in_flight for name, in_flight in responding.items() if name in near and in_flight <= least + BOUND}
    assert chosen in responding
    assert responding[chosen] == min((good or responding).values())
    assert not good or chosen in good


@given(st.integers(0, 100), st.integers(0, 3))
def test_a_burst_goes_to_the_near_engine_until_it_has_so_much_more(count: int, first: int) -> None:
    router = ClusterRouter(NAMES, "nearest", BOUND, first)
    in_flight: Counter[str] = Counter()
    for _ in range(count):
        loads = {name: EngineLoad(in_flight[name], 0, True) for name in NAMES}
        in_flight[router.choose(loads, ["vision-2"])] += 1
    others = [in_flight[name] for name in NAMES if name != "vision-2"]
    assert max(others) - min(others) <= 1
    assert in_flight["vision-2"] - min(others) <= BOUND + 1
    assert in_flight["vision-2"] == min(count, in_flight["vision-2"]) >= max(others)


@given(LOADS, SOME, st.integers(0, 3))
def test_the_other_routes_are_those_of_one_machine(loads: dict[str, EngineLoad], near: frozenset[str], first: int) -> None:
    for route in ROUTES[1:]:
        assert route != "nearest"
        chosen = ClusterRouter(NAMES, route, BOUND, first).choose(loads, near)
        assert chosen == Router(NAMES, route, first).choose(loads)


@given(st.text() | st.binary(), st.frozensets(st.sampled_from(NAMES), min_size=1))
def test_a_key_belongs_to_the_same_engine_as_on_one_machine(key: str | bytes, names: frozenset[str]) -> None:
    chosen = ClusterRouter(NAMES, "nearest", BOUND).choose_for(key, names)
    assert chosen == Router(NAMES[::-1], "least_loaded").choose_for(key, names)
