"""The device slab between two processes, on a real GPU: one handle, one event a slot, and bytes that arrive."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time

import pytest
import torch

from shmring.core.compiled import Region, Regions
from shmring.gpu.cuda import TorchCuda
from shmring.gpu.device import DeviceSlab, OpenedFences
from shmring.gpu.driver import Driver
from shmring.memory.views import TENSOR_MAKER

pytestmark = pytest.mark.gpu

MIB = 1 << 20

# Attaches, and for each line "offset nbytes value" writes there on a stream of its own, slowly, and answers with an event.
FRONTEND = """
import sys, torch
from shmring.core.compiled import Regions
from shmring.gpu.cuda import TorchCuda
from shmring.gpu.device import DeviceHandle, DeviceSlab, Fences
from shmring.gpu.driver import Driver
from shmring.memory.views import TENSOR_MAKER
uuid, memory, nbytes = sys.argv[1:]
cuda, regions = TorchCuda(), Regions()
slab = DeviceSlab.attach(cuda, Driver(), DeviceHandle(uuid, bytes.fromhex(memory), int(nbytes)))
stream, fences = cuda.create_stream(slab.device_index), Fences(cuda.gpu(slab.device_index))
print("ready", flush=True)
for line in sys.stdin:
    offset, size, value = map(int, line.split())
    lent = slab.memory.lend(regions, offset, size, (0, 0))
    view = TENSOR_MAKER.tensor(lent, 0, (size,), 1, 8)
    assert view.is_cuda
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        view.fill_(value)
    fence = fences.record(stream.cuda_stream)
    print(fence.handle.hex(), flush=True)
    del lent, view
    assert sys.stdin.readline() == "released\\n"
    fences.give_back(fence)
torch.cuda.synchronize()
assert slab.close()
print("closed", flush=True)
"""


def lend(slab: DeviceSlab, offset: int, nbytes: int) -> tuple[Region, torch.Tensor]:
    region = slab.memory.lend(Regions(), offset, nbytes, (0, 0))
    return region, TENSOR_MAKER.tensor(region, 0, (nbytes,), 1, 8)


def test_what_a_frontend_writes_is_there_when_its_event_has_come() -> None:
    cuda, driver = TorchCuda(), Driver()
    slab = DeviceSlab.create(cuda, driver, 0, 64 * MIB)
    opened = OpenedFences(cuda.gpu(slab.device_index), 8)
    handle = slab.handle
    frontend = subprocess.Popen(
        [sys.executable, "-c", FRONTEND, handle.uuid, handle.memory.hex(), str(handle.nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert frontend.stdin is not None
    assert frontend.stdout is not None
    try:
        assert frontend.stdout.readline() == "ready\n"
        delays: dict[int, list[float]] = {}
        for number, nbytes in enumerate([4096, 32 * MIB, 4096, 32 * MIB] * 5):
            value = number % 250 + 1
            frontend.stdin.write(f"{MIB} {nbytes} {value}\n")
            frontend.stdin.flush()
            event = bytes.fromhex(frontend.stdout.readline())
            lent, view = lend(slab, MIB, nbytes)
            started = time.perf_counter()
            opened.wait(cuda.current_stream(0), event)
            delays.setdefault(nbytes, []).append(time.perf_counter() - started)
            assert bool((view == value).all()), "read before it was written"
            frontend.stdin.write("released\n")
            frontend.stdin.flush()
            del lent, view
        frontend.stdin.close()
        assert frontend.stdout.readline() == "closed\n"
        for nbytes, taken in delays.items():
            assert statistics.median(taken) < 100e-6, (
                f"handing {nbytes} bytes over took {statistics.median(taken) * 1e6:.0f} us"
            )
    finally:
        frontend.kill()
        frontend.wait(30)
        frontend.stdout.close()
    gc.collect()
    assert slab.close()


def test_a_frontend_that_is_killed_takes_nothing_with_it() -> None:
    cuda, driver = TorchCuda(), Driver()
    free_before, _ = torch.cuda.mem_get_info(0)
    slab = DeviceSlab.create(cuda, driver, 0, 64 * MIB)
    handle = slab.handle
    frontend = subprocess.Popen(
        [sys.executable, "-c", FRONTEND, handle.uuid, handle.memory.hex(), str(handle.nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert frontend.stdin is not None
    assert frontend.stdout is not None
    assert frontend.stdout.readline() == "ready\n"
    frontend.kill()
    frontend.wait(30)
    frontend.stdin.close()
    frontend.stdout.close()
    lent, view = lend(slab, 0, MIB)
    view.fill_(9)
    assert int(view.sum(dtype=torch.int64).item()) == 9 * MIB
    del lent, view
    gc.collect()
    assert slab.close()
    free_after, _ = torch.cuda.mem_get_info(0)
    assert free_before - free_after < 64 * MIB, "the slab is still allocated"
