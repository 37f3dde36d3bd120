"""The message ring: what one end writes is what the other reads, and what a hostile end writes harms nobody."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.compiled import LARGEST_RECORD_NBYTES, LinkReader, RecordHandler, RecordReader, RecordWriter, ring_nbytes
from shmring.errors import CapacityError, RemoteProtocolError
from shmring.memory.tensors import make_packer
from tests.model.inside import ColdTaker, deliver, has_news, hear, write_submit
from tests.tables import for_each

TAIL, HEAD, READER_SLEEPS, WRITER_WAITS, RECORDS = 0, 64, 128, 192, 4096
SKIP = 0xFFFFFFFF


class Pair:
    """Both ends of a ring in one process, and the sockets on which they ring."""

    def __init__(self, capacity: int, memory: mmap.mmap | None = None) -> None:
        self.memory = mmap.mmap(-1, ring_nbytes(capacity)) if memory is None else memory
        self.at_writer, self.at_reader = socket.socketpair()
        self.writer = RecordWriter(self.memory, self.at_writer.fileno())
        self.reader = LinkReader(self.memory, self.at_reader.fileno())

    def close(self) -> None:
        self.at_writer.close()
        self.at_reader.close()

    def number(self, at: int) -> int:
        return int.from_bytes(self.memory[at : at + 8], "little")

    def put(self, at: int, value: int, nbytes: int = 8) -> None:
        self.memory[at : at + nbytes] = (value % 2 ** (8 * nbytes)).to_bytes(nbytes, "little")

    def bells_at_reader(self) -> int:
        return bells_in(self.at_reader)

    def bells_at_writer(self) -> int:
        return bells_in(self.at_writer)


def bells_in(sock: socket.socket) -> int:
    try:
        return len(sock.recv(4096, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(256)
    yield pair
    pair.close()


# -- records ------------------------------------------------------------------------------------------------------------


def test_records_come_out_as_they_went_in(pair: Pair) -> None:
    assert pair.reader.read() is None
    assert pair.writer.write(b"first")
    assert pair.writer.write(b"")
    assert [pair.reader.read() for _ in range(3)] == [b"first", b"", None]


def test_a_record_that_would_wrap_begins_at_the_start(pair: Pair) -> None:
    for length in (60, 60, 60):  # 64 each: 64 are left
        assert pair.writer.write(bytes(length))
        assert pair.reader.read() == bytes(length)
    assert pair.writer.write(b"a" * 20)  # 24: 40 are left
    assert pair.writer.write(b"b" * 60)
    assert pair.number(TAIL) == 3 * 64 + 64 + 64
    assert int.from_bytes(pair.memory[RECORDS + 216 : RECORDS + 220], "little") == SKIP
    assert [pair.reader.read() for _ in range(3)] == [b"a" * 20, b"b" * 60, None]
    assert pair.number(HEAD) == pair.number(TAIL)


def test_a_full_ring_takes_nothing_until_something_was_read(pair: Pair) -> None:
    assert [pair.writer.write(bytes([number]) * 60) for number in range(5)] == [True, True, True, True, False]
    assert pair.reader.read() == bytes(60)
    assert pair.writer.write(bytes([4]) * 60)
    assert not pair.writer.write(b"")
    assert [pair.reader.read() for _ in range(5)] == [bytes([number]) * 60 for number in (1, 2, 3, 4)] + [None]


def test_a_record_has_a_quarter_of_the_ring_at_most(pair: Pair) -> None:
    assert pair.writer.largest_record_nbytes == 64
    assert pair.writer.write(bytes(64))
    with pytest.raises(CapacityError, match="a record of 65 bytes is longer than 64") as caught:
        pair.writer.write(bytes(65))
    assert (caught.value.needed, caught.value.capacity) == (65, 64)
    assert pair.reader.read() == bytes(64)
    assert pair.reader.read() is None


def test_a_record_has_64_kib_at_most() -> None:
    pair = Pair(1 << 20)
    assert pair.writer.largest_record_nbytes == LARGEST_RECORD_NBYTES == 64 << 10
    assert pair.writer.write(bytes(64 << 10))
    with pytest.raises(CapacityError):
        pair.writer.write(bytes((64 << 10) + 1))
    pair.close()


@for_each("capacity", [0, 32, 63, 65, 96, 2**31])
def test_a_capacity_that_is_no_power_of_two_in_range_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"power of two of bytes from 64 to 2\\*\\*30, not {capacity}"):
        ring_nbytes(capacity)


def test_memory_that_cannot_be_a_ring_is_refused() -> None:
    for end in (RecordWriter, RecordReader):
        with pytest.raises(ValueError, match="needs writable memory"):
            end(bytes(ring_nbytes(64)), -1)
        with pytest.raises(ValueError, match="power of two"):
            end(bytearray(ring_nbytes(64) + 8), -1)


def test_an_end_keeps_its_memory(pair: Pair) -> None:
    with pytest.raises(BufferError):
        pair.memory.close()


class RingMachine(RuleBasedStateMachine):
    """Records of any length against a queue; the counts in memory are those of the records that are in it."""

    @initialize(capacity=st.sampled_from([64, 128, 256, 1024]))
    def create(self, capacity: int) -> None:
        self.capacity = capacity
        self.pair = Pair(capacity)
        self.written: deque[bytes] = deque()
        self.number = 0

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, self.pair.writer.largest_record_nbytes))
        record = bytes([self.number % 256]) * length
        if self.pair.writer.write(record):
            self.written.append(record)
            self.number += 1
        else:
            assert self.written, "an empty ring has room for any record"

    @rule()
    def read(self) -> None:
        assert self.pair.reader.read() == (self.written.popleft() if self.written else None)

    @precondition(lambda self: not self.written)
    @rule()
    def sleep_and_be_woken(self) -> None:
        assert self.pair.reader.sleep()
        assert self.pair.writer.write(b"")
        assert self.pair.writer.ring_bell()
        assert not self.pair.writer.ring_bell(), "once is enough"
        assert self.pair.bells_at_reader() == 1
        assert self.pair.reader.read() == b""

    @precondition(lambda self: self.written)
    @rule()
    def do_not_sleep(self) -> None:
        assert not self.pair.reader.sleep()
        assert not self.pair.writer.ring_bell()

    @invariant()
    def the_counts_add_up(self) -> None:
        if hasattr(self, "pair"):
            held = self.pair.number(TAIL) - self.pair.number(HEAD)
            assert 0 <= held <= self.capacity
            assert held % 8 == 0
            assert held >= sum((len(record) + 4 + 7) // 8 * 8 for record in self.written)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            while self.written:
                self.read()
            assert self.pair.reader.read() is None
            self.pair.close()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(stateful_step_count=60)


# -- sleeping and waking ------------------------------------------------------------------------------------------------


def test_no_bell_is_rung_for_a_side_that_is_awake(pair: Pair) -> None:
    pair.writer.write(b"x")
    assert not pair.writer.ring_bell()
    assert pair.bells_at_reader() == 0


def test_a_reader_that_is_about_to_sleep_looks_again(pair: Pair) -> None:
    pair.writer.write(b"x")
    assert not pair.reader.sleep()
    assert pair.number(READER_SLEEPS) == 0


def test_a_writer_that_waits_is_woken_once_there_is_space(pair: Pair) -> None:
    while pair.writer.write(bytes(60)):
        pass
    assert pair.writer.wait_for_space(60)
    assert not pair.reader.sleep()
    assert not pair.bells_at_writer()
    assert pair.reader.read() == bytes(60)
    assert pair.reader.ring_bell()
    assert not pair.reader.ring_bell(), "once is enough"
    assert pair.bells_at_writer() == 1
    assert pair.writer.write(bytes(60))


def test_a_writer_that_is_about_to_wait_looks_again(pair: Pair) -> None:
    while pair.writer.write(bytes(60)):
        pass
    pair.reader.read()
    assert not pair.writer.wait_for_space(60)
    assert not pair.reader.ring_bell()
    assert pair.writer.write(bytes(60))


def fill(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(4096), socket.MSG_DONTWAIT)


def test_a_bell_whose_socket_is_full_or_gone_blocks_and_kills_nobody(pair: Pair) -> None:
    fill(pair.at_writer)
    assert pair.reader.sleep()
    assert pair.writer.ring_bell()
    pair.at_reader.close()
    pair.put(READER_SLEEPS, 1, 4)
    assert pair.writer.ring_bell()


# -- what a hostile end writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [0, 5 * 64 + 8, 2**63, 2**64 - 8, 64 + 4])
def test_a_head_that_cannot_be_true_is_the_readers_fault(pair: Pair, head: int) -> None:
    for _ in range(4):
        pair.writer.write(bytes(60))
    pair.reader.read()
    pair.writer.write(bytes(60))  # the writer has seen a head of 64, and its tail is 5 * 64
    pair.put(HEAD, head)
    for event in (lambda: pair.writer.write(b""), lambda: pair.writer.wait_for_space(0)):
        with pytest.raises(RemoteProtocolError, match="has taken more than was published"):
            event()


@pytest.mark.parametrize("tail", [256 + 8, 4, 2**64 - 8, 2**63])
def test_a_tail_that_cannot_be_true_is_the_writers_fault(pair: Pair, tail: int) -> None:
    pair.put(TAIL, tail)
    with pytest.raises(RemoteProtocolError, match="published more than it holds"):
        pair.reader.read()


@pytest.mark.parametrize("length", [13, 64, 65, 2**31, 2**32 - 2])
def test_a_length_beyond_what_was_published_is_the_writers_fault(pair: Pair, length: int) -> None:
    pair.put(RECORDS, length, 4)
    pair.put(TAIL, 16)
    with pytest.raises(RemoteProtocolError, match=f"a record of {length} bytes is longer than what was published"):
        pair.reader.read()


def test_a_length_beyond_the_end_of_the_ring_is_the_writers_fault(pair: Pair) -> None:
    for _ in range(3):
        pair.writer.write(bytes(60))
        pair.reader.read()
    pair.writer.write(bytes(36))
    pair.reader.read()
    pair.put(RECORDS + 232, 60, 4)  # 24 are left
    pair.put(TAIL, 232 + 64)
    with pytest.raises(RemoteProtocolError, match="a record of 60 bytes"):
        pair.reader.read()


def test_a_record_longer_than_the_ring_carries_is_the_writers_fault(pair: Pair) -> None:
    """Who takes records in C has room for the longest one that there may be."""
    pair.put(RECORDS, pair.writer.largest_record_nbytes + 1, 4)
    pair.put(TAIL, 256)
    with pytest.raises(RemoteProtocolError, match=f"a record of {pair.writer.largest_record_nbytes + 1} bytes"):
        pair.reader.read()


@pytest.mark.parametrize(("tail", "fault"), [(256, "ends with a skip"), (256 + 8, f"a record of {SKIP} bytes")])
def test_skips_with_nothing_behind_them_are_the_writers_fault(pair: Pair, tail: int, fault: str) -> None:
    pair.writer.write(bytes(60))
    pair.reader.read()
    pair.put(RECORDS + 64, SKIP, 4)
    pair.put(RECORDS, SKIP, 4)
    pair.put(TAIL, tail)
    with pytest.raises(RemoteProtocolError, match=fault):
        pair.reader.read()


def test_after_its_writers_end_a_ring_is_read_once_and_no_further(pair: Pair) -> None:
    taken: list[bytes] = []
    for _ in range(4):
        pair.reader.expect_the_end()
        while pair.writer.write(bytes(28)):
            pass
        deliver(pair.reader, taken.append)
    assert len(taken) == 8, "as many as fit in the ring"
    assert pair.reader.stopped


@given(
    st.lists(st.tuples(st.sampled_from(range(RECORDS, RECORDS + 64, 8)), st.integers(0, 2**32 - 1) | st.just(SKIP))),
    st.integers(0, 72),
)
def test_whatever_lies_in_the_ring_is_refused_or_read(stores: list[tuple[int, int]], tail: int) -> None:
    pair = Pair(64)
    for at, value in stores:
        pair.put(at, value if value % 2 else value % 24, 4)
    pair.put(TAIL, tail)
    with contextlib.suppress(RemoteProtocolError):
        while (record := pair.reader.read()) is not None:
            assert len(record) <= 16
    pair.close()


# -- what is published is complete, and what is given back was taken ---------------------------------------------------------


@pytest.fixture
def cut_off() -> Iterator[Pair]:
    """A ring whose file is cut off behind its first page of records: whoever touches what lies there is killed."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, ring_nbytes(1 << 15))
    pair = Pair(1 << 15, mmap.mmap(fd, ring_nbytes(1 << 15)))
    os.ftruncate(fd, RECORDS + mmap.PAGESIZE)
    yield pair
    pair.close()
    os.close(fd)


