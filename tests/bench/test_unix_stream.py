"""Streams of messages: cut where they begin and end, however they come; whoever serves ends in order or says why not."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.unix_stream import Messages, dialled, served
from tests.tables import for_each

BODIES = [b"", b"a", bytes(range(256)) * 3, b"x" * 300_000, b"end"]  # one of them larger than what is read at a time
LIMIT_S = 10.0


class Kept(Messages):
    """Keeps what has come and what was wrong; of some contents it will not hear."""

    def __init__(self) -> None:
        super().__init__(self.keep, lambda error: self.errors.append(error))
        self.bodies: list[bytes] = []
        self.errors: list[BaseException] = []

    def keep(self, body: memoryview) -> None:
        if body == b"end":
            raise ValueError("not this one")
        self.bodies.append(bytes(body))


def prefixed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@for_each("piece_nbytes", [1, 3, 4, 5, 1000, 1 << 20])
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


def count(end: Messages, body: memoryview) -> bool:
    """Answers each message with its length, and has finished after the last."""
    end.send(str(len(body)).encode())
    if len(body) == len(BODIES[-2]):
        raise ValueError("not this one")
    return body == b"end"


async def test_whoever_serves_goes_on_until_an_end_has_finished(path: Path) -> None:
    listening = asyncio.Event()

    async def talk(*bodies: bytes) -> Kept:
        client = Kept()
        async with dialled(path, client):
            for body in bodies:
                if (writable := client.send_paced(body)) is not None:
                    await writable
            async with asyncio.timeout(LIMIT_S):
                while len(client.bodies) < len(bodies):  # it is told of each by the loop itself
                    await asyncio.sleep(0)
        return client

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(served(path, count, listening.set))
        await listening.wait()
        first = await talk(*BODIES[:3])
        assert first.bodies == [b"0", b"1", b"768"]
        assert not serving.done()  # a client that goes is no failure
        assert (await talk(b"end")).bodies == [b"3"]
    assert not path.exists()


async def test_what_is_wrong_on_a_connection_ends_the_serving(path: Path) -> None:
    listening = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        serving = asyncio.create_task(served(path, count, listening.set))
        await listening.wait()
        client = Kept()
        async with dialled(path, client):
            client.send(BODIES[-2])
            with pytest.raises(ValueError, match="not this one"):
                await serving
            while not client.errors:  # its connection is closed by the other end
                await asyncio.sleep(0)
    assert isinstance(client.errors[0], ConnectionError)
