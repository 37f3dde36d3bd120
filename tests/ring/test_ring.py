"""The engine's end: claims in order, handlers that fail, calls, admission, and closing at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.compiled import GIVING_UP
from shmring.core.messages import PROTOCOL_VERSION, Call, Hello, encode_message
from shmring.ring import handshakes, limits
from shmring.transport.endpoint import handshake_frame
from tests.claiming import claimed
from tests.garbage import uncollected
from tests.sessions import let_die, session_of
from tests.waiting import cancel, eventually, settled, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

MIB = 1 << 20


async def echo(claim: shmring.Claim) -> None:
    await claim.reply(claim.payload)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def slab_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/shmring-")


# -- the API as the design prints it ------------------------------------------------------------------------------------


async def test_the_designs_example_runs_as_printed(socket_dir: Path) -> None:
    pixels = torch.arange(3 * 448 * 448, dtype=torch.float32).reshape(3, 448, 448).to(torch.bfloat16)

    async with shmring.serve("vision", slab_nbytes="16MiB", socket_dir=str(socket_dir)) as ring:

        async def engine() -> None:
            async for claim in ring:
                with claim:
                    pixels = claim.payload["pixel_values"]
                    await claim.reply({"mean": float(pixels.float().mean())})

        running = asyncio.create_task(engine())
        async with shmring.connect("vision", socket_dir=str(socket_dir)) as client:
            answer = await client.request({"pixel_values": pixels}, timeout=5)
            assert answer == {"mean": float(pixels.float().mean())}
            async for part in client.stream({"pixel_values": pixels}):
                assert part == answer
            async with client.slot(shmring.nbytes_for(((3, 448, 448), torch.bfloat16))) as slot:
                view = slot.tensor((3, 448, 448), torch.bfloat16)
                view.copy_(pixels)
                assert await client.request({"pixel_values": view}) == answer
            assert client.statistics().in_place == 1
            assert client.statistics().copies == 2
    await running


async def test_both_ends_can_be_awaited_instead(socket_dir: Path) -> None:
    ring = await shmring.serve("vision", shmring.RingConfig(slab_nbytes="1MiB", socket_dir=str(socket_dir)))
    client = await shmring.connect("vision", shmring.ClientConfig(socket_dir=str(socket_dir)), description="a test")
    assert client.connected
    assert ring.statistics().clients == 1
    await client.close()
    await ring.close()


# -- claims -------------------------------------------------------------------------------------------------------------


async def test_requests_are_claimed_in_order_of_arrival(ring: Ring, connect: Any) -> None:
    clients = [await connect(), await connect()]
    for number in range(20):
        await clients[number % 2].submit(number, request_id=f"request-{number}")
    seen = []
    for _ in range(20):
        with await ring.claim() as claim:
            assert claim.name == f"request-{claim.payload}"
            seen.append((claim.client_id, claim.payload))
    for client_id in {client_id for client_id, _ in seen}:
        mine = [number for other, number in seen if other == client_id]
        assert mine == sorted(mine)
    assert sorted(number for _, number in seen) == list(range(20))


async def test_claimers_are_served_in_the_order_in_which_they_wait(serve: Any, connect: Any) -> None:
    ring, client_of = await serve(), connect
    served: list[int] = []

    async def claimer(number: int) -> None:
        with await ring.claim():
            served.append(number)

    tasks = [asyncio.create_task(claimer(number)) for number in range(10)]
    await turns(5)
    client = await client_of()
    await asyncio.gather(*(client.submit(number) for number in range(10)))
    await asyncio.gather(*tasks)
    assert served == list(range(10))


async def test_claim_nowait_claims_what_nobody_waits_for_or_would_block(ring: Ring, client: Client) -> None:
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    await client.submit("first")
    await eventually(lambda: ring.statistics().waiting)
    with ring.claim_nowait() as claim:
        assert claim.payload == "first"
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    waiting = asyncio.create_task(ring.claim())
    await turns(5)
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    await client.submit("second")
    (await waiting).done()


@pytest.mark.parametrize("after", range(4))
async def test_a_cancelled_claimer_passes_its_turn_on(ring: Ring, client: Client, after: int) -> None:
    """Cancelled at each moment around the arrival of a request: it is never lost, and nobody sleeps beside it."""
    first, second = asyncio.create_task(ring.claim()), asyncio.create_task(ring.claim())
    await turns(5)
    await client.submit("only")
    while not ring.statistics().submitted:
        await asyncio.sleep(0)
    await turns(after)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await first).done()
        await client.submit("another")
    async with asyncio.timeout(5):
        (await second).done()


async def test_a_claimer_that_came_after_the_requests_is_woken_by_the_one_before_it(ring: Ring, client: Client) -> None:
    """Two requests arrive while one waits; another comes before that one has run: nobody but the first can wake it."""
    first = asyncio.create_task(ring.claim())
    await turns(5)
    client.submit_nowait(1)
    client.submit_nowait(2)
    while ring.statistics().submitted < 2:
        await asyncio.sleep(0)
    second = ring.claim()
    try:
        second.send(None)
    except StopIteration as stop:  # the first has run already
        claims = [await first, stop.value]
    else:
        claims = [await first]
        with pytest.raises(StopIteration) as caught:
            second.send(None)
        claims.append(caught.value.value)
    assert [claim.payload for claim in claims] == [1, 2]
    for claim in claims:
        claim.done()


async def test_closing_wakes_every_claimer(ring: Ring) -> None:
    claimers = [asyncio.create_task(ring.claim()) for _ in range(3)]

    async def iterate() -> str:
        async for _ in ring:
            pass
        return "ended"

    iterating = asyncio.create_task(iterate())
    await turns(5)
    await ring.close()
    for claimer in claimers:
        with pytest.raises(shmring.ClosedError):
            await claimer
    assert await iterating == "ended"
    with pytest.raises(shmring.ClosedError):
        await ring.claim()
    with pytest.raises(shmring.ClosedError):
        ring.claim_nowait()


# -- handlers -----------------------------------------------------------------------------------------------------------


class Odd(Exception):
    pass


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(
    ("error", "type_name", "text"),
    [
        (ValueError("bad picture"), "ValueError", "bad picture"),
        (Odd(), "Odd", ""),
        (FileNotFoundError(2, "No such file", "/tmp/\udcff\ud800"), "FileNotFoundError", "No such file"),
        (RuntimeError("\ud800 and \udcff"), "RuntimeError", "? and ?"),
        (RuntimeError("x" * 100_000), "RuntimeError", "x" * 1000),
        (RuntimeError("\U0001f600" * 100_000), "RuntimeError", "\U0001f600" * 500),
        (shmring.AbortedError("not mine", request_id=99), "AbortedError", "not mine"),
    ],
    ids=["plain", "own type", "file name", "surrogates", "long", "long and wide", "another's abort"],
)
async def test_a_handler_that_raises_fails_its_own_request_and_the_ring_goes_on(
    serve: Any, connect: Any, error: Exception, type_name: str, text: str
) -> None:
    async def handle(claim: shmring.Claim) -> None:
        if claim.payload["fail"]:
            raise error
        await claim.reply("fine")

    ring = await serve(handle, message_ring_nbytes="32KiB")
    client = await connect()
    big = torch.ones(10_000, dtype=torch.uint8)
    with pytest.raises(shmring.RemoteError) as caught:
        await client.request({"fail": True, "x": big}, timeout=5)
    assert caught.value.type_name == type_name
    assert text in caught.value.message
    assert await client.request({"fail": False, "x": big}, timeout=5) == "fine"
    assert (ring.statistics().failed, ring.statistics().finished) == (1, 1)
    await client.close()
    await settled(ring)


@pytest.mark.one_loop
async def test_a_request_that_is_finished_without_a_reply_is_an_error_but_an_empty_stream(serve: Any, connect: Any) -> None:
    async def silent(claim: shmring.Claim) -> None:
        pass

    await serve(silent)
    client = await connect()
    with pytest.raises(shmring.RemoteError, match="without a reply"):
        await client.request("x", timeout=5)
    assert [part async for part in client.stream("x", timeout=5)] == []


async def test_run_handles_as_many_at_a_time_as_it_may(serve: Any, connect: Any) -> None:
    running = most = 0
    go_on = asyncio.Event()

    async def handle(claim: shmring.Claim) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1
        await claim.reply(None)

    ring = await serve(handle, max_concurrency=3)
    client = await connect()
    requests = [asyncio.create_task(client.request(number)) for number in range(10)]
    await eventually(lambda: running == 3 and ring.statistics().waiting == 7)
    assert ring.statistics().running == 3
    go_on.set()
    await asyncio.gather(*requests)
    assert most == 3
    with pytest.raises(ValueError, match="max_concurrency"):
        await ring.run(handle, max_concurrency=0)


async def test_cancelling_run_fails_what_it_was_handling(ring: Ring, connect: Any) -> None:
    async def handle(claim: shmring.Claim) -> None:
        await asyncio.Event().wait()

    running = asyncio.create_task(ring.run(handle, max_concurrency=2))
    client = await connect()
    big = torch.ones(10_000, dtype=torch.uint8)
    requests = [asyncio.create_task(client.request({"x": big})) for _ in range(4)]
    await eventually(lambda: ring.statistics().running == 2 and ring.statistics().waiting == 2)
    assert await cancel(running)
    results = await asyncio.wait(requests, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
    failed = [task.exception() for task in results[0]]
    assert failed
    assert all(isinstance(error, shmring.RemoteError) and error.type_name == "CancelledError" for error in failed)
    await eventually(lambda: sum(task.done() for task in requests) == 2)
    await cancel(*requests)


async def test_a_handler_whose_request_is_aborted_is_cancelled(serve: Any, connect: Any) -> None:
    cancelled: list[str] = []

    async def handle(claim: shmring.Claim) -> None:
        tensor = claim.payload["x"]
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(claim.name)
            raise
        finally:
            del tensor

    ring = await serve(handle)
    client = await connect()
    submission = await client.submit({"x": torch.ones(10_000)}, request_id="mine")
    await eventually(lambda: ring.statistics().running)
    submission.abort()
    await eventually(lambda: cancelled == ["mine"])
    with pytest.raises(shmring.AbortedError):
        await submission.result()
    await client.close()
    await settled(ring)


async def test_a_handler_that_is_cancelled_before_it_starts_still_ends_its_claim(serve: Any, connect: Any) -> None:
    """As when a loop that ends cancels all of its tasks."""
    started: list[int] = []

    async def handle(claim: shmring.Claim) -> None:
        started.append(1)

    ring = await serve()
    running = asyncio.create_task(ring.run(handle))
    client = await connect()
    submission = client.submit_nowait({"x": torch.ones(10_000)})

    def handlers() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == "_handle"]

    while not handlers():
        await asyncio.sleep(0)
    handlers()[0].cancel()
    with pytest.raises(shmring.RemoteError, match="CancelledError"):
        await asyncio.wait_for(submission.result(), 5)
    assert started == []
    assert ring.statistics().slots_in_use == 0
    await cancel(running)


# -- payload types ------------------------------------------------------------------------------------------------------


class Picture(msgspec.Struct):
    pixels: torch.Tensor
    label: str = ""

    def __post_init__(self) -> None:
        if self.label == "forbidden":
            raise ValueError("this label is forbidden")
        if self.label == "explosive":
            raise KeyError("this label explodes")


async def test_a_payload_of_the_wrong_type_fails_its_request_and_the_ring_goes_on(serve: Any, connect: Any) -> None:
    seen: list[Picture] = []

    async def handle(claim: shmring.Claim) -> None:
        seen.append(type(claim.payload))
        await claim.reply(int(claim.payload.pixels.sum()))

    ring = await serve(handle, payload_type=Picture)
    client = await connect()
    big = torch.ones(10_000, dtype=torch.uint8)
    for payload, type_name in [
        ({"label": "no pixels", "other": big}, "ValidationError"),
        ({"pixels": "text", "other": big}, "ValidationError"),
        ([big], "ValidationError"),
        ({"pixels": big, "label": "forbidden"}, "ValidationError"),
        ({"pixels": big, "label": "explosive"}, "KeyError"),
    ]:
        with pytest.raises(shmring.RemoteError) as caught:
            await client.request(payload, timeout=5)
        assert caught.value.type_name == type_name
        assert await client.request(Picture(big), timeout=5) == 10_000
    assert set(seen) == {Picture}
    assert ring.statistics().protocol_errors == 0
    await client.close()
    await settled(ring)


# -- calls --------------------------------------------------------------------------------------------------------------


async def test_calls(serve: Any, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def add(first: int, second: int) -> int:
        return first + second

    async def fail() -> None:
        raise ValueError("no \udcff")

    async def unencodable() -> object:
        return object()

    async def enormous(nbytes: int) -> bytes:
        return bytes(nbytes)

    ring = await serve(calls={"add": add, "fail": fail, "unencodable": unencodable, "enormous": enormous})
    client = await connect()
    assert await client.call("add", 2, 3, timeout=5) == 5
    for method, arguments, type_name in [
        ("fail", (), "ValueError"),
        ("nothing", (), "LookupError"),
        ("unencodable", (), "TypeError"),
        ("enormous", (1 << 20,), "CapacityError"),
        ("enormous", (64 << 10,), "CapacityError"),
        ("add", (1,), "TypeError"),
    ]:
        with pytest.raises(shmring.RemoteError) as caught:
            await client.call(method, *arguments, timeout=5)
        assert caught.value.type_name == type_name, method
    assert len(await client.call("enormous", 60_000, timeout=5)) == 60_000
    with pytest.raises(shmring.CapacityError):
        await client.call("add", "x" * (64 << 10), timeout=5)
    with pytest.raises(TypeError):
        await client.call("add", object())
    with pytest.raises(ValueError, match="256"):
        await client.call("m" * 257)
    with pytest.raises(ValueError, match="surrogates"):
        await client.call("\ud800")
    assert ring.statistics().protocol_errors == 0
    assert await client.call("add", 2, 3, timeout=5) == 5, "the connection is still alive"


async def test_many_calls_at_once_wait_for_their_turn(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    async def slow() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await turns(5)
        running -= 1

    monkeypatch.setattr("shmring.ring.limits.MAX_CALLS", 4)
    ring = await serve(calls={"slow": slow})
    client = await connect()
    await asyncio.gather(*(client.call("slow", timeout=10) for _ in range(100)))
    assert most == 4
    assert ring.statistics().protocol_errors == 0


async def test_calls_that_nobody_waits_for_any_more_still_count_until_they_end(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung method must cost its callers their timeouts, and not the connection."""
    go_on = asyncio.Event()

    monkeypatch.setattr("shmring.ring.limits.MAX_CALLS", 3)
    ring = await serve(calls={"hang": go_on.wait})
    client = await connect()
    for _ in range(10):
        with pytest.raises(TimeoutError):
            await client.call("hang", timeout=0.01)
    assert ring.statistics().protocol_errors == 0
    go_on.set()
    assert await client.call("hang", timeout=5) is True


