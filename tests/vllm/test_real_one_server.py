"""One API server, whose engine core has vLLM's own cache: tensors are copied out of the slab. Lost tensors, and kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.servers import picture
from bench.vllm.server import Server, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
SIDE = 1344


@pytest.fixture(scope="module")
def loses(runtime_directory: Path) -> Path:
    """While this file exists, the engine core finds no tensor."""
    return runtime_directory / "lose"


@pytest.fixture(scope="module")
def server(runtime_directory: Path, loses: Path) -> Iterator[Server]:
    environment = {
        "SHMRING_VLLM": "1",
        "SHMRING_VLLM_SLAB": "256MiB",
        "SHMRING_VLLM_CHECK": "1",
        "PYTHONPATH": str(Path(__file__).parent / "saboteur"),
        "LOSE_WHILE": str(loses),
    }
    with serve(runtime_directory, side=SIDE, environment=environment) as server:
        yield server


def test_vllms_own_cache_does_not_pin_the_slab(server: Server) -> None:
    until(lambda: "go through shared memory (test-0); none of them stay there" in server.log)
    assert "its tensors are copied out, since vLLM keeps them in its cache" in server.log
    for seed in range(4):
        server.ask(picture(SIDE, seed))
    assert server.tensors() == {"copied": 4}
    assert server.engine()["slots_in_use"] == 0


def test_what_vllm_does_not_send_does_not_go_through_the_slab(server: Server) -> None:
    before = server.tensors()
    server.ask(picture(SIDE, 0))
    assert server.tensors() == before


def test_the_program_of_the_page_shows_how_a_tensor_went(server: Server) -> None:
    copied = server.tensors()["copied"]
    command = [sys.executable, ROOT / "tests/programs/ask_about_a_picture.py", server.url, str(SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("answer: ")
    assert f'way="copied"}} {copied + 1}.0\n' in done.stdout


def test_a_lost_tensor_fails_its_request_and_no_other(server: Server, loses: Path) -> None:
    loses.touch()
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask(picture(SIDE, 20))
        assert caught.value.code >= 500
        assert server.ask(picture(SIDE, 0))  # from the cache
    finally:
        loses.unlink()
    assert "a request's tensors are not in the slab: bfloat16 tensor of [3, 1344, 1344]: TimeoutError" in server.log
    assert server.engine()["lost"] == 1
    assert server.ask(picture(SIDE, 20))
    assert server.ask(picture(SIDE, 21))
    assert server.engine()["lost"] == 1


def test_metrics_have_both_ends(server: Server) -> None:
    until(lambda: server.metrics()['shmring_lost{engine="0"}'] == 1)
    assert server.metrics()['shmring_free_bytes{engine="0"}'] > 0


def test_kill_9_of_the_api_server_gives_everything_back(server: Server) -> None:
    """It is the launcher as well. The engine core lives on until its owner notices; this test ends it."""
    (engine,) = server.processes("EngineCore")
    others = psutil.Process(server.process.pid).children(recursive=True)
    try:
        server.process.send(signal.SIGKILL)
        server.process.wait()
        until(lambda: (report := server.engine())["slots_in_use"] == 0 and report["quarantined_bytes"] == 0)
        assert engine.is_running()
    finally:
        if engine.is_running():
            engine.kill()
        _, left = psutil.wait_procs(others, timeout=10)  # multiprocessing's tracker removes what vLLM has left, and ends
        for process in left:
            process.kill()
