"""The tables, the targets and the plot of ``bench fan-out``.

Ratios are taken within each repetition, and their median counts. Where a target spans several cases, the worst of them
decides.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from bench import plots
from bench.fan_out.plan import (
    ARENA,
    BACKS,
    CALLERS,
    CENTRAL,
    FOREIGN,
    IN_PLACE,
    LARGE,
    MIDDLE,
    OURS,
    POLLING,
    PUBLISHED,
    SMALL,
    STEP,
    SUBJECTS,
    TITLES,
    WORKERS,
    Run,
)
from bench.machine import Machine
from bench.results import Coverage, Findings, Spread, Table, Verdict, deviation, format_nbytes, format_rate, median_ratio
from bench.targets import judge

__all__ = ["Case", "Measured", "Stored", "draw", "report", "title"]

#: Workers, and bytes of a message.
Case = tuple[int, int]
#: The runs of each subject, by case.
Measured = dict[Case, dict[str, list[Run]]]

_Number = Callable[[Run], float | None]

_OTHER_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")


class Stored(msgspec.Struct, frozen=True):
    """Messages a second of a subject in a case, the median, as they are stored and drawn."""

    workers: int
    nbytes: int
    subject: str
    per_s: float


def title(workers: int, nbytes: int) -> str:
    """Returns a case in words."""
    return f"{format_nbytes(nbytes)} to {workers} worker{'s' * (workers > 1)}"


def report(measured: Measured, coverage: Coverage, left_out: Sequence[str] = ()) -> Findings:
    """Returns what a run has found.

    Args:
        measured: the runs.
        coverage: what was planned.
        left_out: what was not there to be measured, in sentences.
    """
    columns = [
        "case", "peer", "messages/s", "least, most", "to the last, p50 us", "engine CPU us", "a worker's CPU us",
        "gathers/s", "a gather, p50 us", "its engine CPU us", "asleep, p50 us", "asleep, engine CPU us",
    ]  # fmt: skip
    rows = [_row(case, subject, runs) for case, found in measured.items() for subject, runs in found.items()]
    notes = [
        "A message each 2 ms: the time to the last worker, and CPU a message. Medians of interleaved repetitions.",
        "Gathers come one after the other, or, asleep, one each 1.2 s.",
        *(f"Not measured: {sentence}." for sentence in left_out),
        *_rests(measured),
    ]
    return Findings(
        mode="fan-out",
        machine=Machine.here(),
        tables=[Table("a message to each of several workers", columns, rows, texts=("peer",), grouped=True)],
        notes=notes,
        targets=_verdicts(measured),
        results=[
            Stored(*case, subject, statistics.median(run.per_s for run in runs))
            for case, found in measured.items()
            for subject, runs in found.items()
        ],
        coverage=coverage,
    )


def _row(case: Case, subject: str, runs: Sequence[Run]) -> list[str]:
    per_s = Spread.of(run.per_s for run in runs)
    numbers = (
        _median(runs, number)
        for number in (
            lambda run: run.last_us,
            lambda run: run.engine_us,
            lambda run: run.worker_us,
            lambda run: run.gathers_per_s,
            lambda run: run.gather_us,
            lambda run: run.gather_engine_us,
            lambda run: run.asleep_us,
            lambda run: run.asleep_engine_us,
        )
    )
    return [
        title(*case), TITLES[subject], format_rate(per_s.median), deviation(per_s),
        *("" if number is None else f"{number:,.0f}" for number in numbers),
    ]  # fmt: skip


def _median(runs: Sequence[Run], number: _Number) -> float | None:
    numbers = [found for run in runs if (found := number(run)) is not None]
    return statistics.median(numbers) if numbers else None


def _rests(measured: Measured) -> Iterator[str]:
    for case, found in measured.items():
        for subject, runs in found.items():
            awake, idle = (_median(runs, number) for number in (lambda run: run.awake_percent, lambda run: run.idle_percent))
            if awake is not None and idle is not None:
                yield (
                    f"{TITLES[subject]}: {case[0]} workers take {awake:.1f} % of a core in the second after a message, "
                    f"{idle:.2f} % idle."
                )


# -- targets -------------------------------------------------------------------------------------------------------------


def _verdicts(measured: Measured) -> list[Verdict]:
    foreign = next((name for name in FOREIGN for found in measured.values() if name in found), FOREIGN[0])
    queue = TITLES[foreign]

    def ratio(ours: str, theirs: str, number: _Number, case: Case, of_case: Case | None = None) -> float | None:
        """The median over the repetitions of one's number over the other's, in the same case or in another."""
        runs, others = measured.get(case, {}).get(ours, ()), measured.get(of_case or case, {}).get(theirs, ())
        return median_ratio(map(number, runs), map(number, others))

    def of_workers(
        ours: str, theirs: str, number: _Number, nbytes: int, of_nbytes: int | None = None, counts: Sequence[int] = WORKERS
    ) -> Iterator[tuple[str, float | None]]:
        """Such a ratio for each number of workers."""
        for count in counts:
            of_case = None if of_nbytes is None else (count, of_nbytes)
            yield f"{count}", ratio(ours, theirs, number, (count, nbytes), of_case)

    def at_central(ours: str, theirs: str, number: _Number) -> list[tuple[str, float | None]]:
        return [(TITLES[ours], ratio(ours, theirs, number, (CENTRAL, SMALL)))]

    def alone(number: _Number) -> list[tuple[str, float | None]]:
        return [(TITLES[OURS], _median(measured.get((CENTRAL, SMALL), {}).get(OURS, ()), number))]

    def per_s(run: Run) -> float:
        return run.per_s

    def last_us(run: Run) -> float:
        return run.last_us

    def at_most(what: str, limit: float, numbers: list[tuple[str, float | None]], unit: str = "x") -> Verdict:
        return judge(what, title(CENTRAL, SMALL), limit, unit, numbers, at_least=False)

    steady = [(count, times and max(times, 1 / times)) for count, times in of_workers(IN_PLACE, IN_PLACE, per_s, SMALL, LARGE)]
    return [
        judge(f"messages/s of {queue}", "4 KB", 2, "x", of_workers(OURS, foreign, per_s, SMALL)),
        judge(f"messages/s of {queue}", "1 MB", 1.5, "x", of_workers(OURS, foreign, per_s, MIDDLE)),
        judge(f"messages/s of {queue}", "64 MB, 1 worker", 0.9, "x", of_workers(OURS, foreign, per_s, LARGE, counts=(1,))),
        judge(f"messages/s of {queue}", "64 MB, 4 workers", 2, "x", of_workers(OURS, foreign, per_s, LARGE, counts=(4,))),
        *(
            judge(
                f"messages/s of {TITLES[ARENA]}", f"64 MB, {count} worker{'s' * (count > 1)}", limit, "x",
                of_workers(OURS, ARENA, per_s, LARGE, counts=(count,)),
            )
            for count, limit in ((1, 0.9), (4, 2))
        ),
        judge(
            f"messages/s in place, 4 KB to 64 MB, of {queue} at 1 MB", "any workers", 10, "x",
            (
                (f"{format_nbytes(nbytes)} to {name}", times)
                for nbytes in (SMALL, MIDDLE, LARGE)
                for name, times in of_workers(IN_PLACE, foreign, per_s, nbytes, MIDDLE)
            ),
        ),
        judge("messages/s in place, 4 KB and 64 MB, of the other", "any workers", 1.5, "x", steady, at_least=False),
        at_most(f"p50 to the last worker, asleep, of {queue}", 0.8, at_central(OURS, foreign, last_us)),
        at_most(f"p50 to the last worker, polling, of {queue}", 0.7, at_central(POLLING, foreign, last_us)),
        at_most(f"p50 to the last worker, asleep, of {TITLES[PUBLISHED]}", 0.65, at_central(OURS, PUBLISHED, last_us)),
        judge(
            f"gathers/s with busy_poll_s, of {queue}", "4 KB, 1, 2, 4 workers", 3, "x",
            of_workers(POLLING, foreign, lambda run: run.gathers_per_s, SMALL, counts=(1, 2, 4)),
        ),
        *(
            judge(
                f"{what} of {TITLES[ours]}, of {queue}", "a step, 1, 2, 4 workers", 1, "x",
                of_workers(ours, foreign, number, STEP, counts=(1, 2, 4)), at_least=False,
            )
            for ours in (CALLERS, BACKS)
            for what, number in (
                ("a gather's p50", lambda run: run.gather_us),
                ("a gather's engine CPU", lambda run: run.gather_engine_us),
                ("a gather's p50, asleep,", lambda run: run.asleep_us),
                ("a gather's engine CPU, asleep,", lambda run: run.asleep_engine_us),
            )
        ),
        at_most(f"engine's CPU a message, of {queue}", 0.4, at_central(OURS, foreign, lambda run: run.engine_us)),
        at_most("CPU of the workers in the second after a message", 5, alone(lambda run: run.awake_percent), "%"),
        at_most("CPU of the workers, idle", 1, alone(lambda run: run.idle_percent), "%"),
        at_most("p50 of the others while one worker is stopped, of before", 1.1, alone(lambda run: run.stopped_ratio)),
    ]  # fmt: skip


# -- the plot ------------------------------------------------------------------------------------------------------------


def _figure(stored: Sequence[Stored]) -> Any:
    sizes = sorted({entry.nbytes for entry in stored})
    if not sizes:
        return None
    figure, axes = plots.panels(len(sizes), "messages to several workers: messages per second")
    subjects = [subject for subject in SUBJECTS if any(entry.subject == subject for entry in stored)]
    others = [subject for subject in subjects if not SUBJECTS[subject].colour]

    def style(subject: str) -> dict[str, Any]:
        colour = SUBJECTS[subject].colour
        width = 2.5 if colour else 1.2
        colour = colour or _OTHER_COLOURS[others.index(subject) % len(_OTHER_COLOURS)]
        return {"color": colour, "marker": "o", "linewidth": width, "label": TITLES[subject]}

    ordered = sorted(stored, key=lambda entry: subjects.index(entry.subject))
    for nbytes, panel in zip(sizes, axes, strict=True):
        here = [entry for entry in ordered if entry.nbytes == nbytes]
        points = [(entry.subject, entry.workers, entry.per_s) for entry in here]
        plots.draw_lines(panel, points, style)
        panel.set(title=format_nbytes(nbytes), xlabel="workers", xscale="log")
        counts = sorted({entry.workers for entry in stored})
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_xticks([], minor=True)
    axes[-1].legend(fontsize="small", loc="center right")
    return figure


#: Draws messages per second by workers.
draw = functools.partial(plots.draw_stored, list[Stored], _figure)
#: The targets, of which nothing was measured.
announced = functools.partial(_verdicts, {})
