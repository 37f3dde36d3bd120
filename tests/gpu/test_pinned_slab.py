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
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring.gpu.cuda import CudaError, DeviceBytes, TorchCuda
from shmring.gpu.pinned import PinnedSlab
from shmring.memory.slab import Slab

pytestmark = pytest.mark.gpu

Eventually = Callable[..., Awaitable[Any]]
MIB = 1 << 20
#: About a tenth of a second on any GPU of today: long beside everything that must not wait for it.
SLEEP_CYCLES = 200_000_000


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create("gpu", 16 * MIB, secrets.randbits(63), prefault=True)
    yield slab
    slab.close()


def copy_stream(ring: shmring.Ring, device: int = 0) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = ring._shell._host_claims.uploads._lanes[device].stream  # type: ignore[attr-defined]
    return stream


# -- registering -------------------------------------------------------------------------------------------------------


def test_a_registered_slab_is_pinned_memory_to_torch(slab: Slab) -> None:
    view = torch.from_numpy(slab.bytes_at(4096, MIB))
    assert not view.is_pinned()
    pinned = PinnedSlab.register(slab, TorchCuda(), 0)
    try:
        assert view.is_pinned()
        assert pinned.nbytes == slab.nbytes
        assert pinned.chunks == 1
    finally:
        pinned.close()
    assert not view.is_pinned()


def test_what_replies_are_in_is_pinned_too_though_it_is_sealed_and_a_frontend_copies_from_it() -> None:
    slab = Slab.create("gpu", 16 * MIB, secrets.randbits(63), prefault=True, reply_nbytes=4 * MIB)
    pinned = PinnedSlab.register(slab, TorchCuda(), 0)
    frontend = Slab.attach((os.dup(slab.fd), os.dup(slab.reply_fd)), slab.nbytes, slab.reply_nbytes, slab.epoch)
    try:
        assert (pinned.nbytes, pinned.chunks) == (16 * MIB, 2)
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


def test_a_slab_in_chunks_is_copied_from_across_their_boundaries(slab: Slab) -> None:
    cuda = SmallCalls()
    pinned = PinnedSlab.register(slab, cuda, 0, chunk_nbytes=4 * MIB)
    try:
        assert pinned.chunks == 4
        source = slab.bytes_at(3 * MIB, 2 * MIB)
        source[:] = np.arange(2 * MIB, dtype=np.uint32).view(np.uint8)[: 2 * MIB]
        target = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
        stream = cuda.create_stream(0)
        parts = pinned.split(3 * MIB, 2 * MIB)
        assert len(parts) == 2
        for offset, nbytes in parts:
            at = offset - 3 * MIB
            cuda.copy_to_device(target[at : at + nbytes], source[at : at + nbytes], stream)
        cuda.synchronize(cuda.record(stream))
        assert torch.equal(target.cpu(), torch.from_numpy(source.copy()))
    finally:
        pinned.close()


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
    cuda = TorchCuda()
    memory = cuda.allocate(0, 4096)
    lent = DeviceBytes(memory, memory.data_ptr() + 512, 1024)
    alive = weakref.ref(lent)
    view = cuda.view(0, lent)
    assert (view.data_ptr(), view.dtype, tuple(view.shape)) == (memory.data_ptr() + 512, torch.uint8, (1024,))
    derived = view[64:128].view(torch.float32).reshape(4, 4)
    del lent, view
    gc.collect()
    assert alive() is not None
    derived.fill_(1.0)
    assert memory[512 + 64 : 512 + 128].view(torch.float32).sum().item() == 16.0
    del derived
    gc.collect()
    assert alive() is None


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


async def test_the_consumers_stream_waits_and_the_slot_too(serve: Any, connect: Any, eventually: Eventually) -> None:
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
        if claim.request_id % 50 == 0 and ring._shell._host_claims.uploads._lanes:  # type: ignore[attr-defined]
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
