"""The engine core with real rings: steps off the loop, isolation of failures, aborts, the end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

import shmring
from engine.client import EngineClient
from engine.core import EngineCore
from engine.protocol import EncodeReply, EncodeRequest, ModelDescription, Picture
from engine.scheduler import SchedulerConfig

Compute = Callable[[Sequence[EncodeRequest]], Sequence[EncodeReply | Exception]]


class CallbackExecutor:
    """An executor that does what the test says."""

    def __init__(self, compute: Compute) -> None:
        self.execute = compute
        self.closed = False

    def describe(self) -> ModelDescription:
        return ModelDescription("callback", ["encode"], 1, 8)

    def close(self) -> None:
        self.closed = True


def mean(request: EncodeRequest) -> EncodeReply:
    return EncodeReply(torch.stack([item.pixels.float().mean().reshape(1) for item in request.pictures]))


def request_of(value: int, pixels: int = 4096) -> EncodeRequest:
    return EncodeRequest([Picture(torch.full((pixels,), value, dtype=torch.uint8))])


async def encode(client: EngineClient, request: EncodeRequest, **options: float) -> torch.Tensor:
    [output] = [output async for output in client.encode(request, **options)]
    assert output.finished
    return output.embeddings


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def engine_and_client(
    compute: Compute, socket_dir: Path, **scheduler: int
) -> AsyncIterator[tuple[EngineCore, EngineClient]]:
    core = await EngineCore.create(
        "core",
        CallbackExecutor(compute),
        scheduler_config=SchedulerConfig(**scheduler) if scheduler else None,
        slab_nbytes="16MiB",
        socket_dir=str(socket_dir),
    )
    async with core:
        running = asyncio.create_task(core.run())
        async with await EngineClient.connect("core", socket_dir=str(socket_dir)) as client:
            yield core, client
        await until(lambda: core.ring.statistics().clients == 0)
    await running
    statistics = core.ring.statistics()
    assert statistics.slots_in_use == 0
    assert statistics.free_nbytes == statistics.leasable_nbytes


async def test_pictures_in_a_slot_are_encoded_without_a_copy(socket_dir: Path) -> None:
    async with engine_and_client(lambda batch: [mean(one) for one in batch], socket_dir) as (_, client):
        async with client.slot(4096) as slot:
            pixels = slot.tensor((4096,), torch.uint8)
            pixels.fill_(7)
            assert (await encode(client, EncodeRequest([Picture(pixels)]))).tolist() == [[7.0]]
            del pixels
        assert client.ring.statistics().copies == 0


async def test_the_loop_goes_on_while_a_step_runs(socket_dir: Path) -> None:
    proceed = threading.Event()

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        assert proceed.wait(10)
        return [mean(one) for one in batch]

    async with engine_and_client(compute, socket_dir) as (core, client):
        answer = asyncio.create_task(encode(client, request_of(1)))
        await until(lambda: core.metrics.running_requests == 1)
        await client.check_health()
        assert (await client.statistics())["running_requests"] == 1
        proceed.set()
        assert (await answer).tolist() == [[1.0]]


async def test_requests_that_wait_share_a_step(socket_dir: Path) -> None:
    first_step = threading.Event()
    sizes: list[int] = []

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        sizes.append(len(batch))
        assert first_step.wait(10)
        return [mean(one) for one in batch]

    async with engine_and_client(compute, socket_dir, max_num_seqs=3) as (core, client):
        answers = [asyncio.create_task(encode(client, request_of(0)))]
        await until(lambda: core.metrics.running_requests == 1)
        answers += [asyncio.create_task(encode(client, request_of(value))) for value in range(1, 5)]
        await until(lambda: core.ring.statistics().waiting == 4)
        first_step.set()
        assert [answer.tolist() for answer in await asyncio.gather(*answers)] == [[[float(value)]] for value in range(5)]
        assert sizes == [1, 3, 1]


async def test_a_request_that_the_executor_refuses_fails_alone(socket_dir: Path) -> None:
    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        return [mean(one) if one.pictures else ValueError("no picture") for one in batch]

    async with engine_and_client(compute, socket_dir) as (core, client):
        good, bad = await asyncio.gather(
            encode(client, request_of(3)), encode(client, EncodeRequest([])), return_exceptions=True
        )
        assert isinstance(good, torch.Tensor)
        assert isinstance(bad, shmring.RemoteError)
        assert (bad.type_name, bad.message) == ("ValueError", "no picture")
        assert core.metrics.failed_requests == 1


@pytest.mark.parametrize("broken", ["raises", "answers too few", "answers too much for the reserve"])
async def test_a_step_that_goes_wrong_fails_its_requests_and_the_engine_goes_on(socket_dir: Path, broken: str) -> None:
    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        if batch[0].pictures[0].pixels[0] == 0:
            return [mean(one) for one in batch]
        if broken == "raises":
            raise RuntimeError("out of memory")
        return [] if broken == "answers too few" else [EncodeReply(torch.zeros(1, 1 << 20))]

    async with engine_and_client(compute, socket_dir) as (_, client):
        with pytest.raises(shmring.RemoteError):
            await encode(client, request_of(1))
        assert (await encode(client, request_of(0))).tolist() == [[0.0]]
        gc.collect()


async def test_a_payload_of_another_type_is_refused_before_it_reaches_the_executor(socket_dir: Path) -> None:
    batches: list[int] = []

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        batches.append(len(batch))
        return [mean(one) for one in batch]

    async with engine_and_client(compute, socket_dir) as (_, client):
        with pytest.raises(shmring.RemoteError, match="ValidationError"):
            await client.ring.request({"pictures": 3})
        assert batches == []


async def test_a_request_aborted_in_its_step_keeps_its_slot_until_the_step_ends(socket_dir: Path) -> None:
    proceed = threading.Event()

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        assert proceed.wait(10)
        return [mean(one) for one in batch]

    async with engine_and_client(compute, socket_dir) as (core, client):
        answer = asyncio.create_task(encode(client, request_of(1)))
        await until(lambda: core.metrics.running_requests == 1)
        answer.cancel()
        await until(lambda: core.ring.statistics().aborted == 1)
        assert core.ring.statistics().slots_claimed == 1
        proceed.set()
        await until(lambda: core.ring.statistics().slots_in_use == 0)


async def test_a_request_aborted_before_its_step_is_gone_at_once(socket_dir: Path) -> None:
    proceed = threading.Event()
    seen: list[int] = []

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        seen.extend(int(one.pictures[0].pixels[0]) for one in batch)
        assert proceed.wait(10)
        return [mean(one) for one in batch]

    async with engine_and_client(compute, socket_dir) as (core, client):
        running = asyncio.create_task(encode(client, request_of(1)))
        await until(lambda: core.metrics.running_requests == 1)
        with pytest.raises(TimeoutError):
            await encode(client, request_of(2), timeout=0.05)
        await until(lambda: core.ring.statistics().slots_in_use == 1)
        proceed.set()
        await running
        assert seen == [1]


async def test_abort_by_name_ends_the_request_for_whoever_waits(socket_dir: Path) -> None:
    proceed = threading.Event()

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        assert proceed.wait(10)
        return [mean(one) for one in batch]

    async def named(client: EngineClient) -> None:
        async for _ in client.encode(request_of(1), request_id="mine"):
            pass

    async with engine_and_client(compute, socket_dir) as (core, client):
        answer = asyncio.create_task(named(client))
        await until(lambda: core.metrics.running_requests == 1)
        await client.abort(["mine", "nobody's"])
        with pytest.raises(shmring.AbortedError):
            await answer
        proceed.set()


async def test_closing_waits_for_the_step_and_closes_the_executor(socket_dir: Path) -> None:
    proceed = threading.Event()
    ended = threading.Event()

    def compute(batch: Sequence[EncodeRequest]) -> list[EncodeReply | Exception]:
        assert proceed.wait(10)
        total = sum(int(one.pictures[0].pixels.sum()) for one in batch)  # reads the slab after the ring has closed
        ended.set()
        return [EncodeReply(torch.tensor([[float(total)]]))]

    executor = CallbackExecutor(compute)
    core = await EngineCore.create("core", executor, slab_nbytes="16MiB", socket_dir=str(socket_dir))
    running = asyncio.create_task(core.run())
    client = await EngineClient.connect("core", socket_dir=str(socket_dir))
    answer = asyncio.create_task(encode(client, request_of(1)))
    await until(lambda: core.metrics.running_requests == 1)
    closing = asyncio.create_task(core.close())
    with pytest.raises(shmring.EngineDeadError):
        await answer
    with pytest.raises(shmring.EngineDeadError):
        await client.check_health()
    assert not closing.done()
    proceed.set()
    await closing
    await running
    assert ended.is_set()
    assert executor.closed
    await client.close()


async def test_it_says_what_it_is(socket_dir: Path) -> None:
    async with engine_and_client(lambda batch: [mean(one) for one in batch], socket_dir) as (_, client):
        assert await client.describe() == ModelDescription("callback", ["encode"], 1, 8)
        await encode(client, request_of(1))
        statistics = await client.statistics()
        assert statistics["steps"] == 1
        assert statistics["ring_submitted"] == 1
        assert client.is_running
        assert not client.errored
