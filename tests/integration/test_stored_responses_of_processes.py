"""Responses that a server keeps, with real frontends: whichever one is asked next knows them, also after one was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_http_server import Server, serving

pytestmark = pytest.mark.slow  # processes that import torch

BODY: dict[str, Any] = {"model": "shmring-synthetic", "input": "One", "max_output_tokens": 1}
COUNT = 12  # the kernel chooses one of two frontends for each


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place:
        options = ("--slab-nbytes=32MiB", "--executor=synthetic", "--api-server-count=2", "--heartbeat-timeout=0")
        with serving(Path(place), *options) as running:
            yield running
            assert running.stop() == 0


async def test_all_frontends_know_what_one_has_kept(server: Server, http: httpx.AsyncClient) -> None:
    names = [(await http.post("/v1/responses", json=BODY)).json()["id"] for _ in range(COUNT)]
    for name in names:
        going_on = await http.post("/v1/responses", json=BODY | {"previous_response_id": name})
        assert going_on.status_code == 200, going_on.text
        assert (await http.get(f"/v1/responses/{name}")).json()["id"] == name
    deleted = names.pop()
    assert (await http.delete(f"/v1/responses/{deleted}")).status_code == 200
    assert {(await http.get(f"/v1/responses/{deleted}")).status_code for _ in range(COUNT)} == {404}
    for pid in server.frontends:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        for name in names:
            while True:
                with contextlib.suppress(httpx.TransportError):  # frontends that were killed
                    assert (await http.get(f"/v1/responses/{name}")).status_code == 200
                    break
                await asyncio.sleep(0.05)
