"""Admission: how many requests a process takes, how many with large media at a time, and what happens when a caller hangs up.

A request passes these steps in order. A request that waits for one step holds nothing of a later step, so there is no deadlock:

1. Its body is read (:mod:`shmring.frontend.http.bodies`). A slow body keeps nobody waiting.
2. It takes a *place* among the requests in flight, and keeps it to its end: ``max_concurrent_requests``. A stream may end
   minutes later. Callers share the places (:mod:`shmring.frontend.callers.places`).
3. If its media files are large, it takes a *turn* once they have arrived: ``max_concurrent_media``, shared likewise. When all
   media are in the slab and the request is about to be sent to the engine, it gives back the turn and the body's memory.
4. If it has media, it takes memory to decode them into (:mod:`shmring.frontend.media.decoded_memory`), and then a slot to
   copy them to.

The server (uvicorn) never cancels a handler: it only answers ``receive()`` with ``http.disconnect``, for which a second task
would have to wait. Our protocol calls a function instead (:mod:`shmring.frontend.http.watch`), which cancels what the request
waits for: more of its body, memory, a place, or its handler. So does an operator (:meth:`Admission.abort`),
until the request is about to be sent to the engine, which ends it from then on.

After a refusal the rest of the body is read and dropped by the server, not cut off: closing a connection that still
receives would reset it, and the caller would see that instead of the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from shmring.frontend.callers.caller import caller, caller_of
from shmring.frontend.callers.places import Places
from shmring.frontend.errors import aborted
from shmring.frontend.http.bodies import BodyReader, BodyShare, HungUp
from shmring.frontend.http.watch import Watch, watch_of
from shmring.frontend.settings import FrontendSettings

__all__ = ["Admission", "Admitted", "admitted_of"]


class Admitted:
    """The admission of one request, as its handler sees it.

    Attributes:
        name: of the request, as operators name it.
        caller: whose it is.
        arrived_at: when all of its body was there, as a time of ``time.monotonic()``.
        deadline: when its last byte must have been sent, as a time of the loop's clock.
        body_share: what its body takes of the memory for bodies.
        long_texts: of its body, by the short texts in their place. Code that uses one removes it.
        has_turn: whether its media may be decoded although their files are large.
        is_prepared: whether all of it is ready for the engine. Then the engine ends it for operators.
        task: that handles it; None: none does.
    """

    def __init__(self, name: str, who: str, turns: Places, body_share: BodyShare) -> None:
        self.name = name
        self.caller = who
        self.is_prepared = False
        self.task: asyncio.Task[Any] | None = None
        self._ended_by: Callable[[], Exception] | None = None
        self.arrived_at = time.monotonic()
        self.deadline = float("inf")
        self.body_share = body_share
        self.long_texts: dict[str, bytearray] = {}
        self.has_turn = False
        self._turns = turns

    def seconds_left(self) -> float:
        """Returns how long it may still take."""
        return self.deadline - asyncio.get_running_loop().time()

    async def take_turn(self) -> None:
        """Waits until large media may be decoded. Does nothing if the request has its turn already.

        Raises:
            ApiError: its turn does not come.
        """
        if not self.has_turn:
            await self._turns.take(self.caller)
            self.has_turn = True

    def release_turn(self) -> None:
        """Passes the turn on: the request is ready for the engine, or over. A second call does nothing."""
        self.is_prepared = True
        self.body_share.release()
        if self.has_turn:
            self.has_turn = False
            self._turns.give_back(self.caller)

    def hang_up(self) -> None:
        """Its caller has gone."""
        self.end(HungUp)

    def end(self, error: Callable[[], Exception]) -> bool:
        """Ends it, whatever it waits for. Returns whether nothing else has ended it before.

        Args:
            error: makes the error that it ends with.
        """
        if self._ended_by is not None or self.task is None:
            return False
        self._ended_by = error
        self.task.cancel()
        return True

    def why_ended(self, error: BaseException) -> Exception | None:
        """Returns why it was ended; None: it was not, and this error is its handler's, or the server has cancelled it."""
        if self._ended_by is None or self.task is None:
            return None
        if isinstance(error, asyncio.CancelledError) and self.task.uncancel():
            return None
        return self._ended_by()


