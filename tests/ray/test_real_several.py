"""Three nodes with an engine each, and a fourth that joins: where requests go, and what happens when an engine does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.integrations.ray import EngineActor, statistics
from tests.ray.actors import Caller, handler
from tests.ray.conftest import Nodes, is_running, kill
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(500)

NAMES = ["vision-0", "vision-1", "vision-2"]
HANG = {"do": "sleep", "s": 600}
KEYS = [f"session-{number}" for number in range(40)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes(3)
    yield made
    made.close()


def start(nodes: Nodes, number: int, name: str) -> Any:
    return EngineActor.options(**nodes.on(number)).remote(name, handler, slab_nbytes="32MiB")


def caller_on(nodes: Nodes, number: int, name: Any = "vision-*", **options: Any) -> Any:
    caller = ray.remote(Caller).options(**nodes.on(number), max_concurrency=1000).remote()
    ray.get(caller.connect.remote(name, **options))
    return caller


@pytest.fixture(scope="module")
def engines(nodes: Nodes) -> Iterator[dict[str, Any]]:
    """One on each node, numbered as it is."""
    started = {name: start(nodes, number, name) for number, name in enumerate(NAMES)}
    ray.get([engine.where.remote() for engine in started.values()])
    yield started
    for engine in started.values():
        ray.kill(engine)


@pytest.fixture(scope="module")
def caller(nodes: Nodes, engines: dict[str, Any]) -> Any:
    """On node 1, with a small bound."""
    return caller_on(nodes, 1, near_bound=2)


def running(engine: Any) -> int:
    """How many requests an engine has; none, while Ray starts it again."""
    try:
        found: int = ray.get(engine.load.remote())[0]
    except ray.exceptions.RayActorError:
        return 0
    return found


def hang(caller: Any, engines: dict[str, Any], name: str, count: int) -> Any:
    """Has an engine work on so many requests, until they are aborted by the name "hang"."""
    before = running(engines[name])
    hanging = caller.requests.remote(HANG, count, engine=name, request_id="hang")
    until(lambda: running(engines[name]) == before + count)
    return hanging


def let_go(caller: Any, engines: dict[str, Any], *hanging: Any) -> None:
    ray.get(caller.abort.remote("hang"))
    for each in hanging:
        assert {type(result) for result, _ in ray.get(each)} == {shmring.AbortedError}
    until(lambda: sum(map(running, engines.values())) == 0)


def test_requests_go_to_the_nearest_engine(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    assert sorted(ray.get(caller.names.remote())) == NAMES
    assert ray.get(caller.who.remote(20)) == ["vision-1"] * 20
    for name in NAMES:
        assert ray.get(caller.who.remote(1, engine=name)) == [name]
    loads = ray.get(caller.loads.remote())
    assert {name: load.in_flight for name, load in loads.items()} == dict.fromkeys(NAMES, 0)
    tensor = {"do": "sum", "x": torch.ones(100_000)}
    assert [ray.get(caller.request.remote(tensor, engine=name))["sum"] for name in NAMES] == [100_000] * 3


def test_a_near_engine_that_has_too_much_to_do_is_passed_over(engines: dict[str, Any], caller: Any) -> None:
    few = hang(caller, engines, "vision-1", 2)
    assert ray.get(caller.who.remote(5)) == ["vision-1"] * 5
    more = hang(caller, engines, "vision-1", 1)
    assert set(ray.get(caller.who.remote(6))) == {"vision-0", "vision-2"}
    assert ray.get(caller.loads.remote())["vision-1"].in_flight == 3
    far = [hang(caller, engines, name, 2) for name in ("vision-0", "vision-2")]  # now all have about as much
    assert ray.get(caller.who.remote(5)) == ["vision-1"] * 5
    let_go(caller, engines, few, more, *far)
    assert ray.get(caller.who.remote(5)) == ["vision-1"] * 5


def test_the_load_of_others_is_seen(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    """A far engine says its load with its replies, and when it is asked."""
    other = caller_on(nodes, 0)
    hanging = hang(other, engines, "vision-0", 5)
    until(lambda: ray.get(caller.loads.remote())["vision-0"].in_flight == 5)
    let_go(other, engines, hanging)
    until(lambda: ray.get(caller.loads.remote())["vision-0"].in_flight == 0)
    ray.get(other.close.remote())
    ray.kill(other)


@pytest.mark.parametrize("route", ["least_loaded", "round_robin"])
def test_a_burst_is_spread_over_all_nodes(nodes: Nodes, engines: dict[str, Any], route: str) -> None:
    caller = caller_on(nodes, 2, NAMES, route=route)
    hanging = caller.requests.remote(HANG, 30, request_id="hang")
    until(lambda: sum(map(running, engines.values())) == 30)
    assert {name: running(engine) for name, engine in engines.items()} == dict.fromkeys(NAMES, 10)
    let_go(caller, engines, hanging)
    ray.get(caller.close.remote())
    ray.kill(caller)


def test_slots_and_what_lies_in_them(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    before = ray.get(caller.statistics.remote())
    reply, error = ray.get(caller.slot.remote(4096))
    assert torch.equal(reply["tensor"], torch.full((4,), 2.0))
    assert error.capacity == 4096 < error.needed
    assert ray.get(caller.statistics.remote()).in_place - before.in_place == 2  # nothing was copied
    assert ray.get(caller.kept.remote()) == ("kept", "found")


def test_all_engines_say_their_numbers(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    before = asyncio.run(statistics())
    assert before.keys() >= set(NAMES)
    assert len({report.node for name, report in before.items() if name in NAMES}) == 3
    for name in NAMES:
        ray.get(caller.who.remote(3, engine=name))
    after = asyncio.run(statistics("vision-*"))
    assert [after[name].ring.finished - before[name].ring.finished for name in NAMES] == [3, 3, 3]
    assert asyncio.run(statistics("nobody-*")) == {}
    totals = ray.get(caller.statistics.remote())
    assert totals.connected
    assert totals.submitted == totals.finished + totals.failed + totals.aborted


def test_engines_that_are_given_by_name_need_not_be_there(nodes: Nodes, engines: dict[str, Any]) -> None:
    caller = caller_on(nodes, 0, ["vision-1", "later"])
    assert ray.get(caller.who.remote(3)) == ["vision-1"] * 3
    error = ray.get(caller.request.remote({"do": "who"}, engine="vision-2"))
    assert type(error) is ValueError
    error = ray.get(caller.call.remote("method"))
    assert type(error) is ValueError
    assert "engine=" in str(error)
    waiting = caller.request.remote({"do": "who"}, engine="later")
    later = start(nodes, 0, "later")
    assert ray.get(waiting) == "later"
    until(lambda: ray.get(caller.who.remote(1)) == ["later"])  # it is nearer
    ray.kill(later)
    until(lambda: ray.get(caller.who.remote(1, timeout=60)) == ["vision-1"])
    ray.get(caller.close.remote())
    ray.kill(caller)


def test_a_key_has_its_engine_as_long_as_that_lives(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    other = caller_on(nodes, 0)
    before = ray.get(caller.keys.remote(KEYS))
    assert before == ray.get(other.keys.remote(KEYS))
    assert {*Counter(before.values())} == set(NAMES)
    temporary = start(nodes, 2, "vision-x")
    for each in (caller, other):
        until(lambda each=each: ray.get(each.who.remote(1)) and "vision-x" in ray.get(each.names.remote()))
    during = ray.get(caller.keys.remote(KEYS))
    assert during == ray.get(other.keys.remote(KEYS))
    assert {key for key in KEYS if during[key] != before[key]} == {key for key in KEYS if during[key] == "vision-x"} != set()
    key = next(key for key in KEYS if during[key] == "vision-x")
    pending = caller.requests.remote(HANG, 3, key=key)
    sent_again = caller.request.remote({**HANG, "s": 8}, key=key, retry=1)
    until(lambda: running(temporary) == 4)
    ray.kill(temporary)
    errors = [error for error, _ in ray.get(pending)]
    assert {(type(error), error.engine) for error in errors} == {(shmring.EngineDeadError, "vision-x")}
    assert ray.get(sent_again) == "slept"
    assert ray.get(caller.keys.remote(KEYS)) == before
    until(lambda: ray.get(caller.who.remote(1)) and "vision-x" not in ray.get(caller.names.remote()))
    ray.get(other.close.remote())
    ray.kill(other)


def pid_of(name: str) -> int:
    return until(lambda: asyncio.run(statistics(name)))[name].pid  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["vision-1", "vision-2"])
def test_an_engine_that_is_killed_under_load(engines: dict[str, Any], caller: Any, name: str) -> None:
    """A near one, and a far one: what it had fails, or is sent again; all else goes on, and it is found when it is back."""
    pid = pid_of(name)
    hanging = hang(caller, engines, name, 4)
    others = [each for each in NAMES if each != name]
    elsewhere = [hang(caller, engines, each, 2) for each in others]
    resent = ray.get(caller.resent.remote())
    again = [caller.request.remote({"do": "sleep", "s": 5}, key=key, retry=1) for key in KEYS]
    until(lambda: sum(map(running, engines.values())) == 8 + len(KEYS))
    mine = running(engines[name]) - 4
    assert mine > 0
    kill(pid)
    assert {(type(error), error.engine) for error, _ in ray.get(hanging)} == {(shmring.EngineDeadError, name)}
    assert ray.get(again) == ["slept"] * len(KEYS)
    assert ray.get(caller.resent.remote()) - resent == mine
    assert ray.get(caller.who.remote(3)) != []
    until(lambda: name in ray.get(caller.names.remote()))
    assert pid_of(name) != pid
    let_go(caller, engines, *elsewhere)
    assert ray.get(caller.who.remote(2, engine=name)) == [name] * 2
    until(lambda: ray.get(caller.who.remote(1)) == ["vision-1"])


def test_an_engine_that_is_stopped_gets_nothing_new(engines: dict[str, Any], caller: Any) -> None:
    """Near, its ring shows it; far, it does not say its load."""
    for name, others in (("vision-1", {"vision-0", "vision-2"}), ("vision-0", {"vision-1", "vision-2"})):
        pid = pid_of(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda name=name: not responds(caller, name))
            assert set(ray.get(caller.who.remote(6))) <= others
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda name=name: responds(caller, name))


def responds(caller: Any, name: str) -> bool:
    """Whether an engine takes what it is sent; a request to it, which is given up, lets its client see that."""
    ray.get(caller.request.remote({"do": "who"}, engine=name, timeout=0.3))
    load = ray.get(caller.loads.remote()).get(name)
    return load is not None and load.responds


def test_a_node_that_joins_is_used(nodes: Nodes, engines: dict[str, Any], caller: Any) -> None:
    nodes.add()
    number = len(nodes.nodes) - 1
    engine = start(nodes, number, "vision-3")
    until(lambda: ray.get(caller.who.remote(1)) and "vision-3" in ray.get(caller.names.remote()))
    assert ray.get(caller.who.remote(1, engine="vision-3")) == ["vision-3"]
    there = caller_on(nodes, number)
    assert ray.get(there.who.remote(5)) == ["vision-3"] * 5
    ray.get(there.close.remote())
    pid = pid_of("vision-3")
    for actor in (there, engine):
        ray.kill(actor)
    until(lambda: not is_running(pid))


def test_an_engine_that_drains_gets_nothing_new_and_ends_what_it_has(
    engines: dict[str, Any], caller: Any, tmp_path: Path
) -> None:
    file = tmp_path / "end"
    working = caller.request.remote({"do": "wait for a file", "path": str(file)}, engine="vision-0")
    until(lambda: running(engines["vision-0"]) == 1)
    draining = {name: engines[name].drain.remote(60.0) for name in ("vision-0", "vision-1")}
    assert ray.get(draining["vision-1"])
    ray.kill(engines["vision-1"])  # a request that has come to it since then is sent again: it was not claimed
    assert ray.get(engines["vision-0"].load.remote())[2], "it drains"
    assert ray.get(caller.who.remote(1, engine="vision-0")) == ["vision-0"], "an answer says so, too"
    until(lambda: set(ray.get(caller.who.remote(4, retry=2))) == {"vision-2"})
    until(lambda: set(ray.get(caller.keys.remote(KEYS)).values()) == {"vision-2"})
    file.touch()
    assert ray.get(working) == "it is there"
    assert ray.get(draining["vision-0"])
    ray.kill(engines["vision-0"])
    assert ray.get(caller.who.remote(4)) == ["vision-2"] * 4
