"""Frames: however the stream is split, bounded, and refused by their length."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.core.framing import PREFIX, FrameDecoder, append_frame, encode_frame
from shmring.errors import CapacityError, RemoteProtocolError

LIMIT_NBYTES = 64

bodies = st.lists(st.binary(max_size=LIMIT_NBYTES), max_size=8)


def stream_of(frames: list[bytes]) -> bytes:
    return b"".join(encode_frame(frame, LIMIT_NBYTES) for frame in frames)


def test_a_frame_is_its_length_in_little_endian_and_its_body() -> None:
    assert encode_frame(b"abc", 3) == b"\x03\0\0\0abc"
    assert encode_frame(b"", 0) == b"\0\0\0\0"


def test_a_body_above_the_limit_is_not_sent() -> None:
    assert encode_frame(bytes(10), 10)
    with pytest.raises(CapacityError, match="max_frame_nbytes") as caught:
        encode_frame(bytes(11), 10)
    assert (caught.value.needed, caught.value.capacity) == (11, 10)


def write_into(body: bytes, buffer: bytearray, position: int) -> None:
    buffer[position:] = bytes(position - len(buffer)) + body


def test_a_frame_appended_to_a_stream_is_the_same() -> None:
    stream = bytearray(encode_frame(b"first", 10))
    append_frame(stream, b"second", write_into, 10)
    append_frame(stream, b"", write_into, 10)
    assert stream == stream_of([b"first", b"second", b""])


def test_what_can_not_be_appended_leaves_the_stream_as_it_was() -> None:
    stream = bytearray(encode_frame(b"first", 10))
    with pytest.raises(CapacityError, match="max_frame_nbytes") as caught:
        append_frame(stream, bytes(11), write_into, 10)
    assert (caught.value.needed, caught.value.capacity) == (11, 10)

    def fail(body: bytes, buffer: bytearray, position: int) -> None:
        buffer += b"half of it"
        raise TypeError(body)

    with pytest.raises(TypeError):
        append_frame(stream, b"x", fail, 10)
    assert stream == encode_frame(b"first", 10)


@given(frames=bodies, cuts=st.lists(st.integers(0, 600), max_size=12))
def test_any_split_of_the_stream_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = stream_of(frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder(LIMIT_NBYTES)
    received: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        received += decoder.feed(stream[start:end])
        assert decoder.buffered_nbytes < PREFIX.size + LIMIT_NBYTES
        assert stream_of(received) == stream[: end - decoder.buffered_nbytes]
    assert received == frames
    assert decoder.buffered_nbytes == 0


@given(frames=bodies)
def test_one_byte_at_a_time_gives_the_same_frames_each_with_its_last_byte(frames: list[bytes]) -> None:
    decoder = FrameDecoder(LIMIT_NBYTES)
    for frame in frames:
        *head, last = encode_frame(frame, LIMIT_NBYTES)
        assert [decoder.feed(bytes([byte])) for byte in head] == [[]] * len(head)
        assert decoder.feed(bytes([last])) == [frame]


def test_a_read_may_bring_the_end_of_one_frame_several_more_and_the_start_of_another() -> None:
    stream = stream_of([b"first", b"", b"third", b"fourth"])
    decoder = FrameDecoder(LIMIT_NBYTES)
    assert decoder.feed(stream[:6]) == []
    assert decoder.feed(stream[6:-3]) == [b"first", b"", b"third"]
    assert decoder.feed(stream[-3:]) == [b"fourth"]


def test_a_read_of_nothing_changes_nothing() -> None:
    decoder = FrameDecoder(LIMIT_NBYTES)
    assert decoder.feed(b"") == []
    assert decoder.feed(b"\x02\0\0\0a") == []
    assert decoder.feed(b"") == []
    assert decoder.buffered_nbytes == 5
    assert decoder.feed(b"b") == [b"ab"]


def test_a_frame_at_the_limit_is_accepted() -> None:
    body = bytes(range(LIMIT_NBYTES))
    assert FrameDecoder(LIMIT_NBYTES).feed(encode_frame(body, LIMIT_NBYTES)) == [body]


@pytest.mark.parametrize("length", [LIMIT_NBYTES + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("cut", [0, 1, 3, 4])
def test_a_length_above_the_limit_is_refused_before_the_body_is_kept(length: int, cut: int) -> None:
    decoder = FrameDecoder(LIMIT_NBYTES)
    prefix = PREFIX.pack(length)
    if cut < PREFIX.size:
        assert decoder.feed(prefix[:cut]) == []
        assert decoder.buffered_nbytes == cut
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes exceeds the limit of {LIMIT_NBYTES}"):
        decoder.feed(prefix[cut % PREFIX.size :] + b"body" * 1000)
    assert decoder.buffered_nbytes == 0


def test_a_length_above_the_limit_is_refused_behind_good_frames() -> None:
    decoder = FrameDecoder(LIMIT_NBYTES)
    with pytest.raises(RemoteProtocolError):
        decoder.feed(stream_of([b"good"]) + PREFIX.pack(LIMIT_NBYTES + 1))


@pytest.mark.timeout(20)
def test_a_large_frame_in_single_bytes_costs_no_more_than_its_size() -> None:
    # It takes half a second. Were the buffer copied for each byte, it would be 500 GB of copies.
    body = bytes(1_000_000)
    decoder = FrameDecoder(len(body))
    stream = encode_frame(body, len(body))
    received = [frame for byte in stream for frame in decoder.feed(bytes([byte]))]
    assert received == [body]
