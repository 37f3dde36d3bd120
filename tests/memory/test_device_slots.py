"""Slots in device memory, both ends real and the GPU made of host memory: nothing is copied, nobody reads before it is written,
and nothing is lent again before the GPU is done with it, whatever else happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring import threads
from shmring.client.client import Client
from shmring.client.connecting import open_client
from shmring.config import ClientConfig, RingConfig
from shmring.core.messages import LeaseRequest, SlotRef
from shmring.errors import CapacityError, ClosedError, LocalProtocolError, RemoteError, SlabError, WouldBlock
from shmring.gpu import device as device_module
from shmring.gpu import device_slots as device_slots_module
from shmring.gpu.cuda import CudaError
from shmring.ring.ring import Ring
from shmring.ring.serving import create_shell
from shmring.ring.shell import Shell
from tests.records import submit_of, tensor_extension
from tests.sessions import session_of
from tests.waiting import cancel, eventually, settled, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

MIB = 1 << 20
NBYTES = 20_000


class Forgetful(dict[bytes, Any]):
    """Where nothing stays: to whoever looks there, every event was made by somebody else."""

    def __setitem__(self, key: bytes, value: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def nothing_stays(device_memory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Events cross from one process to another; device memory is freed."""
    monkeypatch.setattr(device_module, "_fences", Forgetful())
    monkeypatch.setattr("shmring.gpu.device_claims._VIEWS_TIMEOUT_S", 0.2)
    yield
    gc.collect()
    assert device_module._mappings == {}
    assert device_memory.memory == {}


def pretend_to_be_elsewhere(ring: Ring) -> None:
    """Has clients in this process find a ring's device slab as those in another one do: not made here, so to be opened."""
    slab = ring._shell._device_claims[0]._slab
    own_handle = slab.handle
    slab.handle = msgspec.structs.replace(own_handle, memory=b"own" + own_handle.memory[:61])
    device_module._mappings[slab.handle.memory] = device_module._mappings.pop(own_handle.memory)
    handshakes = ring._shell._handshakes
    welcome = handshakes._welcome
    handshakes._welcome = lambda *arguments: msgspec.structs.replace(welcome(*arguments), device_slab=own_handle)


class Ends:
    """A ring with a device slab, its clients, and the GPU's streams of either end."""

    def __init__(self, cuda: Any, memory: Any, socket_dir: Path) -> None:
        self.cuda = cuda
        self.memory = memory
        self.producing, self.consuming = cuda.create_stream(0), cuda.create_stream(0)
        self._socket_dir = str(socket_dir)
        self._clients: list[Client] = []
        self._rings: list[Ring] = []

    async def serve(self, payload_type: Any = Any, **options: Any) -> Ring:
        settings: dict[str, Any] = {"slab_nbytes": "1MiB", "device_slab_nbytes": "2MiB", "socket_dir": self._socket_dir}
        config = RingConfig(**(settings | options))
        ring = Ring(
            await create_shell(Shell, "test", config, payload_type=payload_type, cuda=self.cuda, device_memory=self.memory)
        )
        self._rings.append(ring)
        if ring._shell._device_claims:
            pretend_to_be_elsewhere(ring)
        return ring

    async def connect(self, reconnect: bool = False, **options: Any) -> Client:
        settings: dict[str, Any] = {"lease_nbytes": "64KiB", "inline_nbytes": "1KiB", "socket_dir": self._socket_dir}
        config = ClientConfig(**(settings | options))
        client = await open_client(Client, ["test"], config, reconnect=reconnect, cuda=self.cuda, device_memory=self.memory)
        self._clients.append(client)
        return client

    async def submit(self, client: Client, payload: object, *, idle: bool = False) -> shmring.Submission:
        """Submits from the producer's stream, and goes on on the consumer's. ``idle``: what was queued there is over."""
        was_held, self.producing.held = self.producing.held, not idle
        self.cuda.compute_on(self.producing)
        try:
            return await client.submit(payload)
        finally:
            self.cuda.compute_on(self.consuming)
            if not was_held:
                self.cuda.release(self.producing)

    def write(self, tensor: torch.Tensor, value: int) -> None:
        """Queues a kernel that writes to a tensor, by address: what is queued keeps nothing alive."""
        queue_fill(self.cuda, self.producing, tensor, value)

    async def close(self) -> None:
        self.cuda.release()
        for client in self._clients:
            await client.close()
        for ring in self._rings:
            await ring.close()
            ring._shell._book.check()


def queue_fill(cuda: Any, stream: Any, tensor: torch.Tensor, value: int) -> None:
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    cuda.queue(stream, lambda: ctypes.memset(address, value, nbytes) and None)


def queue_look(cuda: Any, stream: Any, tensor: torch.Tensor, seen: list[int]) -> None:
    """Queues a kernel that reads the first byte of a tensor; by address."""
    address = tensor.data_ptr()
    cuda.queue(stream, lambda: seen.extend(ctypes.string_at(address, 1)))


@pytest.fixture
async def ends(cuda: Any, device_memory: Any, socket_dir: Path) -> AsyncIterator[Ends]:
    ends = Ends(cuda, device_memory, socket_dir)
    yield ends
    await ends.close()


@pytest.fixture
async def ring(ends: Ends) -> Ring:
    return await ends.serve()


@pytest.fixture
async def client(ends: Ends, ring: Ring) -> Client:
    return await ends.connect()


def used(end: Any) -> int:
    gc.collect()
    return int(end.statistics().device_slots_in_use)


@contextlib.asynccontextmanager
async def device_tensor(client: Client, **options: Any) -> AsyncIterator[torch.Tensor]:
    """A tensor in a slot of its own."""
    async with client.slot(NBYTES, device="cuda", **options) as slot:
        yield slot.tensor((NBYTES,), torch.uint8)


async def map_slab(client: Client) -> None:
    """The first slot maps the slab; then one is free."""
    async with client.slot(NBYTES, device="cuda"):
        pass


