"""The demonstration, run as a user does, and how it tells that something is wrong."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from shmring.frontend import demo
from shmring.frontend.commands.serve import without_options
from shmring.frontend.commands.serve_process import ServerError, ServerProcess
from shmring.frontend.demo import transport
from shmring.frontend.demo.client import Answer
from shmring.frontend.demo.media import Sample
from shmring.processes.process import Process
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[3]


def test_its_server_knows_nothing_of_another_ones_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHMRING_DATA_PARALLEL_SIZE": "2", "SHMRING_CONFIG": "/etc/shmring.yaml", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    assert {
        name for name in without_options(os.environ) if name in {"SHMRING_DATA_PARALLEL_SIZE", "SHMRING_CONFIG", "LANG"}
    } == {"LANG"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_shows_that_altered_copies_find_their_originals_and_that_an_answer_streams() -> None:
    command = [sys.executable, "-m", "shmring.frontend.cli", "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("✓") == 8 * 4 + 4 * 3 + 4 * 2
    assert "✗" not in result.stdout
    assert "in 71 tensors that lay there when they were sent; 0 were copied for sending" in result.stdout
    assert "[synthetic] token2" in result.stdout
    assert "24 tokens after" in result.stdout
    assert "ms later it had 0 bytes, and 0 requests" in result.stdout
    assert "nothing is left in /dev/shm" in result.stdout


async def test_tensors_arrive_both_ways_and_a_killed_process_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SIZES", {4 << 10: 20, 1 << 20: 10})
    out = io.StringIO()
    assert await transport.show_transport(Console(file=out, width=150)) == []
    assert [line.split()[1:3] for line in out.getvalue().splitlines() if "iB │" in line] == [["4", "KiB"], ["1", "MiB"]]
    assert "MiB of the slab, and 8 requests; " in out.getvalue()
    assert "ms later it had 0 bytes, and 0 requests" in out.getvalue()


async def test_a_process_that_dies_on_the_way_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SIZES", {1 << 20: 1_000_000})
    compare = transport._compare

    async def killed_meanwhile(ring: Any, reader: Any, sender: Any) -> Any:
        asyncio.get_running_loop().call_later(0.2, sender.process.send, signal.SIGKILL)
        return await compare(ring, reader, sender)

    monkeypatch.setattr(transport, "_compare", killed_meanwhile)
    with pytest.raises(RuntimeError, match="has died"):
        await transport.show_transport(Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_demonstration_that_is_killed_takes_its_server_and_all_its_processes_along() -> None:
    command = [sys.executable, "-m", "shmring.frontend.cli", "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as demonstration:
        assert demonstration.stdout is not None
        line = next(line for line in demonstration.stdout if "similarity" in line)  # of a table: decoders are there, too
        processes = psutil.Process(demonstration.pid).children(recursive=True)
        demonstration.kill()
    assert line
    # serve, the engine, two frontends, and of each frontend that had a request the two kinds of processes for decoding
    assert len(processes) >= 6
    _, alive = psutil.wait_procs(processes, timeout=15)
    for process in alive:
        process.kill()
    assert alive == []
    assert not list(Path("/dev/shm").glob(f"shmring-*-demo-{demonstration.pid}-*"))


def test_a_server_that_is_not_ready_in_time_says_so_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """The limit is that of ``serve``, and so are the words: a demonstration has no shorter one."""
    started = ServerProcess.start(["--port=0", "--slab-nbytes=1MiB", "--start-timeout=0.001", f"--name=demo-{os.getpid()}"])
    with started as server, pytest.raises(ServerError, match="did not start; its own message"):
        server.wait_until_ready()
    assert "not ready within 0.001 s (--start-timeout): the engine" in capfd.readouterr().err


def answer(*embedding: float, copies: int = 0, slab_nbytes: int = 1) -> Answer:
    return Answer(np.array(embedding), slab_nbytes, copies, 1.0)


def test_the_nearest_is_the_most_similar() -> None:
    originals = {"a": answer(1, 0), "b": answer(0, 1), "c": answer(0.6, 0.8)}
    assert demo._nearest(answer(0, 1), originals) == ("b", 1.0)
    assert demo._nearest(originals["b"], originals, but="b") == ("c", 0.8)


@for_each(
    ("copy", "problem"),
    [
        (answer(1, 0), None),
        (answer(0, 1), "a, altered: its nearest neighbour is b"),
        (answer(1, 0, copies=1), "a, altered: 1 copies, 1 bytes through the slab"),
        (answer(1, 0, slab_nbytes=0), "a, altered: 0 copies, 0 bytes through the slab"),
    ],
)
def test_problems_are_listed(copy: Answer, problem: str | None) -> None:
    answers = {"a": answer(1, 0), "b": answer(0, 1), "altered": copy}

    class Client:
        def embed(self, sample: Sample) -> Answer:
            return answers[sample.alteration or sample.name]

    def sample(name: str, alteration: str = "") -> Sample:
        return Sample("picture", name, alteration, "1x1", b"")

    client: Any = Client()
    _, problems = demo._find_originals(client, [[sample("a"), sample("a", "altered")], [sample("b")]])
    assert problems == ([problem] if problem else [])


def test_what_is_left_behind_is_found() -> None:
    process = Process.start([sys.executable, "-c", "import signal; signal.pause()"])
    server = ServerProcess(process, None, 60.0)
    assert server.stop() == -signal.SIGTERM
    server.killed.append(process.pid)
    segment = Path(f"/dev/shm/shmring-{os.getuid()}-demo-{os.getpid()}-0")
    segment.touch()
    try:
        problems = demo._left_behind(server)
    finally:
        segment.unlink()
    assert problems == [
        "the server ended with exit code -15",
        f"process {process.pid} did not end by itself",
        f"{segment} is left",
    ]
