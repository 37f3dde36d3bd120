"""Results of ``bench vllm`` as tables and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import plots
from bench.coverage import Coverage
from bench.machine import Machine
from bench.results import Findings, Spread, Table, Verdict, format_times
from bench.targets import Numbers, judge
from bench.vllm.load import Measurement
from bench.vllm.plan import LARGE, PARALLEL, Case

__all__ = ["Measured", "draw", "report"]

#: The repetitions of each case and way, in the order in which they were made.
Measured = Mapping[tuple[Case, str], Sequence[Measurement]]

_OURS = "shmring"
_COLOURS = {_OURS: "#d62728", "inline": "#7f7f7f", "torch_shm": "#1f77b4"}
_COLUMNS = ["requests", "way", "requests/s", "spread", "shmring is", "TTFT p50 ms", "p99 ms", "engine ms", "API ms"]
_COLUMNS += ["lag p99 ms", "tensors"]


class Stored(msgspec.Struct, frozen=True):
    """The repetitions of a case and way, as they are stored."""

    fleet: str
    case: str
    way: str
    runs: Sequence[Measurement]


def report(measured: Measured, coverage: Coverage, environment: Mapping[str, str]) -> Findings:
    """Returns the report of a run: a table for each fleet, and the verdicts on the targets."""
    fleets = dict.fromkeys(case.fleet for case, _ in measured)
    tables = [
        Table(
            fleet.title,
            _COLUMNS,
            [_row(case, way, runs, measured) for (case, way), runs in measured.items() if case.fleet == fleet],
            ("way",),
            grouped=True,
        )
        for fleet in fleets
    ]
    notes = [
        "Real vLLM on the CPU with a model that computes nearly nothing. The servers of all ways are up at once, and the load "
        "goes to one after the other, in alternating order. Medians of the repetitions; spread: slowest and fastest against "
        "the median; shmring is: its requests/s over the row's in the same repetition.",
        "jpeg: a picture that the API server's cache knows, sent as a file; uuid: only named; new: never seen. engine, API: "
        "milliseconds of CPU for each request, of the engine core and of all API servers. lag: the time that /health takes "
        "beside the load, of all repetitions together: one has too few for a 99th percentile. tensors: which way they went in "
        "the last repetition.",
        ", ".join(f"{name} {version}" for name, version in environment.items()),
    ]
    results = [Stored(case.fleet.title, case.title, way, runs) for (case, way), runs in measured.items()]
    return Findings(
        mode="vllm",
        machine=Machine.here(),
        tables=tables,
        notes=notes,
        targets=_targets(measured),
        results=results,
        coverage=coverage,
    )


def _row(case: Case, way: str, runs: Sequence[Measurement], measured: Measured) -> list[str]:
    speed = Spread.of(run.requests_per_s for run in runs)
    ratio = _ratio(measured, case, way, lambda run: run.requests_per_s)
    return [
        case.title,
        way,
        f"{speed.median:.1f}",
        f"-{1 - speed.minimum / speed.median:.0%} +{speed.maximum / speed.median - 1:.0%}",
        "" if way == _OURS or ratio is None else format_times(ratio),
        f"{_median(runs, lambda run: run.p50_ms):.1f}",
        f"{_median(runs, lambda run: run.p99_ms):.1f}",
        f"{_median(runs, lambda run: run.cpu_ms['EngineCore']):.1f}",
        f"{_median(runs, lambda run: run.cpu_ms['APIServer']):.1f}",
        f"{_lag_p99_ms(runs):.1f}",
        ", ".join(f"{count} {name}" for name, count in sorted(runs[-1].tensors.items())),
    ]


def _median(runs: Sequence[Measurement], number: Callable[[Measurement], float]) -> float:
    return statistics.median(number(run) for run in runs)


def _lag_p99_ms(runs: Sequence[Measurement]) -> float:
    lags_ms = [lag_ms for run in runs for lag_ms in run.lags_ms]
    return float(np.percentile(lags_ms, 99)) if lags_ms else math.nan


def _ratio(measured: Measured, case: Case, way: str, number: Callable[[Measurement], float]) -> float | None:
    """Shmring's number over a way's, in the same repetition; None where one of them is missing."""
    pairs = zip(measured.get((case, _OURS), ()), measured.get((case, way), ()), strict=False)
    numbers = [(number(ours), number(theirs)) for ours, theirs in pairs]
    if not numbers or not all(theirs for _, theirs in numbers):
        return None
    return statistics.median(ours / theirs for ours, theirs in numbers)


def _targets(measured: Measured) -> list[Verdict]:
    jpeg, uuid, uuid_alone, new = Case(LARGE, "jpeg", 8), Case(LARGE, "uuid", 8), Case(LARGE, "uuid", 1), Case(LARGE, "new", 8)
    parallel = Case(PARALLEL, "jpeg", 8)
    at = LARGE.title

    def speed(run: Measurement) -> float:
        return run.requests_per_s

    others = [case for case, way in measured if way == _OURS and case.kind == "new" and case != new]
    of_others = [(f"{case.fleet.title}: {case.title}", _ratio(measured, case, "inline", speed)) for case in others]

    def verdict(
        what: str,
        case: Case,
        limit: float,
        *ways: str,
        number: Callable[[Measurement], float] = speed,
        at_least: bool = True,
        at: str = at,
    ) -> Verdict:
        places: Numbers = ((way, _ratio(measured, case, way, number)) for way in ways)
        return judge(f"vLLM, {what}", at, limit, "x", places, at_least=at_least)

    return [
        verdict("JPEG sent again, 8 at a time: requests/s of inline", jpeg, 1.5, "inline"),
        verdict("JPEG sent again, 8 at a time: requests/s of torch_shm", jpeg, 1.02, "torch_shm"),
        verdict("only the uuid, 8 at a time: requests/s of inline", uuid, 6, "inline"),
        verdict("only the uuid, 8 at a time: requests/s of torch_shm", uuid, 1.3, "torch_shm"),
        verdict("only the uuid, 1 at a time: requests/s of torch_shm", uuid_alone, 1.1, "torch_shm"),
        verdict(
            "a hit: CPU of the engine", jpeg, 0.9, "torch_shm", number=lambda run: run.cpu_ms["EngineCore"], at_least=False
        ),
        verdict("a hit: CPU of API servers", jpeg, 1, "torch_shm", number=lambda run: run.cpu_ms["APIServer"], at_least=False),
        verdict("a new picture: requests/s of inline", new, 1, "inline"),
        judge("vLLM, a new picture: requests/s of inline", "everywhere else", 0.95, "x", of_others),
        judge("vLLM, a new picture: lag p99 of inline", at, 1, "x", _lags(measured, new), at_least=False),
        verdict("a hit: requests/s of inline", parallel, 1.5, "inline", at=parallel.fleet.title),
    ]


def _lags(measured: Measured, case: Case) -> Numbers:
    ours, theirs = (_lag_p99_ms(measured.get((case, way), ())) for way in (_OURS, "inline"))
    yield "inline", None if math.isnan(ours / theirs) else ours / theirs


def draw(findings: Findings, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws requests per second and CPU, a bar for each way; see :func:`bench.plots.save`.

    Raises:
        msgspec.ValidationError: what is stored is no run of this benchmark.
    """
    stored = msgspec.convert(findings.results, list[Stored], from_attributes=True)
    return plots.save(lambda: _figure(stored), stem, kinds)


