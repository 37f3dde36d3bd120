"""Requests to a GPU: few copies, the right bytes, and no slot let go of before its copy is over."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmring.core.compiled import Content, Regions, plan_copies
from shmring.core.messages import SLOT_HEADER_NBYTES
from shmring.errors import CapacityError, ClosedError, WouldBlock
from shmring.gpu.cuda import CudaError
from shmring.gpu.pinned import PinnedSlab
from shmring.gpu.upload import Uploads
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.memory.tensors import make_decoder
from tests.garbage import uncollected
from tests.model.inside import leave_content, open_content
from tests.records import content_of, in_slots
from tests.tables import for_each
from tests.waiting import eventually, turns

pytestmark = pytest.mark.both_loops

SLAB_NBYTES = 4 << 20
STAGING_NBYTES = 1 << 20
OFFLOAD_NBYTES = 64 << 10

SMALL = (1, 0, "uint8", (10,))


# -- copies -----------------------------------------------------------------------------------------------------------


class Rig:
    """Uploads over a slab, whose slots are looked after as a ring would."""

    def __init__(
        self, cuda: Any, *, pin: bool = True, chunk_nbytes: int | None = None, staging_nbytes: int = STAGING_NBYTES
    ) -> None:
        self.cuda = cuda
        self.slab = Slab.create("upload", SLAB_NBYTES, secrets.randbits(63), prefault=True)
        if chunk_nbytes is not None:
            cuda.largest = chunk_nbytes
        self.pinned = (
            PinnedSlab.register(self.slab, cuda, 0, chunk_nbytes=chunk_nbytes or SLAB_NBYTES)
            if pin
            else PinnedSlab(cuda, 0, self.slab.address)
        )
        self.copier = Copier(1, OFFLOAD_NBYTES)
        self.uploads = Uploads(cuda, self.pinned, self.copier, staging_nbytes=staging_nbytes, offload_nbytes=OFFLOAD_NBYTES)
        self.regions = Regions()
        self.decoder = make_decoder()
        self.opened: Any = None  # of the last upload
        self.content = content_of(None)

    def bytes_of(self, region: int) -> NDArray[np.uint8]:
        slot = self.content.slots[region - 1]
        return self.slab.bytes_at(slot.offset + SLOT_HEADER_NBYTES, slot.nbytes)

    def fill(self, content: Content, seed: int = 0) -> list[bytes]:
        """Fills the slots; returns what each tensor holds."""
        self.content = content
        random = np.random.default_rng(seed)
        for region in (1, 2):
            view = self.bytes_of(region)
            view[:] = np.resize(random.integers(0, 200, 4099, dtype=np.uint8), view.size)
        inline = np.frombuffer(content.inline, np.uint8)
        return [
            (self.bytes_of(ref.region) if ref.region else inline)[ref.offset : ref.offset + ref.nbytes].tobytes()
            for ref in content.tensors
        ]

    def held(self) -> list[int]:
        """The slots that are still being read."""
        self.regions.collect()
        return sorted(generation for _, generation in self.regions.living())

    async def upload(self, device: Any = "cuda:0", stream: Any = None) -> list[Any]:
        regions = self.opened = open_content(self.content, 1, self.regions, self.slab.mapping)
        try:
            result: list[Any] = await self.uploads.upload(regions, self.decoder, device, stream, lambda: None)
            return result
        finally:
            leave_content(regions)

    async def send(self, *tensors: Any, seed: int = 0, inline: bytes = b"", **options: Any) -> tuple[list[bytes], list[Any]]:
        """Fills the slots and uploads them; returns what each tensor holds, and what arrived."""
        wanted = self.fill(in_slots(*tensors, inline=inline), seed)
        return wanted, await self.upload(**options)

    def upload_nowait(self, device: Any = "cuda:0") -> list[Any]:
        regions = open_content(self.content, 1, self.regions, self.slab.mapping)
        try:
            result: list[Any] = self.uploads.upload_nowait(regions, self.decoder, device, None)
            return result
        finally:
            leave_content(regions)

    async def close(self) -> None:
        if await self.uploads.close():
            self.pinned.close()
        self.copier.close()
        self.slab.close()


@pytest.fixture
async def rig(cuda: Any) -> AsyncIterator[Rig]:
    rig = Rig(cuda)
    yield rig
    cuda.release()
    await rig.close()
    assert cuda.registered == {}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


MIXED = (
    (1, 0, "uint8", (3, 100)),
    (1, 320, "bfloat16", (7,)),
    (2, 64, "float32", (1000,)),
    (0, 0, "int64", (2,)),
    (1, 200_000, "<i2", (5,)),
)


async def test_every_tensor_arrives(rig: Rig) -> None:
    wanted, arrived = await rig.send(*MIXED, inline=bytes(range(16)))
    assert [as_bytes(tensor) for tensor in arrived] == wanted
    assert [tensor.dtype for tensor in arrived] == [
        torch.uint8,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.int16,
    ]
    assert len(rig.cuda.copied) == 4, "one a slot, one for the far end of the first, one for the message"
    assert (rig.uploads.copies, rig.uploads.copied_nbytes) == (1, plan_copies(rig.decoder, rig.content, {}).nbytes)


@pytest.mark.one_loop
async def test_what_the_gpu_cannot_hold_is_copied_on_the_host(rig: Rig) -> None:
    rig.fill(in_slots((1, 0, "<U3", (1,)), (1, 64, "float32", (4,))))
    rig.bytes_of(1)[:12] = np.frombuffer(np.array(["abc"]).tobytes(), np.uint8)
    text, _numbers = await rig.upload()
    assert text.tolist() == ["abc"]
    rig.bytes_of(1)[:] = 0
    assert text.tolist() == ["abc"]


async def test_slots_are_let_go_of_when_the_copy_is_over_and_not_before(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    wanted, arrived = await rig.send(*MIXED, inline=bytes(range(16)))
    gc.collect()
    assert rig.held() == [1, 2]
    assert arrived[0].unique().tolist() == [0xEE], "nothing is copied yet, so who would let go had corrupted it"
    rig.cuda.release()
    await eventually(lambda: rig.held() == [])
    assert [as_bytes(tensor) for tensor in arrived] == wanted


async def test_slots_are_let_go_of_in_the_order_of_their_copies(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    rig.fill(in_slots(SMALL))
    first = await rig.upload()
    (stream,) = (stream for stream in rig.cuda.streams if stream.held)
    rig.fill(in_slots((2, 0, "uint8", (10,))))
    second = await rig.upload()
    assert rig.held() == [1, 2]
    rig.cuda.advance(stream)
    await eventually(lambda: rig.held() == [2])
    rig.cuda.advance(stream)
    await eventually(lambda: rig.held() == [])
    del first, second


@pytest.mark.one_loop
async def test_the_consumers_stream_waits_for_the_copy(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    await rig.send(SMALL)
    used = rig.cuda.record(rig.cuda.computing())
    assert not used.reached.is_set()
    rig.cuda.release()
    assert used.reached.is_set()


@pytest.mark.one_loop
async def test_the_first_copy_waits_for_whoever_had_the_memory_before(rig: Rig) -> None:
    computing = rig.cuda.computing()
    computing.held = True
    _, (arrived,) = await rig.send(SMALL)
    assert arrived.unique().tolist() == [0xEE]
    rig.cuda.release()
    assert arrived.unique().tolist() != [0xEE]


@pytest.mark.one_loop
async def test_torchs_allocator_learns_of_every_stream_once(rig: Rig) -> None:
    rig.fill(in_slots(SMALL))
    for _ in range(3):
        await rig.upload()
    assert rig.cuda.calls["used_on"] == 2


@pytest.mark.one_loop
async def test_another_stream_can_be_named(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    mine = rig.cuda.create_stream(0)
    mine.held = False
    await rig.send(SMALL, stream=mine)
    assert not rig.cuda.record(mine).reached.is_set()
    assert rig.cuda.record(rig.cuda.computing()).reached.is_set()


async def test_a_completion_is_noticed_within_a_millisecond(rig: Rig) -> None:
    """The best of many, as the machine may be busy."""
    rig.cuda.hold_copies = True
    await rig.send(SMALL)
    (stream,) = (stream for stream in rig.cuda.streams if stream.held)
    rig.cuda.computing().held = True
    delays = []
    for _ in range(50):
        stream.held = True
        await rig.upload()
        rig.cuda.release(stream)
        released = time.perf_counter()
        while rig.held():
            await asyncio.sleep(0)
        delays.append(time.perf_counter() - released)
    assert sorted(delays)[len(delays) // 4] < 0.001


async def test_the_loop_goes_on_while_a_copy_waits(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    rig.fill(in_slots((1, 0, "uint8", (1 << 19,))))
    async with asyncio.timeout(10):
        await rig.upload()


@pytest.mark.one_loop
async def test_copies_do_not_cross_what_was_registered_in_one_call(cuda: Any) -> None:
    rig = Rig(cuda, chunk_nbytes=64 << 10)
    wanted, (arrived,) = await rig.send((1, 0, "uint8", (300_000,)))
    assert as_bytes(arrived) == wanted[0]
    assert len(cuda.copied) == 5
    await rig.close()


@pytest.mark.one_loop
async def test_the_staging_memory_is_used_again(rig: Rig) -> None:
    for seed in range(6):
        wanted, arrived = await rig.send((1, 0, "uint8", (1 << 19,)), (2, 0, "uint8", (1 << 18,)), seed=seed)
        assert [as_bytes(tensor) for tensor in arrived] == wanted
        del arrived
    assert rig.cuda.calls["allocate"] == 1


@pytest.mark.one_loop
async def test_what_can_never_fit_is_refused(rig: Rig) -> None:
    rig.fill(in_slots((1, 0, "uint8", (1 << 20,)), (2, 0, "uint8", (1 << 20,))))
    with pytest.raises(CapacityError, match="staging_nbytes"):
        await rig.upload()
    gc.collect()
    assert rig.held() == []


# -- small copies -------------------------------------------------------------------------------------------------------


def copying(rig: Rig) -> Any:
    """The stream for copies."""
    (stream,) = (stream for stream in rig.cuda.streams if stream is not rig.cuda.computing())
    return stream


def free_nbytes(rig: Rig) -> int:
    """Of the staging memory."""
    staging = rig.uploads._lanes[0].staging
    staging._reap()
    return staging.free_nbytes


@pytest.mark.one_loop
async def test_a_small_copy_goes_on_the_consumers_stream_if_that_has_nothing_to_do(rig: Rig) -> None:
    await rig.send(SMALL)
    copying(rig).held = True
    waits = rig.cuda.calls["cuStreamWaitEvent"]
    wanted, (arrived,) = await rig.send((1, 0, "uint8", (20,)), seed=1)
    assert as_bytes(arrived) == wanted[0]
    assert rig.cuda.calls["cuStreamWaitEvent"] == waits, "a stream is behind what is queued on itself"
    rig.cuda.computing().held = True
    _, (arrived,) = await rig.send((1, 0, "uint8", (30,)), seed=2)
    rig.cuda.release(rig.cuda.computing())
    assert arrived.unique().tolist() == [0xEE], "it had something to do, and so the copy is on the other stream"


async def test_a_large_copy_never_goes_on_the_consumers_stream(cuda: Any) -> None:
    rig = Rig(cuda, staging_nbytes=2 << 20)
    await rig.send(SMALL)
    await turns()
    copying(rig).held = True
    wanted, arrived = await rig.send((1, 0, "uint8", (1 << 20,)), (2, 0, "uint8", (10,)), seed=1)
    assert as_bytes(arrived[0]) != wanted[0]
    gc.collect()
    assert rig.held() == [1, 2]
    cuda.release()
    assert as_bytes(arrived[0]) == wanted[0]
    await rig.close()
    assert rig.held() == []


@pytest.mark.one_loop
async def test_a_stream_uses_the_memory_first_behind_whoever_had_it_before(rig: Rig) -> None:
    """What the memory's last owner has queued is known to be over only where something has waited for it."""
    await rig.send(SMALL)
    copying(rig).held = True
    mine = rig.cuda.create_stream(0)
    (arrived,) = await rig.upload(stream=mine)
    assert arrived.unique().tolist() == [0xEE]


