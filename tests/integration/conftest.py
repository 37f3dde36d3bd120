"""What the tests with processes share: a nursery that starts them in milliseconds, once for the session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shmring.processes.process import Process

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0  # for a process to say or do what it will


class Nursery:
    """``programs/nursery.py``: forks programs from a process that has everything imported."""

    def __init__(self) -> None:
        self._process = Process.start(
            [sys.executable, str(PROGRAMS / "nursery.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.line() == "ready"

    def start(self, output: Path, program: str, *arguments: str, **environment: str) -> Forked:
        order = {
            "program": str(PROGRAMS / f"{program}.py"),
            "arguments": arguments,
            "environment": environment,
            "output": str(output),
        }
        self._process.write(json.dumps(order) + "\n")
        return Forked(int(self._process.line()), output)

    def close(self) -> None:
        self._process.rest(LIMIT_S)
        self._process.close()


class Forked:
    """A process that a nursery has started."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.process = Process(pid)
        self._lines_read = 0

    @property
    def is_dead(self) -> bool:
        return not self.process.lives

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
        try:
            await asyncio.wait_for(self.process.ended(), LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"process {self.pid} lives: {self.output.read_text()}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send(number)


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
        process.process.close()
