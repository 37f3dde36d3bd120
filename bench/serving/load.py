"""Sends a load: each request when it is due, whatever became of those before it; and what that has shown.

The times at which requests are due come from the seed, before anything is sent; a server that is slow gets the same load as
one that is fast. With a limit of concurrency a request that is due waits for its turn, and its clock starts then. The loop
itself is watched: it is asked to wake up all the time, and how late it does so is how late anything else was noticed.

Latencies are those of requests with a whole answer, in milliseconds, from when a request was due and its turn had come: what a
caller waits for includes what the generator was late by. The words are those of ``vllm bench serve``:

- TTFT, time to the first token: until the first event with text came;
- TPOT, time per output token: from there to the end, over the tokens after the first; one number for each request;
- ITL, inter-token latency: each time between two events with text; one number for each token after the first;
- E2E: until the answer was whole.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.meter import Lag, LoopLag
from bench.serving.client import Client, Exchange
from bench.serving.plan import Load, arrival_times

_WARM_UP_CONCURRENCY = 4


# -- sending -------------------------------------------------------------------------------------------------------------


#: Makes the body of a load's request, by its number, when it is sent: together they would take as much memory as their media.
Body = Callable[[int], bytes]


def request_body(load: Load, model: str, parts: Sequence[msgspec.Raw], number: int) -> bytes:
    """Returns a request's body. No two of a load have the same text, so that no cache of prompts answers them.

    Args:
        load, model: what it asks for, of whom.
        parts: JSON of message parts with media, which requests take in turn; none: text alone.
        number: of the request.
    """
    content: list[object] = [parts[number % len(parts)]] if parts else []
    text = {"type": "text", "text": f"Request {number} of seed {load.seed}: what is this?"}
    body: dict[str, object] = {"model": model}
    if load.endpoint == "embeddings":
        content = content or [text]  # each part has an embedding of its own
        body |= {"input": [], "encoding_format": "base64"}  # as the openai client asks for them
    else:
        content = [text, *content]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": load.output_tokens, "ignore_eos": True}
    return msgspec.json.encode(body | {"messages": [{"role": "user", "content": content}]})


async def warm_up(load: Load, client: Client, body: Body) -> None:
    """Sends a few requests that do not count. What fails there fails in the load, too, and is reported there."""
    few = asyncio.Semaphore(_WARM_UP_CONCURRENCY)

    async def send(number: int) -> None:
        async with few:
            await client.exchange(body(load.requests + number), time.perf_counter())

    await asyncio.gather(*map(send, range(load.warm_up_requests)))


async def play(variant: str, load: Load, client: Client, body: Body) -> Measurement:
    """Sends a load, and returns when the last of it has ended; see :func:`measure`, which knows nothing yet of the server."""
    gc.collect()
    watch = LoopLag(asyncio.get_running_loop())
    gc.freeze()  # a collection would walk all that was imported, and be taken for a pause of the server
    try:
        cpu_s, start = time.process_time(), time.perf_counter()
        exchanges = await _send_all(load, client, body, start)
        return measure(variant, exchanges, start, time.process_time() - cpu_s, watch.lag())
    finally:
        watch.close()
        gc.unfreeze()


async def _send_all(load: Load, client: Client, body: Body, start: float) -> list[Exchange]:
    turns: asyncio.Queue[float] = asyncio.Queue()  # when each came free
    for _ in range(load.max_concurrency or load.requests):
        turns.put_nowait(start)

    async def send(number: int, began: float) -> Exchange:
        exchange = await client.exchange(body(number), began)
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


# -- what it has shown ---------------------------------------------------------------------------------------------------


class Latency(msgspec.Struct, frozen=True):
    """A latency over requests or tokens, in milliseconds."""

    count: int
    mean_ms: float
    median_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """Returns it for these numbers; None if there are none."""
        if not len(seconds):
            return None
        milliseconds = np.asarray(seconds) * 1e3
        median_ms, p99_ms = np.percentile(milliseconds, [50, 99])
        return cls(len(seconds), float(milliseconds.mean()), float(median_ms), float(p99_ms))


class Generator(msgspec.Struct, frozen=True):
    """Whether the generator kept up.

    Attributes:
        cpu_s: of its process. Its loop is one thread: as many seconds as the load lasted would be all it can do.
        loop_lag_p99_ms: how late its loop woke up whoever slept.
    """

    cpu_s: float
    loop_lag_p99_ms: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        variant: which server: ``slab``, ``copied``, or ``url`` for one that was there before.
        completed: requests that had a whole answer; rates and latencies are theirs.
        failures: the others, by reason.
        peak_concurrency: most requests in flight at a time.
        cpu_s: CPU seconds of the server's processes meanwhile, by part; empty for one that was there before.
        exchanges: in the order in which they were due.
    """

    variant: str
    duration_s: float
    requests: int
    completed: int
    failures: dict[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    peak_concurrency: int
    generator: Generator
    cpu_s: dict[str, float] = {}
    exchanges: Sequence[Exchange]


def measure(variant: str, exchanges: Sequence[Exchange], start: float, generator_cpu_s: float, lag: Lag) -> Measurement:
    """Returns what a load of at least one request has shown, all of which have ended; start is one of their times."""
    whole = [exchange for exchange in exchanges if exchange.failure is None]
    chats = [exchange for exchange in whole if len(exchange.token_times)]
    duration_s = max(exchange.ended for exchange in exchanges) - start
    return Measurement(
        variant=variant,
        duration_s=duration_s,
        requests=len(exchanges),
        completed=len(whole),
        failures=dict(collections.Counter(exchange.failure for exchange in exchanges if exchange.failure).most_common()),
        requests_per_s=len(whole) / duration_s,
        output_tokens_per_s=sum(exchange.output_tokens for exchange in whole) / duration_s,
        ttft=Latency.of([exchange.token_times[0] - exchange.began for exchange in chats]),
        tpot=Latency.of([(e.ended - e.token_times[0]) / (e.output_tokens - 1) for e in chats if e.output_tokens > 1]),
        itl=Latency.of(np.concatenate([np.diff(exchange.token_times) for exchange in chats]).tolist() if chats else []),
        e2e=Latency.of([exchange.ended - exchange.began for exchange in whole]),
        peak_concurrency=_peak(exchanges),
        generator=Generator(generator_cpu_s, lag.p99_ms),
        exchanges=exchanges,
    )


def _peak(exchanges: Sequence[Exchange]) -> int:
    """Counts who was there; one that ends at the very moment at which another is sent was not there with it."""
    steps = sorted([(exchange.sent, 1) for exchange in exchanges] + [(exchange.ended, -1) for exchange in exchanges])
    return int(np.cumsum([step for _, step in steps]).max())
