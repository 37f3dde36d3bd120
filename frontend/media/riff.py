"""Looks at the sizes in a WAV file, which libav does not hold against it: a truncated one just ends early there.

A recorder that writes to a pipe can't know how long the recording will be, and writes the largest sizes there are (ffmpeg
0xFFFFFFFF, SoX a little less than half of it), or none. One that was killed leaves 0. Such sizes promise nothing: the
samples go on to the end of the file. A size that is too small is told by what follows the samples: if it is no chunk, and
the file as a whole is said to go on, it is samples as well. Any other size is a promise.
"""

from __future__ import annotations

import dataclasses
import struct

from frontend.media.damage import Shortfall

__all__ = ["WavSizes", "wav_sizes"]

_UNKNOWN_NBYTES = 0x7FFF_F000  # sizes from here on stand for "written to a pipe"
_CHUNK = struct.Struct("<4sI")


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
        data: the file. Of others than ``RIFF ... WAVE`` nothing is said.
    """
    if len(data) < 12 or bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return WavSizes()
    (_, riff_nbytes), place = _CHUNK.unpack_from(data), 12
    while place + _CHUNK.size <= len(data):
        name, nbytes = _CHUNK.unpack_from(data, place)
        place += _CHUNK.size
        if name == b"data":
            present = len(data) - place
            if nbytes >= _UNKNOWN_NBYTES:
                return WavSizes(goes_to_the_end=True)
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
