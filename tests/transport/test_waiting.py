"""Clients and workers wait for an engine that somebody may be starting: for how long, and what they say of it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import shmring
import shmring.threads
from shmring.config import ClientConfig, WorkerConfig
from shmring.transport.waiting import saying_for_whom
from tests.waiting import eventually, turns

OPENINGS: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
    "a client": lambda options: shmring.connect("test", **options),
    "a client of several engines": lambda options: shmring.connect(["test", "other"], **options),
    "a worker": lambda options: shmring.join("test", 0, **options),
    "a worker without a loop": lambda options: asyncio.to_thread(shmring.threads.join, "test", 0, **options),
}
PROGRAM = "import sys, shmring.threads; shmring.threads.connect('nobody', socket_dir=sys.argv[1], connect_timeout_s=2.2)"


def test_a_person_has_a_minute_to_start_the_other_program() -> None:
    assert ClientConfig().connect_timeout_s == WorkerConfig().connect_timeout_s == 60


@pytest.mark.both_loops
@pytest.mark.parametrize("opening", OPENINGS)
async def test_after_a_moment_the_log_says_who_is_waited_for_and_where(
    opening: str, serve: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.transport.waiting._SAID_AFTER_S", 0.02)
    trying = asyncio.ensure_future(OPENINGS[opening]({"socket_dir": str(socket_dir)}))
    await eventually(lambda: "waiting for" in caplog.text)
    [line] = caplog.messages
    assert "'test'" in line
    assert str(socket_dir) in line
    assert "60 s at most (connect_timeout_s)" in line
    ring = await serve(lambda claim: None)
    end = await trying
    if isinstance(end, shmring.threads.Worker):
        await asyncio.to_thread(end.close)
    else:
        await end.close()
    await ring.close()


@pytest.mark.both_loops
async def test_who_is_there_in_time_is_not_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.transport.waiting._SAID_AFTER_S", 0.0)
    with saying_for_whom("nobody", 60.0):
        pass
    await turns()
    assert not caplog.messages
    with saying_for_whom("nobody", 60.0):
        await turns()
    assert caplog.messages


@pytest.mark.both_loops
@pytest.mark.parametrize("opening", OPENINGS)
async def test_the_error_names_the_place_the_wait_and_the_option(opening: str, socket_dir: Path) -> None:
    options = {"socket_dir": str(socket_dir), "connect_timeout_s": 0.05}
    with pytest.raises(shmring.EngineDeadError, match=r"within 0\.05 s \(connect_timeout_s\)") as caught:
        await OPENINGS[opening](options)
    assert str(socket_dir) in str(caught.value)
    assert "start one of" in str(caught.value)
    assert "socket_dir" in str(caught.value)


@pytest.mark.slow
def test_a_program_that_sets_up_no_log_says_it_on_the_standard_error_output(socket_dir: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(socket_dir)], capture_output=True, text=True, timeout=100)
    said = ended.stderr.splitlines()
    assert re.fullmatch(r"waiting for the engine 'nobody' at \S+/nobody\.sock, for 2\.2 s at most .*", said[0])
    assert "within 2.2 s (connect_timeout_s)" in said[-1]