@pytest.mark.one_loop
async def test_what_copies_nothing_has_not_waited_for_the_memorys_last_owner(rig: Rig) -> None:
    computing = rig.cuda.computing()
    computing.held = True
    mine = rig.cuda.create_stream(0)
    await rig.send(stream=mine)
    _, (arrived,) = await rig.send(SMALL, stream=mine)
    assert arrived.unique().tolist() == [0xEE], "the memory's last owner is not done with it"
    rig.cuda.release()
    assert arrived.unique().tolist() != [0xEE]


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("stream", ["number", "of another device"])
async def test_a_copy_goes_only_on_a_stream_that_is_known_to_be_of_its_device(rig: Rig, stream: str) -> None:
    """CUDA lets streams of two devices wait for each other, but no event of one is recorded on the other."""
    computing = rig.cuda.computing()
    await rig.send(SMALL)
    copying(rig).held = True

    class Foreign:
        cuda_stream, device_index = computing.cuda_stream, 1

    named = computing.cuda_stream if stream == "number" else Foreign()
    _, (arrived,) = await rig.send((1, 0, "uint8", (20,)), seed=1, stream=named)
    assert arrived.unique().tolist() == [0xEE]


@pytest.mark.one_loop
async def test_a_small_copy_goes_on_though_cuda_can_not_say_whether_a_stream_is_idle(rig: Rig) -> None:
    await rig.send(SMALL)
    rig.cuda.fail("cuStreamQuery")
    wanted, (arrived,) = await rig.send((1, 0, "uint8", (20,)), seed=1)
    assert as_bytes(arrived) == wanted[0]


