"""Tensors that an API server has on a GPU, through a device slab whose GPU is made of host memory. In place of vLLM, as in
``test_exchange.py``, there is a queue of encoded requests. The thread that runs the model has a stream of its own, as vLLM's.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmring.integrations.vllm import link, on_gpu, payloads, request_tensors, wrapping
from shmring.integrations.vllm.engine import Receiver
from shmring.integrations.vllm.engine_ring import NOT_SET
from shmring.integrations.vllm.frontend import AsyncFrontend, SyncFrontend
from tests.model.fake_cuda import FakeCuda, FakeMemory
from tests.model.made_up_driver import context_depth
from tests.vllm.test_exchange import ENGINE, MB, Exchange, picture, request_with, settings
from tests.waiting import eventually

Connect = Callable[..., Awaitable[Exchange]]


class Gpu(FakeCuda):
    """Attributes:
    memory: as its driver hands it out; tensors made by :meth:`picture` are on this GPU as well.
    writing: the stream of an API server, while it sends.
    reading: the stream of the thread that runs the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = FakeMemory()
        self.writing, self.reading = self.create_stream(0), self.create_stream(0)
        self.index = 0  # of the GPU that pictures are on
        self._pictures: list[int] = []
        self.kept: list[int] = []  # addresses of what was copied

    def picture(self, nbytes: int = 8 * MB) -> torch.Tensor:
        made = picture(nbytes)
        self._pictures.append(made.data_ptr())
        return made

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return torch.device("cuda", self.index) if tensor.data_ptr() in self._pictures else None

    def keep(self, tensor: torch.Tensor, gpu: torch.device) -> None:
        """What torch's allocator does for a tensor that a stream uses."""
        assert gpu.index == self.index
        self.kept.append(tensor.data_ptr())

    def is_in_slab(self, tensor: torch.Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - start < memory.nbytes for start, memory in self.memory.memory.items())

    def look(self, tensor: torch.Tensor, seen: list[int]) -> None:
        """Queues a kernel of the model that reads the first byte of a tensor; by address, as a GPU reads."""
        address = tensor.data_ptr()
        self.queue(self.reading, lambda: seen.extend(ctypes.string_at(address, 1)))


@pytest.fixture
def gpu(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    gpu = Gpu()
    for module in ("shmring.ring.serving", "shmring.client.client"):
        monkeypatch.setattr(f"{module}.TorchCuda", lambda: gpu)
        monkeypatch.setattr(f"{module}.Driver", lambda: gpu.memory)
    monkeypatch.setattr(on_gpu, "_keep_for_what_is_queued", gpu.keep)
    for importer in (payloads, link, request_tensors):
        monkeypatch.setattr(importer, "gpu_of", gpu.device_of)
    gpu.compute_on(gpu.writing)
    yield gpu
    gc.collect()
    assert gpu.memory.memory == {}
    assert context_depth() == 0


class Own:
    """vLLM's own way: ``torch_shm``."""

    def __init__(self) -> None:
        self.messages = 0
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        self.tensors.append(tensor)
        return {"tensor_id": len(self.tensors) - 1}

    def new_message(self) -> None:
        self.messages += 1

    def provide(self, dtype: str, shape: Any, reference: dict[str, Any]) -> torch.Tensor:
        return self.tensors[reference["tensor_id"]]


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
async def connected(gpu: Gpu, own: Own) -> AsyncIterator[Connect]:
    exchanges: list[Exchange] = []

    async def make(on: int | str = 0, **changes: Any) -> Exchange:
        chosen = settings(**({"device_slab_nbytes": 32 * MB, "wait_s": 5.0} | changes))
        serve = functools.partial(Receiver, chosen, 0, copies=False, pin="off", gpu=on, own=own.provide)
        receiver = await asyncio.to_thread(serve)

        async def tell_drops(*_: Any) -> bool:
            return True

        exchange = Exchange(receiver, AsyncFrontend(chosen, [ENGINE], 1, tell_drops, keeps=False, own=own))
        exchanges.append(exchange)
        exchange.frontend.start()
        await eventually(lambda: exchange.frontend._links[ENGINE].is_connected)
        return exchange

    yield make
    gpu.release()
    for exchange in exchanges:
        client = exchange.frontend._links[ENGINE]._client
        exchange.frontend.close()
        assert client is not None
        await eventually(lambda client=client: client.closed)
        await eventually(lambda ring=exchange.receiver._ring: ring.statistics().clients == 0)  # it has heard the goodbye
        await asyncio.to_thread(exchange.receiver.close)


async def use(gpu: Gpu, exchange: Exchange, *tensors: torch.Tensor) -> None:
    """What the wrapped ``group_and_batch_mm_items`` does, in a thread that has another stream than all others."""

    def run_model() -> None:
        gpu.compute_on(gpu.reading)
        exchange.receiver.before_use(tensors)
        gpu.compute_on(None)

    await asyncio.to_thread(run_model)


async def test_a_tensor_on_a_gpu_goes_through_the_device_slab(gpu: Gpu, own: Own, connected: Connect) -> None:
    exchange = await connected()
    sent = gpu.picture()[1:-1].view(-1, 2)[:, 0]  # not contiguous
    gpu._pictures.append(sent.data_ptr())
    host = picture()
    came, beside = await exchange.exchange(sent, host)
    assert torch.equal(came, sent)
    assert torch.equal(beside, host)
    assert gpu.is_in_slab(came)
    assert not gpu.is_in_slab(beside)
    assert exchange.counts() == {"device": 1, "copied": 1}
    assert own.tensors == []
    assert own.messages == 1
    assert gpu.kept == [sent.data_ptr()]
    del came, beside, host
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)
    assert exchange.receiver._on_gpu == {}


