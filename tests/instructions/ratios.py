"""Time and processor time of two processes, beside an earlier commit's.

For what instructions do not show: wake-ups, the kernel, caches. An engine and a frontend of each commit are started, and take
turns, for a tenth of a second each. So a machine that is slower for a while is slower for both. What decides is not the median
of the ratios but their lower quartile: three of four pairs must have been above the limit, and again with other processes.
So noise fails nothing; in the worst case it hides something.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.instructions.earlier import ROOT
from tests.instructions.verdicts import Budget

_TURN_S = 0.1
_TURNS = 15
_WARM_UP = 64  # messages, a multiple of those in flight

#: How much more a case may take. Smaller changes are for instructions, and for ``bench`` on an idle machine.
_MAY_TAKE = {"CPU": 0.10, "time": 0.20}


class _Taken(NamedTuple):
    """Seconds of a turn, for each message."""

    cpu: float
    time: float


class _Pair:
    """An engine and a frontend of a checkout."""

    def __init__(self, engine: subprocess.Popen[str], frontend: subprocess.Popen[str]) -> None:
        self._frontend = frontend
        self._clocks = [(~process.pid << 3) | 2 for process in (engine, frontend)]  # as clock_getcpuclockid(3) makes them
        self.cases: list[str] = json.loads(_line(frontend))

    def turn(self, case: str, n: int) -> _Taken:
        """Sends so many messages."""
        before_s = self._cpu_s()
        assert self._frontend.stdin is not None
        print(json.dumps([case, n]), file=self._frontend.stdin, flush=True)
        seconds = float(_line(self._frontend))
        return _Taken((self._cpu_s() - before_s) / n, seconds / n)

    def _cpu_s(self) -> float:
        return sum(map(time.clock_gettime, self._clocks))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has ended with {process.wait()}")
    return line


@contextlib.contextmanager
def _opened(checkout: Path) -> Iterator[_Pair]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-P", str(Path(__file__).with_name("two_processes.py"))]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ir-"))
        processes = []
        for side in ("engine", "frontend"):
            command = [*program, side, directory]
            process = subprocess.Popen(
                command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(stack.enter_context(process))  # waits for its end, once its input is closed
            if side == "engine":
                _line(process)
        yield _Pair(*processes)


def ratios(before: Path, now: Path, only: Sequence[str] = ()) -> dict[str, dict[str, list[float]]]:
    """Returns for each case what was measured of it, by name: the ratios of two turns, one of each checkout."""
    found: dict[str, dict[str, list[float]]] = {}
    with _opened(before) as earlier, _opened(now) as later:
        for case in only or later.cases:
            n = _WARM_UP
            for pair in (earlier, later):
                pair.turn(case, n)
            n = max(1, round(_TURN_S / earlier.turn(case, n).time / _WARM_UP)) * _WARM_UP
            pairs = []
            for turn in range(_TURNS):
                order = (earlier, later) if turn % 2 else (later, earlier)
                taken = {pair: pair.turn(case, n) for pair in order}
                pairs.append((taken[earlier], taken[later]))
            found[case] = {
                "CPU": [after.cpu / first.cpu for first, after in pairs],
                "time": [after.time / first.time for first, after in pairs],
            }
    return found


def is_red(what: str, measured: Sequence[float], allowed: float = 0.0) -> bool:
    """Whether something takes too much more, and that is no noise.

    Args:
        what: a key of what :func:`ratios` returns.
        measured: its ratios.
        allowed: the share by which it may be more, beside the one that any may.
    """
    return statistics.quantiles(measured)[0] > 1 + _MAY_TAKE[what] + allowed


def judge(before: Path, budget: Budget) -> list[str]:
    """Compares this checkout with an earlier one, prints a row for each case, and returns the cases that take too much more."""
    red: list[str] = []
    for _ in range(2):  # what is too much is measured once more, by other processes
        measured = ratios(before, ROOT, red)
        red = []
        for case, numbers in measured.items():
            texts = []
            for what, each in numbers.items():
                low, middle, high = statistics.quantiles(each)
                texts.append(f"{what} {middle:5.2f} ({low:.2f} to {high:.2f})")
            if any(is_red(what, each, budget.allowed.get(case, 0.0)) for what, each in numbers.items()):
                red.append(case)
            print(f"{case:32}{'; '.join(texts)}{', TOO MUCH' if case in red else ''}", flush=True)
        if not red:
            break
    return red
