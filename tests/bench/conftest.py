"""Repetitions that were not measured, for the tests of what is made of them; small plans; and messages that are spoiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
import pytest
import torch

from bench.command_line import benchmark
from bench.messages import Header, Measurement, Source
from bench.meter import Cost
from bench.plan import Plan
from bench.questions import Desk

MB = 1 << 20


@pytest.fixture(autouse=True)
def torch_has_200_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process that has only imported torch holds: looking takes seconds."""
    monkeypatch.setattr("bench.transport_targets.torch_resident_nbytes", lambda: 200 * MB)


def made_run(per_s: float = 1.0, **numbers: Any) -> Measurement:
    """A repetition of 1000 messages: ``p50_us=100.0``, ``cpu_us=10.0`` of each side, ``stall_ms=1.0``, ``idle_percent``, ..."""
    cost = Cost(
        messages=1000,
        cpu_s=numbers.get("cpu_us", 10.0) / 1e3,
        resident_nbytes=numbers.get("resident_nbytes", 220 * MB),
        stall_ms=numbers.get("stall_ms", 1.0),
        connect_s=numbers.get("connect_ms", 2.0) / 1e3,
        idle_share=None if "idle_percent" not in numbers else numbers["idle_percent"] / 100,
    )
    latencies = np.full(1000, numbers.get("p50_us", 100.0) * 1e3, np.int64)
    return Measurement(1000, 1000 / per_s, latencies, (cost,), (cost,))


def command_of(plan: Plan, command: click.Command) -> click.Command:
    """The same command, of another plan."""
    assert command.callback is not None
    return benchmark(plan)(command.callback.__wrapped__)  # type: ignore[attr-defined] # of functools.wraps


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
