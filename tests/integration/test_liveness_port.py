"""Probes at ``--health-port`` are answered while no frontend can answer any, and hear of a step that does not end."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shmring.frontend.commands.serve_process import ServerProcess

pytestmark = pytest.mark.slow  # it starts servers
LIMIT_S = 90.0
EXECUTOR = """
import time
from shmring.engine.executors.synthetic import SyntheticExecutor

class Hanging(SyntheticExecutor):
    def execute(self, batch):
        time.sleep(600)
"""


@contextlib.contextmanager
def serving(*options: str) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place:
        (Path(place) / "hanging.py").write_text(EXECUTOR)
        common = ["--port=0", "--name=live", f"--socket-dir={place}", "--slab-nbytes=64MiB", "--health-port=0"]
        arguments = [*common, "--api-server-count=1", f"--executor-path={place}", *options]
        with ServerProcess.start(arguments, environment={**os.environ, "TMPDIR": place}) as server:
            server.wait_until_ready(LIMIT_S)
            yield server


def probe(server: ServerProcess) -> tuple[int, Any]:
    assert server.health_url is not None
    answer = httpx.get(server.health_url, timeout=LIMIT_S)
    return answer.status_code, answer.json()


def test_a_frontend_that_answers_nobody_is_no_dead_server() -> None:
    with serving("--heartbeat-timeout=600") as server:
        for pid in server.frontends:
            os.kill(pid, signal.SIGSTOP)
        try:
            status, life = probe(server)
            assert (status, life["alive"], life["engines"]) == (200, True, {"live": "running"})
            assert [frontend["pid"] for frontend in life["frontends"]] == server.frontends
        finally:
            for pid in server.frontends:
                os.kill(pid, signal.SIGCONT)


def test_a_step_that_does_not_end_is_no_life() -> None:
    with serving("--executor=hanging:Hanging", "--step-timeout=0.1", "--shutdown-timeout=0") as server:
        assert probe(server)[0] == 200
        body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "hello"}]}

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):  # the server ends meanwhile
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S)

        asking = threading.Thread(target=ask)
        asking.start()
        until_s = time.monotonic() + LIMIT_S
        while (answer := probe(server))[0] == 200:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert answer[0] == 503
        assert answer[1]["engines"] == {"live": "stuck"}
        os.kill(server.engines[0], signal.SIGKILL)
        asking.join(LIMIT_S)
