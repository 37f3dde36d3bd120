"""What is drawn of ``bench transport``: the README's bars. matplotlib is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.children import BenchError
from bench.machine import Machine
from bench.messages import Case
from bench.results import format_nbytes
from bench.transport import Stored

_OURS, _OTHERS = "#c1121f", "#8d99ae"
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


def draw_overview(stored: Sequence[Stored], machine: Machine | None, path: Path) -> bool:
    """Draws what shmring and the ways of today move at 1 MB and at 64 MB, bars from zero; returns whether that was measured.

    Text stays text, and the same results give the same file.
    """
    speeds = {
        (one.case.nbytes, one.peer): one.messages_per_s * one.case.nbytes / 1e9
        for one in stored
        if one.case == Case(one.case.nbytes)
    }
    names = [name for name in reversed(_OVERVIEW) if all((nbytes, name) in speeds for nbytes in _OVERVIEW_SIZES)]
    if "shmring" not in names:
        return False
    try:
        import matplotlib
        from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display
    except ImportError:
        raise BenchError("a plot needs matplotlib: pip install -e '.[bench]' in a checkout of shmring") from None
    where = "" if machine is None else f" ({machine.cpu}, {machine.cores} cores)"
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}):
        figure = Figure(figsize=(9.6, 2.7), layout="constrained")
        title = f"GB/s from one process to another, one producer{where}: higher is better"
        figure.suptitle(title, fontsize="large", fontweight="bold")
        all_axes = figure.subplots(1, len(_OVERVIEW_SIZES))
        for axes, nbytes in zip(all_axes, _OVERVIEW_SIZES, strict=True):
            here = [speeds[nbytes, name] for name in names]
            axes.barh(
                [_OVERVIEW[name] for name in names], here, color=[_OURS if name == "shmring" else _OTHERS for name in names]
            )
            for place, speed in enumerate(here):
                axes.text(speed, place, f" {speed:.2g}", va="center", fontsize="small")
            axes.set(title=f"tensors of {format_nbytes(nbytes)}", xlim=(0, 1.12 * max(here)))
            axes.grid(axis="x", alpha=0.25)
        all_axes[-1].set_yticklabels([])
        figure.savefig(path, metadata={"Date": None})
    return True
