"""The engine goes and the next one comes: what fails, what waits, and what stays valid."""

from __future__ import annotations

import asyncio
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.client.session import Session
from tests.garbage import uncollected
from tests.sessions import attachment_of
from tests.tables import for_each
from tests.waiting import cancel, eventually, turns


def tensor(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


async def echo(claim: shmring.Claim) -> None:
    payload = claim.payload
    if isinstance(payload, dict) and "hang" in payload:
        del payload
        await asyncio.Event().wait()
    await claim.reply(payload)


async def hang(claim: shmring.Claim) -> None:
    await asyncio.Event().wait()


pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.ring(handler=echo),
    pytest.mark.client(reconnect=True),
]


async def gone(ring: Ring, client: Client) -> None:
    """The ring is closed, and its client has heard of it."""
    await ring.close()
    await eventually(lambda: not client.connected)


def slab_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/shmring-")


async def _slot(client: Client, nbytes: int) -> None:
    async with client.slot(nbytes):
        await asyncio.Event().wait()


async def _stream(client: Client) -> None:
    async for _ in client.stream({"x": tensor(5000)}):
        pass


async def test_closing_after_a_reconnection_is_an_end_even_if_it_is_cancelled(ring: Ring, client: Client, serve: Any) -> None:
    await gone(ring, client)
    ring = await serve()
    await client.wait_connected(5)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    await cancel(closing)
    assert not client.connected


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.ring(handler=hang, calls={"never": never}, max_inflight=4)
async def test_everything_that_is_pending_fails_when_the_engine_goes(ring: Ring, connect: Any, reconnect: bool) -> None:
    client = await connect(reconnect=reconnect)
    pending = [
        asyncio.create_task(client.request({"x": tensor(5000)})),
        asyncio.create_task(client.request({"x": tensor(5000)}, timeout=60)),
        asyncio.create_task(_stream(client)),
        asyncio.create_task(client.call("never")),
    ]
    served = asyncio.create_task(_slot(client, 700_000))  # waits for nothing of ours
    await eventually(lambda: ring.statistics().running == 3 and client.statistics().slots_writing == 1)
    pending += [
        asyncio.create_task(_slot(client, 700_000)),  # waits in line
        asyncio.create_task(client.request({"x": tensor(700_000)})),  # waits in line, has the last place in flight
        asyncio.create_task(client.request({"x": 1})),  # waits for a place in flight
    ]
    await eventually(lambda: client.statistics().waiting == 2)
    await ring.close()
    for task in pending:
        with pytest.raises(shmring.EngineDeadError):
            await asyncio.wait_for(task, 5)
    await cancel(served)
    assert not client.connected
    now = client.statistics()
    assert (now.connected, now.epoch, now.leases, now.slots_in_use, now.in_flight, now.waiting) == (False, 0, 0, 0, 0, 0)


@pytest.mark.client(reconnect=False)
async def test_without_reconnect_the_client_has_ended(ring: Ring, client: Client, refuses_everything: Any) -> None:
    slot = await client.slot(5000)
    await gone(ring, client)
    await refuses_everything(client, shmring.EngineDeadError)
    with pytest.raises(shmring.EngineDeadError):
        slot.tensor((1,), torch.uint8)
    assert client.abort("anything") == 0
    slot.close()
    await client.close()


async def test_a_client_attaches_to_the_next_engine(ring: Ring, client: Client, serve: Any) -> None:
    first_epoch = client.statistics().epoch
    for life in range(1, 4):
        assert (await client.request({"n": life, "x": tensor(5000)}, timeout=5))["n"] == life
        await gone(ring, client)
        ring = await serve(echo)
        await client.wait_connected(timeout=5)
        assert client.statistics().reconnections == life
    assert client.statistics().epoch == ring.epoch != first_epoch
    now, [connection] = client.statistics(), client.engines.values()
    assert (now.submitted, connection.copies) == (3, now.copies), "counters go on"
    assert now.copies == 3


