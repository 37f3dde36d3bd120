"""What is drawn of ``bench transport``: the README's bars, and lines by size. matplotlib is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.command_line import check_plotter
from bench.machine import Machine
from bench.messages import Case
from bench.results import format_nbytes
from bench.transport import Stored

_OURS = {"shmring": "#c1121f", "shmring-in-place": "#f77f00", "shmring-busy-poll": "#b5179e"}
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


def draw(stored: Sequence[Stored], path: Path) -> bool:
    """Draws messages a second and latency over the size of a tensor, a line for each peer; returns whether there is any."""
    in_flight, alone = ([one for one in stored if one.case.producers == 1 and one.case.window == window] for window in (16, 1))
    if not in_flight:
        return False
    drawn = [("messages per second, 16 in flight", in_flight, lambda one: one.messages_per_s)]
    drawn += [("median latency in microseconds, one in flight", alone, lambda one: one.p50_us)] * bool(alone)
    names = sorted({one.peer for one in in_flight}, key=lambda name: (name not in _OURS, name))
    return _save(path, lambda: _lines(drawn, names))


def draw_overview(stored: Sequence[Stored], machine: Machine | None, path: Path) -> bool:
    """Draws what shmring and the ways of today move at 1 MB and at 64 MB, bars from zero; returns whether that was measured."""
    speeds = {
        (one.case.nbytes, one.peer): one.messages_per_s * one.case.nbytes / 1e9
        for one in stored
        if one.case == Case(one.case.nbytes)
    }
    names = [name for name in reversed(_OVERVIEW) if all((nbytes, name) in speeds for nbytes in _OVERVIEW_SIZES)]
    where = "" if machine is None else f" ({machine.cpu}, {machine.cores} cores)"
    return "shmring" in names and _save(path, lambda: _bars(speeds, names, where))


def _save(path: Path, make: Callable[[], Any]) -> bool:
    check_plotter()
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}):
        make().savefig(path, metadata={"Date": None})
    return True


def _panels(width: int, size_inches: tuple[float, float], title: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    figure = Figure(figsize=size_inches, layout="constrained")
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure, list(figure.subplots(1, width, squeeze=False)[0])


def _lines(drawn: Sequence[tuple[str, Sequence[Stored], Callable[[Stored], float]]], names: Sequence[str]) -> Any:
    figure, all_axes = _panels(len(drawn), (6.4 * len(drawn), 5.6), "One producer (at most 1 GB in flight)")
    for axes, (title, found, number) in zip(all_axes, drawn, strict=True):
        for place, name in enumerate(names):
            line = sorted((one.case.nbytes, number(one)) for one in found if one.peer == name)
            look = {"color": _OURS[name], "linewidth": 3.0} if name in _OURS else {"color": f"C{place % 10}", "linewidth": 1.2}
            across, up = [nbytes for nbytes, _ in line], [value for _, value in line]
            axes.plot(across, up, label=name, marker="os^vDP*X"[place % 8], **look)
        sizes = sorted({one.case.nbytes for one in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_nbytes(nbytes) for nbytes in sizes])
        axes.set_yscale("log")
        axes.grid(which="major", alpha=0.25)
        axes.set(title=title, xlabel="size of a tensor")
    figure.legend(handles=all_axes[0].get_lines(), loc="outside right center", fontsize="small")
    return figure


def _bars(speeds: dict[tuple[int, str], float], names: Sequence[str], where: str) -> Any:
    title = f"GB/s from one process to another, one producer{where}: higher is better"
    figure, all_axes = _panels(len(_OVERVIEW_SIZES), (9.6, 2.7), title)
    for axes, nbytes in zip(all_axes, _OVERVIEW_SIZES, strict=True):
        here = [speeds[nbytes, name] for name in names]
        axes.barh([_OVERVIEW[name] for name in names], here, color=[_OURS.get(name, "#8d99ae") for name in names])
        for place, speed in enumerate(here):
            axes.text(speed, place, f" {speed:.2g}", va="center", fontsize="small")
        axes.set(title=f"tensors of {format_nbytes(nbytes)}", xlim=(0, 1.12 * max(here)))
        axes.grid(axis="x", alpha=0.25)
    all_axes[-1].set_yticklabels([])
    return figure
