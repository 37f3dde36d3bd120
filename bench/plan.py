"""The one form of all benchmarks: a plan of cases, in each of which some subjects are measured in turn, again and again.

Repetitions are interleaved, so that whatever else the machine does hits all subjects alike. What is made of them, tables,
verdicts, and what is stored, is a part of the plan; a command only says how one subject is measured once, in one case.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import click

from bench.children import described
from bench.repetitions import Measured, title_of
from bench.results import Coverage, Findings, Gap, Planned, Status, Table, Verdict
from bench.targets import Target


class Timing(NamedTuple):
    """How often a case is measured, and how long each time: what is timed, and before that what is not."""

    repetitions: int
    timed_s: float = 0.0
    warm_up_s: float = 0.0


#: Who is measured in which case.
Cases: TypeAlias = Mapping[Any, Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command measures, and what is made of it.

    Attributes:
        mode: as the command line and the pages call it.
        cases: who is measured in which, in the order of tables. The first of a case is what the others are compared with.
        tables: makes tables of what was measured.
        targets: what is asked; or makes verdicts, if that depends on what was measured.
        titles: of subjects; one without has its name for a title.
        title: of a case.
        notes: what is to be known of every run; how often and how long is said before them.
        results: makes what a plot draws.
    """

    mode: str
    cases: Cases
    timing: Timing
    tables: Callable[[Measured], Iterable[Table]]
    targets: Sequence[Target] | Callable[[Measured], Iterable[Verdict]] = ()
    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    title: Callable[[Any], str] = title_of
    notes: Sequence[str] = ()
    results: Callable[[Measured], Any] = lambda measured: None

    def chosen(self, titles: Sequence[str] = (), names: Sequence[str] = ()) -> Plan:
        """Returns what is left of it: cases whose titles begin so, and of their subjects these and the first."""
        cases = {
            case: [name for place, name in enumerate(subjects) if not place or not names or name in names]
            for case, subjects in self.cases.items()
            if not titles or self.title(case).startswith(tuple(titles))
        }
        return dataclasses.replace(self, cases=cases)

    def findings(self, measured: Measured, coverage: Coverage | None = None, notes: Sequence[str] = ()) -> Findings:
        """Returns what is shown and stored of a run."""
        judge = self.targets
        count, timed_s, _ = self.timing
        how = f"{count} repetition{'s' * (count > 1)}{f' of {timed_s:g} s' * bool(timed_s)}."
        return Findings(
            mode=self.mode,
            tables=list(self.tables(measured)),
            notes=[how, *self.notes, *notes],
            targets=list(judge(measured)) if callable(judge) else [target.judge(measured) for target in judge],
            results=self.results(measured),
            coverage=coverage,
        )


class Runs:
    """A run of a plan: measures subjects in cases, and keeps what there is.

    What has failed is not tried again: ratios are taken within a repetition, so that none may lack in the middle.

    Attributes:
        plan: of this run.
        measured: all runs of each subject, by case.
        notes: what is to be known of this run, beside the plan's.
    """

    def __init__(self, plan: Plan, keep: Callable[[Findings], object] = lambda findings: None) -> None:
        self.plan, self._keep = plan, keep
        self.measured: dict[Any, dict[str, list[Any]]] = {}
        self.notes: list[str] = []
        self._failed: dict[tuple[str, str], tuple[Status, str]] = {}
        self._begun = 0

    @property
    def cases(self) -> Cases:
        return self.plan.cases

    @property
    def count(self) -> int:
        return self.plan.timing.repetitions

    def parts(self, most: int) -> list[slice]:
        """So many parts of the repetitions, of even length if there are enough, or fewer where there are few repetitions."""
        length = -(-self.count // most)
        length += length % 2 if self.count > most else 0
        return [slice(start, start + length) for start in range(0, self.count, length)]

    def has_failed(self, cases: Iterable[Any], subject: str) -> bool:
        """Whether nothing more is measured of a subject in cases."""
        return all((self.plan.title(case), subject) in self._failed for case in cases)

    def measure(
        self,
        measure: Callable[[Any, str], Any],
        cases: Iterable[Any] | None = None,
        subjects: Iterable[str] | None = None,
        part: slice = slice(None),
    ) -> None:
        """Measures subjects in cases, all of them if none are said, in alternating order; a line on stderr before each.

        A part of the repetitions is measured where there is something to do between them. What there is afterwards is kept,
        lest a run that is ended was for nothing.
        """
        plan, only = self.plan, None if subjects is None else set(subjects)
        steps = self.count * sum(map(len, plan.cases.values()))
        cases = list(plan.cases if cases is None else cases)
        for repetition, case in itertools.product(range(self.count)[part], cases):
            for subject in plan.cases[case][:: -1 if repetition % 2 else 1]:
                if only is not None and subject not in only:
                    continue
                self._begun += 1
                if self.has_failed([case], subject):
                    continue
                what = f"{plan.title(case)}, {plan.titles.get(subject, subject)}"
                click.echo(f"{self._begun} of {steps}: {what}, repetition {repetition + 1} of {self.count}", err=True)
                try:
                    run = measure(case, subject)
                except Exception as error:  # noqa: BLE001 # it has its place among the results
                    self.fail([case], [subject], described(error))
                else:
                    self.measured.setdefault(case, {}).setdefault(subject, []).append(run)
        self._keep(self.findings())

    def fail(self, cases: Iterable[Any], subjects: Iterable[str], reason: str, status: Status = Status.FAILED) -> None:
        """Says why subjects have no result in cases; if there are several reasons, the first one counts."""
        for case, subject in itertools.product(cases, list(subjects)):
            self._failed.setdefault((self.plan.title(case), subject), (status, reason))

    def coverage(self) -> Coverage:
        """Compares the plan with the repetitions that there are."""
        coverage = Coverage([], [])
        for case, subjects in self.cases.items():
            title = self.plan.title(case)
            coverage.planned.append(Planned(title, list(subjects), self.count))
            for subject in subjects:
                if (there := len(self.measured.get(case, {}).get(subject, ()))) < self.count:
                    why = self._failed.get((title, subject), (Status.MISSING, ""))
                    coverage.gaps.append(Gap(title, subject, there, *why))
        return coverage

    def findings(self) -> Findings:
        return self.plan.findings(self.measured, self.coverage(), self.notes)
