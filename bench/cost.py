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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import torch
import uvloop

from bench.children import BenchError, described
from bench.command_line import SETTINGS, NotMeasured, json_option, repetitions_option, seconds_option, shown_progress
from bench.interleaving import Plan, Round, Run
from bench.machine import Machine
from bench.messages import Cell, Sink, Source, Start
from bench.peers import PEERS, Peer
from bench.peers.peer import Adapter
from bench.results import Findings, Spread, Table, deviation, format_nbytes
from bench.tables import deliver

__all__ = ["CASES", "Case", "Cost", "both_ends", "cost_command", "measure", "plan_of"]

_WINDOW = 16


class Case(msgspec.Struct, frozen=True):
    """A size of messages, and how they travel.

    Attributes:
        way: in words.
        peer: whose ends are run.
    """

    nbytes: int
    way: str
    peer: str

    ends: ClassVar[int] = 0  # processes that send: both ends are in this one

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.way}"

    def cell(self, **timing: Any) -> tuple[Cell, Peer]:
        """Returns what is run, and whose ends."""
        return Cell(nbytes=self.nbytes, window=_WINDOW, **timing), PEERS[self.peer]


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


async def both_ends(cell: Cell, peer: Peer) -> tuple[float, int]:
    """Returns CPU microseconds for each message of a cell, and how many messages there were."""
    start, listening = Start(), asyncio.Event()
    source, sink = Source(cell, 0, start), Sink(cell, start)
    async with asyncio.timeout(cell.limit_s), asyncio.TaskGroup() as ends:
        ends.create_task(peer.consume(cell, None, sink, listening.set))
        await listening.wait()
        ends.create_task(peer.produce(cell, None, source))
    cost = sink.measurement().consumer
    assert cost is not None, "a sink that has measured knows its cost"
    return cost.cpu_s / cost.messages * 1e6, cost.messages


class _BothEnds(Adapter):
    """The one subject, for each case with the peer that the case says; and its processes, of which there are none."""

    name = title = "both ends"

    def start(self) -> None:
        """There is nothing to wait for."""

    def run(self, cell: tuple[Cell, Peer]) -> tuple[float, int]:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(both_ends(*cell))
        except Exception as error:
            raise BenchError(described(error)) from error

    def close(self) -> None:
        """There is nothing to end."""

    kill = close


def plan_of(cases: Sequence[Case], repetitions: int, timed_s: float, warm_up_s: float) -> Plan[Case]:
    """Returns the plan that measures cases."""
    rounds = [Round(tuple(cases), (_BothEnds.name,))]
    return Plan(rounds=rounds, repetitions=repetitions, timed_s=timed_s, warm_up_s=warm_up_s)


def measure(plan: Plan[Case], progress: Callable[[str], None]) -> Findings:
    """Measures cases in turn, again and again; one that fails is left out from then on, and said.

    Args:
        plan: what to measure.
        progress: called with a line before each step.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    ends = _BothEnds()
    with Run(plan, {ends.name: ends}, lambda *_: ends, progress) as running:
        running.play(plan.rounds[0])
    costs = []
    for (case, _), pairs in running.measured.items():
        each_us, messages = zip(*(ours for ours, _ in pairs), strict=True)
        costs.append(Cost(case.title, Spread.of(each_us), sum(messages), list(each_us)))
    rows = [[cost.case, f"{cost.cpu_us.median:.1f}", deviation(cost.cpu_us), f"{cost.messages:,}"] for cost in costs]
    title = f"cost: CPU microseconds a message of both ends in one process, {_WINDOW} in flight"
    medians = f"Medians of {plan.repetitions} interleaved repetitions of {plan.timed_s:g} s."
    return Findings(
        mode="cost",
        machine=Machine.here(),
        tables=[Table(title, ["message", "CPU us", "least, most", "messages"], rows)],
        notes=[f"{medians} The benchmark's stamps and checks are in it."],
        results=costs,
        coverage=running.coverage(),
    )


@click.command("cost", context_settings=SETTINGS)
@click.option("--quick", is_flag=True, help="3 repetitions of 0.2 s.")
@repetitions_option("Of each case, interleaved.  [default: 7; 3 if quick]")
@seconds_option("1; 0.2 if quick")
@json_option
def cost_command(quick: bool, repetitions: int | None, seconds: float | None, json_path: Path | None) -> None:
    """CPU time of a message at both ends in one process: inline, copied, and in place up to 64 MB."""
    plan = plan_of(CASES, repetitions or (3 if quick else 7), seconds or (0.2 if quick else 1.0), 0.1 if quick else 0.3)
    with shown_progress(plan.steps()) as progress:
        findings = measure(plan, progress)
    deliver(findings, json_path)
    if findings.failures:
        raise NotMeasured(f"{findings.failures} measurements failed: see the table")
