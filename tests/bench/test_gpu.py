"""``bench gpu`` without a GPU: all of its measuring, on one made of host memory whose times say nothing.

Processes are threads here, each with an event loop of its own, since such a GPU can't be sent to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.children import BenchError, play_cell
from bench.gpu import copies, handovers, processes
from bench.gpu.command import Plan, Results, run
from bench.gpu.copies import WAYS, Contender, in_flight
from bench.gpu.device import check, marks, sample
from bench.gpu.handovers import ROUTES, CudaIpc
from bench.gpu.processes import Process, opened
from bench.repetitions import Measured
from bench.stamps import CheckError
from shmring.gpu.cuda import CudaError
from tests.model.host_gpu import NAME, HostMemory
from tests.tables import for_each

KB, MB = 1 << 10, 1 << 20


@pytest.fixture
def gpu() -> HostMemory:
    return HostMemory()


SIZES = (4 * KB, 256 * KB)


# -- marks -------------------------------------------------------------------------------------------------------------


@for_each("items", [64, 65, 127, 1000, 1 << 20])
def test_the_marks_of_a_tensor_are_as_many_whatever_its_size(items: int) -> None:
    tensor = torch.zeros(items, dtype=torch.int32)
    marks(tensor).fill_(7)
    check(sample(tensor).tolist(), 7)
    places = tensor.nonzero().flatten().tolist()
    assert len(places) == 64
    assert places[0] < 63
    assert places[-1] == items - 1


@for_each("place", [54, 500, 999])
def test_a_mark_that_is_not_there_is_noticed(place: int) -> None:
    tensor = torch.full((1000,), 7, dtype=torch.int32)
    tensor[max(0, place - 20) : place + 20] = 6
    with pytest.raises(CheckError, match=r"message 7 holds \[6\] in \d+ of 64 places"):
        check(sample(tensor).tolist(), 7)
    with pytest.raises(CheckError):
        check([7], 7)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_brings_what_was_written(way: str, gpu: HostMemory, socket_dir: Path) -> None:
    async with opened(copies.openers(str(socket_dir), SIZES, [way], gpu)) as (ways, absent):
        assert absent == {}
        for nbytes in SIZES:
            found = await copies.measure(gpu, ways[way], nbytes, 0.0, 3)
            assert found["gb_per_s"][0] > 0
            assert len(found["usable_us"]) == len(found["held_us"]) == 3
            assert all(held_us <= usable_us for held_us, usable_us in zip(found["held_us"], found["usable_us"], strict=True))
    if way.startswith("slot"):
        assert gpu.cuda.copied
        assert gpu.cuda.calls["host_register"] > 0


async def test_what_a_gpu_got_wrong_is_noticed(gpu: HostMemory, socket_dir: Path) -> None:
    gpu.cuda.forgets_copies = True
    async with opened(copies.openers(str(socket_dir), SIZES, ["slot-pinned"], gpu)) as (ways, _):
        with pytest.raises(CheckError, match=r"message \d+ holds"):
            await copies.measure(gpu, ways["slot-pinned"], 4 * KB, 0.0, 1)


async def test_a_way_goes_on_after_a_request_that_failed(gpu: HostMemory, socket_dir: Path) -> None:
    async with opened(copies.openers(str(socket_dir), SIZES, ["slot-pinned"], gpu)) as (ways, _):
        gpu.cuda.fail("cuMemcpyHtoDAsync_v2")
        with pytest.raises(CudaError):
            await copies.measure(gpu, ways["slot-pinned"], 256 * KB, 0.0, 1)
        assert (await copies.measure(gpu, ways["slot-pinned"], 256 * KB, 0.0, 1))["gb_per_s"][0] > 0


def test_small_requests_are_many_and_large_ones_two() -> None:
    assert [in_flight(nbytes) for nbytes in (4 * KB, 8 * MB, 64 * MB, 256 * MB, 1 << 30)] == [64, 32, 4, 2, 2]


# -- a run -------------------------------------------------------------------------------------------------------------


class ChildThread:
    """A child that is a thread: what :class:`bench.children.Child` is to its parent."""

    def __init__(self, context: object, name: str, label: str, play: Callable[[Any, Any], Any]) -> None:
        self.name = name
        self.control, control = Pipe()
        self.process = threading.Thread(target=self._run, args=(play, control), name=name)
        self.process.start()

    @staticmethod
    def _run(play: Callable[[Any, Any], Any], control: Any) -> None:
        with control, contextlib.suppress(EOFError, OSError, asyncio.CancelledError):
            control.send("ready")
            if (cell := control.recv()) is not None:
                control.send(play_cell(play, control, cell))

    def kill(self) -> None:
        self.control.close()  # which ends it, wherever it is: nothing is left for it to do
        self.process.join(20)
        assert not self.process.is_alive()


@pytest.fixture
def threads(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are threads, and all of them have that GPU."""
    monkeypatch.setattr(processes, "Child", ChildThread)
    monkeypatch.setattr(processes, "Gpu", lambda: gpu)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(CudaIpc, "create_shared", lambda self: (queue.Queue(), *processes.SPAWN.Pipe(duplex=False)))


TINY = Plan(
    sizes=(4 * KB, 64 * KB), repetitions=2, timed_s=0.001, latencies=3, messages=3, ways=("slot-pinned", "pin-memory", "clone")
)  # fmt: skip


def gaps(results: Results) -> dict[tuple[str, str], str]:
    """The reasons of what was planned and not measured, by size and name."""
    return {(gap.case, gap.subject): gap.reason for gap in results.coverage.gaps}


def cells(measured: Measured) -> list[tuple[int, str]]:
    """What was measured, by size and name."""
    return [(nbytes, name) for nbytes, of_size in measured.items() for name in of_size]


