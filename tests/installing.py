"""Installs packages with pip, and says in a line for each what is fetched, built, compiled and installed now.

``python tests/installing.py -c constraints.txt torch`` takes pip's arguments. pip alone says either nothing for minutes
(``--quiet``) or hundreds of lines. If it fails, all that it has said is shown. ``make`` runs this with the new environment's
Python, so it needs nothing but the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

__all__ = ["install", "news"]

_PIP = [sys.executable, "-m", "pip", "install", "--verbose", "--progress-bar", "off", "--disable-pip-version-check"]

#: What pip and setuptools say when they begin with something, and what is said of it here.
_BEGINNINGS = (
    (re.compile(r"Downloading (?:\S*/)?([^/\s]+) \((.+)\)$"), "fetching {} ({})"),
    (re.compile(r"Using cached (?:\S*/)?([^/\s]+) \((.+)\)$"), "taking {} ({}) from pip's cache"),
    (re.compile(r"Building (?:editable|wheel) for (\S+) \(.*\): started$"), "building {}"),
    (re.compile(r"translating '([\w.]+)' to C$"), "translating {} to C"),
    (re.compile(r"building '([\w.]+)' extension$"), "compiling {}"),
    (re.compile(r"Installing collected packages: (.+)$"), "installing {}"),
)


def news(line: str) -> str | None:
    """Returns what a line of pip's says that has begun; None if it says something else."""
    for beginning, text in _BEGINNINGS:
        if found := beginning.fullmatch(line.strip()):
            return text.format(*found.groups())
    return None


def install(command: Sequence[str]) -> int:
    """Runs pip, and prints what it begins with, at once; returns its exit status. If it fails, prints all that it has said."""
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        for line in _lines(pip):
            said.append(line)
            if (text := news(line)) is not None:
                print(f"    {text}", flush=True)
    if pip.returncode != 0:
        print("".join(said), end="", file=sys.stderr)
    return pip.returncode


def _lines(pip: subprocess.Popen[str]) -> Iterator[str]:
    assert pip.stdout is not None
    yield from pip.stdout


if __name__ == "__main__":
    sys.exit(install([*_PIP, *sys.argv[1:]]))
