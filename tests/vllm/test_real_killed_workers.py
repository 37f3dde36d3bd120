"""How it ends when a process of vLLM with workers is killed or stopped: soon, with a word, and with nothing left."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.servers import picture
from bench.vllm.server import Server, serve
from bench.vllm.workers import OPTIONS, measure
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long


SIDE = 1344
RUNNING = 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0'


def serving(directory: Path) -> Any:
    return serve(directory, side=SIDE, environment={"SHMRING_VLLM": "1"}, options=OPTIONS, in_process=False)


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
    with serving(runtime_directory) as server:
        processes = family(server)
        worker = server.processes("Worker")[-1]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, picture(SIDE, 0), max_tokens=400, timeout=600)
            until(lambda: RUNNING in server.get("/metrics"))
            end(worker)
            with pytest.raises((urllib.error.HTTPError, OSError)):
                asked.result()
        until(lambda: words in server.log or "died unexpectedly" in server.log)
        _, left = psutil.wait_procs(processes, timeout=600)
        assert left == [], "vLLM has not ended its server"
        assert "No available shared memory broadcast block" not in server.log
    assert ours_in_shm() == set()


@pytest.mark.parametrize("kind", ["EngineCore", "launcher"])
def test_kill_9_leaves_nothing(kind: str, runtime_directory: Path) -> None:
    with serving(runtime_directory) as server:
        measure("new picture", server)
        others = family(server)
        killed = server.launcher if kind == "launcher" else server.processes(kind)[0]
        workers = server.processes("Worker")
        killed.kill()
        if kind == "launcher":  # its engine core lives on until its owner notices; that is this test
            for process in others:
                if process.is_running() and process not in workers:
                    process.kill()
        _, left = psutil.wait_procs(workers, timeout=600)
        assert left == [], "workers have noticed that their engine core has gone"
        _, left = psutil.wait_procs(others, timeout=600)
        assert left == []
    assert ours_in_shm() == set()