@pytest.mark.usefixtures("threads")
def test_a_run_measures_what_was_planned(gpu: HostMemory) -> None:
    results = run(TINY)
    assert results.gpu == NAME
    assert gaps(results) == {}
    assert sorted(cells(results.ways)) == sorted(itertools.product(TINY.sizes, TINY.ways))
    assert sorted(cells(results.routes)) == sorted(itertools.product(TINY.sizes, TINY.routes))
    for measured in (results.ways, results.routes):
        assert all(len(runs) == 2 for of_size in measured.values() for runs in of_size.values())
    for runs in (runs for of_size in results.routes.values() for runs in of_size.values()):
        assert all(len(run["us"]) == 3 and min(run["us"]) > 0 for run in runs)
    assert gpu.cuda.registered == {}
    assert gpu.memory.memory == {}, "the device slab was freed"


@pytest.mark.usefixtures("threads")
def test_a_hand_over_through_the_device_slab_copies_nothing(gpu: HostMemory) -> None:
    results = run(dataclasses.replace(TINY, ways=(), routes=("device-slab",)))
    assert {name for _, name in cells(results.routes)} == {"device-slab"}
    assert gpu.cuda.copied == []
    assert gpu.cuda.calls["cuStreamQuery"] > 12, "each message asks whether it needs a fence"
    assert gpu.cuda.calls["cuEventRecord"] == 0, "what has been written needs none"


@pytest.mark.usefixtures("threads")
def test_what_can_not_be_opened_is_absent_and_the_rest_is_there(gpu: HostMemory) -> None:
    gpu.cuda.fail("host_register", 9)
    gpu.memory.failing = "allocate"
    results = run(TINY)
    absent = {name: reason for (_, name), reason in gaps(results).items()}
    assert list(absent) == ["slot-pinned", "host-slot", "device-slab"]
    assert len(gaps(results)) == 2 * (1 + 2), "at each size: a way, and two routes"
    assert all("CudaError: the slab can't be pinned" in absent[name] for name in ("slot-pinned", "host-slot"))
    assert "CudaError: allocate failed" in absent["device-slab"]
    assert {name for _, name in cells(results.ways)} == {"pin-memory", "clone"}
    assert {name for _, name in cells(results.routes)} == {"cuda-ipc"}


@pytest.mark.usefixtures("threads")
def test_what_fails_at_a_size_is_absent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(tensor: torch.Tensor, start: int) -> torch.Tensor:
        if tensor.nbytes > 4 * KB:
            raise RuntimeError("out of memory\nadvice for debugging kernels")
        return tensor.clone()

    small = Contender.of_memory("small ones only", lambda gpu, nbytes: gpu.page_locked(nbytes), lambda gpu, nbytes: bring)
    monkeypatch.setitem(WAYS, "clone", small)
    results = run(dataclasses.replace(TINY, ways=("clone",), routes=()))
    assert set(gaps(results)) == {("64 KB", "clone")}
    assert all(reason.startswith("RuntimeError: out of memory (bring, line ") for reason in gaps(results).values())
    assert cells(results.ways) == [(4 * KB, "clone")]


@pytest.mark.usefixtures("threads")
def test_an_engine_whose_gpu_fails_says_so_to_the_frontend(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        if threading.current_thread().name != "frontend":
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "finish", finish)
    results = run(dataclasses.replace(TINY, sizes=(4 * KB,), ways=()))
    reasons = gaps(results)
    assert {name for _, name in reasons} == set(ROUTES)
    assert all("an illegal memory access" in reason for reason in reasons.values())


@pytest.mark.usefixtures("threads")
def test_a_process_that_dies_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"clone": 2, "host-slot": 2}  # until it dies: the last way, and the first route, at the second size

    def measure(process: Process, name: str, *arguments: Any) -> Any:
        if name in left:
            left[name] -= 1
            if not left[name]:
                process.kill()
        return measured(process, name, *arguments)

    measured = Process.measure
    monkeypatch.setattr(Process, "measure", measure)
    results = run(dataclasses.replace(TINY, repetitions=1))
    missing = {("64 KB", name) for name in ("clone", *ROUTES)}
    assert gaps(results) == dict.fromkeys(missing, "GPU: its processes were ended after a failure")
    assert len(cells(results.ways)) == 5
    assert {nbytes for nbytes, _ in cells(results.routes)} == {4 * KB}


@pytest.mark.usefixtures("threads")
def test_after_a_measurement_that_fails_another_may_work() -> None:
    with Process("copies", functools.partial(copies.openers, "/nonexistent", SIZES, ["clone"]), copies.measure) as process:
        process.open()
        with pytest.raises(BenchError, match="KeyError: 'nothing'"):
            process.measure("nothing", 4 * KB, 0.0, 1)
        assert len(process.measure("clone", 4 * KB, 0.0, 1)["held_us"]) == 1
        process.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_by_all_ways_and_routes() -> None:
    plan = Plan(sizes=(64 * KB, 8 * MB), repetitions=1, timed_s=0.01, latencies=3, messages=3)
    results = run(plan)
    assert gaps(results) == {}
    assert (len(cells(results.ways)), len(cells(results.routes))) == (2 * len(WAYS), 2 * len(ROUTES))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_process_without_a_gpu_can_not_start() -> None:
    """A real one: all that it is to have gets there, what it says comes back, and it is gone."""
    shared = {name: route.create_shared() for name, route in ROUTES.items()}
    with Process("engine", functools.partial(handovers.openers, "answering", "/nonexistent", 4 * KB, shared)) as process:
        with pytest.raises(BenchError, match="GPU, opening: the engine failed: "):
            process.open()
        assert not any(child.process.is_alive() for child in process.children)
