"""Servers of others, with a tiny model on the CPU, for benchmarks, tests and the demonstration: started, looked at, ended."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

import shmring.threads
from shmring.processes.process import Process

_LOG = "server.log"
_STOP_S = 30.0
_START_LIMIT_S = 900.0  # a start takes some 100 seconds of CPU; on a busy machine several are made at once


class OtherServer:
    """A running server: its launcher, where it listens, and the directory that it was started with."""

    def __init__(self, process: Process, port: int, directory: Path) -> None:
        self.process = process
        self.port = port
        self.directory = directory

    @property
    def url(self) -> str:
        """Where it listens, without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What its processes have logged."""
        return (self.directory / _LOG).read_text(errors="replace").replace("\0", "")

    def get(self, path: str) -> str:
        """What it answers to a request by curl and others."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """What it answers to JSON; raises ``urllib.error.HTTPError`` if that is an error."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def metrics(self) -> dict[str, float]:
        """The plug-in's metrics, by name and labels as ``/metrics`` writes them."""
        lines = re.findall(r"^(shmring_[^ ]+) ([0-9.e+-]+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def tensors(self) -> dict[str, int]:
        """Large tensors sent so far, by way, and inline ones by reason: ``inline space``."""
        pattern = r'^shmring_tensors_total\{reason="(\w*)",way="(\w+)"\} (\S+)$'
        counted = re.findall(pattern, self.get("/metrics"), re.MULTILINE)
        return {f"{way} {reason}".strip(): int(float(count)) for reason, way, count in counted}

    def report_of(self, ring: str) -> dict[str, Any]:
        """What an engine's half of the plug-in says now; asked of itself, so that nobody else is needed."""
        sockets = str(self.directory / "shmring")
        with shmring.threads.connect(ring, socket_dir=sockets, prefault=False, lease_nbytes=4096) as client:
            report: dict[str, Any] = client.call("report", timeout=30)
            return report

    @property
    def launcher(self) -> psutil.Process:
        """The process that started the others."""
        return psutil.Process(self.process.pid)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind, as they name themselves."""
        found = []
        for child in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just died
                if any(kind in part for part in child.cmdline()[:1]):
                    found.append(child)
        return found


@contextlib.contextmanager
def started(
    command: Sequence[object], directory: Path, environment: Mapping[str, str], unwanted: tuple[str, ...]
) -> Iterator[Process]:
    """Starts a server's launcher, and ends it with all of its processes.

    Args:
        command: the program and its arguments.
        directory: for its log and its sockets; its path is short, and nobody else may enter it.
        environment: variables beside this process's own.
        unwanted: how those of this process begin that it does not get.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    settled = {**inherited, "XDG_RUNTIME_DIR": str(directory), **environment}
    with (directory / _LOG).open("wb") as output:
        process = Process.start(list(map(str, command)), stdout=output, stderr=output, env=settled, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            _end(process)


def wait_until_it_answers(server: OtherServer) -> None:
    """Waits; raises RuntimeError if it has ended, or does not answer in time."""
    until_s = time.monotonic() + _START_LIMIT_S
    while server.process.lives and time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start; the end of its log:\n{server.log[-6000:]}")


def _end(process: Process) -> None:
    """Ends a launcher politely, and whatever it leaves behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send(signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=_STOP_S)
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()


def free_port() -> int:
    """Of those below the ones that the kernel gives to connections: a server listens a minute later, and it is still free."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(16384, 32768))) as listening:
            port: int = listening.getsockname()[1]
            return port


def picture(side: int, seed: int) -> str:
    """A picture of made-up content, as the data URL of a JPEG."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
