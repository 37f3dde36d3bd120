"""Two frontends and an engine, each a process, under load: every answer is checked, and in the end everything is back.

The engine's book is checked, too, each time its statistics are asked for.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmring


@pytest.mark.parametrize("slab_nbytes", ["3MiB", "32MiB"], ids=["a slab that is always full", "a slab with room"])
async def test_every_answer_under_load_is_right(launch: Callable[..., Any], socket_dir: Path, slab_nbytes: str) -> None:
    engine = launch("engine", "load", str(socket_dir), slab_nbytes)
    assert (await engine.said())[0] == "ready"
    frontends = [launch("frontend", "load", "load", str(socket_dir)) for _ in range(2)]
    async with shmring.connect("load", socket_dir=str(socket_dir), lease_nbytes="64KiB") as observer:

        async def follow(frontend: Any) -> int:
            return [int((await frontend.said())[0]) for _ in range(8)][-1]

        following = asyncio.gather(*(follow(frontend) for frontend in frontends))
        while not following.done():
            counts: dict[str, Any] = await observer.call("statistics", timeout=20)
            held = counts["free_nbytes"] + counts["leased_nbytes"] + counts["quarantined_nbytes"] + counts["kept_nbytes"]
            assert held == counts["leasable_nbytes"]
            await asyncio.wait([following], timeout=0.05)
        assert all(done >= 160 for done in await following)
        counts = await observer.call("statistics", timeout=20)
        assert counts["protocol_errors"] == counts["failed"] == counts["aborted"] == 0
        assert counts["finished"] >= 320
        # Stopped, both keep what they hold, for as long as it takes; killed, they keep nothing.
        for frontend in frontends:
            frontend.signal(signal.SIGSTOP)
        assert (await observer.call("statistics", timeout=20))["quarantined_nbytes"] == 0
        for frontend in frontends:
            frontend.signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (counts := await observer.call("statistics", timeout=20))["departed_clients"] or counts["clients"] > 1:
            assert time.monotonic() < deadline, counts
        assert counts["reply_free_nbytes"] == counts["reply_nbytes"]
        assert counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] == 0
        assert counts["quarantined_nbytes"] == 0
