"""The fast tests with each Python that is at hand, of those that shmring supports: ``make test-pythons``.

Each has an environment of its own, ``.venv-3.12`` for example, which is made once. What is compiled lies side by side in the
checkout: its names have the version. A Python is at hand if it is on the PATH, or was installed by pyenv or uv. It needs its
headers.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_INSTALLED = ("~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin", "/opt/python/*/bin")


def supported() -> list[str]:
    """Returns the versions that pyproject.toml names."""
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def at_hand(version: str) -> str | None:
    """Returns the path of a Python of a version; None if there is none."""
    for candidate in itertools.chain(_on_the_path(version), _installed(version)):
        shown = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        try:
            found = subprocess.run(shown, capture_output=True, text=True, check=False, timeout=60).stdout.split()
        except OSError:
            continue
        if found[:1] == [version]:  # a name of pyenv's may stand for nothing
            return found[1]
    return None


def _on_the_path(version: str) -> Iterator[str]:
    yield f"python{version}"
    yield "python3"


def _installed(version: str) -> Iterator[str]:
    for pattern in _INSTALLED:
        directory = Path(pattern).expanduser()
        fixed, _, rest = str(directory).partition("*")
        yield from map(str, sorted(Path(fixed).glob(f"*{rest}/python{version}"), reverse=True))


def main() -> int:
    """Runs the tests with each; returns 0 if all pass."""
    outcomes = {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for version in supported():
        if (python := at_hand(version)) is None:
            outcomes[version] = "not at hand"
            continue
        print(f"== Python {version}: {python}", flush=True)
        command = ["make", "--no-print-directory", "unit", f"PYTHON={python}", f"VENV=.venv-{version}"]
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        outcomes[version] = "passed" if passed else "FAILED"
    for version, outcome in outcomes.items():
        print(f"Python {version}: {outcome}")
    return int("FAILED" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
