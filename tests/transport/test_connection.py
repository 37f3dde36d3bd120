"""One connection: frames in, frames out, batched writes, flow control, and every way of ending."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shmring.core.framing import PREFIX, FrameDecoder, encode_frame
from shmring.core.messages import Abort, Call, FrontendMessage, decode_frontend_message, encode_message
from shmring.errors import CapacityError, PeerLostError, RemoteProtocolError
from shmring.transport import connection as connection_module
from shmring.transport.connection import Connection

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

KIB = 1 << 10


class Owner:
    """Records what its connection reports."""

    def __init__(self) -> None:
        self.messages: list[FrontendMessage] = []
        self.violations: list[RemoteProtocolError] = []
        self.losses = 0
        self.on_message: Callable[[FrontendMessage], None] = lambda message: None

    def message_received(self, message: FrontendMessage) -> None:
        self.messages.append(message)
        self.on_message(message)

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        self.violations.append(error)

    def connection_lost(self) -> None:
        self.losses += 1


class End:
    """A connection on one end of a socket pair; the other end is a plain socket."""

    def __init__(self, **limits: int) -> None:
        self.owner = Owner()
        limits = {"max_frame_nbytes": 64 * KIB, "write_buffer_nbytes": 16 * KIB, "max_write_buffer_nbytes": 1024 * KIB} | limits
        self.connection: Connection[FrontendMessage] = Connection(self.owner, decode_frontend_message, **limits)
        self.socket, self.peer = socket.socketpair()
        self.peer.setblocking(False)

    async def attach(self) -> End:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.connection, sock=self.socket)
        return self

    async def received(self, count: int) -> list[FrontendMessage]:
        """Reads frames at the peer until it has ``count`` messages."""
        frames, messages = FrameDecoder(64 * KIB), []
        while len(messages) < count:
            data = await asyncio.get_running_loop().sock_recv(self.peer, 1 << 20)
            assert data, "the connection ended early"
            messages += [decode_frontend_message(frame) for frame in frames.feed(data)]
        return messages

    async def drain_peer(self) -> bytes:
        """Reads at the peer until the connection ends (with a reset, if the other end left something unread)."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while more := await asyncio.get_running_loop().sock_recv(self.peer, 1 << 20):
                data += more
        return data


@pytest.fixture
async def open_end() -> AsyncIterator[Callable[..., Awaitable[End]]]:
    ends: list[End] = []

    async def attach(**limits: int) -> End:
        ends.append(End(**limits))
        return await ends[-1].attach()

    yield attach
    for end in ends:
        end.connection.abort()
        end.peer.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def frame(message: FrontendMessage) -> bytes:
    return encode_frame(encode_message(message), 1 << 20)


def large(nbytes: int) -> Call:
    return Call(1, "large", bytes(nbytes))


# -- frames -------------------------------------------------------------------------------------------------------------


