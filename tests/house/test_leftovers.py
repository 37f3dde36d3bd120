"""A run is blamed for what it has left behind, and for nothing that others have."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmring.processes.process import Process
from tests.leftovers import RUN, processes_of

ROOT = Path(__file__).resolve().parents[2]
WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def start(run_python: Callable[..., Process]) -> Callable[[str], Process]:
    """``start(run)``: a process of a run, in the directory of the tests."""

    def start(run: str) -> Process:
        process = run_python("-c", WAITING, env={**os.environ, RUN: run}, cwd=ROOT / "tests", stdin=subprocess.PIPE)
        process.line()
        return process

    return start


def test_a_process_of_the_run_is_found_and_no_other(start: Callable[[str], Process]) -> None:
    run, other = secrets.token_hex(8), secrets.token_hex(8)
    processes = [start(run), start(other)]
    assert [line.split(":")[0] for line in processes_of(run)] == [f"process {processes[0].pid}"]
    for process in processes:
        process.rest(60)
    assert processes_of(run) == []


def test_the_program_says_what_is_left(start: Callable[[str], Process]) -> None:
    run = secrets.token_hex(8)
    process = start(run)
    program = "import tests.leftovers as leftovers; leftovers._GRACE_S = 0; leftovers.main()"
    environment = {**os.environ, RUN: run, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"process {process.pid}: {sys.executable} -c" in done.stdout
