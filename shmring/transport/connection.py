"""One connection: frames in, frames out, batched writes, flow control.

The protocol object owns the asyncio transport and nothing else; what the messages mean is for its owner.

When messages leave decides how fast both ends are. The first since the peer was heard of leaves at once, by a system call of
ours, if nothing is before it: whoever waits for it should not wait for all that this loop iteration has to do besides (uvloop
writes at its very end). Those that follow leave a few at a time, and the last of them at the iteration's end. Not each by
itself, since being woken costs the peer more than a message; and not all together, since the peer would sleep until the last
is made, and this end while the peer works through them: both would be half idle, and what runs after a sleep runs cold. The
first waits for the next few as well, when there were several the last time: the peer then has something to do.

``drain`` waits while the peer reads slower than we write: whoever sends what may be large awaits it *before*, so that many at
once can't add up. Messages that can't wait (releases, terminal replies) may go past that, up to a limit that says that the
peer does not read at all.

A peer may say its last words and be gone before they are read. Writing to it then fails, which asyncio takes for the end of the
connection, in both directions: what it had sent is read before the end is reported. A goodbye gives memory back.

A forked child inherits the socket and the loop's epoll descriptor. It must touch neither: what it wrote would reach its
parent's peer, and what it stopped watching its parent would miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from shmring.core.framing import FrameDecoder, append_frame
from shmring.core.messages import EngineMessage, FrontendMessage, encode_message_into
from shmring.errors import PeerLostError, RemoteProtocolError
from shmring.forks import Origin
from shmring.transport.polling import BusyPolling

__all__ = ["Connection", "ConnectionOwner"]

_FEW = 4  # messages that leave together: with 16 in flight as fast as 2, and with 8 frontends 1.5 times as fast
_LAST_WORDS_NBYTES = 1 << 20  # more than the kernel keeps for a socket, unless it was told to
_LINGER_S = 1.0  # for a peer to read its last messages; one that does not would keep the descriptor for ever

_Incoming = TypeVar("_Incoming", contravariant=True)


class ConnectionOwner(Protocol[_Incoming]):
    """What a connection reports to its owner; always in the loop."""

    def message_received(self, message: _Incoming) -> None:
        """A message came. Raising :class:`RemoteProtocolError` is reported as :meth:`protocol_violated`."""

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the rules; nothing more is delivered. The owner closes."""

    def connection_lost(self) -> None:
        """The connection has ended, from either end. This is called once, as the last call."""


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
        self._origin = Origin()
        self._outgoing = bytearray()
        self._fd = -1
        self._sent_at_once = False  # since the peer was heard of, or the loop came round
        self._queued = 0  # messages of this iteration that did not leave at once
        self._crowded = False  # there were several, the last time
        self._writable = asyncio.Event()
        self._writable.set()
        self._deaf = False  # nothing is delivered any more
        self._closing = False
        self.lost = False

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
        self.lost = True
        try:
            if isinstance(exc, OSError):  # else it was read to its end, or we ended it
                self._read_last_words()
        finally:
            self._deaf = True
            self._writable.set()
            self._owner.connection_lost()

    def _read_last_words(self) -> None:
        if self._origin.forked:
            return
        with contextlib.suppress(OSError):  # nothing is there, or the peer had left something unread
            self.data_received(os.read(self._fd, _LAST_WORDS_NBYTES))  # the transport closes it after this

    # -- our owner's side ------------------------------------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether :meth:`drain` would return at once."""
        return self._writable.is_set()

    def send(self, message: FrontendMessage | EngineMessage, *, at_once: bool = False) -> None:
        """Sends a message, at the end of this loop iteration at the latest. On a connection that has ended it goes nowhere.

        Args:
            message: what to send.
            at_once: not to wait for a few others, which take longer to make than the peer takes to wake.

        Raises:
            CapacityError: it is larger than a frame may be. Nothing was sent.
        """
        if self.lost or self._closing:
            return
        outgoing = self._outgoing
        leaves = at_once or not (self._sent_at_once or self._crowded or outgoing)
        append_frame(outgoing, message, encode_message_into, self._max_frame_nbytes)
        if self._polling is not None:
            self._polling.extend()
        if leaves:
            self._sent_at_once = True
            if self._write():
                return
        if not self._queued:
            self._loop.call_soon(self._flush)
        self._queued += 1
        if not self._queued % _FEW or len(outgoing) > self._write_buffer_nbytes:
            self._write()  # before the next sender asks whether it `can_write`

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
        self._outgoing.clear()
        self._deaf = self._closing = True
        if not self._origin.forked:
            self._abort_transport()

    def _end(self) -> None:
        assert self._transport is not None
        if self._origin.forked:
            return
        self._transport.close()
        if not self.lost:
            self._loop.call_later(_LINGER_S, self._abort_transport)

    def _abort_transport(self) -> None:
        if self._transport is not None and not self.lost:  # asyncio's reports its end once more
            self._transport.abort()

    def _write(self) -> bool:
        """Gives what is outgoing to the kernel, and what that does not take to the transport. Returns whether it took all."""
        transport, outgoing = self._transport, self._outgoing
        if transport is None:
            return False  # it is written when the connection is made
        self._outgoing = bytearray()
        if not outgoing or self.lost or self._origin.forked:
            return True
        written = 0
        if not transport.get_write_buffer_size() and not transport.is_closing():
            try:  # suppress() would take half as long as the write
                written = os.write(self._fd, outgoing)
            except OSError:
                written = 0  # it would block, or the peer has gone, which the transport finds out in its own way
        if written == len(outgoing):
            return True
        transport.write(memoryview(outgoing)[written:])
        return False

    def _flush(self) -> None:
        self._crowded = self._sent_at_once + self._queued > 1
        self._sent_at_once, self._queued = False, 0
        self._write()
        if self._transport is None or self._deaf:
            return
        if self._transport.get_write_buffer_size() > self._max_write_buffer_nbytes:
            self._deaf = True
            self._owner.protocol_violated(
                RemoteProtocolError(f"the peer left more than {self._max_write_buffer_nbytes} bytes unread")
            )
