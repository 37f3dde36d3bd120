"""What a run has shown: tables, targets, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import plots
from bench.coverage import Coverage
from bench.gpu.copies import BANDWIDTH, CEILING, CLONED, PINNED_SLOT, STALLS, WAYS
from bench.gpu.device import Accelerator
from bench.gpu.handovers import DEVICE_SLAB, HAND_OVERS, HOST_SLOT, ROUTES
from bench.gpu.processes import Numbers
from bench.machine import Machine
from bench.results import Findings, Spread, Table, Verdict, deviation, format_nbytes
from bench.targets import judge

__all__ = ["TITLES", "Measured", "Results", "draw", "report"]

_MB = 1 << 20
#: The targets, and where they hold.
_OF_CEILING, _CEILING_FROM_NBYTES = 0.95, 8 * _MB
_OF_CLONED, _CLONED_NBYTES = 3.0, 64 * _MB
_HAND_OVER_US = 150.0
_OF_SMALLEST = 1.3  # "independent of size", as for what is written in place in host memory


#: Of ways and routes.
TITLES = {name: compared.title for name, compared in (*WAYS.items(), *ROUTES.items())}


class Measured(msgspec.Struct, frozen=True):
    """What a way or a route did at a size.

    Attributes:
        what: was measured, as commands are called.
        runs: what the command returned in each repetition: numbers, by what they are.
    """

    what: str
    name: str
    nbytes: int
    runs: list[Numbers]

    def medians(self, number: str) -> list[float]:
        """Returns the median of each repetition."""
        return [statistics.median(run[number]) for run in self.runs]

    def every(self, number: str) -> list[float]:
        """Returns what all repetitions have."""
        return [value for run in self.runs for value in run[number]]


class Results(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    gpu: Accelerator
    repetitions: int
    timed_s: float
    measured: list[Measured]
    coverage: Coverage | None = None

    def of(self, what: str) -> dict[tuple[int, str], Measured]:
        """Returns what was measured of something, by size and name."""
        return {(measured.nbytes, measured.name): measured for measured in self.measured if measured.what == what}


def report(results: Results) -> Findings:
    """Lays a run out as people and ``bench report`` read it."""
    return Findings(
        mode="gpu",
        machine=results.machine,
        tables=[_copies_table(results), _hand_overs_table(results)],
        notes=_notes(results),
        targets=_targets(results),
        results=results,
        coverage=results.coverage,
    )


# -- tables --------------------------------------------------------------------------------------------------------------


def _copies_table(results: Results) -> Table:
    stalls = results.of(STALLS)
    rows = []
    for (nbytes, name), measured in results.of(BANDWIDTH).items():
        rate = Spread.of(measured.medians("gb_per_s"))
        of_ceiling = _ratio(results, nbytes, name, CEILING)
        row = [format_nbytes(nbytes), TITLES[name], f"{rate.median:.2f}", deviation(rate)]
        row.append("" if of_ceiling is None else f"{of_ceiling:.2f} x")
        if (stall := stalls.get((nbytes, name))) is None:
            rows.append([*row, "", "", ""])
        else:
            brought_us, idle_us = stall.every("brought_us"), stall.every("idle_us")
            times_us = (statistics.median(brought_us), max(brought_us), statistics.median(idle_us))
            rows.append([*row, *(f"{time_us:,.0f}" for time_us in times_us)])
    return Table(
        f"from host memory to the GPU, medians of {results.repetitions} interleaved runs, every request checked",
        ["size", "from", "GB/s", "spread", f"of {TITLES[CEILING]}", "stall us", "longest", "idle loop"],
        rows,
        texts=("from",),
        grouped=True,
    )


def _hand_overs_table(results: Results) -> Table:
    rows = []
    for (nbytes, name), measured in results.of(HAND_OVERS).items():
        p50_us, every_us = Spread.of(measured.medians("us")), measured.every("us")
        times = [f"{p50_us.median:,.0f}", deviation(p50_us), f"{np.percentile(every_us, 99):,.0f}"]
        rows.append([format_nbytes(nbytes), TITLES[name], *times, f"{len(every_us):,}"])
    return Table(
        "from submit in one process until usable on the GPU in the other, every message checked",
        ["size", "by", "p50 us", "spread", "p99 us", "messages"],
        rows,
        texts=("by",),
        grouped=True,
    )


def _ratio(results: Results, nbytes: int, name: str, other: str) -> float | None:
    """A way's bandwidth as a multiple of another's: the median of the ratios within each repetition.

    Of those that both were measured in: the last of a run that was broken off may have one of them only.
    """
    rates = results.of(BANDWIDTH)
    if (nbytes, name) not in rates or (nbytes, other) not in rates:
        return None
    pairs = zip(rates[nbytes, name].medians("gb_per_s"), rates[nbytes, other].medians("gb_per_s"), strict=False)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def _notes(results: Results) -> list[str]:
    gpu = results.gpu
    return [
        f"{gpu.name}, {gpu.memory_nbytes / 2**30:.0f} GiB, {gpu.link} to the host; driver {gpu.driver}, "
        f"torch {gpu.torch} for CUDA {gpu.cuda}.",
        f"Bandwidth: up to 64 requests and 256 MB in flight (at least two requests), one after another, {results.timed_s:g} s "
        "of copying in each repetition; spread: the slowest and the fastest repetition against the median. All copies are "
        "non_blocking.",
        "Cloned, or pinned each: what vLLM does with a tensor that came in shared memory, which it may not keep; torch with "
        "all of its threads.",
        "Stall: the longest time between two turns of the engine's loop while one request is brought; the median and the "
        "longest of all requests. idle loop: the same of a loop that does nothing.",
        "Hand-over: one message at a time, from before it is submitted until the end of a small kernel that reads it on the "
        "engine's stream has been noticed. Its content was written before, on the GPU or in host memory.",
        "torch CUDA IPC per tensor: through torch.multiprocessing.Queue to a thread of the engine, which uses it at once.",
    ]


# -- targets -------------------------------------------------------------------------------------------------------------


def _targets(results: Results) -> list[Verdict]:
    sizes = sorted({nbytes for nbytes, _ in results.of(BANDWIDTH)})
    of_ceiling = [(nbytes, _ratio(results, nbytes, PINNED_SLOT, CEILING)) for nbytes in sizes if nbytes >= _CEILING_FROM_NBYTES]
    of_cloned = [(_CLONED_NBYTES, _ratio(results, _CLONED_NBYTES, PINNED_SLOT, CLONED))]
    p50s_us = [(nbytes, _p50_us(one)) for (nbytes, name), one in results.of(HAND_OVERS).items() if name == DEVICE_SLAB]
    of_smallest = [(nbytes, p50_us / p50s_us[0][1]) for nbytes, p50_us in p50s_us[1:]]
    return [
        judge("pinned slot: GB/s of pin_memory() memory", "8 MB and above", _OF_CEILING, "x", _named(of_ceiling)),
        judge("pinned slot: GB/s of cloning, then copying", "64 MB", _OF_CLONED, "x", _named(of_cloned)),
        judge("device slab: p50 of a hand-over", "any size", _HAND_OVER_US, "us", _named(p50s_us), at_least=False),
        judge(
            "device slab: p50 over that of the smallest size", "any size", _OF_SMALLEST, "x", _named(of_smallest),
            at_least=False,
        ),
    ]  # fmt: skip


def _p50_us(measured: Measured) -> float:
    return statistics.median(measured.medians("us"))


def _named(places: Sequence[tuple[int, float | None]]) -> Iterator[tuple[str, float]]:
    return ((format_nbytes(nbytes), number) for nbytes, number in places if number is not None)


# -- plot ----------------------------------------------------------------------------------------------------------------

_OURS = {PINNED_SLOT: "#c1121f", HOST_SLOT: "#c1121f", DEVICE_SLAB: "#f77f00"}
_OTHERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")


def draw(findings: Findings, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws bandwidth and hand-overs by size, a line for each way and route; see :func:`bench.plots.save`.

    Raises:
        msgspec.ValidationError: what is stored is no run of this benchmark.
    """
    results = msgspec.convert(findings.results, Results, from_attributes=True)
    return plots.save(lambda: _figure(results), stem, kinds)


