"""Routes for operators: who may use them, and what pausing, profiling and aborting do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shmring.engine.protocol import Calls
from shmring.frontend.documentation import openapi_document
from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.settings import FrontendSettings
from tests.tables import for_each
from tests.waiting import eventually

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

MODEL = "shmring-synthetic"
KEY = {"authorization": "Bearer admin"}
ROUTES = [("GET", "/is_paused")]
ROUTES += [("POST", f"/{name}") for name in ("pause", "resume", "start_profile", "stop_profile", "abort_requests")]


@pytest.fixture
async def engine(open_core: Any, tmp_path: Path) -> Any:
    return await open_core({"step_s": 0.001, "tokens": 2}, profiler_dir=str(tmp_path))


@pytest.fixture
async def http(engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    http = await open_app(engine, api_keys=("user",), admin_keys=("admin",))
    http.headers["authorization"] = "Bearer user"
    return http


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}


async def ask(http: httpx.AsyncClient, name: str = "", **fields: Any) -> httpx.Response:
    headers = {"x-request-id": name} if name else {}
    return await http.post("/v1/chat/completions", json=chat(**fields), headers=headers)


# -- who may ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_an_admin_key_there_are_no_such_routes(engine: Any, open_app: OpenApp, method: str, path: str) -> None:
    http = await open_app(engine, api_keys=("user",))
    for key in ("user", "admin", ""):
        answer = await http.request(method, path, headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert path not in openapi_document(FrontendSettings(api_keys=("user",)))["paths"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_other_key_opens_them_and_theirs_opens_nothing_else(http: httpx.AsyncClient, method: str, path: str) -> None:
    for headers in ({"authorization": "Bearer user"}, {"authorization": "Bearer "}, {"authorization": "Bearer admin2"}):
        answer = await http.request(method, path, headers=headers, content=b"nonsense")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": False}
    assert (await http.get("/v1/models", headers=KEY)).status_code == 401
    operation = openapi_document(FrontendSettings(api_keys=("user",), admin_keys=("admin",)))["paths"][path][method.lower()]
    assert operation["security"] == [{"admin_key": []}]


async def test_an_operator_who_hangs_up_within_a_body_is_told_nothing_and_no_bug_is_logged(
    engine: Any, start_app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = await start_app(engine, admin_keys=("admin",))
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer admin")]
    await app({"type": "http", "method": "POST", "path": "/abort_requests", "headers": headers}, receive, send)
    assert not sent
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -- pause --------------------------------------------------------------------------------------------------------------


async def test_while_it_is_paused_requests_wait(http: httpx.AsyncClient, engine: Any) -> None:
    assert (await http.post("/pause", headers=KEY)).json() == {"status": "paused", "traces": []}
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": True}
    assert (await http.get("/ready")).json()["error"]["code"] == "paused"
    assert (await http.get("/health")).status_code == 200
    waiting = asyncio.create_task(ask(http))
    await eventually(lambda: engine.core._scheduler.waiting == 1)
    assert (await http.post("/pause", headers=KEY)).status_code == 200, "twice is once"
    assert not waiting.done()
    assert (await http.post("/resume", headers=KEY)).json()["status"] == "resumed"
    assert (await waiting).status_code == 200
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": False}
    assert (await http.post("/resume", headers=KEY)).status_code == 200


async def test_deadlines_go_on_while_it_is_paused(engine: Any, open_app: OpenApp) -> None:
    http = await open_app(engine, admin_keys=("admin",), request_timeout_s=0.2)
    assert (await http.post("/pause", headers=KEY)).status_code == 200
    answer = await ask(http)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    await eventually(lambda: engine.core._scheduler.waiting == 0)


@for_each(
    ("query", "status"),
    [("", 503), ("?mode=abort", 503), ("?mode=wait", 200), ("?wait_for_inflight_requests=true", 200)],
)
async def test_what_runs_is_aborted_or_waited_for(http: httpx.AsyncClient, engine: Any, query: str, status: int) -> None:
    running = asyncio.create_task(ask(http, max_tokens=300))
    await eventually(lambda: engine.core._scheduler.running == 1)
    assert (await http.post(f"/pause{query}", headers=KEY)).status_code == 200
    assert engine.core._scheduler.running == 0
    answer = await running
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "paused"
    await http.post("/resume", headers=KEY)


async def test_pauses_that_were_given_up_take_no_places_for_calls(
    http: httpx.AsyncClient, engine: Any, open_app: OpenApp
) -> None:
    """A frontend has 64 of these."""
    running = asyncio.create_task(ask(http, max_tokens=100_000))
    await eventually(lambda: engine.core._scheduler.running == 1)
    pausing = [asyncio.create_task(http.post("/pause?mode=wait", headers=KEY)) for _ in range(70)]
    await eventually(lambda: engine.core._paused)
    for task in pausing[1:]:
        task.cancel()
    await asyncio.wait(pausing[1:])
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": True}
    assert not pausing[0].done()
    assert (await http.post("/resume", headers=KEY)).status_code == 200
    assert (await asyncio.wait_for(pausing[0], 20)).status_code == 200
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": False}
    assert (await http.post("/pause", headers=KEY)).status_code == 200
    assert (await running).json()["error"]["code"] == "paused"
    await http.post("/resume", headers=KEY)


@for_each("query", ["mode=keep", "mode=", "mode=abort&mode=x", "clear_cache=true", "x=1", f"{'n' * 5000}=1"])
async def test_what_is_not_known_is_refused(http: httpx.AsyncClient, query: str) -> None:
    answer = await http.post(f"/pause?{query}", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value")
    assert len(answer.text) < 500
    assert (await http.get("/is_paused", headers=KEY)).json() == {"is_paused": False}


# -- abort --------------------------------------------------------------------------------------------------------------


async def test_requests_are_ended_by_name_whoever_has_sent_them(
    http: httpx.AsyncClient, engine: Any, open_app: OpenApp
) -> None:
    other = await open_app(engine, admin_keys=("admin",))
    running = [asyncio.create_task(ask(http, name, max_tokens=100_000)) for name in ("a", "b", "a-1")]
    stream = asyncio.create_task(ask(http, "s", max_tokens=100_000, stream=True))
    await eventually(lambda: engine.core._scheduler.running == 4)
    await eventually(lambda: all(request.first_reply_at for request in engine.core._scheduler.all()))
    answer = await other.post("/abort_requests", json={"request_ids": ["a", "s", "nobody's"]}, headers=KEY)
    assert answer.json() == {"aborted": 2}
    ended = await running[0]
    assert (ended.status_code, ended.json()["error"]["code"]) == (500, "aborted")
    assert ended.headers["x-should-retry"] == "false"
    assert "retry-after" not in ended.headers
    *_, last, end = (await stream).text.split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"]["code"], end) == ("aborted", "")
    assert not running[1].done()
    assert not running[2].done()
    waiting = asyncio.create_task(ask(http, "w"))
    answer = await http.post("/abort_requests", json={"request_ids": ["b", "a-1"]}, headers=KEY)
    assert answer.json() == {"aborted": 2}
    assert [(await task).json()["error"]["code"] for task in running[1:]] == ["aborted", "aborted"]
    assert (await waiting).status_code == 200
    await eventually(lambda: engine.ring.statistics().slots_in_use == 0 and engine.ring.statistics().running == 0)


async def test_a_request_that_waits_is_ended_at_once(http: httpx.AsyncClient, engine: Any) -> None:
    await http.post("/pause", headers=KEY)
    waiting = [asyncio.create_task(ask(http, "w")) for _ in range(2)]  # names need not be unique
    await eventually(lambda: engine.core._scheduler.waiting == 2)
    answer = await http.post("/abort_requests", json={"request_ids": ["w", "w"]}, headers=KEY)
    assert answer.json() == {"aborted": 2}
    assert {(await task).json()["error"]["code"] for task in waiting} == {"aborted"}
    assert engine.core._scheduler.waiting == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_request_whose_media_are_being_prepared_is_ended_whichever_frontend_has_it(
    engine: Any, open_app: OpenApp, path: str
) -> None:
    reached = asyncio.Semaphore(0)

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.release()
        await reader.read()  # until the frontend gives it up
        writer.close()

    async with await asyncio.start_server(be_silent, "127.0.0.1", 0) as host:
        place = "127.0.0.1:" + str(host.sockets[0].getsockname()[1])
        allowed = FetchSettings(allowed_media_domains=(place,), allowed_media_networks=("127.0.0.0/8",))
        asked = await open_app(engine, admin_keys=("admin",))
        other = await open_app(engine, fetch=allowed)
        part = {"type": "image_url", "image_url": {"url": f"http://{place}/never"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}

        async def fetch(name: str) -> httpx.Response:
            return await other.post(path, json=body, headers={"x-request-id": name})

        ended = [asyncio.create_task(fetch("f")) for _ in range(2)]
        others = asyncio.create_task(fetch("g"))
        for _ in range(3):
            await reached.acquire()
        for count in (2, 0):
            answer = await asked.post("/abort_requests", json={"request_ids": ["f", "nobody's"]}, headers=KEY)
            assert answer.json() == {"aborted": count}
        for task in ended:
            response = await task
            assert (response.status_code, response.json()["error"]["code"]) == (500, "aborted")
            assert response.headers["x-should-retry"] == "false"
        assert not others.done()
        answer = await asked.post("/abort_requests", json={"request_ids": ["g"]}, headers=KEY)
        assert answer.json() == {"aborted": 1}
        assert (await others).json()["error"]["code"] == "aborted"
    assert (await ask(other, "f")).status_code == 200, "a later request of the same name goes on"
    await eventually(lambda: engine.ring.statistics().slots_in_use == 0)


async def test_a_frontend_that_does_not_answer_keeps_nobody_waiting(http: httpx.AsyncClient, engine: Any) -> None:
    silent = asyncio.create_task(engine.client.ring.call(Calls.NEXT_ABORTS, 0, 0))
    await asyncio.sleep(0)
    running = asyncio.create_task(ask(http, "a", max_tokens=100_000))
    while not engine.core._scheduler.running:
        await asyncio.sleep(0.001)
    for count in (1, 0, 0):
        answer = await http.post("/abort_requests", json={"request_ids": ["a"]}, headers=KEY)
        assert answer.json() == {"aborted": count}
    token, names = await silent
    assert (names, token > 0) == (["a"], True)
    assert (await running).json()["error"]["code"] == "aborted"


@for_each(
    ("body", "status"),
    [
        *((body, 400) for body in (b"", b"{}", b"[]", b'{"request_ids": ' + b"[" * 5000)),
        *((b'{"request_ids": %s}' % names, 400) for names in (b"[]", b'"a"', b'[""]', b"[1]", b"null")),
        *((json.dumps({"request_ids": names}).encode(), 400) for names in (["a"] * 101, ["a" * 129])),
        (b" " * (65 << 10), 413),
        (json.dumps({"request_ids": ["\U0001f600" * 128] * 100}, ensure_ascii=False).encode(), 200),
    ],
)
async def test_odd_bodies_are_refused(http: httpx.AsyncClient, body: bytes, status: int) -> None:
    answer = await http.post("/abort_requests", content=body, headers=KEY)
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 1000


# -- profile ------------------------------------------------------------------------------------------------------------


async def test_a_profile_is_written(http: httpx.AsyncClient, tmp_path: Path) -> None:
    async def post(path: str) -> tuple[int, Any]:
        answer = await http.post(path, headers=KEY)
        return answer.status_code, answer.json()

    status, body = await post("/stop_profile")
    assert (status, body["error"]["code"]) == (409, "profiler")
    assert await post("/start_profile") == (200, {"status": "profiling", "traces": []})
    status, body = await post("/start_profile")
    assert (status, body["error"]["message"]) == (409, "a profile is being recorded; stop it first")
    assert (await ask(http)).status_code == 200
    status, body = await post("/stop_profile")
    [path] = body["traces"]
    assert (status, body["status"], Path(path).parent) == (200, "profiled", tmp_path)
    assert json.loads(Path(path).read_bytes())["traceEvents"]


async def test_where_there_is_no_place_for_profiles_it_is_said(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core(), admin_keys=("admin",))
    answer = await http.post("/start_profile", headers=KEY)
    assert answer.status_code == 409
    assert "--profiler-dir" in answer.json()["error"]["message"]
