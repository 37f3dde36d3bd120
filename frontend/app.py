"""The HTTP application of one frontend process: routes, and what each of them answers.

How failures become statuses: :mod:`shmring.frontend.errors`, which has all codes.

Answers that are not streamed have headers about their cost. ``X-Shmring-Slab-Bytes`` is the number of bytes of tensors that
crossed through the slab. ``X-Shmring-Copies`` is how many tensors this process copied for sending while a request with media
was sent. It includes copies for other requests: it is exact for a request that was alone, and an upper bound otherwise.
``X-Shmring-Synthetic: true`` is on all made-up answers (for load tests). ``X-Shmring-Ignored-Fields`` names the fields of the
request that this server does not know. ``X-Shmring-Media-Shortfall`` names the media of which a part is missing.

What ``/health`` and ``/ready`` say: :mod:`shmring.frontend.operator.health`. Neither needs a key, nor do ``/metrics``,
``/version`` and ``/docs``. The page ``/status`` is :mod:`shmring.frontend.operator.status`.

Starlette routes, and nothing more: bodies are msgspec's, and the OpenAPI document is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.client import EngineClient
from shmring.engine.protocol import FrontendReport, GenerateReply
from shmring.frontend.answer import Answer, Facts, ignoring
from shmring.frontend.anthropic.errors import MESSAGES_PATH, messages_error
from shmring.frontend.anthropic.messages_answer import MessagesWriter
from shmring.frontend.anthropic.messages_request import (
    COUNT_TOKENS_PARSER,
    MESSAGES_PARSER,
    CountTokensAnswer,
    begin_messages,
    read_count_tokens,
    read_messages,
)
from shmring.frontend.callers.admission import Admission, admitted_of
from shmring.frontend.callers.authentication import Authentication
from shmring.frontend.callers.key_usage import KeyLimits, UsageTable, usages_of
from shmring.frontend.documentation import DOCS_PATH, DOCUMENT_PATHS, Documentation
from shmring.frontend.errors import ApiError, ErrorCode, report
from shmring.frontend.http.cross_origin import CrossOrigin
from shmring.frontend.http.large_bodies import LargeBodies
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.http.responses import JsonPieces, JsonResponse, error_response, random_digits
from shmring.frontend.http.shared_answer import SharedAnswer
from shmring.frontend.http.sse import EventStream
from shmring.frontend.inference import Embedded, Encoding, Generation, Inference
from shmring.frontend.intake import MediaIntake
from shmring.frontend.openai.chat import CHAT_FORM, CHAT_PARSER, read_chat
from shmring.frontend.openai.choices import ChoicesWriter
from shmring.frontend.openai.completions import COMPLETION_FORM, COMPLETION_PARSER, read_completion
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, count_inputs, encode_response, read_embedding
from shmring.frontend.openai.forms import parse_form
from shmring.frontend.openai.input_items import read_page
from shmring.frontend.openai.messages import check_whole
from shmring.frontend.openai.models import Load, ModelList, Version, models_of
from shmring.frontend.openai.response_memory import ResponseMemory
from shmring.frontend.openai.responses_answer import ResponsesWriter
from shmring.frontend.openai.responses_request import RESPONSES_PARSER, translated
from shmring.frontend.openai.scoring import RERANK_PARSER, SCORE_PARSER, encode_scores, read_pairs
from shmring.frontend.openai.speech import SpeechTask, SpeechWriter, read_form, read_speech
from shmring.frontend.openai.stored_responses import StoredResponses, account_of
from shmring.frontend.openai.tokens import (
    DETOKENIZE_PARSER,
    TOKENIZE_PARSER,
    DetokenizeResponse,
    TokenizeResponse,
    read_detokenize,
    read_tokenize,
)
from shmring.frontend.operator.admin import admin_routes
from shmring.frontend.operator.health import HealthReporter
from shmring.frontend.operator.metrics import EngineNumbers, FrontendMetrics
from shmring.frontend.operator.observation import Observation, ObservedRoute, answer_has_begun, note_failure, request_id_of
from shmring.frontend.operator.status import Feed, status_routes
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import CorsSettings, FrontendSettings
from shmring.service.loop_lag import LoopLag
from shmring.service.supervision import FrontendState

__all__ = ["Application", "create_app"]

logger = logger_of("shmring.frontend.app")

_Request = TypeVar("_Request", bound=msgspec.Struct)

_LARGE_BODY_NBYTES = 16 << 10  # some hundred values

_MAX_PATH_CHARACTERS = 200  # of what an error repeats

_TELLING_S = 1.0  # how often engines are told of this frontend: as often as people look
_LATE_S = 0.1  # from which they are told how late its loop was
_MAX_TOLD = 64  # callers

_METRICS_AGE_S = 1.0  # of an answer to /metrics at most; making one takes 6 ms
_SCORING_PATHS: dict[BodyParser[Any], tuple[str, ...]] = {
    SCORE_PARSER: ("/score", "/v1/score"),
    RERANK_PARSER: ("/rerank", "/v1/rerank", "/v2/rerank"),
}

_SAMPLING_S = 0.2  # how old the numbers of the other frontends may be in an answer to /metrics; taking them costs 0.1 ms


class Application(Observation):
    """An ASGI application. Made by :func:`create_app`.

    Attributes:
        headers_for: returns the CORS headers of answers that the server makes itself.
    """

    def __init__(
        self, answers: ASGIApp, routes: _Routes, cors: CorsSettings, *, access_log: bool, cancels_for_callers: bool
    ) -> None:
        cross_origin = CrossOrigin(answers, cors)
        self.headers_for = cross_origin.headers_for
        app = cross_origin if cors.allowed_origins else answers
        super().__init__(
            app, routes.metrics.http, self.headers_for, access_log=access_log, cancels_for_callers=cancels_for_callers
        )
        self._routes = routes

    def begin_shutdown(self) -> None:
        """Makes ``/ready`` say that the process is shutting down. Requests in flight, and new ones, are still answered."""
        self._routes.health.shutting_down = True
        self.end_watching()

    def end_watching(self) -> None:
        """Ends the streams of snapshots, which would go on for ever."""
        self._routes.feed.close()


def create_app(
    engine: EngineClient,
    settings: FrontendSettings,
    *,
    frontends: Callable[[], Sequence[FrontendState]] = tuple,
    usage: UsageTable | None = None,
    usage_row: int = 0,
    responses: ResponseMemory | None = None,
    cancels_for_callers: bool = False,
) -> Application:
    """Makes the application of a frontend process.

    Args:
        engine: computes; its owner closes it after the application.
        settings: limits, and the model's name.
        frontends: returns the states of all frontends of the server, for ``/health``.
        usage: what owners of keys use, of all frontends; None: this one counts for itself.
        usage_row: this frontend's part of it.
        responses: where responses are kept, for all frontends; None: this one keeps its own.
        cancels_for_callers: whether the server cancels a request whose caller has gone. Ray Serve does; uvicorn does not.
    """
    if responses is None and settings.response_lifetime_s:
        fd = ResponseMemory.create(settings.response_store_nbytes, 1)
        responses = ResponseMemory(fd, 0, settings.response_lifetime_s)
    routes = _Routes(engine, settings, frontends, StoredResponses(responses, settings.response_lifetime_s))
    usages = usages_of(settings.key_owners, routes.metrics.keys, usage, usage_row)
    keys = [Middleware(Authentication, settings.api_keys, usages)] if settings.api_keys else []
    with_admins = Middleware(Authentication, settings.api_keys, usages, settings.admin_keys)
    viewers = [with_admins] if settings.api_keys or settings.admin_keys else []
    limits = [Middleware(KeyLimits)] if usages else []
    answer, keyed = partial(partial, routes.answer), partial(ObservedRoute, middleware=keys)
    post = partial(ObservedRoute, methods=["POST"], middleware=[*keys, *limits, Middleware(routes.admission.before)])
    post_form = partial(post, middleware=[*keys, *limits, Middleware(routes.admission.before, is_form=True)])
    router = _Router(
        [
            post("/v1/chat/completions", answer(routes.read_chat)),
            post("/v1/responses", answer(routes.read_response)),
            post(MESSAGES_PATH, answer(routes.read_messages), error_form=messages_error),
            post(f"{MESSAGES_PATH}/count_tokens", routes.count_tokens, error_form=messages_error),
            keyed("/v1/responses/{response_id}", routes.retrieve_response),
            keyed("/v1/responses/{response_id}", routes.delete_response, methods=["DELETE"]),
            keyed("/v1/responses/{response_id}/input_items", routes.list_input_items),
            keyed("/v1/responses/{response_id}/cancel", routes.cancel_response, methods=["POST"]),
            post_form("/v1/audio/transcriptions", answer(partial(routes.read_speech, "transcribe"))),
            post_form("/v1/audio/translations", answer(partial(routes.read_speech, "translate"))),
            post("/v1/completions", answer(routes.read_completion)),
            post("/tokenize", routes.tokenize),
            post("/detokenize", routes.detokenize),
            post("/v1/embeddings", routes.embed),
            *(post(path, partial(routes.score, parser)) for parser, paths in _SCORING_PATHS.items() for path in paths),
            keyed("/v1/models", routes.list_models),
            keyed("/v1/models/{name:path}", routes.retrieve_model),
            ObservedRoute("/health", routes.check_health),
            ObservedRoute("/ready", routes.check_ready),
            ObservedRoute("/ping", routes.check_health, methods=["GET", "POST"]),
            ObservedRoute("/load", routes.load),
            ObservedRoute("/metrics", routes.show_metrics),
            ObservedRoute("/version", routes.version),
            *status_routes(routes.feed, viewers),
            *admin_routes(engine, settings),
            ObservedRoute(DOCS_PATH, routes.documentation.page),
            *(ObservedRoute(path, routes.documentation.document) for path in DOCUMENT_PATHS),
        ],
        redirect_slashes=False,  # a redirect of a POST has no body in some clients
        lifespan=lambda _: routes.running(),
    )
    answers = _ErrorAnswers(router)
    access_log = settings.access_log
    return Application(answers, routes, settings.cors, access_log=access_log, cancels_for_callers=cancels_for_callers)


class _Router(Router):
    """Starlette's, which tries the pattern of one route after the other; here, most routes are found by method and path."""

    def __init__(self, routes: Sequence[ObservedRoute], **keywords: Any) -> None:
        super().__init__(routes, **keywords)
        plain = [route for route in routes if not route.param_convertors]
        self._found = {(method, route.path): route for route in plain for method in route.methods or ()}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]  # no frame
        """Has a route answer."""
        route = None if scope.get("root_path") else self._found.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            return super().__call__(scope, receive, send)
        route.note(scope)
        return route.app(scope, receive, send)


