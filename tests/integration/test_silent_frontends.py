"""Frontends that do not answer when the engine recalls their lease: nobody waits for them while others have idle memory."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring import Ring
from shmring.ring import inspection
from tests.waiting import eventually

LIMIT_S = 60  # which only a hang reaches
NBYTES = 600_000  # more than a half of a lease
LARGE_NBYTES = 3_000_000  # there is no room for it beside such a lease, nor for NBYTES beside it
CUT_NBYTES = 1_500_000  # likewise on one side of a lease in the middle
#: Room for three leases of 1 MiB, and for nothing of this size beside them.
CROWDED: dict[str, Any] = {
    "slab_nbytes": 3 * (1 << 20) + (192 << 10),
    "reply_nbytes": 4096,
    "max_lease_nbytes": "1MiB",
    "client_quota_nbytes": "1MiB",
}


@pytest.mark.ring(**CROWDED)
async def test_nobody_waits_for_a_stopped_frontend_beside_idle_memory(
    ring: Ring, connect: Any, launch: Callable[..., Any], socket_dir: Path
) -> None:
    stopped = launch("frontend", "write", "test", str(socket_dir))
    assert await stopped.said() == ["writing"]
    stopped.signal(signal.SIGSTOP)
    idle = [await connect(lease_nbytes="1MiB") for _ in range(2)]
    needy = [await connect(lease_nbytes=4096) for _ in range(2)]
    # One after the other: what is recalled for a second one may come to the first.
    slots = [await asyncio.wait_for(client.slot(NBYTES), LIMIT_S) for client in needy]
    assert sum(client.statistics().leased_nbytes for client in idle) == 0, "theirs has gone to those who waited"
    for slot in slots:
        slot.close()
    stopped.signal(signal.SIGCONT)  # it uses its slot, and returns its lease when it leaves the slot
    for client in (*idle, *needy):
        await client.close()
    stopped.signal(signal.SIGKILL)


@pytest.mark.ring(**(CROWDED | {"client_quota_nbytes": "3MiB"}))
async def test_small_requests_go_on_while_a_large_one_waits_for_a_stopped_frontend(
    ring: Ring, connect: Any, launch: Callable[..., Any], socket_dir: Path
) -> None:
    """The large one has nearly all of the slab set apart for it, and gives it up; it is served when the stopped one goes on."""
    stopped = launch("frontend", "idle", "test", str(socket_dir))
    assert await stopped.said() == ["idle"]
    stopped.signal(signal.SIGSTOP)
    large, *small = [await connect(lease_nbytes=4096) for _ in range(3)]
    waiting = asyncio.create_task(large.slot(LARGE_NBYTES))
    await eventually(lambda: ring.statistics().lease_requests_waiting == 1)
    for _ in range(3):
        slots = await asyncio.wait_for(asyncio.gather(*(client.slot(NBYTES) for client in small)), LIMIT_S)
        for slot in slots:
            slot.close()
    assert not waiting.done()
    stopped.signal(signal.SIGCONT)  # it hears of the recall, and returns its lease
    (await asyncio.wait_for(waiting, LIMIT_S)).close()
    for client in (large, *small):
        await client.close()
    stopped.signal(signal.SIGKILL)


@pytest.mark.ring(**(CROWDED | {"client_quota_nbytes": "4MiB"}))
async def test_small_requests_go_on_beside_a_client_that_wants_more_than_it_gives_back(ring: Ring, connect: Any) -> None:
    """It keeps a slot in the range that it waits for."""
    large, small = [await connect(lease_nbytes=lease_nbytes) for lease_nbytes in ("1MiB", 4096)]
    held = await large.slot(NBYTES)
    waiting = asyncio.create_task(large.slot(LARGE_NBYTES))
    for _ in range(3):
        (await asyncio.wait_for(small.slot(NBYTES), LIMIT_S)).close()
    assert not waiting.done()
    held.close()
    (await asyncio.wait_for(waiting, LIMIT_S)).close()


@pytest.mark.ring(**(CROWDED | {"client_quota_nbytes": "3MiB"}))
async def test_small_requests_go_on_beside_a_large_one_that_waits_for_what_a_handler_keeps(ring: Ring, connect: Any) -> None:
    """The handler waits for whom it likes: for a reader that does not read, or for a worker."""
    keeping = await connect(lease_nbytes="1MiB")
    large, small = [await connect(lease_nbytes=4096) for _ in range(2)]
    submission = await keeping.submit(torch.zeros(NBYTES, dtype=torch.uint8))
    claim = await asyncio.wait_for(ring.claim(), LIMIT_S)
    waiting = asyncio.create_task(large.slot(LARGE_NBYTES))
    for _ in range(3):
        (await asyncio.wait_for(small.slot(NBYTES), LIMIT_S)).close()
    assert not waiting.done()
    with claim:
        await claim.done("done")
    assert await asyncio.wait_for(submission.result(), LIMIT_S) == "done"
    (await asyncio.wait_for(waiting, LIMIT_S)).close()


@pytest.mark.ring(handler=lambda claim: claim.reply("done"), **(CROWDED | {"client_quota_nbytes": "3MiB"}))
async def test_callers_go_on_beside_a_large_one_of_their_own_client_that_waits_for_a_stopped_frontend(
    ring: Ring, connect: Any, launch: Callable[..., Any], socket_dir: Path
) -> None:
    """The stopped one's lease lies in the middle, so that no range is as large as what the large one wants."""
    first = await connect(lease_nbytes="1MiB")
    stopped = launch("frontend", "write", "test", str(socket_dir))
    assert await stopped.said() == ["writing"]
    stopped.signal(signal.SIGSTOP)
    client = await connect(lease_nbytes="1MiB")
    large = asyncio.create_task(client.request(torch.zeros(CUT_NBYTES, dtype=torch.uint8)))
    await asyncio.sleep(0)
    for nbytes in (NBYTES, 50_000, NBYTES):
        answer = client.request(torch.zeros(nbytes, dtype=torch.uint8))
        assert await asyncio.wait_for(answer, LIMIT_S) == "done"
    assert not large.done()
    stopped.signal(signal.SIGKILL)
    assert await asyncio.wait_for(large, LIMIT_S) == "done"
    for each in (first, client):
        await each.close()


async def test_the_log_says_who_does_not_answer(
    serve: Any,
    connect: Any,
    launch: Callable[..., Any],
    socket_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else has enough: the request waits until the frontend is dead."""
    monkeypatch.setattr(inspection, "_LOOK_S", 0.01)
    monkeypatch.setattr(inspection, "_FULL_S", 0.2)
    ring = await serve(slab_nbytes="1MiB")
    silent = launch("frontend", "write", "test", str(socket_dir))
    assert await silent.said() == ["writing"]
    silent.signal(signal.SIGSTOP)
    needy = await connect(lease_nbytes=4096)
    waiting = asyncio.create_task(needy.slot(NBYTES))
    with caplog.at_level(logging.WARNING):
        await eventually(lambda: [message for message in caplog.messages if "slab is full" in message])
    [line] = [message for message in caplog.messages if "slab is full" in message]
    assert f"client {needy.client_id} (" in line
    assert re.search(rf"pid {silent.pid}\) has 0.\d MiB of what it waits for \(does not answer since \d+ s\)", line), line
    assert line.endswith("a frontend that does not answer is stopped or busy with a slot: let it go on, or end it"), line
    assert "slab_nbytes" not in line, "a larger slab is not what is missing"
    assert not waiting.done()
    silent.signal(signal.SIGKILL)
    (await asyncio.wait_for(waiting, LIMIT_S)).close()
    assert isinstance(ring, Ring)
