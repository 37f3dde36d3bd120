"""``make chaos``: an engine and several frontends under load, and everything that can happen to a process.

Every tensor carries a number and a checksum, every request is accounted for, and after every phase the books must balance
to the last byte. See :mod:`tests.chaos.plan` for what happens, :mod:`tests.chaos.driver` for how, and
:mod:`tests.chaos.account` for what is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.chaos import driver
from tests.chaos.account import Findings, account
from tests.chaos.driver import Observations
from tests.chaos.plan import Plan, Sabotage
from tests.chaos.report import table, write_json, write_plot
from tests.fleet.fleet import ChildError

__all__ = [
    "ChildError",
    "Findings",
    "Plan",
    "Sabotage",
    "run",
    "table",
    "write_json",
    "write_plot",
]


def run(plan: Plan, progress: Callable[[str], None]) -> Findings:
    """Carries a plan out, and says what it has shown. Afterwards no process and no file of it is left.

    Args:
        plan: what to do.
        progress: called with a line before each fault and each phase.

    Raises:
        ChildError: a process died that nobody had killed, or did not answer: there is no result.
    """
    results: list[Findings] = []

    def keep(seen: Observations) -> None:
        results.append(account(plan, seen))

    asyncio.run(driver.run(plan, progress, keep))
    return results[0]
