"""Admission: how many requests a process takes, how many it reads and decodes at a time, how large they may be, how long
they may take, and what happens when a caller hangs up.

Two bounds, because they protect two things. Every request in flight takes a little memory, also one that is answered as a
stream for minutes: ``max_concurrent_requests``. While its body is read and its media are decoded it takes a lot:
``max_concurrent_media`` of them have a *turn* at a time, and give it back when all is in the slab and the engine is about to be
asked. A request waits for its turn *before* its body is read. What has not been read stays in its socket, where flow control
bounds it, so that two hundred callers with large pictures cost two hundred connections and not two hundred pictures. Only a
body that is announced to be small, and so has arrived with its header or nearly so, is read without a turn: a conversation
without media never waits for pictures. A place among those in flight is taken before a turn, never the other way round, so
that neither can be waited for in a circle.

The server (uvicorn) never cancels a handler: it only answers ``receive()`` with ``http.disconnect``. So somebody must listen:
while the body arrives that is the reading itself, afterwards a watcher beside the handler, which is cancelled when its caller
has gone. A caller that hangs up while it waits for its body's turn is noticed when its turn comes (listening earlier would mean
reading its body); it then costs no more than that.

After a refusal the rest of the body is read and dropped by the server, not cut off: closing a connection that still
receives would reset it, and the caller would see that instead of the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.errors import RETRY_AFTER_S, ApiError
from frontend.settings import FrontendSettings

__all__ = ["Admission", "AdmissionMiddleware", "Admitted", "admitted_of"]

_SMALL_NBYTES = 64 << 10  # what uvicorn reads ahead of a handler anyway

_IDLE_S = 10.0  # without a byte of a body: a caller that stalls keeps a turn from others


class _HungUp(Exception):
    """The caller has gone; nobody is there to be answered."""


class _Line:
    """Requests that wait for a turn, or to be taken at all: so many, and for so long."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._most = settings.max_queued_requests
        self._timeout_s = settings.queue_timeout_s
        self._waiting = 0

    async def acquire(self, turns: asyncio.Semaphore) -> None:
        """Waits for one of some turns.

        Raises:
            ApiError: too many wait already, or it did not come in time.
        """
        if turns.locked() and self._waiting >= self._most:
            raise _overloaded("too many requests are waiting")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await turns.acquire()
        except TimeoutError:
            raise _overloaded(f"the request's turn did not come within {self._timeout_s:g} s") from None
        finally:
            self._waiting -= 1


def _overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)


class Admitted:
    """What a request's handler has of its admission.

    Attributes:
        deadline: when its last byte must have been sent, as a time of the loop's clock.
    """

    def __init__(self, line: _Line, turns: asyncio.Semaphore) -> None:
        self.deadline = float("inf")
        self._line = line
        self._turns = turns
        self._has_turn = False

    async def take_turn(self) -> None:
        """Waits until the request may use a lot of memory. Has no effect if it already may.

        Raises:
            ApiError: its turn does not come.
        """
        if not self._has_turn:
            await self._line.acquire(self._turns)
            self._has_turn = True

    def release_turn(self) -> None:
        """Lets the next one: what takes memory was let go of, or is in the slab. Twice is once."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()


def admitted_of(scope: Scope) -> Admitted:
    """Returns what :class:`Admission` says of a request."""
    admitted: Admitted = scope["state"]["admitted"]
    return admitted


class AdmissionMiddleware:
    """Middleware of a route that takes bodies.

    Args:
        app: what answers.
        admission: is shared by all such routes.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admits a request, and has it answered."""
        await self._admission.handle(scope, receive, send, self._app)


class Admission:
    """The bounds of a process, which all routes that take bodies share.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._line = _Line(settings)
        self._places = asyncio.Semaphore(settings.max_concurrent_requests)
        self._turns = asyncio.Semaphore(settings.max_concurrent_media)

    async def handle(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Waits for the request's turn, reads its body, and answers it unless its caller hangs up.

        Raises:
            ApiError: 413 too large, 408 its body took too long, 503 its turn did not come.
        """
        announced = _announced_nbytes(scope)
        self._check_size(announced or 0)
        async with self._admitted() as admitted:
            scope.setdefault("state", {})["admitted"] = admitted
            if announced is None or announced > _SMALL_NBYTES:
                await admitted.take_turn()
            with contextlib.suppress(_HungUp):
                body = await self._read_body(receive)
                admitted.deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
                responding = _Responding(send)
                await _run_until_hang_up(app(scope, _replay(body), responding), receive, responding)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[Admitted]:
        await self._line.acquire(self._places)
        admitted = Admitted(self._line, self._turns)
        try:
            yield admitted
        finally:
            admitted.release_turn()
            self._places.release()

    def _check_size(self, nbytes: int) -> None:
        limit = self._settings.max_body_nbytes
        if nbytes > limit:
            raise ApiError(413, f"the request's body is larger than the {limit} bytes that are accepted", code="body_too_large")

    async def _read_body(self, receive: Receive) -> list[bytes]:
        """Reads a body.

        Returns:
            The body, as the one item of a list, so that whoever takes it can let go of it.

        Raises:
            _HungUp: the caller has gone.
        """
        body = bytearray()  # one growing block, where keeping its thousands of pieces would fragment the heap
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    async with asyncio.timeout(_IDLE_S):
                        message = await receive()
                    if message["type"] != "http.request":
                        raise _HungUp
                    self._check_size(len(body) + len(message["body"]))
                    body += message["body"]
                    if not message["more_body"]:
                        return [cast(bytes, body)]  # ASGI says bytes; whatever reads bytes reads it, and it is not copied
        except TimeoutError:
            limits = f"within {self._settings.body_timeout_s:g} s, or stood still for {_IDLE_S:g} s"
            message_text = f"the request's body did not arrive {limits}"
            raise ApiError(408, message_text, code="body_timeout") from None


def _announced_nbytes(scope: Scope) -> int | None:
    """What a request's header says of its body; None: nothing, so that it may be of any size."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


class _Responding:
    """Sends, and knows when nothing more is to come: then ``http.disconnect`` says only that."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.finished = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True
        await self._send(message)


def _replay(body: list[bytes]) -> Receive:
    """A ``receive`` that hands out what was read, and lets go of it."""

    async def receive() -> Any:
        if not body:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return receive


async def _run_until_hang_up(answering: Awaitable[None], receive: Receive, responding: _Responding) -> None:
    """Runs a handler, and cancels it when its caller hangs up before it has answered. Returns when it has ended.

    Raises:
        _HungUp: that happened.
    """
    handler = asyncio.ensure_future(answering)
    watcher = asyncio.ensure_future(_wait_for_hang_up(receive))
    try:
        await asyncio.wait((handler, watcher), return_when=asyncio.FIRST_COMPLETED)
        if responding.finished:
            await asyncio.wait((handler,))  # what it still does after answering
    finally:
        hung_up = handler.cancel()
        watcher.cancel()
        await asyncio.wait((handler, watcher))
    if hung_up:
        raise _HungUp
    handler.result()


async def _wait_for_hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
