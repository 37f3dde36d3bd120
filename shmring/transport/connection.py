"""One connection: frames in, frames out, batched writes, flow control.

The protocol object owns the asyncio transport and nothing else; what the messages mean is for its owner. The first message
since the peer was heard of leaves at once, by a system call of ours, if nothing is before it: whoever waits for it should not
wait for all that this loop iteration has to do besides (uvloop writes at its very end). Those that follow leave together at
the iteration's end, in one write (large ones in several). So does the first, when the last time there were several: the peer
then has enough to do, and being woken twice for what it could have read at once costs both ends. ``drain`` waits while the
peer reads slower than we write: whoever sends what may be large awaits it *before*, so that many at once can't add up.
Messages that can't wait (releases, terminal replies) may go past that, up to a limit that says that the peer does not read at
all.

A forked child inherits the socket and the loop's epoll descriptor. It must touch neither: what it wrote would reach its
parent's peer, and what it stopped watching its parent would miss.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from shmring.core.framing import FrameDecoder, encode_frame
from shmring.core.messages import EngineMessage, FrontendMessage, encode_message
from shmring.errors import PeerLostError, RemoteProtocolError
from shmring.transport.polling import BusyPolling

__all__ = ["Connection", "ConnectionOwner"]

_LINGER_S = 1.0  # for a peer to read its last messages; one that does not would keep the descriptor for ever

_Incoming = TypeVar("_Incoming", contravariant=True)


class ConnectionOwner(Protocol[_Incoming]):
    """What a connection reports to its owner; always in the loop."""

    def message_received(self, message: _Incoming) -> None:
        """A message came. Raising :class:`RemoteProtocolError` is reported as :meth:`protocol_violated`."""

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the rules; nothing more is delivered. The owner closes."""

    def connection_lost(self) -> None:
        """The connection has ended, whoever ended it. Called once, last."""


class Connection(asyncio.Protocol, Generic[_Incoming]):
    """Frames over a connected stream socket.

    Args:
        owner: whom to tell.
        decode: turns a frame into a message, or raises :class:`RemoteProtocolError`.
        max_frame_nbytes: the largest frame, either way.
        write_buffer_nbytes: unread bytes from which :meth:`drain` waits.
        max_write_buffer_nbytes: unread bytes from which the peer counts as not reading.
        polling: is told of each message, either way; None: the loop sleeps whenever there is nothing to do.
    """

    def __init__(
        self,
        owner: ConnectionOwner[_Incoming],
        decode: Callable[[bytes], _Incoming],
        *,
        max_frame_nbytes: int,
        write_buffer_nbytes: int,
        max_write_buffer_nbytes: int,
        polling: BusyPolling | None = None,
    ) -> None:
        self._owner = owner
        self._decode = decode
        self._max_frame_nbytes = max_frame_nbytes
        self._write_buffer_nbytes = write_buffer_nbytes
        # `drain` lets one message of any size go past its limit; that alone must not look like a peer that does not read.
        self._max_write_buffer_nbytes = max(max_write_buffer_nbytes, write_buffer_nbytes + max_frame_nbytes)
        self._polling = polling
        self._frames = FrameDecoder(max_frame_nbytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pid = os.getpid()
        self._outgoing: list[bytes] = []
        self._outgoing_nbytes = 0
        self._fd = -1
        self._sent_at_once = False  # since the peer was heard of, or the loop came round
        self._queued = 0  # messages that leave at the end of this iteration
        self._crowded = False  # there were several, the last time
        self._writable = asyncio.Event()
        self._writable.set()
        self._deaf = False  # nothing is delivered any more
        self._closing = False
        self.lost = False
        self.frames_sent = 0
        self.frames_received = 0

    # -- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the interface, not the class
        self._transport.set_write_buffer_limits(high=self._write_buffer_nbytes)
        self._fd = transport.get_extra_info("socket").fileno()
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._sent_at_once = False
        if self._polling is not None:
            self._polling.extend()
        try:
            for frame in self._frames.feed(data):
                self.frames_received += 1
                self._owner.message_received(self._decode(frame))
                if self._deaf:
                    return
        except RemoteProtocolError as error:
            self._deaf = True
            self._owner.protocol_violated(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = self.lost = True
        self._writable.set()
        self._owner.connection_lost()

    # -- our owner's side ------------------------------------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether :meth:`drain` would return at once."""
        return self._writable.is_set()

    def send(self, message: FrontendMessage | EngineMessage) -> None:
        """Sends a message, at the end of this loop iteration at the latest. On a connection that has ended it goes nowhere.

        Raises:
            CapacityError: it is larger than a frame may be. Nothing was sent.
        """
        frame = encode_frame(encode_message(message), self._max_frame_nbytes)
        if self.lost or self._closing:
            return
        self.frames_sent += 1
        if self._polling is not None:
            self._polling.extend()
        if not self._sent_at_once and not self._crowded and not self._outgoing and self._transport is not None:
            self._sent_at_once = True
            frame = self._write_at_once(frame)
            if not frame:
                return
        if not self._queued:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame)
        self._queued += 1
        self._outgoing_nbytes += len(frame)
        if self._outgoing_nbytes > self._write_buffer_nbytes:
            self._write()  # now, so that `can_write` counts it before the next sender asks

    async def drain(self) -> None:
        """Waits until the peer has read enough; what is sent before the next ``await`` is within the limits.

        Raises:
            PeerLostError: it never will.
        """
        while not self._writable.is_set():
            await self._writable.wait()
        if self.lost:
            raise PeerLostError("the connection has ended")

    def close(self) -> None:
        """Delivers nothing more, sends what was queued, and ends the connection."""
        if self._closing:
            return
        self._flush()
        self._deaf = self._closing = True
        if self._transport is not None:
            self._end()

    def abort(self) -> None:
        """Ends the connection at once, and drops what was queued.

        One that is still being made has to be aborted once more when it is made: uvloop can't end it before.
        """
        self._take_outgoing()
        self._deaf = self._closing = True
        if self._transport is not None and os.getpid() == self._pid:
            self._transport.abort()

    def _end(self) -> None:
        assert self._transport is not None
        if os.getpid() != self._pid:
            return
        self._transport.close()
        if not self.lost:
            self._loop.call_later(_LINGER_S, self._transport.abort)

    def _take_outgoing(self) -> list[bytes]:
        frames, self._outgoing, self._outgoing_nbytes = self._outgoing, [], 0
        return frames

    def _write(self) -> None:
        if self._transport is None:
            return  # it is written when the connection is made
        frames = self._take_outgoing()
        if frames and not self.lost and os.getpid() == self._pid:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _write_at_once(self, frame: bytes) -> bytes:
        """Returns what of a frame could not be written past the transport, which has nothing to write itself."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size() or self._transport.is_closing() or os.getpid() != self._pid:
            return frame
        try:
            return frame[os.write(self._fd, frame) :]
        except OSError:
            return frame  # would block, or the peer has gone, which the transport finds out in its own way

    def _flush(self) -> None:
        self._sent_at_once = False
        self._crowded, self._queued = self._queued > 1, 0
        self._write()
        if self._transport is None or self._deaf:
            return
        if self._transport.get_write_buffer_size() > self._max_write_buffer_nbytes:
            self._deaf = True
            self._owner.protocol_violated(
                RemoteProtocolError(f"the peer left more than {self._max_write_buffer_nbytes} bytes unread")
            )
