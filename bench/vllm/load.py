"""What ``bench vllm`` measures: ways, servers, and the requests that they get; and asking, so many at a time.

TTFT is the time to the first token, as for ``bench serve``. How long an API server's event loop is held up is seen from
outside, and in the same way whatever the server is: beside the load, ``/health`` is asked for twenty times a second, which
the loop answers without waiting for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import aiohttp
import msgspec
import numpy as np

from bench.meter import process_cpu_s
from bench.vllm.server import Server, picture, question

__all__ = [
    "API_SERVERS",
    "Case",
    "Fleet",
    "KINDS",
    "Kind",
    "LARGE",
    "Measurement",
    "PARALLEL",
    "QUICK",
    "SIDES",
    "WAYS",
    "Way",
    "fleets",
    "for_a_while",
    "full_cases",
    "measure",
    "pixels_mb",
    "warm_up",
]

# -- what is measured --------------------------------------------------------------------------------------------------


#: How a request names its picture. ``jpeg``: as a file that the API server's cache knows; ``uuid``: by its name alone,
#: which the cache knows; ``new``: as a file that nobody has seen, which has to be prepared.
Kind = Literal["jpeg", "uuid", "new"]
KINDS: tuple[Kind, ...] = ("jpeg", "uuid", "new")

#: Of pictures, in pixels: 1, 10.8 and 43.4 MB of bfloat16 when prepared.
SIDES = (416, 1344, 2688)

API_SERVERS = (1, 2)

_REQUESTS: Mapping[Kind, int] = {"jpeg": 24, "uuid": 48, "new": 16}  # a second or two at 43 MB, eight at a time, inline
_SHORTEST_S = 1.25  # of a repetition: who answers sooner is asked for more. In less, a tenth is chance
_TIMES: Mapping[int, int] = {416: 12, 1344: 6, 2688: 1}  # as many of smaller pictures, by side, that are answered sooner


@dataclasses.dataclass(frozen=True)
class Way:
    """How tensors get to the engine core: what vLLM is started with."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()


#: The first is what the others are compared with.
WAYS = {
    "shmring": Way({"SHMRING_VLLM": "1"}),
    "inline": Way(),
    "torch_shm": Way(options=("--mm-tensor-ipc", "torch_shm")),
}


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Servers that are alike but for the way."""

    side: int
    api_servers: int
    engines: int = 1

    @property
    def title(self) -> str:
        """It in words."""
        engines = f", {self.engines} engine cores" if self.engines > 1 else ""
        return f"{pixels_mb(self.side):.0f} MB, {self.api_servers} API server{'s' * (self.api_servers > 1)}{engines}"

    def ways(self, chosen: Sequence[str]) -> list[str]:
        """Which of the chosen ways can serve so: torch_shm has one engine core only."""
        return [way for way in chosen if way != "torch_shm" or self.engines == 1]


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests of one kind to a fleet.

    Attributes:
        fleet: which.
        kind: how pictures are named.
        concurrency: requests at a time.
    """

    fleet: Fleet
    kind: Kind
    concurrency: int

    @property
    def title(self) -> str:
        """It in words."""
        return f"{self.kind}, {self.concurrency} at a time"

    @property
    def requests(self) -> int:
        """Of a repetition, at least."""
        return _REQUESTS[self.kind] * _TIMES[self.fleet.side] // (1 if self.concurrency > 1 else 2)


#: The servers, and those with several engine cores, that most targets speak about.
LARGE, PARALLEL = Fleet(SIDES[-1], 2), Fleet(SIDES[-1], 2, engines=2)
QUICK = [
    Case(LARGE, "jpeg", 8),
    Case(LARGE, "uuid", 8),
    Case(LARGE, "uuid", 1),
    Case(LARGE, "new", 8),
    Case(PARALLEL, "jpeg", 8),
]


def full_cases() -> list[Case]:
    """All of them, by fleet."""
    plain = [Fleet(side, api_servers) for side, api_servers in itertools.product(SIDES, API_SERVERS)]
    cases = [Case(*parts) for parts in itertools.product(plain, KINDS, (1, 8))]
    return [*cases, Case(PARALLEL, "jpeg", 8), Case(PARALLEL, "uuid", 8)]


def fleets(cases: Sequence[Case]) -> dict[Fleet, list[Case]]:
    """Returns the cases of each fleet."""
    return {fleet: [case for case in cases if case.fleet == fleet] for fleet in dict.fromkeys(case.fleet for case in cases)}


def pixels_mb(side: int) -> float:
    """What a picture takes when it is prepared."""
    return side * side * 3 * 2 / 1e6


# -- asking ------------------------------------------------------------------------------------------------------------


_PICTURES = 2  # that are asked about again and again: the cache of each API server has them
_TOKENS = 2
_TIMEOUT_S = 120.0
_PROBE_S = 0.02
_WARM_UP_ROUNDS = 12  # requests for each picture, so that each API server has seen it
_KINDS = ("EngineCore", "APIServer")


