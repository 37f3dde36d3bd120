"""A slot that is handed over behind a GPU's work: its key is published when the GPU has written it, and not before.

Both ends are real, and the GPU is made of host memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.client.client import Client
from shmring.client.connecting import open_client
from shmring.config import ClientConfig
from shmring.gpu import behind
from shmring.gpu.cuda import CudaError
from tests.waiting import eventually, settled, turns

pytestmark = pytest.mark.both_loops

KEY, NBYTES = bytes(32), 20_000


@pytest.fixture
async def ring(socket_dir: Path) -> AsyncIterator[shmring.Ring]:
    async with shmring.serve("test", slab_nbytes="1MiB", inline_nbytes="1KiB", socket_dir=str(socket_dir)) as ring:
        yield ring
        ring._shell._book.check()


@pytest.fixture
async def client(ring: shmring.Ring, cuda: Any, device_memory: Any, socket_dir: Path) -> AsyncIterator[Client]:
    """One that sees the GPU."""
    config = ClientConfig(lease_nbytes="64KiB", inline_nbytes="1KiB", socket_dir=str(socket_dir))
    async with await open_client(Client, ["test"], config, cuda=cuda, device_memory=device_memory) as client:
        yield client


@pytest.fixture
async def other(ring: shmring.Ring, socket_dir: Path) -> AsyncIterator[Client]:
    async with shmring.connect("test", lease_nbytes="64KiB", socket_dir=str(socket_dir)) as client:
        yield client


@pytest.fixture
async def never(ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """What is kept for good, and goes behind the test. Nobody waits for the GPU long."""
    never: list[Any] = []
    monkeypatch.setattr(behind, "_NEVER_RELEASED", never)
    monkeypatch.setattr(behind, "_CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("shmring.client.session._GOODBYE_TIMEOUT_S", 0.01)
    yield never
    never.clear()
    await settled(ring)


async def written(client: Client, cuda: Any, stream: Any, value: int = 7) -> tuple[Any, torch.Tensor]:
    """A slot, and what the GPU will have written there."""
    slot = await client.slot(NBYTES)
    view = slot.tensor((NBYTES,), torch.uint8).zero_()
    address, nbytes = view.data_ptr(), view.nbytes
    cuda.queue(stream, lambda: ctypes.memset(address, value, nbytes) and None)
    return slot, view


async def handed_over(client: Client, cuda: Any, key: bytes = KEY, device: int = 0) -> tuple[Any, Any]:
    """A stream that stands still, and what will be kept when the GPU has written a slot behind it."""
    stream = cuda.create_stream(device)
    stream.held = True
    slot, view = await written(client, cuda, stream)
    return stream, client.keep_nowait(key, {"x": view}, slot, stream=stream)


async def test_a_key_is_published_when_the_gpu_has_written_and_not_before(
    ring: shmring.Ring, client: Client, other: Client, cuda: Any
) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    waiting = asyncio.create_task(other.wait_kept(KEY))
    slot, view = await written(client, cuda, stream)
    with slot:
        keeping = client.keep_nowait(KEY, {"x": view}, slot, stream=stream)
        del view
    await eventually(lambda: cuda.awaited)  # the thread waits for the GPU
    await turns()
    assert (keeping.ended, ring.statistics().kept, waiting.done()) == (False, 0, False)
    assert client.statistics().slots_in_use == 1, "its caller has left it, and the GPU writes to it"
    assert await other.find(KEY) is None
    cuda.release(stream)
    with await waiting as kept:
        assert int(kept.payload["x"].sum()) == 7 * NBYTES
    await keeping.wait()
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_what_the_gpu_has_written_already_is_published_at_once(client: Client, other: Client, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    slot, view = await written(client, cuda, stream)
    cuda.run()
    keeping = client.keep_nowait(KEY, {"x": view}, slot, stream=stream)
    del view
    await keeping.wait()
    assert not cuda.awaited
    with await other.find(KEY) as kept:
        assert int(kept.payload["x"].sum()) == 7 * NBYTES


async def test_one_stream_that_stands_still_keeps_nothing_back_on_another_gpu(client: Client, other: Client, cuda: Any) -> None:
    slow, last = await handed_over(client, cuda, bytes([0]) * 32, device=0)
    quick, first = await handed_over(client, cuda, bytes([1]) * 32, device=1)
    cuda.release(quick)
    await first.wait()
    assert not last.ended
    cuda.release(slow)
    await last.wait()


async def test_what_is_no_stream_is_refused_and_the_slot_stays_with_its_caller(client: Client) -> None:
    async with client.slot(NBYTES) as slot:
        view = slot.tensor((NBYTES,), torch.uint8).fill_(3)
        for wrong in (0, True, 1.5, "cuda", torch.device("cuda", 0), object()):
            with pytest.raises(TypeError, match="a stream of torch's"):
                client.keep_nowait(KEY, {"x": view}, slot, stream=wrong)
        del view
    assert client.statistics().slots_in_use == 0


async def test_a_stream_is_of_its_own_gpu_whichever_is_this_threads(client: Client, other: Client, cuda: Any) -> None:
    stream, keeping = await handed_over(client, cuda, device=1)
    await turns()
    assert not keeping.ended
    cuda.release(stream)
    with await other.wait_kept(KEY) as kept:
        assert int(kept.payload["x"].sum()) == 7 * NBYTES


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("what", ["an event", "the GPU", "a thread"])
async def test_where_cuda_can_not_say_when_the_slot_is_kept_for_good(
    ring: shmring.Ring, client: Client, cuda: Any, never: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("shmring.core.dropped.DROPPED_S", 0.0)  # a slot that is dropped comes back at once
    stream = cuda.create_stream(0)
    stream.held = True
    slot, view = await written(client, cuda, stream)
    if what == "an event":
        cuda.fail("cuEventRecord")
    elif what == "the GPU":
        monkeypatch.setattr(cuda, "gpu", _fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", _fail)
        executor = ThreadPoolExecutor()  # there is no thread that sees the slot out, either
        executor.shutdown()
        asyncio.get_running_loop().set_default_executor(executor)
    with pytest.raises((CudaError, RuntimeError)):
        client.keep_nowait(KEY, {"x": view}, slot, stream=stream)
    del view
    slot.close()
    gc.collect()  # the error, and the frames that it holds
    await turns()
    assert client.statistics().slots_in_use == 1, "the GPU may still write to it"
    cuda.release(stream)
    await turns()
    assert client.statistics().slots_in_use == 1
    await client.close()
    await eventually(lambda: len(never) == 1)
    await turns()
    assert ring.statistics().quarantined_nbytes > 0, "it goes with this process"


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("there is none")


async def test_of_one_gpu_that_can_not_say_the_slot_is_kept_though_the_others_are_done(
    client: Client, cuda: Any, never: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = cuda.create_stream(1), cuda.create_stream(0)
    quick.held = slow.held = True
    slot, view = await written(client, cuda, quick)
    keeping = client.keep_nowait(KEY, {"x": view}, slot, stream=quick)
    cuda.release(quick)
    await keeping.wait()
    slot, view = await written(client, cuda, slow)
    monkeypatch.setattr(cuda, "gpu", _fail)
    with pytest.raises(RuntimeError):
        client.keep_nowait(bytes([1]) * 32, {"x": view}, slot, stream=slow)
    monkeypatch.setattr(behind, "_CLOSE_TIMEOUT_S", 60.0)
    await client.close()
    await eventually(lambda: len(never) == 1)
    cuda.release(slow)


async def test_a_client_that_closes_while_the_gpu_comes_to_it_has_published(
    client: Client, other: Client, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.client.session._GOODBYE_TIMEOUT_S", 60.0)
    stream, keeping = await handed_over(client, cuda)
    closing = asyncio.create_task(client.close())
    await turns()
    assert not closing.done()
    cuda.release(stream)
    await closing
    assert (keeping.ended, keeping.error) == (True, None)
    with await other.find(KEY) as kept:
        assert int(kept.payload["x"].sum()) == 7 * NBYTES


async def test_a_client_that_closes_gives_the_memory_back_when_the_gpu_is_done(
    ring: shmring.Ring, client: Client, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.client.session._GOODBYE_TIMEOUT_S", 0.01)
    stream, keeping = await handed_over(client, cuda)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await keeping.wait()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().quarantined_nbytes > 0, "the GPU writes there"
    assert ring.statistics().kept == 0
    cuda.release(stream)
    await settled(ring)


async def test_of_a_gpu_that_never_answers_the_memory_is_kept_for_good(
    ring: shmring.Ring, client: Client, cuda: Any, never: list[Any]
) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    slot, view = await written(client, cuda, stream)
    client.keep_nowait(KEY, {"x": view}, slot, stream=stream)
    del view, slot
    await client.close()
    await eventually(lambda: len(never) == 1)
    assert ring.statistics().quarantined_nbytes > 0
    cuda.release(stream)
