"""Workers: what an engine hands out arrives in place and in order, and is there until it was left; whoever comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring import Client, Ring, Worker
from shmring.core.compiled import EngineEnd
from shmring.core.messages import PROTOCOL_VERSION, AnswerFailed, AnswerPart, Join, encode_message
from shmring.memory.slab import reserve_for_one_writer
from shmring.transport.endpoint import give_up, handshake_frame
from shmring.transport.listener import socket_path
from shmring.worker.joining import Joined, join_in_time
from tests.claiming import claimed
from tests.garbage import uncollected
from tests.sessions import let_die, session_of
from tests.tables import for_each
from tests.waiting import cancel, eventually, hold, pass_time, turns

OPTIONS: dict[str, Any] = {"broadcast_nbytes": "256KiB", "worker_backlog": 4}

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(60), pytest.mark.ring(**OPTIONS)]


@pytest.fixture
async def workers(serve: Any) -> AsyncIterator[list[Worker]]:
    """Those that ``join`` has made; closed before the rings are."""
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        await worker.close()


@pytest.fixture
def join(workers: list[Worker], socket_dir: Path) -> Callable[..., Awaitable[Worker]]:
    """``await join(rank, name="test", **options)``: a worker in this process."""

    async def open_worker(rank: int = 0, name: str = "test", **options: Any) -> Worker:
        worker = await shmring.join(name, rank, **({"socket_dir": str(socket_dir)} | options))
        workers.append(worker)
        return worker

    return open_worker


@pytest.fixture
def reserving(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The memory of broadcasts is being reserved when the first is set, and is not there until the second is."""

    def reserve(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(30)
        return reserve_for_one_writer(*arguments, **options)

    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr("shmring.ring.workers.reserve_for_one_writer", reserve)
    return begun, goes_on


@pytest.fixture
async def ring(ring: Ring, clients: list[Client], workers: list[Worker], request: pytest.FixtureRequest) -> AsyncIterator[Ring]:
    """What its workers and clients had comes back when they have gone; of one that broke the rules, when its process ends."""
    yield ring
    for end in [*workers, *clients]:
        await end.close()
    if not ring._shell.life.home.is_closed and "joined" not in request.fixturenames:
        await eventually(lambda: is_whole(ring))


@pytest.fixture
async def worker(ring: Ring, join: Any) -> Worker:
    """The ring's worker of rank 0."""
    return await join()


def fill(ring: Ring, to: Any = None) -> None:
    """As many messages as a worker may have: what comes next waits."""
    for number in range(4):
        ring.broadcast_nowait(number, to=to)


async def read(worker: Worker) -> Any:
    """The payload of a worker's next message, which is left."""
    with await asyncio.wait_for(worker.receive(), 20) as message:
        return message.payload


async def leave(worker: Worker, count: int = 1) -> None:
    for _ in range(count):
        (await worker.receive()).leave()


def outstanding(ring: Ring) -> int:
    return ring.statistics().broadcasts_outstanding


def is_whole(ring: Ring) -> bool:
    now = ring.statistics()
    ring._shell.workers.book.check()
    return not now.broadcasts_outstanding and now.broadcast_free_nbytes == now.broadcast_nbytes and not now.slots_in_use


# -- what arrives ------------------------------------------------------------------------------------------------------------

TENSORS = [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    torch.arange(40_000, dtype=torch.float32).reshape(100, 400)[::2, ::3],
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.zeros(0, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.ones(70_000, dtype=torch.bool),
]


@for_each("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
async def test_a_tensor_arrives(ring: Ring, worker: Worker, tensor: torch.Tensor) -> None:
    assert await ring.broadcast({"t": tensor, "n": [1, None, "x"]}) == (0,)
    with await worker.receive() as message:
        got = message.payload["t"]
        assert (got.dtype, got.shape, message.payload["n"]) == (tensor.dtype, tensor.shape, [1, None, "x"])
        assert (
            torch.equal(got.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
            if got.dim()
            else got == tensor
        )
        assert message.beside is None


@pytest.mark.one_loop
async def test_arrays_arrive_and_numpy_may_not_write_to_them(ring: Ring, worker: Worker) -> None:
    await ring.broadcast(np.arange(30_000, dtype=">i4"))
    with await worker.receive() as message:
        assert np.array_equal(message.payload, np.arange(30_000))
        with pytest.raises(ValueError, match="read-only"):
            message.payload[0] = 1


@pytest.mark.one_loop
async def test_a_payload_that_is_too_long_for_a_message_lies_in_memory(ring: Ring, worker: Worker) -> None:
    await ring.broadcast({"text": "x" * 100_000, "t": torch.arange(2000)})
    with await worker.receive() as message:
        assert message.payload["text"] == "x" * 100_000
        assert message.payload["t"].sum() == 1999 * 1000


class Step(msgspec.Struct):
    number: int
    tensor: torch.Tensor


async def test_a_payload_is_decoded_into_a_type_or_fails_alone(ring: Ring, join: Any) -> None:
    worker = await join(payload_type=Step)
    await ring.broadcast({"number": 1, "tensor": torch.ones(3000)})
    step = await read(worker)
    assert (step.number, step.tensor.sum()) == (1, 3000)
    gathering = asyncio.ensure_future(ring.gather({"number": "two"}))
    with pytest.raises(msgspec.ValidationError):
        await worker.receive()
    with pytest.raises(shmring.WorkerFailedError, match="worker 0: ValidationError", check=lambda error: error.rank == 0):
        await gathering


@pytest.mark.one_loop
async def test_what_can_not_be_sent_says_why_and_holds_nothing(ring: Ring, worker: Worker) -> None:
    with pytest.raises(TypeError, match=r"payload\.f can't be sent"):
        await ring.broadcast({"f": object()})
    with pytest.raises(shmring.CapacityError, match="broadcast_nbytes"):
        await ring.broadcast(torch.zeros(300_000, dtype=torch.uint8))
    assert is_whole(ring)


@pytest.mark.ring(worker_backlog=64, COPY_OFFLOAD_NBYTES=16 << 10)
async def test_the_order_is_the_same_for_all_and_that_of_the_calls(ring: Ring, join: Any) -> None:
    """Large copies are made on threads, and nobody overtakes them."""
    workers = [await join(rank) for rank in range(3)]
    sends = [ring.broadcast({"n": n, "t": torch.full((30_000 * (n % 3) + 1,), n % 251, dtype=torch.uint8)}) for n in range(40)]
    sending = [asyncio.ensure_future(send) for send in sends]
    for number in range(40):
        for worker in workers:
            payload = await read(worker)
            assert (payload["n"], int(payload["t"][-1])) == (number, number % 251)
    await asyncio.gather(*sending)


@pytest.mark.ring(COPY_OFFLOAD_NBYTES=16 << 10)
async def test_who_waits_for_memory_is_woken_though_another_message_took_it_meanwhile(ring: Ring, join: Any) -> None:
    """A sender asks workers about the messages that they have, and the one that takes the memory before it is being copied."""
    one, other = [await join(rank) for rank in (0, 1)]
    most = torch.ones(200_000, dtype=torch.uint8)
    await ring.broadcast(most, to=[0])
    waiting = [asyncio.ensure_future(ring.broadcast(most, to=[rank])) for rank in (0, 1)]
    await asyncio.wait_for(asyncio.gather(leave(one, 2), leave(other)), 60)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [(0,), (1,)]


@pytest.mark.both_loops
@pytest.mark.ring(worker_backlog=1)
async def test_a_worker_that_reads_nothing_holds_up_no_message_to_others(ring: Ring, join: Any) -> None:
    """A message waits for the workers that it goes to, and for earlier messages to these."""
    silent, other = [await join(rank) for rank in (0, 1)]
    await ring.broadcast("unread", to=[0])
    to_silent = asyncio.ensure_future(ring.broadcast("first", to=[0]))
    await eventually(lambda: ring._shell.workers._changes.is_waited_in)
    assert await ring.broadcast("other's", to=[1]) == (1,)
    assert await read(other) == "other's"
    assert ring.broadcast_nowait("without waiting", to=[1]) == (1,)
    with pytest.raises(shmring.WouldBlock):
        ring.broadcast_nowait("behind the first", to=[0])
    assert await read(other) == "without waiting"
    to_both = asyncio.ensure_future(ring.broadcast("second"))
    to_other = asyncio.ensure_future(ring.broadcast("third", to=[1]))
    await eventually(lambda: len(ring._shell.workers._line) == 2)
    with pytest.raises(shmring.WouldBlock):
        ring.broadcast_nowait("behind the second", to=[1])
    to_both.cancel()  # which lets the third go on
    assert await to_other == (1,)
    assert await read(other) == "third"
    assert not to_silent.done()
    for expected in ("unread", "first"):
        assert await read(silent) == expected
    assert await to_silent == (0,)
    await asyncio.wait([to_both])
    await eventually(lambda: not ring._shell.workers.end.is_crowded)
    assert await ring.broadcast("all") == (0, 1)


async def test_a_message_goes_to_some(ring: Ring, join: Any) -> None:
    workers = [await join(rank) for rank in (5, 0, 2)]
    assert ring.ranks == (0, 2, 5)
    assert await ring.broadcast(1, to=[2, 0]) == (0, 2)
    assert await ring.broadcast(2) == (0, 2, 5)
    assert await read(workers[0]) == 2
    with pytest.raises(shmring.WorkerLostError, match="no worker of rank 1", check=lambda error: error.ranks == (1,)):
        await ring.broadcast(3, to=[0, 1])
    for worker in workers[1:]:
        for expected in (1, 2):
            assert await read(worker) == expected
        with pytest.raises(shmring.WouldBlock):
            worker.receive_nowait()


async def test_memory_that_is_reserved_while_the_ring_closes_goes_at_once(ring: Ring, join: Any, reserving: Any) -> None:
    def files() -> list[str]:
        """Of broadcasts: those that are open or mapped."""
        opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry)]
        lines = [*opened, *Path("/proc/self/maps").read_text().splitlines()]
        return [line for line in lines if "test-broadcasts" in line]

    begun, goes_on = reserving
    joining = asyncio.ensure_future(join())
    await eventually(begun.is_set)
    await ring.close()
    assert await cancel(joining)
    goes_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await eventually(lambda: not files())


async def test_who_joins_in_the_turn_in_which_memory_for_broadcasts_is_there_finds_it(ring: Ring) -> None:
    """The future is done then, and whoever waits for it has not been called yet."""
    workers = ring._shell.workers
    reserving = asyncio.get_running_loop().create_future()
    reserving.add_done_callback(workers._reserved)
    workers._reserving = reserving
    reserving.set_result(reserve_for_one_writer("test-broadcasts", 1 << 20, prefault=False))
    await workers._reserve()
    assert workers._memory is not None


async def test_who_joins_late_begins_with_the_next_message(ring: Ring, join: Any) -> None:
    first = await join(0)
    await ring.broadcast("before")
    second = await join(1)
    await ring.broadcast("after")
    assert await read(second) == "after"
    for expected in ("before", "after"):
        assert await read(first) == expected


async def test_without_workers_a_message_goes_to_nobody(ring: Ring) -> None:
    assert await ring.broadcast(torch.zeros(100_000)) == ()
    assert ring.broadcast_nowait(1) == ()
    assert await ring.gather(1) == []
    with pytest.raises(TimeoutError, match="for 1 workers"):
        await ring.wait_workers(1, timeout=0.01)


# -- what is kept, and until when ---------------------------------------------------------------------------------------------


async def test_a_message_is_kept_until_it_was_left_and_its_last_view_has_died(ring: Ring, worker: Worker) -> None:
    await ring.broadcast(torch.full((50_000,), 7, dtype=torch.uint8))
    message = await worker.receive()
    assert outstanding(ring) == 1
    with message:
        part = message.payload[10_000:20_000].view(100, 100)
    assert outstanding(ring) == 1
    with pytest.raises(shmring.LocalProtocolError, match="was left"):
        _ = message.payload
    for _ in range(6):
        await ring.broadcast(torch.zeros(40_000, dtype=torch.uint8))
        await leave(worker)
    assert part.eq(7).all()
    dying = threading.Thread(target=lambda part: None, args=(part,))
    del part
    dying.start()
    dying.join()
    del dying


async def test_a_view_that_is_kept_holds_up_no_later_message(ring: Ring, worker: Worker) -> None:
    """Far more messages follow than may be outstanding."""
    await ring.broadcast({"weights": torch.full((50_000,), 3, dtype=torch.uint8)})
    with await worker.receive() as message:
        weights = message.payload["weights"]
    for number in range(600):
        await ring.broadcast({"n": number, "t": torch.zeros(30_000, dtype=torch.uint8)}, timeout=5)
        assert (await read(worker))["n"] == number
    assert weights.eq(3).all()
    assert outstanding(ring) == 1


async def test_a_claim_is_shared_in_place_and_its_slot_waits_for_the_last_worker(ring: Ring, connect: Any, join: Any) -> None:
    workers, client = [await join(rank) for rank in range(2)], await connect()
    submission = await client.submit({"x": torch.full((100_000,), 9, dtype=torch.uint8), "small": torch.arange(3)})
    with await ring.claim() as claim:
        assert await claim.share({"ids": [1, 2]}) == (0, 1)
        await claim.reply("done")
    assert await submission.result() == "done"
    statistics = ring.statistics()
    assert (statistics.broadcast_in_place_nbytes, statistics.broadcast_copied_nbytes) == (100_000 + 24, 0)
    messages = [await worker.receive() for worker in workers]
    for message in messages:
        assert message.beside == {"ids": [1, 2]}
        assert message.payload["x"].eq(9).all()
        assert message.payload["small"].tolist() == [0, 1, 2]
    assert ring.statistics().slots_draining == 1
    messages[0].leave()
    assert ring.statistics().slots_draining == 1
    messages[1].leave()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["in order", "the last first"])
async def test_slots_of_claims_go_back_one_by_one_though_nobody_here_waits_for_them(
    ring: Ring, worker: Worker, client: Client, order: tuple[int, ...]
) -> None:
    """A worker rings once for what it was asked; the engine, which does nothing else, asks anew for what is left."""
    messages = []
    for value in order:
        submission = await client.submit(torch.full((40_000,), value, dtype=torch.uint8))
        with await ring.claim() as claim:
            await claim.share()
            await claim.reply(None)
        await submission.result()
        messages.append(await worker.receive())
    for slots_left, place in zip((2, 1, 0), order, strict=True):
        await eventually(lambda: ring._shell.workers._looking is None)  # it has asked
        messages[place].leave()
        await eventually(lambda expected=slots_left: client.statistics().slots_in_use == expected)


async def test_tensors_of_claims_are_sent_in_place_beside_others(ring: Ring, worker: Worker, client: Client) -> None:
    for value in (1, 2):
        await client.submit({"x": torch.full((40_000,), value, dtype=torch.uint8)})
    with await ring.claim() as first, await ring.claim() as second:
        mixed = {"b": second.payload["x"], "own": torch.full((30_000,), 3, dtype=torch.uint8), "a": first.payload["x"][100:]}
        await ring.broadcast(mixed)
        await ring.broadcast(first.payload["x"])
        del mixed
    statistics = ring.statistics()
    assert statistics.broadcast_in_place_nbytes == 2 * 40_000 - 100 + 40_000
    assert statistics.broadcast_copied_nbytes == 30_000
    assert statistics.slots_draining == 2
    with await worker.receive() as message:
        assert [int(message.payload[name].float().mean()) for name in ("a", "b", "own")] == [1, 2, 3]
        assert message.payload["a"].shape == (39_900,)
    await leave(worker)


@pytest.mark.one_loop
async def test_a_message_looks_through_the_claims_once_however_many_tensors_of_theirs_it_has(
    serve: Any, connect: Any, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(EngineEnd):
        looks = 0

        @property
        def claims(self) -> dict[tuple[int, int], Any]:
            Watched.looks += 1
            return super().claims

    monkeypatch.setattr("shmring.ring.shell.EngineEnd", Watched)
    ring = await serve(**OPTIONS)
    worker, client = await join(), await connect()
    for value in (1, 2, 3):
        await client.submit(torch.full((40_000,), value, dtype=torch.uint8))
    with await ring.claim() as first, await ring.claim() as second, await ring.claim() as third:
        await ring.broadcast([first.payload, second.payload, third.payload] * 2)
        assert Watched.looks == 1
        await ring.broadcast([second.payload[1:], torch.zeros(10_000)])  # which asks anew: claims come and go
        assert Watched.looks == 2
    assert ring.statistics().broadcast_in_place_nbytes == 6 * 40_000 + 39_999
    with await worker.receive() as message:
        assert [int(tensor[-1]) for tensor in message.payload] == [1, 2, 3] * 2
    await leave(worker)


async def test_a_claim_that_was_shared_and_is_dropped_fails_its_request(
    ring: Ring, worker: Worker, client: Client, dropped: Any
) -> None:
    submission = await client.submit({"x": torch.zeros(20_000)})
    with dropped("request 1 was dropped before its claim was left"):
        claim = await ring.claim()
        await claim.share()
        del claim
        gc.collect()
        with pytest.raises(shmring.RemoteError, match="dropped the request without an answer"):
            await asyncio.wait_for(submission.result(), 10)
    await leave(worker)


@pytest.mark.one_loop
async def test_a_released_claim_can_not_be_shared_and_its_views_are_copied(ring: Ring, worker: Worker, client: Client) -> None:
    await client.submit(torch.full((40_000,), 5, dtype=torch.uint8))
    with await ring.claim() as claim:
        view = claim.payload
        claim.release()
        with pytest.raises(shmring.LocalProtocolError, match="was released"):
            await claim.share()
        await ring.broadcast(view)
    assert ring.statistics().broadcast_copied_nbytes == 40_000
    assert (await read(worker)).eq(5).all()
    del view


async def test_a_claim_whose_frontend_gave_it_up_is_shared_in_place_as_well(ring: Ring, worker: Worker, client: Client) -> None:
    """It is in hand, and its slot stays: what fits no memory of broadcasts must not fail a handler because somebody hung up."""
    asking = asyncio.ensure_future(client.request(torch.full((400_000,), 5, dtype=torch.uint8)))
    with await ring.claim() as claim:
        asking.cancel()
        await eventually(lambda: claim.aborted)
        assert await claim.share("beside") == (0,)
    assert (await read(worker)).eq(5).all()
    statistics = ring.statistics()
    assert (statistics.broadcast_in_place_nbytes, statistics.broadcast_copied_nbytes) == (400_000, 0)


async def test_a_frontend_that_dies_while_workers_read_takes_nothing_from_them(
    ring: Ring, worker: Worker, client: Client
) -> None:
    _, claim = await claimed(ring, client, torch.full((40_000,), 5, dtype=torch.uint8))
    await claim.share()
    session_of(client).link.abort()
    await eventually(lambda: claim.aborted)
    claim.release()
    with await worker.receive() as message:
        assert message.payload.eq(5).all()
        assert ring.statistics().quarantined_nbytes
    del message
    await eventually(lambda: is_whole(ring))
    let_die(ring)


async def test_a_message_that_is_dropped_comes_back_with_a_warning(ring: Ring, worker: Worker, dropped: Any) -> None:
    gathering = asyncio.ensure_future(ring.gather(torch.zeros(50_000)))
    with dropped("message 1 was dropped before it was left"):
        await worker.receive()
        gc.collect()
        with pytest.raises(shmring.WorkerFailedError, match="dropped the message without a reply"):
            await gathering


# -- whoever is behind -------------------------------------------------------------------------------------------------------


async def test_who_is_behind_holds_up_others_at_the_bound_and_is_named(ring: Ring, join: Any) -> None:
    workers = [await join(rank) for rank in range(3)]
    for number in range(4):
        assert ring.broadcast_nowait(number) == (0, 1, 2)
        for worker in (workers[0], workers[2]):
            assert await read(worker) == number
    with pytest.raises(shmring.WouldBlock):
        ring.broadcast_nowait(4)
    for send in (ring.broadcast, ring.gather):
        with pytest.raises(shmring.WorkersBehindError, match=r"workers 1 to leave messages.*nothing was sent") as caught:
            await send(4, timeout=0.02)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.ranks, caught.value.sent) == ((1,), False)
    assert ring.statistics().gathers == 0
    assert ring.broadcast_nowait("others", to=[0, 2]) == (0, 2)
    laggard = ring.statistics().workers[1]
    assert (laggard.rank, laggard.unacknowledged, laggard.is_member) == (1, 4, True)
    waiting = asyncio.ensure_future(ring.broadcast(5))
    await asyncio.sleep(0)
    for number in range(4):
        assert await read(workers[1]) == number
    assert await asyncio.wait_for(waiting, 5) == (0, 1, 2)
    await eventually(lambda: ring.statistics().workers[1].unacknowledged == 1)


async def test_memory_that_is_read_is_waited_for(ring: Ring, join: Any) -> None:
    worker = await join(3)
    for _ in range(2):
        await ring.broadcast(torch.zeros(100_000, dtype=torch.uint8))
    with pytest.raises(shmring.WorkersBehindError, match="workers 3", check=lambda error: error.ranks == (3,)):
        await ring.broadcast(torch.zeros(100_000, dtype=torch.uint8), timeout=0.02)
    waiting = asyncio.ensure_future(ring.broadcast(torch.ones(100_000, dtype=torch.uint8)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(ring.broadcast("small"))
    await leave(worker)
    assert await asyncio.wait_for(waiting, 5) == (3,)
    await second
    await leave(worker)
    assert (await read(worker)).eq(1).all()
    assert await read(worker) == "small"


@pytest.mark.ring(message_ring_nbytes="16KiB", worker_backlog=128)
async def test_a_full_ring_is_waited_for(ring: Ring, worker: Worker) -> None:
    go_on = hold(worker._connection._link)
    sent = 0
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            ring.broadcast_nowait({"n": sent, "text": "x" * 2000})
            sent += 1
    assert 2 < sent < 20
    with pytest.raises(shmring.WorkersBehindError, check=lambda error: error.ranks == (0,)):
        await ring.broadcast("x" * 2000, timeout=0.02)
    waiting = asyncio.ensure_future(ring.broadcast({"n": sent}))
    await asyncio.sleep(0)
    go_on()
    for number in range(sent + 1):
        assert (await read(worker))["n"] == number
    await waiting


@for_each("nbytes", [0, 100_000])
async def test_cancelling_leaves_the_book_right_and_passes_the_turn_on(ring: Ring, worker: Worker, nbytes: int) -> None:
    content = torch.zeros(nbytes, dtype=torch.uint8)
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            ring.broadcast_nowait({"t": content})
    first, second, third = (asyncio.ensure_future(ring.broadcast({"n": n, "t": content})) for n in range(3))
    gathering = asyncio.ensure_future(ring.gather({"t": content}))
    await asyncio.sleep(0)
    for task in (second, first, gathering):
        task.cancel()
    await asyncio.sleep(0)
    await leave(worker, outstanding(ring))
    await third
    assert (await read(worker))["n"] == 2
    await asyncio.wait([first, second, gathering])
    assert [task.cancelled() for task in (first, second, gathering)] == [True] * 3
    assert not ring._shell.workers.end.gathers


@for_each("turns_between", [0, 1])
async def test_a_turn_that_came_as_its_sender_was_cancelled_goes_to_the_next(
    ring: Ring, worker: Worker, turns_between: int
) -> None:
    """The first passes its turn on, and in the same turn of the loop takes the second out of the line before that runs."""
    fill(ring)
    calls = [asyncio.ensure_future(ring.broadcast(number)) for number in range(3)]
    await turns(1)
    calls[0].cancel()
    await turns(turns_between)
    calls[1].cancel()
    await asyncio.wait(calls[:2])
    assert [call.cancelled() for call in calls[:2]] == [True, True]
    await leave(worker, 4)
    assert await asyncio.wait_for(calls[2], 60) == (0,)
    await leave(worker)


async def test_who_sends_to_others_stands_in_line_behind_who_sends_to_all(ring: Ring, join: Any) -> None:
    """Or that message would come to some before and to others behind it. Who leaves the line is in nobody's way."""
    slow, quick = await join(1), await join(2)
    fill(ring, to=[1])
    to_slow, to_all, to_quick = (
        asyncio.ensure_future(ring.broadcast(text, to=to)) for text, to in (("s", [1]), ("a", None), ("q", [2]))
    )
    await turns()
    assert not to_quick.done()
    to_all.cancel()
    assert await asyncio.wait_for(to_quick, 60) == (2,)
    assert not to_slow.done()
    assert await read(quick) == "q"
    await leave(slow, 5)
    await to_slow


async def test_who_comes_right_after_a_cancelled_sender_is_sent(ring: Ring, worker: Worker) -> None:
    """Between the one that passes its turn on and the one that was cancelled in line, and has not run yet."""
    fill(ring)
    gate = asyncio.get_running_loop().create_future()

    async def come_later() -> tuple[int, ...]:
        await gate
        return await ring.broadcast("late", timeout=20)

    sending, waiting = (asyncio.ensure_future(ring.broadcast(number)) for number in range(2))
    late = asyncio.create_task(come_later())
    await asyncio.sleep(0)
    sending.cancel()
    gate.set_result(None)
    waiting.cancel()
    await asyncio.gather(sending, waiting, return_exceptions=True)
    await leave(worker, 4)
    assert await late == (0,)
    await leave(worker)


@pytest.mark.ring(COPY_OFFLOAD_NBYTES=4 << 10)
async def test_a_broadcast_whose_time_is_over_while_it_is_copied_keeps_no_tensor(ring: Ring, worker: Worker) -> None:
    """The frames of its copy, to which its error refers, would keep it until rubbish is collected."""
    copying = threading.Event()
    busy = [asyncio.create_task(ring._shell._copier.run(copying.wait)) for _ in range(2)]  # all threads that there are
    x = torch.ones(10_000)
    is_there = weakref.ref(x)
    sending = asyncio.ensure_future(ring.broadcast({"x": x}, timeout=0.01))
    del x
    await eventually(sending.cancelling)  # its time is over, and it waits for its copy to end
    with uncollected():
        copying.set()
        await asyncio.wait([sending, *busy])
        assert isinstance(sending.exception(), shmring.WorkersBehindError)
        assert is_there() is None
    await eventually(lambda: is_whole(ring))
    ring.broadcast_nowait("next")
    assert await read(worker) == "next"


async def test_a_share_whose_time_is_over_keeps_no_view_of_its_claim(ring: Ring, worker: Worker, client: Client) -> None:
    """Its error refers to frames that refer to it: what they hold would be kept until rubbish is collected."""
    fill(ring)

    async def handle(claim: shmring.Claim) -> None:
        sharing = asyncio.ensure_future(claim.share(timeout=0.01))  # a task keeps its error, which keeps the task
        await asyncio.wait([sharing])
        assert isinstance(sharing.exception(), shmring.WorkersBehindError)
        await claim.reply("nobody had time")

    running = asyncio.create_task(ring.run(handle))
    with uncollected():
        assert await client.request({"x": torch.ones(40_000)}) == "nobody had time"
        await eventually(lambda: not ring.statistics().slots_draining)
    await leave(worker, 4)
    await ring.close()
    await running


async def test_who_has_memory_and_waits_for_place_is_told_whom_it_waits_for(ring: Ring, join: Any) -> None:
    """The message that keeps the oldest memory is another worker's, who holds nobody up."""
    workers = [await join(rank) for rank in range(2)]
    ring.broadcast_nowait(torch.zeros(10_000), to=[1])
    fill(ring, to=[0])
    with pytest.raises(shmring.WorkersBehindError, check=lambda error: error.ranks == (0,)):
        await ring.broadcast(torch.zeros(10_000), timeout=0.01)
    for worker, count in zip(workers, (4, 1), strict=True):
        await leave(worker, count)
        with pytest.raises(shmring.WouldBlock):
            worker.receive_nowait()


# -- replies -----------------------------------------------------------------------------------------------------------------


async def asked(ring: Ring, worker: Worker, payload: Any = 1) -> tuple[asyncio.Future[list[Any]], Any]:
    """Asks all workers; returns the gathering, and this worker's message."""
    gathering = asyncio.ensure_future(ring.gather(payload))
    return gathering, await worker.receive()


async def answer(worker: Worker, reply: Callable[[Any], Any]) -> None:
    async for message in worker:
        with message:
            await message.reply(reply(message.payload))


async def test_replies_are_in_order_of_rank(ring: Ring, join: Any) -> None:
    tasks = []
    for rank in (3, 1, 2):
        worker = await join(rank)
        tasks.append(
            asyncio.create_task(answer(worker, lambda payload, rank=rank: {"rank": rank, "t": torch.full((payload,), rank)}))
        )
    for _ in range(20):
        replies = await ring.gather(5, timeout=5)
        assert [(reply["rank"], reply["t"].tolist()) for reply in replies] == [(rank, [rank] * 5) for rank in (1, 2, 3)]
    assert [reply["rank"] for reply in await ring.gather(1, to=[3, 1])] == [1, 3]
    assert not ring._shell.workers.end.gathers
    for task in tasks:
        task.cancel()


@for_each("nbytes", [8_000, 60_000, 70_000, 1_000_000])
async def test_a_reply_of_any_size_arrives(ring: Ring, worker: Worker, nbytes: int) -> None:
    task = asyncio.create_task(
        answer(worker, lambda n: {"t": torch.arange(n, dtype=torch.int32).view(torch.uint8), "text": "x" * n})
    )
    [reply] = await ring.gather(nbytes // 4, timeout=10)
    assert torch.equal(reply["t"].view(torch.int32), torch.arange(nbytes // 4, dtype=torch.int32))
    assert len(reply["text"]) == nbytes // 4
    task.cancel()


@pytest.mark.ring(max_payload_nbytes="8KiB")
async def test_a_reply_that_is_too_large_or_no_reply_says_so_and_one_to_a_broadcast_goes_nowhere(
    ring: Ring, worker: Worker
) -> None:
    gathering, message = await asked(ring, worker)
    with message:
        with pytest.raises(shmring.CapacityError):
            await message.reply(torch.zeros(9_000, dtype=torch.uint8))
        with pytest.raises(TypeError, match="can't be sent"):
            await message.reply(object())
        await message.reply("small")
        with pytest.raises(shmring.LocalProtocolError, match="replied to before"):
            await message.reply("again")
    assert await gathering == ["small"]
    await ring.broadcast(1)
    with await worker.receive() as message:
        assert not message.wants_reply
        await message.reply("goes nowhere")
    gathering, message = await asked(ring, worker)
    with message:
        await message.reply("arrives")
    assert await gathering == ["arrives"]
    assert ring.statistics().late_answers == 0


async def test_a_message_that_was_left_takes_no_reply(ring: Ring, worker: Worker) -> None:
    gathering, message = await asked(ring, worker)
    message.leave()
    with pytest.raises(shmring.LocalProtocolError, match=f"message {message.sequence} was left; reply to it before"):
        await message.reply("too late")
    with pytest.raises(shmring.WorkerFailedError, match="left the message without a reply"):
        await gathering
    assert not ring._shell.workers.end.gathers
    await ring.broadcast(2)
    with await worker.receive() as message:
        pass
    with pytest.raises(shmring.LocalProtocolError, match="was left"):
        await message.reply("nobody waits for it, and it is as wrong")
    gathering, message = await asked(ring, worker)
    with message:
        await message.reply("in time")
    with pytest.raises(shmring.LocalProtocolError, match="replied to before"):
        await message.reply("again")
    assert await gathering == ["in time"]
    assert ring.statistics().late_answers == 0


@pytest.mark.one_loop
async def test_what_is_no_list_of_ranks_says_so(ring: Ring, client: Client, worker: Worker) -> None:
    _, claim = await claimed(ring, client, 1)
    calls: list[Callable[[Any], Any]] = [
        lambda to: ring.broadcast(1, to=to),
        lambda to: ring.broadcast_nowait(1, to=to),
        lambda to: ring.gather(1, to=to),
        lambda to: claim.share(to=to),
        lambda to: claim.share_nowait(to=to),
    ]
    wrong = [
        ("0", r"to is a list of ranks, such as \[0, 2\], not '0'"),
        (0, r"to is a list of ranks, such as \[0, 2\], not 0"),
        (["0"], "a rank is an int, not '0'"),
        ([0, None], "a rank is an int, not None"),
        ([0.0], "a rank is an int, not 0.0"),
    ]
    for call in calls:
        for to, why in wrong:
            with pytest.raises(TypeError, match=why):
                await call(to)
    with pytest.raises(TypeError, match="a rank is an int, not '0'"):
        ring.drop_worker("0")
    claim.done()
    assert await ring.broadcast("arrives", to={np.int64(0)}) == (0,)
    assert await read(worker) == "arrives"
    for attempt in (lambda: ring.broadcast_nowait(1, to=[7]), lambda: ring.drop_worker(7)):
        with pytest.raises(
            shmring.WorkerLostError,
            match=r"no worker of rank 7 \(any more, or yet\); there are \[0\]",
            check=lambda error: error.ranks == (7,),
        ):
            attempt()


@pytest.mark.one_loop
async def test_what_can_not_be_shared_is_named_as_its_caller_names_it(ring: Ring, client: Client, worker: Worker) -> None:
    await client.submit({"x": 1})
    with await ring.claim() as claim:
        with pytest.raises(TypeError, match=r"^beside can't be sent"):
            await claim.share(object())
        with pytest.raises(TypeError, match=r"^beside\.step\[1\] can't be sent"):
            claim.share_nowait({"step": [1, object()]})
        claim.payload["made"] = object()
        with pytest.raises(TypeError, match=r"^payload\.made can't be sent"):
            await claim.share(1)
    with pytest.raises(TypeError, match=r"^payload\[1\] can't be sent"):
        await ring.broadcast([1, object()])


async def test_a_worker_that_fails_with_a_message_fails_the_gather_and_goes_on(ring: Ring, join: Any) -> None:
    worker = await join(7)
    gathering, message = await asked(ring, worker)
    with contextlib.suppress(ZeroDivisionError), message:
        _ = 1 / 0
    with pytest.raises(shmring.WorkerFailedError, match="worker 7: ZeroDivisionError: division by zero"):
        await gathering
    gathering, message = await asked(ring, worker, 3)
    with message:
        await message.reply(message.payload)
    assert await gathering == [3]


async def test_a_gather_times_out_with_the_ranks_and_a_late_reply_is_counted(ring: Ring, join: Any) -> None:
    workers = [await join(rank) for rank in range(2)]
    gathering = asyncio.ensure_future(ring.gather(1, timeout=0.05))
    messages = [await worker.receive() for worker in workers]
    await messages[0].reply(0)
    with pytest.raises(shmring.WorkersBehindError, match="replies of workers 1, which have the message") as caught:
        await gathering
    assert (caught.value.ranks, caught.value.sent) == ((1,), True)
    await messages[1].reply(1)
    await eventually(lambda: ring.statistics().late_answers == 1)
    for message in messages:
        message.leave()
    assert ring.statistics().protocol_errors == 0


# -- whoever comes and goes ----------------------------------------------------------------------------------------------------


async def test_a_rank_that_is_taken_is_refused_until_it_is_free(ring: Ring, join: Any) -> None:
    first = await join(1)
    with pytest.raises(shmring.RankTakenError, match=f"process {os.getpid()}", check=lambda error: error.rank == 1):
        await join(1)
    await first.close()
    await eventually(lambda: ring.ranks == ())
    second = await join(1)
    await ring.broadcast("for the second")
    assert await read(second) == "for the second"


async def test_who_dies_while_it_is_let_in_is_no_worker_though_another_process_has_its_socket(
    ring: Ring, socket_dir: Path, reserving: Any
) -> None:
    begun, goes_on = reserving
    frame = handshake_frame(Join(version=PROTOCOL_VERSION, rank=0, name="short"))
    with socket.socket(socket.AF_UNIX) as joining:
        pid = os.fork()
        if not pid:
            try:
                joining.connect(os.fspath(socket_path("test", str(socket_dir))))
                joining.sendall(frame)
                signal.pause()
            finally:
                os._exit(1)
        await eventually(begun.is_set)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        await turns()
        goes_on.set()
        await eventually(lambda: ring.ranks or ring.statistics().refused)
    assert ring.ranks == ()


async def test_what_a_worker_has_replied_counts_though_it_has_died(ring: Ring, worker: Worker) -> None:
    """Its death may be heard of before its last records are read."""
    gathering, message = await asked(ring, worker)
    workers = ring._shell.workers
    [joined] = workers._workers.values()
    go_on = hold(joined.link)
    await message.reply("its last words")
    go_on()
    workers._died(joined)
    assert await asyncio.wait_for(gathering, 20) == ["its last words"]
    message.leave()


@pytest.mark.ring(message_ring_nbytes="16KiB", worker_backlog=64)
async def test_a_reply_that_was_cancelled_while_it_waited_can_be_sent_again(ring: Ring, worker: Worker) -> None:
    """And keeps no other one from being sent."""
    [joined] = ring._shell.workers._workers.values()
    gatherings = [asyncio.ensure_future(ring.gather(number)) for number in range(30)]
    messages = [await worker.receive() for _ in gatherings]
    go_on = hold(joined.link)
    for message in messages:
        reply = asyncio.ensure_future(message.reply("x" * 2000))
        await turns()
        if not reply.done():
            break
    assert not reply.done()
    assert await cancel(reply)
    go_on()
    for waiting in messages[message.payload :]:
        await asyncio.wait_for(waiting.reply("again"), 10)
    replies = [await gathering for gathering in gatherings]
    assert replies == [["x" * 2000]] * message.payload + [["again"]] * (len(messages) - message.payload)
    for message in messages:
        message.leave()


async def test_after_half_a_reply_a_worker_says_nothing_more(ring: Ring, worker: Worker) -> None:
    """As if all tasks of its loop were cancelled."""
    [joined] = ring._shell.workers._workers.values()
    gathering, message = await asked(ring, worker)
    go_on = hold(joined.link)
    replying = asyncio.ensure_future(message.reply("x" * 1_000_000))
    await turns()
    assert worker._connection._rest is not None
    worker._connection._rest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await replying
    with pytest.raises(shmring.ClosedError, match="given up in the middle of a reply"):
        worker.receive_nowait()
    go_on()
    with pytest.raises(shmring.WorkerLostError):
        await asyncio.wait_for(gathering, 20)
    message.leave()


@pytest.mark.ring(MAX_WORKERS=2)
async def test_as_many_may_join_as_there_are_places(ring: Ring, join: Any) -> None:
    workers = [await join(rank) for rank in range(2)]
    with pytest.raises(shmring.RemoteProtocolError, match="has 2 workers"):
        await join(2)
    await workers[0].close()
    await eventually(lambda: ring.ranks == (1,))
    await join(2)


async def test_closing_leaves_what_was_not_received_and_views_stay_valid(ring: Ring, worker: Worker) -> None:
    for number in range(3):
        await ring.broadcast(torch.full((50_000,), number, dtype=torch.uint8))
    view = await read(worker)
    await worker.close()
    with pytest.raises(shmring.ClosedError):
        await worker.receive()
    await eventually(lambda: ring.ranks == () and outstanding(ring) == 1)
    assert view.eq(0).all()
    [departed] = ring.statistics().workers
    assert (departed.is_member, departed.unacknowledged) == (False, 1)
    del view
    await eventually(lambda: ring.statistics().workers == () and is_whole(ring))


async def test_a_dropped_worker_is_told_and_keeps_what_it_reads(ring: Ring, join: Any) -> None:
    worker, other = await join(1), await join(2)
    gathering = asyncio.ensure_future(ring.gather(torch.ones(50_000, dtype=torch.uint8)))
    message = await worker.receive()
    ring.drop_worker(1, "too slow")
    with pytest.raises(
        shmring.WorkerLostError, match="worker 1 was dropped before it replied", check=lambda error: error.ranks == (1,)
    ):
        await gathering
    with pytest.raises(shmring.WorkerLostError):
        ring.drop_worker(1)
    await leave(other)
    with pytest.raises(shmring.ClosedError, match="too slow"):
        await worker.receive()
    assert [message async for message in worker] == []
    assert outstanding(ring) == 1
    for _ in range(6):
        await ring.broadcast(torch.full((50_000,), 2, dtype=torch.uint8), to=[2])
        await leave(other)
    assert message.payload.eq(1).all()
    await join(1)
    message.leave()


@pytest.mark.adjustable_clock
async def test_what_a_dropped_worker_reads_comes_back_though_it_rings_no_more(ring: Ring, join: Any) -> None:
    """Nobody asks for it: the ring looks by itself, again and again."""
    worker = await join(1)
    await ring.broadcast(torch.ones(50_000, dtype=torch.uint8))
    message = await worker.receive()
    ring.drop_worker(1, "too slow")
    book = ring._shell.workers.book
    for _ in range(3):
        await pass_time(1)
        assert book.outstanding == 1
    message.leave()
    await pass_time(1)
    assert book.outstanding == 0


def descriptors(*kinds: str) -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(any(kind in link for kind in kinds) for link in links)


async def test_workers_that_have_gone_leave_no_descriptors(ring: Ring, join: Any) -> None:
    counts = []
    for _ in range(4):
        await (await join()).close()
        await eventually(lambda: not ring.statistics().workers)
        await turns()
        counts.append(descriptors("pidfd", "shmring"))
    assert counts == [counts[0]] * 4


async def test_a_worker_that_is_closed_leaves_no_descriptor_though_it_is_kept(ring: Ring, join: Any) -> None:
    """Only a message that was not left keeps the bell: its last view acknowledges it."""
    before = descriptors("socket:")
    worker = await join()
    await ring.broadcast("kept")
    message = await worker.receive()
    await worker.close()
    await eventually(lambda: not any(worker.is_member for worker in ring.statistics().workers))
    await turns()
    assert descriptors("socket:") == before + 1
    assert message.payload == "kept"
    message.leave()
    await turns()
    assert descriptors("socket:") == before


async def test_a_ring_that_closes_tells_its_workers_and_frees_whoever_waits(ring: Ring, worker: Worker) -> None:
    gathering = asyncio.ensure_future(ring.gather(torch.zeros(40_000, dtype=torch.uint8)))
    await turns()
    for number in range(1, 4):
        await ring.broadcast(torch.full((40_000,), number, dtype=torch.uint8))
    waiting = [asyncio.ensure_future(send) for send in (ring.broadcast(5), ring.gather(6), ring.wait_workers(2))]
    await turns()  # until they wait
    message = await worker.receive()
    await ring.close("enough")
    with pytest.raises(shmring.WorkerLostError):  # it was sent
        await gathering
    for task in [*waiting, ring.broadcast(1)]:
        with pytest.raises(shmring.ClosedError):
            await task
    assert message.payload.eq(0).all()
    for number in range(1, 4):
        assert (await read(worker)).eq(number).all()
    with pytest.raises(shmring.ClosedError, match="enough"):
        await worker.receive()
    message.leave()


async def test_receivers_are_served_in_turn_and_a_cancelled_one_passes_its_turn_on(ring: Ring, worker: Worker) -> None:
    receivers = [asyncio.ensure_future(worker.receive()) for _ in range(3)]
    await asyncio.sleep(0)
    receivers[0].cancel()
    await ring.broadcast(1)
    await ring.broadcast(2)
    for receiver, expected in zip(receivers[1:], (1, 2), strict=True):
        with await receiver as message:
            assert message.payload == expected


async def test_a_message_that_came_to_a_receiver_just_cancelled_goes_to_the_next(ring: Ring, worker: Worker) -> None:
    receivers = [asyncio.create_task(worker.receive()) for _ in range(2)]
    await turns()
    ring.broadcast_nowait(1)
    worker._connection._link.poll()  # it wakes the first
    receivers[0].cancel()
    with await asyncio.wait_for(receivers[1], 20) as message:
        assert message.payload == 1


async def test_who_does_not_wait_takes_nothing_from_those_who_do(ring: Ring, worker: Worker) -> None:
    waiting = asyncio.create_task(worker.receive())
    await turns()
    ring.broadcast_nowait(1)
    with pytest.raises(shmring.WouldBlock):
        worker.receive_nowait()
    with await waiting as message:
        assert message.payload == 1


async def test_all_who_wait_for_a_message_hear_of_the_end(ring: Ring, worker: Worker) -> None:
    waiting = [asyncio.create_task(worker.receive()) for _ in range(3)]
    await turns()
    await ring.close("enough")
    for task in waiting:
        with pytest.raises(shmring.ClosedError, match="enough"):
            await task


@for_each("join", [shmring.join, shmring.threads.join])
@for_each("rank", [-1, 2**31, True, "0"])
def test_a_rank_is_a_small_number(join: Any, rank: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"a rank (is an int|must be from 0 to 2147483647), not "):
        join("test", rank)


# -- without an event loop -----------------------------------------------------------------------------------------------------


async def test_the_blocking_worker_receives_replies_and_ends(ring: Ring, socket_dir: Path) -> None:
    got: list[Any] = []

    def work() -> None:
        with shmring.threads.join("test", rank=4, socket_dir=str(socket_dir)) as worker:
            with pytest.raises(shmring.WouldBlock):
                worker.receive_nowait()
            with pytest.raises(TimeoutError):
                worker.receive(timeout=0.01)
            got.append("joined")
            for message in worker:
                with message:
                    got.append(message.payload)
                    if message.wants_reply:
                        message.reply({"t": torch.zeros(message.payload, dtype=torch.uint8)}, timeout=10)
            with pytest.raises(shmring.ClosedError, match="is closing"):
                worker.receive()

    working = asyncio.create_task(asyncio.to_thread(work))
    await eventually(lambda: got == ["joined"])
    assert await ring.wait_workers(1, timeout=10) == (4,)
    await ring.broadcast("hello")
    for nbytes in (10, 300_000):
        [reply] = await ring.gather(nbytes, timeout=10)
        assert reply["t"].numel() == nbytes
    await ring.close()
    await asyncio.wait_for(working, 10)
    assert got == ["joined", "hello", 10, 300_000]


async def test_an_engine_that_is_not_there_is_named(join: Any) -> None:
    with pytest.raises(shmring.EngineDeadError, check=lambda error: error.engine == "nobody"):
        await join(name="nobody", connect_timeout_s=0.01)


async def test_an_engine_that_does_not_answer_is_named(join: Any, socket_dir: Path) -> None:
    path = socket_path("silent", str(socket_dir))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(shmring.EngineDeadError, match=r"did not answer within 0\.05 s \(connect_timeout_s\)") as caught:
            await join(name="silent", connect_timeout_s=0.05)
    assert caught.value.engine == "silent"


async def test_who_only_looks_hears_of_the_end(ring: Ring, socket_dir: Path) -> None:
    worker = await asyncio.to_thread(shmring.threads.join, "test", 0, socket_dir=str(socket_dir))
    await ring.broadcast("last")
    ring.drop_worker(0, "too slow")

    def has_ended() -> bool:
        with contextlib.suppress(shmring.WouldBlock), worker.receive_nowait() as message:
            got.append(message.payload)
        return bool(worker._connection._reason)

    got: list[str] = []
    with pytest.raises(shmring.ClosedError, match="too slow"):
        await eventually(has_ended)
    assert got == ["last"]
    await asyncio.to_thread(worker.close)


async def test_what_is_sent_to_a_worker_that_has_closed_comes_back_though_its_process_lives(
    ring: Ring, socket_dir: Path
) -> None:
    """It is sent before the engine hears of that, and nobody will ever take it from the ring."""
    worker = await asyncio.to_thread(lambda: shmring.threads.join("test", rank=0, socket_dir=str(socket_dir)))
    assert ring.broadcast_nowait("taken") == (0,)
    taken = worker.receive(timeout=5)
    worker.close()
    assert ring.broadcast_nowait(torch.zeros(10_000)) == (0,)
    await eventually(lambda: not ring.ranks)
    await eventually(lambda: outstanding(ring) == 1)
    taken.leave()


async def test_a_blocking_worker_looks_for_a_moment_before_it_sleeps(ring: Ring, socket_dir: Path) -> None:
    """As long as that helps: who gets one message after the other is not rung for each."""
    worker = await asyncio.to_thread(shmring.threads.join, "test", 0, socket_dir=str(socket_dir))
    looking = worker._connection._end.looking

    def receive_nothing(timeout: float = 0.001) -> None:
        with pytest.raises(TimeoutError):
            worker.receive(timeout=timeout)

    receive_nothing(timeout=0.2)
    assert looking.begun == 1
    for _ in range(30):
        receive_nothing()
    assert looking.begun <= 4, "it went on looking in vain"
    before, tries = looking.begun, 0
    while looking.begun == before:  # every 32nd time; a look that was held up by others leaves 64 of those out
        receive_nothing()
        tries += 1
        assert tries < 10_000, "it never looks again"
    worker.close()


@pytest.mark.ring(worker_backlog=64)
async def test_several_threads_may_receive_and_closing_wakes_them(ring: Ring, socket_dir: Path) -> None:
    worker = await asyncio.to_thread(shmring.threads.join, "test", 0, socket_dir=str(socket_dir))
    got: list[int] = []
    errors: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                with worker.receive() as message:
                    got.append(message.payload)
        except shmring.ClosedError as error:
            errors.append(type(error))

    threads = [asyncio.create_task(asyncio.to_thread(work)) for _ in range(3)]
    for number in range(50):
        await ring.broadcast(number)
    await eventually(lambda: len(got) == 50)
    assert sorted(got) == list(range(50))
    await asyncio.to_thread(worker.close)
    await asyncio.wait_for(asyncio.gather(*threads), 10)
    assert len(errors) == 3
    worker.close()


async def test_the_engine_without_a_loop_has_workers_too(socket_dir: Path) -> None:
    def run() -> list[Any]:
        directory = str(socket_dir)
        with (
            shmring.threads.serve("test", slab_nbytes="1MiB", socket_dir=directory, **OPTIONS) as ring,
            shmring.threads.join("test", 0, socket_dir=directory, busy_poll_s=0.001) as worker,
            shmring.threads.connect("test", socket_dir=directory) as client,
        ):
            assert ring.wait_workers(1, timeout=5) == ring.ranks == (0,)
            assert ring.broadcast(torch.ones(9000), timeout=5) == (0,)
            with worker.receive(timeout=5) as message:
                total = float(message.payload.sum())
            client.submit(torch.full((50_000,), 2, dtype=torch.uint8))
            with ring.claim(timeout=5) as claim:
                assert claim.share("beside", timeout=5) == (0,)
            with worker.receive(timeout=5) as message:
                seen = message.payload.sum().item(), message.beside
            replying = threading.Thread(
                target=lambda: [message.reply("r") or message.leave() for message in [worker.receive()]]
            )
            replying.start()
            replies = ring.gather(1, timeout=5)
            replying.join()
            ring.drop_worker(0)
            return [total, seen, replies, ring.ranks]

    assert await asyncio.to_thread(run) == [9000.0, (100_000, "beside"), ["r"], ()]


async def test_a_gather_that_fails_keeps_no_view_of_a_request(ring: Ring, worker: Worker, client: Client) -> None:
    """An error whose frames hold what holds the error would keep the views in them until rubbish is collected."""

    async def handle(claim: shmring.Claim) -> None:
        payload = claim.payload
        fill(ring)
        with contextlib.suppress(shmring.WorkerFailedError):
            await ring.gather(payload, timeout=60)
        await claim.reply("failed")

    running = asyncio.create_task(ring.run(handle))
    with uncollected():
        answering = asyncio.create_task(client.request({"x": torch.ones(40_000)}))
        for _ in range(5):
            await leave(worker)  # the last one without a reply
        assert await answering == "failed"
        await eventually(lambda: is_whole(ring))
    await ring.close()
    await running


@pytest.mark.one_loop
async def test_messages_to_workers_are_these_bytes(ring: Ring, connect: Any, joined: Any) -> None:
    worker, client = await joined(), await connect()
    reader = shmring.core.compiled.RecordReader(worker.incoming, worker.socket.fileno())

    def record_hex() -> str:
        return (reader.read() or b"").hex()

    await ring.broadcast({"x": torch.tensor([1.0, 2.0, 3.0])})
    tensor = "c71c53" + "0000" + "0c01" + "0000000000000000" + "0c00000000000000" + "0300000000000000"
    assert record_hex() == "97" + "78" + "01" + "00" + "00" + "90" + "c40c" + "0000803f0000004000004040" + "81a178" + tensor
    await ring.broadcast(torch.zeros(40_000, dtype=torch.uint8))  # is copied to where broadcasts lie: behind the slab's 1 MiB
    slot = "c72052" + "0000000000000000" + "0000100000000000" + "409c000000000000" + "0200000000000000"
    tensor = "c71c53" + "0000" + "0201" + "0000000000000000" + "409c000000000000" + "409c000000000000"
    assert record_hex() == "97" + "78" + "02" + "01" + "00" + "90" + slot + tensor
    await client.submit(torch.zeros(40_000, dtype=torch.uint8))
    with await ring.claim() as claim:
        await claim.share("beside")
    slot = "c72052" + "0000000000000000" + "0010000000000000" + "409c000000000000" + "0100000000010000"
    tensor = "c71c53" + "0100" + "0201" + "0000000000000000" + "409c000000000000" + "409c000000000000"
    assert record_hex() == "97" + "78" + "03" + "02" + "02" + "91" + slot + "c0" + "92" + tensor + "a6626573696465"
    gathering = asyncio.ensure_future(ring.gather("step"))
    await asyncio.sleep(0)
    assert record_hex() == "97" + "78" + "04" + "03" + "01" + "90" + "c0" + "a473746570"
    gathering.cancel()


# -- hostile workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def joined(serve: Any, socket_dir: Path) -> AsyncIterator[Callable[..., Awaitable[Joined]]]:
    """``await joined(rank)``: what a worker has, for a test to misuse."""
    there: list[Joined] = []

    async def open_one(rank: int = 0) -> Joined:
        there.append(await join_in_time("test", rank, "hostile", shmring.WorkerConfig(socket_dir=str(socket_dir))))
        return there[-1]

    yield open_one
    for joined in there:
        joined.close()


@pytest.fixture
async def hostile(ring: Ring, joined: Any) -> Joined:
    """What the worker of rank 0 has."""
    return await joined(0)


@pytest.fixture
async def honest(hostile: Joined, join: Any) -> Worker:
    """The worker of rank 1, who joins after that."""
    return await join(1)


def say(hostile: Joined, *records: bytes) -> None:
    writer = shmring.core.compiled.RecordWriter(hostile.outgoing, hostile.socket.fileno())
    for record in records:
        assert writer.write(record)
    hostile.socket.send(b"\0")


def poke(memory: Any, at: int, data: bytes) -> None:
    memoryview(memory).cast("B")[at : at + len(data)] = data


async def test_noise_in_its_page_frees_nothing_of_others_and_only_its_own(hostile: Joined, honest: Worker, ring: Ring) -> None:
    messages = []
    for number in range(4):
        await ring.broadcast(torch.full((40_000,), number, dtype=torch.uint8))
        messages.append(await honest.receive())
    for pattern in (b"\xff" * 4096, os.urandom(4096), bytes(4096), bytes(range(256)) * 16):
        poke(hostile.page, 0, pattern)
        assert [worker.unacknowledged for worker in ring.statistics().workers] == [4, 4]
    for place in range(256):
        for number in range(1, 5):
            poke(hostile.page, 2048 + 8 * place, number.to_bytes(8, "little"))
            ring._shell.workers.look()
    statistics = ring.statistics()
    assert [worker.unacknowledged for worker in statistics.workers] == [0, 4]
    for number, message in enumerate(messages):
        assert message.payload.eq(number).all()
        message.leave()
    assert ring.statistics().protocol_errors == 0


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("ring_of", ["incoming", "outgoing"])
@pytest.mark.parametrize("pattern", [b"\xff" * 256, b"\x07" * 256, (1 << 40).to_bytes(8, "little") * 32])
@pytest.mark.ring(worker_backlog=128)
async def test_counts_that_can_not_be_true_end_one_worker(
    hostile: Joined, honest: Worker, ring: Ring, ring_of: str, pattern: bytes
) -> None:
    """In the ring to it, only the head is the worker's word; in the other, the tail and all records are."""
    poke(getattr(hostile, ring_of), 0, pattern)
    hostile.socket.send(b"\0")
    for number in range(8):  # more than the ring has room for, if its reader's count is not believed
        with contextlib.suppress(shmring.WouldBlock):
            ring.broadcast_nowait({"n": number, "text": "x" * 40_000})
            await leave(honest)
        await asyncio.sleep(0)
    await eventually(lambda: ring.ranks == (1,))
    assert ring.statistics().protocol_errors == 1
    await ring.broadcast("still there", timeout=5)
    assert await read(honest) == "still there"


RECORDS = {
    "no message": b"\xc1",
    "an unknown tag": msgspec.msgpack.encode([77, 1]),
    "a frontend's message": msgspec.msgpack.encode([3, 1]),
    "a second join": encode_message(Join(PROTOCOL_VERSION, 3)),
    "a reply to nothing": msgspec.msgpack.encode([32, 99, None, 1]),
    "a reply to message 0": msgspec.msgpack.encode([32, 0, None, 1]),
    "a reply with a slot": msgspec.msgpack.encode([32, 1, msgspec.msgpack.Ext(82, bytes(32)), 1]),
    "a reply with a slot of the slab": msgspec.msgpack.encode(
        [32, 1, msgspec.msgpack.Ext(82, b"".join(number.to_bytes(8, "little") for number in (1, 4096, 100, 1 << 40))), 1]
    ),
    "a reply in a slot": msgspec.msgpack.encode([32, 1, msgspec.msgpack.Ext(82, bytes(32)), None, 0, 1]),
    "a reply with a tensor of nothing": msgspec.msgpack.encode([32, 1, None, msgspec.msgpack.Ext(83, bytes(20))]),
    "a reply that goes on": msgspec.msgpack.encode([32, 1, None, 1, 2]),
    "a reply that is cut off": msgspec.msgpack.encode([32, 1, None, "text"])[:-2],
    "a reply that counts too much": msgspec.msgpack.encode([32, 1, None, dict.fromkeys(range(8200), 0)]),
    "a failure of nothing": encode_message(AnswerFailed(99, "E", "")),
    "parts that are no reply": encode_message(AnswerPart(b"\xc1", False)),
    "parts of parts": encode_message(AnswerPart(encode_message(AnswerPart(b"", False)), False)),
}


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
async def test_a_record_that_is_wrong_ends_one_worker_and_nothing_else(
    hostile: Joined, honest: Worker, ring: Ring, record: bytes
) -> None:
    gathering = asyncio.ensure_future(ring.gather(1, to=[1]))
    message = await honest.receive()
    say(hostile, record)
    await eventually(lambda: ring.ranks == (1,))
    assert ring.statistics().protocol_errors == 1
    await message.reply("fine")
    assert await gathering == ["fine"]
    message.leave()


async def test_a_reply_that_names_a_slot_ends_its_worker(hostile: Joined, honest: Worker, ring: Ring) -> None:
    """Also if a reply of it is waited for."""
    gathering, message = await asked(ring, honest)
    say(hostile, RECORDS["a reply with a slot of the slab"])
    with pytest.raises(shmring.WorkerLostError, match="worker 0 broke the protocol"):
        await asyncio.wait_for(gathering, 10)
    assert ring.ranks == (1,)
    await message.reply("late")
    message.leave()


async def test_a_second_reply_ends_its_worker(hostile: Joined, honest: Worker, ring: Ring) -> None:
    gathering, message = await asked(ring, honest)
    say(hostile, *[msgspec.msgpack.encode([32, 1, None, "mine"])] * 2)
    await eventually(lambda: ring.ranks == (1,))
    await message.reply("fine")
    assert await gathering == ["mine", "fine"]
    message.leave()


# -- an engine that lies -------------------------------------------------------------------------------------------------------


def tell(ring: Ring, *records: bytes) -> None:
    """Has the engine send this to its only worker, whatever it is."""
    [worker] = ring._shell.workers._workers.values()
    for record in records:
        assert worker.link.writer.write(record)
    worker.link.writer.ring_bell()


WRONG = {
    "a reply of a frontend": encode_message(AnswerPart(b"x", False)),
    "a message without a number": msgspec.msgpack.encode([120, None]),
    "a stamp that no page has": msgspec.msgpack.encode([120, 1, 256, 0, [], None, 1]),
    "rubbish": b"\xff" * 100,
}


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("record", WRONG.values(), ids=WRONG.keys())
async def test_an_engine_that_sends_what_no_worker_is_sent_is_left(ring: Ring, worker: Worker, record: bytes) -> None:
    tell(ring, record)
    for _ in range(2):
        with pytest.raises(shmring.RemoteProtocolError):
            await asyncio.wait_for(worker.receive(), 5)
    await eventually(lambda: ring.ranks == ())
    await worker.close()


async def test_a_worker_closes_whatever_it_was_sent_and_has_not_received(ring: Ring, worker: Worker) -> None:
    await ring.broadcast({"x": torch.ones(1000)})
    tell(ring, WRONG["a message without a number"])
    await ring.broadcast({"x": torch.ones(1000)})
    await eventually(lambda: len(worker._connection._records) == 3)
    await worker.close()


async def test_a_workers_name_can_be_printed(ring: Ring, join: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = await join(0, label="\x1b[31mred\nERROR: not a line of ours")
    [joined] = [record.getMessage() for record in caplog.records if "has joined" in record.getMessage()]
    assert joined.startswith("worker 0 (\\x1b[31mred\\nERROR: not")
    gathering, message = await asked(ring, worker)
    with message:
        worker._connection._link.send(AnswerFailed(message.sequence, "Err\x1b", "one\n\x1btwo"))
        with pytest.raises(shmring.WorkerFailedError) as failed:
            await gathering
        worker._connection._end.mark_answered(message)
    assert str(failed.value) == "worker 0: Err\\x1b: one\n\\x1btwo"


# An engine that polls looks for replies itself: those that lie there before the message that they are to are found at once.
polling = pytest.mark.ring(busy_poll_s=0.001, worker_backlog=128)


@polling
async def test_an_engine_that_polls_takes_a_reply_without_its_loop(ring: Ring, joined: Any) -> None:
    worker = await joined(0)
    writer = shmring.core.compiled.RecordWriter(worker.outgoing, worker.socket.fileno())
    assert writer.write(msgspec.msgpack.encode([32, 1, None, "mine"]))
    with pytest.raises(StopIteration, check=lambda error: error.value == ["mine"]):
        ring.gather(1).__await__().send(None)
    assert not ring._shell.workers.end.gathers
    assert writer.write(encode_message(AnswerFailed(2, "ValueError", "no")))
    with pytest.raises(shmring.WorkerFailedError, match="no"):
        ring.gather(2).__await__().send(None)
    assert not ring._shell.workers.end.gathers


@polling
async def test_who_gathers_again_and_again_lets_the_loop_go_on(ring: Ring, joined: Any) -> None:
    worker = await joined(0)
    writer = shmring.core.compiled.RecordWriter(worker.outgoing, worker.socket.fileno())
    going_on: list[int] = []
    asyncio.get_running_loop().call_soon(going_on.append, 1)
    for number in range(1, 101):  # more than a link may deliver in a turn
        assert writer.write(msgspec.msgpack.encode([32, number, None, number]))
        assert await ring.gather(None) == [number]
    assert going_on


@polling
async def test_a_wrong_record_that_is_looked_for_ends_one_worker(hostile: Joined, honest: Worker, ring: Ring) -> None:
    writer = shmring.core.compiled.RecordWriter(hostile.outgoing, hostile.socket.fileno())
    assert writer.write(b"\x94\x20\x01\xc0")
    gathering, message = await asked(ring, honest)
    await message.reply("fine")
    with pytest.raises(shmring.WorkerLostError, check=lambda error: error.ranks == (0,)):
        await gathering
    await eventually(lambda: ring.ranks == (1,))
    assert ring.statistics().protocol_errors == 1
    message.leave()


@pytest.mark.ring(max_payload_nbytes="8KiB")
async def test_parts_without_end_are_bounded(hostile: Joined, ring: Ring) -> None:
    say(hostile, *[encode_message(AnswerPart(bytes(4096), True))] * 9)
    await eventually(lambda: ring.ranks == ())
    assert ring.statistics().protocol_errors == 1


async def test_who_gives_up_joining_keeps_no_place(hostile: Joined, ring: Ring) -> None:
    await ring.broadcast(torch.zeros(50_000))
    give_up(hostile.socket)
    await eventually(lambda: ring.statistics().workers == () and is_whole(ring))


async def test_a_join_of_another_version_or_uid_is_refused(ring: Ring, serve: Any, socket_dir: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(socket_dir / "test.sock"))
    writer.write(handshake_frame(Join(PROTOCOL_VERSION + 1, 0)))
    assert b"is not spoken here" in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert ring.ranks == ()
    await serve(name="others", allowed_uids=frozenset({os.getuid() + 1}))
    with pytest.raises(shmring.RemoteProtocolError, match="not allowed"):
        await shmring.join("others", 0, socket_dir=str(socket_dir))


@pytest.mark.ring(worker_backlog=128)
async def test_memory_that_was_taken_for_a_worker_that_breaks_the_rules_comes_back(ring: Ring, joined: Any) -> None:
    """Its count is looked at when the ring has no more room by the last one; then there may be nobody left to send to."""
    for to in (None, [0]):
        hostile = await joined(0)
        poke(hostile.incoming, 0, b"\xff" * 256)
        with contextlib.suppress(shmring.WorkerLostError):  # if it was named
            while ring.ranks:
                ring.broadcast_nowait({"text": "x" * 40_000, "t": torch.zeros(2_000)}, to=to)
        ring._shell.workers.book.check()  # what is not free is what that worker was sent before


@pytest.mark.ring(worker_backlog=16)
async def test_who_breaks_the_rules_while_a_gather_waits_fails_it(hostile: Joined, honest: Worker, ring: Ring) -> None:
    long = {"text": "x" * 40_000}
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            ring.broadcast_nowait(long, to=[0])  # until its ring is full
    for number in range(16):
        await ring.broadcast(number, to=[1])
    messages = [await honest.receive() for _ in range(16)]
    gathering = asyncio.ensure_future(ring.gather(long, to=[0, 1]))
    await eventually(lambda: ring._shell.workers._changes.is_waited_in)  # it waits for the honest one to leave something
    poke(hostile.incoming, 0, b"\xff" * 256)
    for message in messages:
        message.leave()
    with pytest.raises(shmring.WorkerLostError, check=lambda error: error.ranks == (0,)):
        await gathering
    assert ring.ranks == (1,)
    with pytest.raises(shmring.WouldBlock):  # a message goes to all or to none
        honest.receive_nowait()


async def test_a_gather_whose_time_is_over_as_a_worker_dies_fails_once(ring: Ring, worker: Worker) -> None:
    """Both may happen in one turn of the loop; who is gone by then has no rank any more that could be named."""
    gathering = ring._shell.workers.end.gather("all", None, 60)

    async def gather() -> None:
        await gathering

    waiting = asyncio.create_task(gather())
    await turns()
    [worker] = ring._shell.workers._workers.values()
    ring._shell.workers._died(worker)
    gathering.time_out()
    with pytest.raises(shmring.WorkerLostError, match="worker 0 has died"):
        await waiting


# -- gathers that are over --------------------------------------------------------------------------------------------------


@pytest.mark.adjustable_clock
async def test_the_time_of_a_gather_that_is_over_ends_nothing(ring: Ring, worker: Worker) -> None:
    gathering = asyncio.ensure_future(ring.gather(1, timeout=5))
    with await worker.receive() as message:
        await message.reply("fine")
    assert await gathering == ["fine"]
    await pass_time(6)


async def test_a_reply_to_a_message_that_was_not_sent_ends_its_worker(hostile: Joined, ring: Ring) -> None:
    say(hostile, msgspec.msgpack.encode([32, 1, None, "to the next one"]))
    await eventually(lambda: ring.ranks == ())


async def test_a_message_to_all_goes_to_no_worker_that_has_parted(ring: Ring, join: Any) -> None:
    first, second = await join(0), await join(1)
    await second.close()
    await eventually(lambda: ring.ranks == (0,))
    assert await ring.broadcast("x") == (0,)
    assert await read(first) == "x"


async def test_what_reaches_beyond_a_claims_slot_is_copied(ring: Ring, client: Client, worker: Worker) -> None:
    """A view made by other means may span two slots: it must not be described as lying in one."""
    slots = await client.slots([5000, 5000])
    await client.submit([slot.tensor((5000,), torch.uint8).fill_(1) for slot in slots])
    with await ring.claim() as claim:
        low, high = sorted(view.data_ptr() for view in claim.payload)
        span = high + 5000 - low
        await ring.broadcast(torch.from_numpy(ring._shell._slab.bytes_at(ring._shell._slab.find(low), span)))
        assert ring.statistics().broadcast_in_place_nbytes == 0
        assert len(await read(worker)) == span
    for slot in slots:
        slot.close()
