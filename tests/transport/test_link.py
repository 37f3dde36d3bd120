"""A link: messages both ways, who is woken when, a full ring, and every way of ending; with real sockets and sealed memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shmring.core.compiled import GIVING_UP, RECORDS_IN_TURN, TURN_S, Poller, RecordReader, RecordWriter, RingMemory
from shmring.core.messages import (
    MAX_LISTED,
    Abort,
    Call,
    FrontendMessage,
    ReplyRelease,
    decode_frontend_message,
    encode_message,
)
from shmring.errors import CapacityError, PeerLostError, RemoteProtocolError
from shmring.transport import link as link_module
from shmring.transport.link import Link
from shmring.transport.loops import poller_of
from shmring.transport.rings import map_rings, sealed_rings
from tests.forked import in_child
from tests.model.inside import ToldAfterTurns
from tests.tables import for_each
from tests.waiting import eventually, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

KIB = 1 << 10
TAIL, HEAD = 0, 64


class Owner:
    """Records what its link reports."""

    def __init__(self) -> None:
        self.messages: list[FrontendMessage] = []
        self.violations: list[RemoteProtocolError] = []
        self.failures: list[BaseException] = []
        self.losses = 0
        self.gave_up = 0
        self.on_message: Callable[[FrontendMessage], object] = lambda message: None
        self.on_violation: Callable[[], object] = lambda: None

    def handle_record(self, record: bytes) -> None:
        message = decode_frontend_message(record)
        self.messages.append(message)
        self.on_message(message)

    def peer_gave_up(self) -> None:
        self.gave_up += 1

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        self.violations.append(error)
        self.on_violation()

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def connection_lost(self) -> None:
        self.losses += 1


class End:
    """A link; at the other end are a plain socket, a reader and a writer."""

    def __init__(
        self,
        poller: Poller | None = None,
        *,
        capacity: int = 64 * KIB,
        max_backlog_nbytes: int = 1 << 20,
        busy_poll_s: float = 0.0,
    ) -> None:
        self.socket, self.peer = socket.socketpair()
        self.socket.setblocking(False)
        self.peer.setblocking(False)
        fds = sealed_rings(capacity)
        self.incoming, self.outgoing = map_rings(fds, capacity)
        theirs: list[RingMemory] = map_rings(fds, capacity)
        for fd in fds:
            os.close(fd)
        self.writer = RecordWriter(theirs[0], self.peer.fileno())
        self.reader = RecordReader(theirs[1], self.peer.fileno())
        self.owner = Owner()
        self.link = Link(
            self.owner,
            self.socket,
            self.incoming,
            self.outgoing,
            poller or poller_of(asyncio.get_running_loop()),
            max_backlog_nbytes=max_backlog_nbytes,
            busy_poll_s=busy_poll_s,
        )

    def say(self, *messages: FrontendMessage) -> None:
        """Publishes at the peer, and rings if this end sleeps."""
        for message in messages:
            assert self.writer.write(encode_message(message)), "the ring is full"
        self.writer.ring_bell()

    def heard(self) -> list[FrontendMessage]:
        """Takes what lies in the ring at the peer, and rings back."""
        messages = []
        while (record := self.reader.read()) is not None:
            messages.append(decode_frontend_message(record))
        self.reader.ring_bell()
        return messages

    def bells(self) -> int:
        """Takes the bells that have come at the peer."""
        with contextlib.suppress(BlockingIOError):
            return len(self.peer.recv(4096))
        return 0

    def put(self, memory: RingMemory, at: int, value: int) -> None:
        memoryview(memory)[at : at + 8] = (value % 2**64).to_bytes(8, "little")

    def fill(self) -> int:
        """Sends until the ring is full, and one more; returns how many."""
        sent = 0
        while self.link.can_write:
            self.link.send(large(10 * KIB))
            sent += 1
        return sent

    def has_ended(self) -> bool:
        try:
            return self.peer.recv(4096) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True


@pytest.fixture
async def open_end() -> AsyncIterator[Callable[..., End]]:
    ends: list[End] = []

    def attach(poller: Poller | None = None, **limits: Any) -> End:
        ends.append(End(poller, **limits))
        ends[-1].link.start()
        return ends[-1]

    yield attach
    for end in ends:
        end.link.abort()
        end.peer.close()
    await asyncio.sleep(0)


@pytest.fixture
async def end(open_end: Any) -> End:
    return open_end()


@pytest.fixture
async def asleep(open_end: Any) -> Callable[..., Awaitable[End]]:
    """``await asleep()``: an end that has found nothing to read."""

    async def attach(*arguments: Any, **limits: Any) -> End:
        end: End = open_end(*arguments, **limits)
        await eventually(lambda: not end.link.awake)
        return end

    return attach


async def violation(end: End) -> str:
    """Why this end was told that its peer breaks the rules: once."""
    await eventually(lambda: end.owner.violations)
    await turns()
    [error] = end.owner.violations
    return str(error)


def large(nbytes: int) -> Call:
    return Call(1, "large", bytes(nbytes))


def without_time() -> Poller:
    """A poller for which no time passes."""
    return Poller(asyncio.get_running_loop(), clock=lambda: 0.0)


# -- messages -----------------------------------------------------------------------------------------------------------


async def test_messages_go_both_ways_in_order(end: End) -> None:
    sent: list[FrontendMessage] = [Abort(number) for number in range(100)]
    for message in sent:
        end.link.send(message)
    assert end.heard() == sent
    end.say(*sent)
    await eventually(lambda: len(end.owner.messages) == 100)
    assert end.owner.messages == sent


async def test_what_is_sent_before_it_starts_is_there() -> None:
    end = End()
    end.link.send(Abort(1))
    end.say(Abort(2))
    assert end.heard() == [Abort(1)]
    end.link.start()
    await eventually(lambda: end.owner.messages == [Abort(2)])
    end.link.abort()
    end.peer.close()


@pytest.mark.one_loop
async def test_a_message_that_is_too_large_is_refused_here_and_nothing_is_sent(end: End) -> None:
    for _ in range(2):  # with an empty ring, and with a full one
        with pytest.raises(CapacityError, check=lambda error: error.capacity == end.link.largest_record_nbytes == 16 * KIB):
            end.link.send(large(16 * KIB))
        end.link.send(Abort(1))
        end.fill()
    assert end.heard()[0] == Abort(1)


@pytest.mark.one_loop
@for_each("count", [0, 1, MAX_LISTED, MAX_LISTED + 1, 5000])
async def test_a_long_list_of_ids_travels_in_parts(open_end: Any, count: int) -> None:
    end = open_end()
    numbers = list(range(2**62, 2**62 + count))
    end.link.send_listed(ReplyRelease, numbers)
    parts = end.link.split(numbers)
    assert [number for part in parts for number in part] == numbers
    assert len(parts) == -(-count // MAX_LISTED)
    assert [message.generations for message in end.heard()] == parts


@pytest.mark.one_loop
async def test_a_list_fits_the_messages_of_the_smallest_ring(open_end: Any) -> None:
    end = open_end(capacity=16 * KIB)
    numbers = list(range(2**64 - 1600, 2**64))  # as many replies were once dropped at a time, and were too many for a message
    end.link.send_listed(ReplyRelease, numbers)
    assert [number for message in end.heard() for number in message.generations] == numbers


# -- bells --------------------------------------------------------------------------------------------------------------


async def test_a_sleeper_is_woken_by_one_bell(asleep: Any) -> None:
    end = await asleep()
    end.say(Abort(1), Abort(2))
    assert end.writer.bells == 1
    await eventually(lambda: end.owner.messages == [Abort(1), Abort(2)])


async def test_who_is_awake_needs_no_bell(asleep: Any) -> None:
    end = await asleep(without_time())  # what others take of the core is not the question
    end.say(Abort(0))
    for number in range(1, 500):
        while len(end.owner.messages) < number:
            await asyncio.sleep(0)
        end.say(Abort(number))  # within the turn in which the last one came, or the next
    assert end.writer.bells == 1, "of the first, which found it asleep"
    await turns()
    assert len(end.owner.messages) == 500


async def test_an_awake_peer_is_not_rung_for(end: End) -> None:
    for _ in range(100):
        end.link.send(Abort(1))
        assert len(end.heard()) == 1
    assert end.link.bells == end.bells() == 0
    assert end.reader.sleep()
    end.link.send(Abort(1))
    end.link.send(Abort(2))
    assert end.link.bells == end.bells() == 1


async def test_a_link_that_falls_asleep_has_looked_again(open_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published between its last look and its sleep is not rung for: the peer has looked at the flag before."""
    monkeypatch.setattr(link_module, "LinkReader", ToldAfterTurns)
    end = open_end()

    def be_told_just_afterwards(found: bool) -> None:
        if not found and not end.owner.messages:
            end.say(Abort(1))

    end.link.reader.told = be_told_just_afterwards
    await eventually(lambda: end.owner.messages == [Abort(1)])
    assert end.writer.bells == 0


