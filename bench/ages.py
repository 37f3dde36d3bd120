"""How old a result is: how many commits have changed the code that it is about since it was measured.

A verdict is about code. When that code has changed, the verdict says nothing of the new one, whether it was met or missed: it
is stale, and is not counted. What code a mode is about is in :mod:`bench.modes`.

Without git, as in an sdist, and for commits that this clone does not have, the age is not known, and nothing is counted either.
"""

from __future__ import annotations

from pathlib import Path

from bench.machine import ROOT, git
from bench.modes import code_of


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
