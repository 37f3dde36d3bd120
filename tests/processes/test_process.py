"""Real processes: what they say of themselves, how they are told to end, and who learns of their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shmring.processes.process import Process, ProcessError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
SLEEPING = "import time; time.sleep(600)"
SAYS = (
    "import os, sys, msgspec\nfrom shmring.processes.child import say_ready\nfrom tests.processes.test_process import Word\n"
    "say_ready(int(sys.argv[1].partition('=')[2]), Word(os.getpid(), 'here I am'))\n"
)


class Word(msgspec.Struct, frozen=True):
    pid: int
    text: str


def started(program: str, **options: Any) -> Process:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Process.start([sys.executable, "-c", program], env=environment, **options)


def says(program: str) -> Process:
    return started(program, ready_flag="--ready-fd=")


def test_a_child_says_what_it_is_when_it_is_ready() -> None:
    with says(SAYS + SLEEPING) as child:
        assert child.wait_until_ready(Word, LIMIT_S) == Word(child.pid, "here I am")
        assert child.lives
        assert child.returncode is None
    assert (child.lives, child.returncode) == (False, -signal.SIGKILL)


@pytest.mark.both_loops
async def test_a_loop_goes_on_until_a_child_is_ready() -> None:
    with says(SAYS + SLEEPING) as child:
        assert await child.until_ready(Word, LIMIT_S) == Word(child.pid, "here I am")
        assert not asyncio.get_running_loop().remove_reader(
            child._word_fd
        )  # else the loop would turn when the pipe is at its end


@pytest.mark.both_loops
async def test_a_child_that_ends_before_it_is_ready_keeps_nobody_waiting() -> None:
    for program in ("", "raise SystemExit(3)", "import os; os.abort()"):
        with says(program) as child, pytest.raises(ProcessError, match="did not start"):
            child.wait_until_ready(Word)
        with says(program) as child, pytest.raises(ProcessError, match="did not start"):
            await child.until_ready(Word, LIMIT_S)


@pytest.mark.both_loops
async def test_a_child_that_is_not_ready_in_time_is_an_error() -> None:
    with says(SLEEPING) as child:
        with pytest.raises(ProcessError, match=r"was not ready within 0\.01 s"):
            child.wait_until_ready(Word, 0.01)
        with pytest.raises(ProcessError, match=r"was not ready within 0\.01 s"):
            await child.until_ready(Word, 0.01)


@pytest.mark.both_loops
async def test_a_child_that_says_something_else_is_an_error() -> None:
    for said, why in (("ready\n", "malformed"), ('{"pid": 1}\n', "missing required field"), ('{"pid"', "truncated")):
        program = f"import os, sys; os.write(int(sys.argv[1].split('=')[1]), {said.encode()!r})"
        with says(program) as child, pytest.raises(ProcessError, match=why):
            await child.until_ready(Word, LIMIT_S)


def test_what_a_child_says_of_itself_may_be_long() -> None:
    program = SAYS.replace("'here I am'", "'here I am' * 100_000")
    with says(program + SLEEPING) as child:
        assert child.wait_until_ready(Word, LIMIT_S).text == "here I am" * 100_000


async def test_the_wait_for_a_child_that_is_late_does_not_block_the_loop() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    with says(SLEEPING) as child, pytest.raises(ProcessError, match="was not ready"):
        await child.until_ready(Word, 0.1)
    counted = turns
    await asyncio.sleep(0)
    counting.cancel()
    assert counted > 1


def test_a_program_that_can_not_be_started_or_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(24, "Too many open files")

    pids: list[int] = []
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Process.start(["/no/such/program"], ready_flag="--ready-fd=")
    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many"):
        says(SAYS + SLEEPING)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise SystemExit(7)", 7, "ended with exit code 7"),
        (f"print(flush=True); {SLEEPING}", -15, "was killed by signal 15 (Terminated)"),
        (
            f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEPING}",
            -9,
            "was killed by signal 9 (Killed)",
        ),
    ],
)
def test_a_child_is_told_to_end_and_else_killed(program: str, code: int, words: str) -> None:
    with started(program, stdout=subprocess.PIPE, text=True) as child:
        child.line()  # it does what it will with signals
        assert child.stop(0.2 if code == -9 else LIMIT_S) == code
        assert child.describe_end() == words
        child.send(signal.SIGKILL)  # which does nothing
        assert child.stop(0) == code
    assert child.returncode == code


def test_a_wait_that_takes_too_long_raises_a_timeout() -> None:
    with started(SLEEPING) as child, pytest.raises(TimeoutError, match=rf"process {child.pid} did not end within 0\.01 s"):
        child.wait(0.01)


@pytest.mark.both_loops
async def test_all_waiting_callers_learn_of_the_end() -> None:
    called: list[int] = []
    with started(SLEEPING) as child:
        child.when_ended(lambda: called.append(child.pid))
        waiting = [asyncio.create_task(child.ended()) for _ in range(3)]
        given_up = asyncio.create_task(child.ended())
        await asyncio.sleep(0)
        given_up.cancel()
        child.send(signal.SIGTERM)
        assert await asyncio.gather(*waiting) == [-15] * 3
        assert await child.ended() == -15
    assert called == [child.pid]


@pytest.mark.both_loops
async def test_a_process_that_is_no_child_is_watched_too() -> None:
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEPING!r}]).pid, flush=True); input()"
    with started(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        grandchild = Process(int(parent.line()))
        assert grandchild.lives
        grandchild.send(signal.SIGKILL)
        assert await grandchild.ended() is None  # its parent alone knows how
        assert not grandchild.lives
        grandchild.close()
        grandchild.close()


def test_a_process_that_was_never_there_is_an_error() -> None:
    with pytest.raises(ProcessLookupError):
        Process(2**22 + 1)  # more than any pid can be


@pytest.mark.parametrize("knows", [True, False])
def test_a_child_ends_with_its_parent(knows: bool) -> None:
    program = (
        "import os, time\nfrom shmring.processes.child import end_with_parent\nparent = os.getpid()\n"
        f"if not os.fork():\n    end_with_parent({'parent' if knows else ''}); print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with started(program, stdout=subprocess.PIPE, text=True) as parent:
        child = Process(int(parent.line()))
        parent.send(signal.SIGKILL)
        child.wait(LIMIT_S)
        child.close()


def test_a_child_whose_parent_has_ended_ends_at_once() -> None:
    program = "from shmring.processes.child import end_with_parent; end_with_parent(1 << 30); print('lives')"
    with started(program, stdout=subprocess.PIPE) as child:
        assert child.wait(LIMIT_S) == 1