async def comes_back_with_the_gpu(ends: Ends, *holders: Any) -> None:
    """One slot is in use until the GPU has done what is queued, and no longer."""
    await eventually(lambda: ends.cuda.awaited)
    assert [used(end) for end in holders] == [1] * len(holders)
    assert holders[0].statistics().slots_draining == 1
    ends.cuda.release()
    await eventually(lambda: not any(used(end) for end in holders))


def let_go(ring: Ring) -> None:
    """What a slab that stays allocated waits for, the end of this process, has come."""
    assert ring._shell._device_claims[0]._slab.close()


# -- there and back -----------------------------------------------------------------------------------------------------


async def test_a_tensor_in_a_device_slot_is_handed_over_without_a_copy(ends: Ends, ring: Ring, client: Client) -> None:
    async with client.slot(NBYTES, device="cuda") as slot:
        tensor = slot.tensor((100, 50), torch.float32)
        tensor[:] = torch.arange(5000, dtype=torch.float32).view(100, 50)
        submission = await ends.submit(client, {"x": tensor, "part": tensor[10], "n": 3})
        with await ring.claim() as claim:
            assert claim.payload["x"].data_ptr() == tensor.data_ptr()
            assert torch.equal(claim.payload["x"], tensor)
            assert torch.equal(claim.payload["part"], tensor[10])
            assert ring.statistics().device_slots_in_use == 1
            await claim.reply(claim.payload["n"])
        assert await submission.result() == 3
        del tensor
    await eventually(lambda: used(ring) == used(client) == 0)
    statistics = client.statistics()
    assert (statistics.copies, statistics.copied_nbytes, statistics.in_place) == (0, 0, 2)
    assert statistics.device_slab_nbytes == ring.statistics().device_slab_nbytes == 2 * MIB
    assert ends.cuda.calls["cuMemcpyHtoDAsync_v2"] == 0


async def test_a_tensor_of_a_slot_that_was_left_goes_with_its_last_user(ring: Ring, client: Client) -> None:
    """As long as the slot is held, the tensor is, too: no other object may have its address."""
    async with client.slot(NBYTES, device="cuda") as slot:
        made = weakref.ref(slot.tensor((NBYTES,), torch.uint8))
        assert made() is not None
    assert made() is None


async def test_a_slot_is_written_and_sent_again_and_again(ends: Ends, ring: Ring, client: Client) -> None:
    async with client.slot(NBYTES, device="cuda:0") as slot:
        tensor = slot.tensor((NBYTES,), torch.uint8)
        for value in range(1, 6):
            ends.write(tensor, value)
            submission = await ends.submit(client, tensor)
            with await ring.claim() as claim:
                assert claim.payload.unique().tolist() == [value]
            with pytest.raises(StopAsyncIteration):
                await submission.next()
            await eventually(lambda: client.statistics().slots_cached == 1)
    assert ends.cuda.calls["cuIpcGetEventHandle"] == 1
    assert ring.statistics().device_fences == 1


def check_that_reading_waits(ends: Ends, claim: shmring.Claim) -> None:
    """What the engine queues sees what the frontend has queued before."""
    seen: list[int] = []
    queue_look(ends.cuda, ends.consuming, claim.payload, seen)
    assert seen == [], "what is queued waits for the fence"
    ends.cuda.release(ends.producing)
    assert seen == [7]


@pytest.mark.one_loop
async def test_the_engine_reads_after_the_producer_has_written(ends: Ends, ring: Ring, client: Client) -> None:
    ends.producing.held = True
    async with device_tensor(client) as tensor:
        ends.write(tensor, 7)
        await ends.submit(client, tensor)
        with await ring.claim() as claim:
            check_that_reading_waits(ends, claim)


async def test_what_was_written_before_it_is_sent_needs_no_event(ends: Ends, ring: Ring, client: Client) -> None:
    async with device_tensor(client) as tensor:
        ends.cuda.calls.clear()
        for value in range(1, 4):
            ends.write(tensor, value)
            await ends.submit(client, tensor, idle=True)
            with await ring.claim() as claim:
                assert claim.payload.unique().tolist() == [value]
                assert (await claim.to("cuda")).unique().tolist() == [value]
            del claim
            await eventually(lambda: gc.collect() >= 0 and client.statistics().slots_cached == 1)
    events = {name for name in ends.cuda.calls if "Event" in name}
    assert events == set(), "neither end has made, recorded, opened or awaited one"
    assert ends.cuda.calls["cuStreamQuery"] <= 3 * 3
    await eventually(lambda: used(ring) == used(client) == 0)


@pytest.mark.one_loop
async def test_host_and_device_tensors_go_in_one_payload(ends: Ends, ring: Ring, client: Client) -> None:
    host = torch.arange(3000)
    async with client.slot(NBYTES, device="cuda") as slot, client.slot(NBYTES) as other:
        tensor, near = slot.tensor((8,), torch.bfloat16), other.tensor((4,), torch.int64)
        tensor.fill_(2.0)
        near.fill_(5)
        payload = {"d": tensor, "h": host, "near": near, "text": np.array(["a", "bc"]), "empty": torch.empty(0, 3)}
        await ends.submit(client, payload)
        with await ring.claim() as claim:
            assert claim.payload["d"].tolist() == [2.0] * 8
            assert torch.equal(claim.payload["h"], host)
            assert claim.payload["near"].tolist() == [5] * 4
            assert claim.payload["text"].tolist() == ["a", "bc"]
            assert claim.payload["empty"].shape == (0, 3)
        assert client.statistics().in_place == 2


