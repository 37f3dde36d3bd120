"""A frontend whose engine is on another host: pictures are decoded here, and sent from here into a slot there."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions
from shmring.frontend.app import create_app
from shmring.frontend.settings import FrontendSettings
from tests.frontend.conftest import _lifespan
from tests.gateway.test_far_clients import TOKEN
from tests.waiting import cancel


def picture_of(color: tuple[int, int, int]) -> str:
    file = io.BytesIO()
    Image.new("RGB", (640, 480), color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def test_a_picture_is_answered_and_the_end_of_the_engine_is_an_error(socket_dir: Path) -> None:
    executor = create_executor("fingerprints", ExecutorOptions(model=None, mm_processor_kwargs={}, options={}))
    options: dict[str, Any] = {"socket_dir": str(socket_dir), "slab_nbytes": "64MiB", "listen": "127.0.0.1:0", "token": TOKEN}
    async with await EngineCore.create("far", executor, **options) as core:
        running = asyncio.create_task(core.run())
        async with shmring.connect(core.ring.address, token=TOKEN, reconnect=True) as ring:
            app = create_app(EngineClient(ring), FrontendSettings())
            transport = httpx.ASGITransport(app)
            async with _lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://far", timeout=60) as http:
                url = {"type": "image_url", "image_url": {"url": picture_of((9, 99, 200))}}
                asked = {"model": "shmring-fingerprints", "messages": [{"role": "user", "content": [url]}]}
                answer = await http.post("/v1/embeddings", json=asked)
                assert answer.status_code == 200, answer.text
                assert any(answer.json()["data"][0]["embedding"])
                assert core.ring.statistics().finished == 1
                await cancel(running)
                await core.ring.close()
                answer = await http.post("/v1/embeddings", json=asked)
                assert answer.status_code == 503, answer.text
