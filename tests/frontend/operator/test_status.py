"""The page ``/status``, its policy, and its stream of snapshots."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from typing import Any

import httpx
import pytest

import shmring
from shmring.engine.protocol import GenerateReply
from shmring.frontend import app
from shmring.frontend.callers.keys import KeyOwner
from shmring.frontend.operator import status
from shmring.frontend.operator.status import Feed
from tests.frontend.test_inference_chats import GENERATING
from tests.waiting import eventually


async def lines_of(url: str, count: int, key: str | None = None) -> list[Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    stream = httpx.AsyncClient().stream("GET", f"{url}/status/snapshots", headers=headers)
    async with asyncio.timeout(20), stream as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = []
        async for line in response.aiter_lines():
            lines.append(json.loads(line))
            if len(lines) == count:
                break
    return lines


async def test_the_page_loads_nothing_from_elsewhere(open_engine: Any, open_app: Any) -> None:
    http = await open_app(await open_engine())
    page = await http.get("/status")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    linked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    for path in linked:
        if path != "data:,":
            file = await http.get(f"/{path}")
            assert file.status_code == 200, path
            assert "content-security-policy" in file.headers
            assert "http:" not in file.text
            assert "https:" not in file.text
    assert len(linked) == 3
    assert not re.search(r"<script>|<style|style=|\son\w+=", page.text), "the policy forbids what stands in the page itself"


async def test_each_line_is_a_snapshot_of_each_engine(
    open_engine: Any, open_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    engine = await open_engine()
    url = await open_server(engine)
    first, second = await lines_of(url, 2)
    [snapshot] = first.values()
    assert list(first) == list(engine.client.engines) == [snapshot["name"]]
    assert snapshot["statistics"]["clients"] == 1
    assert second["test"]["time_s"] > snapshot["time_s"]


async def test_callers_see_their_own_requests_and_operators_all(
    open_engine: Any, open_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    ended = asyncio.Event()
    claimed: list[dict[str, Any]] = []

    async def wait(claim: shmring.Claim) -> None:
        owner = claim.payload.owner
        claimed.append({"client_id": claim.client_id, "number": claim.request_id, "name": claim.name, "owner": owner})
        await ended.wait()
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    engine = await open_engine(wait, GENERATING)

    def describe() -> dict[str, Any]:
        callers = [{"owner": name, "seconds": 1.0} for name in ("alice", "bob")]
        return {
            "requests": claimed,
            "ended": callers,
            "callers": callers,
            "spending": {"whose": "bob"},
            "line": {"alice": 2, "bob": 1},
        }

    engine.ring.add_to_snapshots(describe)
    owners = tuple(KeyOwner(name=name, keys=(f"{name}'s",)) for name in ("alice", "bob"))
    url = await open_server(engine, api_keys=("alice's", "bob's"), admin_keys=("operator's",), key_owners=owners)
    posted = [
        asyncio.create_task(
            httpx.AsyncClient(timeout=30).post(
                f"{url}/v1/chat/completions",
                json={"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}]},
                headers={"authorization": f"Bearer {name}'s", "x-request-id": "the-same"},
            )
        )
        for name in ("alice", "bob")
    ]
    async with asyncio.timeout(20):
        while len(claimed) < 2:
            await asyncio.sleep(0.01)
    numbers = {each["owner"]: each["number"] for each in claimed}
    seen = {}
    for key in ("alice's", "operator's"):
        (snapshots,) = await lines_of(url, 1, key)
        (snapshot,) = snapshots.values()
        program = snapshot["program"]
        owners_of = [{each["owner"] for each in part} for part in map(program.get, ("requests", "callers", "ended"))]
        told = (program["spending"]["whose"], program.get("seen_by"), program["line"])
        seen[key] = (*owners_of, {each["number"] for each in snapshot["requests"]}, *told)
    alone = {"alice"}
    assert seen["alice's"] == (alone, alone, alone, {numbers["alice"]}, "", "alice", {"alice": 2}), (
        "also where another caller's has the same name"
    )
    assert seen["operator's"] == (
        {"alice", "bob"},
        {"alice", "bob"},
        {"alice", "bob"},
        set(numbers.values()),
        "bob",
        None,
        {"alice": 2, "bob": 1},
    )
    ended.set()
    assert [response.status_code for response in await asyncio.gather(*posted)] == [200, 200]


async def test_viewers_share_what_is_asked_and_nobody_is_asked_without_them(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    engine = await open_engine()
    asked = 0

    async def inspect(name: str) -> Any:
        nonlocal asked
        asked += 1
        return {"asked": asked}

    monkeypatch.setattr(engine.client, "inspect", inspect)
    feed = Feed(engine.client)
    with feed.watched() as first, feed.watched() as second:
        for _ in range(3):
            assert await asyncio.wait_for(first.get(), 5) == await asyncio.wait_for(second.get(), 5)
        before = asked
        await eventually(lambda: asked > before + 2)  # nobody reads, and nothing piles up
        assert first.qsize() == 1
    assert feed._asking is not None
    await asyncio.wait_for(feed._asking, 5)
    with feed.watched() as third:
        assert await asyncio.wait_for(third.get(), 5)
        feed.close()
        assert await asyncio.wait_for(third.get(), 5) is None


async def test_a_stream_ends_where_asking_fails_in_a_way_that_nobody_foresaw(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await open_engine()

    async def inspect(name: str) -> Any:
        raise RuntimeError(name)

    feed = Feed(engine.client)
    with monkeypatch.context() as broken:
        broken.setattr(engine.client, "inspect", inspect)
        with feed.watched() as viewer:
            assert await asyncio.wait_for(viewer.get(), 20) is None
            assert feed._asking is not None
            with pytest.raises(RuntimeError):
                await feed._asking
    with feed.watched() as viewer:
        assert await asyncio.wait_for(viewer.get(), 20), "who watches anew has it asked anew"
    feed.close()


async def test_snapshots_need_a_key_and_the_page_does_not(open_engine: Any, open_app: Any) -> None:
    http = await open_app(await open_engine(), api_keys=("secret",))
    assert (await http.get("/status")).status_code == 200
    assert (await http.get("/status/snapshots")).status_code == 401
    assert (await http.get("/status/snapshots", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_a_head_has_no_lines(open_engine: Any, open_app: Any) -> None:
    http = await open_app(await open_engine())
    async with asyncio.timeout(20):
        response = await http.head("/status/snapshots")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")


async def test_only_so_many_may_watch(open_engine: Any, open_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_MAX_VIEWERS", 0)
    http = await open_app(await open_engine())
    response = await http.get("/status/snapshots")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")


async def test_an_engine_that_has_gone_is_a_line_with_the_reason(open_engine: Any, open_server: Any) -> None:
    engine = await open_engine()
    url = await open_server(engine)
    await engine.ring.close()
    [line] = await lines_of(url, 1)
    assert "no engine listens" in line["test"]["error"]


async def test_an_engine_that_is_silent_is_told_of_with_its_process_and_for_how_long(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    engine = await open_engine()
    feed = Feed(engine.client)
    with feed.watched() as viewer:
        assert (await asyncio.wait_for(viewer.get(), 20))["test"].pid == os.getpid()
        answering = engine.client.inspect

        async def silent(name: str) -> Any:
            raise TimeoutError

        monkeypatch.setattr(engine.client, "inspect", silent)
        told: Any = {}
        while told.get("silent_s", 0.0) < 0.2:
            said = (await asyncio.wait_for(viewer.get(), 20))["test"]
            told = said if isinstance(said, dict) else told
        assert (told["error"], told["pid"]) == ("its process is stopped, stuck or starved", os.getpid())
        monkeypatch.setattr(engine.client, "inspect", answering)
        while isinstance((await asyncio.wait_for(viewer.get(), 20))["test"], dict):
            pass
        monkeypatch.setattr(engine.client, "inspect", silent)
        while not isinstance(again := (await asyncio.wait_for(viewer.get(), 20))["test"], dict):
            pass
        assert again["silent_s"] < told["silent_s"], "it has answered meanwhile"
    feed.close()


async def test_requests_that_a_frontend_prepares_are_seen_with_their_caller(
    open_core: Any, open_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    monkeypatch.setattr(app, "_TELLING_S", 0.01)
    owners = tuple(KeyOwner(name=name, keys=(f"{name}'s",)) for name in ("alice", "bob"))
    url = await open_server(await open_core(), api_keys=("alice's", "bob's"), admin_keys=("operator's",), key_owners=owners)
    _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice's\r\ncontent-type: application/json\r\n"
    )
    writer.write(f'{head}content-length: 100\r\n\r\n{{"model":'.encode())  # its body comes, and does not end

    async def seen(key: str, preparing: int) -> Any:
        async with asyncio.timeout(20):
            while (program := (await lines_of(url, 1, key))[0]["core"]["program"])["preparing"] != preparing:
                pass
        return program

    program = await seen("operator's", 1)
    assert [(each["owner"], each["requests"], each["preparing"]) for each in program["callers"]] == [("alice", 1, 1)]
    assert program["spending"]["cause"].startswith("1 request is being prepared in frontends (")
    assert program["spending"]["whose"] == "1 of those that are being prepared are of alice."
    assert "alice" not in json.dumps((await seen("bob's", 1))["spending"])
    writer.close()
    assert (await seen("operator's", 0))["callers"] == []


async def test_a_frontend_whose_loop_was_late_is_named_with_how_late_and_when(
    open_core: Any, open_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_EACH_S", 0.01)
    monkeypatch.setattr(app, "_TELLING_S", 0.01)
    engine = await open_core()
    engine.client.title = "frontend 7"
    url = await open_server(engine)
    lag_s = 0.0
    async with asyncio.timeout(20):
        while lag_s <= 0.2:
            await asyncio.sleep(0)
            time.sleep(0.3)  # in the loop that answers
            program = (await lines_of(url, 1))[0]["core"]["program"]
            lag_s, ago_s = program["frontend_lags"].get("frontend 7", (0.0, 0.0))
    assert 0 <= ago_s < 30
