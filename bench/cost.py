"""``python -m bench cost``: the CPU time that a message takes of both ends, which are one process here.

Two processes that wait for each other also pay for waking and for cold caches, and on a crowded machine for each other. In
one process nobody waits: what is left is the work itself, so that a change of it shows, however small. Engine and frontend are
those of ``bench transport`` (:mod:`bench.peers.shmring_ring`), on one event loop, with 16 messages in flight.

CPU is that of all threads of the process, user and system time, over the messages of the timed phase; the benchmark's own
stamps and checks are in it. Cases are interleaved, and each has a fresh ring in each repetition.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
import torch
import uvloop

from bench.command_line import (
    SETTINGS,
    NotMeasured,
    json_option,
    repetitions_option,
    seconds_option,
    shown_progress,
)  # fmt: skip
from bench.coverage import Coverage, Planned, Status
from bench.machine import Machine
from bench.messages import Cell, Sink, Source, Start
from bench.peers import PEERS
from bench.results import Findings, Spread, Table, deviation, format_nbytes
from bench.tables import deliver

__all__ = ["CASES", "Case", "Cost", "both_ends", "cost_command", "measure"]

_WINDOW = 16
_LIMIT_S = 60.0  # of a repetition; the slowest takes a second
_SUBJECT = "both ends"


class Case(msgspec.Struct, frozen=True):
    """A size of messages, and how they travel.

    Attributes:
        way: in words.
        peer: whose ends are run.
    """

    nbytes: int
    way: str
    peer: str

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.way}"


CASES = (
    Case(4 << 10, "inline", "shmring"),
    Case(64 << 10, "copied", "shmring"),
    *(Case(nbytes << 10, "in place", "shmring-in-place") for nbytes in (64, 1 << 10, 8 << 10, 64 << 10)),
)


class Cost(msgspec.Struct, frozen=True):
    """What a case costs.

    Attributes:
        cpu_us: CPU microseconds for each message.
        messages: in all repetitions.
    """

    case: str
    cpu_us: Spread
    messages: int
    runs: list[float]


async def both_ends(case: Case, timed_s: float, warm_up_s: float, directory: str) -> tuple[float, int]:
    """Returns CPU microseconds for each message of a case, and how many messages there were."""
    cell = Cell(nbytes=case.nbytes, window=_WINDOW, warm_up_s=warm_up_s, timed_s=timed_s, limit_s=_LIMIT_S, directory=directory)
    start, peer, listening = Start(), PEERS[case.peer], asyncio.Event()
    source, sink = Source(cell, 0, start), Sink(cell, start)
    async with asyncio.timeout(cell.limit_s), asyncio.TaskGroup() as ends:
        ends.create_task(peer.consume(cell, None, sink, listening.set))
        await listening.wait()
        ends.create_task(peer.produce(cell, None, source))
    cost = sink.measurement().consumer
    assert cost is not None, "a sink that has measured knows its cost"
    return cost.cpu_s / cost.messages * 1e6, cost.messages


def measure(
    cases: Sequence[Case], repetitions: int, timed_s: float, warm_up_s: float, progress: Callable[[str], None]
) -> Findings:
    """Measures cases in turn, again and again; one that fails is left out from then on, and said.

    Args:
        cases: what to measure.
        repetitions: of each.
        timed_s, warm_up_s: of each repetition.
        progress: called with a line before each of them.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    runs: dict[Case, list[tuple[float, int]]] = {case: [] for case in cases}
    failures: dict[tuple[str, str], tuple[Status, str]] = {}
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        for repetition, case in itertools.product(range(repetitions), cases):
            if (case.title, _SUBJECT) in failures:
                continue
            progress(f"{case.title}, repetition {repetition + 1} of {repetitions}")
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runs[case].append(runner.run(both_ends(case, timed_s, warm_up_s, directory)))
            except (Exception, ExceptionGroup) as error:  # noqa: BLE001 # it has its place among the results
                failures[case.title, _SUBJECT] = (Status.FAILED, f"{type(error).__name__}: {error}")
    costs = []
    for case, measured in runs.items():
        if measured:
            each_us, messages = zip(*measured, strict=True)
            costs.append(Cost(case.title, Spread.of(each_us), sum(messages), list(each_us)))
    rows = [[cost.case, f"{cost.cpu_us.median:.1f}", deviation(cost.cpu_us), f"{cost.messages:,}"] for cost in costs]
    title = f"cost: CPU microseconds a message of both ends in one process, {_WINDOW} in flight"
    return Findings(
        mode="cost",
        machine=Machine.here(),
        tables=[Table(title, ["message", "CPU us", "least, most", "messages"], rows)],
        notes=[
            f"Medians of {repetitions} interleaved repetitions of {timed_s:g} s. The benchmark's stamps and checks are in it."
        ],
        results=costs,
        coverage=Coverage.of(
            [Planned(case.title, [_SUBJECT], repetitions) for case in cases],
            {(case.title, _SUBJECT): len(measured) for case, measured in runs.items()},
            failures,
        ),
    )


@click.command("cost", context_settings=SETTINGS)
@click.option("--quick", is_flag=True, help="3 repetitions of 0.2 s.")
@repetitions_option("Of each case, interleaved.  [default: 7; 3 if quick]")
@seconds_option("1; 0.2 if quick")
@json_option
def cost_command(quick: bool, repetitions: int | None, seconds: float | None, json_path: Path | None) -> None:
    """CPU time of a message at both ends in one process: inline, copied, and in place up to 64 MB."""
    repetitions = repetitions or (3 if quick else 7)
    with shown_progress(repetitions * len(CASES)) as progress:
        findings = measure(CASES, repetitions, seconds or (0.2 if quick else 1.0), 0.1 if quick else 0.3, progress)
    deliver(findings, json_path)
    if findings.failures:
        raise NotMeasured(f"{findings.failures} measurements failed: see the table")
