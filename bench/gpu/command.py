"""``python -m bench gpu``. What can't be opened, or fails, is a result, too: it says why, and the rest goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import click

from bench import columns, command_line, targets
from bench.children import BenchError
from bench.columns import Column, compare
from bench.gpu import copies, device, handovers
from bench.gpu.copies import CEILING, CLONED, PINNED_SLOT, TO, WAYS
from bench.gpu.handovers import DEVICE_SLAB, ROUTES
from bench.gpu.processes import Numbers, Process
from bench.repetitions import Measured, Number, Repetitions, Timing, percentile
from bench.results import Coverage, Findings, format_nbytes
from bench.targets import Target, medians, ratios

TIMING = Timing(5, 0.1)
_KB, _MB = 1 << 10, 1 << 20

#: Of ways and routes.
TITLES = {name: compared.title for name, compared in (WAYS | ROUTES).items()}


class Results(NamedTuple):
    """A run: the GPU, its plan, and the numbers of ways and of routes, by size."""

    gpu: str
    plan: Plan
    ways: Measured
    routes: Measured
    coverage: Coverage


def _all(name: str) -> Callable[[Numbers], Sequence[float]]:
    """What a repetition has of a number."""
    return lambda run: run.get(name, ())


def _of(name: str) -> Number:
    """The median of a number in a repetition."""
    return lambda run: statistics.median(run[name]) if name in run else None


_RATE, _USABLE, _HAND_OVER = _of("gb_per_s"), _of("usable_us"), _of("us")

# -- tables --------------------------------------------------------------------------------------------------------------


_COPIES = (
    columns.median("GB/s", _RATE, 2),
    columns.spread("spread", _RATE),
    columns.over(f"of {TITLES[CEILING]}", lambda way: CEILING, _RATE),
    columns.median("usable us", _USABLE),
    columns.percentile("held us", _all("held_us"), 50),
    columns.percentile("p99", _all("held_us"), 99),
)
_BETWEEN = (
    columns.median("p50 us", _HAND_OVER),
    columns.spread("spread", _HAND_OVER),
    columns.percentile("p99 us", _all("us"), 99),
    Column("messages", lambda row: f"{sum(len(run['us']) for run in row.runs):,}"),
)


def report(results: Results) -> Findings:
    copied = "from host memory to the GPU, every request checked"
    between = "from submit in one process until usable on the GPU in the other, every message checked"
    measured = {size: {**results.ways.get(size, {}), **results.routes.get(size, {})} for size in results.plan.sizes}
    return Findings(
        mode="gpu",
        tables=[
            compare(copied, ("size", "from"), results.ways, _COPIES, TITLES, format_nbytes),
            compare(between, ("size", "by"), results.routes, _BETWEEN, TITLES, format_nbytes),
        ],
        notes=_notes(results),
        targets=[target.judge(measured) for target in TARGETS],
        coverage=results.coverage,
    )


def _notes(results: Results) -> list[str]:
    return [
        results.gpu,
        f"Bandwidth: requests follow each other, up to 64 of them and 256 MB in flight (at least two requests), with "
        f"{results.plan.timed_s:g} s of copying in each of {results.plan.repetitions} repetitions. Copies are non_blocking.",
        "Cloned: what vLLM does with a tensor in shared memory, which it may not keep. torch uses all of its threads.",
        "Usable: the median time from the beginning of a request until its data can be used, with one request at a time. Held: "
        "how long this keeps the loop busy, the median and the 99th percentile.",
        "Hand-over: one message at a time. The time begins before it is submitted. It ends when the engine has noticed the end "
        "of a small kernel that reads it on the engine's stream. The content was written before, on the GPU or in host memory.",
        "torch CUDA IPC per tensor: the tensor goes through torch.multiprocessing.Queue to a thread of the engine, which uses "
        "it at once.",
    ]


# -- targets -------------------------------------------------------------------------------------------------------------

_AS_COPIED = "pinned slot: GB/s of pin_memory() memory"


def _sizes(measured: Measured, name: str, least_nbytes: int = 0) -> dict[str, int]:
    """The sizes that something was measured at."""
    return {format_nbytes(nbytes): nbytes for nbytes in measured if nbytes >= least_nbytes and name in measured[nbytes]}


def _as_copied(measured: Measured) -> targets.Numbers:
    return ratios(PINNED_SLOT, CEILING, _RATE, _sizes(measured, PINNED_SLOT, 8 * _MB))(measured)


def _held(measured: Measured) -> targets.Numbers:
    for size, nbytes in _sizes(measured, PINNED_SLOT).items():
        yield size, percentile(measured[nbytes][PINNED_SLOT], _all("held_us"), 50)


def _handed_over(measured: Measured) -> targets.Numbers:
    return medians(DEVICE_SLAB, _HAND_OVER, _sizes(measured, DEVICE_SLAB))(measured)


def _of_smallest(measured: Measured) -> targets.Numbers:
    times = [(size, us) for size, us in _handed_over(measured) if us is not None]
    for size, us in times[1:]:
        yield size, us / times[0][1]


TARGETS = (
    Target(
        "pinned slot: latency over that of torch's tensor.to from pin_memory() memory", "64 KB", 1.0, "x",
        ratios(PINNED_SLOT, TO, _USABLE, {"64 KB": 64 * _KB}), at_least=False,
    ),
    Target(_AS_COPIED, "1 MB", 0.8, "x", ratios(PINNED_SLOT, CEILING, _RATE, {"1 MB": _MB})),
    Target(_AS_COPIED, "8 MB and above", 0.97, "x", _as_copied),
    Target("pinned slot: how long claim.to holds the loop, p50", "any size", 30.0, "us", _held, at_least=False),
    Target(
        "pinned slot: GB/s of cloning, then copying", "64 MB", 3.0, "x",
        ratios(PINNED_SLOT, CLONED, _RATE, {"64 MB": 64 * _MB}),
    ),
    Target("device slab: p50 of a hand-over", "any size", 100.0, "us", _handed_over, at_least=False),
    # "Independent of size", as for what is written in place in host memory.
    Target("device slab: p50 over that of the smallest size", "any size", 1.3, "x", _of_smallest, at_least=False),
)  # fmt: skip


# -- the run -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: of a request's tensor, in bytes.
        ways, routes: from host memory to the GPU, and between processes.
        timed_s, latencies, messages: in each repetition: of copying, requests brought one by one, hand-overs.
    """

    sizes: Sequence[int] = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
    ways: Sequence[str] = tuple(WAYS)
    routes: Sequence[str] = tuple(ROUTES)
    repetitions: int = TIMING.repetitions
    timed_s: float = TIMING.timed_s
    latencies: int = 50
    messages: int = 50


