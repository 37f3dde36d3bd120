"""``python -m tests.night --minutes 10``: a night of an operator. A server under mixed load, while everything happens to it.

Each process of it is killed and stopped, one after the other; its log is read by nobody for a while; a scraper reads its
numbers byte by byte; and a second server writes its log to a full disk. A request may fail only if it was there when a process
was killed: whatever began after that is answered, and whatever is only stopped or stalled costs time and no request.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx
import numpy as np

from bench.serving.media import picture_part
from shmring.frontend.commands.serve_process import PROGRAM
from tests.engine.tiny_models import write_tiny_model

_CALLERS = 12
_STOPPED_S = 3.0  # the server itself kills a process that gives no sign of life for longer than its heartbeat
_UNREAD_S = 20.0
_REPLACED_S = 60.0  # until another process stands in the place of one that was killed
_LIMIT_S = 120.0  # for a request: only a hang reaches it
_ASKED = 8  # times, one after the other, until both frontends have answered
_SETTLED_S = 2.0  # between two faults


class _Ended(NamedTuple):
    """A request: when it began and ended, of which kind it was, and what came of it."""

    began: float
    ended: float
    kind: str
    outcome: str


class _Kill(NamedTuple):
    """A process that was killed: when, and when the kernel had taken it apart, which takes some milliseconds."""

    began: float
    ended: float
    title: str


class _Server:
    """A server, whose output goes to a pipe that is read or not, or to a full disk."""

    def __init__(self, directory: Path, name: str, model: Path, output: int) -> None:
        ready, writing = os.pipe()
        options = ["--executor=transformers", f"--model={model}", "--port=0", f"--name={name}", f"--socket-dir={directory}"]
        options += ["--slab-nbytes=128MiB", "--api-server-count=2", "--data-parallel-size=2", "--access-log"]
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM, *options, f"--ready-fd={writing}"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[writing],
            env={**os.environ, "TMPDIR": str(directory)},
        )
        os.close(writing)
        with os.fdopen(ready) as lines:
            line = lines.readline()
        if not line:
            raise click.ClickException(f"the server {name} did not start")
        self.url: str = json.loads(line)["url"]

    def parts(self) -> dict[str, int]:
        """Returns the pids of engines and frontends, by title."""
        found: dict[str, int] = {}
        for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                title = "engine" if b"engine" in command else "frontend" if b"frontend" in command else ""
                if title:
                    found[f"{title} {sum(known.startswith(title) for known in found)}"] = int(pid)
        return found

    def stop(self) -> int:
        """Tells it to end; returns how it did."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_REPLACED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _Reader(threading.Thread):
    """Whoever collects the log, and stalls."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._fd = fd

    def run(self) -> None:
        while self.goes_on.wait() and os.read(self._fd, 1 << 16):
            pass


class _Load:
    """Callers who send requests of all kinds, one after the other."""

    def __init__(self, url: str, seed: int) -> None:
        self.ended: list[_Ended] = []
        self._url = url
        self._chance = random.Random(seed)
        picture = picture_part((60, 60), np.random.default_rng(seed))
        self._kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "chat": ("/v1/chat/completions", self._chat("Hello")),
            "chat with a seed": ("/v1/chat/completions", self._chat("Hello") | {"seed": 5, "temperature": 1}),
            "chat about a picture": ("/v1/chat/completions", self._chat([picture, {"type": "text", "text": "What is it?"}])),
            "stream": ("/v1/chat/completions", self._chat("Tell me") | {"stream": True, "max_tokens": 40}),
            "form": ("/v1/chat/completions", self._chat("Choose") | {"structured_outputs": {"choice": ["yes", "no"]}}),
            "embeddings": ("/v1/embeddings", {"model": "night", "input": ["a text", "another one"]}),
            "tokens": ("/tokenize", {"model": "night", "prompt": "how many?"}),
        }

    @staticmethod
    def _chat(content: Any) -> dict[str, Any]:
        return {"model": "night", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}

    async def caller(self, until: Callable[[], bool], *, keeps_connection: bool) -> None:
        """Sends requests until it is told to end."""
        client = httpx.AsyncClient(base_url=self._url, timeout=_LIMIT_S)
        async with client:
            while not until():
                kind = self._chance.choice(list(self._kinds))
                began = time.monotonic()
                if keeps_connection:
                    outcome = await self._send(client, kind)
                else:
                    async with httpx.AsyncClient(base_url=self._url, timeout=_LIMIT_S) as once:
                        outcome = await self._send(once, kind)
                self.ended.append(_Ended(began, time.monotonic(), kind, outcome))
                await asyncio.sleep(self._chance.expovariate(20))

    async def _send(self, client: httpx.AsyncClient, kind: str) -> str:
        path, body = self._kinds[kind]
        try:
            async with client.stream("POST", path, json=body) as response:
                text = (await response.aread()).decode()
        except httpx.HTTPError as error:
            return type(error).__name__
        if response.status_code != 200:
            return f"{response.status_code} {text[:200]}"
        if body.get("stream") and not text.endswith("data: [DONE]\n\n"):
            return f"a stream that broke off: {text[-200:]}"
        return ""


async def _slow_scraper(url: str) -> None:
    """Reads the numbers as slowly as it can, again and again."""
    host, _, port = url.removeprefix("http://").partition(":")
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            with contextlib.closing(writer):
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: night\r\n\r\n")
                for _ in range(100):
                    if not await reader.read(1):
                        break
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)


class _Night:
    """What happens to a server, one thing after the other."""

    def __init__(self, server: _Server, reader: _Reader, say: Callable[[str], None]) -> None:
        self.kills: list[_Kill] = []
        self._server = server
        self._reader = reader
        self._say = say

    async def faults(self) -> AsyncGenerator[None, None]:
        """Makes one fault after the other happen; each is over when the next one is asked for."""
        for number in itertools.count():
            title = list(self._server.parts())[number % 4] if len(self._server.parts()) == 4 else ""
            actions: list[Callable[[str], Awaitable[None]]] = [self._kill, self._stop]
            for action in actions if title else ():
                await action(title)
                yield
                await asyncio.sleep(_SETTLED_S)
            if number % 4 == 3:
                await self._stall_the_log()
                yield

    async def _kill(self, title: str) -> None:
        pid = self._server.parts()[title]
        self._say(f"{title} (pid {pid}) is killed")
        began = time.monotonic()
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(select.select, [pidfd], [], [])
        finally:
            os.close(pidfd)
        self.kills.append(_Kill(began, time.monotonic(), title))
        ends = time.monotonic() + _REPLACED_S
        while len(parts := self._server.parts()) < 4 or pid in parts.values():
            if time.monotonic() > ends:
                raise click.ClickException(f"nothing stands in the place of {title}")
            await asyncio.sleep(0.1)
        whole = 0
        while whole < _ASKED and time.monotonic() < ends:  # each connection reaches one frontend or the other
            whole = whole + 1 if await self._is_whole() else 0
            await asyncio.sleep(0.05)
        if whole < _ASKED:
            raise click.ClickException(f"the server is not whole again after {title} was killed")

    async def _is_whole(self) -> bool:
        """Asks a frontend whether it is attached to both engines, and knows both frontends."""
        async with httpx.AsyncClient(timeout=_LIMIT_S) as client:
            try:
                health = (await client.get(f"{self._server.url}/health")).json()
            except httpx.HTTPError:
                return False
        frontends = [each["state"] for each in health.get("frontends", [])]
        return list(health.get("engines", {}).values()) == ["running"] * 2 and frontends == ["serving"] * 2

    async def _stop(self, title: str) -> None:
        pid = self._server.parts()[title]
        self._say(f"{title} (pid {pid}) is stopped for {_STOPPED_S:g} s")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _stall_the_log(self) -> None:
        self._say(f"nobody reads the log for {_UNREAD_S:g} s")
        self._reader.goes_on.clear()
        await asyncio.sleep(_UNREAD_S)
        self._reader.goes_on.set()


def _unexplained(ended: list[_Ended], kills: list[_Kill]) -> Iterator[_Ended]:
    """Yields the requests that failed though no process was killed while they were there."""
    for request in ended:
        if request.outcome and not any(request.began <= kill.ended and kill.began <= request.ended for kill in kills):
            yield request


async def _night(minutes: float, seed: int, say: Callable[[str], None]) -> bool:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place:
        directory = Path(place)
        model = write_tiny_model(directory / "night")
        reading, writing = os.pipe()
        server = _Server(directory, "night", model, writing)
        os.close(writing)
        full = os.open("/dev/full", os.O_WRONLY)
        other = _Server(directory, "full", model, full)
        os.close(full)
        reader = _Reader(reading)
        reader.start()
        loads, night = [_Load(each.url, seed) for each in (server, other)], _Night(server, reader, say)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            scraper = group.create_task(_slow_scraper(server.url))
            for number in range(_CALLERS):
                group.create_task(loads[0].caller(is_over.is_set, keeps_connection=number % 2 == 0))
            group.create_task(loads[1].caller(is_over.is_set, keeps_connection=True))
            ends = time.monotonic() + 60 * minutes
            async with contextlib.aclosing(night.faults()) as faults:
                async for _ in faults:
                    if time.monotonic() > ends:
                        break
            is_over.set()
            scraper.cancel()
        codes = server.stop(), other.stop()
        os.close(reading)
    return _report(loads[0].ended, loads[1].ended, night.kills, codes, say)


def _report(
    ended: list[_Ended],
    at_full: list[_Ended],
    kills: list[_Kill],
    codes: tuple[int, int],
    say: Callable[[str], None],
) -> bool:
    failed = [request for request in ended if request.outcome]
    lost = [*_unexplained(ended, kills), *_unexplained(at_full, [])]
    longest_s = max((request.ended - request.began for request in ended), default=0.0)
    say(f"{len(ended):,} requests, the longest took {longest_s:.1f} s; {len(kills)} processes were killed")
    for kind, count in collections.Counter(request.kind for request in ended).items():
        say(f"  {count:,} of kind {kind}")
    say(f"{len(failed)} failed that were there when a process was killed" if not lost else f"{len(failed)} failed")
    say(f"{len(at_full):,} requests to the server whose disk is full")
    say(f"the servers ended with {codes[0]} and {codes[1]}")
    for request in lost[:20]:
        before = [(request.began - kill.ended, kill.title) for kill in kills if kill.ended < request.began]
        since, title = min(before, default=(0.0, "none"))
        say(f"lost: {request.kind}, {since:.2f} s after {title} was killed: {request.outcome}")
    say(f"{len(lost)} requests were lost, and no process had died")
    return not lost and codes == (0, 0)


@click.command()
@click.option("--minutes", default=10.0, type=click.FloatRange(min=0.1), help="How long.")
@click.option("--seed", default=1, type=int, help="Of all that is drawn.")
def night_command(minutes: float, seed: int) -> None:
    """A night of an operator; fails if a request is lost though no process that had it died."""
    if not asyncio.run(_night(minutes, seed, click.echo)):
        raise click.ClickException("requests were lost, or a server did not end well: see above")


if __name__ == "__main__":
    night_command()