@pytest.mark.one_loop
async def test_slots_of_all_sizes_and_dtypes(ends: Ends, ring: Ring, client: Client) -> None:
    async with client.slot(0, device="cuda") as slot:
        assert slot.tensor((0,), torch.float32).shape == (0,)
        with pytest.raises(CapacityError):
            slot.tensor((1,), torch.uint8)
    async with client.slot(4096, device="cuda") as slot:
        tensors = [slot.tensor((2, 3), dtype) for dtype in (torch.bool, torch.complex128, torch.float8_e5m2, torch.int16)]
        scalar = slot.tensor((), torch.float64)
        scalar.fill_(1.5)
        with pytest.raises(TypeError, match="numpy has no arrays in device memory"):
            slot.array((2,), np.float32)
        await ends.submit(client, [*tensors, scalar])
        with await ring.claim() as claim:
            assert [tensor.dtype for tensor in claim.payload] == [tensor.dtype for tensor in [*tensors, scalar]]
            assert claim.payload[-1].item() == 1.5
    with pytest.raises(CapacityError, match="raise its device_slab_nbytes"):
        await client.slot(3 * MIB, device="cuda")


class Typed(msgspec.Struct):
    pixels: torch.Tensor


@pytest.mark.one_loop
async def test_typed_payloads_are_typed(ends: Ends) -> None:
    ring = await ends.serve(Typed)
    client = await ends.connect()
    async with device_tensor(client) as tensor:
        await ends.submit(client, {"pixels": tensor.fill_(3)})
        with await ring.claim() as claim:
            assert isinstance(claim.payload, Typed)
            assert claim.payload.pixels.unique().tolist() == [3]


# -- asking for one -----------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_an_engine_without_a_device_slab_says_so(ends: Ends) -> None:
    ring = await ends.serve(device_slab_nbytes=0)
    client = await ends.connect()
    with pytest.raises(SlabError, match=r"engine 'test' has no device slab: serve it with device_slab_nbytes=\.\.\."):
        await client.slot(10, device="cuda")
    with pytest.raises(SlabError, match="has no device slab"):
        client.slot_nowait(10, device="cuda")
    assert ring.statistics().device_slab_nbytes == 0
    assert ends.memory.log == []


@pytest.mark.one_loop
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 2)])
async def test_another_gpu_than_the_slabs_is_named(ends: Ends, ring: Ring, client: Client, device: Any) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"device slab is on cuda:0 of this process, not on cuda:[12]"):
            await client.slot(10, device=device)
        async with client.slot(10, device="cuda"):  # the slab is mapped now, and a slot is free
            pass
    with pytest.raises(ValueError, match=r"device slab is on cuda:0"):
        client.slot_nowait(10, device=device)


@pytest.mark.one_loop
async def test_what_is_no_place_for_a_slot_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="on device 'cpu' or 'cuda', not on 'meta'"):
        client.slot(10, device="meta")
    async with client.slot(10, device=torch.device("cpu")) as slot:
        assert slot.array((10,), np.uint8).shape == (10,)


async def test_the_twin_that_does_not_wait(ends: Ends, ring: Ring, client: Client) -> None:
    with pytest.raises(WouldBlock, match="not mapped yet"):
        client.slot_nowait(10, device="cuda")
    async with client.slot(10, device="cuda"):
        pass
    with client.slot_nowait(10, device="cuda") as slot:
        ends.cuda.compute_on(ends.producing)
        client.submit_nowait(slot.tensor((10,), torch.uint8).fill_(4))
        with await ring.claim() as claim:
            assert claim.payload.tolist() == [4] * 10
    with pytest.raises(WouldBlock, match="no 1500000 bytes are free"):
        client.slot_nowait(1_500_000, device="cuda")
    await eventually(lambda: client.statistics().device_leased_nbytes >= 1_500_000)


async def test_the_slab_is_opened_once_on_a_thread_and_not_before_it_is_asked_for(
    ends: Ends, ring: Ring, client: Client
) -> None:
    assert client.statistics().device_slab_nbytes == 0
    slots = await asyncio.gather(*(client.slot(100, device="cuda") for _ in range(5)))
    assert len({slot._record.start for slot in slots}) == 5
    for slot in slots:
        slot.close()
    assert [name for name, _ in ends.memory.log].count("open") == 1


async def test_a_slab_that_cannot_be_opened_is_an_error_and_can_be_tried_again(ends: Ends, ring: Ring, client: Client) -> None:
    visible, ends.cuda.visible = ends.cuda.visible, ["GPU-z"]
    results = await asyncio.gather(*(client.slot(100, device="cuda") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, CudaError) and "does not see" in str(result) for result in results)
    ends.cuda.visible = visible
    await map_slab(client)


async def test_waiting_for_device_memory_is_in_line_and_cancelling_passes_the_turn_on(
    ends: Ends, ring: Ring, client: Client
) -> None:
    slot = await client.slot(1_500_000, device="cuda")
    first = asyncio.create_task(_take(client, 1_000_000))
    second = asyncio.create_task(_take(client, 1_000_001))
    await eventually(lambda: client.statistics().waiting == 2)
    async with client.slot(100):  # host memory is another matter
        pass
    assert await cancel(first)
    slot.close()
    (await asyncio.wait_for(second, 5)).close()


async def _take(client: Client, nbytes: int) -> shmring.Slot:
    return await client.slot(nbytes, device="cuda")


async def test_a_slot_that_is_free_comes_at_once_also_where_its_release_was_not_heard_yet(
    ends: Ends, ring: Ring, client: Client
) -> None:
    for device in ["cuda", "cuda:0", torch.device("cuda")]:
        async with client.slot(1_500_000, device=device) as slot:  # the first maps the slab, and brings the lease
            submission = await ends.submit(client, slot.tensor((1_500_000,), torch.uint8), idle=True)
        claim = await ring.claim()
        claim.done()
        assert client.statistics().device_slots_in_use == 1
        with pytest.raises(StopIteration) as there:
            client.slot(1_500_000, device=device).__await__().send(None)
        there.value.value.close()
        await submission.wait()


