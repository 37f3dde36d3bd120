"""A connection from another host that has shown the engine's token: its requests go in, and their replies out.

Theory of operation: one task reads frames, one after the other. The head of a request is priced and checked; then a slot is
taken that is just as large as its tensors; then the body is received into that slot, and the request submitted from there,
without a copy. For each request that was submitted, a task sends the replies as they come, each as a frame. If too much of them
is unread at the other side, it waits, and what has to be kept here meanwhile is bounded. A peer that breaks the rules, is slow
or vanishes loses this connection: its slots are left, and its requests are aborted.

While a request waits for a slot, nothing is read of its connection, and its end would not be heard. What only says something
waits for nobody. So the end of a client is that of its first connection, over which it sends no requests.

Invariants: a slot is submitted only after the last byte of its body, and left on every way out; nothing but the call that fills
it writes there. A number is its request's from its head on until its end is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

from shmring.client.client import Client
from shmring.client.flight import Flight
from shmring.client.submission import Submission
from shmring.core.compiled import decode_values
from shmring.core.loggers import logger_of
from shmring.core.messages import FailureKind, Welcome
from shmring.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    PeerLostError,
    RemoteError,
    RemoteProtocolError,
    ShmringError,
)
from shmring.memory.bundles import Bundle, bounds_of, bundle, check_bundle
from shmring.ring.injecting import Unread
from shmring.transport.far_wire import (
    HEADER,
    MAX_HEAD_NBYTES,
    WINDOW_NBYTES,
    Abort,
    Call,
    Called,
    Draining,
    End,
    Read,
    Reply,
    Request,
    decode_message,
    frame,
)
from shmring.transport.streams import Pace, Stream

__all__ = ["Peer", "Session"]

logger = logger_of("shmring.gateway")

_TEXT_CHARACTERS = 4096  # of an error
_SHARING, _FEW = 4, 64  # all far clients are one frontend: one has a fourth of its requests in flight at most, or 64
_SKIPPED_NBYTES = 256 << 10  # of a body that is not wanted, at once
_MOST_KEPT_NBYTES = 2 * WINDOW_NBYTES  # of replies to a request, beyond the window
_LEAST_KEPT_NBYTES = 1 << 10  # what a reply takes in this process, at least

#: How requests end without a reply of the engine's; the others end their connection.
_INVALID = (TypeError, ValueError, CapacityError, RemoteProtocolError, msgspec.MsgspecError)


class _Asked:
    """A request, until its end is sent. ``submission``: None while it is received."""

    def __init__(self) -> None:
        self.submission: Submission | None = None
        self.unread = Unread(WINDOW_NBYTES)  # of replies, at the other side
        self.kept: deque[Bundle] = deque()  # replies that were taken, and can't be sent yet
        self.kept_nbytes = 0
        self.ending: Exception | None = None  # what comes behind these

    def abort(self) -> None:
        if self.submission is not None:
            self.submission.abort()
        self.kept.clear()
        self.unread.close()


class Session:
    """A far client.

    Attributes:
        asked: its requests, by number; of all its connections.
        calls: of it that were not answered.
        connections: their tasks.
        first: the first connection, over which nothing waits for a slot.
    """

    def __init__(self) -> None:
        self.asked: dict[int, _Asked] = {}
        self.calls = 0
        self.connections: set[asyncio.Task[Any]] = set()
        self.first: Peer | None = None


class Peer:
    """See the head of this file.

    Args:
        client: of the ring.
        stream: of the connection.
        pace: of what comes and goes.
        filling: requests that are being received from all peers.
        session: that this connection is of.
        description: what the log calls it.
    """

    def __init__(self, client: Client, stream: Stream, pace: Pace, filling: Flight, session: Session, description: str) -> None:
        welcome = client.engines[client.names[0]]._welcome
        if welcome is None:
            raise ClosedError("the ring is closed")
        self._client = client
        self._stream = stream
        self._pace = pace
        self._filling = filling
        self._description = description
        self._welcome = welcome
        self._bounds = bounds_of(welcome)
        self._session = session
        self._own: set[int] = set()  # its requests that came over this connection
        self._answering: set[asyncio.Task[None]] = set()
        self._send_lock = asyncio.Lock()

    @staticmethod
    def welcome(welcome: Welcome) -> Welcome:
        """Returns how a far client is welcomed: with its part of the limits of the gateway's own client, and no memory. It has
        no number at the engine: all far clients have the gateway's."""
        return msgspec.structs.replace(
            welcome,
            client_id=0,
            base_lease=None,
            device_slab=None,
            kept_nbytes=0,
            max_inflight=_most_inflight(welcome),
            max_calls=_most_calls(welcome),
        )

    async def run(self) -> None:
        """Serves the connection until it ends.

        Raises:
            EOFError, OSError: it has ended, or is broken; or the peer is too slow.
            RemoteProtocolError: the peer broke the rules.
        """
        try:
            await self._read()
        finally:
            self._stream.close()
            for number in self._own:
                self._session.asked.pop(number).abort()
            self._own.clear()
            for task in self._answering:
                task.cancel()
            if self._answering:
                await asyncio.wait(self._answering)

    # -- what comes ----------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        header = bytearray(HEADER.size)
        while True:
            nbytes = await self._stream.receive(memoryview(header))  # it may be idle for as long as it likes
            async with self._pace.within(self._stream, 0):
                await self._stream.fill(memoryview(header)[nbytes:], len(header) - nbytes)
            head_nbytes, body_nbytes = HEADER.unpack(header)
            if head_nbytes > self._welcome.max_payload_nbytes + MAX_HEAD_NBYTES:
                raise RemoteProtocolError(f"a head of {head_nbytes} bytes is larger than any")
            if body_nbytes > self._welcome.leasable_nbytes:
                raise RemoteProtocolError(f"a body of {body_nbytes} bytes is more than this engine can lend")
            nbytes = head_nbytes + body_nbytes
            with contextlib.ExitStack() as slots:
                if not body_nbytes and head_nbytes <= MAX_HEAD_NBYTES + self._welcome.max_record_nbytes:
                    # what only says something waits for nobody
                    request = await self._frame(head_nbytes, body_nbytes, slots)
                else:
                    await self._filling.begin(nbytes)
                    try:
                        request = await self._frame(head_nbytes, body_nbytes, slots)
                    finally:
                        self._filling.end(nbytes)
                if request is not None:
                    await self._submit(*request)
                del request  # or this frame would keep its memory until more has come

    async def _frame(self, head_nbytes: int, body_nbytes: int, slots: contextlib.ExitStack) -> tuple[Request, Bundle] | None:
        """Receives a frame; returns a request that is to be submitted, before ``slots`` are left."""
        head = bytearray(head_nbytes)
        async with self._pace.within(self._stream, head_nbytes):
            await self._stream.fill(memoryview(head), head_nbytes)
        message = decode_message(head)
        del head
        if isinstance(message, Request):
            return await self._request(message, body_nbytes, slots)
        if body_nbytes:
            raise RemoteProtocolError(f"{type(message).__name__} has a body")
        self._came(message)
        return None

    def _came(self, message: Abort | Read | Call) -> None:
        if isinstance(message, Call):
            if self._session.calls >= _most_calls(self._welcome):
                raise RemoteProtocolError(f"more than {_most_calls(self._welcome)} calls at a time")
            self._session.calls += 1
            self._start(self._call(message))
        elif (asked := self._session.asked.get(message.number)) is None:
            return  # its end is on the way
        elif isinstance(message, Abort):
            asked.abort()  # if it is not submitted yet, the one that comes behind it does that
        else:
            asked.unread.count(-message.nbytes)

    async def _request(self, request: Request, nbytes: int, slots: contextlib.ExitStack) -> tuple[Request, Bundle] | None:
        """Receives a request's body. Returns None if this engine can lend no such slot; the body was read then, and dropped."""
        if request.number in self._session.asked:
            raise RemoteProtocolError(f"request {request.number} was sent before, and has not ended")
        most = _most_inflight(self._welcome) + len(self._session.connections)  # of each, one may be given up, unheard
        if len(self._session.asked) >= most:
            raise RemoteProtocolError(f"more than {most} requests in flight")
        self._session.asked[request.number] = _Asked()
        self._own.add(request.number)
        check_bundle(request.payload, nbytes, **self._bounds)
        if not nbytes:
            return request, Bundle(request.payload, ())
        try:
            slot = slots.enter_context(await self._client.slot(nbytes))
        except CapacityError as error:
            await self._skip(nbytes)
            await self._end(request.number, _failure(error))
            return None
        memory = slot.array((nbytes,), np.uint8)
        async with self._pace.within(self._stream, nbytes):
            await self._stream.fill(memory.data, nbytes)
        return request, Bundle(request.payload, (0,), memory)

    async def _submit(self, request: Request, received: Bundle) -> None:
        try:
            submission = await self._client.submit(received.open(), request_id=request.request_id)
        except (RemoteError, *_INVALID) as error:
            await self._end(request.number, _failure(error))
            return
        asked = self._session.asked[request.number]
        asked.submission = submission
        self._start(self._answer(request.number, asked, submission))

    async def _skip(self, nbytes: int) -> None:
        nowhere = memoryview(bytearray(min(nbytes, _SKIPPED_NBYTES)))
        async with self._pace.within(self._stream, nbytes):
            for at in range(0, nbytes, len(nowhere)):
                await self._stream.fill(nowhere, min(len(nowhere), nbytes - at))

    # -- what goes -----------------------------------------------------------------------------------------------------------

    def say_draining(self) -> None:
        """Tells the client that the engine drains."""
        self._start(self._send(frame(Draining())))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._stream.close()  # the reading task ends, and with it this connection
        if not isinstance(error, OSError | EOFError | ClosedError | PeerLostError):
            logger.error("answering a client on another host (%s) has failed", self._description, exc_info=error)

    async def _answer(self, number: int, asked: _Asked, submission: Submission) -> None:
        """Sends what comes of a request."""
        failed: tuple[FailureKind, str, str] | None = None
        try:
            while True:
                try:
                    reply = await self._reply(asked, submission)
                except StopAsyncIteration:
                    break
                except (RemoteError, TimeoutError, AbortedError, *_INVALID) as error:
                    failed = _failure(error)
                    break
                nbytes, parts = reply.laid_out()
                head = frame(Reply(number, reply.payload), nbytes)
                asked.unread.count(len(reply.payload) + nbytes)
                del reply
                async with self._keeping(asked, submission):
                    await self._send(head, *parts, nbytes=nbytes)
                    del parts  # or this frame would keep the reply's memory until the next one has come
                    await asked.unread.drain()
        finally:
            submission.abort()
        await self._end(number, failed)

    async def _reply(self, asked: _Asked, submission: Submission) -> Bundle:
        if asked.kept:
            reply = asked.kept.popleft()
            asked.kept_nbytes -= _counted(reply)
            return reply
        if asked.ending is not None:
            raise asked.ending
        return bundle(await submission.next(), **self._bounds)

    @contextlib.asynccontextmanager
    async def _keeping(self, asked: _Asked, submission: Submission) -> AsyncIterator[None]:
        """While this block waits for the peer, replies are taken and kept.

        With a reply in a slot the engine waits until the one before it was taken: so at most one is kept, and it is the last.
        Replies in records come in any case, and would fill this process.
        """
        keeping: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal keeping
            keeping = loop.create_task(self._keep(asked, submission))

        loop = asyncio.get_running_loop()
        beginning = loop.call_soon(begin)
        try:
            yield
        finally:
            beginning.cancel()  # most blocks do not wait
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait([keeping])

    async def _keep(self, asked: _Asked, submission: Submission) -> None:
        while asked.ending is None and not (asked.kept and self._is_in_slot(asked.kept[-1])):
            try:
                reply = bundle(await submission.next(), **self._bounds)
            except Exception as error:  # noqa: BLE001  # _reply() raises it
                asked.ending = error
                return
            asked.kept.append(reply)
            asked.kept_nbytes += _counted(reply)
            if asked.kept_nbytes > _MOST_KEPT_NBYTES:
                asked.abort()
                asked.ending = CapacityError(
                    f"more than {_MOST_KEPT_NBYTES} bytes of replies wait for a client that reads none",
                    needed=asked.kept_nbytes,
                    capacity=_MOST_KEPT_NBYTES,
                )

    def _is_in_slot(self, reply: Bundle) -> bool:
        return reply.nbytes > self._welcome.inline_nbytes or len(reply.payload) > self._welcome.max_record_nbytes

    async def _end(self, number: int, failed: tuple[FailureKind, str, str] | None) -> None:
        """A request is over. Its client may have sent the next one when it hears of that."""
        if number in self._own:  # else this connection has ended
            self._own.remove(number)
            del self._session.asked[number]
        await self._send(frame(End(number, self._load(), failed)))

    async def _call(self, call: Call) -> None:
        result, failed = b"", None
        try:
            arguments = decode_values(call.arguments, self._welcome.max_values)
            if not isinstance(arguments, list):
                raise RemoteProtocolError("the arguments of a call are a list")
            result = msgspec.msgpack.encode(await self._client.call(call.method, *arguments))
        except (ClosedError, PeerLostError):
            raise
        except (ShmringError, *_INVALID) as error:
            failed = _failure(error)[1:]
        finally:
            self._session.calls -= 1
        await self._send(frame(Called(call.number, result, failed)))

    async def _send(self, head: bytes, *parts: Any, nbytes: int = 0) -> None:
        async with self._send_lock, self._pace.within(self._stream, len(head) + nbytes):
            await self._stream.send(head, *parts)

    def _load(self) -> tuple[int, int, bool]:
        load = next(iter(self._client.loads().values()), None)
        draining = self._client.engines[self._client.names[0]]._draining
        return (0, 0, draining) if load is None else (load.in_flight, load.waiting, draining)


def _most_inflight(welcome: Welcome) -> int:
    return min(welcome.max_inflight, max(_FEW, welcome.max_inflight // _SHARING))


def _counted(reply: Bundle) -> int:
    return max(len(reply.payload) + reply.nbytes, _LEAST_KEPT_NBYTES)


def _most_calls(welcome: Welcome) -> int:
    return -(-welcome.max_calls // _SHARING)


def _failure(error: Exception) -> tuple[FailureKind, str, str]:
    """Returns an error as it travels: how the request ended, the error's type, and its text."""
    text = str(error)[:_TEXT_CHARACTERS].encode(errors="backslashreplace").decode()
    if isinstance(error, RemoteError):
        return "error", error.type_name[:256], error.message[:_TEXT_CHARACTERS]
    if isinstance(error, AbortedError):
        return "aborted", "", text
    if isinstance(error, TimeoutError):
        return "timed_out", "", text
    return "invalid", type(error).__name__[:256], text
