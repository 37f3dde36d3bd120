"""What is held when a client closes: it comes back when its holder leaves it, while the process goes on."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
import shmring.client.session
from shmring import Client, Ring
from tests.sessions import let_die, session_of
from tests.waiting import eventually, hold, settled, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(60)]


async def echo(claim: shmring.Claim) -> None:
    await claim.reply(claim.payload)


def quarantined(ring: Ring) -> int:
    return ring.statistics().quarantined_nbytes


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("is_viewed", [False, True])
async def test_a_slot_comes_back_when_it_is_left(ring: Ring, client: Client, drain: bool, is_viewed: bool) -> None:
    async with client.slot(50_000, drain=drain) as slot:
        view = slot.tensor((50_000,), torch.uint8)
        await client.close()
        await turns()
        assert quarantined(ring) > 0
        view.fill_(7)
        if not is_viewed:
            del view
    if is_viewed:
        await turns()
        assert quarantined(ring) > 0, "a view that lives may still be written to"
        assert view.sum() == 350_000
        del view


async def test_a_slot_that_is_dropped_comes_back(ring: Ring, client: Client) -> None:
    slot = await client.slot(50_000)
    await client.close()
    await turns()
    assert quarantined(ring) > 0
    del slot


@pytest.mark.ring(slab_nbytes="1MiB")
async def test_closing_with_a_slot_in_use_loses_no_slab(ring: Ring, connect: Any) -> None:
    for _ in range(20):
        client = await connect()
        async with asyncio.timeout(10), client.slot(400_000):
            await client.close()


@pytest.mark.ring(handler=echo, reply_nbytes="256KiB")
async def test_a_reply_comes_back_when_its_last_view_dies(ring: Ring, client: Client) -> None:
    reply = await client.request({"x": torch.ones(10_000)})
    await client.close()
    await turns()
    assert ring.statistics().reply_free_nbytes < ring.statistics().reply_nbytes
    assert reply["x"].sum() == 10_000
    reply.clear()


@pytest.mark.parametrize("is_viewed", [False, True])
async def test_kept_content_is_unpinned_when_it_is_viewed_no_more(ring: Ring, client: Client, is_viewed: bool) -> None:
    kept = await client.keep(b"k" * 32, {"x": torch.ones(10_000)})
    view = kept.payload["x"] if is_viewed else None
    await client.close()
    kept.close()
    if view is not None:
        await turns()
        assert ring.statistics().kept_pinned == 1
        assert view.sum() == 10_000
        del view
    await eventually(lambda: ring.statistics().kept_pinned == 0)
    assert ring.statistics().kept == 1


async def test_it_comes_back_though_its_loop_has_ended(serve: Any, socket_dir: Path) -> None:
    async def use() -> tuple[Any, Any]:
        async with shmring.connect("test", lease_nbytes="64KiB", socket_dir=str(socket_dir)) as client:
            slot = await client.slot(50_000)
            return slot, slot.tensor((50_000,), torch.uint8)

    ring = await serve()
    held = [*await asyncio.to_thread(asyncio.run, use())]
    assert quarantined(ring) > 0
    held[1].fill_(1)
    held[0].close()
    held.clear()
    await settled(ring)


async def test_a_forked_child_keeps_nothing_back(ring: Ring, client: Client) -> None:
    """It has the socket, too, but neither the mapping nor the views."""
    slot = await client.slot(50_000)
    await client.close()
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        slot.close()
        await settled(ring)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def test_the_end_of_a_socket_proves_nothing_if_the_goodbye_did_not_say_so(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = shmring.client.session.Goodbye
    held = []
    for says_so in (False, True):
        before = quarantined(ring)
        client = await connect()
        slot = await client.slot(50_000)
        with monkeypatch.context() as patch:
            if not says_so:
                patch.setattr(
                    shmring.client.session, "Goodbye", lambda *fields, lingers=False, **others: says(*fields, **others)
                )
            await client.close()
        await eventually(lambda before=before: quarantined(ring) > before)
        held.append(quarantined(ring))
        slot.close()
    await eventually(lambda: quarantined(ring) < held[1])  # so whoever takes the first socket's end for a proof had the time
    assert quarantined(ring) == held[0]
    let_die(ring)


async def test_bells_before_the_goodbye_and_bytes_behind_it_are_no_end(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = []
    hand_on = shmring.client.session.Session._hand_socket_on

    def keep(session: Any, connected: Any) -> None:
        sockets.append(connected.dup())
        hand_on(session, connected)

    monkeypatch.setattr(shmring.client.session.Session, "_hand_socket_on", keep)
    for data in (b"\0", b"\2"):
        client = await connect()
        slot = await client.slot(50_000)
        await client.close()
        sockets[-1].send(data)
        await turns()
        assert quarantined(ring) > 0
        slot.close()
        if data == b"\0":
            await settled(ring)
    await turns()
    assert quarantined(ring) > 0, "who sends what is no bell is not believed any more"
    for connected in sockets:
        connected.close()
    let_die(ring)


@pytest.mark.ring(message_ring_nbytes="16KiB")
async def test_a_goodbye_that_finds_no_room_ends_the_connection(ring: Ring, client: Client) -> None:
    """The engine never reads what is named. So the socket must end, and proves nothing."""
    slot = await client.slot(50_000)
    submission = await client.submit("x")
    (await ring.claim()).done()
    await submission.wait()
    go_on = hold(next(iter(ring._shell._frontends.values())).link)
    link, request_id = session_of(client).link, submission.request_id
    while link.can_write:
        link.send(shmring.core.messages.Abort(request_id))  # of one that has ended
    await client.close()
    go_on()
    await eventually(lambda: ring.statistics().clients == 0)
    slot.close()
    assert quarantined(ring) > 0
    let_die(ring)


async def test_a_ring_may_close_while_a_frontend_still_uses_what_it_named(ring: Ring, client: Client) -> None:
    slot = await client.slot(50_000)
    await client.close()
    await ring.close()
    slot.close()


async def test_a_slot_of_a_blocking_client_comes_back_when_it_is_left(ring: Ring, socket_dir: Path) -> None:
    """Its loop has ended, so nobody carries out what leaving it asks for."""
    connect = functools.partial(shmring.threads.connect, "test", lease_nbytes="64KiB", socket_dir=str(socket_dir))
    client = await asyncio.to_thread(connect)
    slot = await asyncio.to_thread(client.slot, 50_000)
    kept = await asyncio.to_thread(client.keep, b"k" * 32, {"x": torch.ones(10_000)})
    await asyncio.to_thread(lambda: kept.payload)
    await asyncio.to_thread(client.close)
    slot.close()
    kept.close()
    assert "closed" in repr(slot)
    assert "left" in repr(kept)
    with pytest.raises(shmring.ClosedError):
        slot.tensor((1,), torch.uint8)
    with pytest.raises(shmring.ClosedError):
        _ = kept.payload
    ring._shell._book.check()
    await asyncio.wait_for(_unpinned(ring), 10)


async def _unpinned(ring: Ring) -> None:
    while ring.statistics().kept_pinned or quarantined(ring):
        await asyncio.sleep(0.002)