async def test_copies_are_looked_at_though_the_loop_could_not_be_told_once(rig: Rig) -> None:
    await rig.send(SMALL)
    await turns()
    loop = rig.uploads._loop

    class Interrupted:
        def call_soon(self, *_: Any) -> None:
            raise KeyboardInterrupt

    rig.uploads._loop = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        await rig.upload()
    rig.uploads._loop = loop
    await rig.upload()
    await turns()
    gc.collect()
    assert rig.held() == []


async def test_no_thread_is_woken_for_a_copy_that_is_over_soon(rig: Rig) -> None:
    rig.fill(in_slots(*MIXED, inline=bytes(16)))
    for _ in range(3):
        await rig.upload()
        assert rig.held() == [1, 2], "it is looked at in the next turn"
        await turns()
        assert rig.held() == []
    assert rig.cuda.calls["cuEventSynchronize"] == 0


@for_each("on_the_consumers_stream", [True, False])
async def test_a_copy_that_failed_half_way_keeps_its_memory_until_the_other_half_is_over(
    rig: Rig, on_the_consumers_stream: bool
) -> None:
    await rig.send(*MIXED, inline=bytes(16))
    await eventually(lambda: rig.held() == [])
    gc.collect()
    await eventually(lambda: free_nbytes(rig) == STAGING_NBYTES)
    computing = rig.cuda.computing()

    def hold() -> None:
        computing.held = True

    if on_the_consumers_stream:
        rig.cuda.before_copies = hold
    else:
        copying(rig).held = computing.held = True
    rig.cuda.fail_after("cuMemcpyHtoDAsync_v2", 2)
    with pytest.raises(CudaError):
        await rig.upload()
    gc.collect()
    assert rig.held() == [1, 2]
    assert free_nbytes(rig) < STAGING_NBYTES
    rig.cuda.before_copies = None
    rig.cuda.release()
    await eventually(lambda: rig.held() == [] and free_nbytes(rig) == STAGING_NBYTES)


