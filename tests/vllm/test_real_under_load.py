"""Two API servers and two workers, no cache of media, a small /dev/shm: a load, and what is killed in its midst."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.servers import picture
from bench.vllm.server import Server, serve
from bench.vllm.workers import OPTIONS
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE = 1344
NBYTES = SIDE * SIDE * 3 * 2
# A program that has a /dev/shm of its own, of the size that Docker gives a container.
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
PICTURES = [picture(SIDE, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of its own")
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "256MiB", "SHMRING_VLLM_CHECK": "1", "SHMRING_VLLM_WAIT_S": "10"}
    options = [*OPTIONS, "--mm-processor-cache-gb", "0"]
    with serve(
        runtime_directory, side=SIDE, api_servers=2, environment=environment, options=options, in_process=False, under=SMALL_SHM
    ) as server:
        yield server


class Load:
    """Eight requests at a time, until it is told to end; those that fail are counted."""

    def __init__(self, server: Server) -> None:
        self.answered = self.failed = 0
        self._server = server
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(8)]

    def _ask(self, number: int) -> None:
        while not self._ends.is_set():
            try:
                self._server.ask(PICTURES[number % len(PICTURES)], max_tokens=16, timeout=30)
            except OSError:
                self.failed += 1
            else:
                self.answered += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def has_ended(process: psutil.Process) -> bool:
    """Also where its parent is stopped, and hears of it later."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_each_tensor_is_copied_once_on_its_way_to_both_workers(server: Server) -> None:
    alone = [server.ask(url) for url in PICTURES]
    before = server.engine()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(server.ask, PICTURES * 5)) == alone * 5
    assert server.tensors() == {"copied": 6 * len(PICTURES)}
    after = server.engine()
    assert after["workers_in_place_bytes"] - before["workers_in_place_bytes"] == 5 * len(PICTURES) * NBYTES
    assert (after["kept_tensors"], after["lost"]) == (0, 0)
    until(lambda: server.engine()["slots_in_use"] == 0)


def test_the_slab_is_a_memfd_where_shm_is_small(server: Server) -> None:
    for kind in ("EngineCore", "APIServer", "Worker"):
        for process in server.processes(kind):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "/memfd:shmring-test-0 " in maps
            assert f"/dev/shm/shmring-{os.getuid()}-test-0" not in maps


def test_an_api_server_that_is_killed_gives_its_memory_back_and_the_other_one_goes_on(server: Server) -> None:
    """The launcher is stopped from here on, as it would end the whole service."""
    server.launcher.suspend()
    first, _ = server.processes("APIServer")
    with Load(server) as load:
        until(lambda: load.answered >= 8)
        first.kill()
        answered = load.answered
        until(lambda: load.answered >= answered + 16)
    until(lambda: (report := server.engine())["slots_in_use"] == 0 and report["quarantined_bytes"] == 0)
    assert server.engine()["lost"] == 0


def test_a_worker_that_is_killed_ends_the_server_at_once(server: Server) -> None:
    family = [server.launcher, *server.launcher.children(recursive=True)]
    engine_and_workers = [*server.processes("EngineCore"), *server.processes("Worker")]
    with Load(server) as load:
        until(lambda: load.answered >= 8)
        engine_and_workers[-1].send_signal(signal.SIGKILL)
        until(lambda: all(map(has_ended, engine_and_workers)))
        until(lambda: load.failed > 0)
    server.launcher.resume()
    _, left = psutil.wait_procs(family, timeout=600)
    assert left == []
    assert "has died" in server.log or "died unexpectedly" in server.log
    assert "No available shared memory broadcast block" not in server.log
