"""Sends a load, so many requests at a time, whatever became of those before; and what that has shown.

Latencies are those of requests with a whole answer, in milliseconds, from when a request's turn had come: what a caller waits
for includes what the generator was late by. The words are those of ``vllm bench serve``:

- TTFT, time to the first token: until the first event with text came;
- TPOT, time per output token: from there to the end, over the tokens after the first; one number for each request;
- E2E: until the answer was whole.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from bench.children import BenchError
from bench.serving.client import Client, Exchange
from bench.serving.plan import Load

#: Sent before, four at a time, and not counted: the first requests of a process pay for imports and first touches.
WARM_UP_REQUESTS = 8
_WARM_UP_CONCURRENCY = 4

#: Makes the body of a load's request, by its number, when it is sent: together they would take as much memory as their media.
Body = Callable[[int], bytes]


def request_body(load: Load, model: str, parts: Sequence[msgspec.Raw], number: int) -> bytes:
    """Returns a request's body. No two of a load have the same text, so that no cache of prompts answers them.

    Requests take the message parts in turn, which are the JSON of media; none: text alone.
    """
    content: list[object] = [parts[number % len(parts)]] if parts else []
    text = {"type": "text", "text": f"Request {number}: what is this?"}
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

    await asyncio.gather(*map(send, range(WARM_UP_REQUESTS)))


async def play(load: Load, client: Client, body: Body) -> Measurement:
    """Sends a load, and returns when the last of it has ended; see :func:`measure`, which knows nothing yet of the server."""
    gc.collect()
    gc.freeze()  # a collection would walk all that was imported, and be taken for a pause of the server
    try:
        cpu_s, start = time.process_time(), time.perf_counter()
        exchanges = await _send_all(load, client, body, start)
        return measure(exchanges, start, time.process_time() - cpu_s)
    finally:
        gc.unfreeze()


async def _send_all(load: Load, client: Client, body: Body, start: float) -> list[Exchange]:
    turns: asyncio.Queue[float] = asyncio.Queue()  # when each came free
    for _ in range(load.max_concurrency):
        turns.put_nowait(start)

    async def send(number: int, began: float) -> Exchange:
        exchange = await client.exchange(body(number), began)
        turns.put_nowait(exchange.ended)
        return exchange

    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(send(number, await turns.get())) for number in range(load.requests)]
    return [task.result() for task in sending]


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
        completed: requests that had a whole answer; rates and latencies are theirs.
        failures: the others, by reason.
        generator_cpu_s: of this process. Its loop is one thread: as many seconds as the load lasted would be all it can do.
        cpu_s: CPU seconds of the server's processes meanwhile, by part.
    """

    duration_s: float
    requests: int
    completed: int
    failures: dict[str, int]
    requests_per_s: float
    ttft: Latency | None
    tpot: Latency | None
    e2e: Latency | None
    generator_cpu_s: float
    cpu_s: dict[str, float] = {}


def measure(exchanges: Sequence[Exchange], start: float, generator_cpu_s: float) -> Measurement:
    """Returns what a load has shown, whose requests have ended; raises BenchError if none of them was answered."""
    whole = [exchange for exchange in exchanges if exchange.failure is None]
    failures = collections.Counter(exchange.failure for exchange in exchanges if exchange.failure)
    if not whole:
        raise BenchError(f"no request was answered: {', '.join(failures)}")
    chats = [exchange for exchange in whole if len(exchange.token_times)]
    duration_s = max(exchange.ended for exchange in exchanges) - start
    return Measurement(
        duration_s=duration_s,
        requests=len(exchanges),
        completed=len(whole),
        failures=dict(failures.most_common()),
        requests_per_s=len(whole) / duration_s,
        ttft=Latency.of([exchange.token_times[0] - exchange.began for exchange in chats]),
        tpot=Latency.of([(e.ended - e.token_times[0]) / (e.output_tokens - 1) for e in chats if e.output_tokens > 1]),
        e2e=Latency.of([exchange.ended - exchange.began for exchange in whole]),
        generator_cpu_s=generator_cpu_s,
    )


def failures(name: str, runs: Iterable[Measurement]) -> Iterator[str]:
    """Yields a sentence for each reason for which requests have failed in runs of that name."""
    for reason, count in sum((collections.Counter(run.failures) for run in runs), collections.Counter[str]()).items():
        yield f"{name}: {count:,} requests failed, which are in no rate and no latency: {reason}"
