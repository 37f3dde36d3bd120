"""Copies: counted, off the loop when they are large, and never cut off by a cancellation."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from shmring.memory.copier import Copier
from shmring.memory.payload import Packer

pytestmark = pytest.mark.both_loops

MIB = 1 << 20


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


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("nbytes", "in_the_loop"), [(4096, True), (4097, False)])
async def test_large_copies_leave_the_loop(
    copier: Copier, nbytes: int, in_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = Packer(8).pack([torch.full((nbytes,), 7, dtype=torch.uint8)])
    threads: list[int] = []
    copy_to = type(packed.parts[0]).copy_to

    def spy(*arguments: object) -> None:
        threads.append(threading.get_ident())
        copy_to(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(packed.parts[0]), "copy_to", spy)
    region = np.zeros(nbytes, np.uint8)
    await copier.copy(packed, region, int(region.ctypes.data))
    assert set(region.tolist()) == {7}
    assert [thread == threading.get_ident() for thread in threads] == [in_the_loop]


async def test_a_turn_of_the_loop_copies_no_more_than_one_copy_may_take() -> None:
    copier = Copier(threads=1, offload_nbytes=2 * MIB)
    packed = Packer(8).pack([torch.full((MIB,), 7, dtype=torch.uint8)])
    small = Packer(8).pack([torch.full((1000,), 7, dtype=torch.uint8)])
    region = np.zeros(MIB, np.uint8)
    copied_in_turn = [0]
    order: list[int] = []

    async def copy(number: int) -> None:
        await copier.copy(packed if number % 5 else small, region, int(region.ctypes.data))
        copied_in_turn[-1] += packed.copy_nbytes if number % 5 else 0
        order.append(number)

    copying = [asyncio.create_task(copy(number)) for number in range(15)]
    while not all(task.done() for task in copying):
        await asyncio.sleep(0)
        copied_in_turn.append(0)
    copier.close()
    await turns(1)
    assert sum(copied_in_turn) == 12 * packed.copy_nbytes
    assert max(copied_in_turn) == 2 * MIB
    assert order[:5] == [0, 1, 2, 5, 10], "small ones wait for no turn"
    assert order[5:] == sorted(order[5:]), "who came first copies first"
    assert copier.at_once_nbytes == 2 * MIB


async def test_nobody_overtakes_who_waits_for_a_turn() -> None:
    copier = Copier(threads=1, offload_nbytes=3 * MIB)
    packed = [Packer(8).pack([torch.full((mib * MIB,), 7, dtype=torch.uint8)]) for mib in (2, 2, 1)]
    region = np.zeros(2 * MIB, np.uint8)
    came, order = itertools.count(), []

    async def copy_again_and_again() -> None:
        for _ in range(10):
            number = next(came)
            await copier.copy(packed[number % 3], region, int(region.ctypes.data))
            order.append(number)

    await asyncio.gather(*[copy_again_and_again() for _ in range(8)])
    copier.close()
    assert order == list(range(80))


async def test_who_waits_for_a_turn_can_be_cancelled() -> None:
    copier = Copier(threads=1, offload_nbytes=MIB)
    packed = Packer(8).pack([torch.full((MIB,), 7, dtype=torch.uint8)])
    region = np.zeros(MIB, np.uint8)
    copying = [asyncio.create_task(copier.copy(packed, region, int(region.ctypes.data))) for _ in range(4)]
    await asyncio.sleep(0)
    assert copier.at_once_nbytes < MIB
    copying[1].cancel()
    copying[2].cancel()
    results = await asyncio.gather(*copying, return_exceptions=True)
    copier.close()
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]
    assert copier.copies == 2


async def test_copies_are_counted_when_they_are_made(copier: Copier) -> None:
    packer = Packer(8)
    two = packer.pack([torch.zeros(100, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), torch.zeros(0)])
    region = np.zeros(5000, np.uint8)
    await copier.copy(two, region, int(region.ctypes.data))
    assert (copier.copies, copier.copied_nbytes) == (2, 124), "alignment and empty tensors don't count"
    large = packer.pack(torch.zeros(5000, dtype=torch.uint8))
    await copier.copy(large, region, int(region.ctypes.data))
    copier.copy_nowait(large, region, int(region.ctypes.data))
    assert (copier.copies, copier.copied_nbytes) == (4, 10124)


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
        await turns()
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
    await turns()
    assert not tasks[1].done() or not second.started.is_set(), "it may be dropped from the queue, but not left to run"
    first.may_end.set()
    second.may_end.set()
    assert await tasks[0] == "done"
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert second.ended or not second.started.is_set()


async def test_failed_work_fails_whoever_waits(copier: Copier) -> None:
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
    gc.disable()
    try:
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
    finally:
        gc.enable()


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
