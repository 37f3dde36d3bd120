"""Streams: what a peer sends lies where it was wanted, and nowhere else; nobody takes a loop for itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest

from shmring.transport.streams import Pace, Stream, Turns
from tests.waiting import cancel, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

MIB = 1 << 20


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        yield here, there


async def test_a_large_body_and_what_follows_it_come_whole() -> None:
    loop = asyncio.get_running_loop()
    sent = np.random.default_rng(1).integers(0, 255, 5 * MIB + 77, np.uint8)
    with connected() as (here, there):
        there.setblocking(False)
        stream, memory = Stream(here), np.zeros(len(sent), np.uint8)
        sending = asyncio.create_task(loop.sock_sendall(there, sent.data))
        await stream.fill(memory.data, len(memory) - 7)
        await stream.fill(memory[-7:].data, 7)  # fewer than the kernel has woken us for
        await sending
        assert np.array_equal(memory, sent)
        there.close()
        with pytest.raises(EOFError):
            await stream.fill(memory.data, 1)
        stream.close()


async def test_nothing_is_written_after_a_fill_was_cancelled() -> None:
    with connected() as (here, there):
        stream, memory = Stream(here), np.zeros(2 * MIB, np.uint8)
        there.send(b"x" * 1000)
        filling = asyncio.create_task(stream.fill(memory.data, len(memory)))
        await turns()
        await cancel(filling)
        filled = int(memory.sum())
        there.send(b"y" * 100_000)
        await turns()
        assert int(memory.sum()) == filled <= 1000 * ord("x")
        stream.close()


async def test_who_waits_when_a_stream_is_closed_learns_it() -> None:
    with connected() as (here, there):
        stream = Stream(here)
        filling = asyncio.create_task(stream.fill(memoryview(bytearray(10)), 10))
        sending = asyncio.create_task(stream.send(bytes(50 * MIB)))
        await turns()
        stream.close()
        stream.close()
        for task in (filling, sending):
            with pytest.raises(ConnectionAbortedError):
                await task
        with pytest.raises(ConnectionAbortedError):
            await stream.send(b"x")
        assert there.fileno() >= 0


async def test_what_can_not_be_sent_to_its_end_closes_the_stream() -> None:
    with connected() as (here, _):
        stream = Stream(here)
        sending = asyncio.create_task(stream.send(bytes(50 * MIB)))
        await turns()
        assert await cancel(sending)
        assert stream.closed


async def test_what_all_streams_receive_in_a_turn_is_bounded() -> None:
    """Twenty peers have sent a quarter of a megabyte each. Two turns are looked at: the counting begins somewhere in one."""
    loop = asyncio.get_running_loop()
    received = [0]

    class Counted(Turns):
        def spend(self, nbytes: int) -> None:
            received[-1] += nbytes
            super().spend(nbytes)

    def next_turn() -> None:
        nonlocal timer
        received.append(0)
        timer = loop.call_soon(next_turn)

    shared = Counted(MIB // 2)
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connected()) for _ in range(20)]
        for _, there in pairs:
            there.sendall(bytes(MIB // 4))
        streams = [Stream(here, shared) for here, _ in pairs]
        timer = loop.call_soon(next_turn)
        await asyncio.gather(*[stream.fill(memoryview(bytearray(MIB // 4)), MIB // 4) for stream in streams])
        timer.cancel()
        for stream in streams:
            stream.close()
    assert sum(received) == 5 * MIB
    assert max(received) <= 2 * (MIB // 2 + MIB // 4)


async def test_who_always_has_more_leaves_the_others_their_turns() -> None:
    """One call of one stream is all that a turn allows."""
    order: list[int] = []

    async def receive(number: int, stream: Stream, memory: memoryview) -> None:
        for _ in range(40):
            await stream.receive(memory)
            order.append(number)

    shared = Turns(1)
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connected()) for _ in range(3)]
        for _, there in pairs:
            there.sendall(bytes(40_000))
        streams = [Stream(here, shared) for here, _ in pairs]
        memory = memoryview(bytearray(1000))
        await asyncio.gather(*[receive(number, stream, memory) for number, stream in enumerate(streams)])
        for stream in streams:
            stream.close()
    for end in range(len(order)):
        counts = [order[:end].count(number) for number in range(3)]
        assert max(counts) - min(counts) <= 2, order


async def test_who_leaves_the_line_or_has_nothing_to_read_stops_nobody() -> None:
    shared = Turns(1)
    with connected() as (here, there), connected() as (silent, _):
        stream, memory = Stream(here, shared), memoryview(bytearray(100))
        there.sendall(bytes(1000))
        nothing = Stream(silent, shared)
        waiting = asyncio.create_task(nothing.receive(memory))
        leaving = asyncio.create_task(shared.take(None))
        filling = asyncio.create_task(stream.fill(memoryview(bytearray(1000)), 1000))
        shared.spend(1)  # their turns begin after this one
        await asyncio.sleep(0)
        assert len(shared._line) == 3
        await cancel(leaving)
        await filling
        assert not waiting.done()
        await cancel(waiting)
        stream.close()
        nothing.close()


async def test_a_peer_has_its_patience_and_the_time_for_its_bytes() -> None:
    pace = Pace(patience=2, nbytes_per_tick=100, tick_s=0.005)
    with connected() as (here, _):
        stream = Stream(here)
        with pytest.raises(ConnectionAbortedError, match=r"350 bytes took more than 0\.025 s, or nothing moved for 0\.01 s"):
            async with pace.within(stream, 350):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):  # another one's
            async with pace.within(stream, 10_000), asyncio.timeout(0):
                await asyncio.Event().wait()
        stream.close()
    assert not pace._waits


async def test_patience_begins_again_when_something_moves_and_the_lowest_rate_stays() -> None:
    pace = Pace(patience=2, nbytes_per_tick=100, tick_s=1000)

    async def tick() -> None:
        pace._tick()
        await turns(5)

    with connected() as (here, there):
        stream, memory = Stream(here), memoryview(bytearray(10))

        async def move() -> None:
            there.send(b"x")
            await stream.receive(memory)

        async def bounded(*steps: Callable[[], Awaitable[None]]) -> None:
            async with pace.within(stream, 350):
                for step in steps:
                    await step()
                    await tick()

        async with pace.within(stream, 350):  # five ticks
            for _ in range(4):
                await move()
                await tick()
            stream.waits_here = True  # for its turn
            for _ in range(9):
                await tick()
            stream.waits_here = False
        with pytest.raises(ConnectionAbortedError):  # it moves, too slowly
            await bounded(move, move, move, move, move)
        with pytest.raises(ConnectionAbortedError):  # it has fallen silent
            await bounded(move, lambda: stream.send(b"x"), turns, turns)
        stream.close()


async def test_who_stands_in_line_is_not_slow() -> None:
    shared = Turns(1)
    with connected() as (here, there):
        stream = Stream(here, shared)
        there.send(b"x")
        receiving = asyncio.create_task(stream.receive(memoryview(bytearray(1))))
        shared.spend(1)
        await asyncio.sleep(0)
        assert stream.waits_here
        assert await receiving == 1
        assert not stream.waits_here
        assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        stream.close()
