"""The page ``/status`` in a browser: it finds a slot that is stuck, and keeps to its own policy."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

import shmring
from shmring.engine.protocol import EncodeReply
from shmring.frontend import status

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,  # it starts a browser
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (Debian: apt install chromium)"),
]
LIMIT_MS = 30_000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture
async def open_page() -> AsyncIterator[Callable[..., Any]]:
    """``await open_page(url, **options)``: the page, with what its console said and what it asked for."""
    from playwright.async_api import async_playwright  # takes a third of a second

    async with async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        async def open_one(url: str, **options: Any) -> tuple[Any, list[str], set[str]]:
            page = await browser.new_page(**options)
            page.set_default_timeout(LIMIT_MS)
            said: list[str] = []
            asked: set[str] = set()
            page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.add(request.url))
            await page.goto(f"{url}/status")
            return page, said, asked

        yield open_one
        await browser.close()


@pytest.mark.timeout(180)
async def test_a_stuck_slot_is_found_with_its_request(
    open_engine: Any, open_server: Any, body_of: Any, open_page: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.1)
    kept: list[Any] = []

    async def keep(claim: shmring.Claim) -> None:
        engine.ring.inspect()  # as if the request took a second
        kept.append(claim.payload.inputs[0].pixels)
        await claim.reply(EncodeReply(kept[-1].new_zeros((1, 4)).float()))

    engine = await open_engine(keep)
    url = await open_server(engine)
    body = body_of(np.zeros((300, 300, 3), np.uint8))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/v1/embeddings", json=body, headers={"x-request-id": "the-<b>leak"})
        assert answer.status_code == 200, answer.text
    pictures = [(viewport, scheme) for viewport in (DESKTOP, PHONE) for scheme in ("light", "dark")]
    backgrounds = set()
    for viewport, scheme in pictures:
        page, said, asked = await open_page(url, viewport=viewport, color_scheme=scheme)
        row = page.locator("#draining tbody tr")
        await row.wait_for()
        assert "the-<b>leak" in await row.text_content()
        first = await page.locator("#live").text_content()
        assert first.startswith("live, ")
        await page.locator("#slab").focus()
        described = set()
        for _ in range(await page.evaluate("runs().length")):
            await page.keyboard.press("ArrowRight")
            described.add(await page.locator("#run").text_content())
        assert any(re.match(r"left, still viewed: .*; frontend 1 .*; request the-<b>leak, ", text) for text in described)
        assert await page.evaluate("document.documentElement.scrollWidth") == viewport["width"], "nothing runs over the edge"
        backgrounds.add((scheme, await page.evaluate("getComputedStyle(document.body).backgroundColor")))
        assert said == []
        assert all(address.startswith(url) for address in asked)
        await page.get_by_role("button", name="Pause").click()
        assert await page.locator("#live").text_content() == "paused"
        await page.close()
    assert len(backgrounds) == 2
    page, _, _ = await open_page(url)
    await page.locator("#draining tbody tr").wait_for()
    kept.clear()
    await page.locator("#draining-section").wait_for(state="hidden")
    await engine.ring.close()
    await page.get_by_text("the engine does not answer").wait_for()


@pytest.mark.timeout(180)
async def test_a_key_is_asked_for_and_sent(open_engine: Any, open_server: Any, open_page: Any) -> None:
    url = await open_server(await open_engine(), api_keys=("the-key",))
    page, _, asked = await open_page(url)
    await page.get_by_label("API key").fill("wrong")
    await page.keyboard.press("Enter")
    await page.get_by_text("a key is needed").wait_for()
    await page.get_by_label("API key").fill("the-key")
    await page.keyboard.press("Enter")
    await page.get_by_text("live, ").wait_for()
    assert not any("the-key" in address for address in asked)
