"""A nursery starts processes in milliseconds: ``programs/nursery.py`` has everything imported, and forks for each of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shmring.processes.process import Process

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 20.0  # for a process to say or do what it will
_END_LIMIT_S = 300.0  # for a program that is run to its end


class Nursery:
    """The process that forks all others. Whoever has it closes it."""

    def __init__(self) -> None:
        self._process = Process.start(
            [sys.executable, str(ROOT / "tests/programs/nursery.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.line() == "ready"

    def start(self, output: Path, program: Path, *arguments: str, **environment: str) -> Forked:
        """Starts a program; both of its outputs go to a file. Its process ends when its code has ended."""
        order = {"program": str(program), "arguments": arguments, "environment": environment}
        return Forked(self._ask({**order, "output": str(output), "errors": str(output)}), output)

    def start_text(self, output: Path, text: str, *arguments: str, errors: Path | None = None) -> Forked:
        """Starts a program from its text, as ``python -c`` does. When its code has ended, the interpreter ends as always.

        Args:
            errors: a file for what it writes to stderr, if that is not to go to ``output`` as well.
        """
        order = {"text": text, "arguments": arguments, "environment": {}}
        return Forked(self._ask({**order, "output": str(output), "errors": str(errors or output)}), output)

    def run_text(self, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a program from its text until its end; what is returned is as from :func:`subprocess.run`."""
        with tempfile.TemporaryDirectory() as directory:
            output, errors = Path(directory, "output"), Path(directory, "errors")
            forked = self.start_text(output, text, *arguments, errors=errors)
            try:
                forked.process.wait(_END_LIMIT_S)
            finally:
                forked.process.kill()
            return subprocess.CompletedProcess(
                ["-c", *arguments], self.exit_code_of(forked), output.read_text(), errors.read_text()
            )

    def exit_code_of(self, forked: Forked) -> int:
        """Of a process that has ended; minus the number of the signal that killed it. It can be asked for once."""
        return self._ask({"ended": forked.pid})

    def _ask(self, order: dict[str, object]) -> int:
        self._process.write(json.dumps(order) + "\n")
        return int(self._process.line())

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

    @property
    def lines(self) -> list[str]:
        """The lines that it has written, but for those about waiting for an engine: they depend on how busy the machine is."""
        lines = self.output.read_text().split("\n")[:-1] if self.output.exists() else []
        return [line for line in lines if not line.startswith("waiting for ")]

    async def said(self, limit_s: float = LIMIT_S) -> list[str]:
        """The words of the next line that it prints."""
        deadline = time.monotonic() + limit_s
        while (words := self._words(deadline)) is None:
            await asyncio.sleep(0.002)
        return words

    def says(self) -> list[str]:
        """The same, for who may block."""
        deadline = time.monotonic() + LIMIT_S
        while (words := self._words(deadline)) is None:
            time.sleep(0.002)
        return words

    def _words(self, deadline: float) -> list[str] | None:
        is_dead = self.is_dead  # before its lines are read: it may write the last of them meanwhile
        lines = self.lines
        if len(lines) > self._lines_read:
            self._lines_read += 1
            return lines[self._lines_read - 1].split()
        assert not is_dead, f"process {self.pid} has ended: {self.output.read_text()}"
        assert time.monotonic() < deadline, f"process {self.pid} says nothing"
        return None

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
