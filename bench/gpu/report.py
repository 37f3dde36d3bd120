"""What a run has shown: tables, targets, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import plots
from bench.gpu.copies import CEILING, CLONED, PINNED_SLOT, WAYS
from bench.gpu.handovers import DEVICE_SLAB, HOST_SLOT, ROUTES
from bench.gpu.plan import Results, title_of
from bench.results import Findings, Table, Verdict, deviation, format_nbytes
from bench.targets import judge

__all__ = ["draw", "report"]

_MB = 1 << 20
#: The targets, and where they hold.
_OF_CEILING, _CEILING_FROM_NBYTES = 0.95, 8 * _MB
_OF_CLONED, _CLONED_NBYTES = 3.0, 64 * _MB
_HAND_OVER_US = 150.0
_OF_SMALLEST = 1.3  # "independent of size", as for what is written in place in host memory


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
    stalls = {(entry.way, entry.nbytes): entry for entry in results.stalls}
    rows = []
    for entry in results.transfers:
        stall = stalls.get((entry.way, entry.nbytes))
        times_us = [] if stall is None else [stall.brought_us.median, stall.brought_us.maximum, stall.idle_us.median]
        rows.append(
            [
                format_nbytes(entry.nbytes),
                WAYS[entry.way].title,
                f"{entry.gb_per_s.median:.2f}",
                deviation(entry.gb_per_s),
                "" if entry.of_ceiling is None else f"{entry.of_ceiling.median:.2f} x",
                *([f"{time_us:,.0f}" for time_us in times_us] or [""] * 3),
            ]
        )
    return Table(
        f"from host memory to the GPU, medians of {results.repetitions} interleaved runs, every request checked",
        ["size", "from", "GB/s", "spread", f"of {WAYS[CEILING].title}", "stall us", "longest", "idle loop"],
        rows,
        texts=("from",),
        grouped=True,
    )


def _hand_overs_table(results: Results) -> Table:
    rows = [
        [
            format_nbytes(entry.nbytes),
            ROUTES[entry.route].title,
            f"{entry.p50_us.median:,.0f}",
            deviation(entry.p50_us),
            f"{entry.p99_us:,.0f}",
            f"{entry.messages:,}",
        ]
        for entry in results.handovers
    ]
    return Table(
        "from submit in one process until usable on the GPU in the other, every message checked",
        ["size", "by", "p50 us", "spread", "p99 us", "messages"],
        rows,
        texts=("by",),
        grouped=True,
    )


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
    hand_overs = {entry.nbytes: entry.p50_us.median for entry in results.handovers if entry.route == DEVICE_SLAB}
    smallest = min(hand_overs, default=0)
    of_ceiling = {
        entry.nbytes: entry.of_ceiling.median
        for entry in results.transfers
        if entry.way == PINNED_SLOT and entry.nbytes >= _CEILING_FROM_NBYTES and entry.of_ceiling is not None
    }
    of_smallest = {nbytes: p50_us / hand_overs[smallest] for nbytes, p50_us in hand_overs.items() if nbytes > smallest}
    return [
        judge("pinned slot: GB/s of pin_memory() memory", "8 MB and above", _OF_CEILING, "x", _named(of_ceiling)),
        judge("pinned slot: GB/s of cloning, then copying", "64 MB", _OF_CLONED, "x", _named(_of_cloned(results))),
        judge("device slab: p50 of a hand-over", "any size", _HAND_OVER_US, "us", _named(hand_overs), at_least=False),
        judge(
            "device slab: p50 over that of the smallest size", "any size", _OF_SMALLEST, "x", _named(of_smallest),
            at_least=False,
        ),
    ]  # fmt: skip


def _of_cloned(results: Results) -> dict[int, float]:
    """The median of the ratios within each repetition; of a run that was broken off, one may have fewer."""
    runs = {entry.way: entry.runs for entry in results.transfers if entry.nbytes == _CLONED_NBYTES}
    pairs = zip(runs.get(PINNED_SLOT, ()), runs.get(CLONED, ()), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    return {_CLONED_NBYTES: statistics.median(ratios)} if ratios else {}


def _named(places: Mapping[int, float]) -> Iterator[tuple[str, float]]:
    return ((format_nbytes(nbytes), number) for nbytes, number in places.items())


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
    _draw_lines(bandwidth, [(entry.way, entry.nbytes, entry.gb_per_s.median) for entry in results.transfers])
    bandwidth.set(title="from host memory to the GPU", ylabel="GB/s")
    _draw_lines(hand_overs, [(entry.route, entry.nbytes, entry.p50_us.median) for entry in results.handovers])
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
        axes.plot(*zip(*line, strict=True), marker="o", label=title_of(name), **style)
    plots.lay_sizes_across(axes, (nbytes for _, nbytes, _ in points))
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.25)
    if points:
        axes.legend(fontsize="small")
