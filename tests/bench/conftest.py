"""Results of transports that were not measured, for the tests of what is made of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bench.machine import Machine
from bench.messages import Case, Header, Source
from bench.records import Limit, Result, Results, Side
from bench.request.questions import Desk
from bench.results import Spread

MB = 1 << 20


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``spoil(sequence, what="message")``: this process, and what it forks, spoils a message of that number, or its reply."""

    def spoil(spoiled: int, what: str = "message") -> None:
        stamp, answer = Source.stamp, Desk.answer

        def stamp_wrongly(source: Source, tensor: torch.Tensor | None = None) -> Header:
            header = stamp(source, tensor)
            if header.sequence == spoiled:
                (source.tensor if tensor is None else tensor)[-1] = 1
            return header

        def answer_wrongly(desk: Desk, header: Header, tensor: torch.Tensor) -> torch.Tensor:
            reply = answer(desk, header, tensor)
            if header.sequence == spoiled:
                reply[-1] = 1
            return reply

        if what == "message":
            monkeypatch.setattr(Source, "stamp", stamp_wrongly)
        else:
            monkeypatch.setattr(Desk, "answer", answer_wrongly)

    return spoil


def _side(cpu_us: float, nbytes: int, **options: Any) -> Side:
    return Side(
        cpu_us_per_message=Spread.of([cpu_us]),
        cpu_s_per_gb=cpu_us / nbytes * 1e3,
        resident_nbytes=options.get("resident_nbytes", 220 * MB),
        descriptors=30,
        lag_max_on_core_ms=Spread.of([options.get("lag_ms", 1.0)]),
        connect_ms=Spread.of([2.0]),
        idle_percent=options.get("idle_percent"),
    )


@pytest.fixture
def made_result() -> Callable[..., Result]:
    """``made_result(peer, case, runs, p50_us=100.0, cpu_us=10.0, ratio=1.0, lag_ms=1.0, ...)``: see ``_side``."""

    def make(peer: str, case: Case, runs: Sequence[float], **options: Any) -> Result:
        speed = Spread.of(runs)
        p50_us, cpu_us = options.pop("p50_us", 100.0), options.pop("cpu_us", 10.0)
        return Result(
            peer=peer,
            case=case,
            messages_per_s=speed,
            runs=list(runs),
            gb_per_s=speed.median * case.nbytes / 1e9,
            shmring_ratio=Spread.of([options.pop("ratio", 1.0)]),
            latency_p50_us=Spread.of([p50_us]),
            latency_p99_us=2 * p50_us,
            latency_p999_us=3 * p50_us,
            consumer=_side(cpu_us, case.nbytes, **options),
            producer=_side(cpu_us, case.nbytes, **options),
        )

    return make


@pytest.fixture
def made_results() -> Callable[..., Results]:
    """``made_results(results, limits={nbytes: copies a second})``."""

    def make(results: Sequence[Result], limits: dict[int, float] | None = None) -> Results:
        return Results(
            mode="transport",
            started="2026-01-02T03:04:05+00:00",
            machine=Machine(
                cpu="A Processor", cores=2, memory_nbytes=8 << 30, kernel="6.1", python="3.11", torch="2.9", numpy="2.3",
                msgspec="0.20", uvloop="0.22", shmring="0.1", commit="abc", libc="glibc 2.36", cache_nbytes=32 * MB,
            ),
            versions={"pyzmq": "27.1"},
            load_before=0.5,
            torch_resident_nbytes=200 * MB,
            repetitions=3,
            timed_s=0.5,
            results=list(results),
            limits=[
                Limit(nbytes, Spread.of([speed]), Spread.of([2 * speed]), Spread.of([speed]), [speed] * 3)
                for nbytes, speed in (limits or {}).items()
            ],
        )  # fmt: skip

    return make
