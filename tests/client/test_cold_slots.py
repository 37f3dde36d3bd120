"""Where a copy is written: past the cache to slots that no cache holds any more, into it where the slot has come back soon."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, NamedTuple

import pytest
import torch

from shmring import Client, Ring

pytestmark = pytest.mark.both_loops

MIB = 1 << 20
CACHE_NBYTES = 8 * MIB
COLD_NBYTES = 2 * CACHE_NBYTES


class Copies(NamedTuple):
    """The sizes of the large copies that were made."""

    past_cache: list[int]
    into_cache: list[int]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """For all clients, a cache holds 8 MiB."""
    made = Copies([], [])

    def counted(sizes: list[int]) -> Any:
        def copy(to: int, source: int, nbytes: int) -> None:
            sizes.append(nbytes)
            ctypes.memmove(to, source, nbytes)

        return copy

    monkeypatch.setattr("shmring.memory.tensors.copy_past_cache", counted(made.past_cache))
    monkeypatch.setattr("shmring.memory.tensors.copy_into_cache", counted(made.into_cache))
    monkeypatch.setattr("shmring.client.session.cache_nbytes", lambda: CACHE_NBYTES)
    return made


async def turn_over(ring: Ring, slow: Client, others: list[Client], nbytes: int) -> None:
    """A slot of a client is away while so much comes from others."""
    submission = await slow.submit(torch.zeros(5000))
    with await ring.claim():
        for place in range(nbytes // MIB):
            other = await others[place % len(others)].submit(torch.zeros(MIB // 4))
            with await ring.claim():
                pass
            await other.wait()
    await submission.wait()


async def send(ring: Ring, client: Client, nbytes: int) -> None:
    """Sends a tensor, and looks at what arrives."""
    tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    submission = await client.submit({"x": tensor})
    with await ring.claim() as claim:
        assert torch.equal(claim.payload["x"], tensor)
    await submission.wait()


@pytest.mark.one_loop
@pytest.mark.ring(slab_nbytes="64MiB")
async def test_copies_go_past_the_cache_where_other_frontends_wrote_more_than_it_holds(
    copies: Copies, ring: Ring, connect: Any
) -> None:
    client, *others = [await connect() for _ in range(3)]
    await send(ring, client, 2 * MIB)
    assert not copies.past_cache
    await turn_over(ring, client, others, COLD_NBYTES - MIB)
    await send(ring, client, 2 * MIB)
    assert not copies.past_cache
    await turn_over(ring, client, others, 2 * COLD_NBYTES)
    await send(ring, client, MIB - 1)
    assert not copies.past_cache  # so small a copy gains nothing
    await send(ring, client, MIB)
    await send(ring, client, 3 * MIB + 1)
    assert copies.past_cache == [MIB, 3 * MIB + 1]


@pytest.mark.one_loop
@pytest.mark.ring(slab_nbytes="64MiB")
async def test_a_frontend_that_is_alone_again_soon_writes_to_caches(copies: Copies, ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    await turn_over(ring, client, [other], 2 * COLD_NBYTES)
    for _ in range(32):
        await send(ring, client, MIB)
    assert 0 < len(copies.past_cache) < 32


@pytest.mark.one_loop
@pytest.mark.ring(slab_nbytes="64MiB", max_inflight=4)
async def test_a_slot_that_never_comes_back_does_not_end_the_measuring(copies: Copies, ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    await client.submit(torch.zeros(5000))
    with await ring.claim():  # for all of the test
        for _ in range(6):
            await send(ring, client, 5000)
        await turn_over(ring, client, [other], COLD_NBYTES)
        await send(ring, client, MIB)
        assert copies.past_cache == [MIB]


@pytest.mark.ring(slab_nbytes="16MiB")
async def test_what_waits_for_space_goes_past_the_cache_too(copies: Copies, ring: Ring, connect: Any) -> None:
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
    assert copies.past_cache == [8 * MIB, 12 * MIB]


@pytest.mark.one_loop
@pytest.mark.ring(slab_nbytes="64MiB")
async def test_a_large_slot_that_was_away_for_little_goes_into_the_cache(copies: Copies, ring: Ring, client: Client) -> None:
    await send(ring, client, 3 * MIB)
    await send(ring, client, 4 * MIB)
    assert copies == ([], [3 * MIB, 4 * MIB])
    await send(ring, client, 5 * MIB)  # too much, with the four that were sent before it
    assert copies == ([5 * MIB], [3 * MIB, 4 * MIB])


@pytest.mark.one_loop
@pytest.mark.ring(slab_nbytes="64MiB")
async def test_the_first_large_slot_goes_past_the_cache(copies: Copies, ring: Ring, client: Client) -> None:
    await send(ring, client, 5 * MIB)  # nothing was there before
    assert copies == ([5 * MIB], [])


@pytest.mark.ring(slab_nbytes="64MiB")
async def test_short_tensors_of_a_large_slot_are_copied_with_the_rest(copies: Copies, ring: Ring, client: Client) -> None:
    tensors = [torch.full((1000,), float(number)) for number in range(40)]
    submission = await client.submit({"large": torch.ones(5 * MIB, dtype=torch.uint8), "short": tensors})
    with await ring.claim() as claim:
        assert all(torch.equal(came, sent) for came, sent in zip(claim.payload["short"], tensors, strict=True))
    await submission.wait()
    assert copies == ([5 * MIB], [])
