"""The pinned slab and copies from it, on a real GPU: what only CUDA itself can confirm."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

import shmring
from shmring.core.compiled import Content, CopyLane, GpuMemory, Regions, plan_copies
from shmring.core.messages import SLOT_HEADER_NBYTES, SlotRef
from shmring.gpu.cuda import CudaError, TorchCuda
from shmring.gpu.pinned import PinnedSlab
from shmring.gpu.watcher import Watcher
from shmring.memory.slab import Slab
from shmring.memory.tensors import make_decoder
from shmring.memory.views import TENSOR_MAKER
from tests.model.inside import open_content
from tests.records import content_of, tensor_extension
from tests.waiting import eventually

pytestmark = pytest.mark.gpu

MIB = 1 << 20
#: About a tenth of a second on any GPU of today: long beside everything that must not wait for it.
SLEEP_CYCLES = 200_000_000


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create("gpu", 16 * MIB, secrets.randbits(63), prefault=True)
    yield slab
    slab.close()


def copy_stream(ring: shmring.Ring, device: int = 0) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = ring._shell._host_claims.uploads._lanes[device].stream
    return stream


# -- registering -------------------------------------------------------------------------------------------------------


def test_a_registered_slab_is_pinned_memory_to_torch(slab: Slab) -> None:
    view = torch.from_numpy(slab.bytes_at(4096, MIB))
    assert not view.is_pinned()
    pinned = PinnedSlab.register(slab, TorchCuda(), 0)
    try:
        assert view.is_pinned()
        assert pinned.nbytes == slab.nbytes
        assert len(pinned.chunks) == 1
    finally:
        pinned.close()
    assert not view.is_pinned()


def test_what_replies_are_in_is_pinned_too_though_it_is_sealed_and_a_frontend_copies_from_it() -> None:
    slab = Slab.create("gpu", 16 * MIB, secrets.randbits(63), prefault=True, reply_nbytes=4 * MIB)
    pinned = PinnedSlab.register(slab, TorchCuda(), 0)
    frontend = Slab.attach((os.dup(slab.fd), os.dup(slab.reply_fd)), slab.nbytes, slab.reply_nbytes, slab.epoch)
    try:
        assert (pinned.nbytes, len(pinned.chunks)) == (16 * MIB, 2)
        reply = torch.from_numpy(slab.bytes_at(12 * MIB, MIB))
        assert reply.is_pinned()
        reply.copy_(torch.full((MIB,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        seen = torch.from_numpy(frontend.bytes_at(12 * MIB, MIB))
        assert torch.equal(seen.to("cuda").cpu(), reply), "memory that this mapping can only read"
    finally:
        frontend.close()
        pinned.close()
        slab.close()


def test_a_refused_registration_leaves_no_error_pending(slab: Slab) -> None:
    cuda = TorchCuda()
    pinned = PinnedSlab.register(slab, cuda, 0)
    try:
        with pytest.raises(CudaError) as caught:
            PinnedSlab.register(slab, cuda, 0)
        assert caught.value.code == 712, "cudaErrorHostMemoryAlreadyRegistered"
        assert torch.ones(8, device="cuda").sum().item() == 8
        torch.cuda.synchronize()
    finally:
        pinned.close()


def test_the_pending_error_is_real_and_clear_error_takes_it(slab: Slab) -> None:
    cuda = TorchCuda()
    with pytest.raises(CudaError):
        cuda.host_unregister(0, slab.address)  # never registered
    cuda.clear_error(0)
    assert torch.ones(8, device="cuda").sum().item() == 8


class SmallCalls(TorchCuda):
    """CUDA that takes no more than 4 MiB at a time, as an old driver does with 512 GiB."""

    def host_register(self, device: int, address: int, nbytes: int) -> None:
        if nbytes > 4 * MIB:
            raise CudaError("too large", call="cudaHostRegister", code=2)
        super().host_register(device, address, nbytes)


def content_of_one_tensor(slot_offset: int, tensor_offset: int, nbytes: int) -> Content:
    slots = (SlotRef(0, slot_offset, 8 * MIB, 1),)
    return content_of([tensor_extension(1, tensor_offset, nbytes, "uint8", (nbytes,))], b"", slots)


def test_a_slab_in_chunks_is_copied_from_across_their_boundaries(slab: Slab) -> None:
    cuda, regions = SmallCalls(), Regions()
    pinned = PinnedSlab.register(slab, cuda, 0, chunk_nbytes=4 * MIB)
    try:
        assert len(pinned.chunks) == 4
        source = slab.bytes_at(3 * MIB + SLOT_HEADER_NBYTES, 2 * MIB)
        source[:] = np.resize(np.arange(2 * MIB // 4, dtype=np.uint32).view(np.uint8), 2 * MIB)
        memory = cuda.allocate(0, 2 * MIB)
        gpu, stream = cuda.gpu(0), cuda.create_stream(0).cuda_stream
        watcher = Watcher(gpu, "test")
        content = open_content(content_of_one_tensor(3 * MIB, 0, 2 * MIB), 1, regions, slab.mapping)
        placement = plan_copies(make_decoder(), content.content, {})
        placement.target = GpuMemory(gpu, memory.data_ptr(), 2 * MIB).lend(regions, 0, 2 * MIB, (0, 0))
        lane = CopyLane(gpu, watcher.watch, stream, pinned.chunks)
        lane.copy(placement, content, stream, consumer=cuda.current_stream(0), soon=False)
        assert torch.equal(memory.cpu(), torch.from_numpy(source.copy()))
        assert watcher.close(10)
    finally:
        pinned.close()


def test_a_call_that_fails_says_what_the_driver_says(slab: Slab) -> None:
    gpu = TorchCuda().gpu(0)
    with pytest.raises(CudaError, match="cuIpcOpenEventHandle failed: ") as caught:
        gpu.open(bytes(64))
    assert caught.value.call == "cuIpcOpenEventHandle"
    torch.cuda.synchronize()
    assert gpu.is_idle(0)
    torch.cuda._sleep(SLEEP_CYCLES)
    assert not gpu.is_idle(0)
    mark = gpu.record(0)
    assert not mark.has_come
    torch.cuda.synchronize()
    assert mark.has_come
    assert gpu.is_idle(0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_context_lands_on_another_gpu() -> None:
    """In a process of its own, since a context never goes away again."""
    program = (
        "import asyncio, torch, shmring\n"
        "torch.cuda.set_device(1)\n"
        "async def main():\n"
        "    async with shmring.serve('contexts', pin='on', slab_nbytes='4MiB') as ring:\n"
        "        async with shmring.connect('contexts') as client:\n"
        "            await client.submit(torch.ones(100000))\n"
        "            with await ring.claim() as claim:\n"
        "                x = await claim.to('cuda')\n"
        "                assert x.device.index == 1 and x.sum().item() == 100000\n"
        "asyncio.run(main())\n"
        "assert torch._C._cuda_hasPrimaryContext(1)\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_view_of_lent_memory_is_no_copy_and_keeps_it() -> None:
    cuda, regions = TorchCuda(), Regions()
    memory = cuda.allocate(0, 4096)
    address, allocated = memory.data_ptr(), torch.cuda.memory_allocated(0)
    keeper = torch.utils.dlpack.to_dlpack(memory)  # type: ignore[attr-defined]
    lendable = GpuMemory(cuda.gpu(0), address, 4096, keeper)
    del keeper, memory
    region = lendable.lend(regions, 512, 1024, (1, 2))
    view = TENSOR_MAKER.tensor(region, 0, (1024,), 1, 8)
    assert (view.data_ptr(), view.dtype, tuple(view.shape)) == (address + 512, torch.uint8, (1024,))
    assert view.device == torch.device("cuda", 0)
    derived = view[64:128].view(torch.float32).reshape(4, 4)
    assert region.leave()
    del view, lendable
    gc.collect()
    assert regions.collect() == []
    derived.fill_(1.0)
    assert derived.sum().item() == 16.0
    assert torch.cuda.memory_allocated(0) == allocated
    del derived
    gc.collect()
    assert regions.collect() == [(1, 2)]
    assert torch.cuda.memory_allocated(0) < allocated


# -- claims -------------------------------------------------------------------------------------------------------------

ALL_DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("pin", ["on", "off"])
async def test_every_tensor_arrives_bit_for_bit(serve: Any, connect: Any, pin: str) -> None:
    ring = await serve(pin=pin, slab_nbytes="64MiB")
    client = await connect(lease_nbytes="16MiB")
    payload = {str(dtype): torch.randint(0, 2, (3, 5, 7)).to(dtype) for dtype in ALL_DTYPES}
    payload |= {"large": torch.rand(3 * MIB), "empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    await client.submit(payload | {"array": np.arange(1000.0), "text": np.array(["a", "bc"])})
    with await ring.claim() as claim:
        arrived = await claim.to("cuda")
    for name, sent in payload.items():
        assert arrived[name].device.type == "cuda"
        assert torch.equal(arrived[name].cpu(), sent), name
    assert torch.equal(arrived["array"].cpu(), torch.arange(1000.0, dtype=torch.float64))
    assert arrived["text"].tolist() == ["a", "bc"]
    assert ring.statistics().pinned_nbytes == (ring.statistics().slab_nbytes if pin == "on" else 0)


async def test_the_consumers_stream_waits_and_the_slot_too(serve: Any, connect: Any) -> None:
    ring = await serve(pin="on", slab_nbytes="64MiB")
    client = await connect(lease_nbytes="16MiB")
    await client.submit(torch.zeros(MIB))
    with await ring.claim() as claim:
        await claim.to("cuda")
    await eventually(lambda: ring.statistics().slots_in_use == 0)

    await client.submit(torch.full((MIB,), 7.0))
    with torch.cuda.stream(copy_stream(ring)):
        torch.cuda._sleep(SLEEP_CYCLES)
    started = time.perf_counter()
    with await ring.claim() as claim:
        arrived = await claim.to("cuda")
    total = arrived.sum()  # queued behind the copy, on this thread's stream
    queued = time.perf_counter() - started
    assert ring.statistics().slots_in_use == 1, "the copy has not even begun"
    assert total.item() == 7.0 * MIB
    assert time.perf_counter() - started > queued
    await eventually(lambda: ring.statistics().slots_in_use == 0)


async def test_a_completion_is_noticed_within_a_millisecond(serve: Any, connect: Any) -> None:
    ring = await serve(pin="on", slab_nbytes="64MiB")
    client = await connect(lease_nbytes="16MiB")
    delays = []
    for _ in range(30):
        await client.submit(torch.zeros(MIB))
        with await ring.claim() as claim:
            await claim.to("cuda")
            with torch.cuda.stream(copy_stream(ring)):
                over = torch.cuda.Event(blocking=True)
                over.record()
        ended: list[float] = []

        def watch(event: torch.cuda.Event = over, ended: list[float] = ended) -> None:
            event.synchronize()
            ended.append(time.perf_counter())

        thread = threading.Thread(target=watch)
        thread.start()
        while ring.statistics().slots_in_use:
            await asyncio.sleep(0)
        delays.append(time.perf_counter())
        thread.join()
        delays[-1] -= ended[0]
    assert sorted(delays)[len(delays) // 2] < 0.001, sorted(delays)


async def test_the_loop_is_not_held_up(serve: Any, connect: Any) -> None:
    ring = await serve(pin="on", slab_nbytes="600MiB", staging_nbytes="300MiB")
    client = await connect(lease_nbytes="300MiB")
    payload = torch.ones(256 * MIB, dtype=torch.uint8)
    await client.submit(payload)
    with await ring.claim() as claim:
        await claim.to("cuda")
    await client.submit(payload)
    claim = await ring.claim()
    torch.cuda.synchronize()
    gc.collect()
    started = time.perf_counter()
    arrived = await claim.to("cuda")
    held_up = time.perf_counter() - started
    claim.done()
    assert held_up < 0.003, f"256 MiB took {held_up * 1e3:.1f} ms of the loop; the copy itself takes about 5 to 20"
    assert arrived.sum(dtype=torch.int64).item() == 256 * MIB


async def test_nothing_is_reused_before_its_event(serve: Any, connect: Any) -> None:
    """10,000 requests through a slab and a staging memory that hold a few dozen, the GPU lagging behind: none corrupted."""
    requests = 10_000
    ring = await serve(pin="on", slab_nbytes="4MiB", staging_nbytes="4MiB")
    clients = [await connect(lease_nbytes="512KiB") for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    poison = torch.full((1,), 201, dtype=torch.uint8, device="cuda")

    async def answer(claim: shmring.Claim) -> None:
        if claim.request_id % 50 == 0 and ring._shell._host_claims.uploads._lanes:
            with torch.cuda.stream(copy_stream(ring)):
                torch.cuda._sleep(1_000_000)
        arrived = await claim.to("cuda")
        wrong.add_((arrived["data"] != arrived["value"]).sum())
        arrived["data"].copy_(poison.expand_as(arrived["data"]))  # what a later copy has to replace

    async def ask(client: shmring.Client, first: int) -> None:
        for number in range(first, requests, 16):
            value = number % 200
            data = torch.full((20_000 + number % 3 * 20_000,), value, dtype=torch.uint8)
            async for _ in client.stream({"value": torch.tensor(value, dtype=torch.uint8), "data": data}):
                pass

    running = asyncio.create_task(ring.run(answer))
    async with asyncio.timeout(100):
        await asyncio.gather(*(ask(clients[first % 2], first) for first in range(16)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert wrong.item() == 0
    assert ring.statistics().device_copies == requests


async def test_closing_in_the_middle_of_a_copy(serve: Any, connect: Any) -> None:
    ring = await serve(pin="on", slab_nbytes="64MiB")
    client = await connect(lease_nbytes="16MiB")
    await client.submit(torch.zeros(8))
    with await ring.claim() as claim:
        await claim.to("cuda")
    await client.submit(torch.full((MIB,), 5.0))
    with torch.cuda.stream(copy_stream(ring)):
        torch.cuda._sleep(SLEEP_CYCLES)
    claim = await ring.claim()
    arrived = await claim.to("cuda")
    await client.close()
    await ring.close()
    assert arrived.sum().item() == 5.0 * MIB
    assert torch.ones(8, device="cuda").sum().item() == 8
