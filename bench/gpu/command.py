"""``python -m bench gpu``: progress goes to stderr, tables go to stdout. Ends with 2 where no GPU can be measured.

Method: repetitions are interleaved (each size by way after way, then all of it again), so that whatever else the machine does
hits all alike; ratios are taken within a repetition, and medians are reported with the spread beside them. What can't be
opened, or fails, is a result, too: it says why, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np

from bench import command_line, plots
from bench.children import BenchError
from bench.gpu import copies, device, handovers
from bench.gpu.copies import BANDWIDTH, CEILING, CLONED, LATENCIES, PINNED_SLOT, STALLS, TO, WAYS
from bench.gpu.device import Accelerator
from bench.gpu.handovers import DEVICE_SLAB, HAND_OVERS, HOST_SLOT, ROUTES
from bench.gpu.processes import Numbers, Process
from bench.machine import Machine
from bench.modes import MODES, Timing
from bench.repetitions import Repetitions, median_ratio
from bench.results import Coverage, Findings, Spread, Table, Verdict, deviation, format_nbytes
from bench.targets import judge

_MODE = MODES["gpu"]
_KB, _MB = 1 << 10, 1 << 20
#: The targets, and where they hold.
_OF_CEILING, _CEILING_FROM_NBYTES = 0.97, 8 * _MB
_OF_CEILING_SMALL, _CEILING_SMALL_NBYTES = 0.8, _MB
_OF_TO, _TO_NBYTES = 1.0, 64 * _KB
_HELD_US = 30.0
_OF_CLONED, _CLONED_NBYTES = 3.0, 64 * _MB
_HAND_OVER_US = 100.0
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


#: A line's name, the size of a tensor in bytes, and the median.
_Point = tuple[str, int, float]


class Plotted(msgspec.Struct, frozen=True):
    """What is stored and drawn of a run.

    Attributes:
        gpu: its name.
        gb_per_s: from host memory to the GPU, by way and size.
        hand_over_us: from submit until usable in the other process, by route and size.
    """

    gpu: str
    gb_per_s: list[_Point]
    hand_over_us: list[_Point]

    @classmethod
    def of(cls, results: Results) -> Plotted:
        """Takes the medians of a run."""
        rates, hand_overs = results.of(BANDWIDTH).values(), results.of(HAND_OVERS).values()
        return cls(
            results.gpu.name,
            [(one.name, one.nbytes, statistics.median(one.medians("gb_per_s"))) for one in rates],
            [(one.name, one.nbytes, _p50_us(one)) for one in hand_overs],
        )


def report(results: Results) -> Findings:
    """Lays a run out as people and ``bench report`` read it."""
    return Findings(
        mode="gpu",
        machine=results.machine,
        tables=[_copies_table(results), _hand_overs_table(results)],
        notes=_notes(results),
        targets=_targets(results),
        results=Plotted.of(results),
        coverage=results.coverage,
    )


# -- tables --------------------------------------------------------------------------------------------------------------


_LATENCY = ("usable us", "held us", "p99")


def _copies_table(results: Results) -> Table:
    stalls, latencies = results.of(STALLS), results.of(LATENCIES)
    rows = []
    for (nbytes, name), measured in results.of(BANDWIDTH).items():
        rate = Spread.of(measured.medians("gb_per_s"))
        of_ceiling = _ratio(results, nbytes, name, CEILING)
        row = [format_nbytes(nbytes), TITLES[name], f"{rate.median:.2f}", deviation(rate)]
        row.append("" if of_ceiling is None else f"{of_ceiling:.2f} x")
        latency = latencies.get((nbytes, name))
        row += ["", "", ""] if latency is None else _latency_cells(latency)
        if (stall := stalls.get((nbytes, name))) is None:
            rows.append([*row, "", "", ""])
        else:
            brought_us, idle_us = stall.every("brought_us"), stall.every("idle_us")
            times_us = (statistics.median(brought_us), max(brought_us), statistics.median(idle_us))
            rows.append([*row, *(f"{time_us:,.0f}" for time_us in times_us)])
    return Table(
        f"from host memory to the GPU, medians of {results.repetitions} interleaved runs, every request checked",
        ["size", "from", "GB/s", "spread", f"of {TITLES[CEILING]}", *_LATENCY, "stall us", "longest", "idle loop"],
        rows,
        texts=("from",),
        grouped=True,
    )


def _latency_cells(latency: Measured) -> list[str]:
    held_us = latency.every("held_us")
    times_us = (statistics.median(latency.medians("usable_us")), statistics.median(held_us), np.percentile(held_us, 99))
    return [f"{time_us:,.0f}" for time_us in times_us]


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
    ours, theirs = (rates[of].medians("gb_per_s") if of in rates else () for of in ((nbytes, name), (nbytes, other)))
    return median_ratio(ours, theirs)


def _notes(results: Results) -> list[str]:
    gpu = results.gpu
    return [
        f"{gpu.name}, {gpu.memory_nbytes / 2**30:.0f} GiB, {gpu.link} to the host; driver {gpu.driver}, "
        f"torch {gpu.torch} for CUDA {gpu.cuda}.",
        f"Bandwidth: requests follow each other, up to 64 of them and 256 MB in flight (at least two requests), with "
        f"{results.timed_s:g} s of copying in each repetition. Spread: the slowest and the fastest repetition, compared with "
        "the median. All copies are non_blocking.",
        "Cloned, or pinned each: what vLLM does with a tensor in shared memory, which it may not keep. torch uses all of its "
        "threads.",
        "Usable: the median time from the beginning of a request until its data can be used, with one request at a time. Held: "
        "how long this keeps the loop busy, the median and the 99th percentile.",
        "Stall: the longest time between two turns of the engine's loop during one request; the median and the longest of all "
        "requests. idle loop: the same, of a loop that does nothing.",
        "Hand-over: one message at a time. The time begins before it is submitted. It ends when the engine has noticed the end "
        "of a small kernel that reads it on the engine's stream. The content was written before, on the GPU or in host memory.",
        "torch CUDA IPC per tensor: the tensor goes through torch.multiprocessing.Queue to a thread of the engine, which uses "
        "it at once.",
    ]


# -- targets -------------------------------------------------------------------------------------------------------------


def announced() -> list[Verdict]:
    """Returns the targets, of which nothing was measured."""
    nothing: Any = SimpleNamespace(of=lambda what: {})
    return _targets(nothing)


def _targets(results: Results) -> list[Verdict]:
    sizes = sorted({nbytes for nbytes, _ in results.of(BANDWIDTH)})
    of_ceiling = [(nbytes, _ratio(results, nbytes, PINNED_SLOT, CEILING)) for nbytes in sizes if nbytes >= _CEILING_FROM_NBYTES]
    of_ceiling_small = [(_CEILING_SMALL_NBYTES, _ratio(results, _CEILING_SMALL_NBYTES, PINNED_SLOT, CEILING))]
    latencies = results.of(LATENCIES)
    ours, to = (latencies.get((_TO_NBYTES, name)) for name in (PINNED_SLOT, TO))
    both = () if ours is None or to is None else (ours.medians("usable_us"), to.medians("usable_us"))
    of_to = [(_TO_NBYTES, median_ratio(*both))] if both else []
    held_us = [
        (nbytes, statistics.median(one.every("held_us"))) for (nbytes, name), one in latencies.items() if name == PINNED_SLOT
    ]
    of_cloned = [(_CLONED_NBYTES, _ratio(results, _CLONED_NBYTES, PINNED_SLOT, CLONED))]
    p50s_us = [(nbytes, _p50_us(one)) for (nbytes, name), one in results.of(HAND_OVERS).items() if name == DEVICE_SLAB]
    of_smallest = [(nbytes, p50_us / p50s_us[0][1]) for nbytes, p50_us in p50s_us[1:]]
    return [
        judge(
            "pinned slot: latency over that of torch's tensor.to from pin_memory() memory", "64 KB", _OF_TO, "x", _named(of_to),
            at_least=False,
        ),
        judge("pinned slot: GB/s of pin_memory() memory", "1 MB", _OF_CEILING_SMALL, "x", _named(of_ceiling_small)),
        judge("pinned slot: GB/s of pin_memory() memory", "8 MB and above", _OF_CEILING, "x", _named(of_ceiling)),
        judge(
            "pinned slot: how long claim.to holds the loop, p50", "any size", _HELD_US, "us", _named(held_us), at_least=False
        ),
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
_OTHERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f", "#17becf")


def _figure(plotted: Plotted) -> Any:
    figure, (bandwidth, hand_overs) = plots.panels(2, plotted.gpu, (12.8, 5.2))
    _draw_lines(bandwidth, plotted.gb_per_s)
    bandwidth.set(title="from host memory to the GPU", ylabel="GB/s")
    _draw_lines(hand_overs, plotted.hand_over_us)
    hand_overs.axhline(_HAND_OVER_US, color="black", linewidth=0.8, linestyle=":")
    hand_overs.set(title="from submit until usable in the other process: lower is better", ylabel="median, microseconds")
    return figure


def _draw_lines(axes: Any, points: Sequence[_Point]) -> None:
    """Draws a line for each name: its numbers by size."""
    others = iter(_OTHERS)

    def style(name: str) -> dict[str, Any]:
        look: dict[str, Any] = {"color": _OURS[name], "linewidth": 3.0} if name in _OURS else {"color": next(others)}
        return (look if name != CEILING else {"color": "black", "linestyle": "--"}) | {"marker": "o", "label": TITLES[name]}

    plots.draw_lines(axes, points, style)
    plots.lay_sizes_across(axes, (nbytes for _, nbytes, _ in points))
    if points:
        axes.legend(fontsize="small")


#: Draws bandwidth and hand-overs by size, a line for each way and route.
draw = functools.partial(plots.draw_stored, Plotted, _figure)


#: What is measured, and at which size.
_Case = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: of a request's tensor, in bytes.
        ways, routes: from host memory to the GPU, and between processes.
        timed_s, latencies, stalls, messages: in each repetition: of copying, requests brought one by one, requests brought
            while the loop is looked at, hand-overs.
    """

    sizes: Sequence[int] = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
    ways: Sequence[str] = tuple(WAYS)
    routes: Sequence[str] = tuple(ROUTES)
    repetitions: int = _MODE.timing().repetitions
    timed_s: float = _MODE.timing().timed_s
    latencies: int = 50
    stalls: int = 10
    messages: int = 50

    @classmethod
    def quick(cls) -> Plan:
        """The sizes that targets are about, in a minute."""
        sizes = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
        timing = _MODE.timing(quick=True)
        return cls(sizes=sizes, repetitions=timing.repetitions, timed_s=timing.timed_s, latencies=20, stalls=5, messages=20)

    def subjects(self, *kinds: str) -> dict[_Case, Sequence[str]]:
        """Returns who is compared, by what is measured and at which size."""
        return {(kind, nbytes): self.routes if kind == HAND_OVERS else self.ways for kind in kinds for nbytes in self.sizes}


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + plan.repetitions * len(plan.sizes) * (3 * len(plan.ways) + len(plan.routes))