async def test_closing_waits_for_what_was_not_looked_at(rig: Rig) -> None:
    await rig.send(SMALL)
    copying(rig).held = True
    rig.cuda.computing().held = True
    (arrived,) = rig.upload_nowait()
    threading.Timer(0.1, rig.cuda.release).start()
    assert await rig.uploads.close()
    assert arrived.unique().tolist() != [0xEE]
    assert rig.held() == []


# -- threads ------------------------------------------------------------------------------------------------------------


async def test_large_copies_from_an_unpinned_slab_leave_the_loop(cuda: Any) -> None:
    rig = Rig(cuda, pin=False)
    for nbytes, in_the_loop in ((OFFLOAD_NBYTES, True), (OFFLOAD_NBYTES + 64, False)):
        cuda.copy_threads.clear()
        wanted, (arrived,) = await rig.send((1, 0, "uint8", (nbytes,)))
        assert as_bytes(arrived) == wanted[0]
        assert (cuda.copy_threads == {threading.get_ident()}) is in_the_loop
        del arrived
    await eventually(lambda: rig.held() == [])
    await rig.close()


async def test_copies_from_a_pinned_slab_stay_in_the_loop(rig: Rig) -> None:
    await rig.send((1, 0, "uint8", (1 << 19,)))
    assert rig.cuda.copy_threads == {threading.get_ident()}


