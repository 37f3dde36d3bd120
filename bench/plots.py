"""The results of ``bench transport`` as plots: by size, by number of producers, and what a gigabyte costs.

Each plot is for one question, with one line or bar for a peer. Ours are thick and in colour; of the others each has its own
hue and marker. The plots need matplotlib, which is imported when one is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.command_line import check_plotter
from bench.messages import Case
from bench.records import Result, Results, peer_title
from bench.results import Findings, format_nbytes

#: A colour and a marker of each of the others.
_OTHERS = {
    "iceoryx2": "#1f77b4 s", "iceoryx2-loaned": "#2ca02c D", "zenoh": "#9467bd ^", "spinning-ring": "#8c564b v",
    "spinning-arena": "#17becf P", "inline-msgpack": "#7f7f7f X", "pyzmq": "#bcbd22 *", "faster-fifo": "#003f5c <",
    "shared-memory": "#e377c2 >", "torch-queue": "#5f0f40 p", "torch-queue-by-name": "#6a4c93 h",
    "multiprocessing-queue": "#0a9396 d", "ray": "#a68a64 8",
}  # fmt: skip
_OURS = {"shmring": "#c1121f", "shmring-in-place": "#f77f00", "shmring-busy-poll": "#b5179e"}
_DPI = 110
#: What the README shows, at which sizes, and what each peer is called there.
_OVERVIEW = {
    "shmring": "shmring",
    "spinning-arena": "vLLM: tensor arena, spins",
    "pyzmq": "vLLM: zmq (direct_rpc)",
    "torch-queue": "vLLM: torch queue (torch_shm)",
    "shared-memory": "SGLang: a segment per tensor",
    "multiprocessing-queue": "pickle: multiprocessing.Queue",
}
_OVERVIEW_SIZES = (1 << 20, 64 << 20)


def draw(results: Results, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws ``stem-throughput``, ``stem-latency``, ``stem-scaling`` and ``stem-cpu``, those of which there are numbers.

    Returns:
        The files, of each plot those of all kinds.

    Raises:
        MissingPlotter: matplotlib is not installed.
    """
    figures = {"throughput": _throughput, "latency": _latency, "scaling": _scaling, "cpu": _cpu}
    paths = []
    for name, make in figures.items():
        paths += save(functools.partial(make, results), stem.with_name(f"{stem.name}-{name}"), kinds)
    return paths


def draw_overview(results: Results, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws the README's plot: bars from zero, of what shmring and the ways of today move at 1 MB and at 64 MB.

    Returns:
        The files; none if these sizes were not measured.

    Raises:
        MissingPlotter: matplotlib is not installed.
    """
    return save(functools.partial(_overview, results), stem, kinds)


def draw_stored(
    kind: Any, figure: Callable[[Any], Any], findings: Findings, stem: Path, kinds: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Draws the results of a mode, which are of a kind, by what makes a figure of them; see :func:`save`.

    Raises:
        msgspec.ValidationError: what is stored is no run of that mode.
    """
    stored = msgspec.convert(findings.results, kind, from_attributes=True)
    return save(lambda: figure(stored), stem, kinds)


def save(make: Callable[[], Any], stem: Path, kinds: Sequence[str]) -> list[Path]:
    """Makes a figure, and saves it by that name with the endings of these kinds; returns the files, none of None."""
    check_plotter()
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}):
        if (figure := make()) is None:
            return []
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
        for path in paths:
            figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def panels(width: int, title: str, size_inches: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """Returns a figure with so many panels beside each other, and those."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    figure = Figure(figsize=size_inches or (6.4 * width, 5.6), layout="constrained")
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure, list(figure.subplots(1, width, squeeze=False)[0])


def lay_sizes_across(axes: Any, sizes: Iterable[int]) -> None:
    """Has a panel's lines drawn over the size of a tensor."""
    ordered = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ordered, [format_nbytes(nbytes) for nbytes in ordered])
    axes.minorticks_off()
    axes.set_xlabel("size of a tensor")


