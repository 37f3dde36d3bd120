"""Traces of requests, by OpenTelemetry (``--otlp-traces-endpoint``). Where they are off, nothing of OpenTelemetry is imported.

A frontend begins the trace of a request, or goes on with its caller's (the header ``traceparent`` of W3C). The message to the
engine takes its context along in ``trace_headers``, and the engine adds its part when the request ends there: queue, prefill
and decode, from times that it takes anyway. Names of attributes are OpenTelemetry's and vLLM's.

A span has names, numbers and types of errors. Of a caller's texts it has the name of
the request and the trace's state, which are headers. It has no prompt, no URL, and no message of an error.

Which requests are traced is the sampler's choice (``OTEL_TRACES_SAMPLER``), and other variables of OpenTelemetry have their
usual meaning. Spans wait in a bounded queue until a thread sends them, and what does not fit is dropped. So no request waits
for a collector that does not answer, and a process that ends waits for it only so long (:data:`_FLUSH_S`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from msgspec import UNSET, UnsetType

from shmring.core.loggers import logger_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

__all__ = [
    "Attributes",
    "RequestTrace",
    "begin_request",
    "current_headers",
    "end_request",
    "is_tracing",
    "note",
    "parse_endpoint",
    "start_tracing",
    "stop_tracing",
    "traced",
]

Attributes: TypeAlias = Mapping[str, str | int | float]

_FLUSH_S = 1.0  # for the last spans of a process that ends; its supervisor kills it seconds later
_MAX_STATE_CHARACTERS = 512  # of `tracestate`: what W3C has everybody pass on
_PROTOCOLS = {"grpc": "grpc", "http/protobuf": "http"}  # and the exporters' modules
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PATH = "/v1/traces"
_HTTP_PORT = 4318  # of OTLP over HTTP; that of gRPC is 4317
_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_LATENCIES = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}

_NO_SPAN = contextlib.nullcontext()

logger = logger_of(__name__)

_provider: TracerProvider | None = None
_tracer: Tracer | None = None


def parse_endpoint(url: str) -> str:
    """Checks ``--otlp-traces-endpoint``, and that what sends there is installed; imports nothing that sends.

    Raises:
        ValueError: it is no URL, or something is missing; says what to do.
    """
    if not _ENDPOINT.fullmatch(url) or not _has_port_that_can_be(url):
        raise ValueError(f"{url[:64]!r} is no URL such as http://localhost:4317")
    protocol = _protocol_of(url)
    try:
        found = importlib.util.find_spec(_exporter_module(protocol)) and importlib.util.find_spec("opentelemetry.sdk.trace")
    except ModuleNotFoundError:
        found = None
    if not found:
        package = f"opentelemetry-exporter-otlp-proto-{_PROTOCOLS[protocol]}"
        raise ValueError(
            f"traces by OTLP over {protocol} need OpenTelemetry ({package}): pip install -e '.[otel]' in a checkout of shmring"
        )
    return url


def _has_port_that_can_be(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _protocol_of(url: str) -> str:
    """Returns how a collector is spoken to: as the environment says, or else as its address does, since gRPC has no path."""
    for name in _PROTOCOL_VARIABLES:
        if protocol := os.environ.get(name):
            if protocol not in _PROTOCOLS:
                raise ValueError(f"{name}: there is no {protocol[:64]!r}; choose one of {', '.join(_PROTOCOLS)}")
            return protocol
    parts = urlsplit(url)
    return "http/protobuf" if parts.path not in ("", "/") or parts.port == _HTTP_PORT else "grpc"


def _exporter_module(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{_PROTOCOLS[protocol]}.trace_exporter"


def start_tracing(endpoint: str | None, process: str) -> None:
    """Sets up traces for this process, which its children do not have.

    Args:
        endpoint: of a collector; None: there are no traces.
        process: what it is, for each span: ``engine NAME`` or ``frontend``.
    """
    global _provider, _tracer
    if endpoint is None:
        return
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # It would write a header to the log that makes no sense.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    log = logging.getLogger("opentelemetry")
    log.handlers, log.propagate = [_Relay()], False
    ours = Resource.create({"service.name": "shmring", "process.pid": os.getpid(), "shmring.process": process})
    resource = ours.merge(OTELResourceDetector().detect())  # the environment may say another name
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(_own(_exporter(endpoint))))
    # Behind the hook of the span processor, which starts its thread again in a child.
    os.register_at_fork(after_in_child=_leave_traces)
    _tracer = _provider.get_tracer("shmring")


def _leave_traces() -> None:
    """A child that an executor has forked has no traces, and no thread that waits for them."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        provider.shutdown()