def admitted_of(scope: Scope) -> Admitted:
    """Returns the :class:`Admitted` of a request."""
    admitted: Admitted = scope["state"]["admitted"]
    return admitted


class Admission:
    """The bounds of a process, which all routes that take bodies share.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self._request_timeout_s = settings.request_timeout_s
        self._bodies = BodyReader(settings)
        waiting = settings.max_queued_requests, settings.queue_timeout_s
        self._places = Places(settings.max_concurrent_requests, *waiting)
        self._turns = Places(settings.max_concurrent_media, *waiting)
        self._requests: set[Admitted] = set()

    def new_request(self, name: str = "", who: str = "") -> Admitted:
        """Returns a request of a caller that has taken nothing yet."""
        return Admitted(name, who, self._turns, BodyShare(self._bodies.memory))

    def preparing(self) -> Counter[str]:
        """Returns how many requests are not ready for the engine, by caller."""
        return Counter(request.caller for request in self._requests if not request.is_prepared)

    def has_others(self, who: str) -> bool:
        """Whether there are requests of other callers."""
        return any(request.caller != who for request in self._requests)

    def abort(self, names: Collection[str]) -> int:
        """Ends the requests of these names that are not ready for the engine, for an operator; returns how many there were."""
        named = [request for request in self._requests if request.name in names and not request.is_prepared]
        return sum(request.end(aborted) for request in named)

    def before(self, app: ASGIApp, *, is_form: bool = False) -> ASGIApp:
        """Returns middleware of a route that takes bodies, or forms: it admits a request, and lets a handler answer it."""
        return partial(self.handle, app=app, is_form=is_form)

    async def handle(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp, *, is_form: bool = False) -> None:
        """Reads a request's body, waits for its place, and answers it unless its caller hangs up.

        Raises:
            ApiError: 403, 413 or 415, its body is refused; 408, that took too long; 503, its place did not come; 500, an
                operator has ended it.
        """
        nbytes = self._bodies.check_head(scope, is_form=is_form)
        state = scope.setdefault("state", {})
        who = caller_of(scope)
        self._places.check(who)  # before anything is read
        admitted = state["admitted"] = self.new_request(state.get("request_id", ""), who)
        admitted.task = asyncio.current_task()
        caller.set(who)
        self._requests.add(admitted)
        watch = watch_of(scope)
        try:
            watch.on_hang_up = admitted.hang_up
            await self._answer(scope, receive, send, app, admitted, nbytes, watch, is_form=is_form)
            return
        except HungUp:  # the reader of the body was told
            return
        except (Exception, asyncio.CancelledError) as error:
            why = admitted.why_ended(error)
            if why is None:
                raise
        finally:
            watch.on_hang_up = None
            self._requests.discard(admitted)
            admitted.release_turn()
            admitted.long_texts = {}  # the connection knows this request until the next one comes
        if not isinstance(why, HungUp):
            raise why  # without the error, whose frames may keep views of slots

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        app: ASGIApp,
        admitted: Admitted,
        announced_nbytes: int,
        watch: Watch,
        *,
        is_form: bool,
    ) -> None:
        share = admitted.body_share
        read, admitted.long_texts = await self._bodies.read(receive, share, announced_nbytes, watch, is_form=is_form)
        body = [read]  # so the code that removes it can let go of it
        del read
        admitted.arrived_at = time.monotonic()
        await self._places.take(admitted.caller)
        try:
            admitted.deadline = asyncio.get_running_loop().time() + self._request_timeout_s
            await app(scope, _replay(body), send)
        finally:
            self._places.give_back(admitted.caller)


def _replay(body: list[bytes]) -> Receive:
    """A ``receive`` that hands out the body that was read, and keeps no reference to it."""

    async def receive() -> Any:
        if not body:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return receive
