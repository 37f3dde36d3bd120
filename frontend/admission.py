"""Admission: how many requests a process reads at a time, how large they may be, and what happens when a caller hangs up.

A request waits for its turn *before* its body is read. What has not been read stays in its socket, where flow control bounds
it, so that two hundred callers with large pictures cost two hundred connections and not two hundred pictures.

The server (uvicorn) never cancels a handler: it only answers ``receive()`` with ``http.disconnect``. So somebody must listen:
while the body arrives that is the reading itself, afterwards a watcher beside the handler, which is cancelled when its
caller has gone. A caller that hangs up while it waits for its turn is noticed when its turn comes (listening earlier would
mean reading its body); it then costs no more than that.

After a refusal the rest of the body is read and dropped by the server, not cut off: closing a connection that still
receives would reset it, and the caller would see that instead of the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from frontend.errors import RETRY_AFTER_S, ApiError
from frontend.settings import FrontendSettings

__all__ = ["Admission"]


class _HungUp(Exception):
    """The caller has gone; nobody is there to be answered."""


class Admission(ASGIMiddleware):
    """Middleware of routes that take bodies.

    Args:
        settings: the limits.
    """

    scopes = (ScopeType.HTTP,)

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._turns = asyncio.Semaphore(settings.max_concurrent_requests)
        self._queued = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Waits for the request's turn, reads its body, and answers it unless its caller hangs up.

        Raises:
            ApiError: 413 too large, 408 its body took too long, 503 its turn did not come.
        """
        self._check_announced(scope)
        async with self._turn():
            with contextlib.suppress(_HungUp):
                body = await self._read_body(receive)
                responding = _Responding(send)
                await _run_until_hang_up(next_app(scope, _replay(body), responding), receive, responding)

    def _check_announced(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._check_size(int(value))

    def _check_size(self, nbytes: int) -> None:
        limit = self._settings.max_body_nbytes
        if nbytes > limit:
            raise ApiError(413, f"the request's body is larger than the {limit} bytes that are accepted", code="body_too_large")

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        settings = self._settings
        if self._queued >= settings.max_queued_requests:
            raise ApiError(503, "too many requests are waiting", code="overloaded", retry_after_s=RETRY_AFTER_S)
        self._queued += 1
        try:
            async with asyncio.timeout(settings.queue_timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            message = f"the request's turn did not come within {settings.queue_timeout_s:g} s"
            raise ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._turns.release()

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
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _HungUp
                    self._check_size(len(body) + len(message["body"]))
                    body += message["body"]
                    if not message["more_body"]:
                        return [cast(bytes, body)]  # ASGI says bytes; whatever reads bytes reads it, and it is not copied
        except TimeoutError:
            message_text = f"the request's body did not arrive within {self._settings.body_timeout_s:g} s"
            raise ApiError(408, message_text, code="body_timeout") from None


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
