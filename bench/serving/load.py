"""Sends a load: each request when it is due, whatever became of those before it.

The times at which requests are due come from the seed, before anything is sent; a server that is slow gets the same load as
one that is fast. With a limit of concurrency a request that is due waits for its turn, and its clock starts then. The loop
itself is watched: it is asked to wake up all the time, and how late it does so is how late anything else was noticed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence

import msgspec

from bench.meter import Lag, LoopLag
from bench.serving.client import Client, Exchange
from bench.serving.plan import Load, arrival_times

__all__ = ["Played", "Requests", "play", "warm_up"]

_WARM_UP_CONCURRENCY = 4


class Requests:
    """The bodies of a load's requests, made when they are sent: together they would take as much memory as their media.

    Args:
        load: what they ask for.
        model: of whom.
        parts: JSON of message parts with media, taken in turn; none: text alone.
    """

    def __init__(self, load: Load, model: str, parts: Sequence[msgspec.Raw]) -> None:
        self._load = load
        self._model = model
        self._parts = parts

    def body(self, number: int) -> bytes:
        """Returns a request's body. No two of a load have the same text, so that no cache of prompts answers them."""
        parts = [self._parts[number % len(self._parts)]] if self._parts else []
        text = f"Request {number} of seed {self._load.seed}: what is this?"
        if self._load.endpoint == "embeddings":
            content: list[object] = [*parts] or [{"type": "text", "text": text}]  # each part has an embedding of its own
            return msgspec.json.encode(
                {
                    "model": self._model,
                    "input": [],
                    "messages": [{"role": "user", "content": content}],
                    "encoding_format": "base64",  # as the openai client asks for them
                }
            )
        return msgspec.json.encode(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": self._load.output_tokens,
                "ignore_eos": True,
            }
        )


class Played(msgspec.Struct, frozen=True):
    """What became of a load, and of the generator meanwhile.

    Attributes:
        exchanges: at least one, all ended.
        start: of the load, as a time of ``time.perf_counter``.
        cpu_s: CPU seconds of this process.
        loop_lag: how late its loop was.
    """

    exchanges: list[Exchange]
    start: float
    cpu_s: float
    loop_lag: Lag


async def warm_up(load: Load, client: Client, requests: Requests) -> None:
    """Sends a few requests that do not count. What fails there fails in the load, too, and is reported there."""
    few = asyncio.Semaphore(_WARM_UP_CONCURRENCY)

    async def send(number: int) -> None:
        async with few:
            await client.exchange(requests.body(load.requests + number), time.perf_counter())

    await asyncio.gather(*map(send, range(load.warm_up_requests)))


async def play(load: Load, client: Client, requests: Requests) -> Played:
    """Sends a load, and returns when the last of it has ended."""
    gc.collect()
    watch = LoopLag(asyncio.get_running_loop())
    gc.freeze()  # a collection would walk all that was imported, and be taken for a pause of the server
    try:
        cpu_s, start = time.process_time(), time.perf_counter()
        exchanges = await _send_all(load, client, requests, start)
        return Played(exchanges, start, time.process_time() - cpu_s, watch.lag())
    finally:
        watch.close()
        gc.unfreeze()


async def _send_all(load: Load, client: Client, requests: Requests, start: float) -> list[Exchange]:
    turns: asyncio.Queue[float] = asyncio.Queue()  # when each came free
    for _ in range(load.max_concurrency or load.requests):
        turns.put_nowait(start)

    async def send(number: int, began: float) -> Exchange:
        exchange = await client.exchange(requests.body(number), began)
        turns.put_nowait(exchange.ended)
        return exchange

    async with asyncio.TaskGroup() as group:
        sending = []
        for number, due_s in enumerate(arrival_times(load)):
            due = start + due_s
            if (early_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            began = max(due, await turns.get())
            sending.append(group.create_task(send(number, began)))
    return [task.result() for task in sending]
