"""``bench transport``: messages from producer processes to a consumer process, by every peer, in one run.

Method: within a round all processes are started first. Then repetitions are interleaved (A B C D A B C D ...): whatever else
the machine does hits all peers alike, and the ratio to shmring is taken within each repetition. Medians over the repetitions
are reported, with the spread beside them; the outer percentiles of latencies are pooled. Each repetition warms up first, is
timed at the consumer, and checks every message (:mod:`bench.messages`). Copies of as many bytes are timed in each repetition,
too, right after shmring's base case, since a shared machine's memory is not equally fast for long: the physical limit
(:mod:`bench.machine`).

A peer that is not installed, can't do a case or fails in it is reported as such, with the reason, and the others go on. A case
in which the baseline fails has no results, since all are compared with it; the other cases go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from bench.cases import Case, Round
from bench.children import BenchError
from bench.coverage import Coverage, Key, Planned, Status
from bench.machine import CopyLimits, Machine, torch_resident_nbytes
from bench.messages import Cell, Measurement
from bench.peers import BASELINE, PEERS
from bench.processes import Group
from bench.records import Limit, Result, Results
from bench.results import Spread

__all__ = ["Plan", "planned", "run", "steps"]

_LIMITS_S = 0.1  # for each of the three, in each repetition
_PROCESS_NBYTES = 160 << 20  # what a process that has imported torch keeps for itself
_MEMORY_SHARE = 0.5  # of the machine's memory that processes may take before any message is sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        rounds: cases and peers; see :mod:`bench.cases`.
        repetitions: of each case and peer.
        timed_s, warm_up_s: of each repetition.
        left_out: cases and peers that are not in the rounds on purpose, and why; to be said with the results.
        limit_s: after which a repetition has failed. A peer that moves 1 GB/s takes some 20 s for the largest case.
    """

    rounds: Sequence[Round]
    repetitions: int
    timed_s: float
    warm_up_s: float
    left_out: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    limit_s: float = 60.0


def run(plan: Plan, progress: Callable[[str], None], keep: Callable[[Results], object] | None = None) -> Results:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are.
        keep: called after each round with what there is so far, so that a long run that is ended early was not for nothing.
    """
    started, load = datetime.now(UTC), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory, _Run(plan, directory, progress) as running:
        for part in plan.rounds:
            running.play(part)
            if keep is not None:
                keep(_results(plan, running, started, load))
    return _results(plan, running, started, load)


def planned(plan: Plan) -> list[Planned]:
    """Returns the cases of a plan."""
    cases = [Planned(case.title, list(part.peers), plan.repetitions) for part in plan.rounds for case in part.cases]
    return cases + [Planned(case, [name], plan.repetitions) for case, name in plan.left_out]


def _results(plan: Plan, running: _Run, started: datetime, load: float) -> Results:
    results = running.results()
    names = dict.fromkeys(name for part in plan.rounds for name in part.peers)
    return Results(
        mode="transport",
        started=started.isoformat(timespec="seconds"),
        machine=Machine.here(),
        versions={name: version for name in names if (version := PEERS[name].version()) is not None},
        load_before=load,
        torch_resident_nbytes=torch_resident_nbytes(),
        repetitions=plan.repetitions,
        timed_s=plan.timed_s,
        results=results,
        limits=running.limits,
        coverage=Coverage.of(
            planned(plan), {(result.case.title, result.peer): len(result.runs) for result in results}, running.reasons
        ),
    )


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress, if nothing is missing and nothing fails."""
    chunks = (chunk for part in plan.rounds for chunk in _chunks(part))
    return sum(1 + plan.repetitions * len(chunk.cases) * len(chunk.peers) for chunk in chunks)


