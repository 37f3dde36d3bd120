"""The application over ASGI, with a real ring behind it: answers, and every failure as its status and envelope."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import shmring
from shmring.frontend import app
from shmring.frontend.media.decoder_pool import DecoderDiedError, DecoderPool
from shmring.frontend.settings import CorsSettings
from tests.frontend.talking import picture_url
from tests.tables import for_each
from tests.waiting import eventually

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

EMBEDDINGS, CHATS = "/v1/embeddings", "/v1/chat/completions"
PIXELS = np.random.default_rng(3).integers(0, 256, (3, 24, 32, 3), np.uint8)


def pictures(*pixels: Any, **fields: Any) -> dict[str, Any]:
    """The body of a request for the embeddings of pictures, or of their files."""
    parts = [{"type": "image_url", "image_url": {"url": picture_url(each)}} for each in pixels]
    return {"model": "shmring-fingerprints", "messages": [{"role": "user", "content": parts}], **fields}


ONE = pictures(PIXELS[0])


@pytest.fixture
async def http(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_engine())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = body["error"]
    return error


def numbers_of(response: httpx.Response) -> dict[str, float]:
    """What /metrics says, without labels."""
    families = text_string_to_metric_families(response.text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.mark.parametrize("names", [("model", "another model"), ("Qwen/Qwen2-VL-2B-Instruct",)])
async def test_models_are_listed_described_and_served_by_their_names(
    open_engine: Any, open_app: OpenApp, names: tuple[str, ...]
) -> None:
    http = await open_app(await open_engine(), served_model_name=names)
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["object"]) for model in listed] == [(name, "model") for name in names]
    for name, model in zip(names, listed, strict=True):
        assert (await http.get(f"/v1/models/{quote(name, safe='')}")).json() == model
        assert (await http.get(f"/v1/models/{name}")).json() == model
        assert (await http.post(EMBEDDINGS, json=pictures(PIXELS[0], model=name))).json()["model"] == name
    for response in (
        await http.get("/v1/models/other"),
        await http.get("/v1/models/{name:path}"),  # the route's own pattern, which is no path
        await http.post(EMBEDDINGS, json=ONE),  # the engine's name for it
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert ", ".join(map(repr, names)) in error["message"]


@for_each("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/docs"])
async def test_head_is_answered_where_get_is(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.head(path)).status_code == 200


@for_each(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", EMBEDDINGS, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
async def test_wrong_routes_have_the_envelope(http: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    error = error_of(await http.request(method, path), status)
    assert error["code"] == code
    assert path in error["message"]
    assert method in error["message"] or status == 404


async def test_a_path_that_is_not_there_is_named_but_not_at_any_length(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine())
    message = error_of(await http.post(f"/{'x' * 5000}", json={}), 404)["message"]
    assert "x" * 199 in message
    assert len(message) < 300


# -- pages of other sites -----------------------------------------------------------------------------------------------

ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_pages_of_allowed_sites_may_call(open_engine: Any, open_app: OpenApp) -> None:
    cors = CorsSettings(allowed_origins=(ORIGIN,), allow_credentials=True)
    http = await open_app(await open_engine(), cors=cors, api_keys=("a-key",))
    asked = await http.options(EMBEDDINGS, headers=PREFLIGHT)  # browsers send no key with it
    assert asked.status_code == 200, asked.text
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    for key, status in (("a-key", 200), ("another", 401)):  # a page must be able to read why it was refused
        headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
        answer = await http.post(EMBEDDINGS, json=ONE, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert len(answer.headers.get_list("x-request-id")) == 1
    answer = await http.get("/nothing", headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, ORIGIN)


async def test_pages_of_other_sites_may_not(open_engine: Any, open_app: OpenApp) -> None:
    engine = await open_engine()
    for http in (await open_app(engine), await open_app(engine, cors=CorsSettings(allowed_origins=("https://b.org",)))):
        asked = await http.options(EMBEDDINGS, headers=PREFLIGHT)
        assert asked.status_code in (400, 405)
        assert "access-control-allow-origin" not in asked.headers
        answer = await http.get("/health", headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_allowed_sites_may_read_that_the_server_is_shutting_down(open_engine: Any, open_app: OpenApp) -> None:
    came = asyncio.Event()

    async def wait(_: shmring.Claim) -> None:
        came.set()
        await asyncio.Event().wait()

    http = await open_app(await open_engine(wait), cors=CorsSettings(allowed_origins=(ORIGIN,)))
    asking = asyncio.create_task(http.post(EMBEDDINGS, json=ONE, headers={"origin": ORIGIN}))
    await came.wait()
    asking.cancel()  # as the server does when it ends; the application runs in this task
    answer = await asking
    assert error_of(answer, 503)["code"] == "shutting_down"
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "Retry-After" in answer.headers["access-control-expose-headers"]


async def test_a_picture_that_never_fits_the_slab_is_refused(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(slab_nbytes="1MiB"))
    error = error_of(await http.post(EMBEDDINGS, json=pictures(np.zeros((1000, 1000, 3), np.uint8))), 413)
    assert error["code"] == "slab_too_small"


async def test_a_full_slab_is_waited_for_and_then_reported(open_engine: Any, open_app: OpenApp) -> None:
    engine = await open_engine(slab_nbytes="1MiB")
    http, patient = await open_app(engine, slot_timeout_s=0.05), await open_app(engine)
    free_nbytes = engine.ring.statistics().leasable_nbytes - (128 << 10)
    async with engine.client.ring.slot(free_nbytes):
        response = await http.post(EMBEDDINGS, json=pictures(np.zeros((300, 300, 3), np.uint8)))
        assert error_of(response, 503)["code"] == "slab_full"
        assert int(response.headers["retry-after"]) >= 1
    assert 'shmring_request_failure_total{reason="slab_full",route="/v1/embeddings"} 1.0' in (await http.get("/metrics")).text
    assert (await patient.post(EMBEDDINGS, json=pictures(np.zeros((300, 300, 3), np.uint8)))).status_code == 200


async def test_decoders_that_die_are_not_the_callers_fault(
    open_engine: Any, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead: list[str] = []

    async def die(*_: Any, **__: Any) -> Any:
        dead.append("x")
        raise DecoderDiedError("killed")

    http = await open_app(await open_engine())
    monkeypatch.setattr(DecoderPool, "_run_once", die)
    response = await http.post(EMBEDDINGS, json=ONE)
    assert error_of(response, 503)["code"] == "decoder_lost"
    assert int(response.headers["retry-after"]) >= 1
    assert len(dead) == 2
    assert "bug" not in caplog.text


async def test_failures_of_the_executor(open_engine: Any, open_app: OpenApp) -> None:
    """(All kinds of failures: test_errors.py.)"""
    kinds = iter([ValueError, msgspec.ValidationError, RuntimeError])

    async def fail(claim: shmring.Claim) -> None:
        raise next(kinds)("the executor says no")

    http = await open_app(await open_engine(fail))
    for status, code in ((400, "rejected_by_engine"), (400, "rejected_by_engine"), (500, "engine_error")):
        error = error_of(await http.post(EMBEDDINGS, json=ONE), status)
        assert error["code"] == code
        assert "the executor says no" in error["message"]


async def test_an_engine_that_takes_too_long(open_engine: Any, open_app: OpenApp) -> None:
    async def dawdle(claim: shmring.Claim) -> None:
        aborted = asyncio.Event()
        claim.on_abort(aborted.set)
        await aborted.wait()

    engine = await open_engine(dawdle)
    http = await open_app(engine, request_timeout_s=0.05)
    assert error_of(await http.post(EMBEDDINGS, json=ONE), 504)["code"] == "request_timeout"
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


@pytest.mark.usefixtures("fresh_metrics")
async def test_without_an_engine_all_say_503(open_engine: Any, open_app: OpenApp) -> None:
    engine = await open_engine()
    http, late = await open_app(engine), await open_app(engine)
    assert (await http.get("/health")).status_code == 200
    models = (await http.get("/v1/models")).json()
    assert numbers_of(await http.get("/metrics"))["shmring_engine_up"] == 1
    await engine.ring.close()
    await eventually(lambda: not engine.client.is_running)
    for response in (
        await http.get("/health"),
        await http.get("/ready"),
        await http.post(EMBEDDINGS, json=ONE),
    ):
        assert error_of(response, 503)["code"] == "engine_unavailable"
        assert int(response.headers["retry-after"]) >= 1
    assert numbers_of(await http.get("/metrics"))["shmring_engine_up"] == 0
    assert (await http.get("/v1/models")).json() == models  # as the last engine said
    error_of(await late.get("/v1/models"), 503)  # which this one has never asked


async def test_an_engine_that_goes_while_it_works_is_503(open_engine: Any, open_app: OpenApp) -> None:
    async def leave(claim: shmring.Claim) -> None:
        claimed.set()
        await asyncio.Event().wait()

    claimed = asyncio.Event()
    engine = await open_engine(leave)
    http = await open_app(engine)
    request = asyncio.create_task(http.post(EMBEDDINGS, json=ONE))
    await claimed.wait()
    await engine.ring.close()
    assert error_of(await request, 503)["code"] == "engine_unavailable"


async def test_a_bug_is_500_and_tells_nothing(
    open_engine: Any, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(app, "read_embedding", break_down)
    http = await open_app(await open_engine())
    response = await http.post(EMBEDDINGS, json=ONE, headers={"x-request-id": "the-one"})
    error = error_of(response, 500)
    assert error["code"] == "internal_error"
    assert "secret" not in response.text
    assert "the-one" in caplog.text
    assert "a secret" in caplog.text


@for_each(("request_id", "kept"), [("my-id:42", True), ("x" * 129, False), ("with space", False), (None, False)])
async def test_requests_have_an_id(http: httpx.AsyncClient, request_id: str | None, kept: bool) -> None:
    response = await http.get("/nothing", headers={"x-request-id": request_id} if request_id else {})
    assert (response.headers["x-request-id"] == request_id) is kept
    assert response.headers["x-request-id"]


async def test_all_who_scrape_within_a_second_get_what_was_collected_once(
    open_engine: Any, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.frontend.app._METRICS_AGE_S", 600.0)  # however slow this is
    engine = await open_engine()
    http = await open_app(engine)
    collected = engine.client.statistics
    calls = []

    async def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return await collected(*arguments, **options)

    monkeypatch.setattr(engine.client, "statistics", counted)
    together = await asyncio.gather(*(http.get("/metrics") for _ in range(20)))
    one_after_the_other = [await http.get("/metrics") for _ in range(20)]
    assert len({response.text for response in (*together, *one_after_the_other)}) == 1
    assert len(calls) == 1


@pytest.mark.usefixtures("fresh_metrics")
async def test_the_lag_of_the_loop_is_a_number(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine())
    await asyncio.sleep(0)
    time.sleep(0.3)  # in the loop that answers
    async with asyncio.timeout(20):
        while numbers_of(await http.get("/metrics"))["shmring_frontend_loop_lag_seconds"] <= 0.2:
            await asyncio.sleep(0)


async def test_metrics_count_what_happened(open_engine: Any, open_app: OpenApp) -> None:
    engine = await open_engine()
    http = await open_app(engine)
    await http.post(EMBEDDINGS, json=pictures(*PIXELS))
    await http.post(EMBEDDINGS, json={})
    await http.get("/somewhere/else")
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    numbers = numbers_of(response)
    # A slot starts each tensor on a cache line; these are multiples of it.
    assert numbers["shmring_frontend_slab_bytes_total"] == PIXELS.nbytes
    assert numbers["shmring_frontend_in_place_total"] == 3
    assert numbers["shmring_frontend_copies_total"] == 0
    assert "shmring_frontend_slots_in_use" in numbers
    assert "shmring_engine_ring_slots_in_use" in numbers
    assert numbers["shmring_frontend_decoders"] == numbers["shmring_frontend_decoders_free"] == 4
    assert numbers["shmring_frontend_decoded_bytes"] == 0
    assert numbers["shmring_http_in_flight"] == 1  # the question itself
    for line in (
        'shmring_http_requests_total{route="/v1/embeddings",status="200"} 1.0',
        'shmring_http_requests_total{route="/v1/embeddings",status="400"} 1.0',
        'shmring_http_requests_total{route="unmatched",status="404"} 1.0',
        'shmring_http_request_seconds_count{route="/v1/embeddings"} 2.0',
        'shmring_request_failure_total{reason="invalid_value",route="/v1/embeddings"} 1.0',
        'shmring_request_failure_total{reason="not_found",route="unmatched"} 1.0',
        'shmring_request_success_total{finished_reason="stop"} 1.0',
        "shmring_e2e_request_latency_seconds_count 1.0",
        'shmring_media_preparation_seconds_count{kind="image"} 3.0',
        "shmring_slot_wait_seconds_count 1.0",
    ):
        assert line in response.text


async def test_many_requests_at_once_are_all_answered(open_engine: Any, open_app: OpenApp, embedding_of: Any) -> None:
    many = np.random.default_rng(4).integers(0, 256, (24, 150, 200, 3), np.uint8)
    engine = await open_engine(slab_nbytes="512KiB")  # four at a time
    http = await open_app(engine, max_concurrent_media=6)
    responses = await asyncio.gather(*(http.post(EMBEDDINGS, json=pictures(pixels)) for pixels in many))
    for response, pixels in zip(responses, many, strict=True):
        [item] = response.json()["data"]
        np.testing.assert_allclose(item["embedding"], embedding_of(pixels), rtol=1e-6)
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_a_server_that_shuts_down_is_not_ready(open_engine: Any, start_app: Any) -> None:
    app = await start_app(await open_engine())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.get("/ready")).status_code == 200
        app.begin_shutdown()
        assert error_of(await http.get("/ready"), 503)["code"] == "shutting_down"
        assert (await http.get("/health")).status_code == 200


async def test_a_step_that_hangs_is_unhealthy(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core({"step_s": 0.5}, step_timeout_s=0.01)
    http = await open_app(engine)
    request = asyncio.create_task(http.post(CHATS, json=chat_of(max_tokens=1)))
    await eventually(lambda: engine.core._busy is not None)
    await eventually(lambda: engine.core._busy[1] + 0.02 < time.monotonic())
    for path in ("/health", "/ready"):
        assert error_of(await http.get(path), 503)["code"] == "engine_unhealthy"
    assert (await request).status_code == 200
    assert (await http.get("/health")).status_code == 200


async def test_embeddings_that_are_made_up_say_so(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    made_up = await http.post(EMBEDDINGS, json={"model": "shmring-synthetic", "input": "x"})
    assert made_up.headers["x-shmring-synthetic"] == "true"


@pytest.mark.parametrize("path", [EMBEDDINGS, CHATS])
async def test_media_are_in_no_log_and_in_no_answer(
    open_core: Any, open_app: OpenApp, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    http = await open_app(await open_core())
    secret = base64.b64encode(b"a secret that is no picture, and longer than sixty-four characters in all").decode("ascii")
    for url in (f"data:image/png;base64,{secret}", f"data:image/{secret};base64,AA==", f"nothing:{secret}", secret):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": parts}]}
        with caplog.at_level(logging.DEBUG):
            response = await http.post(path, json=body)
        assert response.status_code == 400
        for text in (response.text, "".join(record.getMessage() for record in caplog.records if record.name != "httpx")):
            assert secret[:70] not in text


async def test_a_body_of_tens_of_megabytes_is_taken(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    """Ten megabytes are the framework's own limit, which must not be ours."""
    http = await open_app(await open_engine(slab_nbytes="32MiB"))
    pixels = np.random.default_rng(1).integers(0, 256, (2000, 2200, 3), dtype=np.uint8)
    body = json.dumps(pictures(encoded(pixels, "BMP"))).encode()
    assert len(body) > 15 << 20
    response = await http.post(EMBEDDINGS, content=body)
    assert response.status_code == 200, response.text


