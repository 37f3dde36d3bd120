"""AIFF and CAF files with wrong sizes. libav refuses some of them, and of others it reads a part.

An AIFF that was written to a pipe, or whose recorder did not come to its end, has sizes of 0, or as large as can be: its
samples go to its end. In both formats, a size that is too small is told by what is behind it: if this is neither a chunk nor
another file, and would be heard, it is samples as well, and the caller is told (as in a WAV,
:mod:`shmring.frontend.media.riff`). Little-endian samples of an AIFF that have not 16 bits are turned round.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

import numpy as np

from shmring.frontend.media.damage import Shortfall, taken_for_samples
from shmring.frontend.media.signatures import is_another_file

__all__ = ["sizes_set_right"]

_IGNORED_S = 0.1  # what follows the samples, and is no more than this, may be a tag of some kind or filling
_LARGEST_OF_AIFF = 0x7FFF_FFFF
_MAX_CHUNKS = 10_000  # there are about ten; each costs a microsecond
_BIAS = 16383 + 63  # of the exponent of a number of 80 bits
_LITTLE_ENDIAN, _BIG_ENDIAN = b"sowt", {8: b"NONE", 24: b"in24", 32: b"in32"}  # kinds of samples, by their bits
_Written = tuple[int, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Samples:
    """Where the samples of a file are, as it says.

    Attributes:
        place: where they begin.
        nbytes: of them.
        nbytes_a_second: so many last for a second.
    """

    place: int
    nbytes: int
    nbytes_a_second: float


def sizes_set_right(demuxer: str, view: memoryview) -> tuple[tuple[_Written, ...], tuple[Shortfall, ...]]:
    """Returns what to write where in a file, so that libav reads it as a whole; and what callers are told.

    Args:
        demuxer: ``"aiff"``, ``"caf"``, or another one, of which nothing is said.
        view: the file.
    """
    if demuxer == "aiff":
        endless = _endless_aiff(view)
        written, shortfalls = (endless, ()) if endless else _longer(view, _samples_of_aiff(view), 4)
        return (*written, *_big_endian(view)), shortfalls
    return _longer(view, _samples_of_caf(view), 8) if demuxer == "caf" else ((), ())


def _longer(view: memoryview, samples: _Samples | None, width: int) -> tuple[tuple[_Written, ...], tuple[Shortfall, ...]]:
    """What to do if there are more samples than the file says; its sizes have so many bytes."""
    if samples is None:
        return (), ()
    end = samples.place + samples.nbytes
    behind = view[end + (samples.nbytes % 2 if width == 4 else 0) :]
    _, _, chunk_end = next(_chunks(behind, 0, width), (b"", 0, len(behind) + 1))
    if len(behind) <= _IGNORED_S * samples.nbytes_a_second or chunk_end <= len(behind) or is_another_file(behind):
        return (), ()
    sizes = [(samples.place - 8 - width, len(view) - samples.place + 8)] if width == 4 else [(samples.place - width, -1)]
    if width == 4:
        sizes.append((4, len(view) - 8))
    written = tuple((place, size.to_bytes(width, "big", signed=size < 0)) for place, size in sizes)
    return written, (taken_for_samples(len(view) - end, samples.nbytes),)


def _chunks(view: memoryview, place: int, width: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields the name of each chunk, where its content begins, and where it says that it ends; up to what can't be one."""
    for _ in range(_MAX_CHUNKS):
        if place + 4 + width > len(view) or not all(0x20 <= byte < 0x7F for byte in view[place : place + 4]):
            return
        begin = place + 4 + width
        end = begin + int.from_bytes(view[place + 4 : begin], "big")
        yield bytes(view[place : place + 4]), begin, end
        place = end + (end % 2 if width == 4 else 0)


def _endless_aiff(view: memoryview) -> tuple[_Written, ...]:
    """What to write in an AIFF whose sizes libav refuses, or that nobody has set; the number of its samples is not said (0)."""
    written = []
    form_nbytes = int.from_bytes(view[4:8], "big")
    for name, begin, _ in _chunks(view, 12, 4):
        if name == b"COMM" and int.from_bytes(view[begin + 2 : begin + 6], "big") > _LARGEST_OF_AIFF:
            written.append((begin + 2, bytes(4)))
        if name == b"SSND":
            if begin < form_nbytes <= _LARGEST_OF_AIFF:  # there are samples in it
                return ()
            sizes = (4, (len(view) - 8).to_bytes(4, "big")), (begin - 4, (len(view) - begin).to_bytes(4, "big"))
            return sizes[0], *written, sizes[1]
    return ()


def _big_endian(view: memoryview) -> tuple[_Written, ...]:
    """What to write in an AIFF of little-endian samples, which libav takes for those of 16 bits, if they have others."""
    written: list[_Written] = []
    nbytes = 0
    for name, begin, _ in _chunks(view, 12, 4):
        bits = int.from_bytes(view[begin + 6 : begin + 8], "big")
        if name == b"COMM" and bytes(view[begin + 18 : begin + 22]) == _LITTLE_ENDIAN and bits in _BIG_ENDIAN:
            nbytes = bits // 8
            written = [(begin + 18, _BIG_ENDIAN[bits])]
        if name == b"SSND" and nbytes:
            samples = view[begin + 8 :]
            whole = np.frombuffer(samples[: len(samples) // nbytes * nbytes], np.uint8).reshape(-1, nbytes)
            return *written, (begin + 8, whole[:, ::-1].tobytes())
    return ()


def _samples_of_aiff(view: memoryview) -> _Samples | None:
    rate = 0.0
    for name, begin, end in _chunks(view, 12, 4):
        if name == b"COMM" and begin + 18 <= len(view):
            num_channels, _, bits, exponent, mantissa = struct.unpack_from(">HIHHQ", view, begin)
            rate = num_channels * -(-bits // 8) * mantissa * 2.0 ** min((exponent & 0x7FFF) - _BIAS, 0)
        if name == b"SSND" and rate > 0 and begin + 8 <= end <= len(view):
            return _Samples(place=begin + 8, nbytes=end - begin - 8, nbytes_a_second=rate)
    return None


def _samples_of_caf(view: memoryview) -> _Samples | None:
    """None: they go to its end, or how many bytes its packets have is said elsewhere."""
    rate = 0.0
    for name, begin, end in _chunks(view, 8, 8):
        if name == b"desc" and begin + 24 <= len(view):
            samples_a_second, nbytes, num_samples = struct.unpack_from(">d8xII", view, begin)
            rate = samples_a_second * nbytes / max(1, num_samples)
        if name == b"data" and rate > 0 and end <= len(view):
            return _Samples(place=begin, nbytes=end - begin, nbytes_a_second=rate)
    return None