def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Measures what a plan says, with a line before each step.

    Raises:
        BenchError: the process that copies did not start; what fails later is among the results.
    """
    runs = Repetitions[_Case, Numbers](
        plan.subjects(BANDWIDTH, LATENCIES, STALLS, HAND_OVERS),
        plan.repetitions,
        lambda case: f"{case[0]}, {format_nbytes(case[1])}",
    )

    def measure(kind: str, process: Process, amount: float, absent: Mapping[str, str]) -> None:
        """What could not be opened is absent, by name."""
        cases = list(plan.subjects(kind))
        for name, reason in absent.items():
            runs.fail(cases, [name], reason)
        runs.measure(cases, lambda case, name: process.carry_out(kind, name, case[1], amount), progress, TITLES)

    @contextlib.contextmanager
    def going(kind: str) -> Iterator[None]:
        """A process that ends or hangs here takes nothing with it that was measured before."""
        try:
            yield
        except BenchError as error:
            for case, names in plan.subjects(kind).items():
                runs.fail([case], names, f"broken off: {error}")

    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        progress("starting: copies")
        ways = functools.partial(copies.openers, directory, plan.sizes, plan.ways)
        with Process("copies", ways, copies.COMMANDS) as process:
            gpu, absent = process.open()
            measure(BANDWIDTH, process, plan.timed_s, absent)
            measure(LATENCIES, process, plan.latencies, absent)
            measure(STALLS, process, plan.stalls, absent)
            with going(STALLS):
                process.finish()
        progress("starting: engine and frontend")
        shared = {name: ROUTES[name].create_shared() for name in plan.routes}
        answering = functools.partial(handovers.openers, "answering", directory, max(plan.sizes), shared)
        with going(HAND_OVERS), Process("engine", answering, {}) as engine:
            _, absent = engine.open()
            answered = {name: value for name, value in shared.items() if name not in absent}
            asking = functools.partial(handovers.openers, "asking", directory, max(plan.sizes), answered)
            with Process("frontend", asking, handovers.COMMANDS) as frontend:
                measure(HAND_OVERS, frontend, plan.messages, frontend.open()[1] | absent)
                frontend.finish()
            engine.finish()
    measured = [Measured(kind, name, nbytes, of[name]) for (kind, nbytes), of in runs.measured.items() for name in of]
    return Results(Machine.here(), gpu, plan.repetitions, plan.timed_s, measured, runs.coverage())


_WAYS, _ROUTES = click.Choice(list(WAYS)), click.Choice(list(ROUTES))


class _NoGpu(click.ClickException):
    """Nothing went wrong: there is nothing to measure."""

    exit_code = 2


@command_line.benchmark(
    "gpu",
    quick="The sizes that targets are about, 3 repetitions, in a minute.",
    repetitions="Interleaved.",
    seconds=False,
    draw=draw,
)
@command_line.size_option(
    "--size",
    "sizes",
    item_nbytes=device.MIN_NBYTES,
    item="its marks",
    text="Of a tensor; repeatable.  [default: 64KiB to 256MiB]",
)
@click.option("--from", "ways", multiple=True, type=_WAYS, help="To the GPU; repeatable.  [default: all]")
@click.option("--by", "routes", multiple=True, type=_ROUTES, help="Between processes; repeatable.  [default: all]")
def gpu_command(timing: Timing, quick: bool, **choices: Any) -> Findings:
    """From a slot to the GPU: bandwidth, how long the loop is held up, and hand-overs between processes.

    Fails if something could not be measured, or if a target is missed; with 2 where there is no GPU.
    """
    if (reason := device.missing()) is not None:
        raise _NoGpu(reason)
    plan = dataclasses.replace(Plan.quick() if quick else Plan(), repetitions=timing.repetitions)
    plan = dataclasses.replace(plan, **command_line.chosen({}, **choices))
    with command_line.measuring(steps(plan)) as progress:
        return report(run(plan, progress))
