"""Rounds of cases and peers, measured in processes of their own and beside each other: the method of every comparison of peers.

Within a round all processes are started first. Then repetitions are interleaved (A B C D A B C D ...): whatever else the
machine does hits all peers alike, and each is compared with the baseline in the same repetition. A peer that is not installed,
can't do a case or fails in it is reported as such, with the reason, and goes on with new processes in other cases. A case in
which the baseline fails has no results, since all are compared with it.

Medians over the repetitions are reported, with the spread beside them; the outer percentiles of latencies are pooled. Each
repetition warms up first, is timed at the receiver, and checks every message (:mod:`bench.messages`). Where a round says so,
copies of as many bytes are timed in each repetition, too, right after shmring's base case, since a shared machine's memory is
not equally fast for long: the physical limit (:mod:`bench.machine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from bench import command_line
from bench.children import BenchError
from bench.machine import CopyLimits, Machine, torch_resident_nbytes
from bench.messages import Case, Cell, Measurement
from bench.peers import PEERS, Peer, RequestPeer
from bench.processes import PeerGroup
from bench.records import Limit, Result, Results
from bench.results import Coverage, Key, Planned, Spread, Status, write_json

_PROCESS_NBYTES = 160 << 20  # what a process that has imported torch keeps for itself
_LIMITS_S = 0.1  # for each of the three, in each repetition
_MEMORY_SHARE = 0.5  # of the machine's memory that processes may take before any message is sent


@dataclasses.dataclass(frozen=True)
class Round:
    """Cases whose repetitions are interleaved, with those of all their peers.

    Attributes:
        cases: of one size.
        peers: names, the baseline first.
        limits: whether to time copies and reads of that size, too.
    """

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    limits: bool = False

    def chunks(self) -> list[tuple[str, ...]]:
        """Returns peers whose processes fit into memory, the baseline among them each time."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE
        processes = sum({case.producers + 1 for case in self.cases})
        room = max(1, int(memory / (_PROCESS_NBYTES * processes)) - 1)
        baseline, *others = self.peers
        return [(baseline, *others[first : first + room]) for first in range(0, max(1, len(others)), room)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
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

    @property
    def peers(self) -> list[str]:
        """Of all rounds, each once."""
        return list(dict.fromkeys(name for part in self.rounds for name in part.peers))

    def planned(self) -> list[Planned]:
        """Returns the cases."""
        cases = [Planned(case.title, list(part.peers), self.repetitions) for part in self.rounds for case in part.cases]
        return cases + [Planned(case, [name], self.repetitions) for case, name in self.left_out]

    def steps(self) -> int:
        """Returns how often a run reports progress, if nothing is missing and nothing fails."""
        chunks = [(part, peers) for part in self.rounds for peers in part.chunks()]
        return sum(1 + self.repetitions * len(part.cases) * len(peers) for part, peers in chunks)


class Run:
    """The processes of a run, and what they have measured so far. Use it with ``with``, which leaves no process and no file.

    Args:
        plan: what to measure.
        peers: by name.
        progress: called with a line before each step.

    Attributes:
        measured: what a case and peer have measured, with what the baseline has in the same repetition.
    """

    def __init__(self, plan: Plan, peers: Mapping[str, Peer | RequestPeer], progress: Callable[[str], None]) -> None:
        self.measured: dict[tuple[Case, str], list[tuple[Measurement, Measurement]]] = defaultdict(list)
        self._plan = plan
        self._peers = peers
        self._progress = progress
        self._groups: dict[tuple[str, int], PeerGroup] = {}
        self._reasons = {key: (Status.EXCLUDED, why) for key, why in plan.left_out.items()}  # why something has no result
        self._directory = tempfile.TemporaryDirectory(prefix="shmring-bench-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._directory:
            for group in self._groups.values():
                if kind is None:
                    group.close()
                else:
                    group.kill()

    def coverage(self) -> Coverage:
        """What was planned, and what of it is missing so far."""
        there = {(case.title, name): len(pairs) for (case, name), pairs in self.measured.items()}
        return Coverage.of(self._plan.planned(), there, self._reasons)

    def play(self, part: Round, after_first: Callable[[], object] = lambda: None) -> None:
        """Measures a round.

        Args:
            after_first: called in each repetition behind the baseline's first case, once for each case and peer.
        """
        there = tuple(name for name in part.peers if self._peers[name].missing() is None)
        for case, name in itertools.product(part.cases, part.peers):
            if (reason := self._peers[name].missing() or self._peers[name].limits(self._cell(case))) is not None:
                self._reasons[case.title, name] = Status.EXCLUDED, reason
        for number, peers in enumerate(dataclasses.replace(part, peers=there).chunks()):
            pairs = [pair for pair in itertools.product(part.cases, peers) if self._is_able(*pair)]
            self._start(pairs)
            self._repeat(pairs, peers[0], (lambda: None) if number else after_first)

    def _is_able(self, case: Case, *names: str) -> bool:
        """Whether nothing is known that keeps peers from measuring a case."""
        return not any((case.title, name) in self._reasons for name in names)

    def _cell(self, case: Case) -> Cell:
        plan, directory = self._plan, self._directory.name
        return case.cell(warm_up_s=plan.warm_up_s, timed_s=plan.timed_s, limit_s=plan.limit_s, directory=directory)

    def _start(self, pairs: Sequence[tuple[Case, str]]) -> None:
        """Has the processes that are needed, and no others."""
        needed = dict.fromkeys((name, case.producers) for case, name in pairs)
        for key in self._groups.keys() - needed.keys():
            self._groups.pop(key).close()
        new = [key for key in needed if key not in self._groups]
        self._progress(f"peers to start: {len(new)}")
        self._launch(new, pairs)

    def _launch(self, keys: Sequence[tuple[str, int]], pairs: Sequence[tuple[Case, str]]) -> None:
        """Starts processes, all at the same time. Where that fails, no pair that needs them has a result."""
        errors = {}
        for name, ends in keys:
            try:
                self._groups[name, ends] = PeerGroup(self._peers[name], ends)
            except BenchError as error:
                errors[name, ends] = error
        for key in [key for key in keys if key not in errors]:
            try:
                self._groups[key].start()
            except BenchError as error:
                errors[key] = error
                self._groups.pop(key).kill()
        for case, name in pairs:
            if (name, case.producers) in errors:
                self._fail(case, name, errors[name, case.producers])

    def _repeat(self, pairs: Sequence[tuple[Case, str]], baseline: str, after_first: Callable[[], object]) -> None:
        """Measures cases with peers, interleaved. Where the baseline has failed there is nothing to compare others with."""
        measured: dict[tuple[Case, str], list[Measurement]] = {pair: [] for pair in pairs}
        for repetition, (case, name) in itertools.product(range(self._plan.repetitions), pairs):
            if not self._is_able(case, name, baseline):
                continue
            self._progress(f"{case.title}, repetition {repetition + 1} of {self._plan.repetitions}: {self._peers[name].title}")
            key = name, case.producers
            try:
                measured[case, name].append(self._groups[key].run(self._cell(case)))
            except BenchError as error:
                self._fail(case, name, error)
                self._groups.pop(key).close()
                self._launch([key], pairs)
            if (case, name) == pairs[0]:
                after_first()
        for (case, name), measurements in measured.items():
            if self._is_able(case, name, baseline):
                self.measured[case, name] += zip(measurements, measured[case, baseline], strict=True)
            else:
                self._fail(case, name, f"{self._peers[baseline].title}, which it is compared with, has failed")

    def _fail(self, case: Case, name: str, error: object) -> None:
        """A peer has no result in a case; if there are several reasons, the first one counts."""
        self._reasons.setdefault((case.title, name), (Status.FAILED, str(error)))


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
    # Of before the run: what it writes over may be a file of the checkout, which would differ from its commit then.
    started, load, machine = datetime.now(UTC), os.getloadavg()[0], Machine.here()
    limits: list[Limit] = []

    def results() -> Results:
        return Results(
            mode=mode,
            started=started.isoformat(timespec="seconds"),
            machine=machine,
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
