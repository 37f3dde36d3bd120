"""The log of a whole server: a request by its name in all processes, each access, and stacks on SIGUSR1."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from shmring.frontend.commands.serve_process import ServerProcess
from tests.waiting import until

pytestmark = pytest.mark.slow  # it starts a server
ROOT = Path(__file__).resolve().parents[2]
EXECUTOR = """
from shmring.engine.executors.synthetic import SyntheticExecutor
from tests.waiting import until

class Failing(SyntheticExecutor):
    def execute(self, batch):
        raise ArithmeticError("it never works")
"""


def test_a_request_is_found_by_its_name_in_all_processes() -> None:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        place = Path(directory)
        (place / "failing.py").write_text(EXECUTOR)
        log = place / "errors"
        options = [
            "--port=0",
            "--name=logs",
            f"--socket-dir={place}",
            "--slab-nbytes=64MiB",
            "--log-format=json",
            "--access-log",
        ]
        options += ["--executor=failing:Failing", f"--executor-path={place}", "--api-server-count=1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
        with ServerProcess.start(options, environment=environment, errors=log) as server:
            server.wait_until_ready(90)
            body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "hello"}]}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-request-id": "my-id"}, timeout=60)
            assert answer.status_code == 500

            def lines() -> list[Any]:
                return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

            of_it = until(lambda: len(found := [line for line in lines() if line.get("request_id") == "my-id"]) >= 3 and found)
            by_process = {(line["process"], line["logger"]): line for line in of_it}
            assert "it never works" in by_process["engine", "shmring.engine.core"]["message"]
            assert "my-id failed" in by_process["frontend", "shmring.frontend.errors"]["message"]
            access = by_process["frontend", "shmring.frontend.access"]
            assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/chat/completions", 500)
            plain = [line for line in log.read_text().splitlines() if not line.startswith("{")]
            assert plain == [], "the start as well, and tracebacks, are JSON"
            starts = [line for line in lines() if line["message"].startswith("shmring: starting an engine")]
            assert [line["process"] for line in starts] == ["supervisor"]
            processes = [server.process.pid, *server.engines, *server.frontends]
            for number, pid in enumerate(processes, 1):
                os.kill(pid, signal.SIGUSR1)
                until(lambda number=number: log.read_text().count("(most recent call first)") >= number)
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            assert server.is_whole
            os.kill(server.engines[0], signal.SIGKILL)
            server.process.wait(60)
            last = lines()[-1]
            assert (last["process"], last["level"]) == ("supervisor", "CRITICAL")
            assert last["message"].startswith(f"shmring: the engine (pid {server.engines[0]}) was killed by signal 9")
