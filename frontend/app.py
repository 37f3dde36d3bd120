"""The HTTP application of one frontend process: routes, and what each of them answers.

How failures become statuses: :mod:`frontend.failures`, whose table is also what the OpenAPI document says.

Answers that come whole say what they took: ``X-Shmring-Slab-Bytes``, the bytes of tensors that crossed through the slab, and
``X-Shmring-Copies``, how many tensors this process copied for sending while the request was with the engine (other
requests' included, so it is exact for a request that was alone, and an upper bound otherwise). ``X-Shmring-Synthetic: true``
is on all answers that are made up, for load tests.

What ``/health`` and ``/ready`` say: :mod:`frontend.health`. Neither needs a key, nor do ``/metrics``, ``/version`` and
``/docs``.

Litestar was chosen because it speaks msgspec; it cancels cleanly, streams, and runs its middleware inside its error handling.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from litestar import HttpMethod, Litestar, Request, Response, post, route
from litestar.datastructures import State
from litestar.types import Receive, Scope, Send
from prometheus_client import CONTENT_TYPE_LATEST

import shmring
from engine.client import EngineClient
from frontend.admission import Admission, admitted_of
from frontend.authentication import Authentication
from frontend.chat import ChatService, Completed, events_of
from frontend.documentation import DOCS_PATH, DOCUMENT_PATHS, Documentation
from frontend.embeddings import Embedded, EmbeddingService
from frontend.errors import ApiError, ErrorEnvelope
from frontend.failures import report
from frontend.health import Health, HealthReporter
from frontend.metrics import FrontendMetrics, Observation, request_id_of
from frontend.multimodal import MediaIntake
from frontend.openai.chat import CHAT_PARSER, ChatRequest
from frontend.openai.embeddings import EMBEDDING_PARSER
from frontend.openai.models import Model, ModelList, Version
from frontend.served import ServedModel
from frontend.settings import FrontendSettings
from frontend.sse import EventStream

__all__ = ["Application", "create_app"]

_SAMPLING_S = 1.0  # how old the gauges of the other frontends may be in an answer to /metrics

_AnyRequest = Request[Any, Any, State]

_get = functools.partial(route, http_method=[HttpMethod.GET, HttpMethod.HEAD])  # probes ask HEAD; the server drops the body


class Application:
    """An ASGI application. Made by :func:`create_app`."""

    def __init__(self, app: Observation, routes: _Routes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or runs the lifespan."""
        await self._app(scope, receive, send)

    def begin_shutdown(self) -> None:
        """Says to whoever asks that it is not ready any more. What is in flight, or still comes, is answered."""
        self._routes.health.shutting_down = True


def create_app(engine: EngineClient, settings: FrontendSettings) -> Application:
    """Makes the application of a frontend process.

    Args:
        engine: who computes; its owner closes it after the application.
        settings: limits, and the model's name.
    """
    routes = _Routes(engine, settings)
    authentication = Authentication(settings.api_keys)
    middleware = [authentication, Admission(settings)]
    app = Litestar(
        [
            post("/v1/chat/completions", status_code=200, middleware=middleware)(routes.chat),
            post("/v1/embeddings", status_code=200, middleware=middleware)(routes.embed),
            _get("/v1/models", middleware=[authentication])(routes.list_models),
            _get("/v1/models/{name:path}", middleware=[authentication])(routes.retrieve_model),
            _get("/health")(routes.check_health),
            _get("/ready")(routes.check_ready),
            _get("/metrics")(routes.render_metrics),
            _get("/version", sync_to_thread=False)(routes.version),
            _get(DOCS_PATH)(routes.documentation.page),
            _get(list(DOCUMENT_PATHS))(routes.documentation.document),
        ],
        exception_handlers={Exception: _answer_error},
        lifespan=[lambda _: routes.running()],
        openapi_config=None,
        request_max_body_size=None,  # admission bounds it
        logging_config=None,
    )
    return Application(Observation(app, routes.metrics), routes)