def _figure(stored: Sequence[Stored]) -> Any:
    cases = list(dict.fromkeys((entry.fleet, entry.case) for entry in stored))
    figure, (speed, cpu) = plots.panels(2, "vLLM, by how its tensors travel", (12.8, 1.6 + 0.62 * len(cases)))
    _draw_bars(speed, stored, cases, lambda run: run.requests_per_s)
    speed.set(title="requests per second", xscale="log")
    speed.set_yticks(range(len(cases)), [f"{fleet}:\n{case}" for fleet, case in cases])
    _draw_bars(cpu, stored, cases, lambda run: sum(run.cpu_ms.values()))
    cpu.set(title="CPU of all processes for a request, milliseconds: lower is better", xscale="log")
    cpu.set_yticks([])
    cpu.legend(fontsize="small")
    return figure


def _draw_bars(
    axes: Any, stored: Sequence[Stored], cases: Sequence[tuple[str, str]], number: Callable[[Measurement], float]
) -> None:
    """A group of bars for each case, the first on top."""
    height = 0.8 / len(_COLOURS)
    for place, (way, colour) in enumerate(_COLOURS.items()):
        medians = {(entry.fleet, entry.case): _median(entry.runs, number) for entry in stored if entry.way == way}
        tops = [cases.index(case) + (place - 1) * height for case in medians]
        bars = axes.barh(tops, list(medians.values()), height, color=colour, label=way)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=2)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.08)