async def test_who_is_about_to_wait_may_look(asleep: Any) -> None:
    end = await asleep()
    end.say(Abort(1))
    end.link.poll()
    assert end.owner.messages == [Abort(1)]


async def test_looking_has_the_budget_of_the_turn(asleep: Any) -> None:
    """Who always finds something when it looks would otherwise never let the loop go on."""
    end = await asleep()
    end.say(*[Abort(number) for number in range(RECORDS_IN_TURN + 1)])
    for _ in range(10):
        end.link.poll()
    assert len(end.owner.messages) == RECORDS_IN_TURN
    await asyncio.sleep(0)
    await eventually(lambda: len(end.owner.messages) == RECORDS_IN_TURN + 1)


async def test_looking_within_a_delivery_delivers_nothing_in_between(end: End) -> None:
    order: list[str] = []

    def look(message: FrontendMessage) -> None:
        order.append(f"begin {message.request_id}")
        end.link.poll()
        order.append(f"end {message.request_id}")

    end.owner.on_message = look
    end.say(Abort(1), Abort(2))
    await eventually(lambda: len(order) == 4)
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]


async def test_a_turn_delivers_no_more_than_it_may(open_end: Any) -> None:
    end = open_end(without_time())  # however long that takes: a turn also ends after a set time
    end.say(*[Abort(number) for number in range(3 * RECORDS_IN_TURN)])
    counts = []
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(len(end.owner.messages))
    assert counts == [RECORDS_IN_TURN, 2 * RECORDS_IN_TURN, 3 * RECORDS_IN_TURN, 3 * RECORDS_IN_TURN]


