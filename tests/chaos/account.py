"""What a run has shown: every request accounted for, every wrong counted, every reclaim timed.

The journals of all processes that there were and what the driver saw are put together. A request that a frontend began
has ended in one of these ways: answered; aborted, by whoever asked; failed, for a reason that belongs to what was done; or
it died with its frontend, where that was killed. Whatever is left over was lost.

Latencies are told apart from the step that was running: memory is not reusable while the code of the engine or of a worker
reads it, however soon the abort came. So they count from the abort, or from the kernel's word that a process is dead, or from
the end of the step, whichever is last. Of an engine's death, only those callers count that were waiting when it died: one that
does something else then, or reads other replies, hears of it when it looks. How long the kernel takes to end a process that
was sent SIGKILL is told beside. Latencies in which a process was stopped meanwhile say nothing of shmring, and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from bench.machine import Machine
from tests.chaos.driver import Happened, Incarnation, Observations
from tests.chaos.journal import Aborted, Began, Ended, Gone, Held, Reusable, Wrong, read
from tests.chaos.plan import Fault, Plan

_MAX_TEXTS = 20  # of wrongs that are reported in words; all are counted
_NOTICED_WITHIN_NS = 5_000_000_000  # an engine's death, by a frontend that may have been stopped, or starting


class Latencies(msgspec.Struct, frozen=True):
    """Latencies in milliseconds; None where there were none."""

    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    all_ms: list[float]

    @classmethod
    def of(cls, all_ns: Sequence[int]) -> Latencies:
        if not all_ns:
            return cls(0, None, None, None, [])
        all_ms = np.sort(np.array(all_ns)) / 1e6
        p50, p99 = np.percentile(all_ms, [50, 99])
        return cls(len(all_ns), float(p50), float(p99), float(all_ms[-1]), [round(float(ms), 4) for ms in all_ms])


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """A run's result.

    Attributes:
        requests: that were begun.
        answered, aborted: how many ended so.
        failed: how many ended otherwise, by the type of the error.
        died_with_their_frontend: how many had no end because their frontend was killed.
        lost: how many had none without such an excuse.
        corrupted: contents that were not what was sent, whenever they were looked at.
        leaked_nbytes: of the slab, not free when all had gone.
        leaked_descriptors: of the living processes.
        slots_held: slots and reply slots counted in use when everything had ended.
        violations: invariants found broken, and failures that nothing explains.
        segments_left: names in /dev/shm.
        wrongs: the first of them in words.
        faults: how often each was made.
        kills: processes killed in all.
        abort_to_reusable: from an abort, or the end of the step that it hit, until its frontend has the memory again.
        kill_to_word: from SIGKILL until the kernel tells the engine that a frontend is dead, and the driver that an engine is.
        death_to_reclaimed: from that, or the end of the last step, until the engine has nothing of the frontend any more.
        abort_to_reusable_on_core, death_to_reclaimed_on_core: without the time in which the processes waited for a core.
        engine_death_to_error: from that until each request has failed whose caller was waiting.
    """

    plan: Plan
    machine: Machine
    seconds: float
    requests: int
    answered: int
    aborted: int
    failed: dict[str, int]
    died_with_their_frontend: int
    lost: int
    corrupted: int
    leaked_nbytes: int
    leaked_descriptors: int
    slots_held: int
    violations: int
    segments_left: int
    wrongs: list[str]
    faults: dict[str, int]
    kills: int
    phases: int
    abort_to_reusable: Latencies
    abort_to_reusable_on_core: Latencies
    kill_to_word: Latencies
    death_to_reclaimed: Latencies
    death_to_reclaimed_on_core: Latencies
    engine_death_to_error: Latencies
    happened: list[Happened]
    began_ns: int

    @property
    def must_be_zero(self) -> dict[str, int]:
        """What a run has failed by, if one of them is not 0."""
        return {
            "lost": self.lost,
            "corrupted": self.corrupted,
            "leaked bytes": self.leaked_nbytes,
            "leaked descriptors": self.leaked_descriptors,
            "slots held beyond their step": self.slots_held,
            "invariant violations": self.violations,
            "segments left in /dev/shm": self.segments_left,
        }

    @property
    def passed(self) -> bool:
        """Whether all of them are 0."""
        return not any(self.must_be_zero.values())


_Key = TypeVar("_Key")

#: What keeps others waiting without any fault of theirs: a worker that is stopped keeps what it reads.
_STOPPING = (Fault.STOP_FRONTEND, Fault.STOP_ENGINE, Fault.KILL_ENGINE, Fault.STOP_WORKER, Fault.KILL_WORKER)


class _Failure(NamedTuple):
    """A request that has failed: of which process and how, from when until when, and since when its caller had waited."""

    pid: int
    outcome: str
    began_ns: int
    since_ns: int
    at_ns: int


class _Ledger:
    """Everything that the journals say, by process."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.requests = 0
        self.unended = 0  # of frontends that were not killed
        self.died = 0
        self.ended: list[Ended] = []
        self.failures: list[_Failure] = []
        self.aborted: dict[tuple[int, int], Aborted] = {}
        self.reusable: dict[tuple[int, int], Reusable] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.last_held: dict[tuple[int, int], Held] = {}  # by process and engine
        self.gone: dict[int, tuple[Gone, int]] = {}  # the last that an engine says of it, and the engine
        self.wrongs: list[Wrong] = []

    def enter(self, incarnation: Incarnation) -> None:
        """Takes a journal in."""
        pid = incarnation.pid
        began: dict[int, int] = {}  # of requests without an end
        for record in read(incarnation.journal):
            match record:
                case Began():
                    self.requests += 1
                    began[record.number] = record.at_ns
                case Ended(outcome=outcome, at_ns=at_ns):
                    began_ns = began.pop(record.number)
                    self.outcomes[outcome] += 1
                    self.ended.append(record)
                    if outcome not in ("answered", "aborted"):
                        self.failures.append(_Failure(pid, outcome, began_ns, record.since_ns, at_ns))
                case Aborted():
                    self.aborted[pid, record.number] = record
                case Reusable():
                    self.reusable[pid, record.number] = record
                case Held():  # of the engine, and of workers that it shared the request with: the last one stays
                    _keep_last(self.held, (record.sender, record.number), record)
                    _keep_last(self.last_held, (record.sender, record.engine), record)
                case Gone():
                    if record.pid not in self.gone or self.gone[record.pid][0].at_ns < record.at_ns:
                        self.gone[record.pid] = record, pid
                case Wrong():
                    self.wrongs.append(record)
        if incarnation.end == "killed":
            self.died += len(began)
        else:
            self.unended += len(began)


