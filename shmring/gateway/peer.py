"""A connection from another host that has shown the engine's token: its requests go in, and their replies out.

Theory of operation: one task reads frames, one after the other. The head of a request is priced and checked; then a slot is
taken that is just as large as its tensors; then the body is received into that slot, and the request submitted from there,
without a copy. For each request that was submitted, a task sends the replies as they come, each as a frame. If too much of them
is unread at the other side, it waits. A peer that breaks the rules, is slow or vanishes loses this connection: its slots are
left, and its requests are aborted.

Invariants: a slot is submitted only after the last byte of its body, and left on every way out; nothing but the call that fills
it writes there.
"""

from __future__ import annotations

import asyncio
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
from shmring.memory.bundles import Bundle, bundle, check_bundle
from shmring.ring.injecting import Unread
from shmring.transport.far_wire import (
    HEADER,
    MAX_HEAD_NBYTES,
    WINDOW_NBYTES,
    Abort,
    Call,
    Called,
    End,
    Read,
    Reply,
    Request,
    decode_message,
    frame,
)
from shmring.transport.streams import Pace, Stream

__all__ = ["Asked", "Peer"]

logger = logger_of("shmring.gateway")

_TEXT_CHARACTERS = 4096  # of an error
_SHARING, _FEW = 4, 64  # all far clients are one frontend: one has a fourth of its requests in flight at most, or 64
_SKIPPED_NBYTES = 256 << 10  # of a body that is not wanted, at once

#: How requests end without a reply of the engine's; the others end their connection.
_INVALID = (TypeError, ValueError, CapacityError, RemoteProtocolError, msgspec.MsgspecError)


