"""Requests of the engine's own process: in the ring's line, with its order, bounds, aborts, errors and statistics."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.core.compiled import MAX_VALUES
from shmring.memory.bundles import Bundle, bundle
from shmring.ring.injecting import Injected
from tests.waiting import cancel

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

MIB = 1 << 20


def bundled(payload: object) -> Bundle:
    return bundle(payload, max_tensors=16, max_payload_nbytes=MIB, max_values=MAX_VALUES)


async def opened(request: Injected) -> list[Any]:
    """All replies of a request."""
    replies: list[Any] = []
    while more := await request.read():
        replies += [reply.open() for reply in more]
    return replies


@pytest.fixture
async def ring(socket_dir: Path) -> AsyncIterator[shmring.Ring]:
    async with shmring.serve(
        "vision", slab_nbytes="4MiB", socket_dir=str(socket_dir), max_inflight=3, max_tensors=16, max_values=100_000
    ) as ring:
        yield ring


async def test_who_was_woken_for_a_request_of_an_engine_that_drains_claims_nothing(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        claiming = asyncio.ensure_future(ring.claim())
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(ring.drain())
        injector.inject(bundled(1))  # it wakes the task, which runs after the other one
        with pytest.raises(shmring.ClosedError, match="draining"):
            await claiming
        assert await draining
        assert ring.statistics().waiting == 1


@pytest.mark.one_loop
async def test_tensors_are_viewed_where_they_lie_and_replies_are_copies(ring: shmring.Ring) -> None:
    pixels, ids, halves = torch.arange(100_000.0), np.arange(5), torch.ones(3, dtype=torch.bfloat16)
    with ring.injector("another transport") as injector:
        request = injector.inject(bundled({"pixels": pixels, "ids": ids, "halves": halves, "none": torch.empty(0, 2)}))
        with await ring.claim() as claim:
            payload = claim.payload
            assert payload["pixels"].data_ptr() == pixels.data_ptr()
            assert payload["ids"].ctypes.data == ids.ctypes.data
            assert not payload["ids"].flags.writeable
            assert payload["halves"].dtype is torch.bfloat16
            assert payload["none"].shape == (0, 2)
            reply = torch.ones(30_000)
            await claim.reply({"sum": payload["pixels"].sum(), "ones": reply})
            reply.zero_()
            await claim.done({"last": claim.name})
        first, last = await opened(request)
    assert first["sum"] == pixels.sum()
    assert torch.equal(first["ones"], torch.ones(30_000))
    assert last == {"last": ""}
    assert ring.statistics().slots_claimed == 0


async def test_they_stand_in_line_with_those_of_clients(ring: shmring.Ring, socket_dir: Path) -> None:
    async with shmring.connect("vision", socket_dir=str(socket_dir)) as client:
        with ring.injector() as injector:
            asked = [await client.submit(0), injector.inject(bundled(1)), await client.submit(2), injector.inject(bundled(3))]
            while ring.statistics().waiting < len(asked):
                await asyncio.sleep(0)
            seen = []
            for _ in asked:
                with await ring.claim() as claim:
                    seen.append(claim.payload)
                    await claim.done(claim.payload)
            # Messages are read when the loop looks; those of this process have come at once.
            assert [number for number in seen if number % 2 == 0] == [0, 2]
            assert [number for number in seen if number % 2 == 1] == [1, 3]
            assert await asked[0].result() == 0
            assert await opened(asked[1]) == [1]
            statistics = ring.statistics()
            assert (statistics.submitted, statistics.finished, statistics.clients) == (4, 4, 2)
            asked[2].abort()
    assert ring.statistics().clients == 0


async def test_what_waits_comes_before_what_a_client_sends_later(ring: shmring.Ring, socket_dir: Path) -> None:
    with ring.injector() as injector:
        request = injector.inject(bundled("first"))
        async with shmring.connect("vision", socket_dir=str(socket_dir)) as client:
            submission = await client.submit("second")
            for expected in ("first", "second"):
                with await ring.claim() as claim:
                    assert claim.payload == expected
                    await claim.done(None)
            assert await opened(request) == [None]
            assert await submission.result() is None


@pytest.mark.one_loop
async def test_too_many_in_flight_would_block(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        requests = [injector.inject(bundled(number)) for number in range(3)]
        with pytest.raises(shmring.WouldBlock, match="max_inflight"):
            injector.inject(bundled(3))
        requests[1].abort()
        requests.append(injector.inject(bundled(4)))
        with ring.injector() as other:
            other.inject(bundled(5)).abort()


async def test_waiting_and_running_requests_are_aborted(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        running, waiting = injector.inject(bundled("running")), injector.inject(bundled("waiting"))
        heard = asyncio.Event()
        with await ring.claim() as claim:
            claim.on_abort(heard.set)
            assert injector.engine_load == (2, 1)
            waiting.abort()
            assert injector.engine_load == (1, 0)
            assert ring.statistics().waiting == 0
            running.abort()
            await heard.wait()
            assert claim.aborted
            with pytest.raises(shmring.AbortedError):
                await claim.reply(1)
        for request in (running, waiting):
            with pytest.raises(shmring.AbortedError):
                await request.read()
        assert ring.statistics().aborted == 2


async def test_closing_an_injector_aborts_its_requests(ring: shmring.Ring) -> None:
    injector = ring.injector()
    running, waiting = injector.inject(bundled(1)), injector.inject(bundled(2))
    claim = await ring.claim()
    injector.close()
    injector.close()
    assert claim.aborted
    claim.release()
    for request in (running, waiting):
        with pytest.raises(shmring.AbortedError):
            await request.read()
        request.abort()
    with pytest.raises(shmring.ClosedError):
        injector.inject(bundled(3))
    statistics = ring.statistics()
    assert (statistics.clients, statistics.departed_clients, statistics.waiting, statistics.running) == (0, 0, 0, 0)


async def test_closing_the_ring_ends_them(socket_dir: Path) -> None:
    async with shmring.serve("vision", slab_nbytes="1MiB", socket_dir=str(socket_dir)) as ring:
        injector = ring.injector()
        request = injector.inject(bundled(1))
        reading = asyncio.ensure_future(request.read())
        await asyncio.sleep(0)
        await ring.close("for a test")
        with pytest.raises(shmring.ClosedError, match="for a test"):
            await reading
        with pytest.raises(shmring.ClosedError):
            injector.inject(bundled(1))
        injector.close()
        with pytest.raises(shmring.ClosedError):
            ring.injector()


async def test_errors_of_handlers_have_their_type_and_text(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        request = injector.inject(bundled(1))
        with pytest.raises(ValueError, match="too dark"), await ring.claim():
            raise ValueError("too dark")
        with pytest.raises(shmring.RemoteError) as caught:
            await request.read()
        assert (caught.value.type_name, caught.value.message) == ("ValueError", "too dark")
        request = injector.inject(bundled(2))
        (await ring.claim()).time_out("2 s are over")
        with pytest.raises(TimeoutError, match="2 s are over"):
            await request.read()
        request = injector.inject(bundled(3))
        with await ring.claim() as claim, pytest.raises(TypeError, match=r"payload\.x"):
            await claim.reply({"x": object()})
        assert await request.read() == []


class Sized(msgspec.Struct):
    pixels: torch.Tensor
    width: int


@pytest.mark.one_loop
async def test_payloads_are_decoded_into_the_rings_type(socket_dir: Path) -> None:
    async with shmring.serve("vision", slab_nbytes="1MiB", socket_dir=str(socket_dir), payload_type=Sized) as ring:
        with ring.injector() as injector:
            wrong = injector.inject(bundled({"pixels": torch.ones(2), "width": "wide"}))
            right = injector.inject(bundled(Sized(torch.ones(2), 7)))
            with await ring.claim() as claim:
                assert claim.payload.width == 7
                await claim.done(claim.payload.pixels)
            [pixels] = await opened(right)
            assert torch.equal(pixels, torch.ones(2))
            with pytest.raises(shmring.RemoteError, match="width", check=lambda error: error.type_name == "ValidationError"):
                await wrong.read()


@pytest.mark.one_loop
async def test_bounds_of_payloads_hold(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        with pytest.raises(shmring.RemoteProtocolError, match="max_tensors"):
            injector.inject(bundle([torch.ones(1)] * 17, max_tensors=17, max_payload_nbytes=MIB, max_values=MAX_VALUES))
        with pytest.raises(shmring.RemoteProtocolError):
            injector.inject(bundle([[]] * 50_000, max_tensors=1, max_payload_nbytes=MIB, max_values=MAX_VALUES))
        with pytest.raises(shmring.RemoteProtocolError):
            injector.inject(Bundle(b"\xc1", ()))
        lost = injector.inject(Bundle(bundled(torch.ones(2)).payload, ()))
        short = injector.inject(Bundle(bundled(torch.ones(2)).payload, (0,), b"1234567"))
        assert injector.connected
        request = injector.inject(bundled("right"))
        with await ring.claim() as claim:
            assert claim.payload == "right"
        assert await request.read() == []
        for wrong in (lost, short):
            with pytest.raises(shmring.RemoteError, match="buffer"):
                await wrong.read()
    assert ring.statistics().protocol_errors == 0


@pytest.mark.one_loop
async def test_costly_payloads_wait_in_their_own_line(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        costly = injector.inject(bundled(list(range(40_000))))
        quick = injector.inject(bundled("quick"))
        seen = []
        for _ in range(2):
            with await ring.claim() as claim:
                seen.append(type(claim.payload))
        assert seen == [str, list]
        assert await costly.read() == await quick.read() == []


async def test_replies_that_nobody_reads_are_bounded(ring: shmring.Ring) -> None:
    limit_nbytes = ring.statistics().reply_nbytes
    part = np.zeros(limit_nbytes // 4, np.uint8)
    with ring.injector() as injector:
        request = injector.inject(bundled(1))
        with await ring.claim() as claim:
            for _ in range(4):
                await claim.reply(part)
            with pytest.raises(shmring.WouldBlock):
                claim.reply_nowait(part)
            replying = asyncio.ensure_future(claim.reply("last"))
            await asyncio.sleep(0)
            assert not replying.done()
            replies = await request.read()
            assert len(replies) == 4
            await replying
            claim.reply_nowait(part)
        assert len(await request.read()) == 2
        assert await request.read() == []


async def test_a_request_that_nobody_reads_keeps_no_other_one_waiting(ring: shmring.Ring) -> None:
    part = np.zeros(ring.statistics().reply_nbytes, np.uint8)
    with ring.injector() as injector:
        unread, read = injector.inject(bundled(1)), injector.inject(bundled(2))
        with await ring.claim() as one, await ring.claim() as other:
            await one.reply(part)
            with pytest.raises(shmring.WouldBlock):
                one.reply_nowait(part)
            await other.reply(part)
            assert len(await read.read()) == 1
        assert len(await unread.read()) == 1


async def test_a_handler_that_waits_to_reply_hears_of_the_abort(ring: shmring.Ring) -> None:
    part = np.zeros(ring.statistics().reply_nbytes, np.uint8)
    with ring.injector() as injector:
        request = injector.inject(bundled(1))
        with await ring.claim() as claim:
            await claim.reply(part)
            replying = asyncio.ensure_future(claim.reply(part))
            await asyncio.sleep(0)
            request.abort()
            with pytest.raises(shmring.AbortedError):
                await replying
        request = injector.inject(bundled(2))
        with await ring.claim() as claim:
            await claim.reply(part)
        assert len(await request.read()) == 1


@pytest.mark.one_loop
async def test_the_memory_of_a_request_is_let_go_when_it_is_released(ring: shmring.Ring) -> None:
    array = np.zeros(1000, np.float32)
    alive = weakref.ref(array)
    with ring.injector() as injector:
        request = injector.inject(bundled(array))
        del array
        with await ring.claim() as claim:
            assert alive() is not None
            view = claim.payload[10:20]
            claim.release()
            gc.collect()
            assert alive() is not None
            del view
            gc.collect()
            assert alive() is None
            await claim.done("still answered")
        assert await opened(request) == ["still answered"]


async def test_run_and_batches_handle_them(ring: shmring.Ring) -> None:
    async def handler(claim: shmring.Claim) -> None:
        await claim.reply(claim.payload + 1)

    running = asyncio.create_task(ring.run(handler, 2))
    with ring.injector() as injector:
        requests = [injector.inject(bundled(number)) for number in range(3)]
        assert [await opened(request) for request in requests] == [[1], [2], [3]]
        await cancel(running)

        async def batch(claims: list[shmring.Claim]) -> list[object]:
            return [len(claims)] * len(claims)

        running = asyncio.create_task(ring.run_batches(batch, 8))
        requests = [injector.inject(bundled(number)) for number in range(3)]
        assert [await opened(request) for request in requests] == [[3], [3], [3]]
        await cancel(running)


@pytest.mark.one_loop
async def test_snapshots_show_them(ring: shmring.Ring) -> None:
    with ring.injector("node 7") as injector:
        requests = [injector.inject(bundled(number), request_id=f"r{number}") for number in range(2)]
        with await ring.claim():
            snapshot = ring.inspect()
            [client] = snapshot.clients
            assert (client.name, client.requests, client.slots, client.leases) == ("node 7", 2, 0, 0)
            assert {(request.name, request.state) for request in snapshot.requests} == {("r0", "running"), ("r1", "waiting")}
        requests[1].abort()


async def test_draining_waits_for_them(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        request = injector.inject(bundled(1))
        claim = await ring.claim()
        draining = asyncio.create_task(ring.drain(claiming=True))
        await asyncio.sleep(0.02)
        assert not draining.done()
        with claim:
            await claim.done(1)
        assert await opened(request) == [1]
        assert await draining


async def test_a_dropped_claim_fails_its_request(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        request = injector.inject(bundled(1))
        claim: shmring.Claim | None = await ring.claim()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del claim
            gc.collect()
            with pytest.raises(shmring.RemoteError, match="without an answer"):
                await request.read()
        assert [warning.category for warning in caught] == [ResourceWarning]


async def test_workers_get_its_tensors(ring: shmring.Ring, socket_dir: Path) -> None:
    async with shmring.join("vision", 0, socket_dir=str(socket_dir)) as worker:
        await ring.wait_workers(1)
        with ring.injector() as injector:
            request = injector.inject(bundled(torch.arange(5.0)))
            with await ring.claim() as claim:
                await claim.share("beside")
            async with asyncio.timeout(30):
                with await worker.receive() as message:
                    assert torch.equal(message.payload, torch.arange(5.0))
                    assert message.beside == "beside"
            assert await request.read() == []


@pytest.mark.one_loop
async def test_copies_to_a_gpu_say_that_there_is_none(ring: shmring.Ring) -> None:
    with ring.injector() as injector:
        request = injector.inject(bundled(torch.ones(2)))
        with await ring.claim() as claim:
            with pytest.raises(ValueError, match="CUDA"):
                await claim.to("cpu")
            with pytest.raises(shmring.WouldBlock):
                claim.to_nowait("cuda")
            assert torch.equal(claim.payload, torch.ones(2))
        assert await request.read() == []