class _Routes:
    """What the routes share, and their handlers."""

    def __init__(self, engine: EngineClient, settings: FrontendSettings) -> None:
        self.metrics = FrontendMetrics()
        self.health = HealthReporter(engine)
        self._engine = engine
        self._model = ServedModel(engine, settings.served_model_name)
        self.documentation = Documentation(keys_needed=bool(settings.api_keys), model=self._model)
        self._intake = MediaIntake(engine, settings)
        self._embeddings = EmbeddingService(engine, self._model, self._intake, settings)
        self._chats = ChatService(engine, self._model, self._intake, settings)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What runs for as long as the application does."""
        sampling = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            sampling.cancel()
            await self._intake.close()

    async def _sample(self) -> None:
        while True:
            self.metrics.take_over(self._engine.ring.statistics())
            await asyncio.sleep(_SAMPLING_S)

    async def chat(self, request: _AnyRequest) -> Response[Any]:
        asked = CHAT_PARSER.parse(await _body(request))
        if asked.stream:
            return await self._stream(asked, request)
        try:
            completed = await self._chats.complete(asked, admitted_of(request.scope), request_id_of(request.scope))
        finally:
            self.metrics.take_over(self._engine.ring.statistics())
        return Response(completed.response, headers=_headers(completed))

    async def _stream(self, asked: ChatRequest, request: _AnyRequest) -> EventStream:
        admitted, request_id = admitted_of(request.scope), request_id_of(request.scope)
        answer = await self._chats.begin(asked, admitted, request_id)
        headers = {"x-shmring-synthetic": "true"} if answer.synthetic else {}
        broken = functools.partial(self._broken_stream, request_id=request_id)
        return EventStream(events_of(answer, asked), answer.aclose, admitted.deadline, broken, headers)

    def _broken_stream(self, error: Exception, request_id: str) -> ApiError:
        told = report(error, request_id)
        self.metrics.broken_streams.labels(told.code).inc()
        return told

    async def embed(self, request: _AnyRequest) -> Response[Any]:
        asked = EMBEDDING_PARSER.parse(await _body(request))
        try:
            embedded = await self._embeddings.embed(asked, admitted_of(request.scope), request_id_of(request.scope))
        finally:
            self.metrics.take_over(self._engine.ring.statistics())
        return Response(embedded.response, headers=_headers(embedded))

    async def list_models(self) -> ModelList:
        return await self._model.list()

    async def retrieve_model(self, request: _AnyRequest) -> Model:
        return await self._model.retrieve(request.path_params["name"].removeprefix("/"))  # names have slashes: Qwen/Qwen2-VL

    def version(self) -> Version:
        return Version(shmring.__version__)

    async def check_health(self) -> Health:
        return await self.health.check_health()

    async def check_ready(self) -> Health:
        return await self.health.check_ready()

    async def render_metrics(self) -> Response[bytes]:
        self.metrics.take_over(self._engine.ring.statistics())
        numbers: dict[str, float] | None = None
        with contextlib.suppress(shmring.ShmringError, TimeoutError):  # it is told as shmring_engine_up 0
            numbers = await self._engine.statistics()
        return Response(await self.metrics.render(numbers), headers={"content-type": CONTENT_TYPE_LATEST})


def _headers(taken: Completed | Embedded) -> dict[str, str]:
    headers = {"x-shmring-slab-bytes": str(taken.slab_nbytes), "x-shmring-copies": str(taken.copies)}
    return headers | ({"x-shmring-synthetic": "true"} if taken.synthetic else {})


async def _body(request: _AnyRequest) -> bytes:
    """Reads the body. ``request.body()`` would keep it for as long as the request lives."""
    chunks = [chunk async for chunk in request.stream() if chunk]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)  # admission hands it out in one piece


def _answer_error(request: _AnyRequest, error: Exception) -> Response[ErrorEnvelope]:
    answer = report(error, request_id_of(request.scope))
    return Response(answer.envelope(), status_code=answer.status, headers=answer.headers)
