"""Two tensor-parallel workers: what they compute, what reaches them without a copy, and how it ends when one is killed."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.vllm.server import Server, serve
from bench.vllm.workers import OPTIONS, measure
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY
from tests.vllm.conftest import until

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


def ours_in_shm() -> set[str]:
    return {path.name for path in SHM_DIRECTORY.glob(f"{NAME_PREFIX}-{os.getuid()}-test-*")}


def family(server: Server) -> list[psutil.Process]:
    return [server.launcher, *server.launcher.children(recursive=True)]


def stop(worker: psutil.Process) -> None:
    worker.send_signal(signal.SIGSTOP)


def kill(worker: psutil.Process) -> None:
    worker.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "words"), [(stop, "was stopped (SIGSTOP)"), (kill, "has died")], ids=["a worker is stopped", "a worker is killed"]
)
def test_a_request_ends_with_its_worker(end: Callable[[psutil.Process], None], words: str, runtime_directory: Path) -> None:
    with serving(runtime_directory, **ON) as server:
        processes = family(server)
        worker = server.processes("Worker")[-1]
        end(worker)
        with pytest.raises((urllib.error.HTTPError, OSError)):
            measure("decode", server)
        until(lambda: words in server.log or "died unexpectedly" in server.log)
        _, left = psutil.wait_procs(processes, timeout=120)
        assert left == [], "vLLM has not ended its server"
        assert "No available shared memory broadcast block" not in server.log
    assert ours_in_shm() == set()


@pytest.mark.parametrize("kind", ["EngineCore", "launcher"])
def test_kill_9_leaves_nothing(kind: str, runtime_directory: Path) -> None:
    with serving(runtime_directory, **ON) as server:
        measure("new picture", server)
        others = family(server)
        killed = server.launcher if kind == "launcher" else server.processes(kind)[0]
        workers = server.processes("Worker")
        killed.kill()
        if kind == "launcher":  # its engine core lives on until its owner notices; that is this test
            for process in others:
                if process.is_running() and process not in workers:
                    process.kill()
        _, left = psutil.wait_procs(workers, timeout=120)
        assert left == [], "workers have noticed that their engine core has gone"
        _, left = psutil.wait_procs(others, timeout=120)
        assert left == []
    assert ours_in_shm() == set()
