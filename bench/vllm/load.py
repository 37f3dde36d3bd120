"""What ``bench vllm`` measures: ways, servers, and the requests that they get; and asking, so many at a time.

How long an API server's event loop is held up is seen from outside, and in the same way whatever the server is: beside the
load, ``/health`` is asked for twenty times a second, which the loop answers without waiting for anything.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from bench.command_line import until_terminated
from bench.repetitions import Number
from bench.servers import picture
from bench.serving import load
from bench.serving.client import Client
from bench.vllm.server import Server, question

# -- what is measured --------------------------------------------------------------------------------------------------


#: How a request names its picture. ``jpeg``: as a file that the API server's cache knows; ``uuid``: by its name alone,
#: which the cache knows; ``new``: as a file that nobody has seen, which has to be prepared.
Kind = Literal["jpeg", "uuid", "new"]

#: Of pictures, in pixels: 1, 10.8 and 43.4 MB of bfloat16 when prepared.
SIDES = (416, 1344, 2688)

_REQUESTS: Mapping[Kind, int] = {"jpeg": 24, "uuid": 48, "new": 16}  # a second or two at 43 MB, eight at a time, inline
_SHORTEST_S = 1.25  # of a repetition: who answers sooner is asked for more. In less, a tenth is chance
_TIMES: Mapping[int, int] = {416: 12, 1344: 6, 2688: 1}  # as many of smaller pictures, by side, that are answered sooner


class Way(NamedTuple):
    """How tensors travel: what vLLM is started with.

    Attributes:
        environment, options: of ``vllm serve``.
        value: of one of vLLM's options for media, which not every version has; empty: each version has this way.
        serves_several: whether it allows several engine cores.
    """

    environment: Mapping[str, str] = {}
    options: Sequence[str] = ()
    value: str = ""
    serves_several: bool = True

    def is_in(self, installation: Path) -> bool:
        """Whether the vLLM of an environment has this way, as its sources say."""
        sources = installation.glob("lib/python*/site-packages/vllm/config/multimodal.py")
        return not self.value or any(f'"{self.value}"' in path.read_text() for path in sources)


#: The first is what the others are compared with. Two are proposals for vLLM (#51349, #49462), and are measured as soon as it
#: has them; ``cuda_ipc`` needs a GPU.
WAYS = {
    "shmring": Way({"SHMRING_VLLM": "1"}),
    "inline": Way(),
    "torch_shm": Way(options=("--mm-tensor-ipc", "torch_shm"), serves_several=False),
    "paged_shm": Way(options=("--mm-processor-cache-type", "paged_shm"), value="paged_shm"),
    "cuda_ipc": Way(
        options=("--mm-processor-device", "cuda", "--mm-tensor-ipc", "cuda_ipc"), value="cuda_ipc", serves_several=False
    ),
}


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Servers that are alike but for the way."""

    side: int
    api_servers: int
    engines: int = 1

    @property
    def title(self) -> str:
        engines = f", {self.engines} engine cores" if self.engines > 1 else ""
        prepared_mb = self.side * self.side * 3 * 2 / 1e6  # of a picture
        return f"{prepared_mb:.0f} MB, {self.api_servers} API server{'s' * (self.api_servers > 1)}{engines}"

    @property
    def ways(self) -> list[str]:
        """Which ways can serve so."""
        return [name for name, way in WAYS.items() if way.serves_several or self.engines == 1]


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests of one kind to a fleet, so many at a time."""

    fleet: Fleet
    kind: Kind
    concurrency: int

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.concurrency} at a time"

    @property
    def requests(self) -> int:
        """Of a repetition, at least."""
        return _REQUESTS[self.kind] * _TIMES[self.fleet.side] // (1 if self.concurrency > 1 else 2)


#: The servers, and those with several engine cores, that most targets speak about.
LARGE, PARALLEL = Fleet(SIDES[-1], 2), Fleet(SIDES[-1], 2, engines=2)
#: What is measured; new pictures of all sizes.
CASES = [
    Case(LARGE, "jpeg", 8),
    Case(LARGE, "uuid", 8),
    Case(LARGE, "uuid", 1),
    Case(LARGE, "new", 8),
    Case(PARALLEL, "jpeg", 8),
    *(Case(Fleet(*parts), "new", at_a_time) for *parts, at_a_time in itertools.product(SIDES[:-1], (1, 2), (1, 8))),
]


def fleets(cases: Sequence[Case]) -> dict[Fleet, list[Case]]:
    return {fleet: [case for case in cases if case.fleet == fleet] for fleet in dict.fromkeys(case.fleet for case in cases)}


# -- asking ------------------------------------------------------------------------------------------------------------


_PICTURES = 2  # that are asked about again and again: the cache of each API server has them
_TOKENS = 2
_TIMEOUT_S = 120.0
_PROBE_S = 0.02
_WARM_UP_ROUNDS = 12  # requests for each picture, so that each API server has seen it
_KINDS = ("EngineCore", "APIServer")


class Measurement(load.Measurement, frozen=True, kw_only=True):
    """One repetition of a case on a server.

    Attributes:
        lags_ms: how long ``/health`` took beside it, each time.
        cpu_ms: of a request, by kind of process.
        tensors: how many went which way, where shmring carries them.
    """

    lags_ms: list[float]
    cpu_ms: dict[str, float]
    tensors: dict[str, int]


def cpu_of(kind: str) -> Number:
    """Milliseconds of CPU of a request, of processes of a kind."""
    return lambda run: run.cpu_ms[kind]


def warm_up(fleet: Fleet, server: Server) -> None:
    """Shows a server the pictures, so that each API server has them in its cache."""
    until_terminated(_warm_up(fleet, server))


async def _warm_up(fleet: Fleet, server: Server) -> None:
    bodies = [_body(_known(fleet.side, number), f"known-{number}") for number in range(_PICTURES)]
    async with _connected(server, 2 * fleet.api_servers) as clients:
        await load.ask_all(bodies * _WARM_UP_ROUNDS, [[client] for client in clients])


def measure(case: Case, server: Server) -> Measurement:
    return until_terminated(_measure(case, server))


async def _measure(case: Case, server: Server) -> Measurement:
    lags_ms: list[float] = []
    async with _connected(server, max(case.concurrency, case.fleet.api_servers)) as clients:
        cpu_s, tensors = server.cpu_s_of(*_KINDS), collections.Counter(server.tensors())
        probing = asyncio.create_task(_probe(server, lags_ms))
        try:
            bodies = for_a_while(_bodies(case), case.requests, time.perf_counter() + _SHORTEST_S)
            found = await load.play(bodies, [clients[place :: case.concurrency] for place in range(case.concurrency)])
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
    return Measurement(
        **msgspec.structs.asdict(found),
        lags_ms=lags_ms,
        cpu_ms={kind: (after - cpu_s[kind]) * 1e3 / found.requests for kind, after in server.cpu_s_of(*_KINDS).items()},
        tensors=dict(collections.Counter(server.tensors()) - tensors),
    )


def for_a_while(bodies: Iterator[bytes], least: int, until_s: float) -> Iterator[bytes]:
    """Yields so many, and more until that time."""
    for number, body in enumerate(bodies):
        if number >= least and time.perf_counter() >= until_s:
            return
        yield body


def _bodies(case: Case) -> Iterator[bytes]:
    for number in itertools.count():
        known = number % _PICTURES
        url = None if case.kind == "uuid" else _known(case.fleet.side, known)
        yield _body(url, uuid.uuid4().hex if case.kind == "new" else f"known-{known}")


_known = functools.cache(picture)  # by side and number


def _body(url: str | None, name: str) -> bytes:
    return json.dumps(question(url, uuid=name, max_tokens=_TOKENS, stream=True)).encode()


@contextlib.asynccontextmanager
async def _connected(server: Server, count: int) -> AsyncIterator[list[Client]]:
    """Yields clients of one connection each, that the API servers have in turn.

    All of them listen at one port. Where nothing else happens, the kernel hands out connections in turn; under load whoever has
    a core takes several, and chance decides how fast a server is that computes.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            client = Client(server.url, "chat", _TIMEOUT_S, connections=1, keep_alive_s=_TIMEOUT_S)
            clients.append(await stack.enter_async_context(client))
            await client.get("/health")
        yield clients


async def _probe(server: Server, lags_ms: list[float]) -> None:
    """Asks for ``/health`` on new connections until it is cancelled, and notes how long each took."""
    async with Client(server.url, "chat", _TIMEOUT_S, keep_alive_s=0.0) as client:
        while True:
            began_s = time.perf_counter()
            await client.get("/health")
            lags_ms.append(round((time.perf_counter() - began_s) * 1e3, 2))
            await asyncio.sleep(_PROBE_S)
