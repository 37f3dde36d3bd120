"""Errors that were raised: no end keeps one, since its traceback holds frames, and those hold views.

Since Python 3.12 the frame of a coroutine that an error has left holds its callers' too: whatever ran the loop, and what that
has in hands.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmring

PACKAGE = Path(shmring.__file__).parent

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def raised_errors() -> list[str]:
    """Errors that live and have left a function of ours, each with the functions that it has left."""
    lines = []
    for error in gc.get_objects():
        if issubclass(type(error), BaseException):
            code = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if any(Path(function.co_filename).is_relative_to(PACKAGE) for function in code):
                lines.append(f"{error!r} of {', '.join(function.co_qualname for function in code)}")
    return lines


async def test_ends_that_have_closed_keep_none(serve: Any, connect: Any, socket_dir: Path) -> None:
    ring, client = await serve(), await connect()
    worker = await shmring.join("test", 0, socket_dir=str(socket_dir))
    for end in (worker, client, ring):
        await end.close()
    assert raised_errors() == []


async def test_a_client_that_has_closed_leaves_no_task(
    serve: Any, connect: Any, turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