def _keep_last(held: dict[_Key, Held], key: _Key, record: Held) -> None:
    if key not in held or held[key].until_ns < record.until_ns:
        held[key] = record


def account(plan: Plan, seen: Observations) -> Findings:
    """Puts together what a run has shown."""
    ledger = _Ledger()
    for incarnation in seen.incarnations:
        ledger.enter(incarnation)
    stops = _Stops(seen.happened)
    engine_kills = [event for event in seen.happened if event.fault is Fault.KILL_ENGINE]
    words = [max(0, kill.word_ns - kill.began_ns) for kill in engine_kills]
    aborts, deaths = _abort_latencies(ledger, stops), _death_latencies(ledger, seen, stops)
    texts = seen.violations + [wrong.text for wrong in ledger.wrongs] + _unexplained(ledger, seen, engine_kills, stops)
    failed = {name: count for name, count in sorted(ledger.outcomes.items()) if name not in ("answered", "aborted")}
    corrupted = sum(wrong.what == "corrupted" for wrong in ledger.wrongs)
    return Findings(
        plan=plan,
        machine=Machine.here(),
        seconds=(seen.ended_ns - seen.began_ns) / 1e9,
        requests=ledger.requests,
        answered=ledger.outcomes["answered"],
        aborted=ledger.outcomes["aborted"],
        failed=failed,
        died_with_their_frontend=ledger.died,
        lost=max(ledger.unended, sum(look.lost for look in seen.looks)),
        corrupted=corrupted,
        leaked_nbytes=sum(look.leaked_nbytes for look in seen.looks),
        leaked_descriptors=sum(look.leaked_descriptors for look in seen.looks),
        slots_held=sum(look.slots_held for look in seen.looks),
        violations=len(texts) - corrupted,
        segments_left=sum(look.segments_left for look in seen.looks),
        wrongs=texts[:_MAX_TEXTS],
        faults={fault.value: sum(event.fault is fault for event in seen.happened) for fault in Fault},
        kills=sum(event.fault in (Fault.KILL_ENGINE, Fault.KILL_FRONTEND, Fault.KILL_WORKER) for event in seen.happened),
        phases=len(seen.looks),
        abort_to_reusable=Latencies.of([wall for wall, _ in aborts]),
        abort_to_reusable_on_core=Latencies.of([on_core for _, on_core in aborts]),
        kill_to_word=Latencies.of([*(word for _, _, word in deaths), *words]),
        death_to_reclaimed=Latencies.of([wall for wall, _, _ in deaths]),
        death_to_reclaimed_on_core=Latencies.of([on_core for _, on_core, _ in deaths]),
        engine_death_to_error=Latencies.of(_engine_death_latencies(ledger, seen, engine_kills, stops)),
        happened=seen.happened,
        began_ns=seen.began_ns,
    )