async def test_the_model_reads_it_after_it_was_written(gpu: Gpu, connected: Connect) -> None:
    exchange = await connected()
    await exchange.exchange(gpu.picture())  # the device slab is mapped now
    gpu.writing.held = True
    (came,) = await exchange.exchange(gpu.picture())
    await use(gpu, exchange, came.unsqueeze(0))
    seen: list[int] = []
    gpu.look(came, seen)
    assert seen == []
    gpu.release(gpu.writing)
    assert seen == [int(came[0])]


async def test_its_slot_is_used_again_after_the_model_has_read_it(gpu: Gpu, connected: Connect) -> None:
    exchange = await connected()
    (came,) = await exchange.exchange(gpu.picture())
    await use(gpu, exchange, came)
    expected = int(came[0])
    gpu.reading.held = True
    seen: list[int] = []
    gpu.look(came, seen)
    del came  # the request has ended
    await eventually(lambda: exchange.receiver._on_gpu == {})
    await eventually(lambda: gpu.awaited)  # somebody waits for what is queued there
    assert exchange.receiver.report()["slots_in_use"] == 1
    gpu.release(gpu.reading)
    assert seen == [expected]
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)


async def test_what_finds_no_place_goes_vllms_own_way(gpu: Gpu, own: Own, connected: Connect) -> None:
    exchange = await connected(device_slab_nbytes=16 * MB, wait_s=1.0)
    held = await exchange.exchange(gpu.picture(6 * MB))
    tensors = [gpu.picture(6 * MB), gpu.picture(6 * MB), gpu.picture(40 * MB)]
    host = picture(MB)
    request = request_with(*tensors, host)
    await exchange.frontend.divert(request, ENGINE, exchange.stream.encode(exchange.frontend, request))
    came = await exchange.decode()
    assert came[1] is tensors[1]
    assert came[2] is tensors[2]
    assert own.tensors == tensors[1:]
    assert torch.equal(came[0], tensors[0])
    assert torch.equal(came[3], host)
    assert exchange.counts() == {"device": 2, "inline space": 1, "inline size": 1, "copied": 1}
    del held, came