async def test_messages_that_take_long_do_not_hold_up_another_link(open_end: Any) -> None:
    """However much one peer has said, the others are heard within one turn of each of those that are awake."""
    now = [0.0]
    poller = Poller(asyncio.get_running_loop(), clock=lambda: now[0])
    slow = [open_end(poller) for _ in range(4)]
    for end in slow:
        end.owner.on_message = lambda message: now.__setitem__(0, now[0] + 0.0016)  # as long as one lease request once took
        end.say(*[Abort(number) for number in range(50)])
    quick = open_end(poller)
    quick.say(Abort(1))
    waited = 0
    while not quick.owner.messages:
        await asyncio.sleep(0)
        waited += 1
    assert waited <= 3
    assert max(len(end.owner.messages) for end in slow) <= 2
    assert now[0] <= 3 * (TURN_S + 0.0016)


# -- a full ring --------------------------------------------------------------------------------------------------------


async def test_what_finds_the_ring_full_leaves_when_there_is_room_and_in_order(end: End) -> None:
    sent = end.fill()
    end.link.send(Abort(7))
    heard = end.heard()
    assert len(heard) == sent - 1, "the ring is full, and has waited to be told"
    await eventually(lambda: end.link.can_write)
    assert end.heard() == [large(10 * KIB), Abort(7)]


async def test_a_peer_that_sleeps_is_rung_for_what_found_no_room_before(end: End) -> None:
    end.fill()
    end.heard()
    assert end.reader.sleep(), "it has read everything"
    end.bells()  # of before
    await turns()
    assert (end.bells(), end.heard()) == (1, [large(10 * KIB)])