def _own(exporter: SpanExporter) -> SpanExporter:
    """Returns an exporter that does nothing in a child: the connection is its parent's."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Own(SpanExporter):
        def __init__(self) -> None:
            self._pid = os.getpid()

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return exporter.export(spans) if os.getpid() == self._pid else SpanExportResult.FAILURE

        def shutdown(self) -> None:
            if os.getpid() == self._pid:
                exporter.shutdown()

    return Own()


class _Relay(logging.Handler):
    """Writes what OpenTelemetry logs as lines of one kind, so that there are few (:mod:`shmring.service.logs`).

    A collector may be away for hours. OpenTelemetry makes an error of each attempt, some with a traceback.
    """

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]}"
        logger.log(min(record.levelno, logging.WARNING), "OpenTelemetry says: %s", text)


def _exporter(endpoint: str) -> SpanExporter:
    protocol = _protocol_of(endpoint)
    endpoint = endpoint.rstrip("/")
    if protocol != "grpc" and not urlsplit(endpoint).path:  # whoever names no path there means this one
        endpoint += _PATH
    exporter: SpanExporter = importlib.import_module(_exporter_module(protocol)).OTLPSpanExporter(endpoint=endpoint)
    return exporter


def stop_tracing() -> None:
    """Sends what was not sent yet, for a second at most. Does nothing if there are no traces."""
    global _provider, _tracer
    if _provider is None:
        return
    stopping = threading.Thread(target=_provider.shutdown, daemon=True)
    _provider = _tracer = None
    stopping.start()
    stopping.join(_FLUSH_S)


def is_tracing() -> bool:
    """Whether this process has traces."""
    return _tracer is not None


# -- in a frontend ------------------------------------------------------------------------------------------------------


def begin_request(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Span | None:
    """Begins a request's span, which the running task and those that it starts have as theirs. None: there are no traces.

    Args:
        headers: of the request. A ``traceparent`` that makes no sense counts as none.
        request_id: its name.
    """
    if _tracer is None:
        return None
    from opentelemetry import context
    from opentelemetry.trace import SpanKind, set_span_in_context

    found: dict[bytes, list[bytes]] = {b"traceparent": [], b"tracestate": []}
    for name, value in headers:
        if name in found:
            found[name].append(value)
    is_one = len(found[b"traceparent"]) == 1
    carrier = {name.decode(): b",".join(values).decode("latin-1") for name, values in found.items() if values and is_one}
    attributes = {"http.request.method": "POST", "gen_ai.request.id": request_id}
    span = _tracer.start_span("POST", _context_of(carrier), SpanKind.SERVER, attributes)
    context.attach(set_span_in_context(span))
    return span


def _context_of(headers: Mapping[str, str]) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if len(headers.get("tracestate", "")) > _MAX_STATE_CHARACTERS:
        headers = {"traceparent": headers.get("traceparent", "")}
    return TraceContextTextMapPropagator().extract(headers, Context())


def end_request(span: Span, name: str, attributes: Attributes, error: str, *, is_failed: bool) -> None:
    """Ends a request's span.

    Args:
        span: of :func:`begin_request`.
        name: of the span.
        attributes: further ones.
        error: its type; empty: there was none.
        is_failed: the error is no mistake of the caller.
    """
    span.update_name(name)
    for key, value in attributes.items():
        span.set_attribute(key, value)
    _set_error(span, error, is_failed=is_failed)
    span.end()


def traced(name: str, attributes: Attributes | None = None) -> contextlib.AbstractContextManager[None]:
    """The block is a span of the running request."""
    return _NO_SPAN if _tracer is None else _traced(_tracer, name, attributes)


@contextlib.contextmanager
def _traced(tracer: Tracer, name: str, attributes: Attributes | None) -> Iterator[None]:
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:  # the message of an exception may have a text of the caller
        try:
            yield
        except BaseException as error:
            _set_error(span, type(error).__name__)
            raise


def note(name: str, value: float) -> None:
    """Adds an attribute to the running request's span."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attribute(name, value)


def current_headers() -> dict[str, str] | UnsetType:
    """Returns the context of the running request, for the message to the engine; UNSET if it is not traced."""
    if _tracer is None:
        return UNSET
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not get_current_span().is_recording():
        return UNSET
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def _set_error(span: Span, error: str, *, is_failed: bool = True) -> None:
    from opentelemetry.trace import Status, StatusCode

    if error:
        span.set_attribute("error.type", error)
        if is_failed:
            span.set_status(Status(StatusCode.ERROR))


# -- in an engine -------------------------------------------------------------------------------------------------------


class RequestTrace:
    """The engine's part of a request's trace: a span, with one for each phase in it.

    Args:
        headers: of the request's message.
        attributes: of the span.
    """

    def __init__(self, headers: Mapping[str, str], attributes: Attributes) -> None:
        self._headers = headers
        self._attributes = dict(attributes)
        self._completion_tokens = 0

    def count(self, prompt_tokens: int, new_tokens: int | None) -> None:
        """Counts the tokens of a piece of the answer, or of one of several.

        Args:
            prompt_tokens: of the request.
            new_tokens: of the piece; None: it is no text.
        """
        self._attributes["gen_ai.usage.prompt_tokens"] = prompt_tokens
        if new_tokens is not None:
            self._completion_tokens += new_tokens
            self._attributes["gen_ai.usage.completion_tokens"] = self._completion_tokens

    def end(self, phases: Sequence[tuple[str, float]], error: str) -> None:
        """Makes the spans.

        Args:
            phases: that there were: the name of each, and when it began, as a time of ``time.monotonic()``.
            error: the type of the error that ended the request; empty: it was answered.
        """
        if _tracer is None:
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        now_s = time.monotonic()
        start_ns = time.time_ns() - int(now_s * 1e9)  # of that clock
        span = _tracer.start_span(
            "llm_request",
            _context_of(self._headers),
            SpanKind.SERVER,
            self._attributes,
            start_time=start_ns + int(phases[0][1] * 1e9),
        )
        for (name, begun_s), (_, ended_s) in pairwise([*phases, ("", now_s)]):
            span.set_attribute(f"gen_ai.latency.{_LATENCIES[name]}", ended_s - begun_s)
            phase = _tracer.start_span(name, set_span_in_context(span), start_time=start_ns + int(begun_s * 1e9))
            phase.end(start_ns + int(ended_s * 1e9))
        _set_error(span, error)
        span.end(start_ns + int(now_s * 1e9))
