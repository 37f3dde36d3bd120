"""Two engine cores, which vLLM's own way through shared memory does not allow: each has a slab, and what is kept in it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers import picture
from bench.vllm.server import Server, serve

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE = 1344


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "256MiB", "SHMRING_VLLM_CHECK": "1"}
    environment["SHMRING_VLLM_WAIT_S"] = "10"  # where something else runs beside, a tensor would go inline after 0.05 s
    options = ["--data-parallel-size", "2"]
    with serve(runtime_directory, side=SIDE, api_servers=2, environment=environment, options=options) as server:
        yield server


def test_each_engine_core_has_its_own_slab(server: Server) -> None:
    pictures = [picture(SIDE, seed) for seed in range(2)]
    alone = [server.ask(url) for url in pictures]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(server.ask, pictures * 20))
    assert together == alone * 20
    counts = server.tensors()
    assert counts.keys() == {"copied", "kept"}
    assert counts["copied"] <= 2 * 2 * 2  # API servers, engine cores, pictures
    reports = [server.engine(index) for index in range(2)]
    assert all(report["taken"] > 0 and report["lost"] == 0 for report in reports)
    assert sum(report["taken"] for report in reports) == counts["copied"]
    assert sum(report["hits"] for report in reports) == counts["kept"]
