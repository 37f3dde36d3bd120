"""Two workers, tensor-parallel or pipeline-parallel: what they compute, and what reaches them without a copy."""

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
# Each of two in a pipeline needs a layer. vLLM for CPUs prepares the second one only where it has something to compile.
PIPELINE = (
    *("-pp", "2", *OPTIONS[2:], "--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}'),
    *("--hf-overrides", '{"text_config": {"num_hidden_layers": 2}}'),
)


@pytest.fixture(scope="module", params=[OPTIONS, PIPELINE], ids=["tensor-parallel", "pipeline-parallel"])
def options(request: pytest.FixtureRequest) -> Any:
    """How the workers share the model."""
    return request.param


def serving(directory: Path, options: Any, **environment: str) -> Any:
    return serve(directory, side=SIDE, environment=environment, options=options, in_process=False)


def digests(server: Server) -> list[str]:
    """Of answers to texts and about pictures, and of their logprobs."""
    return [measure(kind, server).digest for kind in ("decode", "new picture")]


@pytest.fixture(scope="module")
def theirs(runtime_directory: Path, options: Any) -> list[str]:
    """What vLLM computes without the plug-in."""
    with serving(runtime_directory, options) as server:
        return digests(server)


@pytest.fixture(scope="module")
def server(runtime_directory: Path, options: Any, theirs: list[str]) -> Iterator[Server]:
    with serving(runtime_directory, options, **ON) as server:
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
