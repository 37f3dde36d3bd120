"""Two frontends and an engine, each a process, under load: every answer is checked, and in the end everything is back.

The engine's book is checked, too, each time its statistics are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import shmring

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    processes: list[asyncio.subprocess.Process] = []

    async def run(program: str, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAMS / f"{program}.py"),
            *arguments,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert line, (await process.communicate())[1].decode()
    return line.decode().split()


@pytest.mark.parametrize("slab_nbytes", ["3MiB", "32MiB"], ids=["a slab that is always full", "a slab with room"])
async def test_every_answer_under_load_is_right(start: Start, socket_dir: Path, slab_nbytes: str) -> None:
    engine = await start("engine", "load", str(socket_dir), slab_nbytes)
    assert (await said(engine))[0] == "ready"
    frontends = [await start("frontend", "load", "load", str(socket_dir)) for _ in range(2)]
    async with shmring.connect("load", socket_dir=str(socket_dir), lease_nbytes="64KiB") as observer:

        async def follow(frontend: asyncio.subprocess.Process) -> int:
            return [int((await said(frontend))[0]) for _ in range(8)][-1]

        following = asyncio.gather(*(follow(frontend) for frontend in frontends))
        while not following.done():
            counts: dict[str, Any] = await observer.call("statistics", timeout=20)
            held = counts["free_nbytes"] + counts["leased_nbytes"] + counts["quarantined_nbytes"]
            assert held == counts["leasable_nbytes"]
            await asyncio.wait([following], timeout=0.05)
        assert all(done >= 160 for done in await following)
        counts = await observer.call("statistics", timeout=20)
        assert counts["protocol_errors"] == counts["failed"] == counts["aborted"] == 0
        assert counts["finished"] >= 320
        # Stopped, both keep what they hold, for as long as it takes; killed, they keep nothing.
        for frontend in frontends:
            frontend.send_signal(signal.SIGSTOP)
        assert (await observer.call("statistics", timeout=20))["quarantined_nbytes"] == 0
        for frontend in frontends:
            frontend.kill()
        deadline = time.monotonic() + 10
        while (counts := await observer.call("statistics", timeout=20))["departed_clients"] or counts["clients"] > 1:
            assert time.monotonic() < deadline, counts
        assert counts["reply_free_nbytes"] == counts["reply_nbytes"]
        assert counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] == 0
        assert counts["quarantined_nbytes"] == 0
