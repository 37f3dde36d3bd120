"""What answers say to browsers: the same as with Starlette's own middleware, whoever makes them."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from shmring.frontend.http.cross_origin import CrossOrigin
from shmring.frontend.settings import CorsSettings
from tests.tables import for_each

ORIGIN = "https://chat.example.org"


async def cors_headers_of(app: Any, method: str, headers: dict[str, str]) -> dict[str, str]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.request(method, "/", headers=headers)
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@for_each(
    ("allowed_origins", "allow_credentials"),
    list(itertools.product([(ORIGIN,), ("*",), ("https://b.org", ORIGIN)], [False, True])),
)
async def test_an_allowed_origin_is_told_what_starlette_tells_it(
    allowed_origins: tuple[str, ...], allow_credentials: bool
) -> None:
    cors = CorsSettings(allowed_origins=allowed_origins, allow_credentials=allow_credentials)
    ours = CrossOrigin(PlainTextResponse("answer"), cors)
    theirs = CORSMiddleware(
        PlainTextResponse("answer"),
        allow_origins=allowed_origins,
        allow_credentials=allow_credentials,
        allow_methods=("*",),
        allow_headers=("*",),
        expose_headers=dict(ours.simple_headers)["Access-Control-Expose-Headers"].split(", "),
    )
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    for method, headers in (("GET", {"origin": ORIGIN}), ("OPTIONS", preflight)):
        expected = await cors_headers_of(theirs, method, headers)
        assert expected["access-control-allow-origin"] in (ORIGIN, "*")
        assert await cors_headers_of(ours, method, headers) == expected
    told = dict(ours.headers_for([(b"origin", ORIGIN.encode())]))
    assert {name.decode(): value.decode() for name, value in told.items() if name != b"vary"} == await cors_headers_of(
        theirs, "GET", {"origin": ORIGIN}
    )


@pytest.mark.parametrize("allowed_origins", [(), ("https://b.org",)])
@pytest.mark.parametrize("headers", [[], [(b"origin", ORIGIN.encode())], [(b"origin", b"\xff")]])
def test_nobody_else_is_told_anything(allowed_origins: tuple[str, ...], headers: list[tuple[bytes, bytes]]) -> None:
    cross_origin = CrossOrigin(PlainTextResponse("answer"), CorsSettings(allowed_origins=allowed_origins))
    assert cross_origin.headers_for(headers) == ([(b"vary", b"Origin")] if allowed_origins else [])


def test_an_origin_is_repeated_as_it_came() -> None:
    """Where all may call with their cookies, it may be any bytes."""
    cross_origin = CrossOrigin(PlainTextResponse("answer"), CorsSettings(allowed_origins=("*",), allow_credentials=True))
    assert (b"access-control-allow-origin", b"\xff") in cross_origin.headers_for([(b"origin", b"\xff")])
