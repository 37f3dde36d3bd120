"""Where greenlets stand in for threads, the ends that block are refused: a call of theirs would never return."""

from __future__ import annotations

import _thread
import importlib.util
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmring
from tests.tables import for_each

OPENED: dict[str, Callable[[str], object]] = {
    "connect": lambda path: shmring.threads.connect("test", socket_dir=path),
    "connect to several": lambda path: shmring.threads.connect(["test", "other"], socket_dir=path),
    "serve": lambda path: shmring.threads.serve("new", socket_dir=path, slab_nbytes="8MiB"),
    "join": lambda path: shmring.threads.join("test", 0, socket_dir=path),
}


class Greenlets:
    """What a library puts in place of Python's own, by the name that it gives itself."""

    def __init__(self, module: str) -> None:
        self.__module__ = module


@for_each("opened", OPENED)
@for_each(
    ("module", "name", "stand_in"),
    [
        (_thread, "start_new_thread", "gevent.thread"),
        (_thread, "start_new_thread", "eventlet.green.thread"),
        (queue, "SimpleQueue", "gevent._gevent_cqueue"),
    ],
)
def test_an_end_that_blocks_is_refused_where_threads_are_greenlets(
    opened: str, module: Any, name: str, stand_in: str, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, Greenlets(stand_in))
    library = stand_in.split(".")[0]
    with pytest.raises(shmring.LocalProtocolError, match=rf"{library} has replaced Python's threads.*patch_all\(thread=False"):
        OPENED[opened](str(socket_dir))


PROGRAM = """
import sys
from gevent import monkey
monkey.patch_all(**{name: False for name in sys.argv[3:]})
import asyncio, shmring, torch

what = sys.argv[2]
options = {"socket_dir": sys.argv[1]}
payload = {"x": torch.ones(5_000_000)}

async def main():
    async with shmring.serve("test", **options, slab_nbytes="64MiB") as ring, shmring.connect("test", **options) as client:
        request = asyncio.ensure_future(client.request(payload, timeout=60))
        with await ring.claim() as claim:
            await claim.done(claim.payload["x"].numel())
        print(await request)

if what == "asyncio":
    asyncio.run(main())
else:
    threads = shmring.threads
    with threads.serve("test", **options, slab_nbytes="64MiB") as ring, threads.connect("test", **options) as client:
        submission = client.submit(payload, timeout=60)
        with ring.claim(timeout=60) as claim:
            claim.done(claim.payload["x"].numel())
        print(submission.result(timeout=60))
"""


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed; nothing else needs it")
@pytest.mark.parametrize(
    ("what", "unpatched", "outcome"),
    [
        ("asyncio", (), "5000000"),
        ("threads", ("thread", "queue"), "5000000"),
        ("threads", ("thread",), "LocalProtocolError: gevent has replaced"),
        ("threads", (), "LocalProtocolError: gevent has replaced"),
    ],
)
def test_under_gevents_patches(what: str, unpatched: tuple[str, ...], outcome: str, socket_dir: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(socket_dir), what, *unpatched]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert outcome in run.stdout + run.stderr
    assert (run.returncode == 0) == outcome.isdigit()
