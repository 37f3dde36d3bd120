"""How long a caller of small requests waits while another one is heavy, beside how long it waits while nobody is.

A server with one frontend and the fingerprints executor runs all the time. One caller sends small texts, one after the other,
on one connection. Beside it either two processes compute, which are no part of the server (*neutral*), or another caller is
*heavy* (:mod:`bench.isolation.attacks`); in turn, again and again. So the machine is as busy in both, and what is compared is
what the heavy caller's requests do to others, and not that they take a core.

The 99th percentile of the waits of all repetitions together counts. It may be twice the neutral one, or 30 ms if that is more;
where bodies are larger than 1 MB, 50 ms. No wait may be longer than 150 ms, or than the longest neutral one.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import itertools
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from bench.children import BenchError
from bench.command_line import benchmark, measuring, repeatable
from bench.isolation.attacks import ATTACKS, MODEL, Attack, small_request
from bench.modes import Timing
from bench.repetitions import Repetitions
from bench.results import Findings, Table, Verdict, format_nbytes
from bench.serving.plan import ServerOptions
from bench.serving.run import serving
from bench.targets import Numbers, Target
from shmring.processes.process import Process

_NEUTRAL, _HEAVY = "beside a neutral load", "beside a heavy caller"
_BURNERS = 2
_LEAD_S = 0.5  # until the other side is under way
_LARGE_NBYTES = 1 << 20
_LEAST_MS, _LEAST_LARGE_MS, _LONGEST_MS = 30.0, 50.0, 150.0
_TIMES = 2.0
_TIMEOUT_S = 60.0


class _Waits(NamedTuple):
    """Seconds of each small request, and the statuses that the heavy caller got."""

    waits_s: list[float]
    answers: dict[str, int]


class Isolation(msgspec.Struct, frozen=True):
    """What one heavy caller does to another one.

    Attributes:
        neutral_ms, heavy_ms: the 50th and 99th percentile of the waits, and the longest, beside each.
        answers: that the heavy caller got, by status.
    """

    attack: str
    body_nbytes: int
    neutral_ms: tuple[float, float, float]
    heavy_ms: tuple[float, float, float]
    answers: dict[str, int]

    @property
    def allowed_ms(self) -> float:
        least = _LEAST_MS if self.body_nbytes <= _LARGE_NBYTES else _LEAST_LARGE_MS
        return max(_TIMES * self.neutral_ms[1], least)


def _figures(waits_s: Sequence[float]) -> tuple[float, float, float]:
    in_order = sorted(waits_s)
    at = [in_order[math.ceil(len(in_order) * share) - 1] * 1e3 for share in (0.5, 0.99, 1.0)]
    return at[0], at[1], at[2]


def _ask(address: str, seconds: float) -> list[float]:
    """Sends small requests one after the other; returns how long each took."""
    body, waits_s = small_request(), []
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            waits_s.append(time.perf_counter() - started)
            if response.status != 200:
                raise BenchError(f"a small request was answered {response.status}: {answer[:200].decode()}")
    return waits_s


def _beside_neutral(address: str, seconds: float) -> _Waits:
    with contextlib.ExitStack() as computing:
        for _ in range(_BURNERS):
            computing.enter_context(Process.start([sys.executable, "-c", "while True: pass"]))
        time.sleep(_LEAD_S)
        return _Waits(_ask(address, seconds), {})


def _beside_heavy(address: str, attack: Attack, body: Path, seconds: float) -> _Waits:
    arguments = [sys.executable, "-m", "bench.isolation.heavy", address, str(attack.connections)]
    arguments += ["hangs-up"] * attack.hangs_up
    with body.open("rb") as file, Process.start(arguments, stdin=file, stdout=subprocess.PIPE, text=True) as heavy:
        if not heavy.line():
            raise BenchError("the heavy caller did not start")
        time.sleep(_LEAD_S)
        waits_s = _ask(address, seconds)
        heavy.send(signal.SIGTERM)
        return _Waits(waits_s, json.loads(heavy.rest(_TIMEOUT_S)))


def _measured(address: str, runs: Repetitions[str, _Waits], seconds: float, progress: Callable[[str], None]) -> Findings:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        paths = {}
        for number, case in enumerate(runs.subjects):
            paths[case] = Path(directory, str(number))
            paths[case].write_bytes(ATTACKS[case].body())
        _ask(address, 1.0)  # to warm up

        def once(case: str, subject: str) -> _Waits:
            if subject == _NEUTRAL:
                return _beside_neutral(address, seconds)
            return _beside_heavy(address, ATTACKS[case], paths[case], seconds)

        runs.measure(list(runs.subjects), once, progress)
        sizes = {case: path.stat().st_size for case, path in paths.items()}
    results = []
    for case, measured in runs.measured.items():
        if len(measured) < 2:
            continue
        neutral, heavy = (list(itertools.chain(*(run.waits_s for run in measured[subject]))) for subject in (_NEUTRAL, _HEAVY))
        answers = sum((collections.Counter(run.answers) for run in measured[_HEAVY]), collections.Counter[str]())
        figures = _figures(neutral), _figures(heavy)
        results.append(Isolation(case, sizes[case], *figures, dict(answers)))
    return Findings(
        mode="isolation",
        tables=[_table(results)],
        notes=[
            f"{runs.count} repetitions of {seconds:g} s each; one frontend, executor fingerprints, model {MODEL}. "
            "The neutral load is two processes that compute. They are no part of the server."
        ],
        targets=list(_verdicts(results)),
        coverage=runs.coverage(),
    )


def _table(results: Sequence[Isolation]) -> Table:
    rows = []
    for result in results:
        neutral, heavy = (" / ".join(f"{number:.1f}" for number in numbers) for numbers in (result.neutral_ms, result.heavy_ms))
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(result.answers.items())) or "none yet"
        times = f"{result.heavy_ms[1] / result.neutral_ms[1]:.1f}"
        rows.append([result.attack, format_nbytes(result.body_nbytes), neutral, heavy, times, answers])
    header = ["heavy caller", "body", "neutral p50 / p99 / longest, ms", "beside it", "p99, times", "it was answered"]
    return Table("isolation: how long a small request takes", header, rows)


def _p99_ms(result: Isolation) -> Numbers:
    yield "", result.heavy_ms[1]


def _longest_ms(results: Sequence[Isolation]) -> Numbers:
    return ((result.attack, result.heavy_ms[2]) for result in results)


def _verdicts(results: Sequence[Isolation]) -> Iterator[Verdict]:
    for result in results:
        what = f"p99 of small requests beside: {result.attack}"
        yield Target(what, "one frontend", result.allowed_ms, "ms", _p99_ms, at_least=False).judge(result)
    if results:
        allowed_ms = max(_LONGEST_MS, *(result.neutral_ms[2] for result in results))
        what = "longest wait of a small request"
        yield Target(what, "beside all of them", allowed_ms, "ms", _longest_ms, at_least=False).judge(results)


@benchmark("isolation")
@repeatable("--case", "cases", ATTACKS, "Who is heavy")
def isolation_command(timing: Timing, cases: tuple[str, ...]) -> Findings:
    """How long small requests wait while another caller is heavy, beside a neutral load; in under three minutes.

    Ends with 1 if that is more than a target, with 3 if something could not be measured.
    """
    runs = Repetitions[str, _Waits](dict.fromkeys(cases or ATTACKS, (_NEUTRAL, _HEAVY)), timing.repetitions)
    options = ServerOptions(executor="fingerprints", api_servers=1, slab_nbytes="512MiB")
    with measuring(runs.steps) as progress, serving(options) as [running]:
        return _measured(urlsplit(running.url).netloc, runs, timing.timed_s, progress)