async def test_two_clients_share_it_and_a_recall_brings_leases_back(ends: Ends, ring: Ring) -> None:
    first, second = await ends.connect(lease_idle_s=60.0), await ends.connect()
    async with first.slot(1_200_000, device="cuda"):
        waiting = asyncio.create_task(_take(second, 1_200_000))
        await eventually(lambda: ring.statistics().lease_requests_waiting == 1)
    (await asyncio.wait_for(waiting, 5)).close()
    assert first.statistics().device_leased_nbytes == 0


async def test_an_idle_lease_goes_back(ends: Ends, ring: Ring) -> None:
    client = await ends.connect(lease_idle_s=0.02)
    async with client.slot(100, device="cuda"):
        assert ring.statistics().device_slab_leased_nbytes > 0
    await eventually(lambda: ring.statistics().device_slab_free_nbytes == 2 * MIB)
    assert client.statistics().device_leased_nbytes == 0
    ring._shell._book.check()


# -- the engine's release ------------------------------------------------------------------------------------------------


async def handed_over(ends: Ends, client: Client, value: int = 7) -> shmring.Submission:
    """Submits a tensor in a device slot that its frontend has left."""
    async with device_tensor(client) as tensor:
        ends.write(tensor, value)
        return await ends.submit(client, tensor)


async def test_a_slot_comes_back_when_the_gpu_is_done_and_not_before(ends: Ends, ring: Ring, client: Client) -> None:
    submission = await handed_over(ends, client)
    with await ring.claim() as claim:
        assert claim.payload.unique().tolist() == [7]
        ends.consuming.held = True
        await claim.reply("done")
    assert await submission.result() == "done"
    await comes_back_with_the_gpu(ends, ring, client)


async def test_a_view_keeps_the_slot_and_then_the_gpu_does(ends: Ends, ring: Ring, client: Client) -> None:
    await handed_over(ends, client)
    with await ring.claim() as claim:
        view = claim.payload[5:]
    await turns()
    assert used(ring) == 1
    assert view.unique().tolist() == [7]
    ends.consuming.held = True
    del view
    await eventually(lambda: gc.collect() >= 0 and len(ends.consuming.queue) == 1)  # the event behind its last use
    assert used(ring) == 1
    ends.cuda.release()
    await eventually(lambda: used(ring) == used(client) == 0)


async def test_an_abort_releases_nothing_early(ends: Ends, ring: Ring, client: Client) -> None:
    submission = await handed_over(ends, client)
    claim = await ring.claim()
    with claim:
        ends.consuming.held = True
        submission.abort()
        await eventually(lambda: claim.aborted)
    await comes_back_with_the_gpu(ends, ring, client)


async def test_a_request_that_is_aborted_unclaimed_waits_for_the_producers_own_work(
    ends: Ends, ring: Ring, client: Client
) -> None:
    ends.producing.held = True
    submission = await handed_over(ends, client)
    submission.abort()
    await eventually(lambda: used(ring) == 0)
    await eventually(lambda: client.statistics().slots_draining == 1)
    await eventually(lambda: ends.cuda.awaited)
    assert client.statistics().slots_draining == 1, "the producer's kernel has not written yet"
    ends.cuda.release()
    await eventually(lambda: used(client) == 0)


async def test_a_slot_that_is_given_up_unsent_waits_for_what_was_queued_on_it(ends: Ends, ring: Ring, client: Client) -> None:
    ends.cuda.compute_on(ends.producing)
    ends.producing.held = True
    async with client.slot(NBYTES, device="cuda") as slot:
        ends.write(slot.tensor((NBYTES,), torch.uint8), 9)
    await comes_back_with_the_gpu(ends, client)


@pytest.mark.parametrize("is_mapped", [False, True])
async def test_a_slot_that_drains_waits_for_its_views_first(is_mapped: bool, ends: Ends, ring: Ring, client: Client) -> None:
    if is_mapped:
        await map_slab(client)
    async with client.slot(NBYTES, device="cuda", drain=True) as slot:
        tensor = slot.tensor((NBYTES,), torch.uint8)
    await turns()
    assert used(client) == 1
    ends.cuda.compute_on(ends.producing)
    ends.producing.held = True
    ends.write(tensor, 3)
    del tensor
    await comes_back_with_the_gpu(ends, client)


@pytest.mark.one_loop
@pytest.mark.parametrize("is_mapped", [False, True])
async def test_a_slot_that_does_not_drain_is_free_although_it_is_viewed(is_mapped: bool, ring: Ring, client: Client) -> None:
    if is_mapped:
        await map_slab(client)
    async with client.slot(NBYTES, device="cuda") as slot:
        tensor = slot.tensor((NBYTES,), torch.uint8)
    assert used(client) == 0
    del tensor


# -- clients without a loop -----------------------------------------------------------------------------------------------


