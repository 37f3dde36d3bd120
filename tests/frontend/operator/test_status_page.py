"""The page ``/status`` in a browser: it finds a slot that is stuck, and keeps to its own policy."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

import shmring
from shmring.engine.protocol import EncodeReply
from shmring.engine.scheduler import SchedulerConfig
from shmring.frontend.callers.keys import KeyOwner
from shmring.frontend.operator import status
from tests.waiting import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,  # it starts a browser
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (Debian: apt install chromium)"),
]
LIMIT_MS = 30_000
DESKTOP, PHONE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 400, "height": 800}


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
    open_engine: Any, open_server: Any, body_of: Any, open_page: Any, monkeypatch: pytest.MonkeyPatch
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
        assert not await page.locator("#spending-section, #callers-section").filter(visible=True).count(), "of a ring alone"
        assert await page.locator("#requests").text_content() == "none"
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
    await page.get_by_text(re.compile(r"The engine has not answered for \d+ s: .* What you see is from ")).wait_for()
    assert await page.locator("main").evaluate("main => getComputedStyle(main).opacity") == "0.45", "what is old is grey"
    fresh, _, _ = await open_page(url)
    await fresh.get_by_text(re.compile(r"^The engine has not answered for \d+ s: .*[^0-9:]$")).wait_for()
    assert not await fresh.locator("main").is_visible(), "there is nothing to show"


async def rows_of(page: Any, table: str) -> list[list[str]]:
    """The texts of a table, without its bars."""
    script = "rows => rows.map(row => [...row.children].filter(cell => !cell.ariaHidden).map(cell => cell.textContent))"
    rows: list[list[str]] = await page.locator(f"#{table} tr").evaluate_all(script)
    return rows


@pytest.mark.timeout(180)
async def test_who_costs_most_what_takes_the_time_and_where_requests_stand(
    open_core: Any, open_server: Any, open_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.1)
    engine = await open_core({"step_s": 0.02, "tokens": 100_000}, scheduler_config=SchedulerConfig(max_num_seqs=1))
    core = engine.core
    monkeypatch.setattr(core, "_parts_s", lambda: {"choosing": 0.75 * core.metrics.step_seconds})
    owners = tuple(KeyOwner(name=name, keys=(f"{name}'s",)) for name in ("a<b>lice", "bob"))
    url = await open_server(engine, api_keys=("a<b>lice's", "bob's"), admin_keys=("operator's",), key_owners=owners)
    asked = []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_MS) as http:
        headers = {"authorization": "Bearer a<b>lice's", "x-request-id": "<u>short"}
        body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        for count, (owner, name) in enumerate((("a<b>lice", "first"), ("a<b>lice", "<i>second"), ("bob", "third")), 1):
            headers = {"authorization": f"Bearer {owner}'s", "x-request-id": name}
            body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            asked.append(asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers)))
            await eventually(lambda count=count: len(core._scheduler.all()) == count)
            await eventually(lambda count=count: core.metrics.step_seconds > count)  # whoever came first has used most
        for viewport, scheme in ((DESKTOP, "light"), (NARROW, "dark")):
            page, said, _ = await open_page(url, viewport=viewport, color_scheme=scheme)
            await page.get_by_label("API key").fill("operator's")
            await page.keyboard.press("Enter")
            await page.locator("#requests tbody tr").nth(2).wait_for()
            tiles = dict(
                await page.locator("#tiles > div").evaluate_all(
                    "all => all.map(each => [...each.children].map(part => part.textContent))"
                )
            )
            names = ("running", "seats taken", "preparing form or prompt", "paused: others' turn", "waiting in line")
            assert [tiles[name] for name in names] == ["1", "1 of 1", "0", "1", "1"]
            titles, *rows = await rows_of(page, "requests")
            assert titles[:6] == ["request", "state", "place", "what it waits for, or does", "caller", "prompt tokens"]
            assert await page.locator("#counts").text_content() == "1 running, 1 paused, 1 waiting (a<b>lice 1)"
            assert not {"slab free", "kept"} & tiles.keys(), "memory stands beside the slab"
            by_name = {row[0]: row for row in rows}
            assert by_name["<i>second"][1:5] == ["waiting", "1", "all seats are taken", "a<b>lice"]
            assert sorted(by_name[name][1:4] for name in ("first", "third")) == [
                ["paused", "", "others have their turn"],
                ["running", "", ""],
            ]
            _, _, _, _, caller, prompt_tokens, tokens, spent, *_ = by_name["first"]
            assert (caller, int(prompt_tokens) > 0, int(tokens) > 0) == ("a<b>lice", True, True)
            assert re.fullmatch(r"[0-9.]+ s", spent)
            _, *callers = await rows_of(page, "callers")
            assert sorted((row[0], row[6]) for row in callers) == [("a<b>lice", "2"), ("bob", "1")]  # they take turns
            assert all(re.fullmatch(r"[0-9.]+ s", row[1]) and re.fullmatch(r"[0-9.]+ %", row[4]) for row in callers)
            _, *ended = await rows_of(page, "ended")
            assert [row[1:4] for row in ended] == [["<u>short", "answered", "a<b>lice"]]
            assert re.fullmatch(r"[0-9.]+ s", ended[0][4])
            assert ended[0][6] == "2"
            assert "Choosing tokens takes" in await page.locator("#cause").text_content()
            _, *parts = await rows_of(page, "spending")
            told = [row[1] for row in parts]
            assert [what for what in told if what in ("choosing tokens", "no step ran")] == ["choosing tokens", "no step ran"]
            assert await page.locator("th:not([scope])").count() == 0
            assert await page.evaluate("document.documentElement.scrollWidth") == viewport["width"], (
                "nothing runs over the edge"
            )
            assert [text for text in said if "401" not in text] == []
            await page.close()
        page, _, _ = await open_page(url)
        await page.get_by_label("API key").fill("bob's")
        await page.keyboard.press("Enter")
        await page.get_by_text("These are the requests of bob").wait_for()
        _, *rows = await rows_of(page, "requests")
        assert [(row[0], row[4]) for row in rows] == [("third", "bob")]
        _, *callers = await rows_of(page, "callers")
        assert [row[0] for row in callers] == ["bob"]
        assert await rows_of(page, "ended") == [["none"]], "those of others are not his"
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)


@pytest.mark.timeout(180)
async def test_long_names_and_reasons_leave_all_columns_on_the_page(open_core: Any, open_server: Any, open_page: Any) -> None:
    engine = await open_core({"step_s": 0.02, "tokens": 100_000})
    engine.core._executor.waits_for = lambda _: "its prompt is being read: 1,234,567 of 7,654,321 tokens"
    url = await open_server(
        engine, api_keys=("key",), admin_keys=("operator's",), key_owners=(KeyOwner(name="n" * 64, keys=("key",)),)
    )
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_MS) as http:
        headers = {"authorization": "Bearer key", "x-request-id": "r" * 100}
        body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await eventually(lambda: len(engine.core._scheduler.all()) == 1)
        page, _, _ = await open_page(url, viewport=DESKTOP)
        await page.get_by_label("API key").fill("operator's")
        await page.keyboard.press("Enter")
        await page.get_by_text("its prompt is being read: 1,234,567 of 7,654,321 tokens").wait_for()
        ends = "all => all.map(each => each.getBoundingClientRect().right)"
        for table in ("requests", "callers"):
            assert max(await page.locator(f"#{table} th").evaluate_all(ends)) <= DESKTOP["width"], table
        asked.cancel()
        await asyncio.wait([asked])


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


# Every text of the page: the contrast of its colour to what is behind it, as WCAG 2 has it.
CONTRASTS = """() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = colour => { const [r, g, b] = colour.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = element => { for (let at = element; at; at = at.parentElement) { const c = numbers(getComputedStyle(at).backgroundColor); if (c.length < 4 || c[3]) return c.slice(0, 3); } return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")].filter(each => each.offsetParent && [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
    .map(each => { const [low, high] = [light(numbers(getComputedStyle(each).color).slice(0, 3)), light(behind(each))].sort((a, b) => a - b); return [each.textContent, (high + .05) / (low + .05)]; });
}"""  # noqa: E501


@pytest.mark.timeout(180)
async def test_all_who_read_it_can(open_engine: Any, open_server: Any, open_page: Any) -> None:
    """Those who hear it, who see little contrast, or who have no mouse."""
    url = await open_server(await open_engine())
    for scheme in ("light", "dark"):
        page, said, _ = await open_page(url, viewport=DESKTOP, color_scheme=scheme)
        await page.locator("#clients thead th").first.wait_for()
        headings = page.locator("th")
        assert await headings.count() >= 9
        assert await headings.evaluate_all("all => all.filter(each => each.scope !== 'col').length") == 0
        named = "all => all.filter(each => !each.labels?.length && !each.textContent.trim() && !each.ariaLabel).length"
        assert await page.locator("button, input, select").evaluate_all(named) == 0
        assert (
            await page.locator("table").evaluate_all("all => all.filter(each => !each.closest('[aria-labelledby]')).length")
            == 0
        )
        contrasts = await page.evaluate(CONTRASTS)
        assert len(contrasts) > 30
        assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []
        focused = []
        for _ in range(5):
            await page.keyboard.press("Tab")
            focused.append(
                await page.evaluate("[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]")
            )
        assert focused[0][0] == "pause"
        assert "slab" in [name for name, _ in focused]
        assert {outline for _, outline in focused} == {"solid"}, "one sees where one is"
        assert said == []
        await page.close()
