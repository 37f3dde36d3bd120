"""What the tests with processes share: a nursery that starts them in milliseconds, once for the session."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0  # for a process to say or do what it will


class Nursery:
    """``programs/nursery.py``: forks programs from a process that has everything imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "nursery.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, output: Path, program: str, *arguments: str, **environment: str) -> Forked:
        order = {
            "program": str(PROGRAMS / f"{program}.py"),
            "arguments": arguments,
            "environment": environment,
            "output": str(output),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._read()), output)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()


class Forked:
    """A process that a nursery has started."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.pidfd = os.pidfd_open(pid)
        self._lines_read = 0

    @property
    def is_dead(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    async def said(self, limit_s: float = LIMIT_S) -> list[str]:
        """The next line that it prints."""
        deadline = time.monotonic() + limit_s
        while True:
            lines = self.output.read_text().split("\n")[:-1] if self.output.exists() else []
            if len(lines) > self._lines_read:
                self._lines_read += 1
                return lines[self._lines_read - 1].split()
            assert not self.is_dead, f"process {self.pid} has ended: {self.output.read_text()}"
            assert time.monotonic() < deadline, f"process {self.pid} says nothing"
            await asyncio.sleep(0.002)

    async def stopped(self) -> None:
        """Waits until it has stopped itself; continued any sooner, it would stop afterwards."""
        deadline = time.monotonic() + LIMIT_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            await asyncio.sleep(0.002)

    async def died(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.is_dead:
            assert time.monotonic() < deadline, f"process {self.pid} lives: {self.output.read_text()}"
            await asyncio.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        if not self.is_dead:
            signal.pidfd_send_signal(self.pidfd, number)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
async def launch(nursery: Nursery, socket_dir: Path) -> AsyncIterator[Callable[..., Forked]]:
    """``launch("tour", "engine", ..., SOME=environment)``: runs a program of ``programs/`` until the test has ended."""
    processes: list[Forked] = []

    def run(program: str, *arguments: str, **environment: str) -> Forked:
        output = socket_dir / f"{program}-{len(processes)}.log"
        process = nursery.start(output, program, *arguments, **environment)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.signal(signal.SIGKILL)
        await process.died()
        os.close(process.pidfd)
