"""Has spin search the protocols of sleeping and waking for a lost wake-up or a torn record: ``make verify``.

There are two: of the message ring, and of an engine that waits for its workers to leave messages. Each run is one size of the
ring, or one choice of who waits for what, and one kind of memory (x86: stores leave in order; ARM: in any order that its
barriers allow). Then a protocol is mutilated, one step at a time: spin must find a fault in every mutant, or the model proves
nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

RING = Path(__file__).with_name("message_ring.pml")
ACKNOWLEDGEMENTS = Path(__file__).with_name("acknowledgements.pml")

#: Units in the ring, units of the longest record, records.
SIZES = ((1, 1, 4), (2, 1, 4), (4, 1, 6), (4, 2, 4), (8, 2, 5))

#: What is left out, and the size and memory in which that is a fault.
MUTANTS = {
    "NO_FENCE_BEFORE_BELL": (2, 1, 3),
    "NO_FENCE_BEFORE_SLEEPING": (2, 1, 3),
    "NO_SECOND_LOOK_AT_TAIL": (2, 1, 3),
    "NO_FENCE_BEFORE_WAITING": (1, 1, 3),
    "NO_FENCE_BEFORE_BELL_OF_SPACE": (1, 1, 3),
    "NO_SECOND_LOOK_AT_HEAD": (1, 1, 3),
    "NO_BELL_BEFORE_WAITING": (1, 1, 3),
    "NO_BELL_BEFORE_CLOSING -DNO_CLOSE": (2, 1, 2),
    "NO_RELEASE_OF_TAIL -DARM": (4, 2, 3),
    "NO_ACQUIRE_OF_TAIL": (2, 1, 3),
    "NO_RELEASE_OF_HEAD": (1, 1, 3),
}

#: The messages that are waited for: by who sends, and by frontends whose slots one keeps.
WAITING = ((2, 1), (1, 2))

#: What is left out of the protocol of acknowledgements.
DEAF = (
    "NO_FENCE_BEFORE_BELL",
    "NO_BELL_FOR_A_LATER_MESSAGE",
    "NO_EXCHANGE",
    "NO_REGARD_FOR_WHO_WAITS",
    "NO_FENCE_BEFORE_LOOKING",
    "NO_SECOND_LOOK",
    "NO_ASKING_ANEW",
)


def main() -> None:
    """Runs everything and prints a line each; exits with 1 if a run is not as it must be."""
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: apt install {' '.join(missing)}")
    wrong = 0
    for title, model, options, must_hold in runs():
        errors, states = search(model, options)
        as_it_must = (errors == 0) is must_hold
        wrong += not as_it_must
        found = "no fault" if errors == 0 else "a fault"
        print(f"{'ok   ' if as_it_must else 'WRONG'} {title}: {found} in {states:,} states", flush=True)
    print(f"{wrong} runs are not as they must be")
    sys.exit(wrong > 0)


def runs() -> Iterator[tuple[str, Path, str, bool]]:
    """Yields a title, the model, the options, and whether the protocol must hold."""
    for memory in ("", " -DARM"):
        for units, longest, records in SIZES:
            options = f"-DUNITS={units} -DLONGEST={longest} -DRECORDS={records}{memory}"
            yield f"{'ARM' if memory else 'x86'}, {units} units, {records} records of up to {longest}", RING, options, True
        for caller, slots in WAITING:
            options = f"-DCALLER={caller} -DSLOTS={slots}{memory}"
            title = f"{'ARM' if memory else 'x86'}, message {caller} of 3 is waited for by who sends, {slots} by frontends"
            yield title, ACKNOWLEDGEMENTS, options, True
    for mutant, (units, longest, records) in MUTANTS.items():
        yield f"mutant {mutant}", RING, f"-DUNITS={units} -DLONGEST={longest} -DRECORDS={records} -D{mutant}", False
    for mutant in DEAF:
        yield f"mutant {mutant} of acknowledgements", ACKNOWLEDGEMENTS, f"-D{mutant}", False


def search(model: Path, options: str) -> tuple[int, int]:
    """Searches one configuration; returns the errors and the states that were visited."""
    with tempfile.TemporaryDirectory() as directory:
        for command in (
            ["spin", *options.split(), "-a", str(model)],
            ["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4096", "-o", "pan", "pan.c"],
        ):
            subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True)
        report = subprocess.run(["./pan", "-m1000000"], cwd=directory, check=True, capture_output=True, text=True).stdout
    errors, states = re.search(r"errors: (\d+)", report), re.search(r"(\d+) states, stored", report)
    if errors is None or states is None or "out of memory" in report or "max search depth too small" in report:
        sys.exit(f"spin did not search everything:\n{report}")
    return int(errors[1]), int(states[1])


if __name__ == "__main__":
    main()