async def test_what_is_asked_while_no_engine_is_there_waits_for_the_next(ring: Ring, client: Client, serve: Any) -> None:
    await gone(ring, client)
    with pytest.raises(shmring.WouldBlock, match="no engine"):
        client.submit_nowait(1)
    with pytest.raises(shmring.WouldBlock, match="no engine"):
        client.slot_nowait(1)
    for attempt in (client.request(1, timeout=0.02), client.wait_connected(timeout=0.02)):
        with pytest.raises(TimeoutError):
            await attempt
    asking = asyncio.create_task(client.request({"x": tensor(5000)}))
    aborted = asyncio.create_task(client.request(2, request_id="mine"))
    await asyncio.sleep(0)
    assert client.abort("mine") == 1
    with pytest.raises(shmring.AbortedError):
        await aborted
    await serve(echo)
    assert (await asyncio.wait_for(asking, 5))["x"].numel() == 5000


async def test_slots_and_views_of_a_former_life_harm_nobody(ring: Ring, client: Client, serve: Any) -> None:
    answer = await client.request({"x": tensor(5000, 3)}, timeout=5)
    slot = await client.slot(5000, drain=True)
    view = slot.tensor((5000,), torch.uint8).fill_(4)
    await gone(ring, client)
    ring = await serve(echo)
    await client.wait_connected(timeout=5)
    with pytest.raises(shmring.EngineDeadError):
        slot.tensor((1,), torch.uint8)
    assert set(answer["x"].tolist()) == {3}
    view.fill_(5)
    again = await client.request({"x": view, "y": answer["x"]}, timeout=5)
    assert set(again["x"].tolist()) == {5}
    assert client.statistics().in_place == 0, "it lies in a slab of the past"
    slot.close()
    del answer, again, view
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    assert client.statistics().slots_in_use == 0


async def test_the_memory_of_a_former_life_is_freed_without_the_collector(serve: Any, connect: Any) -> None:
    before = slab_mappings()
    ring = await serve(echo)
    client = await connect(reconnect=True)
    await client.request({"x": tensor(5000)}, timeout=5)
    with uncollected():
        for _ in range(3):
            pending = asyncio.create_task(client.request({"hang": True, "x": tensor(500_000)}))
            await eventually(lambda: client.statistics().in_flight)
            view = (await client.request({"x": tensor(5000)}, timeout=5))["x"]
            waiting = asyncio.create_task(_slot(client, 900_000))
            await eventually(lambda: client.statistics().waiting)
            await ring.close()
            for task in (pending, waiting):
                with pytest.raises(shmring.EngineDeadError):
                    await task
            del pending, waiting, task
            ring = await serve(echo)
            await client.wait_connected(timeout=5)
            assert slab_mappings() == before + 3, "the ring's, the client's, and the old one that a view keeps"
            del view
            await eventually(lambda: slab_mappings() == before + 2)


@pytest.mark.ring(handler=hang)
async def test_the_errors_of_a_former_life_keep_no_payload_alive(ring: Ring, client: Client) -> None:
    blocker = await client.slot(900_000)
    payloads = [tensor(10), tensor(500_000)]
    died = [weakref.ref(payload) for payload in payloads]
    with uncollected():
        tasks = [asyncio.create_task(client.request({"x": payload})) for payload in payloads]
        await eventually(lambda: ring.statistics().running == 1 and client.statistics().waiting == 1)
        await ring.close()
        for task in tasks:
            with pytest.raises(shmring.EngineDeadError):
                await task
        del task, tasks, payloads
        await asyncio.sleep(0)  # the loop lets go of the tasks
        assert [reference() for reference in died] == [None, None]
    blocker.close()


@pytest.mark.ring(calls={"never": never}, MAX_CALLS=1)
@pytest.mark.client(reconnect=False)
async def test_calls_that_wait_for_their_turn_fail_too(ring: Ring, client: Client) -> None:
    calls = [asyncio.create_task(client.call("never")) for _ in range(4)]
    await turns()
    await ring.close()
    for call in calls:
        with pytest.raises(shmring.EngineDeadError):
            await asyncio.wait_for(call, 5)


async def test_a_client_that_waits_for_an_engine_can_be_closed(ring: Ring, client: Client, serve: Any) -> None:
    await gone(ring, client)
    waiting = [asyncio.create_task(attempt) for attempt in (client.request(1), client.call("x"), _slot(client, 1))]
    await turns(3)
    await client.close()
    for task in waiting:
        with pytest.raises(shmring.ClosedError):
            await task
    ring = await serve(echo)
    await turns()
    assert ring.statistics().clients == 0


