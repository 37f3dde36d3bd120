"""A program: a Ray cluster of two nodes on this machine, with an engine, a plain actor, and a caller of both on each node.

``python -m bench.ray.cluster`` runs in an environment that has Ray, as a :class:`bench.programs.Program`. It answers an
:class:`Order` with a :class:`Measurement`.

The plain actor is what is written without shmring. Ray pickles a torch tensor that is an argument, and passes a numpy array on
in its object store; so both are measured. So are torch tensors of a caller in whose environment
``RAY_ENABLE_ZERO_COPY_TORCH_TENSORS`` is set: Ray makes numpy arrays of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from typing import Any

import msgspec
import psutil

from bench.meter import cpu_s_of
from bench.programs import orders

STORE_NBYTES = 3 << 29  # of each node: from 1 GB on, Ray's times are steady
_SLAB_NBYTES = 1 << 29
_MOST_CALLS = 1000
_ENGINE = "bench"
_CLOSED = "bench-closed"  # another one, to which no connection can be made
_ZERO_COPY = {"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}


class Order(msgspec.Struct, frozen=True):
    """What to do: the caller on the ``same`` node as the engine and the actor, or the ``other``, asks in one of its ways."""

    place: str
    way: str
    nbytes: int
    window: int
    warm_up_s: float
    timed_s: float


class Measurement(msgspec.Struct, frozen=True):
    """Requests a second; and CPU of a request, of all processes."""

    per_s: float
    cpu_ms: float


async def handler(claim: Any) -> None:
    await claim.done(float(claim.payload["x"].view(-1)[0]))


class Plain:
    """The actor."""

    async def echo(self, x: Any) -> float:
        return float(x.reshape(-1)[0])


class Caller:
    """Asks the engine and the plain actor, in each way."""

    def __init__(self, plain: Any) -> None:
        self._echo = plain.echo
        self._tensors: dict[int, Any] = {}

    async def connect(self) -> bool:
        """Connects to the engine; returns whether that is near."""
        from shmring.integrations.ray import connect

        self._client = await connect(_ENGINE)
        self._stored = await connect(_CLOSED)
        return self._client.is_near

    async def ask(self, way: str, nbytes: int, window: int, seconds: float) -> tuple[int, float]:
        """Asks, so many at a time, for at least so long; returns how often, and how long that took."""
        import torch

        tensor = self._tensors.setdefault(nbytes, torch.ones(max(1, nbytes // 4)))
        asking = getattr(self, way.replace(" ", "_"))
        count = 0
        began_s = time.perf_counter()

        async def work() -> None:
            nonlocal count
            while not count or time.perf_counter() < began_s + seconds:
                if await asking(tensor) != 1.0:
                    raise ValueError("the tensor is another one")
                count += 1

        await asyncio.gather(*(work() for _ in range(window)))
        return count, time.perf_counter() - began_s

    async def shmring(self, tensor: Any) -> Any:
        return await self._client.request({"x": tensor})

    async def object_store(self, tensor: Any) -> Any:
        return await self._stored.request({"x": tensor})

    async def in_place(self, tensor: Any) -> Any:
        async with await self._client.slot(tensor.nbytes) as slot:
            view = slot.tensor(tensor.shape, tensor.dtype)
            view[0] = 1.0
            return await self._client.request({"x": view})

    async def numpy(self, tensor: Any) -> Any:
        return await self._echo.remote(tensor.numpy())

    async def torch(self, tensor: Any) -> Any:
        return await self._echo.remote(tensor)

    torch_zero_copy = torch  # of another caller

    async def connecting(self, tensor: Any) -> float:
        from shmring.integrations.ray import connect

        async with connect(_ENGINE):
            return 1.0


def family_of(cluster: Any) -> set[int]:
    """Returns all processes of a cluster."""
    nodes = (cluster.head_node, *cluster.worker_nodes)
    started = [each.process.pid for node in nodes for processes in node.all_processes.values() for each in processes]
    roots = map(psutil.Process, started)
    return {process.pid for root in roots for process in (root, *root.children(recursive=True))}


class Nodes:
    """The cluster, and what is in it."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        from shmring.integrations.ray import EngineActor

        node = {"num_cpus": 4, "object_store_memory": STORE_NBYTES}
        self._get = ray.get
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args=node | {"node_ip_address": "127.0.0.2", "resources": {"same": 9}, "include_dashboard": False},
        )
        self._cluster.add_node(**node, node_ip_address="127.0.0.3", resources={"other": 9})
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        on = {place: {"num_cpus": 0, "resources": {place: 1}, "max_concurrency": _MOST_CALLS} for place in ("same", "other")}
        there = EngineActor.options(resources={"same": 1}, num_cpus=0)
        self._engine = there.remote(_ENGINE, handler, slab_nbytes=_SLAB_NBYTES)
        self._closed = there.remote(_CLOSED, handler, slab_nbytes="16MiB", listen=None)
        self._plain = ray.remote(Plain).options(**on["same"]).remote()
        self._callers = {place: ray.remote(Caller).options(**options).remote(self._plain) for place, options in on.items()}
        self._others = {
            place: ray.remote(Caller).options(**options, runtime_env=_ZERO_COPY).remote(self._plain)
            for place, options in on.items()
        }
        near = ray.get([caller.connect.remote() for caller in self._callers.values()])
        assert near == [True, False], near

    def carry_out(self, order: Order) -> Measurement:
        callers = self._others if order.way == "torch zero copy" else self._callers
        asking = callers[order.place].ask
        what = order.way, order.nbytes, order.window
        self._get(asking.remote(*what, order.warm_up_s))
        pids = family_of(self._cluster)
        before_s = cpu_s_of(pids)
        count, took_s = self._get(asking.remote(*what, order.timed_s))
        return Measurement(count / took_s, 1e3 * (cpu_s_of(pids) - before_s) / count)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    """Has Ray's files in a directory of their own, and nobody else in its cluster."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:  # short: sockets are made below it
        os.mkdir(f"{directory}/ray")
        os.environ.update(
            RAY_TMPDIR=directory,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_memory_monitor_refresh_ms="0",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
        )
        with contextlib.closing(Nodes()) as nodes:
            for order, answer in orders(Order):
                answer(nodes.carry_out(order))


if __name__ == "__main__":
    main()
