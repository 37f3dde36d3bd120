"""``claim.to`` with a real engine and a real client; the GPU is made of host memory. The slab is pinned while the ring lives. A
slot goes back to its frontend when the copy of it is over, and not before, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.config import RingConfig
from shmring.errors import AbortedError, LocalProtocolError
from shmring.gpu import pinned as pinned_module
from shmring.gpu.cuda import CudaError
from shmring.ring.ring import Ring
from shmring.ring.serving import create_shell
from shmring.ring.shell import Shell
from tests.claiming import claimed
from tests.tables import for_each
from tests.waiting import cancel, eventually, settled, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

NBYTES = 20_000


@pytest.fixture
async def serve_on(cuda: Any, socket_dir: Path) -> AsyncIterator[Callable[..., Awaitable[Ring]]]:
    """``await serve_on(**options)``: a small ring on the made-up GPU."""
    rings: list[Ring] = []

    async def start(payload_type: Any = Any, **options: Any) -> Ring:
        settings: dict[str, Any] = {"slab_nbytes": "1MiB", "staging_nbytes": "1MiB", "socket_dir": str(socket_dir)}
        config = RingConfig(**(settings | options))
        ring = Ring(await create_shell(Shell, "test", config, payload_type=payload_type, cuda=cuda))
        rings.append(ring)
        return ring

    yield start
    cuda.release()
    for ring in rings:
        await ring.close()
        ring._shell._book.check()
    gc.collect()
    assert cuda.registered == {}
    assert pinned_module._registered == set()


@pytest.fixture
async def ring(serve_on: Any) -> Ring:
    made: Ring = await serve_on()
    return made


@pytest.fixture
async def client(ring: Ring, connect: Any) -> shmring.Client:
    made: shmring.Client = await connect()
    return made


def tensor(value: int = 1, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


# -- the slab -----------------------------------------------------------------------------------------------------------


async def test_the_slab_is_pinned_while_the_ring_lives(ring: Ring, cuda: Any) -> None:
    statistics = ring.statistics()
    assert statistics.pinned_nbytes == statistics.slab_nbytes == sum(cuda.registered.values())
    assert statistics.pin_seconds > 0
    await ring.close()
    assert cuda.registered == {}, "what is unmapped must be unregistered before, which the GPU checks"
    assert ring.statistics().pinned_nbytes == 0


@pytest.mark.one_loop
async def test_off_is_off(serve_on: Any, cuda: Any) -> None:
    ring = await serve_on(pin="off")
    assert (ring.statistics().pinned_nbytes, ring.statistics().pin_seconds) == (0, 0.0)
    await ring.close()
    assert cuda.calls == {}


@pytest.mark.one_loop
async def test_auto_goes_on_without(serve_on: Any, cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    cuda.fail("host_register", 99)
    ring = await serve_on()
    assert ring.statistics().pinned_nbytes == 0
    assert [record.levelname for record in caplog.records if "not pinned" in record.getMessage()] == ["WARNING"]


@pytest.mark.one_loop
async def test_on_fails_and_leaves_nothing(serve_on: Any, cuda: Any) -> None:
    cuda.fail("host_register")
    with pytest.raises(CudaError, match="can't be pinned"):
        await serve_on(pin="on")
    ring = await serve_on(pin="on")  # the name and the memory are free again
    assert ring.statistics().pinned_nbytes > 0


@pytest.mark.one_loop
async def test_a_ring_that_never_came_to_be_is_unpinned(serve_on: Any, cuda: Any) -> None:
    with pytest.raises(TypeError):
        await serve_on(payload_type=dict[list[int], 5])
    assert cuda.registered == {}
    await serve_on()


async def test_a_cancelled_start_is_unpinned(serve_on: Any, cuda: Any) -> None:
    registering, may_end = threading.Event(), threading.Event()
    register = cuda.host_register

    def slow(*arguments: Any) -> None:
        registering.set()
        assert may_end.wait(10)
        register(*arguments)

    cuda.host_register = slow
    task = asyncio.create_task(serve_on())
    await eventually(registering.is_set)
    assert await cancel(task)
    may_end.set()
    await eventually(lambda: cuda.calls["host_unregister"] == 2 and cuda.registered == {})


@pytest.mark.one_loop
async def test_the_slab_is_pinned_on_the_device_of_the_thread_that_serves(serve_on: Any, cuda: Any) -> None:
    cuda.select(2)
    await serve_on()
    assert cuda.devices == {2}


@for_each("options", [{"pin": "maybe"}, {"staging_nbytes": 100}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RingConfig(**options)


# -- claims -------------------------------------------------------------------------------------------------------------


async def test_the_payload_comes_back_with_its_tensors_on_the_device(ring: Ring, client: shmring.Client) -> None:
    payload = {"a": [torch.arange(3000, dtype=torch.float32).reshape(30, 100), "text"], "n": np.arange(4.0), "e": tensor(9, 10)}
    async with asyncio.timeout(10):
        submission = await client.submit(payload)
        with await ring.claim() as claim:
            arrived = await claim.to("cuda:0")
            assert claim.released
            with pytest.raises(LocalProtocolError):
                _ = claim.payload
            with pytest.raises(LocalProtocolError):
                await claim.to("cuda:0")
            assert torch.equal(arrived["a"][0], payload["a"][0])
            assert arrived["a"][1] == "text"
            assert torch.equal(arrived["n"], torch.arange(4.0, dtype=torch.float64))
            assert torch.equal(arrived["e"], payload["e"])
            await claim.reply("seen")
    assert await submission.next() == "seen"
    statistics = ring.statistics()
    assert statistics.device_copies == 1
    assert statistics.device_copied_nbytes >= 12_000


@pytest.mark.one_loop
async def test_a_message_without_slots_goes_too(ring: Ring, client: shmring.Client) -> None:
    await client.submit({"small": torch.arange(5), "empty": torch.empty(0, 3)})
    with await ring.claim() as claim:
        arrived = await claim.to("cuda")
    assert arrived["small"].tolist() == [0, 1, 2, 3, 4]
    assert arrived["empty"].shape == (0, 3)


async def test_a_slot_is_its_frontends_again_when_the_copy_is_over_and_not_before(
    ring: Ring, client: shmring.Client, cuda: Any
) -> None:
    cuda.hold_copies = True
    submission = await client.submit(tensor(7))
    with await ring.claim() as claim:
        arrived = await claim.to("cuda")
        await claim.reply("early")
    assert await submission.next() == "early"  # the request has ended, and the slot has not come back
    gc.collect()
    assert ring.statistics().slots_in_use == 1
    assert client.statistics().slots_in_use == 1
    cuda.release()
    await eventually(lambda: ring.statistics().slots_in_use == client.statistics().slots_in_use == 0)
    assert arrived.unique().tolist() == [7]


async def test_views_that_the_caller_keeps_keep_the_slot_as_ever(ring: Ring, client: shmring.Client) -> None:
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        view = claim.payload
        await claim.to("cuda")
    gc.collect()
    assert ring.statistics().slots_draining == 1
    assert view.unique().tolist() == [7]
    del view
    await eventually(lambda: ring.statistics().slots_in_use == 0)


async def test_an_abort_during_the_copy_releases_nothing_early(ring: Ring, client: shmring.Client, cuda: Any) -> None:
    cuda.hold_copies = True
    request = asyncio.create_task(client.request(tensor(7)))
    claim = await ring.claim()
    with claim:
        arrived = await claim.to("cuda")
        request.cancel()
        await eventually(lambda: claim.aborted)
        with pytest.raises(AbortedError):
            await claim.to("cuda")
        assert ring.statistics().slots_in_use == 1
    assert ring.statistics().slots_in_use == 1
    cuda.release()
    await eventually(lambda: ring.statistics().slots_in_use == 0)
    assert arrived.unique().tolist() == [7]


async def test_the_memory_of_a_frontend_that_goes_is_kept_until_the_copy_is_over(
    ring: Ring, client: shmring.Client, cuda: Any
) -> None:
    cuda.hold_copies = True
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        arrived = await claim.to("cuda")
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().departed_clients == 1
    assert ring.statistics().quarantined_nbytes > 0
    cuda.release()
    await settled(ring)
    assert arrived.unique().tolist() == [7]


async def test_closing_waits_for_the_copy_and_only_then_unpins(ring: Ring, client: shmring.Client, cuda: Any) -> None:
    cuda.hold_copies = True
    _, claim = await claimed(ring, client, tensor(7))
    arrived = await claim.to("cuda")
    closing = asyncio.create_task(ring.close())
    await turns()
    assert not closing.done()
    assert cuda.registered
    cuda.release()
    await closing
    assert cuda.registered == {}
    assert arrived.unique().tolist() == [7]


async def test_closing_is_finished_though_it_is_cancelled(ring: Ring, client: shmring.Client, cuda: Any) -> None:
    cuda.hold_copies = True
    _, claim = await claimed(ring, client, tensor(7))
    await claim.to("cuda")
    closing = asyncio.create_task(ring.close())
    await turns()
    closing.cancel()
    await turns()
    assert not closing.done()
    cuda.release()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert cuda.registered == {}


async def test_a_gpu_that_never_answers_leaves_the_slab_pinned(
    serve_on: Any, connect: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.gpu.upload._CLOSE_TIMEOUT_S", 0.05)
    ring = await serve_on()
    client = await connect()
    cuda.hold_copies = True
    _, claim = await claimed(ring, client, tensor(7))
    await claim.to("cuda")
    await client.close()
    await ring.close()
    assert "the slab stays pinned until this process ends" in caplog.text
    assert cuda.registered
    cuda.release()
    ring._shell._host_claims._pinned.close()


async def test_a_failed_copy_leaves_the_claim_as_it_was(ring: Ring, client: shmring.Client, cuda: Any) -> None:
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        cuda.fail("cuMemcpyHtoDAsync_v2")
        with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2 failed: made to fail"):
            await claim.to("cuda")
        assert not claim.released
        assert claim.payload.unique().tolist() == [7]
        with pytest.raises(ValueError, match="no CUDA device"):
            await claim.to("cpu")
        arrived = await claim.to("cuda")
    assert arrived.unique().tolist() == [7]
    await eventually(lambda: gc.collect() >= 0 and ring.statistics().slots_in_use == 0)


async def test_a_claim_that_is_left_while_it_waits_for_staging_copies_nothing(
    ring: Ring, client: shmring.Client, cuda: Any
) -> None:
    _, first = await claimed(ring, client, tensor(7, 500_000))
    held = await first.to("cuda")
    first.done()
    await eventually(lambda: client.statistics().slots_in_use == 0)
    _, second = await claimed(ring, client, tensor(8, 600_000))
    waiting = asyncio.create_task(second.to("cuda"))
    await turns()
    assert not waiting.done()
    second.done()
    copies = cuda.calls["cuMemcpyHtoDAsync_v2"]
    del held
    with pytest.raises(LocalProtocolError) as kept:
        await waiting
    assert cuda.calls["cuMemcpyHtoDAsync_v2"] == copies
    await client.submit(tensor(9, 600_000))
    with await ring.claim() as third:
        await asyncio.wait_for(third.to("cuda"), 2)
    assert kept.value is waiting.exception(), "whose frames do not hold the staging memory"


async def test_the_twin_that_does_not_wait(ring: Ring, client: shmring.Client) -> None:
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        with pytest.raises(shmring.WouldBlock):
            claim.to_nowait("cuda")
        await claim.to("cuda")
    await client.submit(tensor(8))
    with await ring.claim() as claim:
        arrived = claim.to_nowait("cuda")
        assert claim.released
    assert arrived.unique().tolist() == [8]
    await eventually(lambda: ring.statistics().slots_in_use == 0)


@pytest.mark.one_loop
async def test_a_copy_is_no_forgotten_view(serve_on: Any, connect: Any, cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    ring = await serve_on(debug=True)
    client = await connect()
    cuda.hold_copies = True
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        await claim.to("cuda")
    assert "living views" not in caplog.text
    cuda.release()


class Typed(msgspec.Struct):
    pixels: torch.Tensor


@pytest.mark.one_loop
async def test_typed_payloads_are_typed(serve_on: Any, connect: Any) -> None:
    ring = await serve_on(Typed)
    client = await connect()
    for pixels in (tensor(3), np.full(NBYTES, 3, np.uint8)):
        await client.submit({"pixels": pixels})
        with await ring.claim() as claim:
            arrived = await claim.to("cuda")
        assert isinstance(arrived, Typed)
        assert arrived.pixels.unique().tolist() == [3]


async def test_no_slot_is_reused_before_its_copy(serve_on: Any, connect: Any, cuda: Any) -> None:
    """Frontends write to a slot as soon as it comes back. Copies end late: the GPU runs only at random moments."""
    requests, random_delays = 200, random.Random(5)
    ring = await serve_on()
    clients = [await connect() for _ in range(2)]
    await clients[0].submit(tensor(0))
    with await ring.claim() as claim:
        await claim.to("cuda")
    (copies,) = (stream for stream in cuda.streams if stream is not cuda.computing())
    copies.held = True
    computing = cuda.computing()
    wrong: list[int] = []
    stop = threading.Event()

    def run_late() -> None:
        while not stop.wait(random_delays.uniform(0, 0.001)):
            computing.held = random_delays.random() < 0.5  # while it is not held, small copies go on this stream
            cuda.advance(copies)
            cuda.run()
        cuda.release()

    async def ask(number: int) -> None:
        value = number % 200
        await clients[number % 2].request({"value": value, "data": tensor(value, random_delays.choice((15_000, 30_000)))})

    async def answer(claim: shmring.Claim) -> None:
        arrived = await claim.to("cuda")
        await claim.reply(None)
        event = cuda.record(cuda.computing())  # behind the copy, as the consumer's own work would be
        await asyncio.to_thread(event.reached.wait, 10)
        if arrived["data"].unique().tolist() != [arrived["value"]]:
            wrong.append(arrived["value"])

    thread = threading.Thread(target=run_late)
    thread.start()
    running = asyncio.create_task(ring.run(answer))
    try:
        async with asyncio.timeout(60):
            for start in range(0, requests, 50):
                await asyncio.gather(*(ask(number) for number in range(start, start + 50)))
    finally:
        stop.set()
        thread.join()
        await cancel(running)
    assert wrong == []
    assert ring.statistics().device_copies == requests + 1


@pytest.mark.one_loop
async def test_a_torch_without_cuda_says_so(serve: Any, connect: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    ring = await serve()
    client = await connect()
    await client.submit(tensor(7))
    with await ring.claim() as claim:
        with pytest.raises(CudaError, match="nothing can be copied to GPU 0: "):
            await claim.to("cuda")
        assert claim.payload.unique().tolist() == [7]
