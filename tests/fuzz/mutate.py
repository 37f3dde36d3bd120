"""Damages honest inputs at random: ``python -m tests.fuzz.mutate [--seconds N] [--seed N] [TARGET ...]``.

``run.py`` looks which Python code an input reaches, and sees nothing of what is compiled. This one looks at nothing, and is
there for the compiler's sanitizers: ``make fuzz`` runs it with the core built for them, on all that the core takes from others.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from tests.fuzz.targets import SEEDS, TARGETS

#: In which compiled code reads bytes that come from others. They have the whole time each.
PARSERS = ("message-rings", "records", "payloads", "worker-records")
#: What compiled code does then, and whole ends that meet a hostile peer. They have a part of the time, since most inputs are
#: refused before they come so far.
BEHIND = (
    *("messages", "books", "slot-headers", "workers", "shared-claims"),
    *("attaching", "attached-engines", "joining", "joined-engines", "joined-workers"),
)
_PART_BEHIND = 0.25
_MOST_CHANGES = 6
_LONGEST = 16  # bytes of one change


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns an input with pieces replaced, dropped, repeated or turned over."""
    for _ in range(chance.randint(0, _MOST_CHANGES)):
        start = chance.randint(0, len(data))
        end = chance.randint(start, min(len(data), start + _LONGEST))
        piece = chance.choice(
            (
                chance.randbytes(chance.randint(0, _LONGEST)),
                data[start:end] * 2,
                bytes(255 - byte for byte in data[start:end]),
                b"\xff" * (end - start),
                bytes(end - start),
            )
        )
        data = data[:start] + piece + data[end:]
    return data


def fuzz(name: str, seconds: float, chance: random.Random) -> int:
    """Gives a target damaged inputs until the time is over; returns how many. An input that breaks a promise is printed."""
    target, seeds = TARGETS[name], SEEDS[name]
    count, until_s = 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        data = damaged(chance.choice(seeds), chance)
        try:
            target(data)
        except BaseException:
            print(f"{name} broke a promise with {data!r}", file=sys.stderr)
            raise
        count += 1
    return count


def main() -> None:
    """Runs until the time is over."""
    parser = argparse.ArgumentParser(description=f"Damages honest inputs of {Path(__file__).parent.name} targets at random.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; those of the core by default")
    parser.add_argument("--seconds", type=float, default=60, help="for each; a quarter for those that parse nothing in C")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = options.targets or (*PARSERS, *BEHIND)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"there is no target {unknown.pop()!r}, only {', '.join(TARGETS)}")
    chance = random.Random(options.seed)
    for name in names:
        seconds = options.seconds * (_PART_BEHIND if name in BEHIND else 1)
        print(f"{name}: {fuzz(name, seconds, chance):,} damaged inputs in {seconds:g} s", flush=True)


if __name__ == "__main__":
    main()
