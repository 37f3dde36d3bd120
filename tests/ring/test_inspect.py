"""What a ring says that it is doing: ``ring.inspect()``, the same from outside, and the warning about a full slab."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.messages import PROTOCOL_VERSION, Inspect
from shmring.ring import inspection
from shmring.transport.endpoint import handshake_frame
from tests.sessions import let_die
from tests.waiting import eventually, turns

BLOCK_NBYTES = 4096


def states(snapshot: shmring.RingSnapshot) -> dict[str, int]:
    """How many blocks are in each state; those of slots are in leases, too."""
    counts: dict[str, int] = {}
    for run in snapshot.runs:
        counts[run.state] = counts.get(run.state, 0) + run.blocks
    return counts


@pytest.mark.client(description="frontend 7")
async def test_a_snapshot_has_the_request_that_is_worked_on_and_its_slot(ring: Ring, client: Client) -> None:
    answer = asyncio.create_task(client.request({"x": torch.zeros(100_000)}, request_id="picture-1"))
    claim = await ring.claim()
    waiting = await client.submit({"x": torch.zeros(10_000)}, request_id="picture-2")
    await eventually(lambda: ring.statistics().waiting == 1)
    snapshot = ring.inspect()
    assert (snapshot.name, snapshot.epoch) == (ring.name, ring.epoch)
    first, second = snapshot.requests
    assert (first.name, first.state, second.name, second.state) == ("picture-1", "running", "picture-2", "waiting")
    assert first.nbytes >= 400_000
    [generation] = first.slots
    [run] = [run for run in snapshot.runs if run.generation == generation]
    assert (run.state, run.client_id, run.blocks * BLOCK_NBYTES) == ("claimed", client.client_id, first.nbytes)
    [frontend] = snapshot.clients
    assert (frontend.name, frontend.state, frontend.requests, frontend.slots) == ("frontend 7", "connected", 2, 2)
    numbers = ring.statistics()
    assert states(snapshot)["leased"] * BLOCK_NBYTES == numbers.leased_nbytes == frontend.leased_nbytes
    assert states(snapshot)["replies"] * BLOCK_NBYTES == numbers.reply_nbytes
    assert snapshot.statistics["slots_claimed"] == 1
    with claim:
        await claim.reply(1)
    await answer
    waiting.abort()
    del claim


async def test_a_slot_that_is_left_with_a_view_is_named(ring: Ring, client: Client) -> None:
    answer = asyncio.create_task(client.request({"x": torch.zeros(100_000)}, request_id="the-leak"))
    with await ring.claim() as claim:
        ring.inspect()  # it has been seen, as one that lives for a second is
        kept = claim.payload["x"]
        await claim.reply(1)
    await answer
    del claim
    snapshot = ring.inspect()
    assert snapshot.requests == []
    [slot] = snapshot.draining
    assert (slot.request, slot.client_id) == ("the-leak", client.client_id)
    assert slot.nbytes >= kept.nbytes
    assert states(snapshot)["draining"] * BLOCK_NBYTES == slot.nbytes
    del kept
    await eventually(lambda: not ring.inspect().draining)


@pytest.mark.ring(max_clients=1)
async def test_anybody_of_this_user_may_ask_and_takes_nothing(ring: Ring, client: Client, socket_dir: Path) -> None:
    before = ring.statistics()
    snapshot = await shmring.inspect(ring.name, socket_dir=str(socket_dir))
    assert ring.statistics() == before
    own = ring.inspect()
    for field in ("name", "epoch", "pid", "runs", "clients", "statistics", "blocks"):
        assert getattr(snapshot, field) == getattr(own, field)


async def test_the_program_of_an_engine_adds_to_it(ring: Ring, socket_dir: Path) -> None:
    ring.add_to_snapshots(lambda: {"model": "mine"})
    assert (await shmring.inspect(ring.name, socket_dir=str(socket_dir))).program == {"model": "mine"}


async def test_without_an_engine_it_says_so(socket_dir: Path) -> None:
    with pytest.raises(shmring.EngineDeadError, match="no engine listens"):
        await shmring.inspect("nobody", socket_dir=str(socket_dir))


@pytest.mark.ring(allowed_uids=frozenset({os.getuid() + 1}))
async def test_who_may_not_ask_is_refused_with_the_reason(ring: Ring, socket_dir: Path) -> None:
    with pytest.raises(shmring.RemoteProtocolError, match="is not allowed to connect"):
        await shmring.inspect(ring.name, socket_dir=str(socket_dir))
    assert "is not allowed to connect" in ring.inspect().errors[0].text


async def test_who_asks_and_does_not_read_keeps_nobody_waiting(
    ring: Ring, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.add_to_snapshots(lambda: {"large": "x" * (2 << 20)})  # more than a socket's buffer

    def ask(silent: socket.socket) -> None:
        silent.connect(str(socket_dir / f"{ring.name}.sock"))
        silent.sendall(handshake_frame(Inspect(version=PROTOCOL_VERSION)))

    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        ask(first)
        assert len((await shmring.inspect(ring.name, socket_dir=str(socket_dir))).program["large"]) == 2 << 20
        assert ring.statistics().refused == 0
        monkeypatch.setattr("shmring.ring.limits.HANDSHAKE_S", 0.05)
        ask(second)
        await eventually(lambda: ring.statistics().refused == 1)
    assert "did not read it in time" in ring.inspect().errors[0].text


async def test_those_who_ask_and_do_not_read_keep_nobody_from_asking(
    serve: Any, connect: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have all the places. Whoever comes gets the place of the one that has been silent for longest."""
    monkeypatch.setattr("shmring.ring.limits.MAX_INSPECTIONS", 3)
    ring = await serve()
    ring.add_to_snapshots(lambda: {"large": "x" * (2 << 20)})
    with contextlib.ExitStack() as silent:
        for _ in range(3):
            connected = silent.enter_context(socket.socket(socket.AF_UNIX))
            connected.connect(str(socket_dir / f"{ring.name}.sock"))
            connected.sendall(handshake_frame(Inspect(version=PROTOCOL_VERSION)))
        await eventually(lambda: len(ring._shell._handshakes._inspecting._pids) == 3)
        await connect()  # has nothing to do with that
        for _ in range(5):
            assert (await shmring.inspect(ring.name, socket_dir=str(socket_dir))).clients
        assert ring.statistics().refused == 1, "only one place was needed, by one after the other"


