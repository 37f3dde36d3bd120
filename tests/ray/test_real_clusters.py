"""Clusters beside each other on one machine, and one after the other: nothing is mixed up that has one name."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shmring
from shmring.integrations.ray import EngineActor, connect
from tests.ray.actors import handler
from tests.ray.conftest import Nodes, is_running, kill
from tests.ray.test_real_deaths import HANG, TENSOR, caller_on, engine_on, pid_of, running
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("ends", ["in order", "killed"])
def test_two_clusters_at_once_know_nothing_of_each_other(nodes: Nodes, ends: str) -> None:
    engine = engine_on(nodes, 1)
    near, far = caller_on(nodes, 1), caller_on(nodes, 0)
    pid = pid_of(engine)
    pending = [caller.requests.remote(HANG, 2) for caller in (near, far)]
    until(lambda: running(engine) == 4)
    command = [sys.executable, "-m", "tests.ray.cluster_beside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        told = json.loads(other.stdout.readline())
        try:
            assert told["sums"] == [7, 7]
            assert told["engine"] != pid
            statistics = ray.get(engine.statistics.remote())
            assert (statistics.clients, statistics.submitted) == (3, 4)  # of both nodes, the gateway, and nobody else
        finally:
            if ends == "killed":
                kill(other.pid, *told["processes"])
            other.stdin.close()
    until(lambda: not [each for each in told["processes"] if is_running(each)])
    shutil.rmtree(told["directory"], ignore_errors=True)
    assert running(engine) == 4
    assert pid_of(engine) == pid
    for caller in (near, far):
        assert ray.get(caller.request.remote(TENSOR))["sum"] == 1000
    for actor, reference in zip((near, far), pending, strict=True):
        ray.kill(actor)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(reference)
    ray.kill(engine)  # not before: who lives still would be told of its end
    until(lambda: not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shmring-")])


def test_a_client_outlives_its_cluster(nodes: Nodes) -> None:
    """A driver that leaves one cluster and joins the next: here, the same one, whose engines have ended meanwhile."""

    async def ask(client: Any) -> Any:
        return (await client.request(TENSOR))["sum"]

    def join() -> Any:
        ray.init(address=nodes.cluster.address, namespace="test", log_to_driver=False, logging_level="ERROR")

    def engine() -> Any:
        return EngineActor.options(**nodes.on(1)).remote("vision", handler, slab_nbytes="32MiB")

    with asyncio.Runner() as runner:

        async def connected() -> Any:
            return await connect("vision")

        first = engine()
        client = runner.run(connected())
        assert not client.is_near
        assert runner.run(ask(client)) == 1000
        old_pid = pid_of(first)
        ray.shutdown()
        del first
        with pytest.raises(shmring.EngineDeadError):
            runner.run(ask(client))
        with pytest.raises(shmring.LocalProtocolError, match="not connected to a Ray cluster"):
            runner.run(ask(client))
        until(lambda: not is_running(old_pid))
        join()
        second = engine()
        assert runner.run(ask(client)) == 1000
        runner.run(client.close())
        ray.kill(second)
