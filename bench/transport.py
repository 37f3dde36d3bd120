"""``bench transport``: messages from producer processes to a consumer process, by every peer, in one run.

Method: that of :mod:`bench.interleaving`. Medians over the repetitions are reported, with the spread beside them; the outer
percentiles of latencies are pooled. Each repetition warms up first, is timed at the consumer, and checks every message
(:mod:`bench.messages`). Copies of as many bytes are timed in each repetition, too, right after shmring's base case, since
a shared machine's memory is not equally fast for long: the physical limit (:mod:`bench.machine`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from bench.cases import Case
from bench.interleaving import Plan, Round, Run
from bench.machine import CopyLimits, Machine, torch_resident_nbytes
from bench.peers import PEERS
from bench.processes import StreamGroup
from bench.records import Limit, Result, Results
from bench.results import Spread

__all__ = ["run"]

_LIMITS_S = 0.1  # for each of the three, in each repetition


def run(plan: Plan[Case], progress: Callable[[str], None], keep: Callable[[Results], object] | None = None) -> Results:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        progress: called with a line before each step; ``plan.steps()`` says how many there are.
        keep: called after each round with what there is so far, so that a long run that is ended early was not for nothing.
    """
    started, load = datetime.now(UTC), os.getloadavg()[0]
    limits: list[Limit] = []

    def results() -> Results:
        return Results(
            mode="transport",
            started=started.isoformat(timespec="seconds"),
            machine=Machine.here(),
            versions={name: version for name in plan.peers if (version := PEERS[name].version()) is not None},
            load_before=load,
            torch_resident_nbytes=torch_resident_nbytes(),
            repetitions=plan.repetitions,
            timed_s=plan.timed_s,
            results=[
                Result.of(name, case, [ours for ours, _ in pairs], [base.messages_per_s for _, base in pairs])
                for (case, name), pairs in running.measured.items()
            ],
            limits=[*limits],
            coverage=running.coverage(),
        )

    with Run(plan, PEERS, StreamGroup, progress) as running:
        for part in plan.rounds:
            if part.limits:
                with _timed_limits(part, limits) as time_limits:
                    running.play(part, time_limits)
            else:
                running.play(part)
            if keep is not None:
                keep(results())
    return results()


@contextlib.contextmanager
def _timed_limits(part: Round[Case], limits: list[Limit]) -> Iterator[Callable[[], None]]:
    """Yields what times copies and reads of a round's size; what all of its calls have found is in the list in the end."""
    nbytes = part.cases[0].nbytes
    runs: list[tuple[float, float, float]] = []
    with CopyLimits(nbytes) as copies:
        yield lambda: runs.append(copies.measure(_LIMITS_S))
    if runs:
        cold, hot, reads = zip(*runs, strict=True)
        limits.append(Limit(nbytes, Spread.of(cold), Spread.of(hot), Spread.of(reads), list(cold)))
