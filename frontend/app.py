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
import functools
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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
from shmring.engine.protocol import FrontendReport
from shmring.frontend.anthropic.errors import MESSAGES_PATH
from shmring.frontend.anthropic.messages_answer import MessagesWriter
from shmring.frontend.anthropic.messages_request import (
    COUNT_TOKENS_PARSER,
    MESSAGES_PARSER,
    CountTokensAnswer,
    TranslatedMessages,
    check_version,
)
from shmring.frontend.callers.admission import Admission, AdmissionMiddleware, admitted_of
from shmring.frontend.callers.authentication import Authentication
from shmring.frontend.callers.key_usage import KeyLimits, UsageTable, usages_of
from shmring.frontend.documentation import DOCS_PATH, DOCUMENT_PATHS, Documentation
from shmring.frontend.errors import ApiError, ErrorCode, report
from shmring.frontend.http.cross_origin import CrossOrigin
from shmring.frontend.http.responses import JsonPieces, JsonResponse, error_response, random_digits
from shmring.frontend.http.shared_answer import SharedAnswer
from shmring.frontend.http.sse import EventStream, event
from shmring.frontend.inference import Answer, AnswerWriter, Facts, Inference, Keep, events_of, heard, written
from shmring.frontend.intake import MediaIntake
from shmring.frontend.openai.chat import CHAT_FORM
from shmring.frontend.openai.completions import COMPLETION_FORM
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER
from shmring.frontend.openai.forms import parse_form
from shmring.frontend.openai.generation import AnswerForm, GenerationRequest
from shmring.frontend.openai.input_items import read_page
from shmring.frontend.openai.models import Load, Version
from shmring.frontend.openai.parsing import BodyParser
from shmring.frontend.openai.response_memory import ResponseMemory
from shmring.frontend.openai.responses_answer import ResponsesWriter
from shmring.frontend.openai.responses_request import RESPONSES_PARSER, TranslatedRequest, translated
from shmring.frontend.openai.scoring import RERANK_PARSER, SCORE_PARSER
from shmring.frontend.openai.speech import SpeechTask, read_form
from shmring.frontend.openai.stored_responses import StoredResponses, account_of
from shmring.frontend.openai.tokens import DETOKENIZE_PARSER, TOKENIZE_PARSER
from shmring.frontend.openai.tools import check_whole
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
_Generation = TypeVar("_Generation", bound=GenerationRequest)

_LARGE_BODY_NBYTES = 16 << 10  # some hundred values

_MAX_PATH_CHARACTERS = 200  # of what an error repeats

_TELLING_S = 1.0  # how often engines are told of this frontend: as often as people look
_LATE_S = 0.1  # from which they are told how late its loop was
_MAX_TOLD = 64  # callers

