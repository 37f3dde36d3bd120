"""``bench transport`` and ``bench request``: messages, or requests, to a process from others, by every peer, in one run.

Method: that of :mod:`bench.interleaving`. Medians over the repetitions are reported, with the spread beside them; the outer
percentiles of latencies are pooled. Each repetition warms up first, is timed at the receiver, and checks every message
(:mod:`bench.messages`). Where a round says so, copies of as many bytes are timed in each repetition, too, right after shmring's
base case, since a shared machine's memory is not equally fast for long: the physical limit (:mod:`bench.machine`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from bench import command_line
from bench.interleaving import Plan, Round, Run
from bench.machine import CopyLimits, Machine, torch_resident_nbytes
from bench.peers import PEERS, Peer, RequestPeer
from bench.records import Limit, Result, Results
from bench.results import Spread, write_json

__all__ = ["carry_out", "run"]

_LIMITS_S = 0.1  # for each of the three, in each repetition


def run(
    plan: Plan,
    progress: Callable[[str], None],
    *,
    mode: str = "transport",
    peers: Mapping[str, Peer | RequestPeer] = PEERS,
) -> Generator[Results, None, None]:
    """Measures what a plan says; yields after each round what there is so far, so that a long run that is ended early was not
    for nothing. When this is over, no process and no file of it is left.

    Args:
        plan: what to measure, in at least one round.
        progress: called with a line before each step; ``plan.steps()`` says how many there are.
        mode: which benchmark it is.
        peers: by name.
    """
    baselines = {name: part.peers[0] for part in plan.rounds for name in part.peers}
    started, load = datetime.now(UTC), os.getloadavg()[0]
    limits: list[Limit] = []

    def results() -> Results:
        return Results(
            mode=mode,
            started=started.isoformat(timespec="seconds"),
            machine=Machine.here(),
            versions={name: version for name in plan.peers if (version := peers[name].version()) is not None},
            load_before=load,
            torch_resident_nbytes=torch_resident_nbytes() if mode == "transport" else 0,
            repetitions=plan.repetitions,
            timed_s=plan.timed_s,
            results=[
                Result.of(name, case, [ours for ours, _ in pairs], [base for _, base in pairs], baselines[name])
                for (case, name), pairs in running.measured.items()
            ],
            limits=[*limits],
            coverage=running.coverage(),
        )

    with Run(plan, peers, progress) as running:
        for part in plan.rounds:
            with _timed_limits(part, limits) if part.limits else contextlib.nullcontext(lambda: None) as time_limits:
                running.play(part, time_limits)
            yield results()


def carry_out(
    plan: Plan, json_path: Path | None, stored: Callable[[Results], msgspec.Struct], **which: Any
) -> tuple[Results, Any]:
    """Runs a plan for a command, and writes what is to be stored of it after each round, lest a run be lost; returns both.

    Args:
        which: of :func:`run`: mode and peers.
    """
    command = command_line.typed()
    with command_line.measuring(plan.steps()) as progress, contextlib.closing(run(plan, progress, **which)) as running:
        for results in running:
            if json_path is not None:
                write_json(msgspec.structs.replace(stored(results), command=command), json_path)
    return results, stored(results)


@contextlib.contextmanager
def _timed_limits(part: Round, limits: list[Limit]) -> Iterator[Callable[[], None]]:
    """Yields what times copies and reads of a round's size; what all of its calls have found is in the list in the end."""
    nbytes = part.cases[0].nbytes
    runs: list[tuple[float, float, float]] = []
    with CopyLimits(nbytes) as copies:
        yield lambda: runs.append(copies.measure(_LIMITS_S))
    if runs:
        cold, hot, reads = zip(*runs, strict=True)
        limits.append(Limit(nbytes, Spread.of(cold), Spread.of(hot), Spread.of(reads), list(cold)))
