"""Keys: what is let through, what is refused and how, and which routes need none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def http(open_core: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_core(), api_keys=("first", "second"))


@for_each("value", ["Bearer first", "Bearer second", "bearer first", "BEARER  first "])
async def test_each_key_opens(http: httpx.AsyncClient, value: str) -> None:
    assert (await http.get("/v1/models", headers={"authorization": value})).status_code == 200


@pytest.mark.parametrize(
    "value",
    [None, "", "first", "Bearer", "Bearer ", "Bearer third", "Bearer firs", "Bearer first2", "Basic first", "Bearer a first"],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/embeddings"), ("POST", "/v1/chat/completions")]
)
async def test_without_a_key_the_answer_reveals_nothing(
    http: httpx.AsyncClient, value: str | None, method: str, path: str
) -> None:
    headers = {} if value is None else {"authorization": value}
    response = await http.request(method, path, headers=headers, content=b"nonsense" if method == "POST" else None)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["x-request-id"]


async def test_two_headers_are_none(http: httpx.AsyncClient) -> None:
    headers = [("authorization", "Bearer first"), ("authorization", "Bearer first")]
    assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_a_body_is_not_read_without_a_key(http: httpx.AsyncClient) -> None:
    async def never() -> Any:
        raise AssertionError("it was read")
        yield b""

    response = await http.post("/v1/embeddings", content=never(), headers={"content-length": "5"})
    assert response.status_code == 401


@for_each("path", ["/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json", "/docs/openapi.json"])
async def test_monitoring_needs_no_key(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200
