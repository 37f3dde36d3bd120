"""Two tensor-parallel workers: what they compute, and what reaches them without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.vllm.server import Server, serve
from bench.vllm.workers import OPTIONS, measure

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE = 1344
NBYTES = SIDE * SIDE * 3 * 2
ON = {"SHMRING_VLLM": "1", "SHMRING_VLLM_CHECK": "1"}


def serving(directory: Path, **environment: str) -> Any:
    return serve(directory, side=SIDE, environment=environment, options=OPTIONS, in_process=False)


def digests(server: Server) -> list[str]:
    """Of answers to texts and about pictures, and of their logprobs."""
    return [measure(kind, server).digest for kind in ("decode", "new picture")]


@pytest.fixture(scope="module")
def theirs(runtime_directory: Path) -> list[str]:
    """What vLLM computes without the plug-in."""
    with serving(runtime_directory) as server:
        return digests(server)


@pytest.fixture(scope="module")
def server(runtime_directory: Path, theirs: list[str]) -> Iterator[Server]:
    with serving(runtime_directory, **ON) as server:
        yield server


def test_it_says_that_it_is_on(server: Server) -> None:
    assert "2 workers are sent their steps through shared memory (test-0)" in server.log
    assert server.engine()["workers"] == 2


def test_workers_compute_the_same(server: Server, theirs: list[str]) -> None:
    assert digests(server) == theirs


def test_from_an_api_server_to_the_workers_there_is_one_copy(server: Server) -> None:
    before, sent = server.engine(), server.tensors()
    run = measure("new picture", server)
    assert run.digest
    after = server.engine()
    copied = server.tensors()["copied"] - sent.get("copied", 0)
    assert after["workers_in_place_bytes"] - before["workers_in_place_bytes"] == copied * NBYTES > 0
    assert after["workers_copied_bytes"] - before["workers_copied_bytes"] < NBYTES


def test_memory_of_vllms_queues_is_not_there(server: Server) -> None:
    """It would be some hundred megabytes for each worker."""
    (engine,) = server.processes("EngineCore")
    maps = Path(f"/proc/{engine.pid}/maps").read_text()
    assert "/dev/shm/psm_" not in maps


def test_no_process_complains(server: Server) -> None:
    complaints = [line for line in server.log.splitlines() if "Traceback" in line or ("shmring" in line and "ERROR" in line)]
    assert complaints == []