async def seven() -> int:
    return 7


@pytest.mark.one_loop
@pytest.mark.ring(calls={"seven": seven}, MAX_CALLS=1)
async def test_a_call_that_can_not_be_sent_takes_no_turn(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(client)

    def fail(message: object) -> None:
        raise MemoryError("there is none for the record")

    with monkeypatch.context() as patch:
        patch.setattr(session.link, "send", fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                await client.call("seven", timeout=60)
    assert not session.calls._results
    assert await client.call("seven", timeout=60) == 7


async def test_a_call_ends_with_its_connection(serve: Any, connect: Any) -> None:
    cancelled: list[bool] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    await serve(calls={"hang": hang})
    client = await connect()
    calling = asyncio.create_task(client.call("hang"))
    await turns(20)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await calling
    await eventually(lambda: cancelled == [True])


async def echo_bytes(data: bytes) -> bytes:
    return data


@pytest.mark.ring(calls={"echo": echo_bytes})
async def test_large_calls_at_once_do_not_end_the_connection(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.frontend._OTHER_UNREAD_NBYTES", 128 << 10)
    monkeypatch.setattr("shmring.ring.frontend._FAILED_NBYTES", 0)
    data = bytes(50_000)
    assert await asyncio.gather(*(client.call("echo", data, timeout=20) for _ in range(30))) == [data] * 30
    assert ring.statistics().protocol_errors == 0


# -- admission ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.ring(handler=echo)
async def test_a_second_engine_of_a_name_is_refused_and_harms_nothing(client: Client, serve: Any) -> None:
    before = descriptors()
    with pytest.raises(shmring.LocalProtocolError, match="running already"):
        await serve(echo)
    assert descriptors() == before
    assert await client.request("still there", timeout=5) == "still there"


@pytest.mark.one_loop
async def test_a_slab_that_does_not_fit_is_an_error_and_gives_the_name_back(serve: Any) -> None:
    status = os.statvfs("/dev/shm")
    before = descriptors()
    with pytest.raises(shmring.SlabError):
        await serve(slab_nbytes=status.f_blocks * status.f_frsize + (64 << 20), reply_nbytes=4096, backing="/dev/shm")
    with pytest.raises(ValueError, match="no room for leases"):
        await serve(slab_nbytes=8192)
    assert descriptors() == before
    ring = await serve()
    assert ring.statistics().slab_nbytes == MIB


def protection_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, protection = line.split()[:2]
        start, end = (int(text, 16) for text in addresses.split("-"))
        if start <= address < end:
            return protection
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(("backing", "shm_nbytes"), [("auto", MIB - (64 << 10)), ("/dev/shm", MIB - (64 << 10)), ("memfd", 0)])
async def test_whatever_the_slab_lies_in_tensors_cross_it_and_a_frontend_can_only_read_replies(
    serve: Any, connect: Any, backing: str, shm_nbytes: int
) -> None:
    ring = await serve(echo, backing=backing)
    assert (ring.statistics().shm_nbytes, ring.statistics().reply_nbytes) == (shm_nbytes, 64 << 10)
    client = await connect()
    sent = torch.arange(5000, dtype=torch.int32)
    async with client.slot(sent.nbytes) as slot:
        view = slot.tensor(sent.shape, sent.dtype).copy_(sent)
        reply = await client.request(view, timeout=5)
        assert protection_at(view.data_ptr()) == "rw-s"
    assert torch.equal(reply, sent)
    assert protection_at(reply.data_ptr()) == "r--s"
    await client.close()
    await ring.close()
    assert torch.equal(reply, sent), "it keeps the mapping"


@pytest.mark.one_loop
async def test_what_is_asked_wrongly_is_refused_at_once(serve: Any, connect: Any) -> None:
    with pytest.raises(TypeError, match="no option slab_bytes"):
        await serve(slab_bytes=1)
    with pytest.raises(ValueError, match="can't name an engine"):
        await serve(name="a/b")
    with pytest.raises(TypeError, match="no option lease"):
        await connect(lease=1)
    with pytest.raises(ValueError, match="256 characters"):
        await connect(description="x" * 257)


@pytest.mark.ring(handler=echo, max_clients=2)
async def test_more_clients_than_may_connect_are_refused_until_one_goes(ring: Ring, connect: Any) -> None:
    clients = [await connect(), await connect()]
    with pytest.raises(shmring.RemoteProtocolError, match="max_clients"):
        await connect()
    assert ring.statistics().refused == 1
    await clients[0].close()
    await eventually(lambda: ring.statistics().clients == 1)
    assert await (await connect()).request(1, timeout=5) == 1


_HANG_UP = """
import asyncio, os, sys
from shmring.core.messages import PROTOCOL_VERSION, Hello
from shmring.errors import RemoteProtocolError
from shmring.transport.endpoint import attach_engine
from shmring.transport.listener import socket_path

async def hang_up(times):
    try:
        for _ in range(times):
            path = socket_path("test", sys.argv[1])
            engine = await attach_engine(path, Hello(PROTOCOL_VERSION, 4096), frozenset({os.getuid()}))
            engine.socket.close()
    except RemoteProtocolError as error:
        return str(error)
    return "attached"

async def main():
    print(await hang_up(int(sys.argv[2])), flush=True)
    sys.stdin.readline()  # the engine has heard of their ends
    print(await hang_up(1), flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


@pytest.mark.ring(max_clients=1)
async def test_who_was_refused_leaves_no_descriptor(client: Client, connect: Any) -> None:
    counts = []
    for _ in range(3):
        with pytest.raises(shmring.RemoteProtocolError, match="max_clients"):
            await connect()
        await turns()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts == [counts[0]] * 3


async def test_who_has_said_hello_counts_no_more_as_one_who_says_nothing(ring: Ring, connect: Any) -> None:
    ring._shell._handshakes._greeting._count = 1
    for _ in range(3):
        client = await connect()
        await client.close()
    assert ring.statistics().refused == 0
    assert not ring._shell._handshakes._greeting._pids


async def test_connections_that_have_gone_count_for_their_process_alone(
    serve: Any, connect: Any, socket_dir: Path, run_python: Any
) -> None:
    times = 16
    ring = await serve(echo, slab_nbytes="8MiB", max_clients=times + 2)
    clients = [await connect()]
    process = run_python("-c", _HANG_UP, socket_dir, times, stdin=subprocess.PIPE)
    for answer in ("attached", "16 connections that have ended"):
        assert answer in await asyncio.to_thread(process.line)
        await eventually(lambda: (ring.statistics().clients, ring.statistics().departed_clients) == (1, times))
        process.write("\n")
    assert ring.statistics().refused == 1
    clients += [await connect(lease_nbytes=4096) for _ in range(times + 1)]
    assert await clients[-1].request(1, timeout=5) == 1
    with pytest.raises(shmring.RemoteProtocolError, match="max_clients"):
        await connect()
    await asyncio.to_thread(process.rest, 20)
    for client in clients:
        await client.close()
    await settled(ring)


@pytest.mark.ring(HANDSHAKE_S=0.05)
async def test_who_does_not_say_hello_in_time_is_disconnected(ring: Ring, socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(os.fspath(socket_dir / "test.sock"))
        silent.setblocking(False)
        await eventually(lambda: ring.statistics().refused == 1)
        assert await asyncio.get_running_loop().sock_recv(silent, 100) == b""


async def test_a_frontend_that_goes_before_it_is_welcome_keeps_nothing(ring: Ring, socket_dir: Path) -> None:
    """It never got the slab, so its process (which lives on: it is this one) can't be writing to it."""
    hello = handshake_frame(Hello(PROTOCOL_VERSION, 65536))
    for _ in range(30):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.connect(os.fspath(socket_dir / "test.sock"))
            hasty.sendall(hello)
    await eventually(lambda: ring.statistics().refused == 30)


@pytest.mark.ring(max_clients=2)
async def test_as_many_frontends_as_are_allowed_may_come_at_once(ring: Ring, socket_dir: Path) -> None:
    connections = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for connection in connections:
        connection.connect(os.fspath(socket_dir / "test.sock"))
        connection.sendall(handshake_frame(Hello(PROTOCOL_VERSION, 65536)))
    await eventually(lambda: ring.statistics().clients == 2)
    assert ring.statistics().refused == 0
    for connection in connections:
        connection.sendall(GIVING_UP)
        connection.close()


@pytest.mark.ring(calls={"seven": seven}, MAX_CALLS=1)
async def test_a_call_that_follows_the_answer_to_another_at_once_is_no_call_too_many(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    [frontend] = ring._shell._frontends.values()
    send = frontend.link.send
    answered: list[int] = []

    def send_and_call_again(message: Any) -> None:
        send(message)
        answered.append(message.call_id)
        if len(answered) < 3:  # as an impatient frontend would
            frontend.handle_record(encode_message(Call(message.call_id + 1, "seven", b"\x90")))

    monkeypatch.setattr(frontend.link, "send", send_and_call_again)
    session = session_of(client)
    for call_id in (2, 3):
        session.calls._results[call_id] = asyncio.get_running_loop().create_future()
    assert await client.call("seven", timeout=5) == 7
    await asyncio.wait_for(asyncio.gather(*session.calls._results.values()), 5)
    assert ring.statistics().protocol_errors == 0


async def test_a_frontend_that_says_goodbye_before_it_is_welcome_keeps_nothing(ring: Ring, socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as polite:
        polite.connect(os.fspath(socket_dir / "test.sock"))
        polite.sendall(handshake_frame(Hello(PROTOCOL_VERSION, 65536)) + GIVING_UP)
        polite.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(polite, 65536):
            pass
    assert ring.statistics().protocol_errors == 0


async def test_an_engine_out_of_descriptors_accepts_again_later(ring: Ring, socket_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        probe = os.dup(0)
        os.close(probe)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        try:
            client.connect(os.fspath(socket_dir / "test.sock"))
            await eventually(lambda: ring.statistics().refused)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.send(handshake_frame(Hello(PROTOCOL_VERSION, 65536)))
        await eventually(lambda: ring.statistics().clients == 1)
        client.send(GIVING_UP)
        await eventually(lambda: ring.statistics().clients == 0)


class Accepting:
    """A listening socket at which the kernel refuses some connections first."""

    def __init__(self, listening: socket.socket, number: int) -> None:
        self._listening = listening
        self._failures = [OSError(number, os.strerror(number))] * 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)

    def accept(self) -> Any:
        if self._failures:
            raise self._failures.pop()
        return self._listening.accept()


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM, errno.EIO, errno.EPROTO])
async def test_accepting_goes_on_whatever_the_kernel_says(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall, a security module, a frontend that went away in between: that must not be the last one for ever."""
    monkeypatch.setattr("shmring.ring.handshakes._ACCEPT_PAUSE_S", 0.001)
    ring = await serve(echo)
    listener = ring._shell._handshakes._listener
    monkeypatch.setattr(listener, "socket", Accepting(listener.socket, number))
    client = await connect()
    assert await client.request(1, timeout=5) == 1
    assert ring.statistics().refused == 3
    [line] = [message for message in caplog.messages if os.strerror(number) in message]
    assert line.startswith("can't accept a frontend: ")


async def test_silent_processes_keep_nobody_from_connecting(
    serve: Any, connect: Any, socket_dir: Path, run_python: Any
) -> None:
    """A process has a connection in each place of those that have not said hello, and is stopped; others do what they like."""
    places = 2 + limits.MAX_WORKERS
    ring = await serve(echo, max_clients=2)
    process = run_python("-c", _SAYS_NOTHING, socket_dir / "test.sock", places, stdin=subprocess.PIPE)
    assert process.line() == "silent"
    process.send(signal.SIGSTOP)
    await eventually(lambda: len(ring._shell._handshakes._greeting._pids) == places)
    clients = [await connect() for _ in range(2)]
    assert await clients[1].request(1, timeout=5) == 1
    assert (await shmring.inspect(ring.name, socket_dir=str(socket_dir))).client_count == 2
    assert ring.statistics().refused == 1, "only one place was needed, by one after the other"


async def test_of_silent_peers_the_process_with_the_most_loses_its_oldest() -> None:
    places, lost = handshakes._Places(3), []

    async def keep_silent(name: str, pid: int) -> None:
        try:
            async with places.hold(pid):
                await asyncio.Event().wait()
        except TimeoutError:
            lost.append(name)

    peers = [("alone", 1), ("the greedy one's oldest", 2), ("the greedy one's next", 2), ("who comes", 3)]
    tasks = [asyncio.create_task(keep_silent(*peer)) for peer in peers]
    await eventually(lambda: lost)
    assert lost == ["the greedy one's oldest"]
    await cancel(*tasks)


_SAYS_NOTHING = """
import socket, sys
connections = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for connection in connections:
    connection.connect(sys.argv[1])
print("silent", flush=True)
sys.stdin.read()
"""


@pytest.mark.ring(handler=echo)
async def test_an_engine_without_descriptors_says_so_once_however_often_frontends_try(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("shmring.ring.handshakes.sealed_rings", refuse)
        with pytest.raises(shmring.EngineDeadError, match=r"its log says why|did not answer"):  # the time may end in an attempt
            await connect(connect_timeout_s=2.0)
    assert ring.statistics().refused > 1
    assert len([message for message in caplog.messages if "Too many open files" in message]) == 1
    assert await (await connect()).request(1, timeout=5) == 1


async def test_whoever_removes_the_directory_of_the_socket_keeps_nobody_out(
    serve: Any, connect: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """logind removes ``$XDG_RUNTIME_DIR`` when its user logs out. Who is connected goes on; no other engine gets the name."""
    monkeypatch.setattr("shmring.ring.handshakes._LOOK_S", 0.02)
    directory = socket_dir / "run"
    ring = await serve(echo, socket_dir=str(directory))
    old = await connect(socket_dir=str(directory))
    for _ in range(2):
        shutil.rmtree(directory)
        with pytest.raises(shmring.LocalProtocolError, match=rf"is running already \(pid {os.getpid()}"):
            await serve(echo, socket_dir=str(directory))
        new = await connect(socket_dir=str(directory))
        assert await new.request(2, timeout=5) == 2
        assert await old.request(1, timeout=5) == 1
        await new.close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    lines = [record for record in caplog.records if "was removed, and is there again" in record.getMessage()]
    assert len(lines) == 2
    assert "is there again" in ring.inspect().errors[0].text
    await ring.close()
    assert os.listdir(directory) == []
    await (await serve(echo, socket_dir=str(directory))).close()


async def test_a_lock_that_somebody_removes_is_there_again_and_the_log_says_so(
    serve: Any, connect: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmring.ring.handshakes._LOOK_S", 0.02)
    ring = await serve(echo)
    lock = socket_dir / "test.lock"
    lock.unlink()
    said = f"{lock} was removed, and is there again"
    await eventually(lambda: said in caplog.text)
    assert lock.exists()
    assert ring.inspect().errors[0].text == said
    assert await (await connect()).request(1, timeout=5) == 1


async def test_what_comes_back_in_the_place_of_the_directory_is_checked_and_named_once(
    serve: Any, connect: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    monkeypatch.setattr("shmring.ring.handshakes._LOOK_S", 0.005)
    directory = socket_dir / "run"
    ring = await serve(echo, socket_dir=str(directory))
    listener = ring._shell._handshakes._listener
    keep = listener.keep
    monkeypatch.setattr(listener, "keep", lambda: (looks.append(1), keep())[1])
    old = await connect(socket_dir=str(directory))
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)
    directory.chmod(0o777)
    await eventually(lambda: "can't be made again yet" in caplog.text)
    looks.clear()
    await eventually(lambda: len(looks) > 5)
    [line] = [message for message in caplog.messages if "can't be made again yet" in message]
    assert "chmod go-w" in line
    assert await old.request(1, timeout=5) == 1
    directory.chmod(0o700)
    assert await (await connect(socket_dir=str(directory))).request(1, timeout=5) == 1


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("failing", ["sealed_rings", "map_rings", "send_welcome", "ProcessWatch"])
@pytest.mark.ring(handler=echo)
async def test_a_frontend_that_cannot_be_admitted_leaks_nothing_and_another_can(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = descriptors()

    def refuse(*arguments: Any) -> None:
        if failing == "ProcessWatch":
            os.close(arguments[1])  # as it does
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(f"shmring.ring.handshakes.{failing}", refuse)
        with pytest.raises(shmring.EngineDeadError, match=r"its log says why|did not answer"):  # the time may end in an attempt
            await connect(connect_timeout_s=0.05)
        await eventually(lambda: ring.statistics().refused > 0)
    await eventually(lambda: descriptors() == before)
    await settled(ring)
    client = await connect()
    assert await client.request(1, timeout=5) == 1


@pytest.mark.ring(handler=echo)
async def test_an_engine_keeps_two_descriptors_for_each_frontend(client: Client, connect: Any) -> None:
    """Two at this end and three at the other: rings and slab need none once they are mapped."""
    before = descriptors()
    for _ in range(5):
        await connect()
    assert descriptors() - before == 5 * (2 + 3)


# -- lists that are too long for one message ------------------------------------------------------------------------------


async def reply_often(claim: shmring.Claim) -> None:
    for number in range(claim.payload):
        await claim.reply(torch.full((1100,), number % 251, dtype=torch.uint8))


narrow = pytest.mark.ring(handler=reply_often, slab_nbytes="32MiB", reply_nbytes="16MiB", message_ring_nbytes="16KiB")


@narrow
async def test_replies_dropped_together_come_back_though_they_are_too_many_for_a_message(ring: Ring, client: Client) -> None:
    replies = [reply async for reply in client.stream(1600, timeout=30)]
    assert client.statistics().reply_slots_held == 1600
    replies.clear()
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    assert ring.statistics().protocol_errors == 0


@narrow
async def test_a_goodbye_that_keeps_more_than_a_message_names_gives_all_else_back(ring: Ring, client: Client) -> None:
    replies = [reply async for reply in client.stream(1600, timeout=30)]
    del replies[:100]
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    now = ring.statistics()
    assert now.protocol_errors == 0
    assert now.reply_nbytes - now.reply_free_nbytes == 1500 * 4096, "what is viewed is kept until the process ends"
    assert now.quarantined_nbytes == 0
    assert all(int(reply[0]) == (number + 100) % 251 for number, reply in enumerate(replies))
    let_die(ring)
    assert ring.statistics().reply_free_nbytes == now.reply_nbytes


async def add_up(claim: shmring.Claim) -> None:
    await claim.reply(sum(int(tensor[0]) for tensor in claim.payload))


@pytest.mark.ring(handler=add_up, slab_nbytes="16MiB")
async def test_slots_of_a_request_that_are_too_many_for_a_message_come_back(client: Client) -> None:
    slots = [await client.slot(64) for _ in range(1200)]
    tensors = [slot.tensor((64,), torch.uint8).fill_(number % 251) for number, slot in enumerate(slots)]
    assert await client.request(tensors, timeout=20) == sum(number % 251 for number in range(1200))
    assert client.statistics().slots_submitted == 0
    assert client.statistics().in_place == 1200
    for slot in slots:
        slot.close()


# -- closing ------------------------------------------------------------------------------------------------------------


@pytest.mark.ring(message_ring_nbytes="16KiB")
async def test_closing_for_a_reason_that_is_no_text_closes(ring: Ring, client: Client) -> None:
    claiming = asyncio.create_task(ring.claim())
    await asyncio.sleep(0)
    await ring.close("bad \udcff " + "x" * 5000)
    with pytest.raises(shmring.ClosedError):
        await asyncio.wait_for(claiming, 1)
    await eventually(lambda: not client.connected)


async def test_closing_fails_what_is_pending_and_gives_everything_back(serve: Any, connect: Any) -> None:
    seen: list[shmring.Claim] = []
    before = slab_mappings()

    async def hold(claim: shmring.Claim) -> None:
        seen.append(claim)
        await asyncio.Event().wait()

    ring = await serve(hold)
    client = await connect()
    request = asyncio.create_task(client.request({"x": torch.ones(10_000)}))
    await eventually(lambda: seen)
    await ring.close()
    await ring.close()
    with pytest.raises(shmring.EngineDeadError):
        await request
    assert seen[0].aborted
    await client.close()
    await eventually(lambda: slab_mappings() == before)


async def test_nothing_is_left_after_many_lives(serve: Any, connect: Any) -> None:
    async def life() -> None:
        ring = await serve(echo)
        client = await connect()
        reply = await client.request({"x": torch.ones(5000)}, timeout=5)
        assert int(reply["x"].sum()) == 5000
        async with client.slot(100) as slot:
            slot.tensor((5,), torch.uint8)
        del reply
        await client.close()
        await ring.close()
        await turns(5)
        await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    await life()
    with uncollected():
        before = descriptors(), slab_mappings(), len(asyncio.all_tasks())
        for _ in range(10):
            await life()
        await eventually(lambda: (descriptors(), slab_mappings(), len(asyncio.all_tasks())) == before)


async def test_a_close_that_is_cancelled_at_any_moment_has_closed(serve: Any, connect: Any) -> None:
    for steps in range(1, 20):
        ring = await serve(echo)
        client = await connect()
        closing = asyncio.create_task(ring.close())
        await turns(steps)
        ended = closing.done()
        await cancel(closing)
        await client.close()
        again = await serve(echo)  # the name is free
        await again.close()
        if ended:
            return
    pytest.fail("closing never ended")


async def test_a_claim_may_be_left_after_its_ring_is_closed(ring: Ring, client: Client) -> None:
    _, claim = await claimed(ring, client, {"x": torch.arange(5000, dtype=torch.int32)})
    with claim:
        tensor = claim.payload["x"]
        await ring.close()
        assert int(tensor[-1]) == 4999, "its views stay valid"
        with pytest.raises(shmring.AbortedError):
            await claim.reply({"x": tensor})
        with pytest.raises(shmring.AbortedError):
            claim.reply_nowait({"x": tensor})


@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("offload_nbytes", [0, MIB], ids=["copied on a thread", "copied in the loop"])
async def test_closing_while_a_reply_gets_its_space_is_an_abort(
    serve: Any, connect: Any, steps: int, offload_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space may be granted, and the ring closed before the handler runs again: there is no slab to write to."""
    monkeypatch.setattr("shmring.ring.limits.COPY_OFFLOAD_NBYTES", offload_nbytes)
    ring, client = await serve(reply_nbytes=8192), await connect()
    await client.submit("x")
    claim, book = await ring.claim(), ring._shell._book
    blocking = book.acquire_reply(claim.client_id, 8000)
    assert blocking is not None
    waiting = asyncio.create_task(claim.reply({"x": torch.ones(8000, dtype=torch.uint8)}))
    await eventually(lambda: ring.statistics().replies_waiting)
    closing = asyncio.create_task(ring.close())
    ring._shell.carry_out(book.discard_reply(claim.client_id, blocking.generation))
    await turns(steps)
    await client.close()
    await closing
    with contextlib.suppress(shmring.AbortedError):
        await waiting
    claim.done()


# -- logs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ring(debug=True)
async def test_in_debug_mode_views_that_outlive_their_claim_are_logged(
    ring: Ring, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    _, claim = await claimed(ring, client, {"x": torch.ones(5000)})
    with caplog.at_level(logging.WARNING, "shmring.ring"), claim:
        kept = claim.payload["x"]
    [record] = caplog.records
    text = record.getMessage()
    assert f"was left at {__file__}:" in text
    assert "payload.x: tensor float32[5000], held by the variable 'kept' at " in text
    assert "asyncio" not in text
    assert ring.statistics().slots_draining == 1
    del kept
    await eventually(lambda: ring.statistics().slots_draining == 0)


@pytest.mark.ring(handler=echo, slab_nbytes="2MiB", reply_nbytes="256KiB")
async def test_statistics_add_up(ring: Ring, client: Client) -> None:
    big = torch.ones(20_000, dtype=torch.uint8)
    for _ in range(3):
        await client.request({"x": big}, timeout=5)
    now = ring.statistics()
    assert (now.submitted, now.finished, now.failed, now.aborted, now.replies) == (3, 3, 0, 0, 3)
    assert (now.received_nbytes, now.reply_copies, now.reply_copied_nbytes) == (60_000, 3, 60_000)
    assert now.free_nbytes + now.leased_nbytes + now.quarantined_nbytes == now.leasable_nbytes
    assert now.leasable_nbytes + now.reply_nbytes + 4096 == now.slab_nbytes
    assert now.clients == 1
    with pytest.raises(AttributeError):
        now.clients = 2
