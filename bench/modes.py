"""What each benchmark is, in one table: the code that it is about, and how long a case runs; and how old a result of it is.

The code is product code only: a benchmark that changes measures the same thing, or is measured anew by whoever changes it.

A verdict is about code. When that code has changed, the verdict says nothing of the new one, whether it was met or missed: it
is stale, and is not counted. A result's age is how many commits have changed its code since it was measured. Without git, as in
an sdist, and for commits that this clone does not have, the age is not known, and nothing is counted either.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.machine import ROOT, git


class Timing(NamedTuple):
    """How often a case is measured, and how long each time: what is timed, and before that what is not."""

    repetitions: int
    timed_s: float = 0.0
    warm_up_s: float = 0.0


class Mode(NamedTuple):
    """A benchmark: the paths that it measures, as git takes them; and the timing of its cases, unless it says that itself."""

    code: tuple[str, ...]
    timing: Timing | None = None

    def timed(self, repetitions: int | None = None, seconds: float | None = None) -> Timing:
        """Returns how long it runs where somebody has said something else, or has not."""
        assert self.timing is not None, "its cases are timed"
        return Timing(repetitions or self.timing.repetitions, seconds or self.timing.timed_s, self.timing.warm_up_s)


def _shmring_without(*parts: str) -> tuple[str, ...]:
    """The transport but for some parts, and for what only starts and ends processes."""
    return ("shmring", *(f":(exclude)shmring/{part}" for part in (*parts, "processes")))


_ALL = ("shmring", "engine", "frontend")
#: Of both ends in host memory, and what is between them.
_ENDS = _shmring_without("gpu", "integrations", "threads", "worker")
_PLACING = ("blocks", "sorted_keys", "lending", "client_book", "engine_book")

#: By name; of a mode that is not here, the code is all.
MODES: dict[str, Mode] = {
    "allocator": Mode((*(f"shmring/core/{name}.*" for name in _PLACING), "shmring/memory/_copying.c")),
    "cost": Mode(_ENDS, Timing(7, 1.0, 0.3)),
    "fan-out": Mode(_shmring_without("gpu", "integrations"), Timing(5, 0.5)),
    "gpu": Mode(_shmring_without("integrations", "threads", "worker"), Timing(7, 0.1)),
    "isolation": Mode(_ALL, Timing(2, 1.5)),
    "ray": Mode(_shmring_without("gpu", "threads", "worker", "integrations/sglang", "integrations/vllm"), Timing(5, 0.4, 0.05)),
    "request": Mode(_ENDS, Timing(7, 1.0, 0.25)),
    "request-scaling": Mode(_ENDS),
    "serve": Mode(_ALL, Timing(3)),
    "sglang": Mode(_shmring_without("gpu"), Timing(7)),
    "steps": Mode(("engine/executors",), Timing(3)),
    "soak": Mode(_ENDS),
    "transport": Mode(_ENDS, Timing(5, 0.5, 0.15)),
    # 11 cases in about 5 minutes: 13 peers, 3 repetitions, and what connecting and closing take besides.
    "quick": Mode(_ENDS, Timing(3, 0.15, 0.05)),
    "vllm": Mode(_shmring_without("gpu", "worker"), Timing(12)),
    "vllm-workers": Mode(_shmring_without("gpu", "worker"), Timing(7)),
}


def code_of(mode: str) -> tuple[str, ...]:
    return MODES[mode].code if mode in MODES else _ALL


# -- how old a result is ---------------------------------------------------------------------------------------------------


def age(mode: str, commit: str | None, root: Path = ROOT) -> int | None:
    """Returns how many commits have changed what a mode measures since a result's commit (``-dirty``: files differed from it).

    None if that is not known: there is no checkout, no git or no such commit in it; or nothing has changed since, but what was
    measured had changes that are in no commit.
    """
    if commit is None:
        return None
    clean = commit.removesuffix("-dirty")
    counted = git(root, "rev-list", "--count", f"{clean}..HEAD", "--", *code_of(mode))
    if counted is None:
        return None
    changes = int(counted)
    return changes if changes or clean == commit else None


def age_in_words(changes: int | None) -> str:
    """Returns an age as a table says it."""
    if changes is None:
        return "not known"
    return f"changed by {changes} commit{'s' * (changes > 1)}" if changes else "the same"


def head(root: Path = ROOT) -> str | None:
    """Returns the commit that ages are counted to; None where there is none."""
    return git(root, "rev-parse", "--short=12", "HEAD")
