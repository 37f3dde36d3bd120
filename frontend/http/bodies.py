"""Reading the bodies of requests: how large they may be, how slow, and how much memory all of them take together.

Only the bytes of a body that have *arrived* count, not the announced length: a caller that announces much and sends little
takes nothing from others. While memory is full, bodies wait in their sockets, in order, and flow control bounds them.
Half-read bodies could fill the memory, and then none of them would ever be complete. So one body at a time may overdraw it.
This body must come quickly, or it is refused.

The first kilobytes of a body are free, since the server reads them ahead anyway: so a conversation without media never waits
for pictures. The bound is thus the limit, one more body, and for each connection what the server had read when it began to wait
(64 KiB, and up to 256 KiB that came with them).

A body has a lowest rate and must not stand still. Time in which it waits for memory does not count, because that is not the
caller's fault.

A body that is refused in the middle is read to its end, and dropped. If the connection ended while the caller still sends, the
caller would see a reset instead of the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple, cast

from starlette.types import Message, Receive, Scope

from shmring.frontend.errors import ApiError, ErrorCode, unavailable
from shmring.frontend.http.body_scan import BodyScan, has_too_many_values, too_many_values
from shmring.frontend.http.cross_origin import check_origin
from shmring.frontend.http.watch import Watch
from shmring.frontend.settings import FrontendSettings
from shmring.line import WaitingLine

__all__ = ["Body", "BodyMemory", "BodyReader", "BodyShare", "HungUp"]

_FREE_NBYTES = 64 << 10  # of each body; what uvicorn reads ahead of a handler

_IDLE_S = 10.0  # without a byte
_GRACE_S = 10.0  # until the least rate counts: a connection is slow at first
_LEAST_BYTES_PER_S = 16 << 10  # 128 kbit/s, a slow mobile network

# Of the one body that overdraws: everybody else waits for it.
_OVERDRAWING_GRACE_S = 5.0
_OVERDRAWING_BYTES_PER_S = 256 << 10


class HungUp(Exception):
    """The caller has gone."""


class Body(NamedTuple):
    """A body that was read.

    Attributes:
        content: the JSON to decode, or a form to parse.
        long_texts: long texts that were cut out of it, by the short texts in their place
            (:mod:`shmring.frontend.http.body_scan`).
    """

    content: bytes
    long_texts: dict[str, bytearray]


class BodyShare:
    """The memory that one body takes. Code that drops the body must release its share."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.nbytes = 0

    @property
    def overdraws(self) -> bool:
        """Whether this is the body that may grow although there is no room."""
        return self._memory.overdrawing is self

    async def grow(self, nbytes: int) -> None:
        """Waits until there is room, and grows. If the call is cancelled, the share may have grown nevertheless."""
        await self._memory.take(self, nbytes)

    def release(self) -> None:
        """Gives everything back. A second call does nothing."""
        if self.nbytes:
            self._memory.release(self)


