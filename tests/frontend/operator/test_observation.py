"""The outermost middleware: names, counts and times, and what a shutdown does to requests."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from shmring.frontend.operator.metrics import FrontendMetrics
from shmring.frontend.operator.observation import Observation, request_id_of
from shmring.service.logs import ACCESS
from tests.tables import for_each


class Exchange:
    """A request that was sent to an application, and its answer."""

    def __init__(self, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.scope: Any = {"type": "http", "path": "/", "headers": headers or [], "state": {"route": "/a/route"}}
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        raise AssertionError("nobody asked for the body")

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": [(b"own", b"1")]})
    await send({"type": "http.response.body", "body": b""})


def count(metrics: FrontendMetrics, status: int) -> float:
    return value(metrics, "shmring_http_requests_total", route="/a/route", status=str(status)) or 0


def value(metrics: FrontendMetrics, name: str, **labels: str) -> float | None:
    metrics.take_over_own()
    return metrics.registry.get_sample_value(name, labels)


async def observe(metrics: FrontendMetrics, app: Any, exchange: Exchange, **options: Any) -> None:
    await Observation(app, metrics.http, lambda headers: [(b"asked", value) for _, value in headers], **options)(
        exchange.scope, exchange.receive, exchange.send
    )


async def test_a_request_is_counted_timed_and_named() -> None:
    metrics, exchange = FrontendMetrics(["test"]), Exchange([(b"x-request-id", b"mine")])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert request_id_of(scope) == "mine"
        assert value(metrics, "shmring_http_in_flight") == 1
        await answer(scope, receive, send)

    await observe(metrics, app, exchange)
    assert exchange.sent[0]["headers"] == [(b"own", b"1"), (b"x-request-id", b"mine")]
    assert count(metrics, 204) == 1
    assert value(metrics, "shmring_http_request_seconds_count", route="/a/route") == 1
    assert value(metrics, "shmring_http_in_flight") == 0
    assert value(metrics, "shmring_http_aborted_total") == 0


async def leave_at_once(scope: Any, receive: Any, send: Any) -> None:
    return


async def leave_within(scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["caller"] = "alice"  # as authentication does
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"so far", "more_body": True})


@for_each(("app", "status"), [(leave_at_once, 499), (leave_within, 200)])
async def test_who_has_no_whole_answer_hung_up(app: Any, status: int) -> None:
    metrics = FrontendMetrics(["test"])
    await observe(metrics, app, Exchange())
    assert count(metrics, status) == 1
    assert value(metrics, "shmring_http_aborted_total") == 1


async def test_a_bug_is_counted_and_comes_through() -> None:
    metrics, exchange = FrontendMetrics(["test"]), Exchange()

    async def break_down(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await observe(metrics, break_down, exchange)
    assert count(metrics, 500) == 1
    assert value(metrics, "shmring_http_in_flight") == 0


async def cancelled(
    metrics: FrontendMetrics, exchange: Exchange, content_type: bytes | None = None, **options: Any
) -> asyncio.Task[None]:
    """What becomes of a request that is cancelled while it waits: before its answer, or within one of this type."""
    entered = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if content_type is not None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(observe(metrics, wait, exchange, **options))
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    return task


async def test_requests_that_wait_at_a_shutdown_get_an_answer() -> None:
    metrics, exchange = FrontendMetrics(["test"]), Exchange([(b"origin", b"https://chat.example.org")])
    (await cancelled(metrics, exchange)).result()
    assert exchange.sent[0]["status"] == 503
    assert (b"retry-after", b"1") in exchange.sent[0]["headers"]
    assert (b"asked", b"https://chat.example.org") in exchange.sent[0]["headers"]  # else a browser shows nothing of it
    assert b'"code":"shutting_down"' in exchange.sent[1]["body"]
    assert count(metrics, 503) == 1
    assert value(metrics, "shmring_request_failure_total", route="/a/route", reason="shutting_down") == 1


async def test_a_shutdown_during_an_answer_breaks_it_off() -> None:
    exchange = Exchange()
    assert (await cancelled(FrontendMetrics(["test"]), exchange, b"application/json")).cancelled()
    assert len(exchange.sent) == 1


async def test_a_shutdown_during_a_stream_is_its_last_event() -> None:
    metrics, exchange = FrontendMetrics(["test"]), Exchange()
    (await cancelled(metrics, exchange, b"text/event-stream; charset=utf-8")).result()
    _, last = exchange.sent
    assert last["body"].startswith(b'data: {"error":')
    assert b'"code":"shutting_down"' in last["body"]
    assert not last["more_body"]
    assert value(metrics, "shmring_http_broken_streams_total", code="shutting_down") == 1


async def test_a_server_may_cancel_requests_whose_callers_have_gone() -> None:
    """Then there is nobody to be told, and it is no failure of the server."""
    metrics, exchange = FrontendMetrics(["test"]), Exchange()
    assert (await cancelled(metrics, exchange, cancels_for_callers=True)).cancelled()
    assert exchange.sent == []
    assert count(metrics, 499) == 1
    assert value(metrics, "shmring_http_aborted_total") == 1
    assert value(metrics, "shmring_http_in_flight") == 0
    assert value(metrics, "shmring_request_failure_total", route="/a/route", reason="shutting_down") is None


@for_each(
    ("app", "asked", "line", "parts"),
    [
        (answer, ("POST", "/a/route"), r"- POST /a/route 204", {"method": "POST", "path": "/a/route", "status": 204}),
        (leave_within, ("POST", "/a/route"), r"alice POST /a/route 499", {"caller": "alice", "status": 499}),
        (answer, ("GET", "/\n2026 ERROR engine: dead"), r"- GET /\\n2026 ERROR engine: dead 204", {}),
    ],
    ids=["a request", "a caller who has gone", "a path that looks like a line"],
)
async def test_an_access_is_a_line_with_its_request(
    caplog: pytest.LogCaptureFixture, app: Any, asked: tuple[str, str], line: str, parts: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS)
    caplog.clear()
    for access_log in (False, True):
        exchange = Exchange([(b"x-request-id", b"mine")])
        exchange.scope |= {"method": asked[0], "path": asked[1], "client": ("127.0.0.1", 4711), "query_string": b"key=secret"}
        await observe(FrontendMetrics(["test"]), app, exchange, access_log=access_log)
    [record] = caplog.records
    assert re.fullmatch(rf"127\.0\.0\.1:4711 {line} \d\.\d{{4}} s", record.getMessage())
    assert record.request_id == "mine"
    assert parts.items() <= record.parts.items()


async def test_what_is_no_request_passes_through() -> None:
    types: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        types.append(scope["type"])

    exchange = Exchange()
    exchange.scope["type"] = "lifespan"
    await observe(FrontendMetrics(["test"]), app, exchange)
    assert types == ["lifespan"]
