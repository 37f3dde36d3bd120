"""Cancellation: everywhere, at every step, by the hundred. Afterwards nothing is held and nobody is asleep."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

import shmring
from shmring.cancellation import uninterrupted
from tests.sessions import session_of
from tests.waiting import eventually, hold, settled, turns


def tensor(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


async def echo(claim: shmring.Claim) -> None:
    payload = claim.payload
    await claim.reply(payload)
    if payload.get("twice"):
        await claim.reply(payload)


async def slow() -> str:
    await turns(3)
    return "slow"


# Copies leave the loop early, so that a cancellation can hit one.
pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.ring(
        handler=echo,
        slab_nbytes="512KiB",
        reply_nbytes="64KiB",
        calls={"slow": slow},
        COPY_OFFLOAD_NBYTES=20_000,
        MAX_CALLS=2,
    ),
    pytest.mark.client(copy_offload_nbytes=20_000, lease_idle_s=600.0),
]


def holds_nothing(client: shmring.Client) -> bool:
    now = client.statistics()
    return (now.slots_in_use, now.waiting, now.in_flight, now.reply_slots_held) == (0, 0, 0, 0)


async def request_inline(client: shmring.Client) -> None:
    assert (await client.request({"x": tensor(10)}))["x"].numel() == 10


async def request_copied(client: shmring.Client) -> None:
    assert (await client.request({"x": tensor(5000)}))["x"].numel() == 5000


async def request_copied_on_a_thread(client: shmring.Client) -> None:
    assert (await client.request({"x": tensor(50_000)}, request_id="mine"))["x"].numel() == 50_000


async def request_in_place(client: shmring.Client) -> None:
    async with client.slot(5000) as slot:
        view = slot.tensor((5000,), torch.uint8).fill_(1)
        assert (await client.request({"x": view, "y": tensor(2000)}, timeout=5))["x"].numel() == 5000


async def request_that_needs_a_lease(client: shmring.Client) -> None:
    assert (await client.request({"x": tensor(20_000), "y": tensor(300_000)[:0], "z": tensor(40_000)}))["z"].numel() == 40_000


async def stream(client: shmring.Client) -> None:
    async for part in client.stream({"x": tensor(5000), "twice": True}):
        assert part["x"].numel() == 5000


async def slot_in_a_further_lease(client: shmring.Client) -> None:
    async with client.slot(200_000) as slot:
        slot.tensor((200_000,), torch.uint8)[-1] = 1
        await asyncio.sleep(0)


async def call(client: shmring.Client) -> None:
    assert await client.call("slow") == "slow"


OPERATIONS: list[Callable[[shmring.Client], Awaitable[None]]] = [
    request_inline,
    request_copied,
    request_copied_on_a_thread,
    request_in_place,
    request_that_needs_a_lease,
    stream,
    slot_in_a_further_lease,
    call,
]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_cancelled_one_step_later_each_time(client: shmring.Client, operation: Any) -> None:
    for steps in range(316):
        task = asyncio.create_task(operation(client))
        await turns(min(steps, 300))
        if steps >= 300:  # a thread takes time, and not turns
            await asyncio.sleep(0.001 * 2 ** (steps - 300))
        ended = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await eventually(lambda: holds_nothing(client))
        if ended:
            break
    else:
        pytest.fail("it never came to its end")
    await asyncio.wait_for(operation(client), 5)
    assert client.connected


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_timed_out_one_step_later_each_time(client: shmring.Client, operation: Any) -> None:
    """A timeout that fires while the result is on its way: it is either, and never half of both."""
    for delay in range(0, 3000, 150):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay / 1_000_000):
                await operation(client)
        await eventually(lambda: holds_nothing(client))
    await asyncio.wait_for(operation(client), 5)


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm(client: shmring.Client, ring: shmring.Ring, connect: Any, seed: int) -> None:
    """Hundreds of tasks on two clients, a random half cancelled or aborted at random moments; the rest are right."""
    random_ = random.Random(seed)
    clients = [client, await connect(copy_offload_nbytes=20_000, lease_idle_s=600.0)]
    right = 0

    async def send_request(number: int) -> None:
        nonlocal right
        mine = clients[number % 2]
        kind = random_.randrange(4)
        nbytes = random_.choice([0, 900, 5000, 30_000, 60_000])
        payload = {"n": number, "x": tensor(nbytes, number % 251), "twice": kind == 1}

        def check(answer: Any) -> None:  # and let it go: whoever keeps a reply and waits for another may wait for ever
            assert answer["n"] == number
            assert answer["x"].tolist() == [number % 251] * nbytes

        if kind == 0:
            check(await mine.request(payload, request_id=f"r{number}"))
        elif kind == 1:
            async for part in mine.stream(payload, request_id=f"r{number}"):
                check(part)
                del part
        elif kind == 2:
            async with mine.slot(nbytes) as slot:
                view = slot.tensor((nbytes,), torch.uint8).fill_(number % 251)
                check(await mine.request({"n": number, "x": view}, request_id=f"r{number}"))
                del view
        else:
            async with mine.slot(random_.choice([1000, 200_000])):
                await turns(random_.randrange(5))
        right += 1

    tasks = [asyncio.create_task(send_request(number)) for number in range(400)]
    doomed = random_.sample(range(400), 200)
    for number in doomed:
        await turns(random_.randrange(3))
        if number % 3:
            tasks[number].cancel()
        else:
            clients[number % 2].abort(f"r{number}")
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        if number in doomed:
            assert result is None or isinstance(result, asyncio.CancelledError | shmring.AbortedError)
        else:
            assert result is None
    assert right >= 200
    # The errors of cancelled tasks hold their frames, and those the views.
    del result
    results.clear()
    tasks.clear()
    await eventually(lambda: all(holds_nothing(each) for each in clients))
    assert ring.statistics().protocol_errors == 0
    assert all(each.statistics().stale_releases == 0 for each in clients)


async def test_cancelling_the_first_waiter_passes_its_turn_on(client: shmring.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.memory.slots._MOMENT_S", 1000.0)  # it lets nobody pass by itself
    blocker = await client.slot(400_000)
    first = asyncio.create_task(_slot(client, 400_000))
    rest = [asyncio.create_task(_slot(client, 10_000)) for _ in range(5)]
    await eventually(lambda: client.statistics().waiting == 6)
    first.cancel()
    await asyncio.wait_for(asyncio.gather(*rest), 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    blocker.close()


async def test_cancelling_a_waiter_whose_turn_has_just_come_passes_it_on(client: shmring.Client) -> None:
    for steps in range(8):
        blocker = await client.slot(400_000)
        first, second = (asyncio.create_task(_slot(client, 400_000)) for _ in range(2))
        await eventually(lambda: client.statistics().waiting == 2)
        blocker.close()
        await turns(steps)
        first.cancel()
        await asyncio.wait_for(second, 5)
        await asyncio.gather(first, return_exceptions=True)
        await eventually(lambda: holds_nothing(client))


async def test_what_a_cancelled_waiter_passes_on_is_said_after_what_was_said_before(
    client: shmring.Client, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is asked for what the second needs, and then, as that needs nothing any more, for what the third needs."""
    blockers = [await client.slot(50_000), await client.slot(50_000)]
    other = await connect(lease_idle_s=0.01)
    large, small = await other.slot(280_000), await other.slot(40_000)
    first, second, third = (asyncio.create_task(_slot(client, nbytes)) for nbytes in (50_000, 40_000, 200_000))
    await eventually(lambda: client.statistics().waiting == 3)
    session = session_of(client)
    granted = session.host_slots.granted

    def cancel_and_grant(grant: Any) -> None:
        first.cancel()
        granted(grant)

    monkeypatch.setattr(session.host_slots, "granted", cancel_and_grant)
    small.close()
    await asyncio.wait_for(second, 5)
    large.close()
    await asyncio.wait_for(third, 5)
    assert first.cancelled()
    for blocker in blockers:
        blocker.close()
    await other.close()


