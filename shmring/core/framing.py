"""Length-prefixed frames over a byte stream, incremental and bounded.

A frame is a little-endian u32 length and that many bytes. The length is checked before a byte of the body is kept, so a
peer can make us hold at most one frame of ``max_nbytes`` plus what one read brought. Sans-I/O: bytes in, frames out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from shmring.errors import CapacityError, RemoteProtocolError

__all__ = ["FrameDecoder", "PREFIX", "append_frame", "encode_frame"]

PREFIX = struct.Struct("<I")

Message = TypeVar("Message")
EncodeInto = Callable[[Message, bytearray, int], None]


def encode_frame(body: bytes, max_nbytes: int) -> bytes:
    """Returns ``body`` with its length in front.

    Raises:
        CapacityError: the body is larger than the peer accepts.
    """
    if len(body) > max_nbytes:
        raise _too_large(len(body), max_nbytes)
    return PREFIX.pack(len(body)) + body


def append_frame(stream: bytearray, message: Message, encode_into: EncodeInto[Message], max_nbytes: int) -> None:
    """Appends a message's frame to a stream, in which it is encoded: nothing is copied once more.

    Args:
        encode_into: writes a message's body to a buffer from a position on, which becomes the buffer's end.

    Raises:
        CapacityError: the body is larger than the peer accepts. The stream is as it was.
    """
    start = len(stream)
    try:
        encode_into(message, stream, start + PREFIX.size)
        nbytes = len(stream) - start - PREFIX.size
        if nbytes > max_nbytes:
            raise _too_large(nbytes, max_nbytes)
    except BaseException:
        del stream[start:]
        raise
    PREFIX.pack_into(stream, start, nbytes)


def _too_large(nbytes: int, max_nbytes: int) -> CapacityError:
    return CapacityError(
        f"a message of {nbytes} bytes exceeds max_frame_nbytes ({max_nbytes}); "
        "send bulk data as tensors (numpy.frombuffer for bytes), which travel in slots",
        needed=nbytes,
        capacity=max_nbytes,
    )


class FrameDecoder:
    """Cuts a stream into frames, however it was split.

    Args:
        max_nbytes: the largest body to accept.
    """

    __slots__ = ("_buffer", "_max_nbytes", "_missing_nbytes")

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._buffer = bytearray()
        self._missing_nbytes = 0  # to the end of the frame (or of the prefix) that the buffer begins

    @property
    def buffered_nbytes(self) -> int:
        """Bytes kept of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Takes what one read brought and returns the bodies that are complete, in order.

        Raises:
            RemoteProtocolError: a length exceeds the limit. The stream can't be followed any further: close it.
        """
        if self._buffer:
            self._buffer += data
            if len(data) < self._missing_nbytes:
                self._missing_nbytes -= len(data)
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        frames: list[bytes] = []
        position, end = 0, len(data)
        missing = PREFIX.size
        while end - position >= PREFIX.size:
            (length,) = PREFIX.unpack_from(data, position)
            if length > self._max_nbytes:
                raise RemoteProtocolError(f"a frame of {length} bytes exceeds the limit of {self._max_nbytes}")
            body = position + PREFIX.size
            if end - body < length:
                missing += length
                break
            frames.append(data[body : body + length])
            position = body + length
        if position < end:
            self._buffer += data[position:]
            self._missing_nbytes = missing - len(self._buffer)
        return frames