def dies(event: Callable[[], object]) -> bool:
    """Runs an event in a forked process; returns whether that was killed meanwhile."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(BaseException):
            event()
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


LONG = b"x" * (1 << 13)  # which reaches beyond that page

WRITES: dict[str, Callable[[RecordWriter], object]] = {
    "write": lambda writer: writer.write(LONG),
    "write_submit": lambda writer: write_submit(
        writer, make_packer(4, 1 << 16).pack(LONG[:6000], 0, len(LONG)), 1, 1, "", b"", ()
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_record_is_published_after_all_of_it_was_written(cut_off: Pair, write: Callable[[RecordWriter], object]) -> None:
    """The other end sees what was published at any moment, also while the copy is being made."""
    assert dies(lambda: write(RecordWriter(cut_off.memory, cut_off.at_writer.fileno())))  # what was forked would not write
    assert cut_off.number(TAIL) == 0


class Taker(RecordHandler):
    def handle_message(self, record: bytes, /) -> None:
        pass


READS: dict[str, Callable[[LinkReader], object]] = {
    "read": lambda reader: reader.read(),
    "deliver": lambda reader: deliver(reader, [].append),
    "deliver in C": lambda reader: deliver(reader, Taker()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_place_is_given_back_after_its_record_was_copied(cut_off: Pair, read: Callable[[LinkReader], object]) -> None:
    """The writer may use it again at once: what was not copied by then would be torn."""
    cut_off.put(RECORDS, len(LONG), 4)
    cut_off.put(TAIL, 4 + len(LONG) + 4)
    assert dies(lambda: read(cut_off.reader))
    assert cut_off.number(HEAD) == 0


# -- who takes what ------------------------------------------------------------------------------------------------------------


class Colder(ColdTaker):
    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def handle_message(self, record: bytes, /) -> None:
        self.taken.append(record)


def in_a_turn(reader: LinkReader, taker: RecordHandler) -> None:
    deliver(reader, taker)


def between_turns(reader: LinkReader, taker: RecordHandler) -> None:
    while has_news(reader):
        hear(reader, taker)


@pytest.mark.parametrize("read", [in_a_turn, between_turns])
def test_a_record_that_is_not_taken_in_c_is_not_read_there_again(
    pair: Pair, read: Callable[[LinkReader, RecordHandler], None]
) -> None:
    taker = Colder()
    for record in (b"one", b"two"):
        assert pair.writer.write(record)
    read(pair.reader, taker)
    assert taker.taken == [b"one", b"two"]
    assert taker.asked == 2
    taker.handle_record(b"three")
    assert (taker.taken[2:], taker.asked) == ([b"three"], 3)


# -- two processes ---------------------------------------------------------------------------------------------------------

PROGRAM = Path(__file__).parent / "programs" / "write_records.py"


def start_writer(capacity: int, records: int) -> tuple[subprocess.Popen[bytes], RecordReader, socket.socket, mmap.mmap]:
    fd = os.memfd_create("ring")
    os.ftruncate(fd, ring_nbytes(capacity))
    memory = mmap.mmap(fd, ring_nbytes(capacity))
    ours, theirs = socket.socketpair()
    arguments = [str(number) for number in (fd, theirs.fileno(), capacity, records)]
    process = subprocess.Popen([sys.executable, "-P", str(PROGRAM), *arguments], pass_fds=(fd, theirs.fileno()))
    os.close(fd)
    theirs.close()
    return process, RecordReader(memory, ours.fileno()), ours, memory


def records_until_the_end(reader: RecordReader, sock: socket.socket, pause: random.Random | None = None) -> Iterator[bytes]:
    """Yields records as a loop would read them: in batches, asleep in between, and to the ring's end after the socket's."""
    ended = False
    while True:
        while (record := reader.read()) is not None:
            yield record
            if pause is not None and pause.random() < 0.1:
                reader.ring_bell()
        reader.ring_bell()
        if ended:
            return
        if reader.sleep():
            assert select.select([sock], [], [], 30)[0], "nobody rang for 30 s"
            ended = not sock.recv(4096)


@for_each("capacity", [64, 1024, 65536])
def test_every_record_of_another_process_arrives_whole_and_in_order(capacity: int) -> None:
    count = 20_000
    process, reader, sock, _memory = start_writer(capacity, count)
    number = -1
    for number, record in enumerate(records_until_the_end(reader, sock, random.Random(1))):
        (stated,) = struct.unpack_from("<Q", record)
        assert stated == number
        assert record[8:] == bytes([number % 251]) * (len(record) - 8)
    assert number == count - 1
    assert process.wait(30) == 0
    sock.close()


def test_what_a_killed_writer_had_published_is_read_and_nothing_else() -> None:
    process, reader, sock, memory = start_writer(1024, 10**9)
    number = -1
    for number, record in enumerate(records_until_the_end(reader, sock)):
        assert struct.unpack_from("<Q", record)[0] == number
        if number == 5_000:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    assert number >= 5_000
    assert memory[TAIL : TAIL + 8] == memory[HEAD : HEAD + 8]
    sock.close()
