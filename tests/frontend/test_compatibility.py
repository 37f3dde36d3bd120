"""docs/compatibility.md is true: the application is asked about each row of the tables that it is made of."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import msgspec
import pytest
import torch
from click.testing import CliRunner

import shmring
from shmring.engine.protocol import (
    CAPABILITIES,
    EncodeReply,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    SoundSpec,
)
from shmring.frontend.commands.serve import serve
from shmring.service.vllm_options import ADVICE, OF_ITS_ENGINE
from tests.pages import load_maker
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

make_compatibility = load_maker("make_compatibility")
FIELDS: Mapping[str, Any] = make_compatibility.FIELDS

DESCRIPTION = ModelDescription(
    executor="test",
    model=make_compatibility.MODEL,
    tasks=["encode", "generate", "complete", "tokenize", "transcribe", "translate"],
    input=InputSpec(text=True, sound=SoundSpec("waveform")),
    max_batch_size=8,
    embedding_size=4,
    tools=True,
    template_options=True,
    reasoning_effort=True,
    word_times=True,
    capabilities=list(CAPABILITIES),
)


class Server:
    """The application, and what its engine was sent."""

    def __init__(self) -> None:
        self.http: httpx.AsyncClient
        self._payloads: list[Any] = []

    async def answer(self, claim: shmring.Claim) -> None:
        request = claim.payload
        without_media = {"media": []} if isinstance(request, GenerateRequest) else {}
        self._payloads.append(msgspec.to_builtins(msgspec.structs.replace(request, deadline=None, **without_media)))
        if isinstance(request, EncodeRequest):
            await claim.reply(EncodeReply(torch.eye(4)[: len(request.inputs)]))
        else:
            for index in range(request.sampling.n):
                await claim.reply(GenerateReply("yes", [1], 1, 1, "stop", index=index, reasoning="Hm"))

    async def post(self, route: str, body: Mapping[str, Any]) -> tuple[httpx.Response, Any]:
        """Sends a request; returns its answer, and what can tell it from that of another request."""
        self._payloads.clear()
        path = route.removeprefix("POST ")
        if "/audio/" in route:
            given = {name: (None, value) for name, value in body.items() if value is not None}
            response = await self.http.send(httpx.Request("POST", f"http://test{path}", files=given))
        else:
            response = await self.http.post(path, json=dict(body))
        content = re.sub(r'"(id|item_id|created|created_at)":("[^"]*"|\d+)', "", response.text)
        return response, (list(self._payloads), content)


@pytest.fixture
async def server(open_engine: Any, open_app: OpenApp) -> Server:
    server = Server()
    server.http = await open_app(await open_engine(server.answer, DESCRIPTION), admin_keys=("an-admin-key",))
    return server


def test_the_page_is_what_the_tables_say() -> None:
    assert make_compatibility.PAGE.read_text() == make_compatibility.make_page(), "run: python docs/make_compatibility.py"


async def test_routes_are_there_or_not(server: Server) -> None:
    documented = (await server.http.get("/openapi.json")).json()["paths"]
    undocumented = {"/docs", "/openapi.json"}
    for route in [*make_compatibility.ROUTES, *make_compatibility.REFUSED_ROUTES, *make_compatibility.MISSING_ROUTES]:
        method, path = route.split()
        response = await server.http.request(method, path.format(response_id="x"))
        missing = response.status_code == 404 and response.json()["error"]["code"] == "not_found"
        assert missing == (route in make_compatibility.MISSING_ROUTES), route
        assert response.status_code != 405, route
        assert missing or path in undocumented or method.lower() in documented[path], route


def test_options_of_vllm_are_there_or_refused_with_a_sentence() -> None:
    there = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    assert set(make_compatibility.OPTIONS) <= there
    advice = {**ADVICE, **dict.fromkeys(OF_ITS_ENGINE, "--executor-options")}
    for name, text in advice.items():
        assert f"--{name}" not in there
        for written in (f"--{name}", f"--no-{name}=1", f"--{name.replace('-', '_')}"):
            result = CliRunner().invoke(serve, [written])
            assert result.exit_code == 2, written
            assert text in " ".join(result.output.split()), written


@for_each("route", FIELDS)
async def test_what_works_reaches_the_engine_or_changes_the_answer(server: Server, route: str) -> None:
    fields = FIELDS[route]
    for name, value in fields.works.items():
        base = fields.base | fields.beside.get(name, {})
        _, without = await server.post(route, base)
        if value == make_compatibility.A_RESPONSE:
            value = (await server.post(route, base))[0].json()["id"]
        response, with_it = await server.post(route, base | {name: value})
        assert response.status_code == 200, (name, response.text)
        assert with_it != without, name
        assert "x-shmring-ignored-fields" not in response.headers, name
    for name in fields.required:
        response, _ = await server.post(route, {field: value for field, value in fields.base.items() if field != name})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == name


@for_each("route", FIELDS)
async def test_what_is_taken_or_named_changes_nothing(server: Server, route: str) -> None:
    fields = FIELDS[route]
    for name, value in {**fields.taken, **fields.named}.items():
        base = fields.base | fields.beside.get(name, {})
        _, without = await server.post(route, base)
        response, with_it = await server.post(route, base | {name: value})
        assert response.status_code == 200, (name, response.text)
        assert with_it == without, name
        assert response.headers.get("x-shmring-ignored-fields") == (name if name in fields.named else None)


@for_each("route", FIELDS)
async def test_what_is_refused_is_named_and_documented(server: Server, route: str) -> None:
    fields = FIELDS[route]
    document = (await server.http.get("/openapi.json")).json()
    properties = document["components"]["schemas"][fields.kind.__name__]["properties"]
    for name, value in fields.refused.items():
        response, (payloads, _) = await server.post(route, fields.base | {name: value})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_value", name), name
        assert payloads == [], name
        assert properties[name]["description"].startswith("Not supported"), name
        assert (await server.post(route, fields.base | {name: None}))[0].status_code == 200, name


@for_each("route", FIELDS)
def test_no_field_is_in_two_tables(route: str) -> None:
    fields = FIELDS[route]
    names = [*fields.required, *fields.works, *fields.taken, *fields.refused, *fields.named]
    assert sorted(names) == sorted(set(names))
    assert set(fields.notes) <= set(names)
