"""Files made to cost much, many at a time, sent to ``shmring serve``: they get a 400, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
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

from tests.waiting import cancel

pytestmark = pytest.mark.slow

ATTACKERS = 20
# Of those that are decoded for long, that may be answered while one small picture waits: as many as are decoded at a time. Were
# it in line behind them, it would be nearly all. In seconds, that would depend on what else this machine does.
MOST_ANSWERED_BEFORE = ATTACKERS // 3
PATIENCE_S = 400.0  # of a caller: a second of decoding takes as many as other programs let it


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
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        yield client


def body_of(kind: str, file: bytes) -> bytes:
    medium = {"url": f"data:{'image/jpeg' if kind == 'image' else 'video/webm'};base64,{base64.b64encode(file).decode()}"}
    messages = [{"role": "user", "content": [{"type": f"{kind}_url", f"{kind}_url": medium}]}]
    return json.dumps({"model": http_server.MODEL, "messages": messages}).encode()


async def embed(http: httpx.AsyncClient, body: bytes) -> httpx.Response:
    return await http.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})


def small_picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


async def attack(http: httpx.AsyncClient, hostile: bytes) -> tuple[list[httpx.Response], int]:
    """Sends it many times at once, and small pictures beside it.

    Returns:
        The answers, and how many of them came, at most, while one small picture waited for its own.
    """
    assert (await embed(http, body_of("image", small_picture(0)))).status_code == 200  # a decoder is there
    attackers = [asyncio.create_task(embed(http, hostile)) for _ in range(ATTACKERS)]
    pictures, most = 0, 0
    while not pictures or not all(attacker.done() for attacker in attackers):
        before = sum(attacker.done() for attacker in attackers)
        pictures += 1
        response = await embed(http, body_of("image", small_picture(pictures)))  # one that is not kept: it has to be decoded
        most = max(most, sum(attacker.done() for attacker in attackers) - before)
        assert response.status_code == 200, response.text
    print(f"{pictures} small pictures; {most} of {ATTACKERS} attackers were answered during one of them")
    return [await attacker for attacker in attackers], most


async def all_are_free(http: httpx.AsyncClient, total: int = 4) -> None:
    """Waits until every decoder that was killed is dead."""
    deadline = time.monotonic() + 60
    while (await http.get("/health")).json()["decoders"] != {"total": total, "free": total, "waiting": 0, "waiting_s": 0.0}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_585_kb_of_scans_cost_nobody_anything(http: httpx.AsyncClient) -> None:
    responses, _ = await attack(http, body_of("image", files._many_scans(23_000)))
    for response in responses:
        assert response.status_code == 400
        assert "max_image_scans" in response.json()["error"]["message"], "it was decoded, which takes 39 s"


async def test_clips_that_spend_their_budget_keep_no_picture_waiting(http: httpx.AsyncClient) -> None:
    clip = files._long_clip(220)  # few enough to be let in; two or three seconds each
    responses, most = await attack(http, body_of("video", clip))
    for response in responses:
        assert response.status_code == 400
        assert "max_decode_s" in response.json()["error"]["message"]
    assert most <= MOST_ANSWERED_BEFORE
    await all_are_free(http)


async def test_clips_that_are_decoded_slowly_keep_no_memory_of_the_slab_from_others() -> None:
    """Decoded, each clip takes 3 MB: five of them would fill this slab, and a picture would wait until its 5 s are over."""
    options = ("--slab-nbytes=16MiB", "--api-server-count=1", "--max-decode-time=1", "--slot-timeout=5")
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        http_server.serving(Path(place), *options) as running,
    ):
        async with httpx.AsyncClient(
            base_url=running.url, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            responses, most = await attack(http, body_of("video", files._long_clip(220)))
            assert [response.json()["error"]["code"] for response in responses] == ["invalid_video"] * ATTACKERS
            assert most <= MOST_ANSWERED_BEFORE
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
            base_url=running.url, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            await health_while_all_are_busy(http)


async def health_while_all_are_busy(http: httpx.AsyncClient) -> None:
    body = body_of("video", files._long_clip(220))
    attackers = [asyncio.create_task(embed(http, body)) for _ in range(ATTACKERS)]
    deadline = time.monotonic() + 120
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
    await cancel(*attackers)
    await all_are_free(http, total=2)
    assert (await http.get("/ready")).status_code == 200
