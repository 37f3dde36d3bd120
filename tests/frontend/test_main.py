"""``python -m shmring.frontend`` as a process attached to a ring of this process."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

import shmring
from shmring.frontend.settings import ProcessSettings
from shmring.processes.process import Process
from shmring.service.supervision import FrontendState, Orders
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # each starts a frontend

ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Process]


@pytest.fixture
def start(socket_dir: Path, run_python: Start) -> Start:
    """``start("--port=0", pass_fds=())``: a frontend of the engine "test", which says what is wrong."""
    own = ("--name=test", f"--socket-dir={socket_dir}", "--log-level=warning")

    def run(*arguments: str, pass_fds: tuple[int, ...] = ()) -> Process:
        return run_python("-m", "shmring.frontend", *own, *arguments, pass_fds=pass_fds, stderr=subprocess.STDOUT)

    return run


@pytest.fixture
def start_supervised(start: Start, socket_dir: Path) -> Iterator[Any]:
    """``start_supervised(listening)``: a process, and its supervisor's end of their socket."""
    links: list[socket.socket] = []

    def run(listening: socket.socket | None) -> tuple[Process, socket.socket]:
        ours, theirs = socket.socketpair()
        links.append(ours)
        with theirs:
            fds = (theirs.fileno(),) if listening is None else (theirs.fileno(), listening.fileno())
            process = start(f"--supervisor-fd={theirs.fileno()}", pass_fds=fds)
        if listening is not None:
            settings = ProcessSettings(
                name="test", socket_dir=str(socket_dir), listen_fd=listening.fileno(), log_level="warning", connect_timeout_s=60
            )
            ours.sendall(msgspec.json.encode(Orders(0.01, settings)) + b"\n")
        return process, ours

    yield run
    for link in links:
        link.close()


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_under_a_supervisor_it_serves_with_the_orders_settings_until_a_signal(
    start_supervised: Any, open_engine: Any, body_of: Any, embedding_of: Any, number: signal.Signals
) -> None:
    engine = await open_engine()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process, link = start_supervised(listening)
        words = b""
        while b"r" not in words:
            words += await asyncio.to_thread(link.recv, 100)
        assert words.startswith(b".")  # it lives, and is not ready
        assert engine.ring.statistics().clients == 2
        states = [FrontendState(0, process.pid, "serving", 0), FrontendState(1, 99, "unresponsive", 3)]
        link.sendall(msgspec.json.encode(states) + b"\n")
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
            response = await http.post("/v1/embeddings", json=body_of(pixels))
            health = await http.get("/health")
        [item] = response.json()["data"]
        np.testing.assert_allclose(item["embedding"], embedding_of(pixels), rtol=1e-6)
        assert health.status_code == 200  # it is well, and says who is not
        assert health.json()["frontends"] == msgspec.to_builtins(states)
        assert health.json()["pid"] == process.pid
        process.send(number)
        assert await asyncio.wait_for(process.ended(), 20) == 0
    await eventually(lambda: engine.ring.statistics().clients == 1)
    assert engine.ring.statistics().departed_clients == 0  # it said goodbye


async def test_it_ends_with_its_supervisor(start_supervised: Any, open_engine: Any) -> None:
    engine = await open_engine()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process, link = start_supervised(listening)
        await eventually(lambda: engine.ring.statistics().clients == 2, 60)
        link.close()
        assert await asyncio.wait_for(process.ended(), 60) in (0, -signal.SIGTERM)


async def test_without_orders_there_is_nothing_to_do(start_supervised: Any, open_engine: Any) -> None:
    process, link = start_supervised(None)
    link.close()
    errors = await asyncio.to_thread(process.rest, 60)
    assert (process.returncode, errors) == (1, "shmring frontend: the supervisor has gone\n")


async def test_a_port_in_use_is_a_clear_line(start: Start, open_engine: Any) -> None:
    await open_engine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(f"--port={taken.getsockname()[1]}")
        errors = await asyncio.to_thread(process.rest, 60)
    assert process.returncode != 0
    assert "can't listen on 127.0.0.1 port" in errors
    assert "Address already in use" in errors
    assert "Traceback" not in errors


async def test_it_waits_for_an_engine_that_is_late(start: Start, open_engine: Any) -> None:
    process = start("--port=0", "--connect-timeout=60")
    await eventually(lambda: b"uvloop" in Path(f"/proc/{process.pid}/maps").read_bytes(), 60)  # it has been imported
    engine = await open_engine()
    await eventually(lambda: engine.ring.statistics().clients == 2, 60)


async def test_it_does_not_wait_for_ever(start: Start) -> None:
    process = start("--port=0", "--connect-timeout=0.1")
    errors = await asyncio.to_thread(process.rest, 60)
    assert process.returncode == 1
    assert errors.startswith("shmring frontend: no engine")
    assert "Traceback" not in errors


async def test_at_its_end_it_answers_requests_that_still_wait(start: Start, open_engine: Any, body_of: Any) -> None:
    release = asyncio.Event()

    async def wait(claim: shmring.Claim) -> None:
        await release.wait()

    engine = await open_engine(wait)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        process = start(f"--listen-fd={listening.fileno()}", "--shutdown-timeout=0.25", pass_fds=(listening.fileno(),))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}", timeout=60) as http:
            request = asyncio.create_task(http.post("/v1/embeddings", json=body_of(np.zeros((4, 4, 3), np.uint8))))
            await eventually(lambda: engine.ring.statistics().running == 1, 60)
            process.send(signal.SIGTERM)
            response = await asyncio.wait_for(request, 30)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert await asyncio.wait_for(process.ended(), 30) == 0
    release.set()
    await eventually(lambda: engine.ring.statistics().slots_in_use == 0)
    assert engine.ring.statistics().departed_clients == 0  # it said goodbye
