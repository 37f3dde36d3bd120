"""A process's end of the socket to its supervisor; the other end is a socket of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shmring.config import RingConfig
from shmring.engine.settings import EngineSettings
from shmring.service import supervision
from shmring.service.supervision import FrontendState, Orders, SupervisorLink
from tests.waiting import eventually

SETTINGS = EngineSettings(
    name="told",
    executor="mine:Executor",
    executor_options={"depth": {"of": [1, 2.5, None]}},
    ring=RingConfig(slab_nbytes="64MiB", allowed_uids=frozenset({1, 2})),
)
STATES = [FrontendState(0, 12, "serving", 0), FrontendState(1, 13, "restarting", 4)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, int]]:
    """The supervisor's end, and the descriptor of the other one."""
    ours, theirs = socket.socketpair()
    with ours:
        yield ours, theirs.detach()


def open_link(ends: tuple[socket.socket, int], heartbeat_s: float = 0.0) -> SupervisorLink:
    supervisor, fd = ends
    supervisor.sendall(msgspec.json.encode(Orders(heartbeat_s, SETTINGS)) + b"\n")
    link, settings = SupervisorLink.open(fd, EngineSettings)
    assert settings == SETTINGS
    assert not os.get_inheritable(fd)
    return link


async def heard(supervisor: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(supervisor, 1 << 20)


def test_a_supervisor_that_has_gone_gives_no_orders(ends: Any) -> None:
    supervisor, fd = ends
    supervisor.sendall(b'{"heartbeat_s": 1')
    supervisor.close()
    with pytest.raises(EOFError, match="the supervisor has gone"):
        SupervisorLink.open(fd, EngineSettings)


async def test_it_shows_that_it_lives_and_says_once_that_it_is_ready(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends, heartbeat_s=0.001)
    supervisor.setblocking(False)
    async with link.held(lambda: None):
        assert set(await heard(supervisor)) == set(b".")
        link.say_ready()
        words = b""
        while not words.endswith(b"r..."):
            words += await heard(supervisor)
        assert words.count(b"r") == 1


async def test_a_loop_that_stands_still_shows(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends, heartbeat_s=0.001)
    supervisor.setblocking(False)
    async with link.held(lambda: None):
        await heard(supervisor)
        with contextlib.suppress(BlockingIOError):
            while supervisor.recv(1 << 20):  # what came beside it
                pass
        time.sleep(0.05)  # fifty heartbeats
        with pytest.raises(BlockingIOError):
            supervisor.recv(1)
        assert await heard(supervisor)


async def test_without_heartbeats_it_says_nothing(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends)
    supervisor.setblocking(False)
    async with link.held(lambda: None):
        link.say_ready()
        assert await heard(supervisor) == b"r"
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            supervisor.recv(1)


async def test_it_knows_how_frontends_are(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends)
    async with link.held(lambda: None):
        assert link.frontends == []
        line = msgspec.json.encode(STATES) + b"\n"
        supervisor.sendall(b"[]\n" + line[:7])
        supervisor.sendall(line[7:])
        await eventually(lambda: link.frontends == STATES)


async def test_the_end_of_the_supervisor_is_told_once(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends)
    losses: list[bool] = []
    async with link.held(lambda: losses.append(True)):
        supervisor.close()
        await eventually(lambda: losses)
        await asyncio.sleep(0)
    assert losses == [True]


@pytest.mark.both_loops
async def test_who_is_ready_after_its_supervisor_has_gone_says_nothing(ends: Any) -> None:
    supervisor, _ = ends
    link = open_link(ends, heartbeat_s=0.001)
    losses: list[bool] = []
    async with link.held(lambda: losses.append(True)):
        supervisor.close()
        await eventually(lambda: losses)
        assert link._writer is not None
        await eventually(link._writer.is_closing)  # a heartbeat has found it out
        link.say_ready()  # uvloop raises RuntimeError for a write to a closed transport


async def test_a_supervisor_that_stands_still_fills_no_memory(ends: Any) -> None:
    supervisor, _ = ends
    supervisor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    link = open_link(ends, heartbeat_s=1e-6)
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    async with link.held(lambda: None):
        writer = link._writer
        assert writer is not None
        await eventually(writer.transport.get_write_buffer_size)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert writer.transport.get_write_buffer_size() <= 2


async def test_what_shmring_drain_says_is_no_signal_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", -1.0)
    stop = supervision.Stop()
    stop.drain()
    stop.drain()
    assert stop.told.is_set()
    stop.tell()
    assert not stop.hurry.is_set()
    stop.tell()
    assert stop.hurry.is_set()