async def test_memory_is_allocated_once_and_beside_the_loop(rig: Rig) -> None:
    threads: list[int] = []
    allocate = rig.cuda.allocate

    def spy(*arguments: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        result: torch.Tensor = allocate(*arguments)
        return result

    rig.cuda.allocate = spy
    rig.fill(in_slots(SMALL))
    await asyncio.gather(*(rig.upload() for _ in range(5)))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.one_loop
async def test_every_call_names_the_device_that_was_asked_for(cuda: Any) -> None:
    """A thread's own device is GPU 0, where nothing of this belongs."""
    cuda.select(1)
    rig = Rig(cuda, pin=False)
    await rig.send((1, 0, "uint8", (OFFLOAD_NBYTES * 2,)), device="cuda")
    await rig.close()
    assert cuda.devices == {1}


# -- without waiting ---------------------------------------------------------------------------------------------------


async def test_the_twin_that_does_not_wait(rig: Rig) -> None:
    wanted = rig.fill(in_slots((1, 0, "uint8", (1 << 19,))))
    with pytest.raises(WouldBlock, match="staging memory has to be made"):
        rig.upload_nowait()
    held = await rig.upload()
    (arrived,) = rig.upload_nowait()
    assert as_bytes(arrived) == wanted[0]
    with pytest.raises(WouldBlock, match="staging memory are free"):
        rig.upload_nowait()
    assert as_bytes(held[0]) == wanted[0]


async def test_the_twin_does_not_hold_the_loop_up(cuda: Any) -> None:
    rig = Rig(cuda, pin=False)
    await rig.send(SMALL)
    rig.upload_nowait()
    rig.fill(in_slots((1, 0, "uint8", (OFFLOAD_NBYTES + 64,))))
    with pytest.raises(WouldBlock, match="not pinned"):
        rig.upload_nowait()
    await rig.close()


# -- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("call", ["allocate", "create_stream"])
async def test_a_device_that_cannot_be_opened_can_be_tried_again(rig: Rig, call: str) -> None:
    rig.fill(in_slots(SMALL))
    rig.cuda.fail(call)
    with pytest.raises(CudaError, match=f"{call} failed"):
        await rig.upload()
    await rig.upload()


@pytest.mark.one_loop
async def test_without_cuda_it_says_so(rig: Rig) -> None:
    rig.cuda.reason = "torch finds no CUDA device"
    rig.fill(in_slots(SMALL))
    with pytest.raises(CudaError, match="nothing can be copied to GPU 0: torch finds no CUDA device"):
        await rig.upload()
    with pytest.raises(ValueError, match="cpu is no CUDA device"):
        await rig.upload("cpu")


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "used_on", "current_stream"])
async def test_a_failed_copy_lets_go_of_everything(rig: Rig, call: str) -> None:
    await rig.send(*MIXED, inline=bytes(16))
    rig.uploads._lanes[0].staging._users.clear()  # so that it goes on the other stream
    gc.collect()
    rig.cuda.fail(call)
    with pytest.raises(CudaError, match=f"{call} failed"):
        await rig.upload()
    await eventually(lambda: gc.collect() >= 0 and rig.held() == [] and free_nbytes(rig) == STAGING_NBYTES)


