"""A run as a plot: bandwidth from host memory by size, and how long hand-overs take by size, one line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.copies import CEILING, PINNED_SLOT
from bench.gpu.handovers import DEVICE_SLAB, HOST_SLOT
from bench.gpu.plan import Results, title_of
from bench.gpu.report import HAND_OVER_US
from bench.plots import check_plotter
from bench.results import Findings, format_nbytes

__all__ = ["draw"]

_DPI = 110
_OURS = {PINNED_SLOT: "#c1121f", HOST_SLOT: "#c1121f", DEVICE_SLAB: "#f77f00"}
_OTHERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")


def draw(findings: Findings, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws ``stem``.

    Args:
        findings: of a run, as it is stored.
        stem: path without an ending.
        kinds: file formats, by their endings.

    Returns:
        The files.

    Raises:
        msgspec.ValidationError: it is no run of this benchmark.
        MissingPlotter: matplotlib is not installed.
    """
    check_plotter()
    stored = findings.results
    results = stored if isinstance(stored, Results) else msgspec.convert(stored, Results)
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}):
        figure = Figure(figsize=(12.8, 5.2), layout="constrained")
        figure.suptitle(results.gpu.name, fontsize="large", fontweight="bold")
        bandwidth, hand_overs = figure.subplots(1, 2)
        rates: dict[str, dict[int, float]] = {}
        for entry in results.transfers:
            rates.setdefault(entry.way, {})[entry.nbytes] = entry.gb_per_s.median
        _draw_lines(bandwidth, rates)
        bandwidth.set(title="from host memory to the GPU", ylabel="GB/s")
        times: dict[str, dict[int, float]] = {}
        for handover in results.handovers:
            times.setdefault(handover.route, {})[handover.nbytes] = handover.p50_us.median
        _draw_lines(hand_overs, times)
        hand_overs.axhline(HAND_OVER_US, color="black", linewidth=0.8, linestyle=":")
        hand_overs.set(title="from submit until usable in the other process: lower is better", ylabel="median, microseconds")
        for path, kind in zip(paths, kinds, strict=True):
            figure.savefig(path, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return paths


def _draw_lines(axes: Any, lines: Mapping[str, Mapping[int, float]]) -> None:
    """Draws a line for each: its numbers by size."""
    others = iter(_OTHERS)
    for name, numbers in lines.items():
        style: dict[str, Any] = {"color": _OURS[name], "linewidth": 3.0} if name in _OURS else {"color": next(others)}
        if name == CEILING:
            style = {"color": "black", "linestyle": "--"}
        axes.plot(list(numbers), list(numbers.values()), marker="o", label=title_of(name), **style)
    sizes = sorted({nbytes for numbers in lines.values() for nbytes in numbers})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_nbytes(nbytes) for nbytes in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of a tensor")
    axes.grid(which="major", alpha=0.25)
    if lines:
        axes.legend(fontsize="small")
