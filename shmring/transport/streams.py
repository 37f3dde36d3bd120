"""A stream socket in a loop, with TLS or without: bytes go from the socket straight into memory of its user, and from there.

:meth:`Stream.fill` is the seam between memory that others use again and a peer on another host: when it returns or raises,
nothing writes to that memory any more. With a socket, that is so because nobody but the call itself writes there. What moves
bytes in another way (a transfer engine) has to promise the same (decision 46).

The loop's own ``sock_recv_into`` takes no socket with TLS, and what all sockets that have become readable receive in one turn
of the loop has no bound. So a stream tries, waits until its descriptor is ready, and waits for its :class:`Turns` before it
tries again. How long a peer may take is counted by :class:`Pace` in ticks of this loop: a loop that was held up for a minute
has not waited for its peers, and who waits for a turn here is not slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any

from shmring.cancellation import retrieve
from shmring.line import WaitingLine

__all__ = ["Pace", "Stream", "Turns"]

_LARGE_NBYTES = 1 << 20  # from here on, the kernel is told to wake us less often: 10 to 20 % less CPU
_WAKE_NBYTES = 512 << 10  # it wakes us when so much is there
_AT_ONCE_NBYTES = 512 << 10  # by one call: a tenth of a millisecond
_LEAST_NBYTES = 32 << 10  # what a call counts at least, in a turn: it takes some microseconds whatever it receives
_UNHEARD_MS = 60_000  # a host that acknowledges nothing for so long has gone: the time of the keepalive below

_READABLE, _WRITABLE = 0, 1


class Turns:
    """How much all streams together receive in one turn of their loop.

    If that is not enough for all, the others stand in line. Each turn of the loop is then that of one of them. It may receive
    all that a turn allows, and stands at the end of the line for more.

    Args:
        nbytes: so much, and one call of a stream more.
    """

    def __init__(self, nbytes: int) -> None:
        self._most_nbytes = nbytes
        self._spent_nbytes = 0
        self._line: WaitingLine[None] = WaitingLine()
        self._first: object = None  # whose turn it is, while there is a line
        self._ends = False  # whether the end of this turn is asked for: if something was received, or somebody stands in line

    async def take(self, stream: object) -> None:
        """Waits until a stream may receive something."""
        if self._spent_nbytes >= self._most_nbytes or (self._line and self._first is not stream):
            await self._line.wait(lambda _: None)  # a turn that nobody uses is followed by the next one's
            self._first = stream

    def spend(self, nbytes: int) -> None:
        """So much was received."""
        self._spent_nbytes += max(nbytes, _LEAST_NBYTES)
        self._end_later()

    def _end_later(self) -> None:
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A turn begins, of who was given it in the last one. The next one is given here."""
        self._spent_nbytes = 0
        self._first = None
        self._ends = False
        if self._line:
            self._end_later()
            self._line.give_first(None)


class _Wait:
    """What :class:`Pace` knows of a block: ticks that are left for all of it, and until something has to move."""

    def __init__(self, bound: asyncio.Timeout, stream: Stream, ticks: int, patience: int) -> None:
        self._bound = bound
        self._stream = stream
        self._left = ticks
        self._patience = self._silence_left = patience
        self._moved = stream.moved

    def tick(self, now: float) -> None:
        if self._stream.waits_here:
            return
        if self._moved != self._stream.moved:
            self._moved, self._silence_left = self._stream.moved, self._patience
        self._left -= 1
        self._silence_left -= 1
        if not (self._left and self._silence_left) and not self._bound.expired():
            self._bound.reschedule(now)


class Pace:
    """Ends what a peer is too slow for.

    Args:
        patience: ticks in which nothing moves, at most.
        nbytes_per_tick: the lowest rate, beyond these ticks.
        tick_s: how long a tick is, while the loop runs. Of a loop that is held up for longer, one tick is counted. While a
            stream waits for its turn here, none is.
    """

    def __init__(self, patience: int = 10, nbytes_per_tick: int = 1 << 20, tick_s: float = 1.0) -> None:
        self._patience = patience
        self._nbytes_per_tick = nbytes_per_tick
        self._tick_s = tick_s
        self._waits: set[_Wait] = set()
        self._is_ticking = False

    @contextlib.asynccontextmanager
    async def within(self, stream: Stream, nbytes: int) -> AsyncIterator[None]:
        """Bounds a block in which so many bytes come or go over a stream.

        Raises:
            ConnectionAbortedError: on leaving the block: the peer was too slow.
        """
        bound = asyncio.timeout(None)
        ticks = self._patience + nbytes // self._nbytes_per_tick
        wait = _Wait(bound, stream, ticks, self._patience)
        self._waits.add(wait)
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        try:
            async with bound:
                yield
        except TimeoutError:
            if not bound.expired():
                raise
            raise ConnectionAbortedError(
                f"the peer was too slow: {nbytes} bytes took more than {ticks * self._tick_s:g} s, or nothing moved for "
                f"{self._patience * self._tick_s:g} s"
            ) from None
        finally:
            self._waits.remove(wait)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_ticking = bool(self._waits)
        if self._is_ticking:  # nothing ticks while nothing is waited for
            loop.call_later(self._tick_s, self._tick)
        for wait in self._waits:
            wait.tick(loop.time())


