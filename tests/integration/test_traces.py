"""Traces through two processes, received by a real collector: parents, phases, errors, hang-ups, several engines, the end."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_http_server import NAME, Server, chat_body, serving, until
from tests.otlp import Collector, Span, collecting

pytestmark = pytest.mark.slow  # processes that import torch

SECRET = "a-secret-of-the-caller"
FRONTEND = ("media preparation", "slot wait", "media decode")
ENGINE = ("llm_request", "queue", "prefill", "decode")
MODEL = "shmring-synthetic"
CHAT = "POST /v1/chat/completions"


def options_of(port: int) -> tuple[str, ...]:
    executor = ("--executor=synthetic", '--executor-options={"step_s": 0.02}')
    # Nothing is kept: a picture that is found again is neither decoded nor waits for a slot.
    return ("--slab-nbytes=32MiB", "--mm-processor-cache-gb=0", *executor, f"--otlp-traces-endpoint=http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting("http/protobuf") as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    with (
        pytest.MonkeyPatch.context() as environment,
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
    ):
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with serving(Path(place), *options_of(collector.port), "--data-parallel-size=2") as running:
            yield running
            assert running.stop() == 0


def begun() -> tuple[str, dict[str, str]]:
    """A trace of the caller's, and the header of it."""
    trace = secrets.token_hex(16)
    return trace, {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}


def chat(**fields: Any) -> dict[str, Any]:
    body = chat_body(**fields) | {"model": MODEL}
    body["messages"][0]["content"][0]["text"] = SECRET
    return body


def check_family(spans: dict[str, Span], parent: str) -> None:
    """Each span has the parent that it should have, and lies within it."""
    http = spans[CHAT]
    parents = {CHAT: parent, "llm_request": http.id, "media preparation": http.id}
    parents |= {"slot wait": spans["media preparation"].id, "media decode": spans["media preparation"].id}
    parents |= dict.fromkeys(("queue", "prefill", "decode"), spans["llm_request"].id)
    assert {name: span.parent for name, span in spans.items()} == parents
    by_id = {span.id: span for span in spans.values()}
    for span in spans.values():
        assert span.start_ns <= span.end_ns
        if (outer := by_id.get(span.parent)) is not None:
            assert outer.start_ns <= span.start_ns + 1_000_000, span.name  # the clocks of two processes are read one by one
            assert span.end_ns <= outer.end_ns + 1_000_000, span.name


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_through_two_processes(server: Server, collector: Collector, stream: bool) -> None:
    trace, headers = begun()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json=chat(max_tokens=5, stream=stream), headers=headers)
    assert answer.status_code == 200
    spans = collector.of(trace, CHAT, *FRONTEND, *ENGINE)
    check_family(spans, headers["traceparent"].split("-")[2])
    assert {spans[name].pid for name in (CHAT, *FRONTEND)} <= set(server.frontends)
    assert {spans[name].pid for name in ENGINE} <= set(server.engines)
    assert spans[CHAT].process == "frontend"
    assert spans["llm_request"].process in (f"engine {NAME}-0", f"engine {NAME}-1")
    assert not any(span.is_failed for span in spans.values())
    http_attributes, attributes = spans[CHAT].attributes, spans["llm_request"].attributes
    assert http_attributes["http.response.status_code"] == 200
    assert http_attributes["gen_ai.request.id"] == answer.headers["x-request-id"] == attributes["gen_ai.request.id"]
    assert 0 < http_attributes["gen_ai.latency.time_to_first_token"] <= http_attributes["gen_ai.latency.e2e"]
    assert attributes["gen_ai.usage.completion_tokens"] == attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.prompt_tokens"] > 0
    assert attributes["gen_ai.latency.time_in_model_decode"] > attributes["gen_ai.latency.time_in_queue"] >= 0
    assert not any(SECRET.encode() in body for body in collector.content)


async def test_embeddings_are_traced_too(server: Server, collector: Collector) -> None:
    trace, headers = begun()
    body = {"model": MODEL, "input": ["one", "two"]}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post("/v1/embeddings", json=body, headers=headers)).status_code == 200
    assert set(collector.of(trace, "POST /v1/embeddings", "llm_request", "prefill")) == {
        *("POST /v1/embeddings", "llm_request", "queue", "prefill")
    }


