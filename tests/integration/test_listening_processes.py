"""``shmring serve`` at a Unix socket, with TLS: all frontends answer there, and what a killed one leaves is in nobody's way."""

from __future__ import annotations

import os
import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

from shmring.frontend.commands.serve_process import ServerProcess
from tests.segments import own_name

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow  # starts servers


def started(path: Path, certificate: tuple[Path, Path]) -> ServerProcess:
    certfile, keyfile = certificate
    arguments = [f"--uds={path}", "--executor=synthetic", f"--ssl-certfile={certfile}", f"--ssl-keyfile={keyfile}"]
    arguments += [f"--name={own_name('listening')}", "--slab-nbytes=16MiB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ServerProcess.start(arguments, environment=environment, cwd=path.parent)


def pid_that_answers(path: Path, certificate: tuple[Path, Path]) -> int:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path), verify=context), timeout=60) as client:
        return int(client.get("https://127.0.0.1/health").json()["pid"])


def test_frontends_share_a_unix_socket_that_blocks_no_next_start(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    path = tmp_path / "s"
    with started(path, certificate) as server:
        server.wait_until_ready()
        assert server.url == f"unix:{path}"
        deadline = time.monotonic() + 60
        pids = {pid_that_answers(path, certificate)}
        while len(pids) < 2:  # the kernel wakes one of them
            assert time.monotonic() < deadline
            pids.add(pid_that_answers(path, certificate))
        server.process.kill()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert path.exists()
    with started(path, certificate) as server:
        server.wait_until_ready()
        assert pid_that_answers(path, certificate) not in pids
        server.process.send(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
