"""Fuzzes with atheris: ``python -m tests.fuzz.run [--seconds N] [TARGET ...]``; ``make fuzz`` gives each target a minute.

atheris looks which of our code an input reaches, and changes the inputs that reach something new. It ends with an error, and
writes the input to ``crash-...``, as soon as a promise of the target is broken.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

# The models too: what is compiled can't be looked into, and what they do stands for what it does.
with atheris.instrument_imports(include=["shmring", "frontend", "tests.model"]):
    from tests.fuzz.targets import SEEDS, TARGETS

_MAX_NBYTES = 4096
_LIMITS = [f"-max_len={_MAX_NBYTES}", "-rss_limit_mb=4096", "-timeout=10"]


def main() -> None:
    """Runs until the time is over."""
    parser = argparse.ArgumentParser(description="Fuzzes what takes bytes from others.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all of them if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)  # how this program calls itself: atheris ends its process
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"there is no target {unknown.pop()!r}, only {', '.join(TARGETS)}")
    if options.corpus is not None:
        fuzz(options.targets[0], options.seconds, options.corpus)
    for name in options.targets or TARGETS:
        print(f"-- {name}", flush=True)
        with tempfile.TemporaryDirectory() as corpus:
            for index, seed in enumerate(SEEDS[name]):
                (Path(corpus) / str(index)).write_bytes(seed)
            own = [sys.executable, "-m", "tests.fuzz.run", "--corpus", corpus, "--seconds", str(options.seconds), name]
            if subprocess.run(own, check=False).returncode:
                sys.exit(f"{name} broke a promise; the input is in the file crash-... named above")


def fuzz(name: str, seconds: int, corpus: str) -> None:
    """Fuzzes one target, and ends the process."""
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", *_LIMITS, corpus], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