class Measurement(msgspec.Struct, frozen=True):
    """One repetition of a case on a server.

    Attributes:
        requests_per_s: that were answered.
        p50_ms, p99_ms: time to the first token.
        lags_ms: how long ``/health`` took beside them, each time.
        cpu_ms: of a request, by kind of process.
        tensors: how many went which way, where shmring carries them.
        errors: requests that failed.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    lags_ms: list[float]
    cpu_ms: dict[str, float]
    tensors: dict[str, int] = {}
    errors: int = 0


async def warm_up(fleet: Fleet, server: Server) -> None:
    """Shows a server the pictures, so that each API server has them in its cache."""
    bodies = [_body(_known(fleet.side, number), f"known-{number}") for number in range(_PICTURES)]
    async with _connected(server, 2 * fleet.api_servers) as sessions:
        await _ask_all(server, bodies * _WARM_UP_ROUNDS, [[session] for session in sessions])


async def measure(case: Case, server: Server) -> Measurement:
    """Asks a server, once."""
    async with _connected(server, max(case.concurrency, case.fleet.api_servers)) as sessions:
        cpu, tensors = _cpu_s(server), server.tensors()
        began_s = time.perf_counter()
        probing = asyncio.create_task(_probe(server))
        try:
            bodies = for_a_while(_bodies(case), case.requests, began_s + _SHORTEST_S)
            askers = [sessions[place :: case.concurrency] for place in range(case.concurrency)]
            ttft_s, errors = await _ask_all(server, bodies, askers)
        finally:
            took_s = time.perf_counter() - began_s
            probing.cancel()
    lags_s = (await asyncio.gather(probing, return_exceptions=True))[0]
    if not ttft_s:
        raise RuntimeError(f"no request was answered: {errors[:1]}")
    return Measurement(
        requests_per_s=len(ttft_s) / took_s,
        p50_ms=_percentile_ms(ttft_s, 50),
        p99_ms=_percentile_ms(ttft_s, 99),
        lags_ms=[round(lag_s * 1e3, 2) for lag_s in lags_s] if isinstance(lags_s, list) else [],
        cpu_ms={kind: (after - cpu[kind]) * 1e3 / len(ttft_s) for kind, after in _cpu_s(server).items()},
        tensors={way: count - tensors.get(way, 0) for way, count in server.tensors().items() if count != tensors.get(way, 0)},
        errors=len(errors),
    )


def for_a_while(bodies: Iterator[bytes], least: int, until_s: float) -> Iterator[bytes]:
    """Yields so many, and more until that time."""
    for number, body in enumerate(bodies):
        if number >= least and time.perf_counter() >= until_s:
            return
        yield body


def _percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3


def _bodies(case: Case) -> Iterator[bytes]:
    for number in itertools.count():
        known = number % _PICTURES
        url = None if case.kind == "uuid" else _known(case.fleet.side, known)
        yield _body(url, uuid.uuid4().hex if case.kind == "new" else f"known-{known}")


_KNOWN: dict[tuple[int, int], str] = {}


def _known(side: int, number: int) -> str:
    """One of the pictures; made once."""
    if (side, number) not in _KNOWN:
        _KNOWN[side, number] = picture(side, number)
    return _KNOWN[side, number]


def _body(url: str | None, name: str) -> bytes:
    return json.dumps(question(url, uuid=name, max_tokens=_TOKENS, stream=True)).encode()


@contextlib.asynccontextmanager
async def _connected(server: Server, count: int) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """Yields sessions of one connection each, that the API servers have in turn.

    All of them listen at one port. Where nothing else happens, the kernel hands out connections in turn; under load whoever has
    a core takes several, and chance decides how fast a server is that computes.
    """
    async with contextlib.AsyncExitStack() as stack:
        sessions = []
        for _ in range(count):
            connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=_TIMEOUT_S)
            session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(_TIMEOUT_S))
            sessions.append(await stack.enter_async_context(session))
            async with session.get(f"http://127.0.0.1:{server.port}/health") as answer:
                await answer.read()
        yield sessions


async def _ask_all(
    server: Server, bodies: Iterable[bytes], askers: Sequence[Sequence[aiohttp.ClientSession]]
) -> tuple[list[float], list[str]]:
    """Asks, as many at a time as there are askers, each over its sessions in turn.

    Returns:
        The times to the first token, and what failed.
    """
    ttft_s: list[float] = []
    errors: list[str] = []
    waiting = iter(bodies)

    async def ask(sessions: Sequence[aiohttp.ClientSession]) -> None:
        for body, session in zip(waiting, itertools.cycle(sessions), strict=False):
            try:
                ttft_s.append(await _first_token_s(session, server.port, body))
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*map(ask, askers))
    return ttft_s, errors


async def _first_token_s(session: aiohttp.ClientSession, port: int, body: bytes) -> float:
    began_s = time.perf_counter()
    first_s = None
    headers = {"content-type": "application/json"}
    async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {(await answer.text())[:200]}")
        async for line in answer.content:
            if first_s is None and line.startswith(b"data: {") and b'"role"' not in line:
                first_s = time.perf_counter() - began_s
    if first_s is None:
        raise RuntimeError("the answer has no token")
    return first_s


async def _probe(server: Server) -> list[float]:
    """Asks for ``/health`` until it is cancelled; returns how long each took."""
    seconds: list[float] = []
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)) as session:
            while True:
                began_s = time.perf_counter()
                async with session.get(f"http://127.0.0.1:{server.port}/health"):
                    seconds.append(time.perf_counter() - began_s)
                await asyncio.sleep(_PROBE_S)
    except asyncio.CancelledError:
        return seconds


def _cpu_s(server: Server) -> Mapping[str, float]:
    """CPU seconds so far of a server's processes, by kind. (With one API server, it is the launcher as well.)"""
    processes = {kind: server.processes(kind) for kind in _KINDS}
    processes["APIServer"] = processes["APIServer"] or [server.launcher]
    return {kind: sum(process_cpu_s(process.pid) for process in of_kind) for kind, of_kind in processes.items()}