@pytest.mark.parametrize("how", ["cancelled", "aborted", "answered twice"])
async def test_the_error_of_a_request_does_not_keep_the_reply_that_had_come(serve: Any, connect: Any, how: str) -> None:
    go_on = asyncio.Event()

    async def handle(claim: shmring.Claim) -> None:
        await claim.reply(claim.payload)
        await go_on.wait()
        await claim.reply(claim.payload)

    await serve(handle)
    client = await connect()
    request = asyncio.create_task(client.request({"x": tensor(5000)}, request_id="mine"))
    await eventually(lambda: client.statistics().reply_slots_held == 1)
    if how == "cancelled":
        request.cancel()
    elif how == "aborted":
        client.abort("mine")
    go_on.set()
    [error] = await asyncio.gather(request, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError | shmring.AbortedError | shmring.LocalProtocolError)
    await eventually(lambda: holds_nothing(client))
    del error


async def _slot(client: shmring.Client, nbytes: int) -> None:
    async with client.slot(nbytes) as slot:
        slot.tensor((1,), torch.uint8)


async def test_a_request_that_waits_for_the_engine_to_read_can_be_cancelled(serve: Any, connect: Any) -> None:
    ring = await serve(echo, name="deaf", message_ring_nbytes="128KiB")
    client = await connect("deaf")
    frontend = next(iter(ring._shell._frontends.values()))
    read_on = hold(frontend.link)
    requests = [asyncio.create_task(client.request({"x": tensor(10), "t": "x" * 30_000})) for _ in range(40)]
    await eventually(lambda: not session_of(client).link.can_write)
    await turns()
    with pytest.raises(shmring.WouldBlock, match="slowly"):
        client.submit_nowait({"x": 1})
    submitted = client.statistics().submitted
    assert submitted < 40
    for request in requests[20:]:
        request.cancel()
    await asyncio.gather(*requests[20:], return_exceptions=True)
    assert client.statistics().submitted == submitted
    read_on()
    answers = await asyncio.wait_for(asyncio.gather(*requests[:20]), 10)
    assert all(answer["t"] == "x" * 30_000 for answer in answers)
    del answers
    await client.close()
    requests.clear()
    await settled(ring)


async def test_large_messages_of_many_requests_at_once_do_not_end_the_connection(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is within the limits; together they must wait, not count as an engine that does not read."""
    monkeypatch.setattr("shmring.client.session._MAX_BACKLOG_NBYTES", 128 << 10)
    ring = await serve(echo, name="large")
    client = await connect("large")
    answers = await asyncio.gather(*(client.request({"n": n, "t": "x" * 50_000}, timeout=20) for n in range(50)))
    assert [answer["n"] for answer in answers] == list(range(50))
    assert ring.statistics().clients == 1


# -- the helper ---------------------------------------------------------------------------------------------------------


async def test_an_uninterrupted_step_comes_to_its_end() -> None:
    go_on = asyncio.Event()
    ended: list[int] = []

    async def step() -> int:
        await go_on.wait()
        ended.append(1)
        return 7

    assert_waits = asyncio.create_task(uninterrupted(asyncio.create_task(step())))
    for _ in range(3):
        await turns(2)
        assert_waits.cancel()
        assert not assert_waits.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await assert_waits
    assert ended == [1]
    assert await uninterrupted(asyncio.create_task(step())) == 7


async def test_a_step_that_is_itself_cancelled_says_so() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uninterrupted(future)
