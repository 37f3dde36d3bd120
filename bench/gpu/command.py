"""``python -m bench gpu``: progress goes to stderr, tables go to stdout. Ends with 2 where no GPU can be measured.

Method: repetitions are interleaved (each size by way after way, then all of it again), so that whatever else the machine does
hits all alike; ratios are taken within a repetition, and medians are reported with the spread beside them. What can't be
opened, or fails, is a result, too: it says why, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import command_line
from bench.children import BenchError
from bench.coverage import Repetitions
from bench.gpu import copies, device, handovers
from bench.gpu.copies import BANDWIDTH, STALLS, WAYS
from bench.gpu.handovers import HAND_OVERS, ROUTES
from bench.gpu.processes import Numbers, Process
from bench.gpu.report import TITLES, Measured, Results, draw, report
from bench.machine import Machine
from bench.results import format_nbytes
from bench.tables import finish

__all__ = ["Plan", "gpu_command", "run", "steps"]

_SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)

#: What is measured, and at which size.
_Case = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: of a request's tensor, in bytes.
        ways, routes: from host memory to the GPU, and between processes.
        timed_s, stalls, messages: in each repetition: of copying, requests brought while the loop is looked at, hand-overs.
    """

    sizes: Sequence[int] = _SIZES
    ways: Sequence[str] = tuple(WAYS)
    routes: Sequence[str] = tuple(ROUTES)
    repetitions: int = 7
    timed_s: float = 0.1
    stalls: int = 10
    messages: int = 50

    @classmethod
    def quick(cls) -> Plan:
        """The sizes that targets are about, in a minute."""
        return cls(sizes=(64 << 10, 8 << 20, 64 << 20), repetitions=3, timed_s=0.05, stalls=5, messages=20)

    def subjects(self, *kinds: str) -> dict[_Case, Sequence[str]]:
        """Returns who is compared, by what is measured and at which size."""
        return {(kind, nbytes): self.routes if kind == HAND_OVERS else self.ways for kind in kinds for nbytes in self.sizes}


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + plan.repetitions * len(plan.sizes) * (2 * len(plan.ways) + len(plan.routes))


def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Measures what a plan says, with a line before each step.

    Raises:
        BenchError: the process that copies did not start; what fails later is among the results.
    """
    runs = Repetitions[_Case, Numbers](
        plan.subjects(BANDWIDTH, STALLS, HAND_OVERS), plan.repetitions, lambda case: f"{case[0]}, {format_nbytes(case[1])}"
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


@click.command("gpu", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="The sizes that targets are about, 3 repetitions, in a minute.")
@command_line.size_option(
    "--size",
    "sizes",
    item_nbytes=device.MIN_NBYTES,
    item="its marks",
    text="Of a tensor; repeatable.  [default: 64KiB to 256MiB]",
)
@click.option("--from", "ways", multiple=True, type=_WAYS, help="To the GPU; repeatable.  [default: all]")
@click.option("--by", "routes", multiple=True, type=_ROUTES, help="Between processes; repeatable.  [default: all]")
@command_line.repetitions_option("Interleaved.  [default: 7; 3 if quick]")
@command_line.json_option
@command_line.plot_option()
def gpu_command(quick: bool, json_path: Path | None, plot_stem: Path | None, **choices: Any) -> None:
    """From a slot to the GPU: bandwidth, how long the loop is held up, and hand-overs between processes.

    Fails if something could not be measured, or if a target is missed; with 2 where there is no GPU.
    """
    if (reason := device.missing()) is not None:
        raise _NoGpu(reason)
    chosen = {name: value for name, value in choices.items() if value}
    plan = dataclasses.replace(Plan.quick() if quick else Plan(), **chosen)
    with command_line.measuring(steps(plan)) as progress:
        findings = report(run(plan, progress))
    finish(findings, json_path, plot_stem, draw)
