"""Slots that no cache holds any more, because much came to the engine meanwhile: they are written past the cache."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest
import torch

import shmring
from shmring.memory import streaming

pytestmark = pytest.mark.both_loops

MIB = 1 << 20
COLD_NBYTES = 8 * MIB


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the copies that were streamed; for all clients, twice a cache is 8 MiB."""
    sizes: list[int] = []

    def copy(to: int, source: int, nbytes: int) -> None:
        sizes.append(nbytes)
        ctypes.memmove(to, source, nbytes)

    monkeypatch.setattr("shmring.memory.tensors.copier_for", lambda _: copy)
    monkeypatch.setattr("shmring.client.session.cold_nbytes", lambda: COLD_NBYTES)
    return sizes


async def turn_over(ring: shmring.Ring, slow: shmring.RingClient, others: list[shmring.RingClient], nbytes: int) -> None:
    """A slot of a client is away while so much comes from others."""
    submission = await slow.submit(torch.zeros(5000))
    with await ring.claim():
        for place in range(nbytes // MIB):
            other = await others[place % len(others)].submit(torch.zeros(MIB // 4))
            with await ring.claim():
                pass
            await other.wait()
    await submission.wait()


async def send(ring: shmring.Ring, client: shmring.RingClient, nbytes: int) -> None:
    """Sends a tensor, and looks at what arrives."""
    tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    submission = await client.submit({"x": tensor})
    with await ring.claim() as claim:
        assert torch.equal(claim.payload["x"], tensor)
    await submission.wait()


async def test_copies_are_streamed_where_other_frontends_wrote_more_than_caches_hold(
    serve: Any, connect: Any, streamed: list[int]
) -> None:
    ring = await serve(slab_nbytes="64MiB")
    client, *others = [await connect() for _ in range(3)]
    await send(ring, client, 2 * MIB)
    assert not streamed
    await turn_over(ring, client, others, COLD_NBYTES - MIB)
    await send(ring, client, 2 * MIB)
    assert not streamed
    await turn_over(ring, client, others, 2 * COLD_NBYTES)
    await send(ring, client, MIB - 1)
    assert not streamed  # so small a copy gains nothing
    await send(ring, client, MIB)
    await send(ring, client, 3 * MIB + 1)
    assert streamed == [MIB, 3 * MIB + 1]


async def test_a_frontend_that_is_alone_again_soon_writes_to_caches(serve: Any, connect: Any, streamed: list[int]) -> None:
    ring = await serve(slab_nbytes="64MiB")
    client, other = await connect(), await connect()
    await turn_over(ring, client, [other], 2 * COLD_NBYTES)
    for _ in range(32):
        await send(ring, client, MIB)
    assert 0 < len(streamed) < 32


async def test_a_slot_that_never_comes_back_does_not_end_the_measuring(serve: Any, connect: Any, streamed: list[int]) -> None:
    ring = await serve(slab_nbytes="64MiB", max_inflight=4)
    client, other = await connect(), await connect()
    await client.submit(torch.zeros(5000))
    with await ring.claim():  # for all of the test
        for _ in range(6):
            await send(ring, client, 5000)
        await turn_over(ring, client, [other], COLD_NBYTES)
        await send(ring, client, MIB)
        assert streamed == [MIB]


async def test_what_waits_for_space_is_streamed_too(serve: Any, connect: Any, streamed: list[int]) -> None:
    ring = await serve(slab_nbytes="16MiB")
    client, other = await connect(), await connect()
    await turn_over(ring, client, [other], COLD_NBYTES)
    first = await client.submit(torch.zeros(2 * MIB))
    second = asyncio.create_task(client.submit(torch.zeros(3 * MIB)))
    with await ring.claim():
        pass
    await first.wait()
    submission = await second
    with await ring.claim():
        pass
    await submission.wait()
    assert streamed == [8 * MIB, 12 * MIB]


def test_how_much_a_cache_holds_is_what_the_kernel_says() -> None:
    assert streaming.cold_nbytes() == 2 * streaming.last_level_cache_nbytes() > 0
