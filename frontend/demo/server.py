"""The server that the demonstration talks to: ``shmring serve`` as a process, and what must be gone after it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from shmring.frontend.import_path import without_working_directory
from shmring.frontend.serve_command import without_options

__all__ = ["DemoServer", "left_behind", "serving"]

_STOP_TIMEOUT_S = 10.0
_READY = re.compile(r"serving on (?P<url>\S+) \(engine pid (?P<engine>\d+), frontends pids (?P<frontends>[\d ]+)\)")


@dataclasses.dataclass(slots=True)
class DemoServer:
    """A running server, and the processes that it said it has."""

    process: subprocess.Popen[str]
    url: str
    pids: list[int]


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[DemoServer]:
    """Runs ``shmring serve`` with these arguments; ends it, whatever happens, even if this process is killed.

    How long it may take to be ready is its own limit (``--start-timeout``), and what it is waiting for it says itself.

    Raises:
        RuntimeError: it did not start.
    """
    # -P: nothing of the working directory is imported.
    command = [sys.executable, "-P", "-m", "shmring.frontend.cli", "serve", "--stop-with-stdin", *arguments]
    environment = without_options(without_working_directory(os.environ))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _wait_until_ready(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[str]) -> DemoServer:
    assert process.stdout is not None
    line = process.stdout.readline()  # empty when it has ended
    match = _READY.search(line)
    if match is None:
        raise RuntimeError("the server did not start; its own message is above")
    pids = [process.pid, int(match["engine"]), *map(int, match["frontends"].split())]
    return DemoServer(process, match["url"], pids)


def left_behind(server: DemoServer) -> list[str]:
    """Returns a line for each process and each segment that a server left behind."""
    problems = []
    if server.process.returncode != 0:
        problems.append(f"the server ended with exit code {server.process.returncode}")
    problems += [f"process {pid} survives" for pid in server.pids if _exists(pid)]
    mine = f"shmring-{os.getuid()}-demo-{os.getpid()}-"
    problems += [f"/dev/shm/{name} is left" for name in os.listdir("/dev/shm") if name.startswith(mine)]
    return problems


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
