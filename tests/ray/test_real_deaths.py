"""Two nodes, and whoever dies: the others learn of it, and nothing is left."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import shmring
from shmring.integrations.ray import EngineActor
from tests.ray.actors import Caller, handler
from tests.ray.conftest import Nodes, is_running, kill
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(400)

HANG = {"do": "sleep", "s": 600, "x": torch.ones(1 << 18)}
TENSOR = {"do": "sum", "x": torch.ones(1000)}


def engine_on(nodes: Nodes, number: int, **resources: Any) -> Any:
    options = {"resources": resources, "num_cpus": 0} if resources else nodes.on(number)
    return EngineActor.options(**options).remote("vision", handler, slab_nbytes="32MiB")


def caller_on(nodes: Nodes, number: int) -> Any:
    caller = ray.remote(Caller).options(**nodes.on(number), max_concurrency=1000).remote()
    ray.get(caller.connect.remote("vision", connect_timeout_s=300.0))  # until Ray has started its engine again elsewhere
    return caller


def pid_of(engine: Any) -> int:
    import msgspec

    from shmring.integrations.ray.directory import Where

    return msgspec.msgpack.decode(ray.get(engine.where.remote()), type=Where).process.pid


def running(engine: Any) -> int:
    found: int = ray.get(engine.statistics.remote()).running
    return found


def test_engines_and_clients_that_are_killed(nodes: Nodes, record_property: Any) -> None:
    engine = engine_on(nodes, 1)
    near, far = caller_on(nodes, 1), caller_on(nodes, 0)

    # A far client: its lifeline says so. A near one: its pidfd.
    for number in (0, 1):
        victim = caller_on(nodes, number)
        victim.requests.remote(HANG, 4)
        until(lambda: running(engine) == 4)
        killed_s = kill(ray.get(victim.pid.remote()))
        until(lambda: running(engine) == 0)
        print(f"a killed client on node {number} was noticed after {time.monotonic() - killed_s:.2f} s")
    until(lambda: ray.get(engine.statistics.remote()).quarantined_nbytes == 0)
    until(lambda: ray.get(engine.statistics.remote()).clients == 3)  # with the gateway; Ray says a little later who has gone

    # The engine: everybody's requests fail, and the next ones find the engine that Ray starts.
    pending = {"near": near.requests.remote(HANG, 4), "far": far.requests.remote(HANG, 4)}
    again = far.request.remote({**HANG, "do": "sleep", "s": 3}, retry=3)
    until(lambda: running(engine) == 9)
    killed_s = kill(pid_of(engine))
    for name, reference in pending.items():
        results = ray.get(reference)
        assert {type(error) for error, _ in results} == {shmring.EngineDeadError}
        assert all(error.engine.endswith("vision") for error, _ in results)
        print(f"the {name} client heard of the killed engine after {max(at for _, at in results) - killed_s:.2f} s")
    for caller in (near, far):
        assert ray.get(caller.request.remote(TENSOR))["sum"] == 1000
    print(f"the engine answered again after {time.monotonic() - killed_s:.2f} s")
    assert ray.get(again) == "slept"
    assert ray.get(far.resent.remote()) == 1

    # The one that ends by itself is started again as well.
    assert type(ray.get(near.request.remote({"do": "exit"}))) is shmring.EngineDeadError
    assert type(ray.get(far.request.remote({"do": "exit"}))) is shmring.EngineDeadError
    assert ray.get(near.request.remote(TENSOR))["sum"] == 1000
    assert ray.get(far.request.remote(TENSOR))["sum"] == 1000
    pid = pid_of(engine)
    for actor in (near, far, engine):
        ray.kill(actor)
    until(lambda: not is_running(pid))