@for_each("call", ["cuMemcpyHtoDAsync_v2", "used_on"])
@for_each("waits", [True, False])
async def test_the_error_of_a_failed_copy_keeps_neither_slot_nor_memory(rig: Rig, call: str, waits: bool) -> None:
    await rig.send(SMALL)
    await eventually(lambda: rig.held() == [] and free_nbytes(rig) == STAGING_NBYTES)
    rig.uploads._lanes[0].staging._users.clear()  # so that it goes on the other stream
    rig.cuda.fail(call)
    with uncollected():
        with pytest.raises(CudaError) as caught:
            await rig.upload() if waits else rig.upload_nowait()
        await eventually(lambda: rig.held() == [] and free_nbytes(rig) == STAGING_NBYTES)
    assert caught.value.call == call


@pytest.mark.usefixtures("keeps_slabs")
@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize"])
async def test_slots_of_which_cuda_can_say_nothing_are_kept_for_good(
    cuda: Any, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    rig = Rig(cuda)
    await rig.send(SMALL)
    await eventually(lambda: rig.held() == [])
    cuda.fail(call)
    if call == "cuEventRecord":
        with pytest.raises(CudaError, match="cuEventRecord failed: made to fail"):
            await rig.upload()
    else:
        copying(rig).held = rig.cuda.computing().held = True  # it has not come when it is looked at
        await rig.upload()
        await eventually(lambda: cuda.awaited)
        cuda.release()
        await eventually(lambda: "kept until this process ends" in caplog.text)
    gc.collect()
    assert rig.held() == [1]
    assert not await rig.uploads.close(), "the slab must not be unpinned"
    assert cuda.registered
    rig.pinned.close()
    rig.slab.close()
    rig.copier.close()


async def test_a_cancelled_copy_on_a_thread_is_seen_out(cuda: Any) -> None:
    rig = Rig(cuda, pin=False)
    rig.fill(in_slots((1, 0, "uint8", (OFFLOAD_NBYTES * 2,))))
    copying, may_end = threading.Event(), threading.Event()
    cuda.before_copies = lambda: copying.set() or may_end.wait(10)
    task = asyncio.create_task(rig.upload())
    await eventually(copying.is_set)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    leave_content(rig.opened)  # as when the claim is left
    assert rig.held() == [1]
    closing = asyncio.create_task(rig.uploads.close())
    await asyncio.sleep(0)
    assert not closing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await closing
    await rig.close()
    assert rig.held() == []


# -- the end ------------------------------------------------------------------------------------------------------------


async def test_closing_waits_for_copies_under_way(rig: Rig) -> None:
    rig.cuda.hold_copies = True
    _, (arrived,) = await rig.send(SMALL)
    closing = asyncio.create_task(rig.uploads.close())
    await turns()
    assert not closing.done()
    rig.cuda.release()
    assert await closing
    assert rig.held() == []
    assert arrived.unique().tolist() != [0xEE]
    with pytest.raises(ClosedError):
        await rig.upload()
    with pytest.raises(ClosedError):
        rig.upload_nowait()


async def test_a_gpu_that_never_answers_is_given_up(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.gpu.upload._CLOSE_TIMEOUT_S", 0.05)
    caplog.set_level(logging.CRITICAL)
    cuda.hold_copies = True
    rig = Rig(cuda)
    await rig.send(SMALL)
    assert not await rig.uploads.close()
    assert cuda.registered
    cuda.release()
    await rig.close()
    rig.pinned.close()


async def test_closing_what_was_never_used_starts_no_thread(rig: Rig) -> None:
    threads = threading.active_count()
    assert await rig.uploads.close()
    assert threading.active_count() == threads
