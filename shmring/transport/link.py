"""A link: a connection between two sides. Messages go through two message rings; bells, and the end, go through a socket.

Theory of operation. A message is one record, published at once. Its reader is *awake* or *asleep*
(``core/polling.pyx``). Awake, it looks at its ring in each turn of its loop, and nobody makes a system call.
Asleep, it waits for a bell, a zero byte on the socket; the writer rings it if the reader sleeps. A caller that is about to wait
for a message may look first (:meth:`Link.poll`), which costs one load if there is none.

Writing never blocks. A message that finds the ring full goes to a backlog, in order, and the reader rings back when there is
room. A sender that may wait awaits :meth:`Link.drain` *before* it sends. So the backlog has at most one message of such
senders, and the messages that can't wait: releases, the ends of requests, leases, aborts. It is bounded: if a peer leaves more
unread, it counts as not reading.

The end. When the socket ends, the connection ends. Records that the peer had published by then are read first: a goodbye gives
memory back, and a refusal says why. Later records are not read: a forked child of the peer may write them. A side that closes
rings no more, shuts the socket down, and reads the bells that came: with unread bells, its peer would see a reset instead of an
end.

A side may fail in the middle of a record, or of a message that it must send: mostly because there is no memory left. It can't
know what it has done by then, so it ends the connection (:meth:`Link.failed`). The peer would otherwise wait for ever for what
is lost.

Or a side hands its socket on. Then the end of the socket means that a frontend that has said goodbye uses no memory any more.

Only bells may come over the socket, and the byte of a frontend that gives up while it attaches.

A forked child inherits the socket, but not the rings, and must not use the socket: its bytes would reach its parent's peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import Buffer

from shmring.core.compiled import (
    ENDED,
    FOREIGN,
    GAVE_UP,
    LinkReader,
    Poller,
    RecordHandler,
    RecordWriter,
    receive_bells,
)
from shmring.core.messages import MAX_LISTED, EngineMessage, FrontendMessage, WorkerMessage, encode_message
from shmring.errors import CapacityError, PeerLostError, RemoteProtocolError

__all__ = ["Link", "LinkOwner"]

_LINGER_S = 1.0  # for a peer to make room for its last messages; without a limit, a peer could keep the socket for ever
_ID_NBYTES = 9  # of an id in a message, at most
_LIST_NBYTES = 64  # of a message around a list of ids, at most


class LinkOwner(Protocol):
    """The calls from a link to its owner; always in the loop."""

    def handle_record(self, record: bytes, /) -> None:
        """A record came. Raising :class:`RemoteProtocolError` is reported as :meth:`protocol_violated`."""

    def peer_gave_up(self) -> None:
        """The peer gave up while it attached: it uses none of the memory that it was lent."""

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the rules; no more records are delivered. The owner closes."""

    def failed(self, error: BaseException) -> None:
        """This side has failed in the middle of a record or of a message: see :meth:`Link.failed`. The owner closes."""

    def connection_lost(self) -> None:
        """The connection has ended, from either end. This is called once, as the last call."""


