"""Looks at the sizes in a WAV file, which libav does not hold against it: a truncated one just ends early there.

A recorder that writes to a pipe can't know how long the recording will be, and writes the largest sizes there are (ffmpeg
0xFFFFFFFF, SoX a little less than half of it), or none. One that was killed leaves 0. Such sizes promise nothing: the
samples go on to the end of the file. A size that is too small is told by what follows the samples: if it is no chunk, and
the file as a whole is said to go on, it is samples as well. Any other size is a promise.
"""

from __future__ import annotations

import dataclasses
import struct

from shmring.frontend.media.damage import Shortfall

__all__ = ["WavSizes", "wav_sizes"]

_UNKNOWN_NBYTES = 0x7FFF_F000  # sizes from here on stand for "written to a pipe"
_UNKNOWN_LARGE_NBYTES = 1 << 62
_FORMS = (b"RIFF", b"RF64", b"BW64")  # the latter two have sizes of 64 bits, in a chunk of their own
_CHUNK = struct.Struct("<4sI")
_LARGE = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WavSizes:
    """What the sizes of a WAV file say.

    Attributes:
        shortfall: bytes of samples that are missing, if any.
        goes_to_the_end: the samples do, whatever their own size says.
    """

    shortfall: Shortfall | None = None
    goes_to_the_end: bool = False


def wav_sizes(data: bytes | memoryview) -> WavSizes:
    """Returns what is wrong with the sizes of a WAV file.

    Args:
        data: the file. Of others nothing is said.
    """
    if len(data) < 12 or bytes(data[:4]) not in _FORMS or bytes(data[8:12]) != b"WAVE":
        return WavSizes()
    large_nbytes = 0
    (_, riff_nbytes), place = _CHUNK.unpack_from(data), 12
    while place + _CHUNK.size <= len(data):
        name, nbytes = _CHUNK.unpack_from(data, place)
        place += _CHUNK.size
        if name == b"ds64" and place + _LARGE.size <= len(data):
            riff_nbytes, large_nbytes = _LARGE.unpack_from(data, place)
        if name == b"data":
            if nbytes == 0xFFFF_FFFF and 0 < large_nbytes < _UNKNOWN_LARGE_NBYTES:
                nbytes = large_nbytes
            elif nbytes >= _UNKNOWN_NBYTES:
                return WavSizes(goes_to_the_end=True)
            present = len(data) - place
            if nbytes > present:
                return WavSizes(shortfall=Shortfall(missing=nbytes - present, promised=nbytes, unit="bytes of samples"))
            end = place + nbytes + nbytes % 2
            is_unfinished = nbytes == 0 and riff_nbytes <= place  # what a recorder writes first, and mends at its end
            is_too_small = riff_nbytes >= end and end < len(data) and not _is_chunk(data, end)
            return WavSizes(goes_to_the_end=present > nbytes and (is_unfinished or is_too_small))
        place += nbytes + nbytes % 2
    return WavSizes()


def _is_chunk(data: bytes | memoryview, place: int) -> bool:
    """Whether something that looks like a chunk begins here: a name of four letters, and a size that fits."""
    if place + _CHUNK.size > len(data):
        return False
    name, nbytes = _CHUNK.unpack_from(data, place)
    return all(0x20 <= byte < 0x7F for byte in name) and place + _CHUNK.size + nbytes <= len(data)