async def test_what_fails_once_is_looked_at_again(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_LOOK_S", 0.001)
    ring = await serve()
    looking = ring._shell.inspection
    looks = []

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 1:
            raise RuntimeError("once")

    monkeypatch.setattr(looking, "_look", look)
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    await eventually(lambda: len(looks) > 2)
    assert [str(error) for error in errors] == ["once"]


async def test_a_snapshot_is_bounded(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_RUNS", "MAX_CLIENTS", "MAX_REQUESTS"):
        monkeypatch.setattr(inspection, name, 3)
    ring = await serve()
    clients = [await connect() for _ in range(5)]
    submissions = [await client.submit({"x": torch.zeros(5000)}) for client in clients]
    await asyncio.wait_for(ring.claim(), 5)
    snapshot = ring.inspect()
    assert (len(snapshot.runs), len(snapshot.clients), len(snapshot.requests)) == (3, 3, 3)
    assert (snapshot.run_count, snapshot.client_count, snapshot.request_count) == (11, 5, 5)
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=shmring.RingSnapshot) == snapshot
    del submissions


@pytest.mark.ring(slab_nbytes="8MiB")
async def test_kept_content_and_a_frontend_that_has_gone_are_shown(ring: Ring, client: Client) -> None:
    async with client.slot(20_000) as slot:
        view = slot.tensor((5000,), torch.float32)
        kept = await client.keep(bytes(32), {"x": view})
        del view
    assert states(ring.inspect())["kept_pinned"] == 5
    kept.close()
    await eventually(lambda: "kept" in states(ring.inspect()))
    [session] = [attachment.session for attachment in client._engines.attachments.values()]
    session.link.abort()
    await eventually(lambda: [each.state for each in ring.inspect().clients] == ["quarantined"])
    assert "quarantined" in states(ring.inspect())
    let_die(ring)


async def test_a_ring_with_nothing_to_do_is_looked_at_less_often(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_LOOK_S", 0.001)
    monkeypatch.setattr(inspection, "_REST_S", 0.016)
    monkeypatch.setattr(inspection, "_PAUSES", 0)
    ring = await serve()
    looking = ring._shell.inspection
    await eventually(lambda: looking._pause_s == 0.016)
    client = await connect()
    answer = asyncio.create_task(client.request(1, request_id="seen"))
    with await ring.claim() as claim:
        await eventually(lambda: looking._pause_s == 0.001)
        assert list(looking._requests) == [(client.client_id, claim.request_id)]
        await claim.reply(1)
    await answer
    del claim
    await eventually(lambda: looking._pause_s == 0.016 and not looking._requests)


async def test_a_full_slab_is_one_line_that_names_who_waits_and_who_has_it(
    serve: Any, connect: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_LOOK_S", 0.01)
    monkeypatch.setattr(inspection, "_FULL_S", 0.0)
    ring = await serve(slab_nbytes="4MiB")
    holder, waiter = await connect(description="holder"), await connect(description="waiter")
    answer = asyncio.create_task(holder.request({"x": torch.zeros(600_000)}, request_id="the-large-one"))
    claim = await ring.claim()
    assert not [message for message in caplog.messages if "slab is full" in message]
    waiting = asyncio.create_task(waiter.request({"x": torch.zeros(600_000)}))
    await eventually(lambda: [message for message in caplog.messages if "slab is full" in message])
    for _ in range(20):
        await asyncio.sleep(0.01)
    [line] = [message for message in caplog.messages if "slab is full" in message]
    for part in (
        "(waiter, pid ",
        "has waited for 0 s for 2.3 MiB",
        "(holder, pid ",
        "the-large-one, is running",
        "slab_nbytes",
    ):
        assert part in line
    with claim:
        await claim.reply(1)
    del claim
    await answer
    with await ring.claim() as claim:
        await claim.reply(2)
    assert await waiting == 2


async def test_a_client_that_has_all_it_may_have_is_not_told_to_have_a_larger_slab(
    serve: Any, connect: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_LOOK_S", 0.01)
    monkeypatch.setattr(inspection, "_FULL_S", 0.0)
    await serve(slab_nbytes="4MiB", client_quota_nbytes="512KiB")
    greedy, _ = await connect(description="greedy"), await connect()
    async with greedy.slot(400_000):
        waiting = asyncio.create_task(greedy.slot(400_000))
        await eventually(lambda: [message for message in caplog.messages if "slab is full" in message])
        [line] = [message for message in caplog.messages if "slab is full" in message]
        assert "(greedy, pid " in line
        assert line.endswith("have a larger client_quota_nbytes, or fewer requests of one client at a time")
        assert not waiting.done()
    (await waiting).close()


async def test_who_looks_may_connect_in_the_turn_in_which_a_ring_closes(ring: Ring) -> None:
    """Nothing is logged: asyncio accepted it for the cancelled task, and failed."""
    await turns()  # it waits for connections
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(ring._shell._handshakes._listener.socket.getsockname())
        await asyncio.sleep(0)  # its event is next in the loop
        await ring._shell._handshakes.close()