class _Stops:
    """When a process was stopped, or there was no engine."""

    def __init__(self, happened: Iterable[Happened]) -> None:
        stops = [event for event in happened if event.fault in _STOPPING]
        self._windows = [(event.began_ns, event.ended_ns, event.pid, event.fault is not Fault.STOP_FRONTEND) for event in stops]

    def hit(self, pid: int, began_ns: int, ended_ns: int, *, engine_too: bool = True) -> bool:
        """Whether the process (or an engine) was stopped at any time between two moments."""
        return any(
            start < ended_ns and began_ns < end and (stopped == pid or (of_engine and engine_too))
            for start, end, stopped, of_engine in self._windows
        )

    def went_on(self, pid: int, at_ns: int) -> int:
        """When a process that was stopped at a moment, or within the time to notice what happened then, went on."""
        ends = (
            end
            for start, end, stopped, _ in self._windows
            if stopped == pid and start < at_ns + _NOTICED_WITHIN_NS and at_ns < end
        )
        return max(ends, default=at_ns)


def _abort_latencies(ledger: _Ledger, stops: _Stops) -> list[tuple[int, int]]:
    """Pairs of the time that it took, and that time without the waiting for a core."""
    latencies = []
    for key, reusable in ledger.reusable.items():
        aborted, held = ledger.aborted[key], ledger.held.get(key)
        if stops.hit(key[0], aborted.at_ns, reusable.at_ns):
            continue
        if held is not None and held.until_ns > aborted.at_ns:  # a step was running; who waited during it is of no interest
            wall = reusable.at_ns - held.until_ns
            waited = reusable.engine_waited_ns - held.engine_waited_ns
        else:
            wall = reusable.at_ns - aborted.at_ns
            waited = reusable.engine_waited_ns - aborted.engine_waited_ns + reusable.waited_ns - aborted.waited_ns
        latencies.append((max(0, wall), max(0, wall - max(0, waited))))
    return latencies


def _death_latencies(ledger: _Ledger, seen: Observations, stops: _Stops) -> list[tuple[int, int, int]]:
    """The same for the deaths of frontends; and how long it took until the kernel had said so."""
    latencies = []
    for event in seen.happened:
        if event.fault is not Fault.KILL_FRONTEND or event.pid not in ledger.gone:
            continue
        gone, engine = ledger.gone[event.pid]
        held = ledger.last_held.get((event.pid, engine))
        if gone.at_ns <= event.began_ns or engine not in event.engines_waited_ns:
            continue
        if stops.hit(event.pid, event.began_ns, gone.at_ns):
            continue
        started_ns, waited_ns = event.began_ns, event.engines_waited_ns[engine]
        word_ns = max(0, gone.heard_ns - started_ns)
        if gone.heard_ns > started_ns:
            started_ns, waited_ns = gone.heard_ns, gone.heard_waited_ns
        if held is not None and held.until_ns > started_ns:
            started_ns, waited_ns = held.until_ns, held.engine_waited_ns
        wall = max(0, gone.at_ns - started_ns)
        waited = max(0, gone.engine_waited_ns - waited_ns)  # a worker may write down later that it has left a request
        latencies.append((wall, max(0, wall - waited), word_ns))
    return latencies


def _engine_death_latencies(ledger: _Ledger, seen: Observations, engine_kills: Sequence[Happened], stops: _Stops) -> list[int]:
    """How long after the kernel's word of an engine's death those who were waiting were told; 0 for who was told before it."""
    hung_up = _hung_up(seen)
    latencies = []
    for pid, outcome, _, since_ns, at_ns in ledger.failures:
        kills = [kill for kill in engine_kills if kill.began_ns <= at_ns]
        if not kills:
            continue
        kill = max(kills, key=lambda kill: kill.began_ns)
        killed_ns = kill.began_ns
        if since_ns > killed_ns:
            continue
        if outcome != "EngineDeadError" or at_ns - killed_ns >= _NOTICED_WITHIN_NS or hung_up.get(pid, at_ns) < at_ns:
            continue
        if not stops.hit(pid, killed_ns, at_ns, engine_too=False):
            latencies.append(max(0, at_ns - max(killed_ns, kill.word_ns)))
    return latencies


def _unexplained(ledger: _Ledger, seen: Observations, engine_kills: Sequence[Happened], stops: _Stops) -> list[str]:
    """Requests that failed because the engine was dead, when it was not.

    Whoever waits is told in time. Whoever began to wait when the engine was dead could not be told before.
    """
    hung_up = _hung_up(seen)
    texts = []
    for pid, outcome, began_ns, since_ns, at_ns in ledger.failures:
        explained = hung_up.get(pid, at_ns) < at_ns or any(
            kill <= at_ns < stops.went_on(pid, kill) + _NOTICED_WITHIN_NS or began_ns <= kill <= since_ns
            for kill in (event.began_ns for event in engine_kills)
        )
        if outcome == "EngineDeadError" and not explained:
            texts.append(f"a request of process {pid} failed with EngineDeadError, and no engine had died")
    return texts


def _hung_up(seen: Observations) -> dict[int, int]:
    """When frontends dropped their connections, by pid: from then on their requests fail by their own doing."""
    return {event.pid: event.began_ns for event in seen.happened if event.fault is Fault.HANG_UP}