@pytest.fixture
async def blocking(ends: Ends, ring: Ring, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[threads.Client]:
    """A client for any thread. This thread is the engine's."""
    monkeypatch.setattr("shmring.client.client.TorchCuda", lambda: ends.cuda)
    monkeypatch.setattr("shmring.client.client.Driver", lambda: ends.memory)
    ends.cuda.compute_on(ends.consuming)
    connect = functools.partial(threads.connect, "test", lease_nbytes="64KiB", socket_dir=str(socket_dir))
    client = await asyncio.to_thread(connect)
    yield client
    ends.cuda.release()
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize("how", ["request", "stream", "submit", "submit_nowait"])
async def test_what_a_thread_sends_comes_behind_what_it_has_queued(
    how: str, ends: Ends, ring: Ring, blocking: threads.Client
) -> None:
    ends.producing.held = True

    def ask() -> Any:
        ends.cuda.compute_on(ends.producing)
        with blocking.slot(NBYTES, device="cuda", timeout=10) as slot:
            tensor = slot.tensor((NBYTES,), torch.uint8)
            ends.write(tensor, 7)
            if how == "request":
                return blocking.request(tensor)
            if how == "stream":
                return [*blocking.stream(tensor)].pop()
            return getattr(blocking, how)(tensor).result()

    asking = asyncio.ensure_future(asyncio.to_thread(ask))
    with await ring.claim() as claim:
        check_that_reading_waits(ends, claim)
        await claim.reply("done")
    assert await asking == "done"
    await eventually(lambda: used(ring) == used(blocking) == 0)


@pytest.mark.parametrize("drain", [False, True])
async def test_a_slot_that_a_thread_leaves_waits_for_what_it_has_queued(
    drain: bool, ends: Ends, ring: Ring, blocking: threads.Client
) -> None:
    ends.producing.held = True

    def leave() -> torch.Tensor:
        with blocking.slot(NBYTES, device="cuda", drain=drain) as slot:  # acquired on another stream
            tensor = slot.tensor((NBYTES,), torch.uint8)
            ends.cuda.compute_on(ends.producing)
            ends.write(tensor, 3)
        return tensor

    tensor = await asyncio.to_thread(leave)
    del tensor
    await comes_back_with_the_gpu(ends, blocking)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
async def test_where_a_threads_stream_can_not_be_followed_nothing_is_sent(
    call: str, ends: Ends, blocking: threads.Client
) -> None:
    def send() -> None:
        with blocking.slot(NBYTES, device="cuda") as slot:
            tensor = slot.tensor((NBYTES,), torch.uint8)
            ends.cuda.fail(call)
            with pytest.raises(CudaError):
                blocking.submit(tensor)

    await asyncio.to_thread(send)
    assert blocking.statistics().submitted == 0
    await eventually(lambda: used(blocking) == 0)


async def test_fences_are_used_again_when_all_slots_of_their_submission_are_back(
    ends: Ends, ring: Ring, client: Client
) -> None:
    async with client.slot(NBYTES, device="cuda") as a, client.slot(NBYTES, device="cuda") as b:
        tensors = [slot.tensor((NBYTES,), torch.uint8) for slot in (a, b)]
        await ends.submit(client, tensors)
        assert ends.cuda.calls["cuIpcGetEventHandle"] == 1
        with await ring.claim() as claim:
            kept = claim.payload[0]
        await eventually(lambda: client.statistics().slots_cached == 1)
        await ends.submit(client, tensors[1])
        assert ends.cuda.calls["cuIpcGetEventHandle"] == 2, "the first one is still out"
        (await ring.claim()).done()
        del kept
        await eventually(lambda: gc.collect() >= 0 and client.statistics().slots_cached == 2)
        for _ in range(3):
            await ends.submit(client, tensors)
            (await ring.claim()).done()
            await eventually(lambda: client.statistics().slots_cached == 2)
        assert ends.cuda.calls["cuIpcGetEventHandle"] == 2


# -- claim.to ------------------------------------------------------------------------------------------------------------


async def test_a_claim_to_the_same_gpu_gives_the_tensors_as_they_are(ends: Ends, ring: Ring, client: Client) -> None:
    ends.producing.held = True
    await handed_over(ends, client)
    other = ends.cuda.create_stream(0)
    with await ring.claim() as claim:
        arrived = await claim.to("cuda", other)
        assert claim.released
    seen: list[int] = []
    queue_look(ends.cuda, other, arrived, seen)
    assert seen == []
    ends.cuda.release(ends.producing)
    assert seen == [7]
    assert ring.statistics().device_copies == 0
    assert ends.cuda.calls["allocate"] == 0, "nothing is staged"
    other.held = True
    ends.cuda.queue(other, lambda: None)
    del arrived
    await comes_back_with_the_gpu(ends, ring, client)


async def test_a_mixed_claim_uploads_what_is_on_the_host(ends: Ends, ring: Ring, client: Client) -> None:
    async with client.slot(NBYTES, device="cuda") as slot:
        tensor = slot.tensor((NBYTES,), torch.uint8).fill_(4)
        payload = {"d": tensor, "h": torch.arange(3000), "i": torch.arange(3), "e": torch.empty(0, 3), "t": np.array(["x"])}
        for waits in (True, False):
            await ends.submit(client, payload)
            with await ring.claim() as claim:
                arrived = await claim.to("cuda") if waits else claim.to_nowait("cuda")
            assert arrived["d"].data_ptr() == tensor.data_ptr()
            assert arrived["h"].tolist() == list(range(3000))
            assert arrived["i"].tolist() == [0, 1, 2]
            assert arrived["e"].shape == (0, 3)
            assert arrived["t"].tolist() == ["x"]
            del arrived
            await eventually(lambda: gc.collect() >= 0 and client.statistics().slots_cached == 1)
        assert ring.statistics().device_copies == 2


async def test_a_claim_to_another_gpu_is_an_error_that_names_the_right_one(ends: Ends, ring: Ring, client: Client) -> None:
    await handed_over(ends, client)
    with await ring.claim() as claim:
        with pytest.raises(ValueError, match=r"in the device slab on cuda:0, which cuda:1 can't have"):
            await claim.to("cuda:1")
        with pytest.raises(ValueError, match="on cuda:0"):
            claim.to_nowait("cuda:1")
        assert not claim.released
        assert claim.to_nowait("cuda:0").unique().tolist() == [7]


# -- what ends -----------------------------------------------------------------------------------------------------------


async def test_the_memory_of_a_frontend_that_goes_is_kept_until_the_gpu_is_done(ends: Ends, ring: Ring, client: Client) -> None:
    await handed_over(ends, client)
    with await ring.claim():
        ends.consuming.held = True
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    await eventually(lambda: ends.cuda.awaited)
    assert ring.statistics().device_slab_quarantined_nbytes > 0
    ends.cuda.release()
    await settled(ring)
    assert ring.statistics().device_slab_free_nbytes == 2 * MIB
    assert ring.statistics().device_fences == 0


async def test_a_frontend_that_only_disconnects_keeps_its_device_memory_until_it_is_dead(
    ends: Ends, ring: Ring, client: Client
) -> None:
    async with client.slot(NBYTES, device="cuda"):
        session_of(client).link.abort()
        await eventually(lambda: ring.statistics().clients == 0)
        assert ring.statistics().device_slab_quarantined_nbytes > 0
    await eventually(lambda: ends.memory.opened == [])  # by a thread; a process that is dead has nothing open
    next(iter(ring._shell._frontends.values())).died()
    await settled(ring)
    assert ring.statistics().device_slab_free_nbytes == 2 * MIB


async def test_closing_a_client_waits_for_its_own_work_and_unmaps(ends: Ends, ring: Ring, client: Client) -> None:
    ends.cuda.compute_on(ends.producing)
    async with client.slot(NBYTES, device="cuda") as slot:
        ends.producing.held = True
        ends.write(slot.tensor((NBYTES,), torch.uint8), 3)
    closing = asyncio.create_task(client.close())
    await eventually(lambda: ends.cuda.awaited)
    assert not closing.done()
    ends.cuda.release()
    await closing
    await settled(ring)
    assert ring.statistics().device_slab_free_nbytes == 2 * MIB
    await ring.close()
    assert ends.memory.memory == {}


async def test_a_client_that_closes_with_a_view_says_that_it_maps_the_slab(
    ends: Ends, ring: Ring, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    slot = await client.slot(NBYTES, device="cuda")
    view = slot.tensor((NBYTES,), torch.uint8)
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().device_slab_quarantined_nbytes > 0, "it may still write there"
    await ring.close()
    assert "stays allocated until this process ends: 1 frontends were told of it" in caplog.text
    assert ends.memory.memory
    slot.close()
    view.fill_(3)
    del view
    # The client's mapping goes with the last view; the engine's slab has stayed, which only the end of the process changes.
    await eventually(lambda: gc.collect() >= 0 and ends.memory.opened == [])
    let_go(ring)


async def test_a_ring_that_closes_first_keeps_the_slab_of_those_who_may_map_it(
    ends: Ends, ring: Ring, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await map_slab(client)
    await ring.close()
    assert "frontends were told of it, and have neither said goodbye nor died" in caplog.text
    await eventually(lambda: ends.memory.opened == [])  # the client's session has ended, and it has let go
    with pytest.raises(shmring.EngineDeadError):
        await client.slot(10, device="cuda")
    let_go(ring)


async def test_a_ring_that_closes_while_claims_are_handled_frees_the_slab(ends: Ends, ring: Ring, client: Client) -> None:
    await handed_over(ends, client)
    entered = asyncio.Event()

    async def handle(claim: shmring.Claim) -> None:
        pixels = claim.payload
        entered.set()
        await asyncio.sleep(60)
        assert pixels.numel()

    running = asyncio.create_task(ring.run(handle))
    await entered.wait()
    await client.close()
    await ring.close()
    await running
    assert ends.memory.memory == {}


async def test_a_client_that_reconnects_attaches_to_the_next_slab(ends: Ends) -> None:
    ring = await ends.serve()
    client = await ends.connect(reconnect=True)
    await handed_over(ends, client)
    (await ring.claim()).done()
    first_slab = ring._shell._device_claims[0]._slab
    await ring.close()
    second = await ends.serve()
    await client.wait_connected(5)
    await handed_over(ends, client, 8)
    with await second.claim() as claim:
        assert claim.payload.unique().tolist() == [8]
    await eventually(lambda: gc.collect() >= 0 and used(second) == used(client) == 0)
    assert first_slab.close()


async def test_what_lay_on_a_gpu_of_the_engine_is_not_sent_again(ends: Ends) -> None:
    """Whether its memory is still there, CUDA does not say. What lay in host memory is sent to the next engine."""
    ring = await ends.serve()
    client = await ends.connect(reconnect=True)
    slots = [await client.slot(100, device=device) for device in ("cuda", "cuda", "cpu")]
    tensors = [slot.tensor((100,), torch.uint8) for slot in slots]
    asking = [
        asyncio.ensure_future(client.request(tensors[0], retry=1)),
        asyncio.ensure_future(anext(client.stream(tensors[1], retry=1))),
        asyncio.ensure_future(client.request(tensors[2].fill_(3), retry=1)),
    ]
    await eventually(lambda: client.statistics().in_flight == 3)
    first_slab = ring._shell._device_claims[0]._slab
    await ring.close()
    for request in asking[:2]:
        with pytest.raises(shmring.EngineDeadError):
            await request
    second = await ends.serve()
    with await second.claim() as claim:
        total = int(claim.payload.sum())
        await claim.done(total)
    assert await asking[2] == 300
    assert client.resent == 1
    for slot in slots:
        slot.close()
    del tensors, slot, slots, claim, asking, request
    await eventually(lambda: gc.collect() >= 0 and len(ends.memory.opened) == 0)
    assert first_slab.close()


async def test_a_session_that_is_lost_while_it_attaches_leaves_nothing_mapped(ends: Ends, ring: Ring, client: Client) -> None:
    asking = asyncio.create_task(_take(client, 100))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    session_of(client)._lose(shmring.EngineDeadError("gone"))
    with pytest.raises((shmring.EngineDeadError, ClosedError)):
        await asking
    await eventually(lambda: ends.memory.opened == [] and "close" in dict(ends.memory.log))
    ring._shell._device_claims[0].unmapped(1)


async def test_what_was_left_is_dead_after_the_session(ends: Ends, ring: Ring, client: Client) -> None:
    slot = await client.slot(100, device="cuda")
    await client.close()
    with pytest.raises((ClosedError, LocalProtocolError)):
        slot.tensor((1,), torch.uint8)
    slot.close()
    ring._shell._device_claims[0].unmapped(1)


# -- what fails ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("failing", ["allocate", "export"])
async def test_a_device_slab_that_cannot_be_made_is_an_error_at_the_start(ends: Ends, failing: str) -> None:
    ends.memory.failing = failing
    with pytest.raises(CudaError, match=f"{failing} failed"):
        await ends.serve()
    assert (ends.memory.memory, ends.cuda.registered) == ({}, {})
    ends.memory.failing = ""
    await ends.serve()  # the name and the memory are free again


@pytest.mark.one_loop
async def test_without_cuda_a_device_slab_is_an_error_at_the_start(ends: Ends) -> None:
    ends.cuda.reason = "torch finds no CUDA device"
    with pytest.raises(CudaError, match="no device slab here: torch finds no CUDA device"):
        await ends.serve()


@pytest.mark.one_loop
async def test_a_ring_that_never_came_to_be_frees_its_device_slab(ends: Ends) -> None:
    with pytest.raises(TypeError):
        await ends.serve(dict[list[int], 5])
    assert (ends.memory.memory, ends.cuda.registered) == ({}, {})
    ends.cuda.fail("host_register")
    with pytest.raises(CudaError, match="can't be pinned"):
        await ends.serve(pin="on")
    assert (ends.memory.memory, ends.cuda.registered) == ({}, {})


@pytest.mark.one_loop
async def test_the_slab_is_on_the_device_that_was_asked_for(ends: Ends) -> None:
    ring = await ends.serve(device_slab_device="cuda:2")
    assert ring._shell._device_claims[0].handle.uuid == "GPU-c"
    assert ends.cuda.devices == {0, 2}, "0 is of the streams that this test has made"
    with pytest.raises(ValueError, match="device_slab_device must be"):
        RingConfig(device_slab_device="cpu")


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("failing", ["current_stream", "cuEventCreate", "cuEventRecord", "cuIpcGetEventHandle"])
async def test_a_call_that_fails_at_the_producer_leaves_the_books_balanced(
    ends: Ends, ring: Ring, client: Client, failing: str
) -> None:
    await map_slab(client)
    ends.cuda.fail(failing)
    with pytest.raises(CudaError, match=f"{failing} failed"):
        await handed_over(ends, client)
    await eventually(lambda: used(client) == 0)
    assert client.statistics().in_flight == 0
    submission = await handed_over(ends, client)
    with await ring.claim() as claim:
        await claim.reply(claim.payload.unique().tolist())
    assert await submission.result() == [7]
    await eventually(lambda: used(ring) == used(client) == 0)


async def test_a_fence_that_fails_without_waiting_gives_the_copy_back_too(ends: Ends, ring: Ring, client: Client) -> None:
    async with client.slot(100, device="cuda") as slot:
        ends.cuda.computing().held = True
        ends.cuda.fail("cuEventRecord")
        with pytest.raises(CudaError):
            client.submit_nowait([slot.tensor((10,), torch.uint8), torch.zeros(4000)])
        ends.cuda.release()
        assert (client.statistics().in_flight, client.statistics().slots_writing) == (0, 1)
        client.submit_nowait([slot.tensor((10,), torch.uint8), torch.zeros(4000)])
        (await ring.claim()).done()


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("failing", ["current_stream", "cuStreamWaitEvent"])
async def test_a_call_that_fails_at_the_claim_fails_the_request_and_nothing_else(
    ends: Ends, ring: Ring, client: Client, failing: str
) -> None:
    submission = await handed_over(ends, client)
    await eventually(lambda: ring.statistics().waiting == 1)
    ends.cuda.fail(failing)
    with pytest.raises(WouldBlock):
        ring.claim_nowait()
    with pytest.raises(RemoteError, match=f"CudaError: {failing} failed"):
        await submission.result()
    await eventually(lambda: used(ring) == used(client) == 0)
    await handed_over(ends, client)
    with await ring.claim() as claim:
        assert claim.payload.unique().tolist() == [7]


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("failing", ["cuEventRecord", "cuEventSynchronize", "cuStreamQuery"])
async def test_a_slot_of_which_nobody_can_say_when_it_is_free_is_kept_and_counted(
    ends: Ends, ring: Ring, client: Client, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    await handed_over(ends, client)
    with await ring.claim():
        ends.cuda.fail(failing)
        ends.consuming.held = True
    await asyncio.sleep(0.001)  # the loop finds it not over
    ends.cuda.release()
    await eventually(lambda: ring.statistics().device_slots_lost == 1)
    await eventually(lambda: "until this process ends" in caplog.text)  # another thread says so
    assert used(ring) == 1
    assert client.statistics().device_slots_lost == 0
    await handed_over(ends, client)
    (await ring.claim()).done()
    await eventually(lambda: used(ring) == 1)
    await client.close()
    await ring.close()
    assert "stays allocated until this process ends: a GPU has not said that it is done with it" in caplog.text
    let_go(ring)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("failing", ["cuEventRecord", "cuEventSynchronize", "cuStreamQuery"])
async def test_a_frontend_keeps_such_a_slot_too(ends: Ends, ring: Ring, client: Client, failing: str) -> None:
    slot = await client.slot(NBYTES, device="cuda")
    ends.cuda.fail(failing)
    ends.cuda.computing().held = True
    slot.close()
    await asyncio.sleep(0.001)  # the loop finds it not over
    ends.cuda.release()
    await eventually(lambda: client.statistics().device_slots_lost == 1)
    assert used(client) == 1
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().device_slab_quarantined_nbytes > 0
    await ring.close()
    [(_, handle)] = ends.memory.opened  # until this process ends
    device_module._mappings.pop(handle)
    device_slots_module._MAPPED_WITH.clear()
    ends.memory.opened.clear()
    let_go(ring)


# -- who lies ------------------------------------------------------------------------------------------------------------


class Liar:
    """A frontend that says what it likes, on the connection of a client that has an honest device lease."""

    def __init__(self, client: Client, lease: Any) -> None:
        session = session_of(client)
        self.session = session
        self.lease = lease

    @classmethod
    async def at(cls, client: Client) -> Liar:
        await map_slab(client)
        session = session_of(client)
        return cls(client, next(iter(session.device_slots.book.leases.values())))

    def submit(self, slots: tuple[SlotRef, ...], fence: bytes, dtype: str = "uint8", nbytes: int = 96) -> None:
        shape = (nbytes // {"uint8": 1, "<f4": 4, "<U1": 4}[dtype],)
        payload = tensor_extension(region=1, nbytes=nbytes, dtype=dtype, shape=shape) if slots else None
        record = submit_of(payload, None, slots, epoch=self.session.welcome.epoch, request_id=1000, fence=fence)
        self.session.link.queue(record)

    def slot(self, **changed: int) -> SlotRef:
        generation = (self.session.welcome.client_id << 40) + 900 + changed.pop("number", 0)
        fields = {"lease_id": self.lease.lease_id, "offset": self.lease.slots.start * 4096, "nbytes": 100}
        return SlotRef(**{**fields, "generation": generation, **changed})


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda liar, fence: liar.submit((liar.slot(),), b""), "without the event of who wrote it"),
        (lambda liar, fence: liar.submit((), fence), "without a slot in device memory"),
        (lambda liar, fence: liar.submit((liar.slot(),), bytes(63)), "can't be opened"),
        (lambda liar, fence: liar.submit((liar.slot(),), bytes(63) + b"\1"), "can't be opened"),
        (lambda liar, fence: liar.submit((liar.slot(offset=(1 << 20) + (1 << 21) - 4096),), fence), "is not inside lease"),
        (lambda liar, fence: liar.submit((liar.slot(offset=1 << 40),), fence), "is not inside lease"),
        (lambda liar, fence: liar.submit((liar.slot(lease_id=(1 << 40) + 1),), fence), "does not hold"),
        (lambda liar, fence: liar.submit((liar.slot(), liar.slot(number=1)), fence), "overlaps a live slot"),
        (lambda liar, fence: liar.submit((liar.slot(generation=1),), fence), "is not a new one"),
        (lambda liar, fence: liar.submit((liar.slot(),), fence, "<U1"), "can't be in device memory"),
        (lambda liar, fence: liar.submit((liar.slot(),), fence, "<f4"), "can't be in device memory"),
    ],
)
async def test_a_forged_submission_ends_its_connection_and_nothing_else(
    ends: Ends, ring: Ring, forge: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = await ends.connect()
    async with honest.slot(NBYTES, device="cuda"):  # its lease is the first one: 1 << 40
        liar = await Liar.at(await ends.connect())
        fence = liar.session.device_slots._fences.record(ends.producing.cuda_stream)
        if reason == "does not hold":
            liar.lease.lease_id = 1 << 40
            forge = lambda liar, fence: liar.submit((liar.slot(),), fence)  # noqa: E731 - the lease of the other one
        forge(liar, fence.handle)
        running = asyncio.create_task(ring.run(lambda claim: asyncio.sleep(0)))
        await eventually(lambda: ring.statistics().protocol_errors == 1)
        assert reason in caplog.text
        assert ring.statistics().clients == 1
        ring._shell._book.check()
        await cancel(running)
    await eventually(lambda: not liar.session.device_slots.is_mapped)  # a thread of this process does it
    ring._shell._frontends[2].died() if 2 in ring._shell._frontends else ring._shell._device_claims[0].unmapped(2)


async def test_a_frontend_cannot_ask_for_memory_that_is_not_there(ends: Ends) -> None:
    ring = await ends.serve(device_slab_nbytes=0)
    client = await ends.connect()
    session_of(client).link.send(LeaseRequest(1, 4096, 0, 1))
    await eventually(lambda: ring.statistics().protocol_errors == 1)


async def test_an_event_without_a_device_slab_is_refused(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ring = await ends.serve(device_slab_nbytes=0)
    client = await ends.connect()
    session = session_of(client)
    session.link.queue(submit_of(None, None, epoch=session.welcome.epoch, request_id=1, fence=bytes(64)))
    await eventually(lambda: ring.statistics().protocol_errors == 1)
    assert "an event came without a slot in device memory" in caplog.text


# -- all of it -----------------------------------------------------------------------------------------------------------


async def test_nothing_is_used_again_before_the_gpu_is_done(ends: Ends) -> None:
    """Producers write to what comes back at once; either GPU lags behind, by streams that are let run at random moments."""
    requests, chance = 150, random.Random(5)
    ring = await ends.serve()
    clients = [await ends.connect() for _ in range(2)]
    wrong: list[int] = []
    stop = threading.Event()
    ends.producing.held = ends.consuming.held = True

    def run_late() -> None:
        while not stop.wait(chance.uniform(0, 0.001)):
            ends.cuda.release(chance.choice((ends.producing, ends.consuming)))
            chance.choice((ends.producing, ends.consuming)).held = True
        ends.cuda.release()

    async def ask(number: int) -> None:
        client, value, nbytes = clients[number % 2], number % 200 + 1, chance.choice((100_000, 200_000))
        async with client.slot(nbytes, device="cuda") as slot:
            tensor = slot.tensor((nbytes,), torch.uint8)
            ends.write(tensor, value)
            submission = await ends.submit(client, {"value": value, "data": tensor})
            del tensor
            await submission.result()

    async def answer(claim: shmring.Claim) -> None:
        value, data = claim.payload["value"], claim.payload["data"]
        address, nbytes = data.data_ptr(), data.nbytes

        def compare() -> None:  # by address, as a kernel does: it keeps nothing alive
            if set(ctypes.string_at(address, nbytes)) != {value}:
                wrong.append(value)
            ctypes.memset(address, 201, nbytes)

        ends.cuda.queue(ends.consuming, compare)
        await claim.reply(None)

    thread = threading.Thread(target=run_late)
    thread.start()
    running = asyncio.create_task(ring.run(answer))
    try:
        async with asyncio.timeout(60):
            for start in range(0, requests, 25):
                await asyncio.gather(*(ask(number) for number in range(start, start + 25)))
    finally:
        stop.set()
        thread.join()
        await cancel(running)
    assert wrong == []
    await eventually(lambda: used(ring) == sum(used(client) for client in clients) == 0)
