"""Slots in device memory between two processes, on a real GPU: bytes that arrive, in the order of two processes' streams."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from tests.waiting import eventually

pytestmark = pytest.mark.gpu

Start = Callable[..., "subprocess.Popen[str]"]
MIB = 1 << 20
LIMIT_S = 60.0  # for a process to import torch and make a context, on a busy machine

PROLOGUE = """
import asyncio, sys, time, torch, shmring

async def ask(client, nbytes, value, sleep_cycles=0):
    async with client.slot(nbytes, device="cuda") as slot:
        data = slot.tensor((nbytes,), torch.uint8)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)  # what follows is queued behind it, and so is the fence
        data.fill_(value)
        return await client.request({"value": value, "sent": time.perf_counter(), "data": data})

def connect(**options):
    return shmring.connect("test", socket_dir=sys.argv[1], **options)
"""


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Start]:
    """``start(program)``: runs a frontend in a process of its own, PROLOGUE before it; killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + program, str(socket_dir)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


async def said(process: subprocess.Popen[str]) -> str:
    """The next line of a process; the loop goes on meanwhile."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


async def test_a_round_trip_between_two_processes(serve: Any, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(claim: shmring.Claim) -> None:
        payload = claim.payload
        await claim.reply(int((payload["data"] != payload["value"]).sum().item()))

    ring = await serve(answer, device_slab_nbytes="128MiB")
    frontend = start(
        """
async def main():
    async with connect() as client:
        for number, nbytes in enumerate([4096, 32 << 20, 1, 1 << 20] * 5):
            wrong = await ask(client, nbytes, number + 1, 20_000_000)
            assert wrong == 0, f"{wrong} of {nbytes} bytes are wrong"
        counts = client.statistics()
        print(counts.copies, counts.in_place, counts.device_slab_nbytes, flush=True)
asyncio.run(main())
print("closed", flush=True)
"""
    )
    assert await said(frontend) == f"0 20 {128 * MIB}"
    assert await said(frontend) == "closed"
    assert await asyncio.to_thread(frontend.wait, LIMIT_S) == 0
    await eventually(lambda: ring.statistics().device_slab_free_nbytes == 128 * MIB)
    assert ring.statistics().device_slots_lost == 0
    await ring.close()
    assert "stays allocated" not in caplog.text


async def test_handing_over_takes_no_longer_for_more(serve: Any, start: Start) -> None:
    ring = await serve(device_slab_nbytes="128MiB")
    frontend = start(
        """
async def main():
    async with connect() as client:
        for number in range(60):
            for nbytes in (4096, 32 << 20):
                await ask(client, nbytes, number + 1)
asyncio.run(main())
"""
    )
    taken: dict[int, list[float]] = {}
    whole: dict[int, list[float]] = {}
    async with asyncio.timeout(LIMIT_S):
        for _ in range(120):
            while True:
                started = time.perf_counter()
                try:
                    claim = ring.claim_nowait()
                except shmring.WouldBlock:
                    await asyncio.sleep(0)
                    continue
                break
            with claim:
                nbytes = claim.payload["data"].nbytes
                usable = time.perf_counter()
                taken.setdefault(nbytes, []).append(usable - started)
                whole.setdefault(nbytes, []).append(usable - claim.payload["sent"])
                await claim.reply(None)
    assert await asyncio.to_thread(frontend.wait, LIMIT_S) == 0
    for nbytes, seconds in taken.items():
        median = statistics.median(seconds)
        assert median < 150e-6, f"taking {nbytes} bytes up took {median * 1e6:.0f} us"
    medians = {nbytes: statistics.median(seconds) for nbytes, seconds in whole.items()}
    assert medians[32 * MIB] < 2 * medians[4096] + 150e-6, f"from submit to the engine's stream, by size: {medians}"


@pytest.mark.timeout(300)
async def test_nothing_is_used_again_before_the_gpu_is_done(serve: Any, start: Start) -> None:
    """10,000 requests through a slab that holds a few dozen, both GPU queues lagging behind: none corrupted."""
    requests = 10_000
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    handled = 0

    async def answer(claim: shmring.Claim) -> None:
        nonlocal handled
        handled += 1
        if handled % 50 == 0:
            torch.cuda._sleep(1_000_000)
        data = claim.payload["data"]
        wrong.add_((data != claim.payload["value"]).sum())
        data.fill_(201)  # poison, which the next one has to write over, and has to wait for
        await claim.reply(None)

    ring = await serve(answer, device_slab_nbytes="4MiB")
    frontend = start(
        f"""
