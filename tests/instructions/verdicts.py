"""What has grown, by how much, where, and whether that was allowed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.instructions.callgrind import Count, Failed

BUDGET = Path(__file__).with_name("budget.json")

MAY_GROW = 0.02  # runs differ by 0.1 % on most machines; what is smaller is reported, and adds up until it is not

_COPIED_MORE = 512  # bytes of a message, beside the share above: a buffer that grows is copied, or not, by what lies behind it
_SHOWN = 0.01  # by so much more or less, and functions are named
_MOST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Budget:
    """The commit that this one is compared with, and what has been allowed since.

    Attributes:
        beside: the commit.
        allowed: by case, the share that it may have grown by, beside the one that any may.
    """

    beside: str
    allowed: Mapping[str, float]

    @classmethod
    def read(cls, text: str) -> Budget:
        """Returns what is in the file.

        Raises:
            ValueError: a case is allowed to grow without a reason.
        """
        found = json.loads(text)
        for case, allowance in found["allowed"].items():
            if not str(allowance.get("why", "")).strip():
                raise ValueError(f"budget.json allows {case!r} to grow, and does not say why")
        return cls(found["beside"], {case: allowance["percent"] / 100 for case, allowance in found["allowed"].items()})


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of a case.

    Attributes:
        text: for people, of one line or several.
        is_red: whether it has grown too much, or cannot be carried out.
    """

    text: str
    is_red: bool


def judge(case: str, before: Count | Failed, now: Count | Failed, allowed: float = 0.0) -> Verdict:
    """Compares what a case takes with what it took.

    Args:
        case: its name.
        before: at the earlier commit, which may lack something that the case uses.
        now: at this one.
        allowed: the share by which it may have grown, beside the one that any may.
    """
    if isinstance(now, Failed):
        return Verdict(f"{case:32} FAILED: {now.why}", True)
    taken = f"{case:32}{now.instructions:10.0f}"
    if isinstance(before, Failed):
        return Verdict(f"{taken} new: the earlier commit failed by {before.why}", False)
    growth = now.instructions / before.instructions - 1
    is_red = growth > MAY_GROW + allowed or now.copying > before.copying * (1 + MAY_GROW + allowed) + _COPIED_MORE
    word = ", TOO MUCH" if is_red else ", less: name a commit in budget.json that has this" if growth < -MAY_GROW else ""
    allowance = f", of which {allowed:.1%} are allowed" if allowed else ""
    lines = [f"{taken} {growth:+7.2%}{allowance}; copying {now.copying:7.0f} {now.copying - before.copying:+6.0f}{word}"]
    if is_red or abs(growth) > _SHOWN:
        lines += _changes("instructions", before.functions, now.functions)
        lines += _changes("bytecodes", before.bytecodes, now.bytecodes)
    return Verdict("\n".join(lines), is_red)


def _changes(unit: str, before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    changes = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in before.keys() | now.keys()}
    for name in sorted(changes, key=lambda name: (-abs(changes[name]), name))[:_MOST_ROWS]:
        if abs(changes[name]) >= 1:
            yield f"    {changes[name]:+8.0f} {unit:12} {name}"


def as_json(before: Mapping[str, Count | Failed], now: Mapping[str, Count | Failed]) -> dict[str, Any]:
    """Returns the figures alone, for a file of results."""
    cases = {}
    for case, count in now.items():
        earlier = before.get(case)
        if isinstance(count, Count) and isinstance(earlier, Count):
            cases[case] = {
                "before": round(earlier.instructions),
                "now": round(count.instructions),
                "copying": round(count.copying),
                "bytecodes": round(sum(count.bytecodes.values())),
            }
    return cases
