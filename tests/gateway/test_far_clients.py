"""Clients on other hosts: what they send lies in a slot, and a call ends as on the engine's host, or says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring.gateway.gateway import Gateway
from shmring.transport.far_wire import WINDOW_NBYTES
from tests.tables import for_each
from tests.waiting import cancel, eventually, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

TOKEN = "a secret of the tests"
MIB = 1 << 20
KEY = bytes(32)


def gateway_of(ring: shmring.Ring) -> Gateway:
    close: Any = ring._close_gateway
    gateway: Gateway = close.__self__
    return gateway


async def handler(claim: shmring.Claim) -> None:
    """Does what a payload says; the payload itself is the reply, if it says nothing."""
    payload = claim.payload
    match payload.get("do") if isinstance(payload, dict) else None:
        case "stream":
            for number in range(payload["times"]):
                await claim.reply({"number": number, "x": payload["x"] + number})
        case "say":
            for _ in range(payload["times"]):
                await claim.reply("x" * payload["nbytes"])
        case "fail":
            raise ValueError("this one fails")
        case "time out":
            claim.fail(TimeoutError("it takes too long"))
        case "wait":
            await asyncio.Event().wait()
        case _:
            await claim.done(payload)


@contextlib.asynccontextmanager
async def serving(socket_dir: Path, name: str = "far", **options: Any) -> AsyncIterator[shmring.Ring]:
    async def doubled(number: int) -> int:
        return 2 * number

    async def never() -> None:
        await asyncio.Event().wait()

    given = {
        "slab_nbytes": "80MiB",
        "reply_nbytes": "16MiB",
        "listen": "127.0.0.1:0",
        "token": TOKEN,
        "calls": {"doubled": doubled, "never": never},
    } | options
    async with shmring.serve(name, socket_dir=str(socket_dir), **given) as ring:
        running = asyncio.create_task(ring.run(handler))
        yield ring
        await ring.close()
        await cancel(running)


@pytest.fixture
async def ring(socket_dir: Path) -> AsyncIterator[shmring.Ring]:
    async with serving(socket_dir) as ring:
        yield ring


@pytest.fixture
async def client(ring: shmring.Ring) -> AsyncIterator[shmring.Client]:
    async with shmring.connect(ring.address, token=TOKEN) as client:
        yield client


async def test_tensors_lie_in_a_slot_that_they_were_received_into(ring: shmring.Ring, client: shmring.Client) -> None:
    x = torch.arange(MIB, dtype=torch.float32)
    reply = await client.request({"x": x}, timeout=60)
    assert torch.equal(reply["x"], x)
    there = gateway_of(ring)._client.statistics()
    assert (there.in_place, there.in_place_nbytes, there.copies, there.inline_payloads) == (1, x.nbytes, 0, 0)
    assert ring.statistics().received_nbytes >= x.nbytes
    assert client.statistics().finished == 1


PAYLOADS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "text": lambda: {"prompt": "a cat\u2026", "n": -3, "f": 0.5, "b": b"\0\xff", "l": [1, None, True, 2**63]},
    "an empty tensor": lambda: {"x": torch.empty(0, 3), "y": torch.ones(2)},
    "one value": lambda: [torch.tensor(7), np.float32(1.5), np.array(3, np.int16)],
    "bfloat16": lambda: {"x": torch.arange(300).to(torch.bfloat16).reshape(3, 100)},
    "not contiguous": lambda: {"x": torch.arange(600.0).reshape(20, 30).t()[::2]},
    "bools and bytes": lambda: [torch.tensor([True, False]), torch.arange(9, dtype=torch.uint8), np.array([b"ab", b"c"])],
    "arrays": lambda: {"a": np.arange(10.0), "b": np.array(["x", "yz"]), "c": np.array("2020-01-01", "M8[D]")},
    "many": lambda: [torch.full((number,), number) for number in range(50)],
    "a large one and a small one": lambda: {"x": torch.ones(MIB), "y": torch.ones(1)},
    "nested": lambda: {"x": [{"y": [torch.ones(1000), {"z": torch.zeros(3)}]}]},
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tolist()
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list) else value


@for_each("make", PAYLOADS.values(), ids=PAYLOADS)
async def test_a_payload_comes_as_it_does_on_the_engines_host(
    ring: shmring.Ring, client: shmring.Client, socket_dir: Path, make: Callable[[], Any]
) -> None:
    async with shmring.connect("far", socket_dir=str(socket_dir)) as near:
        assert plain(await client.request(make(), timeout=60)) == plain(await near.request(make(), timeout=60))


async def test_replies_come_in_order_and_leaving_early_aborts(ring: shmring.Ring, client: shmring.Client) -> None:
    x = torch.ones(100_000)
    parts = [part async for part in client.stream({"do": "stream", "times": 5, "x": x}, timeout=60)]
    assert [part["number"] for part in parts] == [0, 1, 2, 3, 4]
    assert torch.equal(parts[4]["x"], x + 4)
    async for _ in client.stream({"do": "stream", "times": 10_000, "x": x}, timeout=60):
        break
    await eventually(lambda: ring.statistics().running == 0 and client.statistics().in_flight == 0)
    assert ring.statistics().aborted == 1


async def test_a_request_ends_with_the_error_of_its_engine(client: shmring.Client) -> None:
    with pytest.raises(shmring.RemoteError, match="ValueError: this one fails"):
        await client.request({"do": "fail"}, timeout=60)
    with pytest.raises(shmring.RemoteError, match="TimeoutError: it takes too long"):
        await client.request({"do": "time out"})
    with pytest.raises(TypeError, match=r"payload\.x"):
        await client.request({"x": object()})
    with pytest.raises(shmring.CapacityError, match="more than engine"):
        await client.request({"x": torch.empty(80 * MIB, dtype=torch.uint8)})
    assert (await client.request({"n": 1}, timeout=60))["n"] == 1


async def test_who_gives_up_aborts_the_request_and_no_other_one(ring: shmring.Ring, client: shmring.Client) -> None:
    async def ended(running: int) -> None:
        await eventually(lambda: ring.statistics().running == running)

    other = asyncio.create_task(client.request({"do": "wait", "x": torch.ones(20_000)}, request_id="other"))
    await ended(1)
    with pytest.raises(TimeoutError, match="on another host: the engine's reply"):
        await client.request({"do": "wait"}, timeout=0.05)
    await ended(1)
    waiting = asyncio.create_task(client.request({"do": "wait"}))
    await ended(2)
    await cancel(waiting)
    await ended(1)
    assert client.abort("other") == 1
    with pytest.raises(shmring.AbortedError):
        await other
    await ended(0)
    assert ring.statistics().aborted == 3


async def test_what_is_given_up_while_it_is_sent_closes_its_connection_and_no_other(
    ring: shmring.Ring, client: shmring.Client, socket_dir: Path
) -> None:
    """Nobody reads it: a client here holds the memory that it would need."""
    waiting = asyncio.create_task(client.request({"do": "wait", "x": torch.ones(100)}, request_id="other"))
    await eventually(lambda: ring.statistics().running == 1)
    async with shmring.connect("far", socket_dir=str(socket_dir)) as near:
        async with near.slot("40MiB"):
            sending = asyncio.create_task(client.request({"x": torch.ones(6 * MIB)}))
            await eventually(lambda: len(gateway_of(ring)._peers) == 3)
            await eventually(lambda: gateway_of(ring)._filling.requests == 1)
            await cancel(sending)
            await turns()
        await eventually(lambda: gateway_of(ring)._filling.requests == 0)
    assert not waiting.done()
    assert client.abort("other") == 1
    await asyncio.gather(waiting, return_exceptions=True)
    assert torch.equal((await client.request({"x": torch.ones(9)}, timeout=60))["x"], torch.ones(9))
    await eventually(lambda: ring.statistics().running == 0)
    assert ring.statistics().submitted == 2
    there = gateway_of(ring)._client.statistics()
    assert there.slots_writing == there.slots_submitted == 0


async def test_sixteen_large_requests_at_a_time_are_all_answered(ring: shmring.Ring, client: shmring.Client) -> None:
    """They are several times the slab: they wait for slots."""
    xs = [torch.full((8 * MIB,), number, dtype=torch.uint8) for number in range(16)]
    replies = await asyncio.gather(*[client.request({"x": x, "number": n}, timeout=100) for n, x in enumerate(xs)])
    assert [reply["number"] for reply in replies] == list(range(16))
    assert all(torch.equal(reply["x"], x) for reply, x in zip(replies, xs, strict=True))


async def test_replies_that_nobody_reads_are_bounded(ring: shmring.Ring, client: shmring.Client) -> None:
    x = torch.ones(MIB, dtype=torch.uint8)
    submission: Any = await client.submit({"do": "stream", "times": 60, "x": x})
    await eventually(lambda: sum(reply.nbytes for reply in submission._replies) >= WINDOW_NBYTES)
    await turns(500)
    assert sum(reply.nbytes for reply in submission._replies) <= WINDOW_NBYTES + MIB
    assert not submission.ended
    numbers = []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            numbers.append((await submission.next())["number"])
    assert numbers == list(range(60))


async def test_replies_in_records_that_are_read_late_are_all_there(ring: shmring.Ring, client: shmring.Client) -> None:
    """They are more than a window, and the engine does not wait with them."""
    texts: Any = await client.submit({"do": "say", "times": 500, "nbytes": 60_000})
    await eventually(lambda: ring.statistics().running == 0)
    assert [len(await texts.next()) for _ in range(500)] == [60_000] * 500
    with pytest.raises(StopAsyncIteration):
        await texts.next()


async def test_a_connection_that_is_refused_is_one_less(ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.gateway.gateway._MOST_PEERS", 1)
    async with shmring.connect(ring.address, token=TOKEN) as client:
        with pytest.raises(shmring.RemoteProtocolError, match="too many connections"):
            await client.request({"n": 1}, timeout=60)
        assert await client.call("doubled", 1, timeout=60) == 2
        monkeypatch.setattr("shmring.gateway.gateway._MOST_PEERS", 2)
        waiting = asyncio.create_task(client.request({"do": "wait"}))
        await eventually(lambda: ring.statistics().running == 1)
        replies = await asyncio.gather(*[client.request({"n": n}, timeout=60) for n in range(5)])
        assert [reply["n"] for reply in replies] == list(range(5))
        assert not waiting.done()
        assert len(gateway_of(ring)._peers) == 2
        await cancel(waiting)


async def test_each_address_of_a_host_is_tried(ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        hosts = ["127.0.0.9", "127.0.0.1"] if host == "localhost" else [host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    address = ring.address.replace("127.0.0.1", "localhost")
    async with shmring.connect(address, token=TOKEN, connect_timeout_s=20) as client:
        assert await client.request({"n": 1}, timeout=60) == {"n": 1}


FAR_AWAY: dict[str, Callable[[shmring.Client], Awaitable[Any]]] = {
    "keep": lambda client: client.keep(KEY, {"x": torch.ones(3)}),
    "wait_kept": lambda client: client.wait_kept(KEY),
    "a slot on a GPU": lambda client: client.slot(100, device="cuda"),
}


@for_each("call", FAR_AWAY.values(), ids=FAR_AWAY)
async def test_what_can_not_be_done_from_another_host_says_so(
    client: shmring.Client, call: Callable[[shmring.Client], Awaitable[Any]]
) -> None:
    with pytest.raises(shmring.LocalProtocolError, match="on another host"):
        await call(client)


async def test_calls_that_wait_for_others_end_with_the_engine(ring: shmring.Ring, client: shmring.Client) -> None:
    """However many wait until fewer are on their way: each that learns of the end lets the next one learn it."""
    calls = [asyncio.create_task(client.call("never")) for _ in range(200)]
    await asyncio.sleep(0)
    await ring.close()
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {shmring.EngineDeadError}


async def test_the_other_calls_are_as_on_the_engines_host(ring: shmring.Ring, client: shmring.Client) -> None:
    assert await client.call("doubled", 21, timeout=60) == 42
    with pytest.raises(shmring.RemoteError, match="tripled"):
        await client.call("tripled", 21)
    assert await client.find(KEY) is None
    assert await client.find_many([KEY, KEY]) == [None, None]
    with pytest.raises(shmring.WouldBlock):
        client.find_nowait(KEY)
    with pytest.raises(shmring.LocalProtocolError, match=r"use submit\(\)"):
        client.submit_nowait({"n": 1})
    async with client.slot("1MiB") as slot:
        view = slot.tensor((512, 512), torch.float32)
        view.fill_(2)
        assert torch.equal((await client.request({"x": view}, timeout=60))["x"], view)
        with pytest.raises(shmring.CapacityError):
            slot.array((1,), np.uint8)
        with pytest.raises(shmring.LocalProtocolError, match="on another host"):
            client.keep_nowait(KEY, {"x": view}, slot)
    with client.slot_nowait(64) as slot:
        pass
    with pytest.raises(shmring.ClosedError):
        slot.tensor((1,), torch.uint8)
    assert [slot.nbytes for slot in await client.slots([10, 20])] == [10, 20]
    client.check_capacity("1MiB")
    await client.wait_connected()
    await client.wait_prefaulted()
    assert (client.names, client.kept_nbytes) == ((ring.address,), 0)
    assert client.engines[ring.address].copies == 0
    assert client.loads()[ring.address].responds
    assert client.choose() == ring.address
    assert client.client_id == 0  # the engine knows the gateway's


async def test_one_client_has_engines_on_this_host_and_on_others(socket_dir: Path) -> None:
    async with serving(socket_dir, "one") as one, serving(socket_dir, "two") as two, serving(socket_dir, "near"):
        names = [one.address, two.address, "near"]
        async with shmring.connect(names, token=TOKEN, socket_dir=str(socket_dir), route="round_robin") as client:
            await eventually(lambda: all(client.engines[name].connected for name in names))
            x = torch.ones(50_000)
            for _ in range(6):
                assert torch.equal((await client.request({"x": x}, timeout=60))["x"], x)
            assert [client.engines[name].statistics().finished for name in names] == [2, 2, 2]
            async with client.slot(100, engine="near") as slot:
                y = slot.tensor((3,), torch.float32).fill_(5)
                assert (await client.request({"x": y}, timeout=60))["x"].tolist() == [5, 5, 5]
            waiting = asyncio.create_task(client.request({"do": "wait"}, engine=one.address))
            await eventually(lambda: one.statistics().running == 1)
            await one.close()
            with pytest.raises(shmring.EngineDeadError) as caught:
                await waiting
            assert caught.value.engine == one.address
            for _ in range(4):
                await client.request({"x": x}, timeout=60)


async def test_an_engine_that_drains_gets_nothing_more_of_clients_that_were_idle(socket_dir: Path) -> None:
    """No request of theirs ends meanwhile, with whose end the load is said. Who comes then hears it at once."""
    async with serving(socket_dir, "one") as one, serving(socket_dir, "two") as two:
        names = [one.address, two.address]
        async with shmring.connect(names, token=TOKEN) as idle:
            await eventually(lambda: set(idle.loads()) == set(names))
            assert await one.drain(timeout=60)
            await eventually(lambda: set(idle.loads()) == {two.address})
            async with shmring.connect(names, token=TOKEN) as new:
                await eventually(lambda: set(new.loads()) == {two.address} and new.engines[one.address].connected)
                for client in (idle, new):
                    await client.request({"n": 1}, timeout=60)
            assert (one.statistics().submitted, two.statistics().submitted) == (0, 2)


async def test_an_end_that_is_late_does_not_end_a_drain(ring: shmring.Ring, client: shmring.Client) -> None:
    """It says the load of before, over another connection."""
    session: Any = client.engines[ring.address]._attachment.session
    gateway_of(ring).say_draining()  # and the load page of the engine does not say so
    await eventually(lambda: session.load.draining)
    assert await client.request({"n": 1}, timeout=60) == {"n": 1}
    assert session.load.draining


async def test_the_next_engine_at_an_address_is_found(socket_dir: Path) -> None:
    async with serving(socket_dir) as ring:
        place = ring.address.split("/")[2]
        client = await shmring.connect(ring.address, token=TOKEN, reconnect=True)
        other = await shmring.connect(ring.address, token=TOKEN)
        waiting = [asyncio.create_task(each.request({"do": "wait"})) for each in (client, other)]
        await eventually(lambda: ring.statistics().running == 2)
    for task in waiting:
        with pytest.raises(shmring.EngineDeadError):
            await task
    with pytest.raises(shmring.EngineDeadError, match="has gone; connect again"):
        await other.request({"n": 1})
    async with serving(socket_dir, listen=place):
        assert await client.request({"n": 1}, timeout=60) == {"n": 1}
    await client.close()
    await other.close()


async def test_a_client_that_is_closed_leaves_nothing(ring: shmring.Ring) -> None:
    client = await shmring.connect(ring.address, token=TOKEN)
    waiting = asyncio.create_task(client.request({"do": "wait", "x": torch.ones(20_000)}))
    await eventually(lambda: ring.statistics().running == 1)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await waiting
    with pytest.raises(shmring.ClosedError):
        await client.request({"n": 1})
    await eventually(lambda: ring.statistics().running == 0 and not gateway_of(ring)._peers)
    assert not gateway_of(ring)._sessions
    await eventually(lambda: gateway_of(ring)._client.statistics().slots_submitted == 0)


async def test_who_has_no_right_token_or_name_is_refused(ring: shmring.Ring) -> None:
    with pytest.raises(shmring.RemoteProtocolError, match="the token is not that"):
        await shmring.connect(ring.address, token="another secret, as long")
    with pytest.raises(shmring.RemoteProtocolError, match="the engine here is 'far', and not 'other'"):
        await shmring.connect(ring.address.replace("/far", "/other"), token=TOKEN)
    with pytest.raises(TypeError, match="token="):
        await shmring.connect(ring.address)
    with pytest.raises(shmring.EngineDeadError, match=r"no engine answers at|did not answer"):
        await shmring.connect("tcp://127.0.0.1:1/far", token=TOKEN, connect_timeout_s=0.01)
    assert gateway_of(ring).refused == 2


WRONG: dict[str, dict[str, Any]] = {
    "listen without a token": {"token": None},
    "a token without a place": {"listen": None},
    "a token that can be guessed": {"token": "short"},
    "no port": {"listen": "127.0.0.1"},
    "no such port": {"listen": "127.0.0.1:70000"},
    "tls": {"tls": "on"},
}


ADDRESSES = ["tcp://" + "a" * 64 + ":1/far", "tcp://a..b:1/far", "tcp://.:1/far", "tcp://" + "a." * 130 + ":1/far"]


@for_each("address", ADDRESSES)
async def test_an_address_that_no_host_has_is_refused(address: str) -> None:
    """The resolver's own error for these is a UnicodeError, which says nothing of an address."""
    with pytest.raises(ValueError, match="has host and port") as caught:
        await shmring.connect(address, token=TOKEN, connect_timeout_s=1)
    assert not isinstance(caught.value, UnicodeError)


