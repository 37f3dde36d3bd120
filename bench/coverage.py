"""What a run is to measure, measuring it in turn, and what of it there is: stored with every result, and said by the report.

A plan is a list of cases, in each of which some subjects (peers, variants, policies) are measured, each a number of times.
What has fewer repetitions than planned is a gap, with its reason. A run that is ended early so says by itself what it
lacks, and nobody has to count the rows of a table. Repetitions are interleaved, so that whatever else the machine does hits
all subjects alike.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from bench.children import described

__all__ = ["Coverage", "Gap", "Key", "Planned", "Repetitions", "Status", "checkout"]

_Case = TypeVar("_Case", bound=Hashable)
_Run = TypeVar("_Run")

#: A case and a subject.
Key = tuple[str, str]

_SHOWN_SUBJECTS = 3  # by name, of those that a case lacks; more are counted


class Planned(msgspec.Struct, frozen=True):
    """A case that is to be measured, in words; what is compared in it, and the repetitions of each."""

    case: str
    subjects: list[str]
    repetitions: int


class Status(enum.Enum):
    """Why something that was planned was not measured."""

    EXCLUDED = "not possible"  # it is not installed, or can't do that
    FAILED = "failed"  # it was tried
    MISSING = "missing"  # the run ended before it


class Gap(msgspec.Struct, frozen=True):
    """A subject that has fewer repetitions in a case than planned; with a reason, unless the run ended before it."""

    case: str
    subject: str
    measured: int
    status: Status
    reason: str = ""


class Coverage(msgspec.Struct, frozen=True):
    """What was planned, and the gaps in it.

    Attributes:
        derived: whether the plan was read from the recorded command: a run that is older than this record did not keep it.
    """

    planned: list[Planned]
    gaps: list[Gap]
    derived: bool = False

    @classmethod
    def of(
        cls, planned: Iterable[Planned], measured: Mapping[Key, int], reasons: Mapping[Key, tuple[Status, str]] | None = None
    ) -> Coverage:
        """Compares a plan with the repetitions that there are; where a case comes twice in it, its repetitions add up."""
        planned = list(planned)
        expected = _expected(planned)
        gaps = []
        for key, repetitions in expected.items():
            if (there := measured.get(key, 0)) < repetitions:
                status, reason = (reasons or {}).get(key, (Status.MISSING, ""))
                gaps.append(Gap(*key, there, status, reason))
        return cls(planned, gaps)

    @property
    def complete(self) -> bool:
        """Whether all that was planned was measured."""
        return not self.gaps

    def summary(self) -> str:
        """Returns in a sentence how much was measured of how much."""
        cases = len({planned.case for planned in self.planned})
        expected = _expected(self.planned)
        counts = collections.Counter(gap.status for gap in self.gaps)
        rest = "".join(f", {counts[status]} {status.value}" for status in Status if counts[status])
        source = "; planned by the recorded command" if self.derived else ""
        in_cases = f"{cases} case{'s' * (cases > 1)}"
        return f"{len(expected) - len(self.gaps)} of {len(expected)} measurements in {in_cases}{rest}{source}"

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yields rows: the cases, the subjects that they lack, what became of them; cases that lack the same share a row."""
        sizes = collections.Counter(case for case, _ in _expected(self.planned))
        grouped: dict[tuple[str, str], list[str]] = {}
        for gap in self.gaps:
            outcome = f"{gap.status.value}: {gap.reason}" if gap.reason else gap.status.value
            if gap.measured:
                outcome += f"; {gap.measured} repetitions are there"
            grouped.setdefault((gap.case, outcome), []).append(gap.subject)
        rows: dict[tuple[str, str], list[str]] = {}
        for (case, outcome), subjects in grouped.items():
            if len(subjects) == sizes[case] and len(subjects) > 1:
                shown = f"all {len(subjects)}"
            elif len(subjects) > _SHOWN_SUBJECTS:
                shown = f"{', '.join(subjects[:_SHOWN_SUBJECTS])} and {len(subjects) - _SHOWN_SUBJECTS} more"
            else:
                shown = ", ".join(subjects)
            rows.setdefault((shown, outcome), []).append(case)
        cases = {planned.case for planned in self.planned}
        for (shown, outcome), lacking in rows.items():
            yield "all" if 1 < len(cases) == len(lacking) else "; ".join(lacking), shown, outcome


class Repetitions(Generic[_Case, _Run]):
    """Measures subjects in cases, in turn and again and again, and keeps what there is.

    What has failed is not tried again: ratios are taken within a repetition, so that none may lack in the middle.

    Args:
        subjects: of each case.
        count: of the repetitions of each.
        title: a case in words.

    Attributes:
        measured: the repetitions of each subject, by case.
    """

    def __init__(self, subjects: Mapping[_Case, Sequence[str]], count: int, title: Callable[[_Case], str]) -> None:
        self.measured: dict[_Case, dict[str, list[_Run]]] = {}
        self._subjects, self._count, self._title = subjects, count, title
        self._failed: dict[Key, tuple[Status, str]] = {}

    @property
    def steps(self) -> int:
        """How many lines of progress there will be."""
        return self._count * sum(map(len, self._subjects.values()))

    def measure(
        self,
        cases: Sequence[_Case],
        measure: Callable[[_Case, str], _Run],
        progress: Callable[[str], None],
        titles: Mapping[str, str] | None = None,
    ) -> None:
        """Measures all subjects of cases, in alternating order, with a line before each; titles are those of subjects."""
        for repetition, case in itertools.product(range(self._count), cases):
            for subject in self._subjects[case][:: -1 if repetition % 2 else 1]:
                words = (titles or {}).get(subject, subject)
                progress(f"{self._title(case)}, {words}, repetition {repetition + 1} of {self._count}")
                if (self._title(case), subject) not in self._failed:
                    try:
                        run = measure(case, subject)
                    except Exception as error:  # noqa: BLE001 # it has its place among the results
                        self.fail([case], [subject], described(error))
                    else:
                        self.measured.setdefault(case, {}).setdefault(subject, []).append(run)

    def fail(self, cases: Iterable[_Case], subjects: Iterable[str], reason: str) -> None:
        """Says why subjects have no result in cases; if there are several reasons, the first one counts."""
        for case, subject in itertools.product(cases, list(subjects)):
            self._failed.setdefault((self._title(case), subject), (Status.FAILED, reason))

    def coverage(self) -> Coverage:
        """What was planned, and what of it is missing."""
        planned = [Planned(self._title(case), list(subjects), self._count) for case, subjects in self._subjects.items()]
        counts = {(self._title(case), name): len(runs) for case, of in self.measured.items() for name, runs in of.items()}
        return Coverage.of(planned, counts, self._failed)


def checkout(commit: str | None) -> str:
    """Returns in words what sources a result comes from, by the commit of its :class:`bench.machine.Machine`."""
    if commit is None:
        return "no commit is known"
    clean = commit.removesuffix("-dirty")
    return f"commit {clean}, {'a clean checkout' if clean == commit else 'with uncommitted changes'}"


def _expected(planned: Iterable[Planned]) -> dict[Key, int]:
    """Repetitions by case and subject."""
    expected: collections.Counter[Key] = collections.Counter()
    for case in planned:
        for subject in case.subjects:
            expected[case.case, subject] += case.repetitions
    return dict(expected)
