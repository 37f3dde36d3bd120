"""A server whose log nobody reads, or whose disk is full, answers and ends as before."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx
import pytest

from shmring.frontend.commands.serve_process import PROGRAM

pytestmark = pytest.mark.slow  # it starts servers
LIMIT_S = 90.0
REQUESTS = 1200  # whose lines are more than the 64 KiB of a pipe


class Server:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def dropped(self) -> list[int]:
        """How many lines the frontends and the engine have dropped."""
        text = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text
        return [int(float(number)) for number in re.findall(r"^shmring_\w*log_lines_dropped_total (\S+)$", text, re.MULTILINE)]


@contextlib.contextmanager
def serving(output: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place:
        ready, writing = os.pipe()
        options = ["--port=0", "--name=unread", f"--socket-dir={place}", "--slab-nbytes=64MiB", "--api-server-count=1"]
        options += ["--access-log", "--shutdown-timeout=30", f"--ready-fd={writing}"]
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, *options],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[writing],
            env={**os.environ, "TMPDIR": place},
        )
        os.close(writing)
        try:
            with os.fdopen(ready) as lines:
                line = lines.readline()
            assert line, "it did not start"
            yield Server(process, json.loads(line)["url"])
        finally:
            process.kill()
            process.communicate()


def ask_often(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        for _ in range(REQUESTS):
            assert client.get(f"/version?{'x' * 100}").status_code == 200


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads."""
    ends = os.pipe()
    yield ends[1]
    for end in ends:
        os.close(end)


def test_a_log_that_nobody_reads_stops_neither_requests_nor_the_end(unread: int) -> None:
    with serving(unread) as server:
        ask_often(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0


def test_the_second_signal_ends_a_server_whose_log_nobody_reads_at_once(unread: int) -> None:
    with serving(unread) as server, socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as caller:
        ask_often(server)
        caller.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")  # the server waits for it
        server.process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + LIMIT_S
        while server.process.poll() is None:  # the first ones may be taken for one
            assert time.monotonic() < until_s
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(1)
            # It did not wait for the caller. While it writes its last words, a further signal kills it.
        assert server.process.returncode in (1, -signal.SIGTERM)


def test_a_full_disk_stops_neither_the_start_nor_a_request_and_is_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with serving(full) as server:
            ask_often(server)
            assert server.dropped()[0] >= REQUESTS
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LIMIT_S) == 0
    finally:
        os.close(full)
