"""``shmring drain`` beside an engine that this file plays: one that runs elsewhere, or that stops between two looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import shmring
from shmring.frontend.commands import drain
from shmring.processes.process import Process
from shmring.snapshot import RingSnapshot

_LIMIT_S = 60.0  # which only a hang reaches
_LOOKS = 3  # before a server is told to end: at any engine of the server, at those that are paused, at one that answers


@pytest.fixture
async def snapshot(socket_dir: Path) -> RingSnapshot:
    """What an engine of a server says."""
    async with shmring.serve("real", slab_nbytes="2MiB", socket_dir=str(socket_dir)) as ring:
        ring.add_to_snapshots(lambda: {"server": {"name": "played", "engines": 1, "pid": os.getpid()}})
        snapshot = await shmring.inspect("real", socket_dir=str(socket_dir))
    return msgspec.structs.replace(snapshot, name="played")


@contextlib.contextmanager
def playing(path: Path, snapshot: RingSnapshot, looks: int, last: Callable[[], object]) -> Iterator[None]:
    """Plays an engine that answers a few looks, and accepts no more.

    Args:
        path: of its socket.
        snapshot: its answer.
        looks: how many.
        last: is called before the last answer.
    """
    answer = msgspec.json.encode(snapshot)

    def play() -> None:
        for look in range(looks):
            connected, _ = listener.accept()
            with connected:
                connected.recv(4096)
                if look == looks - 1:
                    last()
                connected.sendall(struct.pack("<I", len(answer)) + answer)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        listener.settimeout(_LIMIT_S)
        thread = threading.Thread(target=play)
        thread.start()
        yield
        thread.join()


async def drained(socket_dir: Path) -> int:
    """Ends the server, as the command does it; returns the exit code."""
    run = asyncio.to_thread(drain.drain, "played", str(socket_dir), _LIMIT_S, engine=None, frontend=None)
    return await asyncio.wait_for(run, _LIMIT_S)


async def test_an_engine_that_stops_between_two_looks_is_not_waited_for(
    socket_dir: Path, snapshot: RingSnapshot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many connections wait for it as may."""
    path = socket_dir / "played.sock"
    with contextlib.ExitStack() as waiting:

        def fill() -> None:
            monkeypatch.setattr(drain, "_ANSWER_S", 0.01)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connected = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    connected.setblocking(False)
                    connected.connect(os.fspath(path))

        with playing(path, snapshot, _LOOKS, fill):
            assert await drained(socket_dir) == 1
    assert f"the server (pid {os.getpid()}) has just ended" in capsys.readouterr().err


async def test_what_is_waited_for_is_said_once(
    socket_dir: Path, snapshot: RingSnapshot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long it takes: ten seconds pass at each look at the process."""
    real_time, passed_s = asyncio.BaseEventLoop.time, 0.0

    class Looked(Process):
        @property
        def lives(self) -> bool:
            nonlocal passed_s
            passed_s += 10.0
            return passed_s < 100.0

    monkeypatch.setattr(drain, "Process", Looked)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: real_time(loop) + passed_s)
    with subprocess.Popen(["sleep", "60"]) as server:  # which the signal ends
        snapshot.program["server"]["pid"] = server.pid
        with playing(socket_dir / "played.sock", snapshot, _LOOKS + 1, lambda: None):
            code = await asyncio.to_thread(drain.drain, "played", str(socket_dir), 1000.0, engine=None, frontend=None)
    said = f"waiting for the server (pid {server.pid}) to end\nthe server has ended\n"
    assert (code, capsys.readouterr().err) == (0, said)


async def test_an_engine_of_another_container_is_not_told_to_end(
    socket_dir: Path, snapshot: RingSnapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pid is another process's here."""
    elsewhere = msgspec.structs.replace(snapshot, pid=os.getppid())
    with playing(socket_dir / "played.sock", elsewhere, 1, lambda: None):
        assert await drained(socket_dir) == 1
    assert "the engine played runs in another container" in capsys.readouterr().err