def draw_lines(axes: Any, points: Iterable[tuple[str, float, float]], style: Callable[[str], dict[str, Any]]) -> None:
    """Draws a line for each name: its numbers, from left to right."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, across, up in points:
        lines.setdefault(name, []).append((across, up))
    for name, line in lines.items():
        axes.plot(*zip(*sorted(line), strict=True), **style(name))
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.25)


def _style(peer: str) -> dict[str, Any]:
    """How a peer's line looks in every plot."""
    if peer in _OURS:
        return {"label": peer, "color": _OURS[peer], "linewidth": 3.0, "marker": "o", "markersize": 6, "zorder": 5}
    colour, marker = _OTHERS.get(peer, "#495057 H").split()
    return {"label": peer, "color": colour, "linewidth": 1.2, "marker": marker, "markersize": 5, "zorder": 3}


def _base(results: Results, window: int) -> list[Result]:
    """What was measured with one producer and that window, as far as memory allowed it, of the dtype of most results."""
    dtypes = [result.case.dtype for result in results.results]
    dtype = max(dict.fromkeys(dtypes), key=dtypes.count) if dtypes else ""
    return [result for result in results.results if result.case == Case(result.case.nbytes, dtype, window=window).bounded()]


def _lines(axes: Any, selected: Sequence[Result], across: Callable[[Result], float], up: Callable[[Result], float]) -> None:
    """Draws a line for each peer."""
    draw_lines(axes, [(result.peer, across(result), up(result)) for result in selected], _style)


def _named(figure: Any, axes: Any) -> Any:
    """The figure with the names of lines beside it, as they are in one of its panels, those that end highest first."""
    lines = sorted(axes.get_lines(), key=lambda line: line.get_ydata()[-1], reverse=True)
    figure.legend(handles=lines, loc="outside right center", fontsize="small")
    return figure


def _by_size(
    results: Results, window: int, title: str, numbers: Sequence[tuple[str, Callable[[Result], float]]]
) -> tuple[Any, list[Any]] | None:
    """A panel for each number, over the size of a tensor; None if nothing was measured with that window."""
    if not (selected := _base(results, window)):
        return None
    figure, all_axes = panels(len(numbers), title)
    for axes, (label, number) in zip(all_axes, numbers, strict=True):
        lay_sizes_across(axes, (result.case.nbytes for result in selected))
        axes.set_ylabel(label)
        _lines(axes, selected, lambda result: result.case.nbytes, number)
    return figure, all_axes


def _throughput(results: Results) -> Any:
    title = "Throughput, one producer, 16 messages in flight (at most 1 GB of them)"
    speeds = (
        ("messages per second", lambda result: result.messages_per_s.median),
        ("GB/s, counted as what the consumer can read", lambda result: result.gb_per_s),
    )
    if (drawn := _by_size(results, 16, title, speeds)) is None:
        return None
    figure, (messages, bandwidth) = drawn
    limits = sorted(results.limits, key=lambda limit: limit.nbytes)
    sizes = [limit.nbytes for limit in limits]
    for copies, label, dashes in (
        ([limit.copies_hot_per_s for limit in limits], "memcpy, hot", (1, 1)),
        ([limit.copies_cold_per_s for limit in limits], "memcpy, cold", (4, 2)),
    ):
        gb_per_s = [speed.median * nbytes / 1e9 for speed, nbytes in zip(copies, sizes, strict=True)]
        bandwidth.plot(sizes, gb_per_s, color="black", linewidth=1.2, dashes=dashes, label=label)
    return _named(figure, bandwidth if limits else messages)