class Stream:
    """A connected socket. One task may receive and others send, one after the other. Lives in a loop.

    Args:
        connected: the socket, which is this stream's from now on; perhaps with TLS, whose handshake is still to come.
        turns: of all streams of this loop that receive much; None: it takes what comes.

    Attributes:
        closed: whether it was closed here.
        moved: how often something has come or gone.
        waits_here: whether it waits for its turn, or for a thread, and not for its peer.
    """

    def __init__(self, connected: socket.socket, turns: Turns | None = None) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # hosts vanish without a word
        for option, seconds in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connected.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)  # also while something is sent
        self._socket = connected
        self._fd = connected.fileno()
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._waiting: tuple[list[asyncio.Future[None]], list[asyncio.Future[None]]] = [], []
        self._wakes_at_nbytes = 1
        self.closed = False
        self.moved = 0
        self.waits_here = False

    async def handshake(self, thread: Executor | None = None) -> None:
        """Does the handshake of TLS, if this stream has that.

        Args:
            thread: where its arithmetic is done, which takes milliseconds; None: here. A peer that says nothing takes no time
                there. If the caller is cancelled, this ends when the thread has left the socket.

        Raises:
            OSError: it failed (``ssl.SSLError``).
        """
        if not isinstance(self._socket, ssl.SSLSocket):
            return
        if thread is None:
            await self._carry_out(self._socket.do_handshake, _READABLE)
            return
        while True:
            try:
                await self._in_thread(thread, self._socket.do_handshake)
                return
            except ssl.SSLWantReadError:
                await self._until(_READABLE)
            except ssl.SSLWantWriteError:
                await self._until(_WRITABLE)

    async def _in_thread(self, thread: Executor, call: Callable[[], object]) -> None:
        self.waits_here = True
        working = thread.submit(call)
        try:
            await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            while not working.done():  # it has begun: it would read from another one's descriptor, after a close
                left = asyncio.wrap_future(working)
                left.add_done_callback(retrieve)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([left])
            raise
        finally:
            self.waits_here = False

    async def fill(self, memory: memoryview, nbytes: int) -> None:
        """Receives so many bytes into memory. When this returns or raises, nothing writes there any more.

        Raises:
            EOFError: the peer has closed the connection.
            OSError: the connection is broken, or was closed here.
        """
        at = 0
        try:
            while at < nbytes:
                if nbytes >= _LARGE_NBYTES:
                    self._wake_at(min(nbytes - at, _WAKE_NBYTES))
                at += await self.receive(memory[at : min(nbytes, at + _AT_ONCE_NBYTES)])
        finally:
            self._wake_at(1)

    async def receive(self, memory: memoryview) -> int:
        """Receives some bytes; returns how many, one at least. Raises as :meth:`fill`."""
        nbytes: int = await self._carry_out(lambda: self._socket.recv_into(memory), _READABLE, self._turns)
        if not nbytes:
            raise EOFError("the peer has closed the connection")
        self.moved += 1
        if self._turns is not None:
            self._turns.spend(nbytes)
        return nbytes

    async def send(self, *parts: Any) -> None:
        """Sends all bytes of these buffers. If it can't, or is cancelled, the stream is closed: the peer could not tell where
        the next message begins.

        Raises:
            OSError: the connection is broken, or was closed here.
        """
        try:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    sent = await self._carry_out(lambda: self._socket.send(left[:_AT_ONCE_NBYTES]), _WRITABLE)  # noqa: B023  # at once
                    self.moved += 1
                    left = left[sent:]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection; who waits here gets ConnectionAbortedError. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for kind, waiting in enumerate(self._waiting):
            if waiting:
                self._stop_looking(kind)  # before the descriptor is closed, and may be another one's
            for future in waiting:
                if not future.done():
                    future.set_exception(_closed())
            waiting.clear()
        with contextlib.suppress(OSError):  # for the peer it ends now, also if a forked child has the descriptor
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._wakes_at_nbytes and not self.closed and not isinstance(self._socket, ssl.SSLSocket):
            self._wakes_at_nbytes = nbytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def _carry_out(self, call: Callable[[], Any], kind: int, turns: Turns | None = None) -> Any:
        """Calls something that does not block, when it would not."""
        while True:
            if turns is not None:
                self.waits_here = True
                try:
                    await turns.take(self)
                finally:
                    self.waits_here = False
            if self.closed:
                raise _closed()
            try:
                return call()
            except ssl.SSLWantReadError:
                await self._until(_READABLE)
            except ssl.SSLWantWriteError:
                await self._until(_WRITABLE)
            except BlockingIOError:
                await self._until(kind)

    async def _until(self, kind: int) -> None:
        """Waits until the descriptor is ready. Several may: TLS reads to write, and writes to read."""
        waiting, future = self._waiting[kind], self._loop.create_future()
        if not waiting:
            (self._loop.add_reader if kind == _READABLE else self._loop.add_writer)(self._fd, self._ready, kind)
        waiting.append(future)
        try:
            await future
        finally:
            if future in waiting:  # it was cancelled
                waiting.remove(future)
                if not waiting:
                    self._stop_looking(kind)

    def _ready(self, kind: int) -> None:
        self._stop_looking(kind)
        for future in self._waiting[kind]:
            if not future.done():
                future.set_result(None)
        self._waiting[kind].clear()

    def _stop_looking(self, kind: int) -> None:
        (self._loop.remove_reader if kind == _READABLE else self._loop.remove_writer)(self._fd)


def _closed() -> ConnectionAbortedError:
    return ConnectionAbortedError("the connection was closed here")
