"""What a load has shown: throughput, latencies, failures by reason, and who was busy meanwhile.

Latencies are those of requests with a whole answer, in milliseconds, from when a request was due and its turn had come: what a
caller waits for includes what the generator was late by. The words are those of ``vllm bench serve``:

- TTFT, time to the first token: until the first event with text came;
- TPOT, time per output token: from there to the end, over the tokens after the first; one number for each request;
- ITL, inter-token latency: each time between two events with text; one number for each token after the first;
- E2E: until the answer was whole.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import msgspec
import numpy as np

from bench.serving.client import Exchange
from bench.serving.load import Played

__all__ = ["Generator", "Latency", "Measurement", "Request", "measure"]


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
        loop_lag_p99_ms, loop_lag_max_ms: how late its loop woke up whoever slept.
        late_p99_ms: from when a request was due, and its turn had come, to its sending.
    """

    cpu_s: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    late_p99_ms: float


class Request(msgspec.Struct, frozen=True):
    """One request; times in seconds from the start of the load."""

    began_s: float
    sent_s: float
    first_token_s: float | None
    ended_s: float
    output_tokens: int
    failure: str | None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        variant: which server: ``slab``, ``inline``, or ``url`` for one that was there before.
        duration_s: from the start of the load to the end of its last request.
        requests, completed: how many were sent, and had a whole answer.
        failures: the others, by reason.
        requests_per_s, output_tokens_per_s: of those with a whole answer.
        ttft, tpot, itl: of chats.
        e2e: of all.
        peak_concurrency: most requests in flight at a time.
        generator: see there.
        cpu_s: CPU seconds of the server's processes meanwhile, by part; empty for one that was there before.
        by_request: each of them, in the order in which they were due.
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
    cpu_s: dict[str, float]
    by_request: list[Request]


def measure(variant: str, played: Played, cpu_s: dict[str, float]) -> Measurement:
    """Returns what a load has shown of a server, whose processes used so many CPU seconds meanwhile."""
    exchanges, start = played.exchanges, played.start
    whole = [exchange for exchange in exchanges if exchange.failure is None]
    chats = [exchange for exchange in whole if len(exchange.token_times)]
    duration_s = max(exchange.ended for exchange in exchanges) - start
    late = Latency.of([exchange.sent - exchange.began for exchange in exchanges])
    assert late is not None, "there is at least one exchange"
    return Measurement(
        variant=variant,
        duration_s=duration_s,
        requests=len(exchanges),
        completed=len(whole),
        failures=dict(collections.Counter(exchange.failure for exchange in exchanges if exchange.failure).most_common()),
        requests_per_s=len(whole) / duration_s,
        output_tokens_per_s=sum(exchange.output_tokens for exchange in whole) / duration_s,
        ttft=Latency.of([exchange.token_times[0] - exchange.began for exchange in chats]),
        tpot=Latency.of([_time_per_token(exchange) for exchange in chats if exchange.output_tokens > 1]),
        itl=Latency.of(np.concatenate([np.diff(exchange.token_times) for exchange in chats]).tolist() if chats else []),
        e2e=Latency.of([exchange.ended - exchange.began for exchange in whole]),
        peak_concurrency=_peak(exchanges),
        generator=Generator(
            cpu_s=played.cpu_s,
            loop_lag_p99_ms=played.loop_lag.p99_ms,
            loop_lag_max_ms=played.loop_lag.max_ms,
            late_p99_ms=late.p99_ms,
        ),
        cpu_s=cpu_s,
        by_request=[
            Request(
                began_s=exchange.began - start,
                sent_s=exchange.sent - start,
                first_token_s=exchange.token_times[0] - start if len(exchange.token_times) else None,
                ended_s=exchange.ended - start,
                output_tokens=exchange.output_tokens,
                failure=exchange.failure,
            )
            for exchange in exchanges
        ],
    )


def _time_per_token(exchange: Exchange) -> float:
    return (exchange.ended - exchange.token_times[0]) / (exchange.output_tokens - 1)


def _peak(exchanges: Sequence[Exchange]) -> int:
    """Counts who was there; one that ends at the very moment at which another is sent was not there with it."""
    steps = sorted([(exchange.sent, 1) for exchange in exchanges] + [(exchange.ended, -1) for exchange in exchanges])
    return int(np.cumsum([step for _, step in steps]).max())
