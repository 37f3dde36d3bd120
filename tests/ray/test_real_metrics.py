"""An engine's numbers in the metrics of its node, as Prometheus reads them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest

from shmring.engine.counted import OF_ENGINES, EngineNumbers
from shmring.engine.protocol import EncodeReply, EncodeRequest, Text
from shmring.integrations.ray import EngineActor
from shmring.service.distributions import Distribution
from tests.ray.actors import Caller, handler
from tests.ray.conftest import Nodes
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(300)


def test_gauges_are_told_always_and_counters_when_they_have_grown() -> None:
    from shmring.integrations.ray.metrics import Reporter

    reporter = Reporter({"node": "a", "engine": "b"})
    counts = {"ring_submitted": 3, "ring_running": 1, "steps": 0}
    first = reporter.news(EngineNumbers(counts, {"queue": Distribution()}))
    assert {counted.name: (before, now) for counted, before, now in first if counted.kind != "histogram"} == {
        "shmring_engine_up": (None, 1.0),
        "shmring_engine_steps": (None, 0),
        "shmring_engine_ring_submitted": (None, 3),
        "shmring_engine_ring_running": (None, 1),
    }
    again = reporter.news(EngineNumbers(counts, {"queue": Distribution()}))
    assert [counted.name for counted, _, _ in again] == ["shmring_engine_up", "shmring_engine_ring_running"]
    grown = reporter.news(EngineNumbers(counts | {"ring_submitted": 5}, {}))
    assert [(before, now) for counted, before, now in grown if counted.kind == "counter"] == [(3, 5)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", "1000")
        made = Nodes(2)
    yield made
    made.close()


def scraped(number: int, nodes: Nodes) -> dict[tuple[str, str], float]:
    """What a node's metrics say of engines: by name and engine. Its own ``node`` is checked."""
    address = f"127.0.0.{number + 2}"
    [node] = [node for node in ray.nodes() if node["NodeManagerAddress"] == address]
    if not node["MetricsExportPort"]:
        return {}
    try:
        with urllib.request.urlopen(f"http://{address}:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    except OSError:  # it starts later than its node
        return {}
    found = {}
    for name, labels, value in re.findall(r"^ray_(shmring_\w+)\{(.*)\} (\S+)$", page, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert tags["node"] == node["NodeID"]
        if "le" not in tags:
            found[name, tags["engine"]] = float(value)
    return found


def test_each_nodes_metrics_have_its_engines(nodes: Nodes) -> None:
    engines = [
        EngineActor.options(**nodes.on(0)).remote("vision", handler, slab_nbytes="16MiB"),
        EngineActor.options(**nodes.on(1)).remote("encoder", executor="synthetic", slab_nbytes="16MiB"),
    ]
    caller = ray.remote(Caller).options(**nodes.on(0), max_concurrency=100).remote()
    ray.get(caller.connect.remote("vision"))
    ray.get(caller.requests.remote({"do": "who"}, 7))
    hanging = caller.requests.remote({"do": "sleep", "s": 600}, 2, request_id="hang")
    far = ray.remote(Caller).options(**nodes.on(0)).remote()
    ray.get(far.connect.remote("encoder"))
    for _ in range(3):
        ray.get(far.request.remote(EncodeRequest([Text("a")]), reply_type=EncodeReply))

    def said(number: int, engine: str, **wanted: float) -> dict[str, float] | None:
        numbers: dict[str, float] = {name: value for (name, of), value in scraped(number, nodes).items() if of == engine}
        return numbers if all(numbers.get(name) == value for name, value in wanted.items()) else None

    ring = "shmring_engine_ring_"
    wanted = {f"{ring}submitted_total": 9.0, f"{ring}running": 2.0, f"{ring}finished_total": 7.0}
    numbers = until(lambda: said(0, "vision", **wanted, shmring_engine_up=1, shmring_engine_ring_clients=2))
    wanted = {"shmring_engine_finished_requests_total": 3.0, "shmring_request_queue_time_seconds_count": 3.0}
    encoder = until(lambda: said(1, "encoder", **wanted, shmring_engine_up=1))
    assert {of for _, of in scraped(0, nodes)} == {"vision"}
    known = {counted.exposed_name for counted in OF_ENGINES}
    for name in numbers.keys() | encoder.keys():
        assert name in known or name.rpartition("_")[0] in known, name
    ray.get(caller.abort.remote("hang"))
    ray.get(hanging)
    until(lambda: said(0, "vision", shmring_engine_ring_running=0, shmring_engine_ring_aborted_total=2))
    for actor in (caller, far, *engines):
        ray.kill(actor)
