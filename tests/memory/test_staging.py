"""Staging memory: lent to one at a time, free again after its last view and the GPU's last use, waited for in order."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from shmring.errors import CapacityError, ClosedError, WouldBlock
from shmring.gpu.staging import UNIT_NBYTES, StagingPart, StagingRing
from shmring.memory.views import TENSOR_MAKER
from tests.waiting import eventually, turns

pytestmark = pytest.mark.both_loops

UNITS = 8


@pytest.fixture
async def ring(cuda: Any) -> StagingRing:
    return StagingRing(cuda, 0, cuda.allocate(0, UNITS * UNIT_NBYTES), cuda.create_stream(0).cuda_stream)


def view(ring: StagingRing, part: StagingPart) -> torch.Tensor:
    """Views all of a part, and leaves it."""
    made: torch.Tensor = TENSOR_MAKER.tensor(part.region, 0, (part.region.nbytes,), 1, 8)
    ring.leave(part)
    return made


def take(ring: StagingRing, nbytes: int) -> tuple[StagingPart, torch.Tensor]:
    part = ring.take(nbytes)
    if part is None:
        raise ring.no_space(nbytes)
    return part, view(ring, part)


async def acquire(ring: StagingRing, nbytes: int) -> tuple[StagingPart, torch.Tensor]:
    part = await ring.acquire(nbytes)
    return part, view(ring, part)


def units(count: int) -> int:
    return count * UNIT_NBYTES


async def collected() -> None:
    """Lets what died on this thread be noticed: one wake-up of the loop."""
    gc.collect()
    await turns(3)


def take_back(ring: StagingRing) -> int:
    """What is free once the GPU was asked."""
    ring._reap()
    return ring.free_nbytes


@pytest.mark.one_loop
async def test_parts_do_not_overlap_and_are_aligned(ring: StagingRing) -> None:
    parts = [take(ring, nbytes) for nbytes in (1, UNIT_NBYTES, UNIT_NBYTES + 1, 5)]
    for number, (_, view) in enumerate(parts):
        view.fill_(number)
    for number, (_, view) in enumerate(parts):
        assert (view.dtype, view.dim()) == (torch.uint8, 1)
        assert (view.data_ptr() - ring._memory.data_ptr()) % UNIT_NBYTES == 0
        assert view.unique().tolist() == [number]
    assert [view.numel() for _, view in parts] == [1, UNIT_NBYTES, UNIT_NBYTES + 1, 5]
    assert ring.free_nbytes == units(3)


async def test_a_part_is_lent_until_its_last_view_is_gone(ring: StagingRing) -> None:
    _, view = take(ring, units(UNITS))
    derived = view[100:164].view(torch.float32).reshape(4, 4).T
    del view
    await collected()
    assert take_back(ring) == 0
    del derived
    await collected()
    assert take_back(ring) == units(UNITS)


async def test_a_part_is_lent_until_the_gpu_is_done_with_it(ring: StagingRing, cuda: Any) -> None:
    part, view = take(ring, units(UNITS))
    computing = cuda.computing()
    computing.held = True
    ring.hand_over(part, computing.cuda_stream)
    del view
    await collected()
    assert take_back(ring) == 0, "a kernel that was queued before may still read it"
    with pytest.raises(WouldBlock, match=f"no {UNIT_NBYTES} bytes of staging memory are free on GPU 0"):
        take(ring, UNIT_NBYTES)
    cuda.release(computing)
    take(ring, UNIT_NBYTES)


async def test_the_event_is_behind_what_was_queued_until_the_last_view_was_gone(ring: StagingRing, cuda: Any) -> None:
    part, view = take(ring, 16)
    computing = cuda.computing()
    ring.hand_over(part, computing.cuda_stream)
    computing.held = True
    before = cuda.record(computing)
    del view
    await collected()
    kinds = list(computing.queue)
    assert kinds[0].event is before
    assert len(kinds) == 2, "the part's event comes after it"


@pytest.mark.one_loop
async def test_what_is_too_large_is_refused_at_once(ring: StagingRing) -> None:
    with pytest.raises(CapacityError, match="raise staging_nbytes") as caught:
        await ring.acquire(units(UNITS) + 1)
    assert (caught.value.needed, caught.value.capacity) == (units(UNITS) + 1, units(UNITS))


async def test_waiters_are_served_in_order(ring: StagingRing) -> None:
    held = [take(ring, units(4)) for _ in range(2)]
    order: list[int] = []

    async def borrow(number: int, nbytes: int) -> None:
        taken = await acquire(ring, nbytes)
        order.append(number)
        del taken

    large = asyncio.create_task(borrow(1, units(6)))
    await asyncio.sleep(0)
    small = asyncio.create_task(borrow(2, units(1)))
    await asyncio.sleep(0)
    del held[0]
    await collected()
    assert order == [], "the small one does not overtake"
    with pytest.raises(WouldBlock):
        take(ring, 1)
    held.clear()
    await asyncio.gather(large, small)
    assert order == [1, 2]
    await eventually(lambda: take_back(ring) == units(UNITS))


async def test_waiting_for_the_gpu_ends_without_anybody_asking(ring: StagingRing, cuda: Any) -> None:
    part, view = take(ring, units(UNITS))
    computing = cuda.computing()
    computing.held = True
    ring.hand_over(part, computing.cuda_stream)
    del view
    waiting = asyncio.create_task(acquire(ring, 1))
    await collected()
    assert not waiting.done()
    cuda.release(computing)
    async with asyncio.timeout(10):
        await waiting


async def test_nobody_polls_when_nobody_waits(ring: StagingRing, cuda: Any) -> None:
    _, view = take(ring, 1)
    cuda.streams[0].held = True
    del view
    await collected()
    assert ring._poll is None
    assert cuda.calls["cuEventQuery"] == 0


async def test_a_cancelled_waiter_passes_its_turn_on(ring: StagingRing) -> None:
    held = take(ring, units(UNITS))
    first, second = (asyncio.create_task(acquire(ring, units(UNITS))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    del held
    async with asyncio.timeout(10):
        await second
    assert first.cancelled()


async def test_a_waiter_that_is_cancelled_as_it_is_served_gives_its_part_back(ring: StagingRing) -> None:
    held = take(ring, units(UNITS))
    first = asyncio.create_task(acquire(ring, units(UNITS)))
    await asyncio.sleep(0)
    second = asyncio.create_task(acquire(ring, units(UNITS)))
    await asyncio.sleep(0)
    del held
    ring._departed()  # serves the first, which has not run yet
    first.cancel()
    async with asyncio.timeout(10):
        await second


async def test_closing_ends_the_waiting_and_leaves_views_alone(ring: StagingRing) -> None:
    _, view = take(ring, units(UNITS))
    waiting = asyncio.create_task(acquire(ring, 1))
    await asyncio.sleep(0)
    ring.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await ring.acquire(1)
    view.fill_(7)
    del view
    await collected()


async def test_views_keep_the_memory_of_a_ring_that_is_gone(cuda: Any) -> None:
    ring = StagingRing(cuda, 0, cuda.allocate(0, units(UNITS)), cuda.create_stream(0).cuda_stream)
    part, view = take(ring, units(2))
    ring.hand_over(part, cuda.current_stream(0))
    assert cuda.calls["used_on"] == 1, "torch's allocator must know who else used it"
    ring.close()
    del ring, part
    gc.collect()
    view.fill_(3)
    assert view.sum().item() == 3 * units(2)


async def test_what_the_gpu_cannot_be_asked_about_is_never_lent_again(
    ring: StagingRing, cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.streams[0].held = True
    for call, lost in (("cuStreamQuery", units(1)), ("cuEventRecord", units(2)), ("cuEventQuery", units(3))):
        taken = take(ring, lost)
        cuda.fail(call)
        del taken
        await collected()
        take_back(ring)
        assert f"{lost} bytes of staging memory are lost: {call} failed" in caplog.text
    cuda.release()
    assert take_back(ring) == units(2)


async def test_a_part_that_was_never_viewed_is_free_when_it_is_left(ring: StagingRing, cuda: Any) -> None:
    part = ring.take(units(UNITS))
    assert part is not None
    cuda.streams[0].held = True
    waiting = asyncio.create_task(ring.acquire(1))
    await asyncio.sleep(0)
    ring.leave(part)
    assert ring.free_nbytes == 0, "what fills it may be at it"
    cuda.release()
    async with asyncio.timeout(10):
        ring.leave(await waiting)
    assert ring.free_nbytes == units(UNITS)