class Asked:
    """A request that was submitted, until its end is sent."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.unread = Unread(WINDOW_NBYTES)


class Peer:
    """See the head of this file.

    Args:
        client: of the ring.
        stream: of the connection.
        pace: of what comes and goes.
        filling: requests that are being received from all peers.
        asked: requests of its session, by number; of all its connections.
        description: what the log calls it.
    """

    def __init__(
        self, client: Client, stream: Stream, pace: Pace, filling: Flight, asked: dict[int, Asked], description: str
    ) -> None:
        welcome = client.engines[client.names[0]]._welcome
        if welcome is None:
            raise ClosedError("the ring is closed")
        self._client = client
        self._stream = stream
        self._pace = pace
        self._filling = filling
        self._description = description
        self._welcome = welcome
        self._bounds = {
            "max_tensors": welcome.max_tensors,
            "max_payload_nbytes": welcome.max_payload_nbytes,
            "max_values": welcome.max_values,
        }
        self._asked = asked
        self._own: set[int] = set()  # of these, those that came over this connection
        self._calls = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._send_lock = asyncio.Lock()

    @staticmethod
    def welcome(welcome: Welcome) -> Welcome:
        """Returns how a far client is welcomed: with the limits of the gateway's own client, and no memory."""
        return msgspec.structs.replace(
            welcome, base_lease=None, device_slab=None, kept_nbytes=0, max_inflight=_most_inflight(welcome)
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
                self._asked.pop(number).submission.abort()
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
            async with self._pace.within(0):
                await self._stream.fill(memoryview(header)[nbytes:], len(header) - nbytes)
            head_nbytes, body_nbytes = HEADER.unpack(header)
            if head_nbytes > self._welcome.max_payload_nbytes + MAX_HEAD_NBYTES:
                raise RemoteProtocolError(f"a head of {head_nbytes} bytes is larger than any")
            if body_nbytes > self._welcome.leasable_nbytes:
                raise RemoteProtocolError(f"a body of {body_nbytes} bytes is more than this engine can lend")
            nbytes = head_nbytes + body_nbytes
            if nbytes <= MAX_HEAD_NBYTES:  # what only says something waits for nobody
                await self._frame(head_nbytes, body_nbytes)
                continue
            await self._filling.begin(nbytes)
            try:
                await self._frame(head_nbytes, body_nbytes)
            finally:
                self._filling.end(nbytes)

    async def _frame(self, head_nbytes: int, body_nbytes: int) -> None:
        head = bytearray(head_nbytes)
        async with self._pace.within(head_nbytes):
            await self._stream.fill(memoryview(head), head_nbytes)
        message = decode_message(head)
        del head
        if isinstance(message, Request):
            await self._request(message, body_nbytes)
        elif body_nbytes:
            raise RemoteProtocolError(f"{type(message).__name__} has a body")
        else:
            self._came(message)

    def _came(self, message: Abort | Read | Call) -> None:
        if isinstance(message, Call):
            if self._calls >= self._welcome.max_calls:
                raise RemoteProtocolError(f"more than {self._welcome.max_calls} calls at a time")
            self._calls += 1
            self._start(self._call(message))
        elif (asked := self._asked.get(message.number)) is None:
            return  # its end is on the way
        elif isinstance(message, Abort):
            asked.submission.abort()
            asked.unread.close()
        else:
            asked.unread.count(-message.nbytes)

    async def _request(self, request: Request, nbytes: int) -> None:
        """Receives a request's body, and submits it."""
        if request.number in self._asked:
            raise RemoteProtocolError(f"request {request.number} was sent before, and has not ended")
        if len(self._asked) >= _most_inflight(self._welcome):
            raise RemoteProtocolError(f"more than {_most_inflight(self._welcome)} requests in flight")
        check_bundle(request.payload, nbytes, **self._bounds)
        try:
            submission = await (
                self._received(request, nbytes) if nbytes else self._submitted(request, Bundle(request.payload, ()))
            )
        except (RemoteError, *_INVALID) as error:
            await self._send(frame(End(request.number, self._load(), _failure(error))))
            return
        asked = self._asked[request.number] = Asked(submission)
        self._own.add(request.number)
        self._start(self._answer(request.number, asked))

    async def _received(self, request: Request, nbytes: int) -> Submission:
        """Submits a request that has a body.

        Raises:
            CapacityError: this engine can lend no such slot. The body was read, and dropped.
        """
        try:
            slot = await self._client.slot(nbytes)
        except CapacityError:
            await self._skip(nbytes)
            raise
        with slot:
            memory = slot.array((nbytes,), np.uint8)
            async with self._pace.within(nbytes):
                await self._stream.fill(memory.data, nbytes)
            return await self._submitted(request, Bundle(request.payload, (0,), memory))

    async def _submitted(self, request: Request, received: Bundle) -> Submission:
        return await self._client.submit(received.open(), request_id=request.request_id)

    async def _skip(self, nbytes: int) -> None:
        nowhere = memoryview(bytearray(min(nbytes, _SKIPPED_NBYTES)))
        async with self._pace.within(nbytes):
            for at in range(0, nbytes, len(nowhere)):
                await self._stream.fill(nowhere, min(len(nowhere), nbytes - at))

    # -- what goes -----------------------------------------------------------------------------------------------------------

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

    async def _answer(self, number: int, asked: Asked) -> None:
        """Sends what comes of a request."""
        failed: tuple[FailureKind, str, str] | None = None
        try:
            while True:
                await asked.unread.drain()
                try:
                    reply = bundle(await asked.submission.next(), **self._bounds)
                except StopAsyncIteration:
                    break
                except (RemoteError, TimeoutError, AbortedError, *_INVALID) as error:
                    failed = _failure(error)
                    break
                nbytes, parts = reply.laid_out()
                head = frame(Reply(number, reply.payload), nbytes)
                asked.unread.count(len(reply.payload) + nbytes)
                del reply
                await self._send(head, *parts, nbytes=nbytes)
                del parts  # or this frame would keep the reply's memory until the next one has come
        finally:
            asked.submission.abort()
        if number in self._own:  # else this connection has ended
            self._own.discard(number)
            del self._asked[number]
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
            self._calls -= 1
        await self._send(frame(Called(call.number, result, failed)))

    async def _send(self, head: bytes, *parts: Any, nbytes: int = 0) -> None:
        async with self._send_lock, self._pace.within(len(head) + nbytes):
            await self._stream.send(head, *parts)

    def _load(self) -> tuple[int, int, bool]:
        load = next(iter(self._client.loads().values()), None)
        draining = self._client.engines[self._client.names[0]]._draining
        return (0, 0, draining) if load is None else (load.in_flight, load.waiting, draining)


def _most_inflight(welcome: Welcome) -> int:
    return min(welcome.max_inflight, max(_FEW, welcome.max_inflight // _SHARING))


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
