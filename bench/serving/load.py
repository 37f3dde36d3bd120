"""Asks servers, so many requests at a time; and what that has shown.

Latencies are in milliseconds, from when a request's turn had come, which is when the one
before it ended: what a caller waits for includes what the generator was late by. The words (TTFT, TPOT, E2E) are those of
``vllm bench serve``.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from bench.serving.client import Client, Exchange
from bench.serving.plan import Load

#: Sent before, four at a time, and not counted: the first requests of a process pay for imports and first touches.
WARM_UP_REQUESTS = 8
_WARM_UP_CONCURRENCY = 4


class Requests(NamedTuple):
    """What a load asks of a model, with the parts of messages (the JSON of media) that requests take in turn, if any."""

    load: Load
    model: str
    parts: Sequence[msgspec.Raw]

    async def warm_up(self, client: Client) -> None:
        """Sends a few requests that do not count."""
        first = self.load.requests
        await ask_all(map(self.body, range(first, first + WARM_UP_REQUESTS)), [[client]] * _WARM_UP_CONCURRENCY)

    async def play(self, client: Client) -> Measurement:
        return await play(map(self.body, range(self.load.requests)), [[client]] * self.load.max_concurrency)

    def body(self, number: int) -> bytes:
        """Returns a request's body. No two of a load have the same text, so that no cache of prompts answers them."""
        content: list[object] = [self.parts[number % len(self.parts)]] if self.parts else []
        text = {"type": "text", "text": f"Request {number}: what is this?"}
        body: dict[str, object] = {"model": self.model}
        if self.load.endpoint == "embeddings":
            content = content or [text]  # each part has an embedding of its own
            body |= {"input": [], "encoding_format": "base64"}  # as the openai client asks for them
        else:
            content = [text, *content]
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            body |= {"max_tokens": self.load.output_tokens, "ignore_eos": True}
        return msgspec.json.encode(body | {"messages": [{"role": "user", "content": content}]})


async def play(bodies: Iterable[bytes], askers: Sequence[Sequence[Client]]) -> Measurement:
    """Asks; see :func:`ask_all` and :func:`measure`, which knows nothing yet of the server.

    Bodies are made when they are sent: together they would take as much memory as their media.
    """
    gc.collect()
    gc.freeze()  # a collection would walk all that was imported, and be taken for a pause of the server
    try:
        cpu_s, start = time.process_time(), time.perf_counter()
        exchanges = await ask_all(bodies, askers)
        return measure(exchanges, start, time.process_time() - cpu_s)
    finally:
        gc.unfreeze()


async def ask_all(bodies: Iterable[bytes], askers: Sequence[Sequence[Client]]) -> list[Exchange]:
    """Asks, as many at a time as there are askers, each by its clients in turn; returns what came, as it came."""
    exchanges: list[Exchange] = []
    waiting, start = iter(bodies), time.perf_counter()

    async def ask(clients: Sequence[Client]) -> None:
        began = start
        for body, client in zip(waiting, itertools.cycle(clients), strict=False):
            exchanges.append(await client.exchange(body, began))
            began = exchanges[-1].ended

    async with asyncio.TaskGroup() as group:
        for clients in askers:
            group.create_task(ask(clients))
    return exchanges


# -- what it has shown ---------------------------------------------------------------------------------------------------


class Latency(msgspec.Struct, frozen=True):
    """A latency over requests, in milliseconds."""

    median_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """Returns it for these numbers; None if there are none."""
        return cls(*map(float, np.percentile(np.asarray(seconds) * 1e3, [50, 99]))) if len(seconds) else None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        generator_cpu_s: of this process. Its loop is one thread: as many seconds as the load lasted would be all it can do.
        cpu_s: CPU seconds of the server's processes meanwhile, by part.
    """

    duration_s: float
    requests: int
    requests_per_s: float
    ttft: Latency | None
    tpot: Latency | None
    e2e: Latency | None
    generator_cpu_s: float
    cpu_s: dict[str, float] = {}


def measure(exchanges: Sequence[Exchange], start: float, generator_cpu_s: float) -> Measurement:
    """Returns what a load has shown, whose requests were answered."""
    chats = [exchange for exchange in exchanges if len(exchange.token_times)]
    duration_s = max(exchange.ended for exchange in exchanges) - start
    return Measurement(
        duration_s=duration_s,
        requests=len(exchanges),
        requests_per_s=len(exchanges) / duration_s,
        ttft=Latency.of([exchange.token_times[0] - exchange.began for exchange in chats]),
        tpot=Latency.of([(e.ended - e.token_times[0]) / (e.output_tokens - 1) for e in chats if e.output_tokens > 1]),
        e2e=Latency.of([exchange.ended - exchange.began for exchange in exchanges]),
        generator_cpu_s=generator_cpu_s,
    )
