"""The HTTP application of one frontend process: routes, and how failures become statuses.

=====================================================  ======  =====================================
failure                                                status  code
=====================================================  ======  =====================================
not JSON; not such a request; bad media                400     invalid_json, invalid_value, invalid_image, ...
``ValueError`` or ``ValidationError`` of the executor  400     rejected_by_engine
no such model; no such route                           404     model_not_found, not_found
no such method                                         405     method_not_allowed
the body did not arrive in time                        408     body_timeout
body too large; pictures that never fit the slab       413     body_too_large, slab_too_small
any other failure of the executor; a bug               500     engine_error, internal_error
no turn in time; no space in the slab in time          503     overloaded, slab_full (``Retry-After``)
engine gone; request aborted at the engine; closing    503     engine_unavailable (``Retry-After``)
the server shuts down, and its grace is over           503     shutting_down (``Retry-After``)
the engine took too long                               504     engine_timeout
=====================================================  ======  =====================================

503 says that the same request may succeed a moment later, 413 that it never will, 504 that trying again would most likely
take as long again. All have OpenAI's error envelope. A caller that hangs up gets nothing, and its request is aborted.

Answers to ``POST /v1/embeddings`` say what they took: ``X-Shmring-Slab-Bytes``, the bytes of tensors that crossed through
the slab, and ``X-Shmring-Copies``, how many tensors this process copied for sending while the request was with the
engine (other requests' included, so it is exact for a request that was alone, and an upper bound otherwise).

Litestar was chosen because it speaks msgspec; it cancels cleanly, streams, and runs its middleware inside its error handling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp
from prometheus_client import CONTENT_TYPE_LATEST

import shmring
from engine.client import EngineClient
from frontend.admission import Admission
from frontend.embeddings import EmbeddingService
from frontend.errors import RETRY_AFTER_S, ApiError, ErrorEnvelope
from frontend.metrics import FrontendMetrics, Observation, request_id_of
from frontend.openai import EmbeddingResponse, Model, ModelList, parse_embedding_request
from frontend.settings import FrontendSettings

__all__ = ["create_app"]

logger = logging.getLogger("frontend.app")

_SAMPLING_S = 1.0  # how old the gauges of the other frontends may be in an answer to /metrics

_AnyRequest = Request[Any, Any, State]


def create_app(engine: EngineClient, settings: FrontendSettings) -> ASGIApp:
    """Makes the application of a frontend process.

    Args:
        engine: who embeds; its owner closes it after the application.
        settings: limits, and the model's name.
    """
    routes = _Routes(engine, settings)
    app = Litestar(
        [
            post("/v1/embeddings", status_code=200, middleware=[Admission(settings)])(routes.embed),
            get("/v1/models", sync_to_thread=False)(routes.list_models),
            get("/health")(routes.check_health),
            get("/metrics")(routes.render_metrics),
        ],
        exception_handlers={Exception: _answer_error},
        lifespan=[lambda _: routes.running()],
        openapi_config=None,
        logging_config=None,
    )
    return Observation(app, routes.metrics)


class _Routes:
    """What the routes share, and their handlers."""

    def __init__(self, engine: EngineClient, settings: FrontendSettings) -> None:
        self.metrics = FrontendMetrics()
        self._engine = engine
        self._service = EmbeddingService(engine, settings)
        self._models = ModelList([Model(settings.model_name, int(time.time()))])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What runs for as long as the application does."""
        sampling = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            sampling.cancel()
            self._service.close()

    async def _sample(self) -> None:
        while True:
            self.metrics.take_over(self._engine.ring.statistics())
            await asyncio.sleep(_SAMPLING_S)

    async def embed(self, request: _AnyRequest) -> Response[EmbeddingResponse]:
        try:
            embedded = await self._service.embed(parse_embedding_request(await _body(request)), request_id_of(request.scope))
        finally:
            self.metrics.take_over(self._engine.ring.statistics())
        headers = {"x-shmring-slab-bytes": str(embedded.slab_nbytes), "x-shmring-copies": str(embedded.copies)}
        return Response(embedded.response, headers=headers)

    def list_models(self) -> ModelList:
        return self._models

    async def check_health(self) -> Response[None]:
        try:
            await self._engine.check_health()
        except TimeoutError:
            raise ApiError(503, "the engine does not answer", code="engine_unavailable", retry_after_s=RETRY_AFTER_S) from None
        except shmring.RemoteError as error:
            raise ApiError(503, str(error), code="engine_unhealthy", retry_after_s=RETRY_AFTER_S) from None
        return Response(None)

    async def render_metrics(self) -> Response[bytes]:
        self.metrics.take_over(self._engine.ring.statistics())
        numbers: dict[str, float] | None = None
        with contextlib.suppress(shmring.ShmringError, TimeoutError):  # it is told as shmring_engine_up 0
            numbers = await self._engine.statistics()
        return Response(await self.metrics.render(numbers), media_type=CONTENT_TYPE_LATEST)


async def _body(request: _AnyRequest) -> bytes:
    """Reads the body. ``request.body()`` would keep it for as long as the request lives."""
    chunks = [chunk async for chunk in request.stream() if chunk]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)  # admission hands it out in one piece


def _answer_error(request: _AnyRequest, error: Exception) -> Response[ErrorEnvelope]:
    answer = _api_error(error)
    if answer.status >= 500:
        known = isinstance(error, ApiError | shmring.ShmringError | TimeoutError)
        # As text: a log handler that keeps the exception would keep its frames, and they the views of the request's slot.
        told = str(error) or type(error).__name__ if known else "".join(traceback.format_exception(error))
        logger.error("%s: %s", request_id_of(request.scope), told)
    headers = {"retry-after": str(answer.retry_after_s)} if answer.retry_after_s is not None else {}
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    return Response(answer.envelope(), status_code=answer.status, headers=headers)


def _api_error(error: Exception) -> ApiError:
    """How failures become statuses; the table is at the head of this file."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, error.detail, code=_code_of_status(error.status_code))
        case shmring.RemoteError(type_name="ValueError" | "ValidationError"):
            return ApiError(400, error.message, code="rejected_by_engine")
        case shmring.RemoteError():
            return ApiError(500, f"the engine failed with this request: {error}", code="engine_error")
        case shmring.CapacityError():
            return ApiError(413, f"the request can never fit this server's memory: {error}", code="slab_too_small")
        case shmring.PeerLostError() | shmring.ClosedError() | shmring.AbortedError():
            return ApiError(503, str(error), code="engine_unavailable", retry_after_s=RETRY_AFTER_S)
        case TimeoutError():
            return ApiError(504, "the engine took too long with this request", code="engine_timeout")
    return ApiError(500, "internal error; the server's log has it under this request's X-Request-Id", code="internal_error")


def _code_of_status(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
