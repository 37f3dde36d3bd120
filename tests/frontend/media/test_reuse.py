"""Who prepares a medium, and who waits for that: in one process, and without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

import shmring
from shmring.frontend.media.reuse import Held, Reuse, _hash_of

KEYS = [b"a" * 32, b"b" * 32, b"c" * 32]


@pytest.fixture
def reuse() -> Reuse:
    memory: Any = SimpleNamespace(epoch=1, kept_nbytes=1 << 20)
    return Reuse(memory)


async def test_who_waits_goes_on_when_all_that_it_waits_for_was_prepared(reuse: Reuse) -> None:
    with reuse.lead(KEYS[:1]):
        with reuse.lead(KEYS[1:2]):
            waiting = asyncio.create_task(reuse.wait(KEYS))
            await asyncio.sleep(0)
            assert reuse.waiting == 1
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
    assert reuse.waiting == 0
    await reuse.wait(KEYS)  # nobody prepares any of them


async def test_who_is_cancelled_while_it_waits_waits_no_more(reuse: Reuse) -> None:
    with reuse.lead(KEYS):
        waiting = asyncio.create_task(reuse.wait(KEYS[:1]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert reuse.waiting == 0


async def test_who_prepares_learns_what_is_wanted_and_ends_also_if_it_fails(reuse: Reuse) -> None:
    with contextlib.suppress(ValueError), reuse.lead(KEYS[:2]):
        assert reuse.join(KEYS) == KEYS[:2]
        raise ValueError("damaged")
    assert reuse.join(KEYS) == []
    with reuse.lead(KEYS):
        pass


async def test_what_can_not_be_pinned_is_as_if_it_were_not_there(reuse: Reuse) -> None:
    async def find(key: bytes) -> None:
        raise shmring.WouldBlock("too much is pinned")

    reuse.memory.find = find  # type: ignore[method-assign,assignment]
    with Held() as held:
        assert await reuse.find(KEYS, held) == []
        assert held.media == {}


def test_a_key_is_of_a_file_and_of_how_it_is_prepared() -> None:
    assert len({_hash_of(b"one", b"file"), _hash_of(b"two", b"file"), _hash_of(b"on", b"efile"), _hash_of(b"one", b"fil")}) == 4
    assert _hash_of(b"one", b"file") == _hash_of(b"one", b"file")
