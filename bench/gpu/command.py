"""``python -m bench gpu``. What can't be opened, or fails, is a result, too: it says why, and the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import click
import torch
import uvloop

from bench import columns, targets
from bench.children import BenchError
from bench.columns import Column, compare
from bench.command_line import benchmark
from bench.gpu import copies, device, handovers
from bench.gpu.copies import CEILING, CLONED, PINNED_SLOT, TO, WAYS
from bench.gpu.device import Gpu, Numbers, Openers, enter_all
from bench.gpu.handovers import DEVICE_SLAB, ROUTES, Engine
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured, Number, percentile
from bench.results import Table, format_nbytes
from bench.targets import Target, medians, ratios

_LATENCIES, _MESSAGES = 50, 50  # in each repetition: requests brought one by one, and hand-overs
_KB, _MB = 1 << 10, 1 << 20

#: Of ways and routes.
TITLES = {name: compared.title for name, compared in (WAYS | ROUTES).items()}


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
    columns.ratio(f"of {TITLES[CEILING]}", CEILING, _RATE, inverse=True),
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


def _tables(measured: Measured) -> Iterator[Table]:
    def of(names: Collection[str]) -> Measured:
        found = {size: {name: runs for name, runs in of_size.items() if name in names} for size, of_size in measured.items()}
        return {size: of_size for size, of_size in found.items() if of_size}

    copied = "from host memory to the GPU, every request checked"
    yield compare(copied, ("size", "from"), of(WAYS), _COPIES, TITLES, format_nbytes)
    between = "from submit in one process until usable on the GPU in the other, every message checked"
    yield compare(between, ("size", "by"), of(ROUTES), _BETWEEN, TITLES, format_nbytes)


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

PLAN = Plan(
    mode="gpu",
    cases=dict.fromkeys((64 * _KB, _MB, 8 * _MB, 64 * _MB), (*WAYS, *ROUTES)),
    timing=Timing(5, 0.1),
    titles=TITLES,
    title=format_nbytes,
    tables=_tables,
    targets=TARGETS,
    notes=[
        "Bandwidth: requests follow each other, up to 64 of them and 256 MB in flight (at least two requests). What is timed "
        "is copying alone. Copies are non_blocking.",
        "Cloned: what vLLM does with a tensor in shared memory, which it may not keep. torch uses all of its threads.",
        "Usable: the median time from the beginning of a request until its data can be used, with one request at a time. Held: "
        "how long this keeps the loop busy, the median and the 99th percentile.",
        "Hand-over: one message at a time. The time begins before it is submitted. It ends when the engine has noticed the end "
        "of a small kernel that reads it on the engine's stream. The content was written before, on the GPU or in host memory.",
        "torch CUDA IPC per tensor: the tensor goes through torch.multiprocessing.Queue to a thread of the engine, which uses "
        "it at once.",
    ],
)


def run(runs: Runs, gpu: Gpu) -> None:
    """Measures: copies in this process, which is then the frontend of an engine for the hand-overs.

    What can't be opened, or fails, is a result: it says why, and the rest goes on.
    """
    runs.notes.append(gpu.describe())
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a clone takes by itself; vLLM leaves it less
    sizes, planned = list(runs.cases), set(itertools.chain.from_iterable(runs.cases.values()))
    ways, routes = ([name for name in names if name in planned] for names in (WAYS, ROUTES))

    def measure(openers: Openers, one: Callable[..., Awaitable[Numbers]], *amounts: float) -> None:
        async def measured(nbytes: int, name: str) -> Numbers:
            return await one(gpu, opened[name], nbytes, *amounts)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack = contextlib.AsyncExitStack()
            opened, absent = runner.run(enter_all(stack, openers))
            for name, reason in absent.items():
                runs.fail(sizes, [name], reason)
            runs.measure(lambda nbytes, name: runner.run(measured(nbytes, name)), subjects=openers)
            runner.run(stack.aclose())

    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        measure(copies.openers(directory, sizes, ways, gpu), copies.measure, runs.plan.timing.timed_s, _LATENCIES)
        shared = {name: ROUTES[name].create_shared() for name in routes}
        if not shared:
            return
        try:
            with Engine(directory, max(sizes), shared) as engine:
                for name, reason in engine.open().items():
                    runs.fail(sizes, [name], reason)
                    del shared[name]
                measure(handovers.openers("asking", directory, max(sizes), shared, gpu), handovers.measure, _MESSAGES)
                engine.finish()
        except BenchError as error:
            runs.fail(sizes, routes, f"broken off: {error}")


class _NoGpu(click.ClickException):
    """Nothing went wrong: there is nothing to measure."""

    exit_code = 2


@benchmark(PLAN)
def gpu_command(runs: Runs) -> None:
    """From a slot to the GPU: bandwidth, how long the loop is held up, and hand-overs between processes.

    Ends with 2 where there is no GPU.
    """
    if (reason := device.missing()) is not None:
        raise _NoGpu(reason)
    run(runs, Gpu())