async def test_both_engines_add_their_spans(server: Server, collector: Collector) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def one() -> str:
            trace, headers = begun()
            await http.post("/v1/chat/completions", json=chat(max_tokens=2), headers=headers)
            return collector.of(trace, "llm_request")["llm_request"].process

        processes: set[str] = set()
        while len(processes) < 2:  # which engine is the less loaded one is chance
            processes.add(await one())
    assert processes == {f"engine {NAME}-0", f"engine {NAME}-1"}


@pytest.mark.parametrize(
    ("fields", "status", "error", "engine_error"),
    [
        ({"model": "another"}, 404, "model_not_found", ""),
        ({"max_tokens": 1 << 30}, 400, "context_length_exceeded", "ContextLengthError"),
    ],
)
async def test_errors_have_types_and_no_text(
    server: Server, collector: Collector, fields: dict[str, Any], status: int, error: str, engine_error: str
) -> None:
    trace, headers = begun()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post("/v1/chat/completions", json=chat() | fields, headers=headers)).status_code == status
    spans = collector.of(trace, CHAT, *(["llm_request"] if engine_error else []))
    assert spans[CHAT].attributes["error.type"] == error
    assert spans[CHAT].attributes["http.response.status_code"] == status
    assert not spans[CHAT].is_failed  # a mistake of the caller is no failure of the server
    if engine_error:
        assert (spans["llm_request"].attributes["error.type"], spans["llm_request"].is_failed) == (engine_error, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_leaves_aborted_spans(server: Server, collector: Collector, stream: bool) -> None:
    trace, headers = begun()
    body = chat(max_tokens=100_000, stream=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        if stream:
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                await anext(answer.aiter_lines())
        else:
            whole = body | {"stream": False}
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/chat/completions", json=whole, headers=headers, timeout=httpx.Timeout(60, read=1))
    spans = collector.of(trace, CHAT, "llm_request")
    for name in (CHAT, "llm_request"):
        assert (spans[name].attributes["error.type"], spans[name].is_failed) == ("aborted", True)


@pytest.mark.parametrize(
    "header", ["nonsense", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01", "", "00-1-1-1"]
)
async def test_a_traceparent_that_makes_no_sense_is_ignored(server: Server, collector: Collector, header: str) -> None:
    name = secrets.token_hex(8)
    headers = {"traceparent": header, "tracestate": "=,=", "x-request-id": name}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post("/v1/chat/completions", json=chat(max_tokens=1), headers=headers)).status_code == 200

    def first() -> Span | None:
        mine = [span for span in collector.spans if span.attributes.get("gen_ai.request.id") == name and span.name == CHAT]
        return mine[0] if mine else None

    span = until(first)
    assert span.parent == ""
    assert collector.of(span.trace, "llm_request")["llm_request"].parent == span.id


async def test_a_caller_who_does_not_trace_is_not_traced(server: Server, collector: Collector) -> None:
    """As the sampler has it by default; whatever came after it has been traced."""
    traces = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for flags in ("00", "01"):
            trace, headers = begun()
            headers = {"traceparent": headers["traceparent"][:-2] + flags}
            assert (await http.post("/v1/chat/completions", json=chat(max_tokens=1), headers=headers)).status_code == 200
            traces.append(trace)
    collector.of(traces[1], CHAT, *ENGINE)
    assert not [span for span in collector.spans if span.trace == traces[0]]


async def test_the_last_spans_are_sent_when_the_server_stops(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> None:
    """Over gRPC, which is the default; and the environment names the service."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # nothing is sent before the end
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)  # of the server that the others share
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    trace, headers = begun()
    with collecting("grpc") as collector, serving(socket_dir, *options_of(collector.port)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            assert (await http.post("/v1/chat/completions", json=chat(max_tokens=2), headers=headers)).status_code == 200
        assert not collector.spans
        assert server.stop() == 0
        spans = collector.of(trace, CHAT, *FRONTEND, *ENGINE)
        check_family(spans, headers["traceparent"].split("-")[2])
        assert {span.service for span in spans.values()} == {"mine"}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_does_not_answer_costs_nobody_a_request_and_delays_no_end(
    protocol: str, monkeypatch: pytest.MonkeyPatch, socket_dir: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    silent = socket.create_server(("127.0.0.1", 0))  # connections are made, and nobody says anything
    options = (*options_of(silent.getsockname()[1]), "--api-server-count=1")
    with silent, serving(socket_dir, *options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            for _ in range(3):
                answer = await http.post("/v1/chat/completions", json=chat(max_tokens=2))
                assert answer.status_code == 200
        assert server.stop() == 0
        assert not server.killed
        assert "is killed" not in server.last_words
