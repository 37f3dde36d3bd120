"""What a plug-in says of its server where that has changed: each change is made in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

_PROGRAM = """
import os, sys
from shmring.integrations.promises import broken
from shmring.integrations.{contract} import CHECKS, {find} as find_hooks
hooks = find_hooks()
for change in sys.stdin.read().splitlines():
    if os.fork() == 0:
        exec(change)
        print(broken(lambda: hooks, CHECKS), flush=True)
        os._exit(0)
    os.wait()
"""


def run(switch: str, program: str, words: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with these settings of the plug-in that a variable switches on, and no others; it reads the words."""
    settled = {name: value for name, value in os.environ.items() if not name.startswith(switch)} | environment
    return subprocess.run([sys.executable, "-c", program], env=settled, input=words, capture_output=True, text=True)


def said_of(changes: Iterable[str], contract: str, find: str = "find_hooks", **environment: str) -> list[str]:
    """Returns for each change, a line of Python about ``hooks``, what is broken then."""
    lines = list(changes)
    done = run("SHMRING_", _PROGRAM.format(contract=contract, find=find), "\n".join(lines), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-len(lines) :]
