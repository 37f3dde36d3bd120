"""A slab that is too small, and a model in a process of its own: all is right, some of it inline. An engine core killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.servers import picture
from bench.vllm.server import Server, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE = 1344


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "24MiB", "SHMRING_VLLM_CHECK": "1", "SHMRING_VLLM_WAIT_S": "0.01"}
    with serve(runtime_directory, side=SIDE, api_servers=2, environment=environment, in_process=False) as server:
        yield server


def test_what_finds_no_space_goes_inline_and_is_counted(server: Server) -> None:
    pictures = [picture(SIDE, seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(server.ask, pictures))
    alone = [server.ask(url) for url in pictures]
    assert together == alone
    counts = server.tensors()
    assert counts.keys() == {"copied", "inline space"}
    assert counts["copied"] > 0 < counts["inline space"]
    assert sum(counts.values()) == 24
    assert server.engine()["lost"] == 0


def test_nothing_stays(server: Server) -> None:
    until(lambda: (report := server.engine())["slots_in_use"] == report["kept_tensors"])


def test_kill_9_of_the_engine_core_ends_the_server_as_without_the_plug_in(server: Server) -> None:
    family = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = server.processes("EngineCore")
    engine.send_signal(signal.SIGKILL)
    server.process.wait(600)
    _, left = psutil.wait_procs(family, timeout=600)
    assert left == []
