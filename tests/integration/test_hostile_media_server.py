"""Files made to cost much, many at a time, sent to ``shmring serve``: they get a 400, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

MAX_WAIT_S = 1.0 if len(os.sched_getaffinity(0)) > 1 else 3.0  # for a small picture, beside whatever else this machine does
ATTACKERS = 20


def _module(name: str, path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
files = _module("files_of_media_tests", HERE.parent / "frontend" / "media" / "conftest.py")
http_server = _module("http_server_tests", HERE / "test_http_server.py")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with one frontend, in which a medium may take a second."""
    options = ("--slab-nbytes=256MiB", "--api-server-count=1", "--max-decode-time=1", "--max-body-nbytes=4MiB")
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        http_server.serving(Path(place), *options) as running,
    ):
        yield running.url


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        yield client


def body_of(kind: str, file: bytes) -> bytes:
    medium = {"url": f"data:{'image/jpeg' if kind == 'image' else 'video/webm'};base64,{base64.b64encode(file).decode()}"}
    messages = [{"role": "user", "content": [{"type": f"{kind}_url", f"{kind}_url": medium}]}]
    return json.dumps({"model": http_server.MODEL, "messages": messages}).encode()


async def embed(http: httpx.AsyncClient, body: bytes) -> httpx.Response:
    return await http.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})


def small_picture() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


async def attack(http: httpx.AsyncClient, hostile: bytes) -> tuple[list[httpx.Response], list[float]]:
    """Sends it many times at once; returns the answers, and how long small pictures took meanwhile."""
    small = body_of("image", small_picture())
    assert (await embed(http, small)).status_code == 200  # a decoder is there
    attackers = [asyncio.create_task(embed(http, hostile)) for _ in range(ATTACKERS)]
    waits_s = []
    while not waits_s or not all(attacker.done() for attacker in attackers):
        began_s = time.monotonic()
        response = await embed(http, small)
        waits_s.append(time.monotonic() - began_s)
        assert response.status_code == 200, response.text
    print(f"{len(waits_s)} small pictures, the slowest after {max(waits_s):.2f} s")
    return [await attacker for attacker in attackers], waits_s


async def all_are_free(http: httpx.AsyncClient, total: int = 4) -> None:
    """Waits until every decoder that was killed is dead."""
    deadline = time.monotonic() + 5
    while (await http.get("/health")).json()["decoders"] != {"total": total, "free": total, "waiting": 0, "waiting_s": 0.0}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_585_kb_of_scans_cost_nobody_anything(http: httpx.AsyncClient) -> None:
    began_s = time.monotonic()
    responses, waits_s = await attack(http, body_of("image", files._many_scans(23_000)))
    for response in responses:
        assert response.status_code == 400
        assert "max_image_scans" in response.json()["error"]["message"]
    assert max(waits_s) < MAX_WAIT_S
    assert time.monotonic() - began_s < 20  # and not 20 x 39


async def test_clips_that_spend_their_budget_keep_no_picture_waiting(http: httpx.AsyncClient) -> None:
    clip = files._long_clip(220)  # few enough to be let in; two or three seconds each
    responses, waits_s = await attack(http, body_of("video", clip))
    for response in responses:
        assert response.status_code == 400
        assert "max_decode_s" in response.json()["error"]["message"]
    assert max(waits_s) < MAX_WAIT_S
    await all_are_free(http)


async def test_clips_that_are_decoded_slowly_keep_no_memory_of_the_slab_from_others() -> None:
    """Decoded, each clip takes 3 MB: five of them would fill this slab, and a picture would wait until its 5 s are over."""
    options = ("--slab-nbytes=16MiB", "--api-server-count=1", "--max-decode-time=1", "--slot-timeout=5")
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        http_server.serving(Path(place), *options) as running,
    ):
        async with httpx.AsyncClient(
            base_url=running.url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            responses, waits_s = await attack(http, body_of("video", files._long_clip(220)))
            assert [response.json()["error"]["code"] for response in responses] == ["invalid_video"] * ATTACKERS
            assert max(waits_s) < 3  # a busy machine takes a second
            await all_are_free(http)


async def test_health_says_when_no_decoder_is_free_and_a_caller_that_goes_frees_one() -> None:
    """Of two decoders one takes large media, for two seconds each; eight have a turn, so the last of them waits for 14 s."""
    options = (
        "--slab-nbytes=256MiB",
        "--api-server-count=1",
        "--decoders=2",
        "--max-decode-time=2",
        "--mm-processor-cache-gb=0",
    )
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        http_server.serving(Path(place), *options) as running,
    ):
        async with httpx.AsyncClient(
            base_url=running.url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            await health_while_all_are_busy(http)


async def health_while_all_are_busy(http: httpx.AsyncClient) -> None:
    body = body_of("video", files._long_clip(220))
    attackers = [asyncio.create_task(embed(http, body)) for _ in range(ATTACKERS)]
    deadline = time.monotonic() + 30
    while True:
        health = await http.get("/health")
        assert health.status_code == 200
        decoders = health.json()["decoders"]
        ready = await http.get("/ready")
        if ready.status_code == 503:
            break
        assert time.monotonic() < deadline, decoders
        await asyncio.sleep(0.05)
    assert ready.json()["error"]["code"] == "decoders_busy"
    assert "no decoder is free" in ready.json()["error"]["message"]
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    await all_are_free(http, total=2)
    assert (await http.get("/ready")).status_code == 200
