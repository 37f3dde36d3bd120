"""How late a loop is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from shmring.service.loop_lag import LoopLag

BLOCKED_S = 0.4
STOPPED_S = 1.0
# A process whose loop waits, or computes, for as long as its input is open; then it says how long it did not run.
WATCHED = """
import asyncio, sys, time
from shmring.service.loop_lag import LoopLag

async def main(computes):
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    before = lag.missed_s(began)
    print("ready", flush=True)
    if computes:
        until = time.thread_time() + 0.4
        while time.thread_time() < until:
            pass
    else:
        await asyncio.to_thread(sys.stdin.readline)
    now = time.monotonic()
    print(lag.missed_s(now) - before, now - began, flush=True)
    watching.cancel()

asyncio.run(main(sys.argv[1] == "computes"))
"""


@pytest.mark.both_loops
async def test_what_blocks_a_loop_is_seen() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    assert lag.seconds == 0
    time.sleep(BLOCKED_S)  # this is what is measured
    async with asyncio.timeout(20):
        while lag.seconds < BLOCKED_S - 0.1:
            await asyncio.sleep(0)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def test_a_delay_is_shown_for_as_long_as_two_scrapes_may_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    lag = LoopLag()
    for at_s, delay_s in ((1000.0, 0.001), (1008.0, 0.5), (1009.0, 0.002), (1017.0, 0.003)):
        lag.note(delay_s, at_s)
    for now_s, shown_s in ((1017.0, 0.5), (1023.0, 0.5), (1033.0, 0.003), (1100.0, 0.0)):
        assert lag.seconds == shown_s, now_s
    assert lag.longest() == (0.0, 0.0)


def test_how_long_ago_a_delay_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    lag = LoopLag()
    for at_s, delay_s in ((1000.0, 0.001), (1008.0, 0.5), (1009.0, 0.002)):
        lag.note(delay_s, at_s)
    for now_s, ago_s in ((1009.0, 1.0), (1018.0, 10.0)):  # noqa: B007 - the clock reads it
        assert lag.longest() == (0.5, ago_s)


@pytest.mark.parametrize(("does", "is_stopped"), [("waits", True), ("computes", False)])
def test_a_process_that_was_stopped_did_not_run_and_one_that_computes_did(does: str, is_stopped: bool) -> None:
    command = [sys.executable, "-P", "-c", WATCHED, does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        if is_stopped:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)  # this is what is measured
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        missed_s, passed_s = map(float, process.stdout.readline().split())
    if is_stopped:
        assert missed_s > STOPPED_S / 2
    else:
        assert missed_s < passed_s - 0.3, "what it computed is no time in which it did not run"
