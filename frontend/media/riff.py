"""Looks at the sizes in a WAV file, which libav does not hold against it: a truncated one just ends early there.

A recorder that writes to a pipe can't know how long the recording will be, and writes the largest sizes there are (ffmpeg
0xFFFFFFFF, SoX a little less than half of it) into both headers. Those files are whole. Any other size that is larger than what
is there means that something is missing.
"""

from __future__ import annotations

import struct

from frontend.media.errors import MediaError

__all__ = ["check_wav"]

_UNKNOWN_NBYTES = 0x7FFF_F000  # sizes from here on stand for "written to a pipe"
_CHUNK = struct.Struct("<4sI")


def check_wav(data: bytes | memoryview) -> None:
    """Refuses a WAV file that is shorter than it says.

    Args:
        data: the file. Others than ``RIFF ... WAVE`` are none of our business.

    Raises:
        MediaError: samples are missing.
    """
    if len(data) < 12 or bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return
    (_, riff_nbytes), place = _CHUNK.unpack_from(data), 12
    while place + _CHUNK.size <= len(data):
        name, nbytes = _CHUNK.unpack_from(data, place)
        place += _CHUNK.size
        if name == b"data":
            is_piped = min(nbytes, riff_nbytes) >= _UNKNOWN_NBYTES
            if nbytes > len(data) - place and not is_piped:
                raise MediaError(f"the WAV file is truncated: of {nbytes} bytes of samples it has {len(data) - place}")
            return
        place += nbytes + nbytes % 2
