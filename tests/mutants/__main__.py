"""Tries faults, and says who noticed each: ``python -m tests.mutants [--guards | --no-guards] [NAME ...]``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from tests.mutants.fault import Fault
from tests.mutants.running import Outcome, try_all
from tests.mutants.table import FAULTS

_SLOWEST = 5


def main() -> None:
    """Prints who noticed each fault, and how long that took; fails if nobody did who should have."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Tries all faults, or some of them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose names or files contain one of these")
    parser.add_argument("--guards", action=argparse.BooleanOptionalAction, help="only guards, or only the others")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and what it has copied and started goes
    begun_s = time.monotonic()
    chosen = [
        fault
        for fault in FAULTS
        if options.guards in (None, fault.is_guard)
        if not options.names or any(text in f"{fault.file} {fault.name}" for text in options.names)
    ]
    tried = []
    for fault, outcome in try_all(chosen):
        tried.append((fault, outcome))
        print(f"{outcome.how:8} {outcome.seconds:5.1f} s  {fault.file}: {fault.name}; {outcome.who or fault.test}", flush=True)
    _report(tried, time.monotonic() - begun_s)


def _report(tried: Sequence[tuple[Fault, Outcome]], seconds: float) -> None:
    noticed = [outcome for _, outcome in tried if outcome.is_noticed]
    ways = ", ".join(f"{sum(outcome.how == how for outcome in noticed)} {how}" for how in sorted({way.how for way in noticed}))
    print(f"\n{len(noticed)} of {len(tried)} faults were noticed ({ways}) in {seconds / 60:.0f} minutes. The slowest:")
    for fault, outcome in sorted(tried, key=lambda row: -row[1].seconds)[:_SLOWEST]:
        print(f"  {outcome.seconds:5.1f} s  {fault.name}")
    survivors = [fault for fault, outcome in tried if not outcome.is_noticed]
    accepted = [fault for fault in survivors if fault.reason]
    if accepted:
        print("Nobody need notice:")
        for fault in accepted:
            print(f"  {fault.file}: {fault.name}. {fault.reason}")
    if len(accepted) < len(survivors):
        print("NOBODY NOTICED:")
        for fault in survivors:
            if not fault.reason:
                print(f"  {fault.file}: {fault.name} ({fault.test})")
        sys.exit(1)


if __name__ == "__main__":
    main()
