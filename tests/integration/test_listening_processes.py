"""``shmring serve`` at a Unix socket, with TLS: all frontends answer there, and what a killed one leaves is in nobody's way."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.segments import own_name

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow  # starts servers


@contextlib.contextmanager
def serving(path: Path, certificate: tuple[Path, Path]) -> Iterator[subprocess.Popen[str]]:
    certfile, keyfile = certificate
    command = [sys.executable, "-P", "-m", "shmring.frontend.cli", "serve", f"--uds={path}", "--executor=synthetic"]
    command += [f"--ssl-certfile={certfile}", f"--ssl-keyfile={keyfile}", f"--name={own_name('listening')}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--slab-nbytes=16MiB"], stdout=subprocess.PIPE, text=True, env=environment, cwd=path.parent
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(f"shmring: serving on unix:{path} (")
            yield server
        finally:
            server.kill()


def pid_that_answers(path: Path, certificate: tuple[Path, Path]) -> int:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path), verify=context), timeout=60) as client:
        return int(client.get("https://127.0.0.1/health").json()["pid"])


def test_frontends_share_a_unix_socket_that_blocks_no_next_start(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    path = tmp_path / "s"
    with serving(path, certificate) as server:
        deadline = time.monotonic() + 60
        pids = {pid_that_answers(path, certificate)}
        while len(pids) < 2:  # the kernel wakes one of them
            assert time.monotonic() < deadline
            pids.add(pid_that_answers(path, certificate))
        server.send_signal(signal.SIGKILL)
        server.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert path.exists()
    with serving(path, certificate) as server:
        assert pid_that_answers(path, certificate) not in pids
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