@for_each(
    ("headers", "code"),
    [
        ({}, "unsupported_media_type"),
        ({"content-type": "text/plain"}, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "unsupported_media_type"),
        ({"content-type": "text/plain; application/json"}, "unsupported_media_type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "unsupported_content_encoding"),
        ({"content-type": "application/json", "content-encoding": "identity, gzip"}, "unsupported_content_encoding"),
        ({"content-type": "application/json; charset=utf-8", "content-encoding": "identity"}, None),
        ({"content-type": "Application/JSON"}, None),
    ],
)
@for_each("path", [EMBEDDINGS, CHATS])
async def test_a_body_is_json_that_says_so(
    http: httpx.AsyncClient, path: str, headers: dict[str, str], code: str | None
) -> None:
    http.headers.pop("content-type", None)
    body = gzip.compress(b"{}") if "gzip" in headers.get("content-encoding", "") else b"{}"
    response = await http.post(path, content=body, headers=headers)
    if code is None:
        assert error_of(response, 400)["code"] == "invalid_value"  # it was read
    else:
        assert error_of(response, 415)["code"] == code


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_are_not_known_are_named_to_the_caller_and_in_the_log(
    open_core: Any, open_app: OpenApp, chat_of: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    http = await open_app(await open_core())
    body = chat_of(max_tokens=1, stream=stream)
    plain = await http.post(CHATS, json=body)
    assert plain.status_code == 200
    assert "x-shmring-ignored-fields" not in plain.headers
    body["messages"][0]["name"] = "somebody"
    noted = await http.post(CHATS, json=body | {"store": True})
    assert noted.status_code == 200
    assert noted.headers["x-shmring-ignored-fields"] == "messages[0].name, store"
    assert any(message.endswith("were ignored: messages[0].name, store") for message in caplog.messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_missing_of_a_medium_is_told_also_when_it_is_found_again(
    open_core: Any, open_app: OpenApp, chat_of: Any, encoded: Any, stream: bool
) -> None:
    http = await open_app(await open_core())
    cut = encoded(PIXELS[1])[:-30]
    told = "2 of 3: the picture is damaged or truncated: "
    for _ in range(2):
        body = chat_of(PIXELS[0], cut, PIXELS[0], max_tokens=1, stream=stream)
        response = await http.post(CHATS, json=body)
        assert response.status_code == 200
        assert response.headers["x-shmring-media-shortfall"].startswith(told)
    whole = await http.post(CHATS, json=chat_of(PIXELS[0], max_tokens=1, stream=stream))
    assert "x-shmring-media-shortfall" not in whole.headers


async def test_what_is_missing_of_an_embedded_medium_is_told(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    http = await open_app(await open_engine())
    cut = [encoded(PIXELS[1])[:-30] + bytes(number) for number in range(9)]
    response = await http.post(EMBEDDINGS, json=pictures(*cut))
    told = response.headers["x-shmring-media-shortfall"].split(" | ")
    assert [part.split(":")[0] for part in told] == [*(f"{number} of 9" for number in range(1, 9)), "and of 1 more"]