def _overview(results: Results) -> Any:
    base = {(result.case.nbytes, result.peer): result for result in _base(results, window=16) if result.peer in _OVERVIEW}
    if any((nbytes, "shmring") not in base for nbytes in _OVERVIEW_SIZES):
        return None
    where = "" if results.machine is None else f" ({results.machine.cpu}, {results.machine.cores} cores)"
    title = f"GB/s from one process to another, one producer{where}: higher is better"
    names = [name for name in reversed(_OVERVIEW) if all((nbytes, name) in base for nbytes in _OVERVIEW_SIZES)]
    figure, all_axes = panels(len(_OVERVIEW_SIZES), title, size_inches=(9.6, 2.7))
    for axes, nbytes in zip(all_axes, _OVERVIEW_SIZES, strict=True):
        speeds = [base[nbytes, name].gb_per_s for name in names]
        axes.barh([_OVERVIEW[name] for name in names], speeds, color=[_OURS.get(name, "#8d99ae") for name in names])
        for place, speed in enumerate(speeds):
            axes.text(speed, place, f" {speed:.2g}", va="center", fontsize="small")
        axes.set(title=f"tensors of {format_nbytes(nbytes)}", xlim=(0, 1.12 * max(speeds)))
        axes.grid(axis="x", alpha=0.25)
    all_axes[-1].set_yticklabels([])
    return figure


def _latency(results: Results) -> Any:
    title = "One-way latency, one producer, one message in flight: lower is better"
    latencies = (
        ("median, microseconds", lambda result: result.latency_p50_us.median),
        ("99th percentile, microseconds", lambda result: result.latency_p99_us),
    )
    drawn = _by_size(results, 1, title, latencies)
    return None if drawn is None else _named(drawn[0], drawn[1][-1])


def _scaling(results: Results) -> Any:
    base = _base(results, window=16)
    dtype = base[0].case.dtype if base else ""
    selected = [result for result in results.results if result.case.dtype == dtype and not result.case.copies_out]
    # At sizes at which the window is the same for all numbers of producers, and memory does not limit it.
    several = {result.case.nbytes for result in selected if result.case.producers > 1 and result.case.window == 16}
    sizes = sorted(several)[-3:]
    if not sizes:
        return None
    figure, all_axes = panels(len(sizes), "Several producers, one consumer:\n16 messages in flight of each, all together")
    for axes, nbytes in zip(all_axes, sizes, strict=True):
        here = [result for result in selected if result.case.nbytes == nbytes and result.case.window == 16]
        numbers = sorted({result.case.producers for result in here})
        scaled = {result.peer for result in here if result.case.producers > 1}  # a peer with one point has no line
        here = [result for result in here if result.peer in scaled]
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set(ylabel="messages per second", xlabel="producers", title=format_nbytes(nbytes))
        _lines(axes, here, lambda result: result.case.producers, lambda result: result.messages_per_s.median)
    return _named(figure, all_axes[-1])


def _cpu(results: Results) -> Any:
    selected = _base(results, window=16)
    sizes = sorted({result.case.nbytes for result in selected if result.case.nbytes >= 1 << 20})
    chosen = [*sizes[:1], *sizes[-2:-1]] if len(sizes) > 2 else sizes
    if not chosen:
        return None
    figure, all_axes = panels(len(chosen), "What a gigabyte costs, one producer, 16 messages in flight: lower is better")
    for axes, nbytes in zip(all_axes, chosen, strict=True):
        here = [result for result in selected if result.case.nbytes == nbytes]
        here.sort(key=lambda result: result.producer.cpu_s_per_gb + result.consumer.cpu_s_per_gb, reverse=True)
        _bars(axes, here)
        axes.set(title=f"{format_nbytes(nbytes)}", xlabel="CPU seconds per GB")
    all_axes[-1].legend(loc="upper right", fontsize="small")
    return figure


def _bars(axes: Any, selected: Sequence[Result]) -> None:
    names = [peer_title(result.peer) for result in selected]
    producers = [result.producer.cpu_s_per_gb for result in selected]
    consumers = [result.consumer.cpu_s_per_gb for result in selected]
    axes.barh(names, producers, color="#4c78a8", label="producer")
    axes.barh(names, consumers, left=producers, color="#f2a65a", label="consumer")
    for place, total in enumerate(a + b for a, b in zip(producers, consumers, strict=True)):
        axes.text(total, place, f" {total:.2g}", va="center", fontsize="small")
    for label, result in zip(axes.get_yticklabels(), selected, strict=True):
        if result.peer in _OURS:
            label.set(color=_OURS[result.peer], fontweight="bold")
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
