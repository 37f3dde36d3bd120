"""How old a result is: how many commits have changed the code that it is about since it was measured.

A verdict is about code. When that code has changed, the verdict says nothing of the new one, whether it was met or missed: it
is stale, and is not counted. What code a mode is about is in a table here: product code only, since a benchmark that changes
measures the same thing, or is measured anew by whoever changes it.

Without git, as in an sdist, and for commits that this clone does not have, the age is not known, and nothing is counted either.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.command_line import ROOT

__all__ = ["CODE_OF", "age", "age_in_words", "head"]

_GIT_TIMEOUT_S = 60.0
_ALL = ("shmring", "engine", "frontend")


def _shmring_without(*parts: str) -> tuple[str, ...]:
    return ("shmring", *(f":(exclude)shmring/{part}" for part in parts))


#: Of both ends in host memory, and what is between them.
_ENDS = _shmring_without("gpu", "integrations", "threads", "worker")
_PLACING = ("blocks", "sorted_keys", "lending", "client_book", "engine_book")

#: The paths that a mode measures, as git takes them. Of a mode that is not here, it is all.
CODE_OF: dict[str, tuple[str, ...]] = {
    "allocator": (*(f"shmring/core/{name}.*" for name in _PLACING), "shmring/memory/_copying.c"),
    "cost": _ENDS,
    "fan-out": _shmring_without("gpu", "integrations"),
    "gpu": _shmring_without("integrations", "threads", "worker"),
    "isolation": _ALL,
    "request": _ENDS,
    "request-scaling": _ENDS,
    "serve": _ALL,
    "sglang": _shmring_without("gpu"),
    "soak": _ENDS,
    "transport": _ENDS,
    "vllm": _shmring_without("gpu", "worker"),
}


def age(mode: str, commit: str | None, root: Path = ROOT) -> int | None:
    """Returns how many commits have changed what a mode measures since a commit.

    Args:
        mode: which benchmark.
        commit: of the result's :class:`bench.machine.Machine`: with ``-dirty`` behind it if files differed from it.
        root: of the checkout.

    Returns:
        None if that is not known: there is no checkout, no git or no such commit in it; or nothing has changed since, but what
        was measured had changes that are in no commit.
    """
    if commit is None:
        return None
    clean = commit.removesuffix("-dirty")
    counted = _git(root, "rev-list", "--count", f"{clean}..HEAD", "--", *CODE_OF.get(mode, _ALL))
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
    return _git(root, "rev-parse", "--short=12", "HEAD")


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None if it can't."""
    if not (root / ".git").exists():
        return None  # installed, or an sdist; a repository further up would be somebody else's
    command = ["git", "-C", os.fspath(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
