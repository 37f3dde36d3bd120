"""The outermost middleware: it names, counts and times every request, even one without a route."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shmring.core.loggers import logger_of
from shmring.core.printable import printable
from shmring.frontend.errors import ErrorCode, unavailable
from shmring.frontend.http.cross_origin import HeadersFor
from shmring.frontend.http.responses import ErrorForm, error_response, random_digits
from shmring.frontend.http.sse import CONTENT_TYPE, event_of_error
from shmring.frontend.operator.metrics import HttpStatistics
from shmring.service.logs import ACCESS, concerned
from shmring.service.tracing import Attributes, begin_request, end_request

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Observation", "ObservedRoute", "answer_has_begun", "note_failure", "request_id_of"]

#: Returns the answer to a request.
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_ACCESS = logger_of(ACCESS)
_MAX_PATH_CHARACTERS = 200  # of what a line repeats
_HUNG_UP = 499  # the caller is gone; nginx logs the same number
_UNMATCHED = "unmatched"  # one label for all paths without a route, or callers could make any number of them
_SHUTTING_DOWN = unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN)
_STREAMED = (b"content-type", CONTENT_TYPE.encode("ascii"))
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Observation:
    """Counts and times every request, and names it.

    Args:
        app: what answers.
        http: where it is counted.
        headers_for: returns the CORS headers of an answer that is made here.
        access_log: whether each request is a line of the log.
        cancels_for_callers: whether a request is cancelled when its caller has gone. Otherwise only a server that shuts down
            cancels requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        http: HttpStatistics,
        headers_for: HeadersFor,
        *,
        access_log: bool = False,
        cancels_for_callers: bool = False,
    ) -> None:
        self._app = app
        self._http = http
        self._headers_for = headers_for
        self._access_log = access_log
        self._cancels_for_callers = cancels_for_callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (or runs the application's lifespan)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _requested_id(scope) or random_digits()
        scope.setdefault("state", {})["request_id"] = request_id
        concerned.set(request_id)
        # Others are monitoring, and quick.
        span = begin_request(scope["headers"], request_id) if scope.get("method") == "POST" else None
        status = _HUNG_UP
        streaming = complete = False

        def observed_send(message: Message) -> Awaitable[None]:
            nonlocal status, streaming, complete
            if message["type"] == "http.response.start":
                status = scope["state"]["status"] = message["status"]
                streaming = _STREAMED in message["headers"]
                message["headers"] = [*message["headers"], *_headers_of(scope), (b"x-request-id", request_id.encode("ascii"))]
            else:
                complete = not message.get("more_body", False)
            return send(message)

        started = time.perf_counter()
        self._http.in_flight += 1
        try:
            await self._app(scope, receive, observed_send)
        except asyncio.CancelledError:
            if self._cancels_for_callers:
                raise
            # Only the server cancels a request, when it shuts down and the time for running requests is over.
            if status == _HUNG_UP:
                note_failure(scope, _SHUTTING_DOWN.code)
                answer = error_response(_SHUTTING_DOWN, scope)
                answer.raw_headers += self._headers_for(scope["headers"])
                await answer(scope, receive, observed_send)
            elif streaming:
                self._http.broken_streams[_SHUTTING_DOWN.code,] += 1
                note_failure(scope, _SHUTTING_DOWN.code)
                last = event_of_error(_SHUTTING_DOWN, scope)
                await observed_send({"type": "http.response.body", "body": last, "more_body": False})
            else:
                complete = True  # an error of the caller
                raise
        except Exception:
            status, complete = 500, True  # a bug, or a response that broke off; the server logs it and says 500
            raise
        finally:
            self._http.in_flight -= 1
            self._http.aborted += not complete
            self._count(scope, status, time.perf_counter() - started, complete=complete)
            if span is not None:
                _end_span(span, scope, status, complete=complete)

    def _count(self, scope: Scope, status: int, seconds: float, *, complete: bool) -> None:
        state = scope["state"]
        route = str(state.get("route", _UNMATCHED))
        self._http.requests[route, str(status)] += 1
        self._http.seconds[route,].add(seconds)
        if "failure" in state:
            self._http.failures[route, state["failure"]] += 1
        if (usage := state.get("usage")) is not None:
            self._http.key_requests[usage.owner.name, str(status)] += 1
        if self._access_log:
            _log_access(scope, status if complete else _HUNG_UP, seconds)


def _end_span(span: Span, scope: Scope, status: int, *, complete: bool) -> None:
    state = scope["state"]
    if "route" not in state or status == 401:
        return  # whoever has no key sends no spans: one that does not end is not exported
    route = str(state["route"])
    error = state.get("failure") or ("aborted" if not complete else str(status) if status >= 500 else "")
    key = {"shmring.key": usage.owner.name} if (usage := state.get("usage")) is not None else {}
    attributes: Attributes = {"http.route": route, "http.response.status_code": status, **key}
    end_request(span, f"POST {route}", attributes, error, is_failed=status >= 500 or status < 400 or status == _HUNG_UP)


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    address = f"{client[0]}:{client[1]}" if client else "-"
    path = scope["path"]
    path = printable(f"{path[:_MAX_PATH_CHARACTERS]}..." if len(path) > _MAX_PATH_CHARACTERS else path)  # it may have newlines
    who = scope["state"].get("caller", "-")  # whose key it has
    parts = {"client": address, "caller": who, "method": scope["method"], "path": path, "status": status}
    parts["seconds"] = round(seconds, 4)
    extra = {"request_id": scope["state"]["request_id"], "parts": parts}
    _ACCESS.info("%s %s %s %s %d %.4f s", *parts.values(), extra=extra)


class _Endpoint:
    """A handler as an ASGI application. (Starlette's would answer errors here, which is done once for all routes.)"""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class ObservedRoute(Route):
    """A route whose path is the label of its requests. (Not every version of Starlette says which route was taken.)

    Args:
        path: as Starlette has it.
        handler: returns the answer to a request.
        methods: that it takes.
        middleware: of it.
        error_form: of errors that its callers get; None: OpenAI's.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        methods: Sequence[str] = ("GET",),
        middleware: Sequence[Middleware] = (),
        error_form: ErrorForm | None = None,
    ) -> None:
        super().__init__(path, _Endpoint(handler), methods=methods, middleware=middleware)
        self._error_form = error_form

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        self.note(scope)
        await super().handle(scope, receive, send)

    def note(self, scope: Scope) -> None:
        """Notes that it answers a request."""
        state = scope.setdefault("state", {})
        state["route"], state["error_form"] = self.path_format, self._error_form


def answer_has_begun(scope: Scope) -> bool:
    """Whether the head of a request's answer was sent."""
    return "status" in scope["state"]


def note_failure(scope: Scope, code: str) -> None:
    """Notes the code of the error that the caller of a request gets; it is counted when the request ends."""
    scope["state"]["failure"] = code


def request_id_of(scope: Scope) -> str:
    """Returns the id that :class:`Observation` gave a request."""
    return str(scope["state"]["request_id"])


def _headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Headers of an answer, whatever it is: how far its key is from its limits."""
    headers: dict[str, str] | None = scope["state"].get("headers")
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()] if headers else []


def _requested_id(scope: Scope) -> str | None:
    """The caller's own id, if it is one that can be logged and sent back as it is."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _REQUEST_ID.fullmatch(text) else None
    return None