class BodyMemory:
    """The memory of all bodies together, those that are complete and wait for their turn included.

    Attributes:
        nbytes: how much they take now.
        overdrawing: the share of the body that may grow although there is no room; None while there is room.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.nbytes = 0
        self.overdrawing: BodyShare | None = None
        self._limit_nbytes = limit_nbytes
        self._line: WaitingLine[None] = WaitingLine()

    async def take(self, share: BodyShare, nbytes: int) -> None:
        """Adds to a share when there is room and no earlier body waits."""
        if (self._line.is_waited_in and not share.overdraws) or not self._try_take(share, nbytes):
            await self._line.stay(self._line.enter((share, nbytes)), unused=lambda _: None)  # the share has it

    def release(self, share: BodyShare) -> None:
        """Takes a share back, and lets waiting bodies go on."""
        self.nbytes -= share.nbytes
        share.nbytes = 0
        if self.overdrawing is share:
            self.overdrawing = None
        for place, (waiting_share, nbytes) in self._line.waiting():
            if not self._try_take(waiting_share, nbytes):
                return
            place.set_result(None)

    def _try_take(self, share: BodyShare, nbytes: int) -> bool:
        if self.nbytes >= self._limit_nbytes:
            if self.overdrawing not in (None, share):
                return False
            self.overdrawing = share
        self.nbytes += nbytes
        share.nbytes += nbytes
        return True


class BodyReader:
    """Reads bodies.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self.memory = BodyMemory(settings.max_bodies_nbytes)
        self._max_nbytes = settings.max_body_nbytes
        self._allowed_origins = settings.cors.allowed_origins
        self._timeout_s = settings.body_timeout_s
        self._wait_timeout_s = settings.queue_timeout_s

    def check_head(self, scope: Scope, *, is_form: bool = False) -> int:
        """Refuses a body if the request's head shows that it can't be accepted; returns how many bytes it announces, or 0.

        A body must say that it is ``application/json``, or a form where one is wanted. A browser lets any web page post a
        body of another type, or of none, to a server on the user's own machine. Before it posts ``application/json``, it asks
        that server, and this server does not agree, unless the page is of a site in ``--allowed-origins``. Forms it does post,
        and says of which page they are.

        Args:
            scope: of the request.
            is_form: whether the body is to be a form.

        Raises:
            ApiError: 403, it is a form of another site's page; 413, it is too large; 415, it is something else.
        """
        types, codings, nbytes = [], [], 0
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                nbytes = int(value)
                self._check_size(nbytes)
            elif name == b"content-type":
                types.append(value.partition(b";")[0].strip().lower())
            elif name == b"content-encoding":
                codings += [coding.strip().lower() for coding in value.split(b",")]
        if is_form:
            check_origin(scope, self._allowed_origins)
            if types != [b"multipart/form-data"]:
                message = "the request's body must be a form: send it with the Content-Type 'multipart/form-data; boundary=...'"
                raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, headers={"accept": "multipart/form-data"})
        elif types != [b"application/json"]:
            message = "the request's body must be JSON: send the header 'Content-Type: application/json'"
            raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, headers={"accept": "application/json"})
        if any(coding not in (b"", b"identity") for coding in codings):
            message = "the request's body must not be compressed: send it without Content-Encoding"
            raise ApiError(ErrorCode.UNSUPPORTED_CONTENT_ENCODING, message, headers={"accept-encoding": "identity"})
        return nbytes

    async def read(
        self, receive: Receive, share: BodyShare, announced_nbytes: int, watch: Watch, *, is_form: bool = False
    ) -> Body:
        """Reads a body.

        Args:
            receive: as ASGI has it.
            share: grows with the body. Its owner releases it, also after an error.
            announced_nbytes: what :meth:`check_head` returned.
            watch: says whether all of it is there.
            is_form: whether it is a form, in which no values of JSON are counted.

        Raises:
            ApiError: 413, it is too large, has too many values, or a text that is too long; 408, it is too slow; 503, no memory
                came free in time.
            HungUp: the caller has gone.
        """
        if 0 < announced_nbytes <= _FREE_NBYTES and watch.has_all:  # as nearly all are: no memory, no time, no long text
            chunk, _ = _piece_of(await receive())
            if not is_form and has_too_many_values(chunk):
                raise too_many_values()
            return Body(chunk, {})
        body = bytearray()  # one growing block, where keeping its thousands of pieces would fragment the heap
        pace = _Pace(self._timeout_s)
        scan = BodyScan(announced_nbytes)
        nbytes, more = 0, True
        try:
            while more:
                chunk, more = await _receive(receive, watch, pace, share)
                nbytes += len(chunk)
                self._check_size(nbytes)
                if (lacking_nbytes := nbytes - _FREE_NBYTES - share.nbytes) > 0:
                    await self._grow(share, lacking_nbytes, pace)
                if more:
                    pace.advance(len(chunk), share.overdraws)
                body += chunk if is_form else scan.add(chunk)
            body += scan.finish()
        except ApiError as error:
            if more and error.status == 413:
                body.clear()
                scan.long_texts.clear()
                share.release()
                await self._drop(receive, watch, pace, share)
            raise
        return Body(cast(bytes, body), scan.long_texts)  # ASGI asks for bytes; their readers can read it, without a copy

    async def _drop(self, receive: Receive, watch: Watch, pace: _Pace, share: BodyShare) -> None:
        """Reads the rest of a body, at most as much as a whole one may have."""
        left, more = self._max_nbytes, True
        while more and left > 0:
            chunk, more = await _receive(receive, watch, pace, share)
            pace.advance(len(chunk), share.overdraws)
            left -= len(chunk)

    async def _grow(self, share: BodyShare, nbytes: int, pace: _Pace) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                with pace.paused():
                    await share.grow(nbytes)
        except TimeoutError:
            message = f"no memory for the request's body came free within {self._wait_timeout_s:g} s"
            raise unavailable(message, ErrorCode.OVERLOADED) from None

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._max_nbytes:
            message = f"the request's body is larger than the {self._max_nbytes} bytes that are accepted"
            raise ApiError(ErrorCode.BODY_TOO_LARGE, message)


async def _receive(receive: Receive, watch: Watch, pace: _Pace, share: BodyShare) -> tuple[bytes, bool]:
    """Returns the next piece, and whether there is more."""
    try:
        if watch.has_all:  # then no timer is needed
            message = await receive()
        else:
            async with asyncio.timeout_at(pace.deadline(share.overdraws)):
                message = await receive()
    except TimeoutError:
        # Only closing the connection stops a slow caller from sending more.
        raise ApiError(ErrorCode.BODY_TIMEOUT, pace.complaint, headers={"connection": "close"}) from None
    return _piece_of(message)


def _piece_of(message: Message) -> tuple[bytes, bool]:
    if message["type"] != "http.request":
        raise HungUp
    return message.get("body", b""), message.get("more_body", False)


class _Pace:
    """How fast one body comes, and by when more of it must have come."""

    def __init__(self, timeout_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._timeout_s = timeout_s
        self._nbytes = 0
        self._started_at = self._last_at = self._now()
        self._overdrawing_since: float | None = None
        self._overdrawn_nbytes = 0

    @property
    def complaint(self) -> str:
        """What the caller of a body that came too slowly is told."""
        return (
            f"the request's body did not arrive within {self._timeout_s:g} s, stood still for {_IDLE_S:g} s, "
            f"or came with less than {_LEAST_BYTES_PER_S >> 10} KiB/s"
        )

    def deadline(self, overdraws: bool) -> float:
        """When the next piece must have come, as a time of the loop's clock."""
        deadline = min(
            self._started_at + self._timeout_s,
            self._started_at + _GRACE_S + self._nbytes / _LEAST_BYTES_PER_S,
            self._last_at + _IDLE_S,
        )
        if overdraws and self._overdrawing_since is not None:
            allowed_s = _OVERDRAWING_GRACE_S + self._overdrawn_nbytes / _OVERDRAWING_BYTES_PER_S
            deadline = min(deadline, self._overdrawing_since + allowed_s)
        return deadline

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time that the block takes."""
        before = self._now()
        yield
        self._started_at += self._now() - before

    def advance(self, nbytes: int, overdraws: bool) -> None:
        """Notes that a piece came."""
        self._nbytes += nbytes
        self._last_at = self._now()
        if overdraws:
            if self._overdrawing_since is None:
                self._overdrawing_since = self._last_at
            self._overdrawn_nbytes += nbytes
