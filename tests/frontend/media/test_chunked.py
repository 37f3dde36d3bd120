"""AIFFs and CAFs that have more samples than they say."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from shmring.frontend.media.errors import MediaError
from tests.frontend.media.test_pieces import recording, tone
from tests.tables import for_each

Make = Callable[..., bytes]
RATE = 16_000
FORMATS = [("caf", "pcm_s16le", 2), ("caf", "pcm_f32be", 4), ("aiff", "pcm_s16be", 2), ("aiff", "pcm_s24be", 3)]


@for_each(("container", "codec", "nbytes"), FORMATS)
def test_samples_behind_the_end_are_heard_and_told(recording_of: Make, container: str, codec: str, nbytes: int) -> None:
    first, second = (recording_of(tone(pitch, 1), RATE, container, codec) for pitch in (500, 900))
    samples = second[-RATE * nbytes :]
    whole, told = recording(first + samples)
    assert told.duration_s == pytest.approx(2)
    for pitch, half in ((500, whole[:RATE]), (900, whole[RATE:])):
        assert abs(half @ tone(pitch, 1)) > 0.99 * (half @ half) ** 0.5 * (tone(pitch, 1) @ tone(pitch, 1)) ** 0.5
    assert f"{len(samples)} bytes behind its " in told.shortfall
    assert told.shortfall.endswith("bytes of samples are taken for samples, as they are nothing else")


@for_each("rate", [b"\xff" * 10, b"\x7f\xff" + bytes(8), bytes(10)])
def test_a_rate_that_is_none_is_an_error(recording_of: Make, rate: bytes) -> None:
    data = bytearray(recording_of(tone(500, 1), RATE, "aiff", "pcm_s16be"))
    place = data.index(b"COMM") + 16
    data[place : place + 10] = rate
    with pytest.raises(MediaError):
        recording(bytes(data))


@for_each("nbytes", [1, 2, 3, 4])
def test_little_endian_samples_of_any_size(recording_of: Make, nbytes: int) -> None:
    sound = tone(500, 1)
    samples = (np.rint(sound * ((1 << 31) - 1)).astype("<i4")).view(np.uint8).reshape(-1, 4)[:, 4 - nbytes :].tobytes()
    made = recording_of(sound, RATE, "aiff", "pcm_s16be")
    rate = made[made.index(b"COMM") + 16 :][:10]
    head = b"AIFCCOMM" + struct.pack(">IhIh", 24, 1, len(sound), 8 * nbytes) + rate + b"sowt\0\0"
    content = head + b"SSND" + struct.pack(">III", 8 + len(samples), 0, 0) + samples
    heard, told = recording(b"FORM" + struct.pack(">I", len(content)) + content)
    assert np.abs(heard - sound).max() < 2 / 256
    assert told.shortfall == ""


@for_each(("container", "codec", "nbytes"), FORMATS)
def test_what_is_something_else_behind_the_end_is_left_out(recording_of: Make, container: str, codec: str, nbytes: int) -> None:
    data = recording_of(tone(500, 1), RATE, container, codec)
    chunk = b"free" + struct.pack(">Q" if container == "caf" else ">I", 10_000) + bytes(10_000)
    for behind in (b"", bytes(RATE * nbytes // 10), chunk, 2 * chunk, b"ID3" + bytes(10_000)):
        _, told = recording(data + behind)
        assert told.duration_s == pytest.approx(1, abs=0.001)
        assert told.shortfall == ""
