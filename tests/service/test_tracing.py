"""Traces in one process: what is refused at the start, what is not imported, what is passed on. Servers: test_traces.py."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from shmring.engine.protocol import EncodeRequest, GenerateRequest, SamplingParams
from shmring.engine.request import _trace_of
from shmring.service import tracing
from tests.otlp import Collector, collecting
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
TRACE, PARENT = "1" * 32, "2" * 16
TRACEPARENT = b"00-" + TRACE.encode() + b"-" + PARENT.encode() + b"-01"

WITHOUT_TRACES = """
import sys
import shmring.engine.process, shmring.engine.core, shmring.engine.executors.synthetic, shmring.frontend.processes.process
from shmring.service import tracing
tracing.start_tracing(None, "engine")
with tracing.traced("something"):
    assert tracing.begin_request([(b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")], "name") is None
tracing.stop_tracing()
print(sorted(name for name in sys.modules if name.startswith(("opentelemetry", "grpc", "google"))))
"""


FORKS = """
import os, sys, threading, time
from shmring.service import tracing
os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = sys.argv[1]
tracing.start_tracing("http://127.0.0.1:9", "engine")
tracing.begin_request([], "a span that waits to be sent")
child = os.fork()
if child == 0:
    with tracing.traced("nothing"):
        print([thread.name for thread in threading.enumerate()], tracing.is_tracing(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print([thread.name for thread in threading.enumerate()], tracing.is_tracing(), flush=True)
os._exit(0)
"""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collecting("http/protobuf") as running:
        tracing.start_tracing(f"http://127.0.0.1:{running.port}", "test")
        yield running
        tracing.stop_tracing()


def test_where_traces_are_off_nothing_of_them_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRACES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@for_each("protocol", ["http/protobuf", "grpc"])
def test_a_child_that_an_executor_forks_has_no_traces_and_no_thread_of_them(protocol: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, protocol], cwd=ROOT, capture_output=True, text=True, timeout=120)
    child, parent = done.stdout.splitlines()
    assert child == "['MainThread'] False", done.stderr
    assert parent == "['MainThread', 'OtelBatchSpanRecordProcessor'] True"


def test_where_traces_are_off_the_message_has_no_field() -> None:
    assert tracing.current_headers() is UNSET
    for request in (GenerateRequest(), EncodeRequest([])):
        assert b"trace" not in msgspec.msgpack.encode(request)


@for_each(
    ("url", "variables", "message"),
    [
        ("localhost:4317", {}, "is no URL such as http://localhost:4317"),
        ("grpc://localhost:4317", {}, "is no URL such as"),
        ("http://", {}, "is no URL such as"),
        ("", {}, "is no URL such as"),
        ("http://a b", {}, "is no URL such as"),
        ("http://a:65536", {}, "is no URL such as"),
        (
            "http://a",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "there is no 'http/json'; choose one of grpc, http/protobuf",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_start(url: str, variables: dict[str, str], message: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        with pytest.raises(ValueError) as raised:
            tracing.parse_endpoint(url)
    assert message in str(raised.value)


@for_each(("port", "package"), [(4317, "proto-grpc"), (4318, "proto-http")])
def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, port: int, package: str) -> None:
    def find_spec(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing.importlib.util, "find_spec", find_spec)
    with pytest.raises(ValueError, match=rf"{package}\): pip install -e '\.\[otel\]'"):
        tracing.parse_endpoint(f"http://localhost:{port}")


@for_each(
    ("url", "said", "protocol"),
    [
        ("http://localhost:4317", "", "grpc"),
        ("http://localhost", "", "grpc"),
        ("https://collector:443/", "", "grpc"),
        ("http://localhost:4318", "", "http/protobuf"),
        ("https://collector/v1/traces", "", "http/protobuf"),
        ("https://collector/otlp", "", "http/protobuf"),
        ("http://localhost:4318", "grpc", "grpc"),
        ("http://localhost:4317", "http/protobuf", "http/protobuf"),
    ],
)
@for_each("variable", ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_the_address_of_a_collector_says_how_it_is_spoken_to(
    monkeypatch: pytest.MonkeyPatch, variable: str, url: str, said: str, protocol: str
) -> None:
    monkeypatch.setenv(variable, said)
    assert tracing._protocol_of(tracing.parse_endpoint(url)) == protocol


@for_each("path", ["/v1/traces", "/v1/traces/"])
def test_a_collector_whose_path_is_named_gets_spans_over_http(path: str) -> None:
    with collecting("http/protobuf") as collector:
        tracing.start_tracing(f"http://127.0.0.1:{collector.port}{path}", "test")
        try:
            with tracing.traced("it came"):
                pass
        finally:
            tracing.stop_tracing()
        assert [span.name for span in collector.spans] == ["it came"]


def test_a_collector_over_http_has_the_usual_path_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert tracing._exporter("http://127.0.0.1:9/")._endpoint == "http://127.0.0.1:9/v1/traces"  # type: ignore[attr-defined] # it has


@for_each(
    ("headers", "parent"),
    [
        ([(b"traceparent", TRACEPARENT)], PARENT),
        ([(b"traceparent", TRACEPARENT), (b"tracestate", b"a=b")], PARENT),
        ([(b"traceparent", TRACEPARENT), (b"tracestate", b"\xff=\x00,,=")], PARENT),
        ([(b"traceparent", TRACEPARENT), (b"tracestate", b"a=" + b"b" * 60000)], PARENT),
        ([(b"traceparent", TRACEPARENT), (b"traceparent", TRACEPARENT)], ""),
        ([(b"traceparent", b"00-" + b"g" * 32 + b"-" + b"2" * 16 + b"-01")], ""),
        ([(b"traceparent", b"\xff\x00" * 30)], ""),
        ([(b"traceparent", b"0" * 60000)], ""),
        ([(b"tracestate", b"a=b")], ""),
        ([], ""),
    ],
)
async def test_a_trace_goes_on_or_begins(collector: Collector, headers: list[tuple[bytes, bytes]], parent: str) -> None:
    span = tracing.begin_request(headers, "name")
    assert span is not None
    passed_on = tracing.current_headers()
    assert passed_on is not UNSET
    trace, id_ = passed_on["traceparent"].split("-")[1:3]
    assert (trace == TRACE) == bool(parent)
    assert passed_on.get("tracestate", "") in ("", "a=b")
    before = len(collector.spans)
    tracing.end_request(span, "POST", {}, "", is_failed=False)
    tracing.stop_tracing()
    [made] = collector.spans[before:]
    assert (made.trace, made.id, made.parent) == (trace, id_, parent)
    tracing.start_tracing(f"http://127.0.0.1:{collector.port}", "test")


def test_an_engine_ignores_a_context_that_makes_no_sense(collector: Collector) -> None:
    """A message may come from any program."""
    for headers in ({}, {"traceparent": "x" * 60000}, {"traceparent": TRACEPARENT.decode(), "tracestate": "=" * 60000}):
        tracing.RequestTrace(headers, {}).end([("queue", 1.0)], "")
    tracing.stop_tracing()
    assert [span.parent for span in collector.spans if span.name == "llm_request"] == ["", "", PARENT]


def test_numbers_that_otlp_does_not_have_cost_no_span(collector: Collector) -> None:
    request = GenerateRequest(sampling=SamplingParams(max_tokens=(1 << 64) - 1, temperature=float("inf")), trace_headers={})
    trace = _trace_of(request, "name")
    assert trace is not None
    trace.end([("queue", 1.0)], "")
    tracing.stop_tracing()
    [span] = [span for span in collector.spans if span.name == "llm_request"]
    assert span.attributes["gen_ai.request.max_tokens"] == (1 << 63) - 1


def test_lines_of_opentelemetry_are_of_one_kind_and_have_no_traceback(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    tracing.stop_tracing()
    tracing.start_tracing(f"http://127.0.0.1:{collector.port}", "test")  # in the test: pytest has all loggers propagate before
    theirs = logging.getLogger("opentelemetry.exporter")
    for number in range(3):
        theirs.error("Failed to export %d", number)
        try:
            raise ConnectionError("refused")
        except ConnectionError:
            theirs.exception("Exception while exporting %d", number)
    kinds = {(record.name, record.levelno, record.msg, record.exc_info) for record in caplog.records}
    assert kinds == {("shmring.service.tracing", logging.WARNING, "OpenTelemetry says: %s", None)}
    assert caplog.messages[:2] == [
        "OpenTelemetry says: Failed to export 0",
        "OpenTelemetry says: Exception while exporting 0: refused",
    ]