async def test_a_peer_that_waits_for_room_is_rung_for_when_there_is_some(asleep: Any) -> None:
    end = await asleep()
    record = encode_message(large(10 * KIB))
    sent = 0
    while end.writer.write(record):
        sent += 1
    assert end.writer.wait_for_space(len(record))
    assert end.bells() == 0
    end.link.poll()
    assert (len(end.owner.messages), end.bells()) == (sent, 1)


async def test_drain_waits_while_the_peer_reads_more_slowly(end: End) -> None:
    await end.link.drain()
    end.fill()
    waiting = asyncio.create_task(end.link.drain())
    await turns()
    assert not waiting.done()
    end.heard()
    await waiting
    assert end.link.can_write


async def test_senders_that_wait_for_their_turn_are_never_too_many(open_end: Any) -> None:
    """Each sends only if it may; a hundred at once must not add up to a peer that seems not to read."""
    end = open_end(max_backlog_nbytes=12 * KIB)

    async def send(number: int) -> None:
        await end.link.drain()
        end.link.send(Call(number, "large", bytes(10 * KIB)))

    tasks = [asyncio.create_task(send(number)) for number in range(100)]
    numbers: list[int] = []
    while len(numbers) < 100:
        numbers += [message.call_id for message in end.heard()]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert sorted(numbers) == list(range(100))
    assert end.owner.violations == []


async def test_who_writes_to_the_ring_itself_can_wait_for_space(asleep: Any) -> None:
    """Nothing is in the backlog then: what found no room was not sent."""
    end = await asleep()
    record = bytes(10 * KIB)
    while end.link.writer.write(record):
        pass
    assert end.link.can_write
    end.link.expect_space()
    assert not end.link.can_write
    waiting = asyncio.create_task(end.link.drain())
    await turns()
    assert not waiting.done()
    while end.reader.read():
        pass
    assert end.reader.ring_bell()
    await waiting
    assert end.link.can_write
    assert end.link.writer.write(record)


async def test_room_that_a_sender_has_waited_for_is_not_waited_for_again(asleep: Any) -> None:
    end = await asleep()
    while end.link.writer.write(bytes(10 * KIB)):
        pass
    end.link.expect_space()  # of the largest record
    while end.reader.read() is not None:
        pass
    end.reader.ring_bell()
    await turns()
    assert end.link.can_write
    end.fill()
    assert end.reader.read() is not None, "room for what is in the backlog, and not for the largest record"
    end.reader.ring_bell()
    await turns()
    assert end.link.can_write


async def test_who_expects_space_that_is_there_does_not_wait(end: End) -> None:
    end.link.expect_space()
    assert end.link.can_write
    end.put(end.outgoing, HEAD, 2**40)
    end.link.expect_space()
    assert end.owner.violations == [], "not within what its owner does"
    await asyncio.sleep(0)
    assert "has taken more than was published" in str(end.owner.violations[0])


async def test_a_record_that_found_the_ring_full_is_sent_in_its_turn(end: End) -> None:
    sent = end.fill()
    end.link.queue(encode_message(Abort(7)))
    end.link.send(Abort(8))
    heard = end.heard()
    await eventually(lambda: end.link.can_write)
    heard += end.heard()
    assert heard == [large(10 * KIB)] * sent + [Abort(7), Abort(8)]
    end.link.abort()
    end.link.queue(encode_message(Abort(9)))
    assert end.heard() == []


async def test_who_writes_to_the_ring_itself_stays_awake_for_the_answer(asleep: Any) -> None:
    """If it is to poll busily; then its peer does not ring for it."""
    end = await asleep(busy_poll_s=60.0)
    assert end.link.writer.write(encode_message(Abort(1)))
    end.link.published()
    end.say(Abort(2))
    assert end.writer.bells == 0
    await asyncio.sleep(0)
    assert end.owner.messages == [Abort(2)]


async def test_a_peer_that_reads_at_once_does_not_keep_the_loop(end: End) -> None:
    others: list[int] = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    for _ in range(200):
        await end.link.drain()
        end.link.send(Abort(1))
        assert end.heard() == [Abort(1)]
    assert others


