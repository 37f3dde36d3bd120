"""A collector of OpenTelemetry, over HTTP or gRPC: it keeps the spans that processes send it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclasses.dataclass(frozen=True)
class Span:
    """A span; ids are hexadecimal, ``parent`` is empty for the first of a trace, ``process`` says who made it."""

    name: str
    trace: str
    id: str
    parent: str
    process: str
    pid: int
    service: str
    attributes: dict[str, Any]
    is_failed: bool
    start_ns: int
    end_ns: int


class Collector:
    """Attributes: ``port``; ``content``: all that was received, as it came."""

    def __init__(self) -> None:
        self.port = 0
        self.content: list[bytes] = []
        self._requests: list[ExportTraceServiceRequest] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        with self._came:
            self.content.append(body)
            self._requests.append(ExportTraceServiceRequest.FromString(body))
            self._came.notify_all()

    @property
    def spans(self) -> list[Span]:
        return [
            _span(span, {each.key: _value(each.value) for each in resource.resource.attributes})
            for request in list(self._requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def of(self, trace: str, *names: str, limit_s: float = 60.0) -> dict[str, Span]:
        """Waits until a trace has spans of these names, and returns all of it, by name."""
        with self._came:
            found: dict[str, Span] = {}
            assert self._came.wait_for(
                lambda: (
                    found.update({span.name: span for span in self.spans if span.trace == trace}) or set(names) <= set(found)
                ),
                limit_s,
            ), (names, set(found))
            return found


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        resource["shmring.process"],
        resource["process.pid"],
        resource["service.name"],
        {each.key: _value(each.value) for each in span.attributes},
        span.status.code == Status.STATUS_CODE_ERROR,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


@contextlib.contextmanager
def collecting(protocol: Literal["grpc", "http/protobuf"]) -> Iterator[Collector]:
    """Runs one at a free port."""
    collector = Collector()
    if protocol == "grpc":

        class Servicer(TraceServiceServicer):
            def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
                collector.take(request.SerializeToString())
                return ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(Servicer(), server)
        collector.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        collector.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            http.shutdown()
            thread.join()
