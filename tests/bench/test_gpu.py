"""``bench gpu`` without a GPU: all of its measuring, on one made of host memory whose times say nothing.

The engine is a thread here, with an event loop of its own, since such a GPU can't be sent to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.children import BenchError, play_cell
from bench.gpu import command, copies, handovers
from bench.gpu.command import PLAN, run
from bench.gpu.copies import WAYS, Contender, in_flight
from bench.gpu.device import Gpu, Openers, check, enter_all, marks, sample
from bench.gpu.handovers import ROUTES, CudaIpc, Engine
from bench.plan import Runs, Timing
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


@contextlib.asynccontextmanager
async def opened(openers: Openers) -> AsyncIterator[tuple[dict[str, Any], dict[str, str]]]:
    async with contextlib.AsyncExitStack() as stack:
        yield await enter_all(stack, openers)


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
            control.send(play_cell(play, control, control.recv()))

    def kill(self) -> None:
        self.control.close()  # which ends it, wherever it is: nothing is left for it to do
        self.process.join(20)
        assert not self.process.is_alive()


@pytest.fixture
def threads(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are threads, and all of them have that GPU."""
    monkeypatch.setattr(handovers, "Child", ChildThread)
    monkeypatch.setattr(handovers, "Gpu", lambda: gpu)
    monkeypatch.setattr(handovers, "_ANSWER_LIMIT_S", 5.0)
    monkeypatch.setattr(command, "_LATENCIES", 3)
    monkeypatch.setattr(command, "_MESSAGES", 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(CudaIpc, "create_shared", lambda self: (queue.Queue(), *handovers.SPAWN.Pipe(duplex=False)))


TINY, THREE = (4 * KB, 64 * KB), ("slot-pinned", "pin-memory", "clone")


def measured(
    gpu: Gpu, sizes: Sequence[int] = TINY, ways: Sequence[str] = THREE, routes: Sequence[str] = tuple(ROUTES), count: int = 2
) -> Runs:
    """A short run."""
    cases = dict.fromkeys(sizes, (*ways, *routes))
    runs = Runs(dataclasses.replace(PLAN, cases=cases, timing=Timing(count, 0.001)))
    run(runs, gpu)
    return runs


def gaps(runs: Runs) -> dict[tuple[str, str], str]:
    """The reasons of what was planned and not measured, by size and name."""
    return {(gap.case, gap.subject): gap.reason for gap in runs.coverage().gaps}


def cells(runs: Runs) -> set[tuple[int, str]]:
    """What was measured, by size and name."""
    return {(nbytes, name) for nbytes, of_size in runs.measured.items() for name in of_size}


@pytest.mark.usefixtures("threads")
def test_a_run_measures_what_was_planned(gpu: HostMemory) -> None:
    runs = measured(gpu)
    assert runs.notes == [NAME]
    assert gaps(runs) == {}
    assert cells(runs) == set(itertools.product(TINY, (*THREE, *ROUTES)))
    for of_size in runs.measured.values():
        assert all(len(of_name) == 2 for of_name in of_size.values())
        assert all(len(one["us"]) == 3 and min(one["us"]) > 0 for route in ROUTES for one in of_size[route])
    assert gpu.cuda.registered == {}
    assert gpu.memory.memory == {}, "the device slab was freed"


@pytest.mark.usefixtures("threads")
def test_a_hand_over_through_the_device_slab_copies_nothing(gpu: HostMemory) -> None:
    assert {name for _, name in cells(measured(gpu, ways=(), routes=("device-slab",)))} == {"device-slab"}
    assert gpu.cuda.copied == []
    assert gpu.cuda.calls["cuStreamQuery"] > 12, "each message asks whether it needs a fence"
    assert gpu.cuda.calls["cuEventRecord"] == 0, "what has been written needs none"


@pytest.mark.usefixtures("threads")
def test_what_can_not_be_opened_is_absent_and_the_rest_is_there(gpu: HostMemory) -> None:
    gpu.cuda.fail("host_register", 9)
    gpu.memory.failing = "allocate"
    runs = measured(gpu)
    absent = {name: reason for (_, name), reason in gaps(runs).items()}
    assert list(absent) == ["slot-pinned", "host-slot", "device-slab"]
    assert len(gaps(runs)) == 2 * (1 + 2), "at each size: a way, and two routes"
    assert all("CudaError: the slab can't be pinned" in absent[name] for name in ("slot-pinned", "host-slot"))
    assert "CudaError: allocate failed" in absent["device-slab"]
    assert {name for _, name in cells(runs)} == {"pin-memory", "clone", "cuda-ipc"}


@pytest.mark.usefixtures("threads")
def test_what_fails_at_a_size_is_absent_there(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(tensor: torch.Tensor, start: int) -> torch.Tensor:
        if tensor.nbytes > 4 * KB:
            raise RuntimeError("out of memory\nadvice for debugging kernels")
        return tensor.clone()

    small = Contender.of_memory("small ones only", lambda gpu, nbytes: gpu.page_locked(nbytes), lambda gpu, nbytes: bring)
    monkeypatch.setitem(WAYS, "clone", small)
    runs = measured(gpu, ways=("clone",), routes=())
    assert set(gaps(runs)) == {("64 KB", "clone")}
    assert all(reason.startswith("RuntimeError: out of memory (bring, line ") for reason in gaps(runs).values())
    assert cells(runs) == {(4 * KB, "clone")}


@pytest.mark.usefixtures("threads")
def test_an_engine_whose_gpu_fails_says_so_to_the_frontend(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "finish", finish)
    reasons = gaps(measured(gpu, sizes=(4 * KB,), ways=()))
    assert {name for _, name in reasons} == set(ROUTES)
    assert all("an illegal memory access" in reason for reason in reasons.values())


@pytest.mark.usefixtures("threads")
def test_an_engine_that_dies_takes_nothing_with_it(gpu: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    opened, hand_over = Engine.open, handovers.measure

    def open_it(engine: Engine) -> dict[str, str]:
        engines.append(engine)
        return opened(engine)

    async def measure(gpu: Gpu, ask: Any, nbytes: int, messages: int) -> Any:
        if nbytes == 64 * KB:
            engines[0].kill()
        return await hand_over(gpu, ask, nbytes, messages)

    monkeypatch.setattr(handovers, "_ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(Engine, "open", open_it)
    monkeypatch.setattr(handovers, "measure", measure)
    runs = measured(gpu, count=1)
    assert set(gaps(runs)) == {("64 KB", name) for name in ROUTES}
    assert {nbytes for nbytes, name in cells(runs) if name in WAYS} == set(TINY)
    assert {nbytes for nbytes, name in cells(runs) if name in ROUTES} == {4 * KB}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_by_all_ways_and_routes() -> None:
    runs = measured(Gpu(), (64 * KB, 8 * MB), ways=tuple(WAYS), count=1)
    assert gaps(runs) == {}
    assert len(cells(runs)) == 2 * (len(WAYS) + len(ROUTES))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_process_without_a_gpu_can_not_start() -> None:
    """A real one: all that it is to have gets there, what it says comes back, and it is gone."""
    shared = {name: route.create_shared() for name, route in ROUTES.items()}
    with Engine("/nonexistent", 4 * KB, shared) as engine:
        with pytest.raises(BenchError, match="GPU, opening: the engine failed: "):
            engine.open()
        assert not any(child.process.is_alive() for child in engine.children)
