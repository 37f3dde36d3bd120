"""A node that dies, its raylet alone or all of it: the engine there ends with it, and is found on another node, which joins."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import shmring
from tests.ray.actors import Caller
from tests.ray.conftest import Nodes, is_running, kill
from tests.ray.test_real_deaths import HANG, TENSOR, caller_on, engine_on, pid_of, running
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("dying", ["raylet", "node"])
def test_an_engine_whose_node_dies_ends_and_is_found_elsewhere(nodes: Nodes, dying: str) -> None:
    resource = f"engines {dying}"
    number = nodes.add(**{resource: 1000})
    engine = engine_on(nodes, number, **{resource: 1})
    far, near = caller_on(nodes, 0), caller_on(nodes, number)
    old_pid = pid_of(engine)
    pending = far.requests.remote(HANG, 2)
    near.requests.remote(HANG, 1)
    until(lambda: running(engine) == 3)
    victims = nodes.processes(number) if dying == "node" else [nodes.raylet(number)]
    killed_s = kill(*victims)
    until(lambda: not is_running(old_pid))
    print(f"the engine has ended {time.monotonic() - killed_s:.2f} s after its {dying}")
    results = ray.get(pending)
    assert {type(error) for error, _ in results} == {shmring.EngineDeadError}
    print(f"the far client heard of the {dying} after {max(at for _, at in results) - killed_s:.2f} s")

    # Its resource is gone with its node. A node that has it joins, and Ray starts the engine there.
    waiting = far.request.remote(TENSOR)
    number = nodes.add(**{resource: 1000})
    assert ray.get(waiting)["sum"] == 1000
    print(f"an engine on another node answered {time.monotonic() - killed_s:.2f} s after the end of the {dying}")
    assert pid_of(engine) != old_pid
    neighbour = ray.remote(Caller).options(**nodes.on(number)).remote()
    assert ray.get(neighbour.connect.remote("vision")) is True
    assert ray.get(neighbour.request.remote(TENSOR))["sum"] == 1000
    for actor in (engine, far, neighbour):
        ray.kill(actor)
    until(lambda: not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shmring-")])
