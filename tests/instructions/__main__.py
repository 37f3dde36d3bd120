"""``python -m tests.instructions [--beside COMMIT] [CASE ...]``: fails if a case takes more than it may.

Without CASE, ratios of times are measured as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from tests.instructions import ratios
from tests.instructions.callgrind import Count, Failed, measure
from tests.instructions.earlier import ROOT, NotThere, built, commit_of, is_compiled, keep_bytecode
from tests.instructions.verdicts import BUDGET, Budget, as_json, judge

_SKIPPED = 77  # the exit status that says so to whoever started this, as automake's tests do


def main() -> None:
    """Measures this checkout and an earlier commit, and prints a row for each case."""
    parser = argparse.ArgumentParser(prog="python -m tests.instructions", description=__doc__)
    parser.add_argument(
        "--beside", help="a commit, or the directory of a checkout that is built; else the commit in budget.json"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the name of a case; all, if there is none")
    asked = parser.parse_args()
    if shutil.which("valgrind") is None:
        _skip("valgrind is not installed (Debian: apt install valgrind)")
    if not is_compiled():
        sys.exit("The core is older than its sources: make install")
    budget = Budget.read(BUDGET.read_text())
    named = asked.beside or budget.beside
    try:
        earlier = Path(named).resolve() if Path(named).is_dir() else commit_of(named)
    except NotThere:
        _skip(
            f"the commit {named}, which this one is compared with, is not here; "
            f"in a shallow clone: git fetch --depth 1 origin {named}"
        )
    with ThreadPoolExecutor() as pool:
        measuring = pool.submit(_measured, ROOT, asked.cases)
        checkout = built(earlier) if isinstance(earlier, str) else earlier
        before = _measured(checkout, asked.cases)
        now = measuring.result()
    print(f"Instructions of a message, beside {named}:")
    verdicts = [
        judge(case, before.get(case, Failed("nothing")), count, budget.allowed.get(case, 0)) for case, count in now.items()
    ]
    for verdict in verdicts:
        print(verdict.text, flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"beside": named, "cases": as_json(before, now)}, indent=1) + "\n")
    is_red = any(verdict.is_red for verdict in verdicts)
    if not asked.cases:
        print("Ratios, beside the same: median, and quartiles; the lower one decides.")
        is_red |= bool(ratios.judge(checkout, budget))
    if is_red:
        sys.exit("Some take more than they may. If that is worth it, allow it in tests/instructions/budget.json, and say why.")


def _measured(checkout: Path, cases: list[str]) -> dict[str, Count | Failed]:
    keep_bytecode(checkout)
    return measure(checkout, cases)


def _skip(why: str) -> NoReturn:
    print(f"SKIPPED, no instructions were counted: {why}")
    sys.exit(_SKIPPED)


if __name__ == "__main__":
    main()
