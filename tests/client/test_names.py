"""A name is not an identity: whoever finds another engine at the path of the one that was meant leaves it alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import shmring
from tests.waiting import eventually

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

BOTH_NAMES = r"the engine 'other' listens where 'test' was looked for"

Engines = tuple[shmring.Ring, shmring.Ring]


async def echo(claim: shmring.Claim) -> None:
    await claim.reply(claim.payload)


@pytest.fixture
async def engines(serve: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """The engines ``test`` and ``other``. Neither looks whether its socket is where it was: that would mend the names."""
    monkeypatch.setattr("shmring.ring.handshakes._LOOK_S", 3600.0)
    return await serve(echo), await serve(echo, "other")


def rename(socket_dir: Path) -> None:
    (socket_dir / "other.sock").rename(socket_dir / "test.sock")


def link(socket_dir: Path) -> None:
    (socket_dir / "test.sock").unlink()
    (socket_dir / "test.sock").hardlink_to(socket_dir / "other.sock")


async def connect_client(socket_dir: Path) -> object:
    return await shmring.connect("test", socket_dir=str(socket_dir))


async def connect_several(socket_dir: Path) -> object:
    return await shmring.connect(["test"], socket_dir=str(socket_dir))


async def join_worker(socket_dir: Path) -> object:
    return await shmring.join("test", 0, socket_dir=str(socket_dir))


async def inspect(socket_dir: Path) -> object:
    return await shmring.inspect("test", socket_dir=str(socket_dir))


@pytest.mark.parametrize("mistake", [rename, link])
@pytest.mark.parametrize("reach", [connect_client, connect_several, join_worker, inspect])
async def test_who_finds_another_engine_is_told_both_names(
    engines: Engines, socket_dir: Path, mistake: Callable[[Path], None], reach: Callable[[Path], Awaitable[object]]
) -> None:
    _, other = engines
    mistake(socket_dir)
    with pytest.raises(shmring.RemoteProtocolError, match=BOTH_NAMES):
        await asyncio.wait_for(reach(socket_dir), 30)
    await eventually(lambda: not other.statistics().clients and not other.statistics().departed_clients)
    assert not other.statistics().workers


async def test_a_rank_that_is_taken_in_another_engine_is_not_taken_in_ours(engines: Engines, socket_dir: Path) -> None:
    async with shmring.join("other", 0, socket_dir=str(socket_dir)):
        rename(socket_dir)
        with pytest.raises(shmring.RemoteProtocolError, match=BOTH_NAMES):
            await asyncio.wait_for(join_worker(socket_dir), 30)


async def test_who_reconnects_waits_for_the_engine_of_its_name(
    engines: Engines, serve: Any, connect: Any, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = engines
    client = await connect(reconnect=True)
    assert await client.request("before", timeout=30) == "before"
    rename(socket_dir)
    with caplog.at_level(logging.WARNING, "shmring"):
        await ours.close()
        await eventually(lambda: BOTH_NAMES in caplog.text)
    assert not client.connected
    (socket_dir / "test.sock").unlink()
    await serve(echo)
    assert await client.request("after", timeout=30) == "after"
    await eventually(lambda: not other.statistics().clients)