class Link:
    """One side of a connection. Takes the socket over; :meth:`start` begins to read.

    Args:
        owner: whom to tell.
        connected: the socket, non-blocking.
        incoming, outgoing: the memory of the ring that this side reads, and of the one that it writes.
        poller: of this loop.
        busy_poll_s: for how long after a message no link of this loop falls asleep.
        max_backlog_nbytes: of messages that found the ring full, from which the peer counts as not reading.

    Attributes:
        largest_record_nbytes: the largest message that can be sent.
        lost: whether the connection has ended or was closed, so that no message can be sent.
    """

    def __init__(
        self,
        owner: LinkOwner,
        connected: socket.socket,
        incoming: Buffer,
        outgoing: Buffer,
        poller: Poller,
        *,
        max_backlog_nbytes: int,
        busy_poll_s: float = 0.0,
    ) -> None:
        self._owner = owner
        self._socket = connected
        self._fd = connected.fileno()
        self.reader = LinkReader(incoming, self._fd)
        self.writer = RecordWriter(outgoing, self._fd)
        self._bells = 0  # of both, once they have gone
        self._poller = poller
        self._busy_poll_s = busy_poll_s
        self._max_backlog_nbytes = max_backlog_nbytes
        self._loop = asyncio.get_running_loop()
        self._home = poller.home
        self._backlog: deque[bytes] = deque()
        self._backlog_nbytes = 0
        self.writer.told = busy_poll_s > 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._expected_nbytes = 0  # the room that senders wait for without a message in the backlog
        self._deaf = False  # no more records are delivered
        self._closing = False
        self._open = True  # the socket
        self._heir: Callable[[socket.socket], object] | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self.largest_record_nbytes = self.writer.largest_record_nbytes
        self._most_listed = min(MAX_LISTED, (self.largest_record_nbytes - _LIST_NBYTES) // _ID_NBYTES)
        self.lost = False

    def start(self) -> None:
        """Begins to read, from the loop's next turn on."""
        take = self._owner if isinstance(self._owner, RecordHandler) else self._owner.handle_record
        self.reader.attend(self._poller, self, take, self.writer, busy_poll_s=self._busy_poll_s)
        self._loop.add_reader(self._fd, self._hear)
        self.reader.rouse()

    # -- sending ---------------------------------------------------------------------------------------------------

    @property
    def bells(self) -> int:
        """How often this end has rung, as a writer or as a reader."""
        return self.writer.bells + self.reader.bells if self._open else self._bells

    @property
    def can_write(self) -> bool:
        """Whether :meth:`drain` would return at once."""
        return self._writable.is_set() and not self._home.forked

    def published(self) -> None:
        """A caller has written to the ring directly, and ``writer.told`` is set: this side stays awake for the answer."""
        self.reader.expect_answer()

    def break_off(self, error: RemoteProtocolError) -> None:
        """The peer's counts in a ring are impossible: reports it later, not in the middle of the owner's call."""
        self._loop.call_soon(self.violated, error)

    def fail_soon(self, error: BaseException) -> None:
        """This side has failed with what the peer was to be told: as :meth:`failed`, after the owner's call; that raises it."""
        self._loop.call_soon(self._fail, error)

    def failed(self, error: BaseException) -> None:
        """This side has failed in the middle of a record, or of a message to the peer.

        From then on it can't know what is lost, and the peer would wait for it for ever. So the connection ends, and with it
        all that the peer waits for. An exception that is no ``Exception`` is raised again.
        """
        self._fail(error)
        if not isinstance(error, Exception):
            raise error

    def _fail(self, error: BaseException) -> None:
        if self._deaf:
            return
        self._stop_delivering()
        try:
            self._owner.failed(error)
        except BaseException:
            self.abort()
            raise

    def expect_space(self) -> None:
        """A sender has found the ring full: :meth:`drain` waits until the peer has made room."""
        try:
            if not self._backlog and self.writer.wait_for_space(self.writer.largest_record_nbytes):
                self._expected_nbytes = self.writer.largest_record_nbytes
                self._block()
        except RemoteProtocolError as error:
            self.break_off(error)

    def lacks_room(self) -> bool:
        """Whether the peer has to read before the largest record finds room; then it rings back when it has."""
        try:
            if not self._backlog and self.writer.blocked:
                self._flush()
            elif not self._backlog:
                self.expect_space()
        except RemoteProtocolError as error:
            self.break_off(error)
        return not self.lost and self.writer.blocked

    def queue(self, record: bytes) -> None:
        """Sends a record that found the ring full, and can't wait."""
        if not self.lost and not self._home.forked:
            try:
                self._queue(record)
            except MemoryError as error:
                self.fail_soon(error)

    def send(self, message: FrontendMessage | WorkerMessage | EngineMessage | bytes) -> None:
        """Sends a message, encoded or not. If the connection has ended, it is dropped; if there is no memory for it, the
        connection ends.

        Raises:
            CapacityError: it is larger than a record may be. Nothing was sent.
        """
        if self.lost or self._home.forked:
            return
        writer = self.writer
        try:
            record = message if isinstance(message, bytes) else encode_message(message)
            if not self._backlog and writer.write(record):
                writer.ring_bell()
            else:
                self._queue(record)
        except RemoteProtocolError as error:
            self.break_off(error)
        except MemoryError as error:  # the peer waits for what it is not told
            self.fail_soon(error)
        if self._busy_poll_s:
            self.reader.expect_answer()

    def send_listed(self, make: Callable[[tuple[int, ...]], FrontendMessage | EngineMessage], numbers: Sequence[int]) -> None:
        """Sends a message with a list of ids, as several if the list is too long for one."""
        for start in range(0, len(numbers), self._most_listed):
            self.send(make(tuple(numbers[start : start + self._most_listed])))

    def split(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Cuts a list of ids into parts that fit one message each."""
        most = self._most_listed
        return [tuple(numbers[start : start + most]) for start in range(0, len(numbers), most)]

    async def drain(self) -> None:
        """Waits until the peer has read enough; messages that are sent before the next ``await`` are within the limits.

        Now and then it suspends even if there is room: see :meth:`RecordWriter.has_turn`.

        Raises:
            PeerLostError: it never will.
        """
        if self._open and not self.writer.has_turn():
            self.writer.begin_turn()
            await asyncio.sleep(0)
        while not self._writable.is_set():
            self._home.check_loop()
            await self._writable.wait()
        if self.lost:
            raise PeerLostError("the connection has ended")

    def _queue(self, record: bytes) -> None:
        """Keeps a record that finds the ring full."""
        if len(record) > self.largest_record_nbytes:
            raise CapacityError(
                f"a message of {len(record)} bytes is longer than a record of {self.largest_record_nbytes}",
                needed=len(record),
                capacity=self.largest_record_nbytes,
            )
        self._backlog.append(record)
        self._backlog_nbytes += len(record)
        self._block()
        if self._backlog_nbytes > self._max_backlog_nbytes:
            error = RemoteProtocolError(f"the peer left more than {self._max_backlog_nbytes} bytes unread beside a full ring")
            self._loop.call_soon(self.violated, error)
        elif len(self._backlog) == 1:
            self._flush()

    def _block(self) -> None:
        self._writable.clear()
        self.writer.blocked = True

    def _unblock(self) -> None:
        self._writable.set()
        if self._open:
            self.writer.blocked = False

    def _flush(self) -> None:
        """Publishes the backlog; records that still find no room wait for the reader to ring back."""
        backlog, writer = self._backlog, self.writer
        while backlog:
            if writer.write(backlog[0]):
                self._backlog_nbytes -= len(backlog.popleft())
            elif writer.wait_for_space(len(backlog[0])):
                break
        writer.ring_bell()
        if backlog or (self._expected_nbytes and writer.wait_for_space(self._expected_nbytes)):
            return
        self._expected_nbytes = 0
        self._unblock()

    # -- receiving -------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Delivers the records that have come, within this turn's budget. A caller that would wait for a message calls this
        first."""
        if self._open:
            self.reader.look()

    @property
    def awake(self) -> bool:
        """Whether this side looks into its ring in each turn of the loop."""
        return self._open and self.reader.awake

    def _hear(self) -> None:
        """Bytes came over the socket."""
        if self._home.forked:
            return
        heard = receive_bells(self._fd)
        if heard and not self._deaf:
            if heard & FOREIGN:
                self.violated(RemoteProtocolError("what came over the socket is no bell"))
            elif heard & GAVE_UP:
                self._stop_delivering()
                self._owner.peer_gave_up()
        if not self._open:
            return
        if heard & ENDED:
            self._loop.remove_reader(self._fd)
            self.lost = True
            if self._deaf:
                self._end()
                return
            self.reader.expect_the_end()
            self._unblock()
        elif not self._writable.is_set():
            self.flush()
            if self._closing and not self._backlog:
                self._end()
        if not self._deaf:
            self.reader.rouse()
            self.reader.look()

    def flush(self) -> None:
        """Publishes what has found no room before, if there is room now."""
        try:
            self._flush()
        except RemoteProtocolError as error:
            self.violated(error)

    def violated(self, error: RemoteProtocolError) -> None:
        if not self._deaf:
            self._stop_delivering()
            self._owner.protocol_violated(error)

    def _stop_delivering(self) -> None:
        self._deaf = True
        if self._open:
            self.reader.stop()

    # -- ending ----------------------------------------------------------------------------------------------------

    def read_last_words(self) -> None:
        """Delivers all that the peer had published, without a budget: its process is dead."""
        if self._open:
            self.reader.read_last_words()

    def ended(self) -> None:
        """The peer's last words were delivered."""
        self._end()

    def close(self, heir: Callable[[socket.socket], object] | None = None) -> None:
        """Delivers no more records, sends the backlog, and ends the connection.

        Args:
            heir: gets the socket, which then is not shut: its end has another meaning from then on. Not if the backlog could
                not be sent.
        """
        if self._closing:
            return
        self._closing = True
        self._heir = heir
        self._stop_delivering()
        if self._home.forked:
            return
        if self._backlog and not self.lost:
            with contextlib.suppress(RemoteProtocolError):
                self._flush()
        self.lost = True
        if self._backlog and self._open:
            self._lingering = self._loop.call_later(_LINGER_S, self._end)
        else:
            self._end()

    def abort(self) -> None:
        """Ends the connection at once, and drops the backlog."""
        self._closing = self.lost = True
        self._stop_delivering()
        if not self._home.forked:
            self._end()

    def _end(self) -> None:
        """Ends the link, once: its socket goes to the heir if all was sent, and else is closed; its rings are unmapped."""
        if not self._open:
            return
        self._bells = self.bells  # they are read after the rings have gone
        self._open = False
        self._deaf = self.lost = True
        if self._lingering is not None:
            self._lingering.cancel()
        self.writer.mute()
        self.reader.mute()
        self.reader.leave()
        self._loop.remove_reader(self._fd)
        if self._heir is not None and not self._backlog:
            self._heir(self._socket)
        else:
            with contextlib.suppress(OSError):  # the peer has closed it already
                self._socket.shutdown(socket.SHUT_RDWR)
            receive_bells(self._fd)  # closes descriptors on their way
            self._socket.close()
        del self.writer, self.reader  # or the rings would stay mapped as long as anybody knows this object
        self._backlog.clear()
        self._unblock()
        self._loop.call_soon(self._owner.connection_lost)