_METRICS_AGE_S = 1.0  # of an answer to /metrics at most; making one takes 6 ms
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
    admitted = [*keys, *limits, Middleware(AdmissionMiddleware, routes.admission)]
    forms = [*keys, *limits, Middleware(AdmissionMiddleware, routes.admission, is_form=True)]
    router = _Router(
        [
            ObservedRoute("/v1/chat/completions", routes.chat, methods=["POST"], middleware=admitted),
            ObservedRoute("/v1/responses", routes.respond, methods=["POST"], middleware=admitted),
            ObservedRoute(MESSAGES_PATH, routes.answer_messages, methods=["POST"], middleware=admitted),
            ObservedRoute(f"{MESSAGES_PATH}/count_tokens", routes.count_tokens, methods=["POST"], middleware=admitted),
            ObservedRoute("/v1/responses/{response_id}", routes.retrieve_response, middleware=keys),
            ObservedRoute("/v1/responses/{response_id}", routes.delete_response, methods=["DELETE"], middleware=keys),
            ObservedRoute("/v1/responses/{response_id}/input_items", routes.list_input_items, middleware=keys),
            ObservedRoute("/v1/responses/{response_id}/cancel", routes.cancel_response, methods=["POST"], middleware=keys),
            ObservedRoute("/v1/audio/transcriptions", routes.transcribe, methods=["POST"], middleware=forms),
            ObservedRoute("/v1/audio/translations", routes.translate, methods=["POST"], middleware=forms),
            ObservedRoute("/v1/completions", routes.complete, methods=["POST"], middleware=admitted),
            ObservedRoute("/tokenize", routes.tokenize, methods=["POST"], middleware=admitted),
            ObservedRoute("/detokenize", routes.detokenize, methods=["POST"], middleware=admitted),
            ObservedRoute("/v1/embeddings", routes.embed, methods=["POST"], middleware=admitted),
            *(ObservedRoute(path, routes.score, methods=["POST"], middleware=admitted) for path in ("/score", "/v1/score")),
            *(
                ObservedRoute(path, routes.rerank, methods=["POST"], middleware=admitted)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            ObservedRoute("/v1/models", routes.list_models, middleware=keys),
            ObservedRoute("/v1/models/{name:path}", routes.retrieve_model, middleware=keys),
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
        self._parsing = asyncio.Lock()  # one large body in a turn of the loop
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

    async def _read(self, parser: BodyParser[_Request], http_request: Request) -> tuple[_Request, dict[str, str]]:
        """Returns a request, and headers that tell its caller which fields of it were ignored."""
        # ``http_request.body()`` would keep the body for as long as the request lives. Admission hands it out in one piece.
        body = (await http_request.receive())["body"]
        if len(body) > _LARGE_BODY_NBYTES:
            async with self._parsing:  # the rest, until it is sent to the engine, takes some milliseconds
                await asyncio.sleep(0)
        request = parser.parse(body)
        if admitted_of(http_request.scope).long_texts:
            await asyncio.to_thread(check_whole, request)
        return request, _ignoring(parser.ignored_fields(request, body))

    def chat(self, http_request: Request) -> Awaitable[Response]:
        return self._generate(CHAT_FORM, http_request)

    def complete(self, http_request: Request) -> Awaitable[Response]:
        return self._generate(COMPLETION_FORM, http_request)

    async def _generate(self, form: AnswerForm[_Generation], http_request: Request) -> Response:
        request, notes = await self._read(form.parser, http_request)
        scope = http_request.scope
        if request.stream:
            return await self._stream(form, request, scope, notes)
        answer, facts = await self._inference.complete(form, request, admitted_of(scope), request_id_of(scope))
        return JsonResponse(answer, headers=_costs(facts) | _told(facts, notes))

    async def _stream(
        self, form: AnswerForm[_Generation], request: _Generation, scope: Scope, notes: dict[str, str]
    ) -> EventStream:
        answer = await self._inference.begin(form, request, admitted_of(scope), request_id_of(scope))
        return self._streamed(events_of(form, answer, request), answer, scope, notes)

    def _streamed(
        self,
        events: AsyncGenerator[bytes, None],
        answer: Answer,
        scope: Scope,
        notes: dict[str, str],
        failed: Callable[[ApiError], bytes] | None = None,
    ) -> EventStream:
        broken = functools.partial(self._broken_stream, scope=scope)
        deadline = admitted_of(scope).deadline
        return EventStream(events, answer.aclose, deadline, broken, _told(answer.facts, notes), failed)

    async def respond(self, http_request: Request) -> Response:
        request, notes = await self._read(RESPONSES_PARSER, http_request)
        scope = http_request.scope
        account = account_of(scope)
        conversation = await self._stored.open(request, account)
        items = conversation.items_of(request)
        translation = translated(request, conversation)
        del conversation
        writer = ResponsesWriter(request, translation.tools)
        await self._stored.keep_conversation(writer.answer, items, account, admitted_of(scope).long_texts)
        del items
        keep = functools.partial(self._stored.keep_answer, writer.answer, account)
        return await self._write(translation, writer, scope, notes, functools.partial(_failed_response, writer), keep)

    async def answer_messages(self, http_request: Request) -> Response:
        _begin_in_form_of_anthropic(http_request)
        request, notes = await self._read(MESSAGES_PARSER, http_request)
        return await self._write(TranslatedMessages(request), MessagesWriter(request), http_request.scope, notes)

    async def count_tokens(self, http_request: Request) -> Response:
        _begin_in_form_of_anthropic(http_request)
        request, notes = await self._read(COUNT_TOKENS_PARSER, http_request)
        translation, scope = TranslatedMessages(request), http_request.scope
        with _placed(translation):
            counting = self._inference.count_tokens(translation.chat, admitted_of(scope), request_id_of(scope))
            count, facts = await counting
        headers = _costs(facts) | _told(_placed_facts(facts, translation), notes)
        return JsonResponse(CountTokensAnswer(count), headers=headers)

    async def _write(
        self,
        translation: TranslatedRequest | TranslatedMessages,
        writer: AnswerWriter,
        scope: Scope,
        notes: dict[str, str],
        failed: Callable[[ApiError], bytes] | None = None,
        keep: Keep | None = None,
    ) -> Response:
        """Answers the request of another form that became a chat's."""
        chat = translation.chat
        admitted, request_id = admitted_of(scope), request_id_of(scope)
        with _placed(translation):
            if not chat.stream:
                facts = await self._inference.respond(chat, writer, admitted, request_id, keep)
                headers = _costs(facts) | _told(_placed_facts(facts, translation), notes)
                return JsonResponse(writer.answer, headers=headers)
            answer = await self._inference.begin(CHAT_FORM, chat, admitted, request_id)
        _placed_facts(answer.facts, translation)
        events = (event(made, made.type) async for made in written(answer, writer, keep))
        return self._streamed(events, answer, scope, notes, failed)

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

    def transcribe(self, http_request: Request) -> Awaitable[Response]:
        return self._hear("transcribe", http_request)

    def translate(self, http_request: Request) -> Awaitable[Response]:
        return self._hear("translate", http_request)

    async def _hear(self, task: SpeechTask, http_request: Request) -> Response:
        scope = http_request.scope
        form = await parse_form((await http_request.receive())["body"], http_request.headers["content-type"])
        request, ignored = read_form(form, task)
        notes = _ignoring(ignored)
        file, form.file = form.file or b"", None
        admitted, request_id = admitted_of(scope), request_id_of(scope)
        if request.stream:
            answer = await self._inference.begin_hearing(request, task, file, admitted, request_id, stream=True)
            return self._streamed((event(made) async for made in heard(answer)), answer, scope, notes)
        content, facts = await self._inference.hear(request, task, file, admitted, request_id)
        headers = _costs(facts) | _told(facts, notes)
        return (
            PlainTextResponse(content, headers=headers) if isinstance(content, str) else JsonResponse(content, headers=headers)
        )

    def _broken_stream(self, error: Exception, scope: Scope) -> ApiError:
        api_error = report(error, request_id_of(scope))
        self.metrics.http.broken_streams[api_error.code,] += 1
        note_failure(scope, api_error.code)
        return api_error

    async def tokenize(self, http_request: Request) -> Response:
        request, notes = await self._read(TOKENIZE_PARSER, http_request)
        scope = http_request.scope
        return JsonResponse(await self._inference.tokenize(request, admitted_of(scope), request_id_of(scope)), headers=notes)

    async def detokenize(self, http_request: Request) -> Response:
        request, notes = await self._read(DETOKENIZE_PARSER, http_request)
        scope = http_request.scope
        return JsonResponse(await self._inference.detokenize(request, admitted_of(scope), request_id_of(scope)), headers=notes)

    async def embed(self, http_request: Request) -> Response:
        request, notes = await self._read(EMBEDDING_PARSER, http_request)
        scope = http_request.scope
        pieces, facts = await self._inference.embed(request, admitted_of(scope), request_id_of(scope))
        return JsonPieces(pieces, _costs(facts) | _told(facts, notes))

    def score(self, http_request: Request) -> Awaitable[Response]:
        return self._score(SCORE_PARSER, http_request)

    def rerank(self, http_request: Request) -> Awaitable[Response]:
        return self._score(RERANK_PARSER, http_request)

    async def _score(self, parser: BodyParser[Any], http_request: Request) -> Response:
        request, notes = await self._read(parser, http_request)
        scope = http_request.scope
        pieces, facts = await self._inference.score(request, admitted_of(scope), request_id_of(scope))
        return JsonPieces(pieces, _costs(facts) | _told(facts, notes))

    async def list_models(self, _: Request) -> Response:
        return JsonResponse(await self._model.list())

    async def retrieve_model(self, http_request: Request) -> Response:
        return JsonResponse(await self._model.retrieve(http_request.path_params["name"]))  # names have slashes: Qwen/Qwen2-VL

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


def _ignoring(names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    text = ", ".join(names)
    logger.warning("parts of a request that have no meaning here were ignored: %s", text)
    return {"x-shmring-ignored-fields": text}


def _begin_in_form_of_anthropic(http_request: Request) -> None:
    """Has the answer name the request where Anthropic's clients look for it; refuses versions that have other answers."""
    state = http_request.scope["state"]
    state["headers"] = (state.get("headers") or {}) | {"request-id": request_id_of(http_request.scope)}
    check_version(http_request.headers.get("anthropic-version"))


def _failed_response(writer: ResponsesWriter, error: ApiError) -> bytes:
    return event(writer.fail(error), "error")


def _placed_facts(facts: Facts, translation: TranslatedRequest | TranslatedMessages) -> Facts:
    """Has facts name what was ignored as the request itself does; also what is not in its translation."""
    facts.ignored = [*translation.ignored, *(translation.place_of(name) or name for name in facts.ignored)]
    return facts


@contextlib.contextmanager
def _placed(translation: TranslatedRequest | TranslatedMessages) -> Iterator[None]:
    """Has errors about the translation of a request name their place in the request itself."""
    try:
        yield
    except ApiError as error:
        error.param = translation.place_of(error.param)
        raise


def _costs(facts: Facts) -> dict[str, str]:
    return {"x-shmring-slab-bytes": str(facts.slab_nbytes), "x-shmring-copies": str(facts.copies)}


def _told(facts: Facts, notes: Mapping[str, str]) -> dict[str, str]:
    """Headers that warn a caller: fields that were ignored (those that were noted before among them), made-up answers, media
    with missing parts."""
    headers = _ignoring([*notes.values(), *facts.ignored]) if facts.ignored else dict(notes)
    if facts.synthetic:
        headers["x-shmring-synthetic"] = "true"
    if facts.shortfalls:
        headers["x-shmring-media-shortfall"] = facts.shortfalls
    return headers


def _answer_to(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):  # of the router: it says no more than "Not Found"
        error = _of_the_router(error, scope["method"], scope["path"])
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
