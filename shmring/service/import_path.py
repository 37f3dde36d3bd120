"""``PYTHONPATH`` without empty parts, which mean the working directory to Python.

``export PYTHONPATH=$PYTHONPATH:/x`` makes such a part where the variable was empty, and nobody means it. Named parts stay, the
working directory by its name included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["VARIABLE", "restart_without_working_directory", "without_working_directory"]

VARIABLE = "PYTHONPATH"


def without_working_directory(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with which Python imports nothing from the working directory, if it runs with ``-P``."""
    parts = [part for part in environment.get(VARIABLE, "").split(os.pathsep) if part]
    rest = {name: value for name, value in environment.items() if name != VARIABLE}
    return rest | ({VARIABLE: os.pathsep.join(parts)} if parts else {})


def restart_without_working_directory() -> None:
    """Starts this program again if its own ``PYTHONPATH`` has an empty part. Its pid stays the same.

    Modules that Python has imported by now may have come from the working directory. This can't be undone, so the caller
    imports little before.
    """
    path = os.environ.get(VARIABLE, "")
    if path and "" in path.split(os.pathsep) and not sys.flags.ignore_environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], without_working_directory(os.environ))
