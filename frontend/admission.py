"""Admission: how many requests a process takes, how many with large media at a time, and what happens when a caller hangs up.

A request passes these steps in order. A request that waits for one step holds nothing of a later step, so there is no deadlock:

1. Its body is read (:mod:`shmring.frontend.bodies`). A slow body keeps nobody waiting.
2. It takes a *place* among the requests in flight, and keeps it to its end: ``max_concurrent_requests``. A stream may end
   minutes later.
3. If its media files are large, it takes a *turn* once they have arrived: ``max_concurrent_media``. When all media are in the
   slab and the request is about to be sent to the engine, it gives back the turn and the body's memory.
4. If it has media, it takes memory to decode them into (:mod:`shmring.frontend.decoded_memory`), and then a slot to copy them
   to.

The server (uvicorn) never cancels a handler: it only answers ``receive()`` with ``http.disconnect``. So another task must
listen. While the body arrives, its reader listens. Afterwards a watcher beside the handler's task listens, and cancels that
when the caller is gone. If a caller hangs up while its request waits for memory or a place, this is noticed once the request
gets them. Nothing else is lost.

After a refusal the rest of the body is read and dropped by the server, not cut off: closing a connection that still
receives would reset it, and the caller would see that instead of the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shmring.frontend.bodies import BodyReader, BodyShare, HungUp
from shmring.frontend.callers import caller, caller_of
from shmring.frontend.errors import unavailable
from shmring.frontend.settings import FrontendSettings

__all__ = ["Admission", "AdmissionMiddleware", "Admitted", "admitted_of"]


class _Line:
    """Requests that wait for a place or a turn: bounded in number and in time."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._max_waiting = settings.max_queued_requests
        self._timeout_s = settings.queue_timeout_s
        self._waiting = 0

    def check_length(self, semaphore: asyncio.Semaphore) -> None:
        """Refuses a request if it would have to wait and too many wait already.

        Raises:
            ApiError: 503.
        """
        if semaphore.locked() and self._waiting >= self._max_waiting:
            raise unavailable("too many requests are waiting", "overloaded")

    async def acquire(self, semaphore: asyncio.Semaphore) -> None:
        """Waits for a place or a turn.

        Raises:
            ApiError: too many wait already, or it did not come in time.
        """
        if not semaphore.locked():
            await semaphore.acquire()  # at once
            return
        self.check_length(semaphore)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await semaphore.acquire()
        except TimeoutError:
            raise unavailable(f"the request's turn did not come within {self._timeout_s:g} s", "overloaded") from None
        finally:
            self._waiting -= 1


class Admitted:
    """The admission of one request, as its handler sees it.

    Attributes:
        arrived_at: when all of its body was there, as a time of ``time.monotonic()``.
        deadline: when its last byte must have been sent, as a time of the loop's clock.
        body_share: what its body takes of the memory for bodies.
        long_texts: of its body, by the short texts in their place. Code that uses one removes it.
        has_turn: whether its media may be decoded although their files are large.
    """

    def __init__(self, line: _Line, turns: asyncio.Semaphore, body_share: BodyShare) -> None:
        self.arrived_at = time.monotonic()
        self.deadline = float("inf")
        self.body_share = body_share
        self.long_texts: dict[str, bytearray] = {}
        self.has_turn = False
        self._line = line
        self._turns = turns

    async def take_turn(self) -> None:
        """Waits until large media may be decoded. Does nothing if the request has its turn already.

        Raises:
            ApiError: its turn does not come.
        """
        if not self.has_turn:
            await self._line.acquire(self._turns)
            self.has_turn = True

    def release_turn(self) -> None:
        """Passes the turn on: the request holds no more media, or they are in the slab. A second call does nothing."""
        self.body_share.release()
        if self.has_turn:
            self.has_turn = False
            self._turns.release()


def admitted_of(scope: Scope) -> Admitted:
    """Returns the :class:`Admitted` of a request."""
    admitted: Admitted = scope["state"]["admitted"]
    return admitted


class AdmissionMiddleware:
    """Middleware of a route that takes bodies.

    Args:
        app: answers requests.
        admission: is shared by all such routes.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admits a request, and lets the application answer it."""
        await self._admission.handle(scope, receive, send, self._app)


class Admission:
    """The bounds of a process, which all routes that take bodies share.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self._request_timeout_s = settings.request_timeout_s
        self._bodies = BodyReader(settings)
        self._line = _Line(settings)
        self._places = asyncio.Semaphore(settings.max_concurrent_requests)
        self._turns = asyncio.Semaphore(settings.max_concurrent_media)

    def new_request(self) -> Admitted:
        """Returns a request that has taken nothing yet."""
        return Admitted(self._line, self._turns, BodyShare(self._bodies.memory))

    async def handle(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Reads a request's body, waits for its place, and answers it unless its caller hangs up.

        Raises:
            ApiError: 413 or 415, its body is refused; 408, that took too long; 503, its place did not come.
        """
        nbytes = self._bodies.check_head(scope)
        self._line.check_length(self._places)  # before anything is read
        admitted = self.new_request()
        scope.setdefault("state", {})["admitted"] = admitted
        caller.set(caller_of(scope))
        try:
            with contextlib.suppress(HungUp):
                read, admitted.long_texts = await self._bodies.read(receive, admitted.body_share, nbytes)
                body = [read]  # so the code that removes it can let go of it
                del read
                admitted.arrived_at = time.monotonic()
                await self._line.acquire(self._places)
                try:
                    admitted.deadline = asyncio.get_running_loop().time() + self._request_timeout_s
                    responding = _Responding(send)
                    await _run_until_hang_up(app(scope, _replay(body), responding), receive, responding)
                finally:
                    self._places.release()
        finally:
            admitted.release_turn()


class _Responding:
    """Sends, and knows when the answer is complete, or its handler has ended: then ``http.disconnect`` means only that."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.finished = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True
        await self._send(message)


def _replay(body: list[bytes]) -> Receive:
    """A ``receive`` that hands out the body that was read, and keeps no reference to it."""

    async def receive() -> Any:
        if not body:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return receive


async def _run_until_hang_up(answering: Awaitable[None], receive: Receive, responding: _Responding) -> None:
    """Runs a handler, and cancels it when its caller hangs up before it has answered. Returns when it has ended.

    Raises:
        HungUp: that happened.
    """
    watcher = asyncio.ensure_future(_wait_for_hang_up(receive))
    until_hang_up = asyncio.timeout(None)

    def hung_up(_: object) -> None:
        if not responding.finished:
            until_hang_up.reschedule(0.0)

    watcher.add_done_callback(hung_up)
    try:
        async with until_hang_up:
            await answering
    except Exception:  # no cancellation, which is the server's
        if until_hang_up.expired():
            raise HungUp from None
        raise
    finally:
        responding.finished = True
        watcher.cancel()


async def _wait_for_hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