async def test_where_there_is_no_device_slab_they_go_vllms_own_way_and_the_log_says_so(
    gpu: Gpu, own: Own, connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    exchange = await connected(on="this is a test")
    sent = gpu.picture()
    for _ in range(2):
        (came,) = await exchange.exchange(sent)
        assert came is sent
    assert exchange.counts() == {"inline gpu": 2}
    assert caplog.text.count("tensors on a GPU go vLLM's own way, since this is a test") == 1
    assert caplog.text.count("there is no device slab, since this is a test") == 1
    assert gpu.memory.log == []


async def test_the_log_says_that_there_is_one(gpu: Gpu, connected: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await connected()
    await eventually(lambda: caplog.text.count("tensors on a GPU go through a device slab of 32 MiB") == 1)
    assert caplog.text.count("those on a GPU are read in a device slab of 32 MiB") == 1
    assert [call for call, _ in gpu.memory.log] == ["allocate", "export"]  # an API server maps it when it has something for it


async def test_without_memory_for_it_the_slab_is_there_all_the_same(gpu: Gpu, connected: Connect) -> None:
    gpu.memory.failing = "allocate"
    exchange = await connected()
    assert exchange.receiver.report()["no_device_slab"] == "the engine core can have no device slab: allocate failed"
    sent, host = gpu.picture(), picture()
    came = await exchange.exchange(sent, host)
    assert came[0] is sent
    assert torch.equal(came[1], host)
    assert exchange.counts() == {"inline gpu": 1, "copied": 1}


async def test_a_failure_of_cuda_is_said_once(gpu: Gpu, connected: Connect, caplog: pytest.LogCaptureFixture) -> None:
    exchange = await connected()
    await exchange.exchange(gpu.picture())
    gpu.writing.held = True
    gpu.fail("cuEventRecord")
    for _ in range(3):
        await exchange.exchange(gpu.picture())
    assert exchange.counts() == {"device": 1, "inline gpu": 3}
    assert caplog.text.count("from now on, tensors on a GPU go vLLM's own way, since cuEventRecord failed") == 1


async def test_what_is_on_another_gpu_goes_vllms_own_way(
    gpu: Gpu, connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = await connected()
    gpu.index = 1
    for _ in range(2):
        await exchange.exchange(gpu.picture())
    gpu.index = 0
    await exchange.exchange(gpu.picture())
    assert exchange.counts() == {"inline gpu": 2, "device": 1}
    assert caplog.text.count("the engine's device slab is on cuda:0 of this process, not on cuda:1") == 1


async def test_what_was_placed_for_a_message_that_is_not_sent_comes_back(gpu: Gpu, connected: Connect) -> None:
    exchange = await connected()
    exchange.stream.fails = True
    with pytest.raises(RuntimeError, match="the engine core is dead"):
        await exchange.send(gpu.picture())
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)


async def test_embeddings_on_a_gpu_are_left_alone(gpu: Gpu) -> None:
    tensor = gpu.picture()
    request = request_with(tensor)
    assert payloads.large_tensors(request, MB, on_gpus=True) == [tensor]
    assert payloads.large_tensors(request, MB) == []
    request.mm_features[0].modality = "prompt_embeds"
    request.prompt_embeds = tensor
    assert payloads.large_tensors(request, MB, on_gpus=True) == []


def test_without_an_event_loop(gpu: Gpu, own: Own) -> None:
    chosen = settings(device_slab_nbytes=32 * MB)
    receiver = Receiver(chosen, 0, copies=False, pin="off", gpu=0)
    frontend = SyncFrontend(chosen, [ENGINE], own)
    sent = gpu.picture()
    references = []
    frontend.divert(request_with(sent), ENGINE, lambda: references.append(frontend(sent)))
    came = receiver("uint8", sent.shape, references[0])
    assert receiver.take_losses() is None
    assert torch.equal(came, sent)
    assert gpu.is_in_slab(came)
    assert own.tensors == []
    del came
    frontend.close()
    receiver.close()


# -- where it meets vLLM ----------------------------------------------------------------------------------------------------


def core_on(device: str | None) -> SimpleNamespace:
    worker = SimpleNamespace(device=None if device is None else torch.device(device))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))


def test_which_gpu_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "broken", lambda *_: [])
    gpu_of, on = wrapping._gpu_of, settings(device_slab_nbytes=32 * MB)
    assert gpu_of(core_on("cuda:3"), on, copies=False) == 3
    assert gpu_of(core_on("cuda:3"), settings(), copies=False) == NOT_SET
    assert "in its cache in the engine core" in str(gpu_of(core_on("cuda:3"), on, copies=True))
    for core in (core_on("cpu"), core_on(None), SimpleNamespace(model_executor=None)):
        assert "the model is on no GPU of the engine core's process" in str(gpu_of(core, on, copies=False))
    monkeypatch.setattr(wrapping, "broken", lambda *_: ["x has no y"])
    assert "this vLLM is not as it needs it (x has no y)" in str(gpu_of(core_on("cuda:3"), on, copies=False))


def test_media_are_told_before_they_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    utils = SimpleNamespace(group_and_batch_mm_items=lambda items, *, device: done.append((items, device)))
    monkeypatch.setattr(wrapping, "find_gpu_hooks", lambda: utils)
    wrapping._order_what_gpus_read(SimpleNamespace(before_use=lambda tensors: done.append(list(tensors))))
    tensors = [torch.zeros(1), torch.zeros(2)]
    items = [{"pixels": SimpleNamespace(data=tensors), "n": SimpleNamespace(data=3)}]
    utils.group_and_batch_mm_items(iter(items), device="cuda")
    assert done == [tensors, (items, "cuda")]


@pytest.mark.parametrize(("nbytes", "is_on"), [(0, False), (32 * MB, True)])
def test_torch_shm_stays_vllms_own_way_beside_a_device_slab(
    nbytes: int, is_on: bool, own: Own, monkeypatch: pytest.MonkeyPatch, socket_dir: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    client = type("Client", (), {})()
    client.encoder, client.core_engines = SimpleNamespace(oob_tensor_consumer=own), []
    wrapping._attach(client, settings(device_slab_nbytes=nbytes), is_async=False)
    consumer = client.encoder.oob_tensor_consumer
    assert (consumer is own) is not is_on
    consumer.new_message()
    sent = picture()
    assert consumer(sent) == {"tensor_id": 0}
    assert own.messages == 1
