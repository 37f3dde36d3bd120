"""Engines on other hosts that break the rules: each call of their far client ends with one typed error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring.core.messages import Welcome
from shmring.transport.far_wire import (
    HEADER,
    MAX_HEAD_NBYTES,
    PREAMBLE,
    Abort,
    Called,
    End,
    Reply,
    Request,
    decode_message,
    frame,
    hello_bytes,
    hello_nbytes,
)
from tests.gateway.test_far_clients import MIB, TOKEN, serving
from tests.gateway.test_hostile_peers import HELLO, peer_of
from tests.tables import for_each

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

NONE = msgspec.msgpack.encode(None)


@pytest.fixture
async def welcome(socket_dir: Path) -> Welcome:
    """As a good engine says it."""
    async with serving(socket_dir, slab_nbytes="16MiB", reply_nbytes="4MiB") as ring, peer_of(ring, hello_bytes(HELLO)) as peer:
        answer = await peer.answer()
    assert isinstance(answer, Welcome)
    return answer


@contextlib.asynccontextmanager
async def client_of(welcome: Welcome, answer: Callable[[Any], bytes]) -> AsyncIterator[shmring.Client]:
    """A client of an engine that welcomes everybody, and sends these bytes after each message that it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            await reader.readexactly(hello_nbytes(await reader.readexactly(PREAMBLE.size)))
            writer.write(frame(welcome))
            while True:
                head_nbytes, body_nbytes = HEADER.unpack(await reader.readexactly(HEADER.size))
                message = decode_message(await reader.readexactly(head_nbytes))
                await reader.readexactly(body_nbytes)
                writer.write(answer(message))
                await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with shmring.connect(f"tcp://127.0.0.1:{port}/far", token=TOKEN) as client:
            yield client


BROKEN: dict[str, Callable[[Any, Welcome], bytes]] = {
    "a head without end": lambda message, welcome: HEADER.pack(2**32 - 1, 0),
    "a head that is too large": lambda message, welcome: HEADER.pack(welcome.max_payload_nbytes + MAX_HEAD_NBYTES + 1, 0),
    "a body without end": lambda message, welcome: HEADER.pack(100, 2**64 - 1),
    "a body larger than all there is": lambda message, welcome: HEADER.pack(100, welcome.slab_nbytes + 1),
    "no head": lambda message, welcome: HEADER.pack(0, 0),
    "a head that is no message": lambda message, welcome: HEADER.pack(4, 0) + b"\xc1abc",
    "a message of the other side": lambda message, welcome: frame(Abort(message.number)),
    "a reply to another request": lambda message, welcome: frame(Reply(message.number + 1, NONE)),
    "the end of another request": lambda message, welcome: frame(End(message.number + 1, (0, 0, False))),
    "two ends": lambda message, welcome: frame(Reply(message.number, NONE)) + frame(End(message.number, (0, 0, False))) * 2,
    "the result of another call": lambda message, welcome: frame(Called(message.number + 1, NONE)),
    "two welcomes": lambda message, welcome: frame(welcome),
    "a payload that is none": lambda message, welcome: frame(Reply(message.number, b"\xc1")),
    "a payload nested without end": lambda message, welcome: frame(Reply(message.number, b"\x91" * 100_000 + b"\xc0")),
    "too many values": lambda message, welcome: frame(
        Reply(message.number, b"\xdd" + (600_000).to_bytes(4, "big") + bytes(600_000))
    ),
}


@for_each("broken", BROKEN.values(), ids=BROKEN)
async def test_an_engine_that_breaks_the_rules_is_left(welcome: Welcome, broken: Callable[[Any, Welcome], bytes]) -> None:
    async with client_of(welcome, lambda message: broken(message, welcome)) as client:
        with contextlib.suppress(shmring.EngineDeadError):
            assert await client.request({"n": 1}, timeout=60) is None  # two ends: the first one is its own
        with pytest.raises(shmring.EngineDeadError):
            await client.request({"n": 1}, timeout=60)
        assert "broke the protocol" in str(client.lost_error)


RESULTS: dict[str, bytes] = {
    "no msgpack": b"\xc1",
    "two values": NONE * 2,
    "a key without a hash": b"\x81\x80\xc0",
    "nested without end": b"\x91" * 100_000 + b"\xc0",
    "too many values": b"\xdd" + (600_000).to_bytes(4, "big") + bytes(600_000),
}


@for_each("result", RESULTS.values(), ids=RESULTS)
async def test_a_call_whose_result_is_none_ends_with_the_engine(welcome: Welcome, result: bytes) -> None:
    """Also for who waits without a timeout."""
    async with client_of(welcome, lambda message: frame(Called(message.number, result))) as client, asyncio.timeout(60):
        with pytest.raises(shmring.EngineDeadError, match="broke the protocol"):
            await client.call("doubled", 1)


async def test_a_tensor_that_its_body_does_not_have_is_not_opened(welcome: Welcome) -> None:
    """It would show memory of this process that nobody sent."""

    def answer(message: Any) -> bytes:
        if isinstance(message, Request):
            return frame(Reply(message.number, message.payload), 64) + bytes(64) + frame(End(message.number, (0, 0, False)))
        return b""

    async with client_of(welcome, answer) as client:
        with pytest.raises(shmring.RemoteProtocolError, match="exceeds its buffer of 64 bytes"):
            await client.request({"x": torch.ones(MIB // 4)}, timeout=60)
