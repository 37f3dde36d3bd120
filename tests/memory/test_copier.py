"""Copies: counted, off the loop when they are large, and never cut off by a cancellation."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from shmring.core.compiled import Mapping, Packed
from shmring.memory.copier import Copier
from shmring.memory.tensors import make_packer
from tests.garbage import uncollected
from tests.waiting import turns

pytestmark = pytest.mark.both_loops

MIB = 1 << 20
NO_SLAB = Mapping(-1, 0)  # what is copied to here needs none


def packed_of(nbytes: int) -> Packed:
    """A payload with a tensor of so many bytes, of sevens."""
    return make_packer(8, MIB).pack([torch.full((nbytes,), 7, dtype=torch.uint8)], 0, 1 << 16)


@pytest.fixture
async def copier() -> AsyncIterator[Copier]:
    copier = Copier(threads=1, offload_nbytes=4096)
    yield copier
    copier.close()


class BlockedWork:
    """Work that runs until it is let go."""

    def __init__(self, *, fails: bool = False) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.ended = False
        self._fails = fails

    def __call__(self) -> str:
        self.started.set()
        assert self.may_end.wait(10)
        self.ended = True
        if self._fails:
            raise ValueError("broken")
        return "done"


@pytest.mark.parametrize(("nbytes", "in_the_loop"), [(4096, True), (4097, False)])
async def test_large_copies_leave_the_loop(copier: Copier, nbytes: int, in_the_loop: bool) -> None:
    packed, threads = packed_of(nbytes), []

    class Watched:
        slot_nbytes = packed.slot_nbytes

        def copy_into(self, address: int) -> None:
            threads.append(threading.get_ident())
            packed.copy_into(address)

    region = np.zeros(nbytes, np.uint8)
    await copier.copy(Watched(), NO_SLAB, int(region.ctypes.data))
    assert set(region.tolist()) == {7}
    assert [thread == threading.get_ident() for thread in threads] == [in_the_loop]


async def test_a_turn_of_the_loop_copies_no_more_than_one_copy_may_take() -> None:
    copier = Copier(threads=1, offload_nbytes=2 * MIB)
    packed = packed_of(MIB)
    small = packed_of(1000)
    region = np.zeros(MIB, np.uint8)
    copied_in_turn = [0]
    order: list[int] = []

    async def copy(number: int) -> None:
        await copier.copy(packed if number % 5 else small, NO_SLAB, int(region.ctypes.data))
        copied_in_turn[-1] += packed.slot_nbytes if number % 5 else 0
        order.append(number)

    copying = [asyncio.create_task(copy(number)) for number in range(15)]
    while not all(task.done() for task in copying):
        await asyncio.sleep(0)
        copied_in_turn.append(0)
    copier.close()
    await turns(1)
    assert sum(copied_in_turn) == 12 * packed.slot_nbytes
    assert max(copied_in_turn) == 2 * MIB
    assert order[:5] == [0, 1, 2, 5, 10], "small ones wait for no turn"
    assert order[5:] == sorted(order[5:]), "who came first copies first"
    assert copier.at_once_nbytes == 2 * MIB


async def test_nobody_overtakes_who_waits_for_a_turn() -> None:
    copier = Copier(threads=1, offload_nbytes=3 * MIB)
    packed = [packed_of(mib * MIB) for mib in (2, 2, 1)]
    region = np.zeros(2 * MIB, np.uint8)
    came, order = itertools.count(), []

    async def copy_again_and_again() -> None:
        for _ in range(10):
            number = next(came)
            await copier.copy(packed[number % 3], NO_SLAB, int(region.ctypes.data))
            order.append(number)

    await asyncio.gather(*[copy_again_and_again() for _ in range(8)])
    copier.close()
    assert order == list(range(80))


async def test_who_waits_for_a_turn_can_be_cancelled() -> None:
    copier = Copier(threads=1, offload_nbytes=MIB)
    packed = packed_of(MIB)
    region = np.zeros(MIB, np.uint8)
    copying = [asyncio.create_task(copier.copy(packed, NO_SLAB, int(region.ctypes.data))) for _ in range(4)]
    await asyncio.sleep(0)
    assert copier.copied_in_turn
    assert copier.at_once_nbytes < MIB
    copying[1].cancel()
    copying[2].cancel()
    results = await asyncio.gather(*copying, return_exceptions=True)
    copier.close()
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]


async def test_copies_are_counted_when_they_are_sent(serve: Any, connect: Any) -> None:
    """The copier counts none itself; the end that sends them does, wherever each was made."""

    def copies() -> tuple[int, int]:
        now = client.statistics()
        return now.copies, now.copied_nbytes

    await serve()
    client = await connect(copy_offload_nbytes=4096)
    await client.submit([torch.zeros(2000, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), torch.zeros(0)])
    assert copies() == (2, 2024), "alignment and empty tensors don't count"
    large = torch.zeros(5000, dtype=torch.uint8)
    await client.submit(large)
    client.submit_nowait(large)
    assert copies() == (4, 12024)


async def test_the_loop_goes_on_during_a_copy(copier: Copier) -> None:
    work = BlockedWork()
    task = asyncio.create_task(copier.run(work))
    while not work.started.is_set():
        await asyncio.sleep(0)
    assert not task.done()
    work.may_end.set()
    assert await task == "done"


@pytest.mark.parametrize("cancellations", [1, 2, 5])
async def test_a_cancellation_waits_until_nobody_writes_any_more(copier: Copier, cancellations: int) -> None:
    work = BlockedWork()
    task = asyncio.create_task(copier.run(work))
    await turns(2)
    assert work.started.wait(10)
    for _ in range(cancellations):
        task.cancel()
        await turns(10)
        assert not task.done()
        assert not work.ended
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended


async def test_work_that_was_cancelled_in_the_queue_ends_before_its_cancellation_too(copier: Copier) -> None:
    first, second = BlockedWork(), BlockedWork()
    tasks = [asyncio.create_task(copier.run(work)) for work in (first, second)]
    await turns(2)
    tasks[1].cancel()
    await turns(10)
    assert not tasks[1].done() or not second.started.is_set(), "it may be dropped from the queue, but not left to run"
    first.may_end.set()
    second.may_end.set()
    assert await tasks[0] == "done"
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert second.ended or not second.started.is_set()


async def test_failed_work_raises_in_its_caller(copier: Copier) -> None:
    work = BlockedWork(fails=True)
    work.may_end.set()
    with pytest.raises(ValueError, match="broken"):
        await copier.run(work)


async def test_failed_work_whose_waiter_was_cancelled_is_not_reported_as_lost(copier: Copier) -> None:
    work = BlockedWork(fails=True)
    task = asyncio.create_task(copier.run(work))
    await turns(2)
    assert work.started.wait(10)
    task.cancel()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The fixture `nothing_is_lost` fails if asyncio has to complain.


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_error_keeps_nothing_alive(copier: Copier, cancelled: bool) -> None:
    work = BlockedWork(fails=not cancelled)
    died = weakref.ref(work)
    with uncollected():
        task = asyncio.create_task(copier.run(work))
        await turns(2)
        assert work.started.wait(10)
        if cancelled:
            task.cancel()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError if cancelled else ValueError):
            await task
        del task, work
        # The thread lets go of its work when it takes up the next.
        await copier.run(lambda: None)
        assert died() is None


async def test_a_closed_copier_ends_what_is_running_and_takes_nothing_more() -> None:
    copier = Copier(threads=1, offload_nbytes=0)
    work = BlockedWork()
    task = asyncio.create_task(copier.run(work))
    await turns(2)
    copier.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await copier.run(lambda: None)
    work.may_end.set()
    assert await task == "done"