def run(plan: Plan) -> Results:
    """Measures what a plan says; raises BenchError if the process that copies did not start."""
    ways = Repetitions[int, Numbers](dict.fromkeys(plan.sizes, tuple(plan.ways)), plan.repetitions, format_nbytes)
    routes = Repetitions[int, Numbers](dict.fromkeys(plan.sizes, tuple(plan.routes)), plan.repetitions, format_nbytes)

    def measure(runs: Repetitions[int, Numbers], process: Process, absent: Mapping[str, str], *amounts: float) -> None:
        """What could not be opened is absent, by name."""
        for name, reason in absent.items():
            runs.fail(plan.sizes, [name], reason)
        runs.measure(plan.sizes, lambda nbytes, name: process.measure(name, nbytes, *amounts), TITLES)
        with contextlib.suppress(BenchError):  # who hangs now takes nothing with it that was measured
            process.finish()

    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        click.echo("starting: copies", err=True)
        copying = functools.partial(copies.openers, directory, plan.sizes, plan.ways)
        with Process("copies", copying, copies.measure) as process:
            gpu, absent = process.open()
            measure(ways, process, absent, plan.timed_s, plan.latencies)
        click.echo("starting: engine and frontend", err=True)
        shared = {name: ROUTES[name].create_shared() for name in plan.routes}
        answering = functools.partial(handovers.openers, "answering", directory, max(plan.sizes), shared)
        try:
            with Process("engine", answering) as engine:
                _, absent = engine.open()
                answered = {name: value for name, value in shared.items() if name not in absent}
                asking = functools.partial(handovers.openers, "asking", directory, max(plan.sizes), answered)
                with Process("frontend", asking, handovers.measure) as frontend:
                    measure(routes, frontend, frontend.open()[1] | absent, plan.messages)
                engine.finish()
        except BenchError as error:
            routes.fail(plan.sizes, plan.routes, f"broken off: {error}")
    return Results(gpu, plan, ways.measured, routes.measured, ways.coverage() + routes.coverage())


class _NoGpu(click.ClickException):
    """Nothing went wrong: there is nothing to measure."""

    exit_code = 2


@command_line.benchmark("gpu", TIMING)
def gpu_command(timing: Timing) -> Findings:
    """From a slot to the GPU: bandwidth, how long the loop is held up, and hand-overs between processes.

    Ends with 2 where there is no GPU.
    """
    if (reason := device.missing()) is not None:
        raise _NoGpu(reason)
    return report(run(Plan(repetitions=timing.repetitions, timed_s=timing.timed_s)))