async def test_a_peer_that_does_not_read_is_reported(open_end: Any) -> None:
    end = open_end(max_backlog_nbytes=64 * KIB)
    for _ in range(30):
        end.link.send(large(10 * KIB))
    assert end.owner.violations == [], "not within what its owner does"
    assert "unread" in await violation(end)


async def test_drain_fails_when_this_side_ends_the_connection(end: End) -> None:
    end.fill()
    waiting = asyncio.create_task(end.link.drain())
    await turns()
    end.link.abort()
    await turns()
    assert isinstance(waiting.exception(), PeerLostError)


async def test_drain_fails_when_the_connection_ends(end: End) -> None:
    end.fill()
    waiting = [asyncio.create_task(end.link.drain()) for _ in range(3)]
    await asyncio.sleep(0)
    end.peer.close()
    for task in waiting:
        with pytest.raises(PeerLostError):
            await task
    with pytest.raises(PeerLostError):
        await end.link.drain()


# -- a peer that breaks the rules ---------------------------------------------------------------------------------------


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(
    "rubbish", [b"", b"\xc1\xc1\xc1", bytes(4096), b"\x91" * 16000], ids=["empty", "none", "zeros", "deep"]
)
async def test_rubbish_is_reported_once_and_nothing_after_it_is_delivered(end: End, rubbish: bytes) -> None:
    end.say(Abort(1))
    assert end.writer.write(rubbish)
    end.say(Abort(2))
    await eventually(lambda: end.owner.violations)
    end.say(Abort(3))
    await turns()
    assert len(end.owner.violations) == 1
    assert end.owner.messages == [Abort(1)]


async def test_what_the_owner_refuses_ends_the_delivery(end: End) -> None:
    def refuse(message: FrontendMessage) -> None:
        if message == Abort(2):
            raise RemoteProtocolError("not that one")

    end.owner.on_message = refuse
    end.say(*[Abort(number) for number in range(5)])
    await eventually(lambda: end.owner.violations)
    assert end.owner.messages == [Abort(0), Abort(1), Abort(2)]
    assert str(end.owner.violations[0]) == "not that one"


async def test_an_owner_that_fails_in_the_middle_of_a_record_hears_of_it_once_and_no_record_after_it(end: End) -> None:
    lacking = MemoryError("for that one")

    def fail(message: FrontendMessage) -> None:
        if message == Abort(2):
            raise lacking

    end.owner.on_message = fail
    end.say(*[Abort(number) for number in range(5)])
    await eventually(lambda: end.owner.failures)
    end.link.fail_soon(ValueError("later"))
    end.say(Abort(5))
    await turns()
    assert end.owner.failures == [lacking]
    assert end.owner.violations == []
    assert end.owner.messages == [Abort(0), Abort(1), Abort(2)]


async def test_a_failure_is_reported_but_not_within_a_call(end: End) -> None:
    lacking = MemoryError("for what the peer was to be told")
    end.link.fail_soon(lacking)
    assert end.owner.failures == []
    await eventually(lambda: end.owner.failures)
    assert end.owner.failures == [lacking]