async def test_messages_go_both_ways_in_order(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    sent: list[FrontendMessage] = [Abort(number) for number in range(100)]
    for message in sent:
        end.connection.send(message)
    assert await end.received(100) == sent
    end.peer.sendall(b"".join(frame(message) for message in sent))
    await eventually(lambda: len(end.owner.messages) == 100)
    assert end.owner.messages == sent


async def test_a_frame_may_come_in_any_pieces(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    stream = frame(large(300)) + frame(Abort(2))
    for position in range(len(stream)):
        end.peer.send(stream[position : position + 1])
        await asyncio.sleep(0)
    await eventually(lambda: len(end.owner.messages) == 2)
    assert end.owner.messages == [large(300), Abort(2)]


async def received_now(end: End) -> bytes:
    try:
        return end.peer.recv(1 << 20)
    except BlockingIOError:
        return b""


async def test_the_first_message_of_an_iteration_leaves_at_once_and_the_next_at_its_end(open_end: Any) -> None:
    end = await open_end()
    for number in range(2):
        end.connection.send(Abort(number))
    assert await received_now(end) == frame(Abort(0))
    assert await received_now(end) == b""
    await asyncio.sleep(0)
    assert await received_now(end) == frame(Abort(1))


async def test_of_many_messages_a_few_leave_at_a_time(open_end: Any) -> None:
    end = await open_end()
    few = connection_module._FEW
    for number in range(1 + few + 1):
        end.connection.send(Abort(number))
    assert await received_now(end) == b"".join(frame(Abort(number)) for number in range(1 + few))
    await asyncio.sleep(0)
    assert await received_now(end) == frame(Abort(1 + few))


async def test_what_is_to_leave_at_once_takes_along_what_was_queued(open_end: Any) -> None:
    end = await open_end()
    for number in range(3):
        end.connection.send(Abort(number), at_once=number == 2)
    assert await received_now(end) == frame(Abort(0)) + frame(Abort(1)) + frame(Abort(2))


async def test_where_several_were_sent_before_the_first_waits_for_the_others(open_end: Any) -> None:
    end = await open_end()
    for number in range(2):
        end.connection.send(Abort(number))
    await asyncio.sleep(0)
    assert await received_now(end) == frame(Abort(0)) + frame(Abort(1))
    end.connection.send(Abort(2))
    assert await received_now(end) == b""
    await asyncio.sleep(0)
    assert await received_now(end) == frame(Abort(2))
    end.connection.send(Abort(3))  # one alone came before it: it is waited for, as far as one can tell
    assert await received_now(end) == frame(Abort(3))


async def test_nothing_overtakes_what_the_transport_has_not_written(open_end: Any) -> None:
    """A full socket, then room in it before the transport has noticed: what comes next waits behind what is there."""
    end = await open_end(write_buffer_nbytes=1024 * KIB)
    sent: list[FrontendMessage] = []
    while not end.connection._transport.get_write_buffer_size():
        for _ in range(8):
            sent.append(Call(len(sent), "large", bytes(60 * KIB)))
            end.connection.send(sent[-1])
        await asyncio.sleep(0)
    head = end.peer.recv(1 << 20)
    sent.append(Abort(7))
    end.connection.send(sent[-1])
    frames, messages = FrameDecoder(64 * KIB), []
    messages += [decode_frontend_message(one) for one in frames.feed(head)]
    while len(messages) < len(sent):
        data = await asyncio.get_running_loop().sock_recv(end.peer, 1 << 20)
        messages += [decode_frontend_message(one) for one in frames.feed(data)]
    assert messages == sent


async def test_messages_sent_before_the_connection_is_made_leave_when_it_is() -> None:
    end = End()
    end.connection.send(Abort(1))
    await asyncio.sleep(0)
    await end.attach()
    end.connection.send(Abort(2))
    assert await end.received(2) == [Abort(1), Abort(2)]
    end.connection.close()
    end.peer.close()
    await asyncio.sleep(0)


async def test_a_message_that_is_too_large_is_refused_here_and_nothing_is_sent(open_end: Any) -> None:
    end = await open_end()
    with pytest.raises(CapacityError) as caught:
        end.connection.send(large(64 * KIB))
    assert caught.value.capacity == 64 * KIB
    end.connection.send(Abort(1))
    assert await end.received(1) == [Abort(1)]


async def test_one_message_of_any_size_is_no_sign_of_a_peer_that_does_not_read(open_end: Any) -> None:
    end = await open_end(max_frame_nbytes=4096 * KIB, write_buffer_nbytes=16 * KIB, max_write_buffer_nbytes=64 * KIB)
    end.connection.send(Call(1, "large", bytes(4000 * KIB)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not end.connection.can_write
    assert end.owner.violations == []
    end.connection.abort()


# -- a peer that breaks the rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rubbish",
    [PREFIX.pack(64 * KIB + 1), PREFIX.pack(2**32 - 1) + b"x", PREFIX.pack(3) + b"\xc1\xc1\xc1", PREFIX.pack(0), bytes(4096)],
    ids=["too large", "far too large", "not msgpack", "empty", "zeros"],
)
async def test_rubbish_is_reported_once_and_nothing_after_it_is_delivered(
    open_end: Any,
    eventually: Any,
    rubbish: bytes,
    turns: Any,
) -> None:
    end = await open_end()
    end.peer.sendall(frame(Abort(1)) + rubbish + frame(Abort(2)))
    await eventually(lambda: end.owner.violations)
    end.peer.sendall(frame(Abort(3)))
    await turns()
    assert len(end.owner.violations) == 1
    assert Abort(2) not in end.owner.messages
    assert Abort(3) not in end.owner.messages


async def test_what_the_owner_refuses_ends_the_delivery(open_end: Any, eventually: Any) -> None:
    end = await open_end()

    def refuse(message: FrontendMessage) -> None:
        if message == Abort(2):
            raise RemoteProtocolError("not that one")

    end.owner.on_message = refuse
    end.peer.sendall(b"".join(frame(Abort(number)) for number in range(5)))
    await eventually(lambda: end.owner.violations)
    assert end.owner.messages == [Abort(0), Abort(1), Abort(2)]
    assert str(end.owner.violations[0]) == "not that one"


async def test_a_peer_that_does_not_read_is_reported(open_end: Any, eventually: Any) -> None:
    end = await open_end(max_write_buffer_nbytes=64 * KIB)
    for _ in range(30):
        end.connection.send(large(32 * KIB))
    await eventually(lambda: end.owner.violations)
    assert "unread" in str(end.owner.violations[0])
    assert len(end.owner.violations) == 1


# -- flow control -------------------------------------------------------------------------------------------------------


async def test_drain_waits_while_the_peer_reads_more_slowly(open_end: Any, eventually: Any, turns: Any) -> None:
    end = await open_end()
    assert end.connection.can_write
    await end.connection.drain()
    sent = 0
    while end.connection.can_write:
        end.connection.send(large(30 * KIB))
        sent += 1
        await asyncio.sleep(0)
    waiting = asyncio.create_task(end.connection.drain())
    await turns()
    assert not waiting.done()
    assert len(await end.received(sent)) == sent
    await waiting
    assert end.connection.can_write


async def test_can_write_counts_what_was_sent_in_this_very_iteration(open_end: Any) -> None:
    end = await open_end()
    sent = 0
    while end.connection.can_write:
        end.connection.send(large(60 * KIB))
        sent += 1
        assert sent < 100, "nothing was ever said to be full"
    assert len(await end.received(sent)) == sent


async def test_senders_that_wait_for_their_turn_never_exceed_the_buffer(open_end: Any) -> None:
    """Each sends only if it may; a hundred at once must not add up to a peer that seems not to read."""
    end = await open_end(max_write_buffer_nbytes=256 * KIB)

    async def send(number: int) -> None:
        await end.connection.drain()
        end.connection.send(Call(number, "large", bytes(60 * KIB)))

    tasks = [asyncio.create_task(send(number)) for number in range(100)]
    messages = await end.received(100)
    await asyncio.gather(*tasks)
    assert sorted(message.call_id for message in messages) == list(range(100))  # type: ignore[union-attr]
    assert end.owner.violations == []


async def test_drain_fails_when_the_connection_ends(open_end: Any) -> None:
    end = await open_end()
    while end.connection.can_write:
        end.connection.send(large(30 * KIB))
        await asyncio.sleep(0)
    waiting = [asyncio.create_task(end.connection.drain()) for _ in range(3)]
    await asyncio.sleep(0)
    end.peer.close()
    for task in waiting:
        with pytest.raises(PeerLostError):
            await task
    with pytest.raises(PeerLostError):
        await end.connection.drain()


# -- ending -------------------------------------------------------------------------------------------------------------


async def test_the_end_is_reported_once(open_end: Any, eventually: Any, turns: Any) -> None:
    end = await open_end()
    end.peer.close()
    await eventually(lambda: end.owner.losses)
    assert end.connection.lost
    end.connection.send(Abort(1))
    end.connection.close()
    end.connection.abort()
    await turns()
    assert end.owner.losses == 1


@pytest.mark.parametrize("backlog", [0, 100], ids=["nothing unread", "much unread"])
async def test_the_last_words_of_a_peer_that_has_gone_are_read_though_writing_to_it_fails(
    open_end: Any, eventually: Any, backlog: int
) -> None:
    end = await open_end()
    for _ in range(backlog):
        end.connection.send(large(8 * KIB))
    words: list[FrontendMessage] = [Abort(number) for number in range(1000)]
    end.peer.sendall(b"".join(frame(message) for message in words))
    end.peer.close()
    end.connection.send(Abort(1))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == words
    assert end.owner.losses == 1


async def test_what_the_owner_refuses_of_the_last_words_is_reported_before_the_end(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    end.peer.sendall(frame(Abort(1)) + b"\0\0\0\0" + frame(Abort(2)))
    end.peer.close()
    end.connection.send(Abort(3))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == [Abort(1)]
    assert len(end.owner.violations) == end.owner.losses == 1


async def test_closing_sends_what_was_queued_and_delivers_nothing_more(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    end.connection.send(Abort(1))
    end.connection.close()
    end.connection.send(Abort(2))
    end.peer.send(frame(Abort(3)))
    assert await end.drain_peer() == frame(Abort(1))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == []


async def test_closing_in_the_middle_of_a_delivery_ends_it(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    end.owner.on_message = lambda message: end.connection.close()
    end.peer.sendall(frame(Abort(1)) + frame(Abort(2)))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == [Abort(1)]


async def test_aborting_drops_what_was_queued(open_end: Any, eventually: Any) -> None:
    end = await open_end()
    end.connection.send(Abort(1))
    end.connection.send(Abort(2))
    end.connection.abort()
    assert await end.drain_peer() == frame(Abort(1)), "the first has left"
    await eventually(lambda: end.owner.losses)


async def test_a_peer_that_never_reads_its_last_messages_does_not_keep_the_connection(
    open_end: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_LINGER_S", 0.05)
    end = await open_end()
    while end.connection.can_write:
        end.connection.send(large(30 * KIB))
        await asyncio.sleep(0)
    end.connection.close()
    assert end.owner.losses == 0
    await eventually(lambda: end.owner.losses)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_connection_that_was_ended_before_it_was_made_can_be_ended_when_it_is(how: str, eventually: Any) -> None:
    end = End()
    getattr(end.connection, how)()
    end.peer.send(frame(Abort(1)))
    await end.attach()
    end.connection.send(Abort(2))
    end.connection.abort()
    assert await end.drain_peer() == b""
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == []
    end.peer.close()


async def test_an_ended_connection_is_freed_without_the_collector(eventually: Any) -> None:
    end = await End().attach()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        end.connection.close()
        await eventually(lambda: end.owner.losses)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) < before)
    finally:
        gc.enable()
        end.peer.close()


async def test_a_forked_child_sends_nothing_over_its_parents_connection(open_end: Any) -> None:
    end = await open_end()
    end.connection.send(Abort(1))
    child = os.fork()
    if child == 0:
        try:
            end.connection.close()
            end.connection._flush()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    end.connection.send(Abort(2))
    assert await end.received(2) == [Abort(1), Abort(2)]
    end.connection.close()
    assert await end.drain_peer() == b""
