"""A program: the frontend on Ray Serve, and ``shmring serve``, beside each other, each with an engine and a slab of its own.

``python -m bench.ray.serving`` runs in an environment that has Ray Serve, as a :class:`bench.programs.Program`. It answers an
:class:`Order` with a :class:`Measurement`.

Ray Serve is set up as docs/clusters.md recommends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.children import on_uvloop
from bench.meter import cpu_s_of
from bench.programs import orders
from bench.ray import cluster
from bench.ray.cluster import family, family_of, settled
from bench.serving.client import Client
from bench.serving.load import Requests
from bench.serving.media import media_parts
from bench.serving.plan import NOTHING_KEPT, Load, Media
from bench.serving.run import serving

ALONE, ON_RAY = "shmring serve", "Ray Serve"
_ALONE = ("--executor=fingerprints", "--api-server-count=1", "--slab-nbytes=128MiB", "--decoders=1", NOTHING_KEPT)
_ON_RAY = {"executor": "fingerprints", "slab-nbytes": "128MiB", "decoders": 1, "mm-processor-cache-gb": 0}
_VARIABLES = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # there is no balancer that has to notice
}
_NAME = "shmring"
_DIRECT_PORTS = range(30_000, 31_000)  # of which Ray Serve gives each replica one
_STORE_NBYTES = 200 << 20
_MEDIA = Media((451, 300), distinct=8)
_IDLE_S = 1.0
_TIMEOUT_S = 60.0


class Order(msgspec.Struct, frozen=True):
    """What to do: send so many embedding requests, a window of them at a time, with a text or a picture each."""

    way: str
    has_picture: bool
    window: int
    requests: int


class Measurement(cluster.Measurement, frozen=True):
    """With the CPU that is added to what these processes take in a second before, in which nobody asks anything."""

    added_ms: float


@contextlib.contextmanager
def _on_ray() -> Iterator[tuple[str, Any]]:
    """Runs the application; yields its URL, and the cluster."""
    import psutil
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from shmring.frontend.ray import app

    node = {"num_cpus": 4, "object_store_memory": _STORE_NBYTES, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    with contextlib.ExitStack() as stack:
        nodes = Cluster(initialize_head=True, head_node_args=node)
        stack.callback(nodes.shutdown)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
        stack.callback(serve.shutdown)
        serve.run(app(_ON_RAY), name=_NAME, route_prefix="/")
        stack.callback(serve.delete, _NAME)  # a replica that is not told to end leaves its engine's socket
        replica = family_of(nodes)
        listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.pid in replica]
        port = next(address.port for address in listening if address.port in _DIRECT_PORTS)
        yield f"http://127.0.0.1:{port}", nodes


async def _carry_out(order: Order, url: str, pids: set[int]) -> Measurement:
    load = Load(
        requests=order.requests,
        max_concurrency=order.window,
        endpoint="embeddings",
        media=_MEDIA if order.has_picture else None,
    )
    async with Client(url, load.endpoint, _TIMEOUT_S) as client:
        requests = Requests(load, "shmring-fingerprints", media_parts(load))
        await requests.warm_up(client)
        began_s, before_s = time.perf_counter(), cpu_s_of(pids)
        await asyncio.sleep(_IDLE_S)
        idle = (cpu_s_of(pids) - before_s) / (time.perf_counter() - began_s)
        before_s = cpu_s_of(pids)
        shown = await requests.play(client)
        used_s = cpu_s_of(pids) - before_s
    return Measurement(
        shown.requests_per_s, 1e3 * used_s / load.requests, 1e3 * (used_s - idle * shown.duration_s) / load.requests
    )


def main() -> None:
    with settled(**_VARIABLES), serving(_ALONE) as [alone], _on_ray() as (url, nodes):
        for order, answer in orders(Order):
            if order.way == ON_RAY:
                asked, pids = url, family_of(nodes)
            else:
                asked, pids = alone.url, family(alone.process.pid)
            answer(on_uvloop(_carry_out(order, asked, pids)))


if __name__ == "__main__":
    main()
