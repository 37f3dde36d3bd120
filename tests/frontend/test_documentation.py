"""The OpenAPI document and its page. Whether the document is true: ``test_schema.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.responses import PlainTextResponse

import shmring
from shmring.frontend.documentation import openapi_document
from shmring.frontend.http.cross_origin import CrossOrigin
from shmring.frontend.settings import CorsSettings, FrontendSettings

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_everything_that_it_refers_to_is_there() -> None:
    document = openapi_document(FrontendSettings())
    referenced = references(document)
    assert {f"#/components/schemas/{name}" for name in document["components"]["schemas"]} >= referenced
    assert "#/components/schemas/ErrorEnvelope" in referenced
    json.dumps(document)


def test_keys_are_documented_where_they_are_needed() -> None:
    paths = openapi_document(FrontendSettings(api_keys=("a",)))["paths"]
    protected = {path for path, operations in paths.items() for operation in operations.values() if "security" in operation}
    assert protected == {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/models",
        "/v1/models/{name}",
    }
    assert "security" not in json.dumps(openapi_document(FrontendSettings()))


def test_streams_and_all_failures_are_documented() -> None:
    chat = openapi_document(FrontendSettings())["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(chat["responses"]) == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "501", "503", "504"}


def test_pages_of_other_sites_may_read_each_header_that_is_documented() -> None:
    paths = openapi_document(FrontendSettings(api_keys=("a",)))["paths"].values()
    answers = [answer for path in paths for operation in path.values() for answer in operation["responses"].values()]
    documented = {name for answer in answers for name in answer["headers"]}
    assert "X-Shmring-Media-Shortfall" in documented
    answer = CrossOrigin(PlainTextResponse(), CorsSettings(allowed_origins=("*",))).simple_headers
    assert documented - {"WWW-Authenticate"} == set(answer["Access-Control-Expose-Headers"].split(", "))


async def test_the_page_needs_no_other_server(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine())
    page = await http.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert re.findall(r"""<(?:script|link|img)[^>]*?(?:src|href)=["']?(?!data:)([^"' >]+)""", page.text[:2000]) == []
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https:" not in page.headers["content-security-policy"]
    [address] = re.findall(r"url: '([^']*)',\s*dom_id", page.text)
    document = await http.get(str(httpx.URL("http://test/docs").join(address)))
    assert document.json()["info"]["version"] == shmring.__version__
    assert document.json() == (await http.get("/docs/openapi.json")).json()


def test_a_prefix_that_a_proxy_strips_is_where_the_server_is() -> None:
    assert openapi_document(FrontendSettings(), root_path="/llm")["servers"] == [{"url": "/llm"}]
    assert "servers" not in openapi_document(FrontendSettings())


async def test_its_examples_work_as_they_are(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine())
    operation = (await http.get("/openapi.json")).json()["paths"]["/v1/embeddings"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    answer = await http.post("/v1/embeddings", json=example)
    assert answer.status_code == 200, answer.text


async def test_the_version_is_answered(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine())
    assert (await http.get("/version")).json() == {"version": shmring.__version__}