def _figure(results: Results) -> Any:
    figure, (bandwidth, hand_overs) = plots.panels(2, results.gpu.name, (12.8, 5.2))
    rates = results.of(BANDWIDTH).values()
    _draw_lines(bandwidth, [(one.name, one.nbytes, statistics.median(one.medians("gb_per_s"))) for one in rates])
    bandwidth.set(title="from host memory to the GPU", ylabel="GB/s")
    _draw_lines(hand_overs, [(one.name, one.nbytes, _p50_us(one)) for one in results.of(HAND_OVERS).values()])
    hand_overs.axhline(_HAND_OVER_US, color="black", linewidth=0.8, linestyle=":")
    hand_overs.set(title="from submit until usable in the other process: lower is better", ylabel="median, microseconds")
    return figure


def _draw_lines(axes: Any, points: Sequence[tuple[str, int, float]]) -> None:
    """Draws a line for each name: its numbers by size."""
    others = iter(_OTHERS)
    for name in dict.fromkeys(name for name, *_ in points):
        style: dict[str, Any] = {"color": _OURS[name], "linewidth": 3.0} if name in _OURS else {"color": next(others)}
        if name == CEILING:
            style = {"color": "black", "linestyle": "--"}
        line = [(nbytes, number) for of, nbytes, number in points if of == name]
        axes.plot(*zip(*line, strict=True), marker="o", label=TITLES[name], **style)
    plots.lay_sizes_across(axes, (nbytes for _, nbytes, _ in points))
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.25)
    if points:
        axes.legend(fontsize="small")