async def main():
    async with connect(lease_nbytes="256KiB") as first, connect(lease_nbytes="256KiB") as second:
        async def some(client, start):
            for number in range(start, {requests}, 16):
                late = 1_000_000 if number % 40 == 0 else 0
                await ask(client, 20_000 + number % 3 * 20_000, number % 200, late)
        await asyncio.gather(*(some((first, second)[start % 2], start) for start in range(16)))
asyncio.run(main())
print("closed", flush=True)
"""
    )
    async with asyncio.timeout(240):
        while frontend.poll() is None:
            await asyncio.sleep(0.05)
    assert frontend.returncode == 0
    assert handled == requests
    assert wrong.item() == 0
    await eventually(lambda: gc.collect() >= 0 and ring.statistics().device_slots_in_use == 0)
    assert ring.statistics().device_slab_free_nbytes == 4 * MIB


async def test_the_memory_of_a_frontend_that_is_killed_comes_back(serve: Any, start: Start) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["data"].sum(dtype=torch.int64).item()))

    ring = await serve(answer, device_slab_nbytes="4MiB")
    frontend = start(
        """
async def main():
    async with connect() as client:
        assert await ask(client, 1000, 3) == 3000
        async with client.slot(100_000, device="cuda"):
            torch.cuda.synchronize()
            print("holding", flush=True)
            await asyncio.sleep(1000)
asyncio.run(main())
"""
    )
    assert await said(frontend) == "holding"
    assert ring.statistics().device_slab_leased_nbytes > 0
    frontend.kill()
    await eventually(lambda: ring.statistics().device_slab_free_nbytes == 4 * MIB, 20)
    async with shmring.connect("test", socket_dir=ring.config.socket_dir) as client:
        async with client.slot(3 * MIB, device="cuda") as slot:
            data = slot.tensor((3 * MIB,), torch.uint8).fill_(2)
            assert await client.request({"data": data}) == 6 * MIB
        del data, slot


async def test_both_ends_in_one_process_and_a_mixed_payload(serve: Any, connect: Any) -> None:
    ring = await serve(device_slab_nbytes="4MiB")
    client = await connect()
    producing, computing = torch.cuda.Stream(), torch.cuda.Stream()
    async with client.slot(shmring.nbytes_for(((1000,), torch.bfloat16)), device="cuda") as slot:
        data = slot.tensor((1000,), torch.bfloat16)
        assert data.is_cuda
        with torch.cuda.stream(producing):
            torch.cuda._sleep(50_000_000)
            data.fill_(3.0)
            await client.submit({"d": data, "h": torch.arange(5000), "copied": torch.arange(3000, device="cuda")})
        with await ring.claim() as claim:
            assert claim.payload["d"].data_ptr() == data.data_ptr()
            assert claim.payload["d"].tolist() == [3.0] * 1000
            assert not claim.payload["copied"].is_cuda, "what lies in no slot is copied to the host"
            arrived = await claim.to("cuda:0", computing)
        with torch.cuda.stream(computing):
            assert arrived["d"].data_ptr() == data.data_ptr()
            assert float(arrived["d"].float().sum().item()) == 3000.0
            assert int(arrived["h"].sum().item()) == 12_497_500
            assert arrived["copied"].is_cuda
        del arrived
        await eventually(lambda: gc.collect() >= 0 and client.statistics().slots_cached == 1)
        del data
    await eventually(lambda: gc.collect() >= 0 and client.statistics().device_slots_in_use == 0)
    assert client.statistics().in_place == 1


async def test_another_gpu_is_an_error_that_names_the_right_one(serve: Any, connect: Any) -> None:
    ring = await serve(device_slab_nbytes="2MiB", device_slab_device="cuda:0")
    client = await connect()
    with pytest.raises(ValueError, match="device slab is on cuda:0 of this process, not on cuda:1"):
        await client.slot(100, device="cuda:1")
    async with client.slot(100, device="cuda") as slot:
        await client.submit(slot.tensor((100,), torch.uint8).fill_(1))
        with await ring.claim() as claim:
            with pytest.raises(ValueError, match="on cuda:0"):
                await claim.to("cuda:1")
            assert claim.to_nowait("cuda:0").sum().item() == 100


async def test_an_engine_without_a_device_slab_says_so(serve: Any, connect: Any) -> None:
    await serve()
    client = await connect()
    with pytest.raises(shmring.SlabError, match=r"engine 'test' has no device slab: serve it with device_slab_nbytes=\.\.\."):
        await client.slot(100, device="cuda")


async def test_more_than_the_gpu_has_is_an_error_at_the_start(serve: Any) -> None:
    _, total = torch.cuda.mem_get_info(0)
    with pytest.raises(shmring.SlabError, match="cuMemAlloc_v2 failed: out of memory"):
        await serve(device_slab_nbytes=2 * total)
    await serve(device_slab_nbytes="2MiB")
