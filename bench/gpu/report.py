"""What a run has shown: tables, targets, and JSON to keep."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from bench.gpu.device import Accelerator
from bench.gpu.plan import Absence, Results, Stalled
from bench.gpu.routes import DEVICE_SLAB, ROUTES
from bench.gpu.ways import CEILING, CLONED, PINNED_SLOT, WAYS
from bench.results import Findings, Table, Verdict, deviation, format_nbytes

__all__ = ["HAND_OVER_US", "described", "report"]

_MB = 1 << 20
#: The targets, and where they hold.
_OF_CEILING, _CEILING_FROM_NBYTES = 0.95, 8 * _MB
_OF_CLONED, _CLONED_NBYTES = 3.0, 64 * _MB
HAND_OVER_US = 150.0
_OF_SMALLEST = 1.3  # "independent of size", as for what is written in place in host memory


def report(results: Results, command: str = "") -> Findings:
    """Lays a run out as people and ``bench report`` read it."""
    return Findings(
        mode="gpu",
        machine=results.machine,
        tables=[_copies_table(results), _hand_overs_table(results)],
        notes=_notes(results),
        targets=_targets(results),
        results=results,
        command=command,
        coverage=results.coverage,
    )


def described(gpu: Accelerator) -> str:
    """Returns a GPU in words."""
    return (
        f"{gpu.name}, {gpu.memory_nbytes / 2**30:.0f} GiB, {gpu.link} to the host; driver {gpu.driver}, "
        f"torch {gpu.torch} for CUDA {gpu.cuda}"
    )


# -- tables --------------------------------------------------------------------------------------------------------------


def _copies_table(results: Results) -> Table:
    stalls = {(one.way, one.nbytes): one for one in results.stalls}
    rows = []
    for one in results.transfers:
        stall = stalls.get((one.way, one.nbytes))
        rows.append(
            [
                format_nbytes(one.nbytes),
                WAYS[one.way].title,
                f"{one.gb_per_s.median:.2f}",
                deviation(one.gb_per_s),
                "" if one.of_ceiling is None else f"{one.of_ceiling.median:.2f} x",
                *(["", "", ""] if stall is None else _stall(stall)),
            ]
        )
    return Table(
        f"from host memory to the GPU, medians of {results.repetitions} interleaved runs, every request checked",
        ["size", "from", "GB/s", "spread", f"of {WAYS[CEILING].title}", "stall us", "longest", "idle loop"],
        rows,
        texts=("from",),
        grouped=True,
    )


def _stall(one: Stalled) -> list[str]:
    return [f"{one.brought_us.median:,.0f}", f"{one.brought_us.maximum:,.0f}", f"{one.idle_us.median:,.0f}"]


def _hand_overs_table(results: Results) -> Table:
    rows = [
        [
            format_nbytes(one.nbytes),
            ROUTES[one.route].title,
            f"{one.p50_us.median:,.0f}",
            deviation(one.p50_us),
            f"{one.p99_us:,.0f}",
            f"{one.messages:,}",
        ]
        for one in results.handovers
    ]
    return Table(
        "from submit in one process until usable on the GPU in the other, every message checked",
        ["size", "by", "p50 us", "spread", "p99 us", "messages"],
        rows,
        texts=("by",),
        grouped=True,
    )


def _title(name: str) -> str:
    if name in WAYS:
        return WAYS[name].title
    return ROUTES[name].title if name in ROUTES else name


def _notes(results: Results) -> list[str]:
    return [
        f"{described(results.gpu)}.",
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
        *map(_absent, results.absences),
    ]


def _absent(one: Absence) -> str:
    size = "" if one.nbytes is None else f", {format_nbytes(one.nbytes)}"
    return f"Not measured: {_title(one.what)}{size}: {one.reason}"


# -- targets -------------------------------------------------------------------------------------------------------------


def _targets(results: Results) -> list[Verdict]:
    hand_overs = {one.nbytes: one.p50_us.median for one in results.handovers if one.route == DEVICE_SLAB}
    smallest = min(hand_overs, default=0)
    of_smallest = {nbytes: p50_us / hand_overs[smallest] for nbytes, p50_us in hand_overs.items() if nbytes > smallest}
    return [
        _judge("pinned slot: GB/s of pin_memory() memory", "8 MB and above", _OF_CEILING, "x", dict(_of_ceiling(results))),
        _judge("pinned slot: GB/s of cloning, then copying", "64 MB", _OF_CLONED, "x", dict(_of_cloned(results))),
        _judge("device slab: p50 of a hand-over", "any size", HAND_OVER_US, "us", hand_overs, at_least=False),
        _judge("device slab: p50 over that of the smallest size", "any size", _OF_SMALLEST, "x", of_smallest, at_least=False),
    ]


def _of_ceiling(results: Results) -> Iterator[tuple[int, float]]:
    for one in results.transfers:
        if one.way == PINNED_SLOT and one.nbytes >= _CEILING_FROM_NBYTES and one.of_ceiling is not None:
            yield one.nbytes, one.of_ceiling.median


def _of_cloned(results: Results) -> Iterator[tuple[int, float]]:
    """The median of the ratios within each repetition."""
    found = {one.way: one.runs for one in results.transfers if one.nbytes == _CLONED_NBYTES}
    if PINNED_SLOT in found and CLONED in found:
        pairs = zip(found[PINNED_SLOT], found[CLONED], strict=False)  # of a run that was broken off, one may have less
        yield _CLONED_NBYTES, statistics.median(ours / theirs for ours, theirs in pairs)


def _judge(what: str, at: str, limit: float, unit: str, places: Mapping[int, float], *, at_least: bool = True) -> Verdict:
    """The worst place decides."""
    asked = f"{'>=' if at_least else '<='} {limit:g} {unit}"
    if not places:
        return Verdict(what, at, asked, detail="not part of this run")
    worst = min(places.values()) if at_least else max(places.values())
    detail = ", ".join(f"{format_nbytes(nbytes)}: {number:.3g}" for nbytes, number in places.items())
    return Verdict(what, at, asked, f"{worst:.3g} {unit}", worst >= limit if at_least else worst <= limit, detail)