def test_what_is_said_about_tls_is_looked_at_without_a_token_as_well() -> None:
    with pytest.raises(TypeError, match="tls is an"):
        shmring.connect("near", tls="on")  # type: ignore[arg-type]


@for_each("kind", ["near", "far"])
async def test_a_slot_takes_the_same_wherever_its_engine_is(ring: shmring.Ring, kind: str) -> None:
    name = ring.address if kind == "far" else ring.name
    async with shmring.connect(name, token=TOKEN, socket_dir=ring.config.socket_dir) as client:
        with client.slot_nowait(128) as slot:
            dtypes: tuple[Any, ...] = (np.float32, "float32", torch.quint8)
            for dtype in dtypes:
                with pytest.raises(TypeError):
                    slot.tensor((1,), dtype)
            dtypes = (object, "V8", "no dtype", [("a", "i4")])
            for dtype in dtypes:
                with pytest.raises(TypeError):
                    slot.array((1,), dtype)
            slot.tensor((1,), torch.uint8)
            with pytest.raises(shmring.CapacityError, match=r"shape \(65,\) needs 65 bytes at 64, the slot has 128"):
                slot.array((65,), np.uint8)  # each begins on a line of its own
            slot.array((64,), np.uint8)


async def test_a_session_that_can_not_be_made_leaves_no_connection(ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("there is no room")

    monkeypatch.setattr("shmring.client.far_session.Flight", fails)
    with pytest.raises(MemoryError) as caught:
        await shmring.connect(ring.address, token=TOKEN)
    await eventually(lambda: not gateway_of(ring)._peers)  # while the error still holds what was made
    del caught


async def test_threads_are_clients_from_other_hosts_as_well(ring: shmring.Ring) -> None:
    def ask() -> None:
        with shmring.threads.connect(ring.address, token=TOKEN) as client:
            x = torch.arange(100_000)
            assert torch.equal(client.request({"x": x}, timeout=60)["x"], x)
            replies = client.stream({"do": "stream", "times": 3, "x": x}, timeout=60)
            assert [reply["number"] for reply in replies] == [0, 1, 2]
            with client.slot(800_000) as slot:
                view = slot.tensor((100_000,), torch.int64)
                view.fill_(7)
                assert torch.equal(client.submit({"x": view}).result(timeout=60)["x"], view)
            with pytest.raises(shmring.LocalProtocolError, match=r"use submit\(\)"):
                client.submit_nowait({"n": 1})
            assert client.call("doubled", 4, timeout=60) == 8
        with pytest.raises(TypeError, match="token="):
            shmring.threads.connect(ring.address)

    await asyncio.to_thread(ask)


@for_each("options", WRONG.values(), ids=WRONG)
async def test_an_option_that_makes_no_sense_is_refused(socket_dir: Path, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        shmring.serve("far", socket_dir=str(socket_dir), **{"listen": "127.0.0.1:0", "token": TOKEN} | options)
    assert "short" not in str(caught.value)


async def test_what_leaves_the_host_is_encrypted_unless_told_otherwise(socket_dir: Path) -> None:
    with pytest.raises(shmring.LocalProtocolError, match="give tls="):
        await shmring.serve("far", socket_dir=str(socket_dir), slab_nbytes="16MiB", listen="0.0.0.0:0", token=TOKEN)
    async with serving(socket_dir, listen="0.0.0.0:0", tls="off") as ring:
        address = ring.address.replace("0.0.0.0", "127.0.0.1")
        async with shmring.connect(address, token=TOKEN) as client:
            assert await client.request({"n": 1}, timeout=60) == {"n": 1}


async def test_with_tls_it_is_the_same(socket_dir: Path, certificate: tuple[Path, Path]) -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*certificate)
    async with serving(socket_dir, listen="localhost:0", tls=served) as ring:
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        async with shmring.connect(ring.address, token=TOKEN, tls=trusting) as client:
            x = torch.arange(MIB, dtype=torch.float32)
            replies = await asyncio.gather(*[client.request({"x": x + n}, timeout=100) for n in range(3)])
            assert all(torch.equal(reply["x"], x + n) for n, reply in enumerate(replies))
        with pytest.raises(PermissionError, match="not to be trusted"):
            await shmring.connect(ring.address, token=TOKEN, tls=ssl.create_default_context())
        with pytest.raises((shmring.EngineDeadError, shmring.RemoteProtocolError)):
            await shmring.connect(ring.address, token=TOKEN, connect_timeout_s=0.01)  # without TLS


async def test_handshakes_of_tls_leave_the_loop_its_turns(socket_dir: Path, certificate: tuple[Path, Path]) -> None:
    """Who says nothing keeps no other handshake waiting. A connection that is given up stays open while a thread is at it."""
    threads: list[int] = []
    goes_on = threading.Event()

    class Watched(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            threads.append(threading.get_ident())
            assert goes_on.wait(60)
            assert self.fileno() >= 0
            super().do_handshake(block)

    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.sslsocket_class = Watched
    served.load_cert_chain(*certificate)
    async with serving(socket_dir, listen="localhost:0", tls=served) as ring:
        place = ("localhost", int(ring.address.split("/")[2].split(":")[1]))
        with socket.create_connection(place), socket.create_connection(place):
            gateway = gateway_of(ring)
            await eventually(lambda: len(gateway._silent) == 2 and threads)
            given_up = next(iter(gateway._silent))
            given_up.cancel()
            await turns()
            given_up.cancel()
            await turns()
            assert not given_up.done()
            goes_on.set()
            await eventually(given_up.done)
            assert given_up.cancelled()
            trusting = ssl.create_default_context(cafile=str(certificate[0]))
            async with shmring.connect(ring.address, token=TOKEN, tls=trusting) as client:
                assert await client.request({"n": 1}, timeout=60) == {"n": 1}
    assert threading.get_ident() not in threads
