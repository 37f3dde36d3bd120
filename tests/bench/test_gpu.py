"""``bench gpu`` without a GPU: all of its measuring, on one made of host memory whose times say nothing.

Processes are threads here, each with an event loop of its own, since such a GPU can't be sent to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from bench.children import BenchError, play_cell
from bench.gpu import copies, handovers, processes
from bench.gpu.command import Plan, Results, run, steps
from bench.gpu.copies import COMMANDS, WAYS, in_flight
from bench.gpu.device import Accelerator, Gpu, check, marks, sample
from bench.gpu.handovers import ROUTES, CudaIpc
from bench.gpu.processes import Process, opened
from bench.stamps import CheckError
from shmring.client.client import Client
from shmring.client.connecting import Connecting, open_client
from shmring.config import ClientConfig, RingConfig
from shmring.gpu.cuda import CudaError
from shmring.ring.ring import Ring
from shmring.ring.serving import Serving, create_shell
from shmring.ring.shell import Shell
from tests.model.fake_cuda import FakeCuda, FakeMemory
from tests.tables import for_each

KB, MB = 1 << 10, 1 << 20
NAME = "A GPU made of host memory"


class HostMemory(Gpu):
    """What measuring asks of a GPU, of host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.cuda = FakeCuda()
        self.memory = FakeMemory()
        self.lag = 0  # how often what watches says no before it says yes
        self.pin: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def describe(self) -> Accelerator:
        return Accelerator(name=NAME, memory_nbytes=8 << 30, driver="550.1", cuda="12.8", torch="2.9", link="PCIe 5 x16")

    def serve(self, name: str, **options: Any) -> AbstractAsyncContextManager[Ring]:
        async def create() -> Ring:
            return Ring(await create_shell(Shell, name, RingConfig(**options), cuda=self.cuda, device_memory=self.memory))

        return Serving(create)

    def connect(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Client]:
        config = ClientConfig(**options)
        return Connecting(lambda: open_client(Client, [name], config, cuda=self.cuda, device_memory=self.memory))

    def page_locked(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def finish(self) -> None:
        pass

    def watch(self) -> Callable[[], bool]:
        left = iter(range(self.lag))
        return lambda: next(left, None) is None


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
            assert (await COMMANDS["bandwidth"](gpu, ways[way], nbytes, 0.0))["gb_per_s"][0] > 0
            latencies = await COMMANDS["latencies"](gpu, ways[way], nbytes, 3)
            assert len(latencies["usable_us"]) == len(latencies["held_us"]) == 3
            assert all(held_us <= usable_us for held_us, usable_us in zip(*reversed(latencies.values()), strict=True))
            gpu.lag = 3
            stalls = await COMMANDS["stalls"](gpu, ways[way], nbytes, 2)
            assert len(stalls["brought_us"]) == len(stalls["idle_us"]) == 2
            assert min(stalls["brought_us"] + stalls["idle_us"]) > 0
    if way.startswith("slot"):
        assert gpu.cuda.copied
        assert (gpu.cuda.calls["host_register"] > 0) is (way == "slot-pinned")


async def test_what_a_gpu_got_wrong_is_noticed(gpu: HostMemory, socket_dir: Path) -> None:
    gpu.cuda.forgets_copies = True
    async with opened(copies.openers(str(socket_dir), SIZES, ["slot-pinned"], gpu)) as (ways, _):
        with pytest.raises(CheckError, match=r"message \d+ holds"):
            await COMMANDS["bandwidth"](gpu, ways["slot-pinned"], 4 * KB, 0.0)


async def test_a_way_goes_on_after_a_request_that_failed(gpu: HostMemory, socket_dir: Path) -> None:
    async with opened(copies.openers(str(socket_dir), SIZES, ["slot-pinned"], gpu)) as (ways, _):
        gpu.cuda.fail("cuMemcpyHtoDAsync_v2")
        with pytest.raises(CudaError):
            await COMMANDS["bandwidth"](gpu, ways["slot-pinned"], 256 * KB, 0.0)
        assert (await COMMANDS["bandwidth"](gpu, ways["slot-pinned"], 256 * KB, 0.0))["gb_per_s"][0] > 0


async def test_what_blocks_the_loop_is_seen_to(gpu: HostMemory, socket_dir: Path) -> None:
    def slow(tensor: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(0.03)
        return tensor.clone()

    gpu.pin = slow
    async with opened(copies.openers(str(socket_dir), SIZES, ["pin"], gpu)) as (ways, _):
        stalls = await COMMANDS["stalls"](gpu, ways["pin"], 4 * KB, 3)
    assert min(stalls["brought_us"]) >= 30_000
    assert min(stalls["idle_us"]) < 30_000


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
    sizes=(4 * KB, 64 * KB), repetitions=2, timed_s=0.001, stalls=1, messages=3, ways=("slot-pinned", "pin-memory", "clone")
)  # fmt: skip


def gaps(results: Results) -> dict[tuple[str, str], str]:
    """The reasons of what was planned and not measured, by case and name."""
    assert results.coverage is not None
    return {(gap.case, gap.subject): gap.reason for gap in results.coverage.gaps}


@pytest.mark.usefixtures("threads")
def test_a_run_measures_what_was_planned(gpu: HostMemory) -> None:
    lines: list[str] = []
    results = run(TINY, lines.append)
    assert len(lines) == steps(TINY)
    assert results.gpu.name == NAME
    assert gaps(results) == {}
    cells = [(nbytes, way) for nbytes in TINY.sizes for way in TINY.ways]
    assert list(results.of("bandwidth")) == cells
    assert list(results.of("latencies")) == cells
    assert list(results.of("stalls")) == cells
    assert list(results.of("hand-overs")) == [(nbytes, route) for nbytes in TINY.sizes for route in TINY.routes]
    assert all(len(one.runs) == 2 for one in results.measured)
    assert all(len(one.every("us")) == 6 and min(one.every("us")) > 0 for one in results.of("hand-overs").values())
    assert gpu.cuda.registered == {}
    assert gpu.memory.memory == {}, "the device slab was freed"


@pytest.mark.usefixtures("threads")
def test_a_hand_over_through_the_device_slab_copies_nothing(gpu: HostMemory) -> None:
    results = run(dataclasses.replace(TINY, ways=(), routes=("device-slab",)), lambda line: None)
    assert {name for _, name in results.of("hand-overs")} == {"device-slab"}
    assert gpu.cuda.copied == []
    assert gpu.cuda.calls["cuStreamQuery"] > 12, "each message asks whether it needs a fence"
    assert gpu.cuda.calls["cuEventRecord"] == 0, "what has been written needs none"


@pytest.mark.usefixtures("threads")
def test_what_can_not_be_opened_is_absent_and_the_rest_is_there(gpu: HostMemory) -> None:
    gpu.cuda.fail("host_register", 9)
    gpu.memory.failing = "allocate"
    results = run(TINY, lambda line: None)
    absent = {name: reason for (_, name), reason in gaps(results).items()}
    assert list(absent) == ["slot-pinned", "host-slot", "device-slab"]
    assert len(gaps(results)) == 2 * (3 + 1 + 1), "at each size: a way in three parts, and two routes"
    assert all("CudaError: the slab can't be pinned" in absent[name] for name in ("slot-pinned", "host-slot"))
    assert "CudaError: allocate failed" in absent["device-slab"]
    assert {name for _, name in results.of("bandwidth")} == {"pin-memory", "clone"}
    assert {name for _, name in results.of("hand-overs")} == {"cuda-ipc"}


@pytest.mark.usefixtures("threads")
def test_what_fails_at_a_size_is_absent_there(gpu: HostMemory) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes > 4 * KB:
            raise RuntimeError("out of memory\nadvice for debugging kernels")
        return tensor.clone()

    gpu.pin = pin
    results = run(dataclasses.replace(TINY, ways=("pin",), routes=()), lambda line: None)
    assert set(gaps(results)) == {(f"{kind}, 64 KB", "pin") for kind in ("bandwidth", "latencies", "stalls")}
    assert all(reason.startswith("RuntimeError: out of memory (pin, line ") for reason in gaps(results).values())
    assert list(results.of("bandwidth")) == [(4 * KB, "pin")]


@pytest.mark.usefixtures("threads")
def test_an_engine_whose_gpu_fails_says_so_to_the_frontend(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        if threading.current_thread().name != "frontend":
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "finish", finish)
    results = run(dataclasses.replace(TINY, sizes=(4 * KB,), ways=()), lambda line: None)
    reasons = gaps(results)
    assert {name for _, name in reasons} == set(ROUTES)
    assert all("an illegal memory access" in reason for reason in reasons.values())


@pytest.mark.usefixtures("threads")
def test_a_process_that_dies_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    died_in = {"stalls": 1, "hand-overs": 4}  # of the second size, what is handed over first

    def carry_out(process: Process, command: str, *arguments: Any) -> Any:
        if command in died_in:
            died_in[command] -= 1
            if not died_in[command]:
                process.kill()
        return carried_out(process, command, *arguments)

    carried_out = Process.carry_out
    monkeypatch.setattr(Process, "carry_out", carry_out)
    results = run(dataclasses.replace(TINY, repetitions=1), lambda line: None)
    missing = {(f"stalls, {size}", way) for size in ("4 KB", "64 KB") for way in TINY.ways}
    missing |= {("hand-overs, 64 KB", route) for route in ROUTES}
    assert gaps(results) == dict.fromkeys(missing, "GPU: its processes were ended after a failure")
    assert len(results.of("bandwidth")) == 6
    assert not results.of("stalls")
    assert {nbytes for nbytes, _ in results.of("hand-overs")} == {4 * KB}


@pytest.mark.usefixtures("threads")
def test_after_a_command_that_fails_another_may_work() -> None:
    with Process("copies", functools.partial(copies.openers, "/nonexistent", SIZES, ["pin"]), COMMANDS) as process:
        process.open()
        with pytest.raises(BenchError, match="KeyError: 'no command'"):
            process.carry_out("no command", "pin", 4 * KB, 1)
        assert len(process.carry_out("stalls", "pin", 4 * KB, 1)["brought_us"]) == 1
        process.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_by_all_ways_and_routes() -> None:
    plan = Plan(sizes=(64 * KB, 8 * MB), repetitions=1, timed_s=0.01, stalls=1, messages=3)
    results = run(plan, lambda line: None)
    assert gaps(results) == {}
    assert len(results.of("bandwidth")) == len(results.of("latencies")) == len(results.of("stalls")) == 2 * len(WAYS)
    assert len(results.of("hand-overs")) == 2 * len(ROUTES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_process_without_a_gpu_can_not_start() -> None:
    """A real one: all that it is to have gets there, what it says comes back, and it is gone."""
    shared = {name: route.create_shared() for name, route in ROUTES.items()}
    with Process("engine", functools.partial(handovers.openers, "answering", "/nonexistent", 4 * KB, shared), {}) as process:
        with pytest.raises(BenchError, match="GPU, opening: the engine failed: "):
            process.open()
        assert not any(child.process.is_alive() for child in process.children)
