"""Medians and ratios of subjects that were measured in turn. A ratio is taken within each repetition; their median counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

#: The runs of each subject, by case, in the order in which they were made.
Measured: TypeAlias = Mapping[Any, Mapping[str, Sequence[Any]]]
#: What a run says of something: an attribute (``ttft.p99_ms``), or what a function makes of it. None: it was not measured.
Number: TypeAlias = str | Callable[[Any], float | None]


def title_of(case: Any) -> str:
    """Returns a case in words: its title, if it has one."""
    title = getattr(case, "title", None)
    return title if isinstance(title, str) else str(case)


def values(runs: Iterable[Any], number: Number) -> list[float | None]:
    return [_attribute(run, number) if isinstance(number, str) else number(run) for run in runs]


def _attribute(run: Any, path: str) -> Any:
    for name in path.split("."):
        run = None if run is None else getattr(run, name)
    return run


def measured_values(runs: Iterable[Any], number: Number) -> list[float]:
    """Returns a number of each run that has it."""
    return [value for value in values(runs, number) if value is not None]


def median(runs: Iterable[Any], number: Number) -> float | None:
    """Returns the median of a number; None if no run has it."""
    found = measured_values(runs, number)
    return statistics.median(found) if found else None


def percentile(runs: Iterable[Any], numbers: Callable[[Any], Iterable[float]], percent: float) -> float | None:
    """Returns a percentile of what all repetitions have together: one alone has too few for a 99th. None: they have nothing."""
    found = [number for run in runs for number in numbers(run)]
    return float(np.percentile(found, percent)) if found else None


def ratio(measured: Measured, case: Hashable, ours: str, theirs: str, number: Number, of_case: Hashable = None) -> float | None:
    """Returns one subject's number over another's, in the same case, or in another one: the median of the ratios.

    None: no repetition has both numbers.
    """
    mine, others = measured.get(case, {}).get(ours, ()), measured.get(of_case or case, {}).get(theirs, ())
    pairs = zip(values(mine, number), values(others, number), strict=False)
    found = [mine / other for mine, other in pairs if mine is not None and other]
    return statistics.median(found) if found else None
