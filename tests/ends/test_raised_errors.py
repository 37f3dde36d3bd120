"""Errors that were raised: no end keeps one, since its traceback holds frames, and those hold views.

Since Python 3.12 the frame of a coroutine that an error has left holds its callers' too: whatever ran the loop, and what that
has in hands.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring, Worker
from tests.waiting import cancel, eventually, hold, turns

PACKAGE = Path(shmring.__file__).parent

pytestmark = [pytest.mark.both_loops, pytest.mark.usefixtures("without_collections")]


def raised_errors() -> list[str]:
    """Errors that live and have left a function of ours, each with the functions that it has left."""
    lines = []
    for error in gc.get_objects():
        if issubclass(type(error), BaseException):
            code = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if any(Path(function.co_filename).is_relative_to(PACKAGE) for function in code):
                lines.append(f"{error!r} of {', '.join(function.co_qualname for function in code)}")
    return lines


async def join(socket_dir: Path) -> Worker:
    return await shmring.join("test", 0, socket_dir=str(socket_dir))


async def test_ends_that_have_closed_keep_none(ring: Ring, client: Client, socket_dir: Path) -> None:
    worker = await join(socket_dir)
    for end in (worker, client, ring):
        await end.close()
    assert raised_errors() == []


async def test_a_client_that_has_closed_leaves_no_task(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``asyncio.run`` would cancel it, and what its caller has in hands then would be kept by the error."""
    mapped = threading.Event()
    monkeypatch.setattr("shmring.memory.slab.Slab.prefault", lambda *_: mapped.wait(10))
    await serve(prefault=False)
    before = asyncio.all_tasks()
    client = await connect()
    closing = asyncio.create_task(client.close())
    await turns()
    mapped.set()
    await closing
    assert asyncio.all_tasks() - before == set()


@pytest.mark.client(reconnect=True, prefault=False)
async def test_a_client_that_was_closed_while_it_looked_for_an_engine_keeps_none(ring: Ring, client: Client) -> None:
    await ring.close()
    await eventually(lambda: not client.connected)
    await client.close()
    assert raised_errors() == []


@pytest.mark.ring(message_ring_nbytes="16KiB")
async def test_a_worker_keeps_none_of_a_reply_that_it_gave_up(ring: Ring, socket_dir: Path) -> None:
    worker = await join(socket_dir)
    await ring.wait_workers(1)
    gathering = asyncio.ensure_future(ring.gather("?"))
    with await worker.receive() as message:
        [joined] = ring._shell.workers._workers.values()
        go_on = hold(joined.link)
        replying = asyncio.create_task(message.reply("x" * 100_000))
        await turns()
        await worker.close()
        with pytest.raises(shmring.ClosedError):
            await replying
    go_on()
    with pytest.raises(shmring.WorkerLostError):
        await gathering
    del replying, gathering
    await turns()
    assert raised_errors() == []


async def test_an_engine_keeps_none_of_a_memory_that_it_could_not_reserve(
    serve: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise shmring.SlabError("there is no memory")

    monkeypatch.setattr("shmring.ring.workers.reserve_for_one_writer", refuse)
    ring = await serve()
    joining = asyncio.ensure_future(join(socket_dir))
    await eventually(lambda: ring.statistics().refused)
    assert await cancel(joining)
    del joining
    await eventually(lambda: raised_errors() == [])  # the thread that raised it has it until its turn comes


async def test_a_request_that_waited_for_any_engine_leaves_none(ring: Ring, socket_dir: Path) -> None:
    # Mapping pages is cut short where the engine goes, on a thread, whose error lives for as long as that takes.
    client = await shmring.connect(["test", "other"], socket_dir=str(socket_dir), prefault=False)
    await ring.close()
    await eventually(lambda: not client.connected)
    payload = torch.ones(10)
    died = weakref.ref(payload)
    requesting = asyncio.create_task(client.request(payload))
    await turns()
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await requesting
    del payload, requesting
    await turns()
    assert died() is None
    assert raised_errors() == []
