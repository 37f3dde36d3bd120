"""Routes for who operates the server: pause, resume, profile, abort. Without an admin key (``--admin-key``) they do not exist.

Names and meanings are those of vLLM's routes for developers. Each reaches all engines, whichever frontend is asked. They do not
wait in line with requests, so that they work when the server is overloaded.

While the engines are paused, requests are accepted and wait; their deadlines go on, and ``/ready`` is 503. A request that was
running when ``/pause`` came fails with the code ``paused`` (503), unless ``mode=wait`` lets it end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.client import EngineClient
from shmring.frontend.callers.authentication import Authentication
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.http.responses import JsonResponse
from shmring.frontend.http.shared_answer import SharedAnswer
from shmring.frontend.operator.observation import ObservedRoute
from shmring.frontend.settings import FrontendSettings

__all__ = ["AbortRequest", "AbortResponse", "AdminStatus", "PauseState", "admin_routes"]

logger = logger_of("shmring.frontend.operator.admin")

_MAX_BODY_NBYTES = 64 << 10  # of names of requests: four times what AbortRequest allows
_MODES = ("abort", "wait")


class AdminStatus(msgspec.Struct):
    """The answer to what was done. `traces` are the files that `POST /stop_profile` has written, one of each engine."""

    status: Literal["paused", "resumed", "profiling", "profiled"]
    traces: list[str] = []


class PauseState(msgspec.Struct):
    """The answer to `GET /is_paused`: whether all engines are paused."""

    is_paused: bool


class AbortRequest(msgspec.Struct):
    """Names of requests (`X-Request-Id`), as `/status` and the log have them."""

    request_ids: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=128)]], msgspec.Meta(min_length=1, max_length=100)
    ]


class AbortResponse(msgspec.Struct):
    """How many requests were ended: those in the engines, and those whose media are being prepared."""

    aborted: int


_ABORT_PARSER = BodyParser(AbortRequest)


def admin_routes(engine: EngineClient, settings: FrontendSettings) -> list[ObservedRoute]:
    """Returns the routes: none, if there is no admin key."""
    if not settings.admin_keys:
        return []
    timeout_s = settings.request_timeout_s

    def pausing(*, wait: bool) -> SharedAnswer[None]:
        """A call to the engine takes one of this frontend's places for calls until it is answered, even if its caller has gone,
        and what runs may take long. So all who ask for a pause meanwhile share one."""

        async def carry_out() -> None:
            await engine.pause_generation(wait_for_inflight_requests=wait, timeout=timeout_s)

        return SharedAnswer(carry_out, max_age_s=0.0)

    pauses = {wait: pausing(wait=wait) for wait in (False, True)}

    async def pause(http_request: Request) -> Response:
        wait = _mode_of(http_request) == "wait"
        logger.warning("an operator pauses the engines; requests that run are %s", "waited for" if wait else "aborted")
        await pauses[wait].get()
        return JsonResponse(AdminStatus("paused"))

    async def resume(_: Request) -> Response:
        for shared in pauses.values():
            shared.forget()
        await engine.resume_generation()
        logger.warning("an operator has resumed the engines")
        return JsonResponse(AdminStatus("resumed"))

    async def is_paused(_: Request) -> Response:
        return JsonResponse(PauseState(await engine.is_paused()))

    async def start_profile(_: Request) -> Response:
        with _refusals_as_conflicts():
            await engine.start_profile(timeout_s)
        return JsonResponse(AdminStatus("profiling"))

    async def stop_profile(_: Request) -> Response:
        with _refusals_as_conflicts():
            paths = await engine.stop_profile(timeout_s)
        return JsonResponse(AdminStatus("profiled", paths.splitlines()))

    async def abort(http_request: Request) -> Response:
        request = _ABORT_PARSER.parse(await _body_of(http_request, settings.body_timeout_s))
        return JsonResponse(AbortResponse(await engine.abort_requests(request.request_ids)))

    keys = Middleware(Authentication, settings.admin_keys)
    return [
        ObservedRoute("/pause", pause, methods=["POST"], middleware=[keys]),
        ObservedRoute("/resume", resume, methods=["POST"], middleware=[keys]),
        ObservedRoute("/is_paused", is_paused, middleware=[keys]),
        ObservedRoute("/start_profile", start_profile, methods=["POST"], middleware=[keys]),
        ObservedRoute("/stop_profile", stop_profile, methods=["POST"], middleware=[keys]),
        ObservedRoute("/abort_requests", abort, methods=["POST"], middleware=[keys]),
    ]


def _mode_of(http_request: Request) -> str:
    """Returns what becomes of the requests that run.

    Raises:
        ApiError: the query says something that is not known here.
    """
    query = dict(http_request.query_params)
    waits = query.pop("wait_for_inflight_requests", "false").lower()  # vLLM's older name for mode=wait
    mode = query.pop("mode", "wait" if waits in ("true", "1") else "abort")
    if mode not in _MODES:
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, f"mode is one of {', '.join(_MODES)}", param="mode")
    if query:
        name = min(query)[:64]
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, f"/pause has no parameter {name!r}", param=name)
    return mode


@contextlib.contextmanager
def _refusals_as_conflicts() -> Iterator[None]:
    try:
        yield
    except shmring.RemoteError as error:
        if error.type_name != "RuntimeError":
            raise
        raise ApiError(ErrorCode.PROFILER, error.message) from None


async def _body_of(http_request: Request, timeout_s: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in http_request.stream():
                body += chunk
                if len(body) > _MAX_BODY_NBYTES:
                    raise ApiError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than {_MAX_BODY_NBYTES} bytes")
    except TimeoutError:
        raise ApiError(ErrorCode.BODY_TIMEOUT, f"the body did not arrive within {timeout_s:g} s") from None
    return bytes(body)