class _ErrorAnswers:
    """Middleware that answers what a route raises. (Starlette has four such layers, and each wraps every ``send``.)

    Args:
        app: the routes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or runs the lifespan.

        Raises:
            Exception: it was raised after the answer had begun.
        """
        scope["app"] = self  # a router that is part of an application raises its refusals
        try:
            await self._app(scope, receive, send)
            return
        except ClientDisconnect:  # while an operator's body was read
            return
        except Exception as error:
            if scope["type"] != "http" or answer_has_begun(scope):
                raise
            answer = _answer_to(error, scope)
        await answer(scope, receive, send)  # without the error, whose frames would keep views of the request's slot


class Writer(Protocol):
    """Writes the answer to a request."""

    @property
    def fail(self) -> Callable[[ApiError], bytes] | None:
        """Returns the last event of a stream that fails; None: it is that of all streams."""

    def whole(self, answer: Answer) -> Awaitable[msgspec.Struct | str]:
        """Returns all of it: JSON, or a text."""

    def events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yields it as events."""


#: What a body asks for, who writes the answer, and the parts of the body that were ignored.
Read: TypeAlias = tuple[Generation, Writer, list[str]]

#: Reads a body.
Reader: TypeAlias = Callable[[Request], Awaitable[Read]]


class _Routes:
    """The objects that the routes share, and their handlers."""

    def __init__(
        self,
        engine: EngineClient,
        settings: FrontendSettings,
        frontends: Callable[[], Sequence[FrontendState]],
        stored: StoredResponses,
    ) -> None:
        self._stored = stored
        self.metrics = FrontendMetrics(list(engine.engines), [owner.name for owner in settings.key_owners])
        self.admission = Admission(settings)
        self._large_bodies = LargeBodies()
        self._encoding = asyncio.Lock()  # one piece of a large answer in a turn of the loop
        self._max_inputs = settings.max_inputs
        self._engine = engine
        self._model = ServedModel(engine, settings.served_model_name)
        self.documentation = Documentation(settings, self._model)
        self._rendered = SharedAnswer(self._render_metrics, _METRICS_AGE_S)
        self._lag = LoopLag()
        self.feed = Feed(engine)
        self._intake = MediaIntake(engine, settings)
        self.health = HealthReporter(engine, frontends, lambda: self._intake.statistics().decoders)
        self._inference = Inference(engine, self._model, self._intake, settings, self.metrics.answers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tasks that run as long as the application does."""
        aborting = self._engine.end_aborted(self.admission.abort)
        works = (self._sample(), self._lag.watch(), self._get_ready(), self._tell_engines(), aborting)
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self.feed.close()
            await self._intake.close()
            self._stored.close()

    async def _get_ready(self) -> None:
        """Has a decoder import what the model's pictures need, before the first one comes; without an engine, nothing."""
        with contextlib.suppress(shmring.ShmringError, TimeoutError):
            await self._intake.get_ready((await self._engine.describe()).input)

    async def _tell_engines(self) -> None:
        """Tells the engines of requests that none of them has yet, and of a late loop: these, too, make callers wait."""
        name, had_any = random_digits(), False
        while True:
            await asyncio.sleep(_TELLING_S)
            requests, seconds = self.admission.preparing(), self._intake.take_decoding_seconds()
            most = {who for who, _ in requests.most_common(_MAX_TOLD)} | set(
                heapq.nlargest(_MAX_TOLD, seconds, key=seconds.__getitem__)
            )
            lag_s, lag_ago_s = self._lag.longest()
            if most or lag_s >= _LATE_S or had_any:
                decoders = self._intake.statistics().decoders
                callers = {who: (requests[who], round(seconds.get(who, 0.0), 3)) for who in most if who}
                busy = decoders.total - decoders.free
                title = self._engine.title or "a frontend"
                report = FrontendReport(
                    name, title, callers, decoders.total, busy, decoders.waiting, round(lag_s, 4), round(lag_ago_s, 1)
                )
                with contextlib.suppress(shmring.ShmringError, TimeoutError):  # there is no engine to tell
                    await self._engine.tell_engines(report)
            had_any = bool(most) or lag_s >= _LATE_S

    async def _sample(self) -> None:
        while True:
            self._take_over_numbers()
            await asyncio.sleep(_SAMPLING_S)

    def _take_over_numbers(self) -> None:
        self.metrics.process.loop_lag_seconds = self._lag.seconds
        self.metrics.take_over_own(self._intake.statistics())
        for name, client in self._engine.engines.items():
            self.metrics.take_over(name, client.statistics())

    async def _read(self, parser: BodyParser[_Request], http_request: Request) -> tuple[_Request, list[str]]:
        """Returns what a body says, and which fields of it were ignored."""
        # ``http_request.body()`` would keep the body for as long as the request lives. Admission hands it out in one piece.
        body = (await http_request.receive())["body"]
        if len(body) > _LARGE_BODY_NBYTES:
            who = admitted_of(http_request.scope).caller
            await self._large_bodies.take_turn(lambda: self.admission.has_others(who))
        request = parser.parse(body)
        if admitted_of(http_request.scope).long_texts:
            await asyncio.to_thread(check_whole, request)
        return request, parser.ignored_fields(request, body)

    async def answer(self, read: Reader, http_request: Request) -> Response:
        """Answers a request for text: it is read, done and written."""
        generation, writer, ignored = await read(http_request)
        admitted, stream = admitted_of(http_request.scope), generation.stream
        answer = await self._inference.begin(generation, admitted, request_id_of(http_request.scope))
        del generation  # it has the tools and forms of its caller
        if stream:
            broken = partial(self._broken_stream, scope=http_request.scope)
            headers = answer.facts.headers(ignored, has_costs=False)
            return EventStream(writer.events(answer), answer.aclose, admitted.deadline, broken, headers, writer.fail)
        async with contextlib.aclosing(answer):
            content = await writer.whole(answer)
        headers = answer.facts.headers(ignored, has_costs=True)
        return (
            PlainTextResponse(content, headers=headers) if isinstance(content, str) else JsonResponse(content, headers=headers)
        )

    async def read_chat(self, http_request: Request) -> Read:
        request, ignored = await self._read(CHAT_PARSER, http_request)
        return read_chat(request), ChoicesWriter(CHAT_FORM, request), ignored

    async def read_completion(self, http_request: Request) -> Read:
        request, ignored = await self._read(COMPLETION_PARSER, http_request)
        return read_completion(request), ChoicesWriter(COMPLETION_FORM, request), ignored

    async def read_response(self, http_request: Request) -> Read:
        request, ignored = await self._read(RESPONSES_PARSER, http_request)
        scope = http_request.scope
        account = account_of(scope)
        conversation = await self._stored.open(request, account)
        items = conversation.items_of(request)
        translation, tools = translated(request, conversation)
        del conversation
        writer = ResponsesWriter(request, tools)
        await self._stored.keep_conversation(writer.answer, items, account, admitted_of(scope).long_texts)
        del items
        writer.keep = partial(self._stored.keep_answer, writer.answer, account)
        return translation.read(), writer, ignored

    async def read_messages(self, http_request: Request) -> Read:
        begin_messages(http_request)
        request, ignored = await self._read(MESSAGES_PARSER, http_request)
        return read_messages(request), MessagesWriter(request), ignored

    async def read_speech(self, task: SpeechTask, http_request: Request) -> Read:
        form = await parse_form((await http_request.receive())["body"], http_request.headers["content-type"])
        request, ignored = read_form(form, task)
        return read_speech(request, task, form), SpeechWriter(request, task), ignored

    async def count_tokens(self, http_request: Request) -> Response:
        begin_messages(http_request)
        request, ignored = await self._read(COUNT_TOKENS_PARSER, http_request)
        output, facts = await self._tokens(read_count_tokens(request), http_request.scope)
        return JsonResponse(CountTokensAnswer(len(output.token_ids)), headers=facts.headers(ignored, has_costs=True))

    async def tokenize(self, http_request: Request) -> Response:
        request, ignored = await self._read(TOKENIZE_PARSER, http_request)
        output, facts = await self._tokens(read_tokenize(request), http_request.scope)
        answer = TokenizeResponse(output.token_ids, len(output.token_ids), facts.max_model_len)
        return JsonResponse(answer, headers=ignoring(ignored))

    async def detokenize(self, http_request: Request) -> Response:
        request, ignored = await self._read(DETOKENIZE_PARSER, http_request)
        output, _ = await self._tokens(read_detokenize(request), http_request.scope)
        return JsonResponse(DetokenizeResponse(output.text), headers=ignoring(ignored))

    def _tokens(self, generation: Generation, scope: Scope) -> Awaitable[tuple[GenerateReply, Facts]]:
        return self._inference.tokenize(generation, admitted_of(scope), request_id_of(scope))

    async def embed(self, http_request: Request) -> Response:
        request, ignored = await self._read(EMBEDDING_PARSER, http_request)
        encoding = read_embedding(request, self._max_inputs)
        counts = count_inputs(encoding.inputs)
        embedded = await self._embedded(encoding, http_request.scope)
        pieces = await encode_response(embedded.embeddings, request, embedded.prompt_tokens, counts, self._encoding)
        return JsonPieces(pieces, embedded.facts.headers(ignored, has_costs=True))

    async def score(self, parser: BodyParser[Any], http_request: Request) -> Response:
        request, ignored = await self._read(parser, http_request)
        encoding, pairs = read_pairs(request, self._max_inputs)
        embedded = await self._embedded(encoding, http_request.scope)
        pieces = await encode_scores(request, pairs, embedded, self._encoding)
        return JsonPieces(pieces, embedded.facts.headers(ignored, has_costs=True))

    def _embedded(self, encoding: Encoding, scope: Scope) -> Awaitable[Embedded]:
        return self._inference.embed(encoding, admitted_of(scope), request_id_of(scope))

    async def retrieve_response(self, http_request: Request) -> Response:
        if http_request.query_params.get("stream", "false") != "false":
            text = "a response that was kept comes whole: leave stream out"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="stream")
        response_id = http_request.path_params["response_id"]
        return JsonResponse(await self._stored.find(response_id, account_of(http_request.scope)))

    async def list_input_items(self, http_request: Request) -> Response:
        response_id, page = http_request.path_params["response_id"], read_page(http_request.query_params)
        return JsonResponse(await self._stored.list_input(response_id, account_of(http_request.scope), page))

    async def delete_response(self, http_request: Request) -> Response:
        response_id = http_request.path_params["response_id"]
        return JsonResponse(await self._stored.delete(response_id, account_of(http_request.scope)))

    async def cancel_response(self, http_request: Request) -> Response:
        await self._stored.find(http_request.path_params["response_id"], account_of(http_request.scope))
        text = "the response is complete; only one that was asked for with background could be cancelled, and there are none"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="response_id")

    def _broken_stream(self, error: Exception, scope: Scope) -> ApiError:
        api_error = report(error, request_id_of(scope))
        self.metrics.http.broken_streams[api_error.code,] += 1
        note_failure(scope, api_error.code)
        return api_error

    async def list_models(self, _: Request) -> Response:
        return JsonResponse(ModelList(models_of(await self._model.served())))

    async def retrieve_model(self, http_request: Request) -> Response:
        name = http_request.path_params["name"]  # names have slashes: Qwen/Qwen2-VL
        return JsonResponse(models_of(await self._model.served(name))[0])

    async def version(self, _: Request) -> Response:
        return JsonResponse(Version(shmring.__version__))

    async def check_health(self, _: Request) -> Response:
        return JsonResponse(await self.health.check_health())

    async def check_ready(self, _: Request) -> Response:
        return JsonResponse(await self.health.check_ready())

    async def load(self, _: Request) -> Response:
        return JsonResponse(Load(await self._engine.load()))

    async def show_metrics(self, _: Request) -> Response:
        return Response(await self._rendered.get(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _render_metrics(self) -> bytes:
        self._take_over_numbers()
        names = list(self._engine.engines)
        numbers = await asyncio.gather(*map(self._numbers_of, names))
        return await self.metrics.render(dict(zip(names, numbers, strict=True)))

    async def _numbers_of(self, engine: str) -> EngineNumbers | None:
        """Returns an engine's numbers; None, which is shown as shmring_engine_up 0, if it does not answer."""
        try:
            counts = await self._engine.statistics(engine=engine)
            return EngineNumbers(counts, await self._engine.times(engine=engine))
        except (shmring.ShmringError, TimeoutError):
            return None


def _answer_to(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):  # of the router: it says no more than "Not Found"
        error = _of_the_router(error, scope["method"], scope["path"])
        if scope["path"].startswith(f"{scope.get('root_path', '')}{MESSAGES_PATH}/"):
            scope["state"]["error_form"] = messages_error  # the vendor has routes there that are not here
    answer = report(error, request_id_of(scope))
    note_failure(scope, answer.code)
    return error_response(answer, scope)


def _of_the_router(error: HTTPException, method: str, path: str) -> ApiError:
    """Returns the error for a request without a route."""
    path = f"{path[:_MAX_PATH_CHARACTERS]}..." if len(path) > _MAX_PATH_CHARACTERS else path
    if error.status_code == 404:
        message = f"there is nothing at {path}; {DOCS_PATH} describes what there is, and /status shows what the server does"
        return ApiError(ErrorCode.NOT_FOUND, message)
    allowed = ", ".join(value for name, value in (error.headers or {}).items() if name.lower() == "allow")
    message = f"{path} does not take the method {method}; it takes {allowed}"
    return ApiError(ErrorCode.METHOD_NOT_ALLOWED, message, headers=error.headers)
