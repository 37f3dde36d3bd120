"""What did not hold, as something that can be seen again: a scenario and the actions that lead there."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from contextlib import closing
from typing import Self

import msgspec

from tests.simulation.crash import Crash, in_child
from tests.simulation.scenario import Action, Scenario, Violation
from tests.simulation.simulation import Simulation

_SHORTENING_S = 60.0  # of CPU; most failures come down to a dozen actions in a second


class Failure(msgspec.Struct, frozen=True):
    """Something that must hold did not.

    Attributes:
        text: what.
        scenario: in which.
        trace: actions from the beginning; the last one shows it, or settling does.
        settles: whether it shows only when everything is settled after the last action.
        crashes: whether it ends the process.
    """

    text: str
    scenario: Scenario
    trace: tuple[Action, ...]
    settles: bool
    crashes: bool = False

    @classmethod
    def of(cls, crash: Crash) -> Self:
        """Returns what a crash comes down to."""
        return cls(str(crash), crash.scenario, crash.trace, settles=False, crashes=True)

    def lines(self) -> list[str]:
        """Returns it as text for people: the trace, an action a line."""
        numbers = ", ".join(
            f"{name} {value}"
            for name, value in msgspec.structs.asdict(self.scenario).items()
            if not isinstance(value, frozenset)
        )
        end = ["then everything is settled"] if self.settles else []
        return [f"violation: {self.text}", numbers, *(f"  {action}" for action in self.trace), *(f"  {line}" for line in end)]


def replay(failure: Failure) -> Violation | None:
    """Runs a trace again, passing over what is not enabled, and returns what did not hold this time."""
    if not failure.crashes:
        return _violation(failure)
    try:
        text = in_child(lambda: _text_of(failure), str)
    except Crash as crash:
        return Violation(str(crash))
    return Violation(text) if text else None


def _text_of(failure: Failure) -> str:
    faulthandler.disable()  # where it crashes was said when it did so first
    return str(_violation(failure) or "")


def _violation(failure: Failure) -> Violation | None:
    with closing(Simulation(failure.scenario)) as simulation:
        return _violation_in(failure, simulation)


def _violation_in(failure: Failure, simulation: Simulation) -> Violation | None:
    try:
        for action in failure.trace:
            if simulation.can_happen(action):
                simulation.happen(action)
        simulation.check()  # it fails at its end, or it would have failed before
        if failure.settles:
            simulation.settle()
    except Violation as violation:
        return violation
    return None


def shorten(failure: Failure) -> Failure:
    """Leaves out of a trace what its failure does not need: pieces, then smaller pieces, then single actions.

    What comes of it does not depend on what else the machine does: CPU time bounds it.

    Source: the delta debugging of Zeller and Hildebrandt, without its tests of single pieces.
    """
    deadline = _cpu_s() + _SHORTENING_S
    piece = max(1, len(failure.trace) // 2)
    while True:
        shorter = _without_pieces(failure, piece, deadline)
        if _cpu_s() >= deadline or (piece == 1 and len(shorter.trace) == len(failure.trace)):
            return shorter
        failure, piece = shorter, max(1, piece // 2)


def _cpu_s() -> float:
    """CPU time of this process, and of the children that have replayed a crash."""
    return sum(os.times()[:4])


def _without_pieces(failure: Failure, piece: int, deadline: float) -> Failure:
    position = 0
    while position < len(failure.trace) and _cpu_s() < deadline:
        trace: Sequence[Action] = failure.trace[:position] + failure.trace[position + piece :]
        shorter = msgspec.structs.replace(failure, trace=trace)
        violation = replay(shorter)
        if violation is not None and str(violation) == failure.text:
            failure = shorter
        else:
            position += piece
    return failure
