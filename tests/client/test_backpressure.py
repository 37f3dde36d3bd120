"""Back pressure: waiting in line for space, leases that grow, shrink and are recalled, quotas, a slab that is full."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.ring.moments import Moments
from tests.nursery import Nursery
from tests.waiting import cancel, eventually, pass_time

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

KIB = 1 << 10


def tensor(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


async def answer_sum(claim: shmring.Claim) -> None:
    await claim.reply({"n": claim.payload["n"], "sum": int(claim.payload["x"].sum())})


async def ask(client: Client, number: int, nbytes: int) -> None:
    value = number % 251
    answer = await client.request({"n": number, "x": tensor(nbytes, value)}, timeout=30)
    assert answer == {"n": number, "sum": value * nbytes}


async def slot(client: Client, nbytes: int, served: list[int] | None = None, number: int = 0) -> None:
    async with client.slot(nbytes, timeout=10):
        if served is not None:
            served.append(number)


# -- a slab that is too small for everything at once --------------------------------------------------------------------


@pytest.mark.ring(handler=answer_sum, slab_nbytes="256KiB")
async def test_requests_that_are_together_far_larger_than_the_slab_all_succeed(ring: Ring, connect: Any) -> None:
    clients = [await connect() for _ in range(3)]
    await asyncio.gather(*(ask(clients[number % 3], number, 100_000 + number) for number in range(90)))


@pytest.mark.ring(handler=answer_sum, slab_nbytes="256KiB")
async def test_a_single_request_may_take_the_whole_slab(ring: Ring, client: Client) -> None:
    capacity = ring.statistics().leasable_nbytes - 64
    for number in range(5):
        await ask(client, number, capacity)
        await ask(client, number, 100)
    with pytest.raises(shmring.CapacityError):
        await ask(client, 1, capacity + 1)


@pytest.mark.ring(handler=answer_sum, slab_nbytes="512KiB")
async def test_sizes_of_all_kinds_on_many_clients(ring: Ring, connect: Any) -> None:
    clients = [await connect() for _ in range(4)]
    sizes = [1, 1000, 4000, 4096 - 64, 4096 - 63, 20_000, 65_536, 150_000, 300_000]
    requests = [ask(clients[number % 4], number, sizes[number % len(sizes)]) for number in range(300)]
    await asyncio.gather(*requests)
    assert ring.statistics().protocol_errors == 0


async def test_waiters_are_served_in_order(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.memory.slots._MOMENT_S", 1000.0)  # the first one waits for a second at most
    await serve(slab_nbytes="256KiB")
    client = await connect()
    blocker = await client.slot(200_000)
    served: list[int] = []
    waiting = []
    for number, nbytes in enumerate([150_000, 10, 100_000, 10, 200_000, 4096]):
        waiting.append(asyncio.create_task(slot(client, nbytes, served, number)))
        await asyncio.sleep(0)
    await eventually(lambda: client.statistics().waiting == 6)
    with pytest.raises(shmring.WouldBlock, match=r"request\(\), submit\(\) and slot\(\) wait for them"):
        client.slot_nowait(10)
    blocker.close()
    await asyncio.gather(*waiting)
    assert served == list(range(6)), "the small ones fitted, and still did not overtake"


@pytest.mark.ring(slab_nbytes="256KiB")
async def test_requests_reach_the_engine_in_the_order_in_which_they_waited(ring: Ring, client: Client) -> None:
    requests = [asyncio.create_task(client.submit({"n": number, "x": tensor(90_000)})) for number in range(12)]
    for number in range(12):
        with await asyncio.wait_for(ring.claim(), 5) as claim:
            assert claim.payload["n"] == number
    await asyncio.gather(*requests)


@pytest.mark.ring(handler=answer_sum, slab_nbytes="256KiB")
async def test_a_full_slab_makes_everybody_wait_and_nobody_fail(ring: Ring, connect: Any) -> None:
    holder, other = await connect(), await connect()
    held = await holder.slot(ring.statistics().leasable_nbytes - 64 - 64 * KIB)
    held_too = await other.slot(40_000)
    asking = [asyncio.create_task(ask(client, n, 100_000)) for n, client in enumerate([holder, other] * 3)]
    await eventually(lambda: ring.statistics().lease_requests_waiting == 2)
    for client in (holder, other):
        with pytest.raises(shmring.WouldBlock):
            client.submit_nowait({"x": tensor(100_000)})
        with pytest.raises(TimeoutError):
            await client.request({"n": 1, "x": tensor(100_000)}, timeout=0.02)
    await ask(other, 1, 900)  # in the message: it needs no space
    assert not any(task.done() for task in asking)
    held.close()
    held_too.close()
    await asyncio.gather(*asking)


async def test_replies_do_not_wait_for_the_memory_of_requests(serve: Any, connect: Any) -> None:
    async def double(claim: shmring.Claim) -> None:
        await claim.reply({"x": claim.payload["x"][:10_000] * 2})

    ring = await serve(slab_nbytes="256KiB", reply_nbytes="32KiB")
    client = await connect()
    asking = [asyncio.create_task(client.request({"x": tensor(60_000)})) for _ in range(10)]
    await eventually(lambda: client.statistics().waiting)
    running = asyncio.create_task(ring.run(double))
    for task in asking:
        assert int((await asyncio.wait_for(task, 5))["x"].sum()) == 20_000
        asking[asking.index(task)] = None
        del task
    await ring.close()
    await running


# -- leases -------------------------------------------------------------------------------------------------------------


@pytest.mark.client(lease_nbytes="64KiB", lease_idle_s=0.05)
async def test_leases_grow_with_what_is_needed_and_idle_ones_go_back(ring: Ring, client: Client) -> None:
    assert (client.statistics().leases, client.statistics().leased_nbytes) == (1, 64 * KIB)
    slots = [await client.slot(50_000) for _ in range(5)]
    assert client.statistics().leases > 1
    assert client.statistics().leased_nbytes >= 5 * 50_000
    assert ring.statistics().leased_nbytes == client.statistics().leased_nbytes
    large = await client.slot(300_000)
    assert client.statistics().leased_nbytes >= 5 * 50_000 + 300_000
    for each in [*slots, large]:
        each.close()
    await eventually(lambda: client.statistics().leased_nbytes == 64 * KIB)
    assert client.statistics().leases == 1, "the base lease stays"
    await eventually(lambda: ring.statistics().leased_nbytes == 64 * KIB)
    assert client.statistics().free_nbytes == 64 * KIB


@pytest.mark.adjustable_clock
@pytest.mark.client(lease_idle_s=300.0)
async def test_a_lease_that_is_used_now_and_then_does_not_go_back(client: Client) -> None:
    await slot(client, 200_000)
    for _ in range(10):
        await pass_time(200.0)
        client.slot_nowait(200_000).close()
    await pass_time(301.0)
    with pytest.raises(shmring.WouldBlock):
        client.slot_nowait(200_000)


@pytest.mark.one_loop
async def test_a_large_lease_is_sized_exactly(client: Client) -> None:
    async with client.slot(300_000):
        assert client.statistics().leased_nbytes == 303_104, "300,064 bytes in blocks; the empty base lease was returned"


async def test_idle_leases_of_one_are_recalled_for_another(ring: Ring, connect: Any) -> None:
    idle, needy = await connect(lease_idle_s=600), await connect(lease_idle_s=600)
    slots = [await idle.slot(100_000) for _ in range(4)]
    for each in slots:
        each.close()
    assert ring.statistics().free_nbytes < 600_000
    await asyncio.wait_for(slot(needy, 800_000), 5)
    await asyncio.wait_for(slot(idle, 800_000), 5)


@pytest.mark.ring(client_quota_nbytes="512KiB")
async def test_one_frontend_cannot_keep_everything_from_another(ring: Ring, connect: Any) -> None:
    greedy, other = await connect(), await connect()
    taken: list[shmring.Slot] = []

    async def take() -> None:
        while True:
            taken.append(await greedy.slot(60_000))

    taking = asyncio.create_task(take())
    await eventually(lambda: ring.statistics().lease_requests_waiting == 1)
    assert greedy.statistics().leased_nbytes <= 512 * KIB
    assert len(taken) >= 6
    await asyncio.wait_for(slot(other, 300_000), 5)
    await other.close()
    await eventually(lambda: greedy.statistics().leased_nbytes > 512 * KIB)  # alone, it may have it all
    await cancel(taking)
    for each in taken:
        each.close()
    assert ring.statistics().protocol_errors == 0


async def test_as_many_leases_as_may_be_are_enough_for_ever(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.ring.limits.MAX_LEASES", 2)
    ring = await serve(answer_sum)
    client = await connect()
    await asyncio.gather(*(ask(client, number, (50_000, 100_000, 200_000)[number % 3]) for number in range(60)))
    assert client.statistics().leases <= 2
    assert ring.statistics().protocol_errors == 0


@pytest.mark.ring(handler=answer_sum)
async def test_submit_nowait_asks_in_passing_and_finds_space_later(client: Client) -> None:
    payload = {"n": 1, "x": tensor(200_000)}
    with pytest.raises(shmring.WouldBlock):
        client.submit_nowait(payload)
    await eventually(lambda: client.statistics().leases == 2)
    submission = client.submit_nowait(payload)
    assert (await submission.result())["sum"] == 200_000


@pytest.mark.ring(handler=answer_sum, slab_nbytes="256KiB", max_lease_nbytes="240KiB")
async def test_a_client_that_connects_to_a_full_ring_gets_its_space_later(ring: Ring, connect: Any) -> None:
    first = await connect(lease_nbytes="240KiB")
    late = await connect(lease_nbytes="240KiB")
    assert late.statistics().leases == 0
    await asyncio.wait_for(ask(late, 1, 100_000), 5)
    await asyncio.wait_for(ask(first, 2, 100_000), 5)
    assert ring.statistics().clients == 2


#: Room for three leases of 128 KiB, and for nothing of LARGE beside them.
CROWDED = {
    "slab_nbytes": 3 * 128 * KIB + 32 * KIB,
    "reply_nbytes": 4 * KIB,
    "max_lease_nbytes": 128 * KIB,
    "client_quota_nbytes": 128 * KIB,
}
LARGE = 100 * KIB


@pytest.mark.ring(**CROWDED)
async def test_idle_memory_is_recalled_rather_than_memory_in_use(ring: Ring, connect: Any) -> None:
    """The request that has the memory may wait for the one that wants it."""
    first, *idle = [await connect(lease_nbytes=128 * KIB) for _ in range(3)]
    needy = await connect(lease_nbytes=4 * KIB)
    answer = asyncio.create_task(first.request({"x": tensor(LARGE)}))
    with await ring.claim() as claim:
        await asyncio.wait_for(slot(needy, LARGE), 30)
        await claim.reply(1)
    del claim
    await answer
    assert [client.statistics().leases for client in (first, *idle)].count(0) == 1, "one idle lease was enough"


@pytest.mark.ring(**CROWDED)
async def test_who_was_served_just_now_is_not_asked_while_others_are_idle(ring: Ring, connect: Any) -> None:
    for _ in range(3):
        await connect(lease_nbytes=128 * KIB)
    needy = [await connect(lease_nbytes=4 * KIB) for _ in range(2)]
    slots = await asyncio.wait_for(asyncio.gather(*(client.slot(LARGE) for client in needy)), 30)
    for each in slots:
        each.close()


@pytest.mark.ring(**CROWDED)
async def test_who_writes_for_long_is_passed_over(ring: Ring, connect: Any) -> None:
    """The engine does not know of its slot: that its lease does not come back is the sign."""
    writers = [await connect(lease_nbytes=128 * KIB) for _ in range(2)]
    held = [await writer.slot(LARGE) for writer in writers]
    await connect(lease_nbytes=128 * KIB)  # the last, by address
    needy = await connect(lease_nbytes=4 * KIB)
    await asyncio.wait_for(slot(needy, LARGE), 30)
    for each in held:
        each.close()


@pytest.mark.ring(**CROWDED)
@pytest.mark.client(lease_nbytes=4 * KIB)
async def test_an_engine_for_whose_memory_nobody_waits_has_no_timer(ring: Ring, client: Client) -> None:
    await slot(client, LARGE)
    assert client.statistics().leases > 0
    moments = ring._shell._moments
    moments.begin()
    assert moments._timer is None


def moments_of(look: Callable[[], list[Any]]) -> Moments:
    """Of an engine for whose memory somebody waits; the book looks in this way."""

    class Book:
        def is_awaited(self) -> bool:
            return True

        def moment_passed(self) -> list[Any]:
            return look()

    class Life:
        home = SimpleNamespace(is_closed=False, forked=False)

        @property
        def loop(self) -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

    return Moments(Life(), Book(), list)


async def test_moments_pass_as_long_as_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.ring.moments._MOMENT_S", 0.001)
    looks: list[int] = []
    moments = moments_of(lambda: looks.append(1) or [])
    moments.begin()
    await eventually(lambda: len(looks) >= 3)
    moments.close()


async def test_a_moment_lasts_25_ms() -> None:
    """After two of them, a lease whose holder does not answer is passed over; a window waits for forty at first."""
    loop = asyncio.get_running_loop()
    moments = moments_of(list)
    before_s = loop.time()
    moments.begin()
    assert moments._timer is not None
    assert before_s + 0.023 <= moments._timer.when() <= loop.time() + 0.027
    moments.close()


async def test_looks_at_many_leases_leave_the_loop_to_others() -> None:
    """Twenty times as long as a look takes, none is made."""
    ended_s = []

    def look() -> list[Any]:
        time.sleep(0.02)
        ended_s.append(time.monotonic())
        return []

    moments = moments_of(look)
    moments._moment_passed()
    assert moments._timer is not None
    assert moments._timer.when() - ended_s[0] > 0.35
    moments.close()


# -- only what is leased is writable ------------------------------------------------------------------------------------


@pytest.mark.ring(handler=answer_sum, slab_nbytes="512KiB")
async def test_everything_works_where_only_leases_are_writable(ring: Ring, connect: Any) -> None:
    clients = [await connect(map_leased_only=True, lease_idle_s=0.01) for _ in range(2)]
    for _ in range(3):
        await asyncio.gather(*(ask(clients[n % 2], n, (10, 5000, 70_000, 200_000)[n % 4]) for n in range(40)))
        await eventually(lambda: all(client.statistics().leases <= 1 for client in clients))


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_stray_write_is_a_fault_where_only_leases_are_writable(serve: Any, socket_dir: Path, nursery: Nursery) -> None:
    script = f"""
        import asyncio, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import shmring

        async def main():
            options = dict(socket_dir={str(socket_dir)!r}, lease_nbytes="64KiB", map_leased_only=True)
            async with shmring.connect("test", **options) as client:
                async with client.slot(1000) as slot:
                    slot.array((1000,), "u1")[:] = 1
                    session = client._engines.attachments["test"].session
                    print("leased", flush=True)
                    session._slab.bytes_at(session.welcome.base_lease.offset + (64 << 10), 1)[0] = 1
                    print("beyond")

        asyncio.run(main())
    """
    await serve()
    ended = await asyncio.to_thread(nursery.run_text, textwrap.dedent(script))
    assert (ended.returncode, ended.stdout) == (-11, "leased\n")


@pytest.mark.ring(max_inflight=1)
async def test_who_has_as_many_requests_as_may_be_hears_that_one_has_ended(ring: Ring, client: Client) -> None:
    """Before its loop would: the end lies in the ring already."""
    await client.submit(1)
    with await ring.claim():
        pass
    with pytest.raises(StopIteration):
        client.submit(2).send(None)
    with await ring.claim() as claim:
        assert claim.payload == 2