def _chunks(whole: Round) -> list[Round]:
    """The round in parts whose processes fit into memory, the baseline in each of them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE
    processes = sum({case.producers + 1 for case in whole.cases})
    room = max(1, int(memory / (_PROCESS_NBYTES * processes)) - 1)
    others = [name for name in whole.peers if name != BASELINE]
    parts = [tuple(others[first : first + room]) for first in range(0, len(others), room)] or [()]
    return [dataclasses.replace(whole, peers=(BASELINE, *part), limits=whole.limits and not i) for i, part in enumerate(parts)]


class _Run(contextlib.AbstractContextManager["_Run", None]):
    """The processes of a run, and what they have measured so far."""

    def __init__(self, plan: Plan, directory: str, progress: Callable[[str], None]) -> None:
        self.limits: list[Limit] = []
        self.reasons: dict[Key, tuple[Status, str]] = {  # why something has no result
            key: (Status.EXCLUDED, why) for key, why in plan.left_out.items()
        }
        self._plan = plan
        self._directory = directory
        self._progress = progress
        self._groups: dict[tuple[str, int], Group] = {}
        # With what the baseline did in the same repetition, since a round may be measured in chunks.
        self._measured: dict[tuple[Case, str], list[tuple[Measurement, float]]] = defaultdict(list)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for group in self._groups.values():
            if kind is None:
                group.close()
            else:
                group.kill()

    def results(self) -> list[Result]:
        """What was measured, in the order of the cases and peers."""
        results_so_far = []
        for (case, name), pairs in self._measured.items():
            results_so_far.append(Result.of(name, case, [measured for measured, _ in pairs], [speed for _, speed in pairs]))
        return results_so_far

    def play(self, part: Round) -> None:
        """Measures a round."""
        peers = tuple(name for name in part.peers if PEERS[name].missing() is None)
        for case, name in itertools.product(part.cases, part.peers):
            if (reason := PEERS[name].missing() or PEERS[name].limits(self._cell(case))) is not None:
                self.reasons[case.title, name] = Status.EXCLUDED, reason
        for chunk in _chunks(dataclasses.replace(part, peers=peers)):
            every = itertools.product(chunk.cases, chunk.peers)
            pairs = self._start([(case, name) for case, name in every if (case.title, name) not in self.reasons])
            with contextlib.ExitStack() as stack:
                limits = stack.enter_context(CopyLimits(chunk.cases[0].nbytes)) if chunk.limits else None
                self._repeat(pairs, limits)

    def _cell(self, case: Case) -> Cell:
        plan = self._plan
        return case.cell(warm_up_s=plan.warm_up_s, timed_s=plan.timed_s, limit_s=plan.limit_s, directory=self._directory)

    def _start(self, pairs: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
        """Has the processes that are needed and no others. Returns the pairs that have theirs."""
        needed = dict.fromkeys((name, case.producers) for case, name in pairs)
        for key in self._groups.keys() - needed.keys():
            self._groups.pop(key).close()
        new = [key for key in needed if key not in self._groups]
        self._progress(f"starting {sum(1 + producers for _, producers in new)} processes")
        errors = self._launch(new)
        for case, name in pairs:
            if (name, case.producers) in errors:
                self._fail(case, name, errors[name, case.producers])
        started = [(case, name) for case, name in pairs if (name, case.producers) not in errors]
        return self._with_baseline(started)

    def _with_baseline(self, pairs: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
        """Drops the cases in which the baseline has failed: there is nothing to compare the others with."""
        kept = []
        for case, name in pairs:
            if (case, BASELINE) in pairs:
                kept.append((case, name))
            else:
                self._fail(case, name, BenchError(f"{PEERS[BASELINE].title}, which it is compared with, has failed"))
        return kept

    def _launch(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], BenchError]:
        """Starts processes, all at the same time. Returns what went wrong."""
        errors = {}
        for key in keys:
            try:
                self._groups[key] = Group(*key)
            except BenchError as error:
                errors[key] = error
        for key in keys:
            try:
                if key not in errors:
                    self._groups[key].start()
            except BenchError as error:
                errors[key] = error
                self._groups.pop(key).kill()
        return errors

    def _fail(self, case: Case, name: str, error: BenchError) -> None:
        """A peer has no result in a case."""
        self.reasons[case.title, name] = Status.FAILED, str(error)

    def _repeat(self, pairs: list[tuple[Case, str]], limits: CopyLimits | None) -> None:
        """Measures cases of one size, interleaved."""
        measured: dict[tuple[Case, str], list[Measurement]] = {pair: [] for pair in pairs}
        limit_runs: list[tuple[float, float, float]] = []
        for repetition in range(self._plan.repetitions):
            for pair in list(measured):
                if pair in measured and not self._measure(pair, measured[pair], repetition):
                    self._give_up(pair, measured)
                    measured = {kept: measured[kept] for kept in self._with_baseline(list(measured))}
                if limits is not None and pair == pairs[0]:
                    kinds = (limits.copies_cold_per_s, limits.copies_hot_per_s, limits.reads_per_s)
                    limit_runs.append((kinds[0](_LIMITS_S), kinds[1](_LIMITS_S), kinds[2](_LIMITS_S)))
        for (case, name), measurements in measured.items():
            baseline = [measurement.messages_per_s for measurement in measured[case, BASELINE]]
            self._measured[case, name] += zip(measurements, baseline, strict=True)
        if limit_runs:
            cold, hot, reads = zip(*limit_runs, strict=True)
            nbytes = pairs[0][0].nbytes
            self.limits.append(Limit(nbytes, Spread.of(cold), Spread.of(hot), Spread.of(reads), list(cold)))

    def _measure(self, pair: tuple[Case, str], measurements: list[Measurement], repetition: int) -> bool:
        """Runs one repetition. Returns whether it succeeded."""
        case, name = pair
        self._progress(f"{case.title}, repetition {repetition + 1} of {self._plan.repetitions}: {PEERS[name].title}")
        try:
            measurements.append(self._groups[name, case.producers].run(self._cell(case)))
        except BenchError as error:
            self._fail(case, name, error)
            return False
        return True

    def _give_up(self, pair: tuple[Case, str], measured: dict[tuple[Case, str], list[Measurement]]) -> None:
        """Leaves a failed peer's case out, and its other cases too if its processes can't be started again."""
        case, name = pair
        del measured[pair]
        key = (name, case.producers)
        self._groups.pop(key).close()
        errors = self._launch([key])
        if errors:
            for other in [other for other in measured if (other[1], other[0].producers) == key]:
                del measured[other]
                self._fail(*other, errors[key])
