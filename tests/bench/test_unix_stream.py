"""Streams of messages: cut where they begin and end, however they come; a one-way stream ends in order or says why not."""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.messages import Header, Phase
from bench.peers.in_flight import Window
from bench.peers.unix_stream import Messages, connected, consumed

BODIES = [b"", b"a", bytes(range(256)) * 3, b"x" * 300_000, b"end"]  # one of them larger than what is read at a time
LIMIT_S = 10.0


class Kept(Messages):
    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []
        self.errors: list[BaseException] = []

    def received(self, body: memoryview) -> None:
        if body == b"end":
            raise ValueError("not this one")
        self.bodies.append(bytes(body))

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


def prefixed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("piece_nbytes", [1, 3, 4, 5, 1000, 1 << 20])
def test_a_stream_is_cut_into_messages_however_it_comes(piece_nbytes: int) -> None:
    kept = Kept()
    rest = memoryview(b"".join(map(prefixed, BODIES)))
    while rest:
        buffer = kept.get_buffer(-1)
        nbytes = min(piece_nbytes, len(buffer), len(rest))
        assert nbytes, "there is always room for more"
        buffer[:nbytes], rest = rest[:nbytes], rest[nbytes:]
        kept.buffer_updated(nbytes)
    assert kept.bodies == BODIES[:-1]
    assert [str(error) for error in kept.errors] == ["not this one"]


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield Path(directory, "test.sock")


async def test_a_one_way_stream_ends_with_its_producers(path: Path) -> None:
    taken: list[bytes] = []

    def take(body: memoryview) -> Header:
        taken.append(bytes(body))
        return Header(0, Phase.LAST if body == b"end" else Phase.TIMED, 0, 0)

    async def produce() -> None:
        window = Window(2)
        async with connected(path, window) as sender:
            for body in BODIES:
                await window.take()
                sender.send(body)
                await sender.writable.wait()
            await window.drain()

    listening = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(consumed(path, 2, take, listening.set))
        await listening.wait()
        tasks.create_task(produce())
        tasks.create_task(produce())
    assert sorted(taken) == sorted(2 * BODIES)
    assert not path.exists()


async def test_a_producer_that_goes_too_early_is_an_error(path: Path) -> None:
    def come_and_go() -> None:
        with socket.socket(socket.AF_UNIX) as producer:
            producer.connect(str(path))

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ConnectionError, match="the other end closed the connection"):
            await consumed(path, 1, lambda body: Header(0, 0, 0, 0), come_and_go)
