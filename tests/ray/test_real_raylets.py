"""A node whose raylet dies: the engine there ends with it, and is found on another node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import shmring
from tests.ray.conftest import Nodes, is_running, kill, until
from tests.ray.test_real_deaths import HANG, TENSOR, caller_on, engine_on, pid_of, running

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(400)


def test_an_engine_whose_raylet_dies_ends_and_is_found_elsewhere(nodes: Nodes) -> None:
    engine = engine_on(nodes, 1)
    far = caller_on(nodes, 0)
    old_pid = pid_of(engine)
    pending = far.requests.remote(HANG, 2)
    until(lambda: running(engine) == 2)
    killed_s = kill(nodes.raylet(1))
    until(lambda: not is_running(old_pid))
    print(f"the engine has ended {time.monotonic() - killed_s:.2f} s after its raylet")
    results = ray.get(pending)
    assert {type(error) for error, _ in results} == {shmring.EngineDeadError}
    print(f"the far client heard of it after {max(at for _, at in results) - killed_s:.2f} s")
    # Its resource is gone with its node; one that has it joins.
    nodes.cluster.add_node(num_cpus=4, object_store_memory=150 << 20, resources={"node1": 1000}, node_ip_address="127.0.0.9")
    assert ray.get(far.request.remote(TENSOR))["sum"] == 1000
    print(f"an engine on another node answered after {time.monotonic() - killed_s:.2f} s")
    assert pid_of(engine) != old_pid
    ray.kill(engine)
    until(lambda: not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shmring-")])