@pytest.mark.parametrize("steps", range(12))
async def test_a_client_can_be_closed_at_any_moment_of_attaching_again(
    ring: Ring, serve: Any, connect: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.client.pauses.FIRST_S", 0.0)
    client = await connect(reconnect=True)
    await gone(ring, client)
    ring = await serve(echo)
    while not ring._shell._handshakes._running and not client.connected:
        await asyncio.sleep(0)
    await turns(steps)
    await client.close()
    await eventually(lambda: not ring._shell._handshakes._running)


async def test_an_engine_that_refuses_is_asked_again(
    ring: Ring, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine may be full for a while; the client neither gives up nor asks all the time."""
    # It pauses for long once, so that another is faster, and then shortly.
    monkeypatch.setattr("shmring.client.pauses.FIRST_S", 0.5)
    monkeypatch.setattr("shmring.client.pauses.LONGEST_S", 0.01)
    client = await connect(reconnect=True)
    await gone(ring, client)
    await turns()
    ring = await serve(echo, max_clients=1)
    blocker = await connect()
    await eventually(lambda: ring.statistics().refused >= 3)
    await blocker.close()
    await client.wait_connected(timeout=5)
    assert await client.request("ok", timeout=5) == "ok"


async def test_whatever_an_attempt_to_attach_raises_is_said_and_another_one_made(
    ring: Ring, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.client.pauses.FIRST_S", 0.001)
    client = await connect(reconnect=True)
    attachment = attachment_of(client)
    attach = attachment.attach
    failures = [RuntimeError("a bug"), MemoryError(), ValueError("no such thing")]

    async def attach_or_fail() -> None:
        if failures:
            raise failures.pop()
        await attach()

    monkeypatch.setattr(attachment, "attach", attach_or_fail)
    await ring.close()
    await eventually(lambda: not failures)
    await serve(echo)
    await client.wait_connected(5)
    assert await client.request(1, timeout=5) == 1
    assert "a bug" in caplog.text


@pytest.mark.one_loop
async def test_pauses_between_attempts_are_each_twice_as_long_up_to_a_second(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment, sleep = attachment_of(client), asyncio.sleep
    pauses: list[float] = []
    begun = asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def attach() -> None:
        await begun.wait()
        if len(pauses) < 10:
            raise shmring.EngineDeadError("there is none", engine="test")
        await sleep(3600)

    monkeypatch.setattr(attachment, "attach", attach)
    await ring.close()
    await eventually(lambda: attachment.is_attaching)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", pause)
        begun.set()
        while len(pauses) < 10:
            await sleep(0.001)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0]


async def test_a_session_that_ends_while_it_opens_is_none(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    open_session = Session.open

    async def open_and_lose(*arguments: Any) -> Session:
        session = await open_session(*arguments)
        session.link.abort()
        await asyncio.sleep(0)
        return session

    monkeypatch.setattr(Session, "open", open_and_lose)
    await serve()
    with pytest.raises(shmring.EngineDeadError):
        await connect(connect_timeout_s=0.1)


async def test_a_session_that_ends_late_is_not_taken_for_the_one_that_came_after_it(
    ring: Ring, client: Client, serve: Any
) -> None:
    attachment = attachment_of(client)
    before = attachment.session
    await ring.close()
    await serve(echo)
    await client.wait_connected(timeout=20)
    attachment._lost(before)  # it was attached
    assert client.connected
    assert await client.request(1, timeout=20) == 1


@for_each("drains", [False, True])
async def test_the_end_of_an_engine_that_has_said_so_is_no_warning(
    serve: Any, connect: Any, caplog: pytest.LogCaptureFixture, drains: bool
) -> None:
    ring = await serve(echo)
    client = await connect(reconnect=True)
    with caplog.at_level(logging.INFO, "shmring.client"):
        if drains:
            await ring.drain()
        await gone(ring, client)
    levels = [record.levelname for record in caplog.records if "waiting for the next engine" in record.getMessage()]
    assert levels == ["INFO" if drains else "WARNING"]
    await client.close()
    caplog.clear()


async def test_a_client_that_closes_waits_for_no_engine(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    await client.close()
    assert not attachment_of(client).is_attaching
    assert "waiting for the next engine" not in caplog.text