@for_each("how", ["encode", "send", "queue"])
async def test_a_message_for_which_there_is_no_memory_is_a_failure(
    open_end: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    end = open_end()
    lacking = MemoryError("for the message")

    def lack(*_: object) -> None:
        raise lacking

    if how == "encode":
        monkeypatch.setattr(link_module, "encode_message", lack)
        end.link.send(Abort(1))
    else:
        end.fill()
        monkeypatch.setattr(end.link, "_queue", lack)
        getattr(end.link, how)(encode_message(Abort(1)))
    assert end.owner.failures == []
    await eventually(lambda: end.owner.failures)
    assert end.owner.failures == [lacking]


async def test_an_interrupt_in_the_middle_of_a_record_ends_the_connection_and_goes_on(asleep: Any) -> None:
    end = await asleep()

    def interrupt(message: FrontendMessage) -> None:
        raise KeyboardInterrupt

    end.owner.on_message = interrupt
    end.say(Abort(1))
    with pytest.raises(KeyboardInterrupt):
        end.link.poll()
    assert [type(error) for error in end.owner.failures] == [KeyboardInterrupt]


async def test_the_connection_ends_also_if_its_owner_can_not_end_it(asleep: Any) -> None:
    end = await asleep()

    def fail(error: BaseException) -> None:
        raise MemoryError("for the end as well")

    end.owner.failed = fail
    with pytest.raises(MemoryError, match="as well"):
        end.link.failed(MemoryError("for a record"))
    assert end.link.lost
    await eventually(lambda: end.owner.losses and end.has_ended())


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("tail", [2**40, 4, 2**64 - 8])
async def test_a_tail_that_cannot_be_true_is_reported(asleep: Any, tail: int) -> None:
    end = await asleep()
    end.put(end.incoming, TAIL, tail)
    end.peer.send(b"\0")
    assert "published more than it holds" in await violation(end)


async def test_a_head_that_cannot_be_true_is_reported_but_not_within_a_call(end: End) -> None:
    end.put(end.outgoing, HEAD, 2**40)
    for _ in range(10):
        end.link.send(large(10 * KIB))
    assert end.owner.violations == []
    assert "has taken more than was published" in await violation(end)


async def test_a_head_that_becomes_impossible_while_this_end_waits_is_reported(end: End) -> None:
    end.fill()
    end.owner.on_violation = end.link.close
    end.put(end.outgoing, HEAD, 2**40)
    end.peer.send(b"\0")
    await eventually(lambda: end.owner.violations and end.owner.losses)
    assert len(end.owner.violations) == end.owner.losses == 1


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("data", [b"x", b"\0\0\x02", b"\0" * 5000 + b"\xff", b"GET / HTTP/1.1\r\n\r\n"])
async def test_what_is_no_bell_is_reported(end: End, data: bytes) -> None:
    end.peer.send(data)
    assert "no bell" in await violation(end)
    assert end.owner.gave_up == 0


async def test_bells_for_nothing_are_harmless(asleep: Any) -> None:
    end = await asleep()
    with contextlib.suppress(BlockingIOError):
        while True:
            end.peer.send(bytes(4096))
    end.say(Abort(1))  # whose bell finds the socket full
    await eventually(lambda: end.owner.messages == [Abort(1)])
    assert end.owner.violations == []


async def test_a_peer_that_gives_up_while_it_attaches_says_so(end: End) -> None:
    end.peer.send(GIVING_UP)
    end.peer.close()
    await eventually(lambda: end.owner.gave_up == 1)


# -- the end ------------------------------------------------------------------------------------------------------------


async def test_the_end_is_reported_once(end: End) -> None:
    end.peer.close()
    await eventually(lambda: end.owner.losses)
    assert end.link.lost
    end.link.send(Abort(1))
    end.link.close()
    end.link.abort()
    await turns()
    assert end.owner.losses == 1


@pytest.mark.parametrize("unread_bells", [0, 3])
@pytest.mark.parametrize("backlog", [False, True])
async def test_the_last_words_of_a_peer_that_has_gone_are_read(asleep: Any, unread_bells: int, backlog: bool) -> None:
    """Also if it left bells unread, of which its kernel tells us with a reset."""
    end = await asleep()
    if backlog:
        end.fill()
    for _ in range(unread_bells):
        assert end.socket.send(b"\0")
    words: list[FrontendMessage] = [Abort(number) for number in range(1000)]
    end.say(*words)
    end.peer.close()
    end.link.send(Abort(1))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == words
    assert end.owner.losses == 1


async def test_the_last_words_of_a_process_that_has_died_are_read_at_once(asleep: Any) -> None:
    end = await asleep()
    words: list[FrontendMessage] = [Abort(number) for number in range(3 * RECORDS_IN_TURN)]
    end.say(*words)
    end.link.read_last_words()
    assert end.owner.messages == words


async def test_a_peer_that_has_gone_is_not_read_for_ever(asleep: Any) -> None:
    """Another process may have its ring, and go on publishing."""
    end = await asleep(capacity=16 * KIB)
    end.owner.on_message = lambda message: end.writer.write(encode_message(Abort(2)))
    end.say(Abort(1))
    end.peer.close()
    await eventually(lambda: end.owner.losses)
    assert 1000 < len(end.owner.messages) < 16 * KIB


async def test_what_the_owner_refuses_of_the_last_words_is_reported_before_the_end(end: End) -> None:
    end.say(Abort(1))
    assert end.writer.write(b"")
    end.say(Abort(2))
    end.peer.close()
    end.owner.on_violation = end.link.close
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == [Abort(1)]
    assert len(end.owner.violations) == end.owner.losses == 1


async def test_closing_sends_what_found_no_room_and_delivers_nothing_more(end: End) -> None:
    sent = end.fill()
    end.link.close()
    end.link.send(Abort(2))
    end.say(Abort(3))
    heard: list[FrontendMessage] = []
    while not end.has_ended():
        heard += end.heard()
        await asyncio.sleep(0)
    heard += end.heard()
    assert heard == [large(10 * KIB)] * sent
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == []


async def test_an_end_that_closes_is_not_taken_for_one_that_was_reset(asleep: Any) -> None:
    end = await asleep()
    end.peer.send(b"\0\0\0")  # which it does not read any more
    end.link.close()
    assert end.peer.recv(1) == b"", "and no ConnectionResetError"


async def test_closing_in_the_middle_of_a_delivery_ends_it(end: End) -> None:
    end.owner.on_message = lambda message: end.link.close()
    end.say(Abort(1), Abort(2))
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == [Abort(1)]


async def test_aborting_drops_what_found_no_room(end: End) -> None:
    sent = end.fill()
    end.link.abort()
    assert end.has_ended()
    assert len(end.heard()) == sent - 1, "what is in the ring has been sent"
    await eventually(lambda: end.owner.losses)


async def test_a_peer_that_never_makes_room_does_not_keep_the_connection(
    open_end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_LINGER_S", 0.05)
    end = open_end()
    end.fill()
    end.link.close()
    assert end.owner.losses == 0
    await eventually(lambda: end.owner.losses)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_link_that_never_started_can_be_ended(how: str) -> None:
    end = End()
    end.say(Abort(1))
    getattr(end.link, how)()
    assert end.has_ended()
    await eventually(lambda: end.owner.losses)
    assert end.owner.messages == []
    end.peer.close()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_nobody_rings_a_descriptor_that_may_be_another_files(end: End, how: str) -> None:
    number, writer, reader = end.socket.fileno(), end.link.writer, end.link.reader
    ours, theirs = socket.socketpair()
    getattr(end.link, how)()
    with ours, theirs:
        os.dup2(ours.fileno(), number)
        try:
            assert end.reader.sleep()
            writer.write(b"x")
            assert writer.ring_bell()
            while end.writer.write(bytes(10_000)):
                pass
            assert end.writer.wait_for_space(10_000)
            assert reader.read()
            assert reader.ring_bell()
            with pytest.raises(BlockingIOError):
                theirs.recv(1, socket.MSG_DONTWAIT)
        finally:
            os.close(number)


async def test_an_ended_link_holds_neither_descriptors_nor_rings() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("shmring-messages")

    before = held()
    end = End()
    link, owner = end.link, end.owner
    link.start()
    link.close()
    end.peer.close()
    await eventually(lambda: owner.losses)
    del end
    assert held() == before
    assert link.bells == 0


async def test_a_forked_child_touches_neither_the_socket_nor_the_rings(end: End) -> None:
    end.link.send(Abort(1))
    end.say(Abort(2))

    def as_child() -> None:
        assert not end.link.can_write
        end.link.send(Abort(3))
        end.link.queue(encode_message(Abort(3)))
        end.link.poll()
        end.link.close()
        end.link.abort()

    in_child(as_child)
    end.link.send(Abort(4))
    assert end.heard() == [Abort(1), Abort(4)]
    await eventually(lambda: end.owner.messages == [Abort(2)])
    assert not end.has_ended()
