"""How long a caller of small requests waits while another one is heavy, beside how long it waits while nobody is.

Two servers with one frontend each run all the time: one with the fingerprints executor, which embeds, and one with the executor
transformers, which chats (:mod:`bench.isolation.chats`). One caller sends small requests to one of them, one after the other,
on one connection. Beside it either two processes compute, which are no part of the server (*neutral*), or another caller, with
a key of its own, is *heavy* (:mod:`bench.isolation.attacks`); in turn, again and again. So the machine is as busy in both, and
what is compared is what the heavy caller's requests do to others, and not that they take a core.

What is allowed is a multiple of the neutral waits, or some milliseconds, or the neutral waits and a step, if those are more.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from bench import columns
from bench.children import BenchError
from bench.columns import Column, Row, compare
from bench.command_line import benchmark
from bench.isolation import chats
from bench.isolation.attacks import CHATS, EMBEDDING_ATTACKS, EMBEDDINGS, MODEL, Attack
from bench.isolation.chats import CHAT_ATTACKS
from bench.isolation.heavy import Heavy
from bench.neutral import neutral_load
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured, percentile
from bench.results import Table, Verdict, format_nbytes
from bench.serving.plan import NOTHING_KEPT
from bench.serving.run import serving
from bench.targets import Target
from shmring.processes.process import Process

_NEUTRAL, _HEAVY = "beside a neutral load", "beside a heavy caller"
#: All heavy callers, by what they are called in tables.
ATTACKS = {f"{attack.title}, {attack.connections} at a time": attack for attack in (*EMBEDDING_ATTACKS, *CHAT_ATTACKS)}

_SMALL_KEY, _HEAVY_KEY = "small", "heavy"
_PERCENTILES = {"p50 ms": 50, "p99 ms": 99, "longest ms": 100}
_LEAD_S = 0.5  # until the other side is under way
_WARM_UP_S = 1.0
_LARGE_NBYTES = 1 << 20
_LEAST_MS, _LEAST_LARGE_MS, _LONGEST_MS = 30.0, 50.0, 150.0
_STEP_MS = 50.0  # a chat that comes in the midst of a step waits for its end
_TIMES = 2.0  # of a 99th percentile
_TIMEOUT_S = 60.0


class Waits(NamedTuple):
    """Milliseconds of each small request, and how many answers of each status the heavy caller got."""

    each_ms: list[float]
    answers: dict[str, int]


def _ask(address: str, attack: Attack, seconds: float) -> list[float]:
    """Sends small requests one after the other; returns the milliseconds that each took."""
    each_ms = []
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_SMALL_KEY}"}
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            connection.request("POST", attack.small_path, attack.small, headers)
            response = connection.getresponse()
            answer = response.read()
            each_ms.append((time.perf_counter() - started) * 1e3)
            if response.status != 200:
                raise BenchError(f"a small request was answered {response.status}: {answer[:200].decode()}")
    return each_ms


def _beside_neutral(address: str, attack: Attack, seconds: float) -> Waits:
    with neutral_load():
        time.sleep(_LEAD_S)
        return Waits(_ask(address, attack, seconds), {})


def _beside_heavy(address: str, attack: Attack, body: Path, seconds: float) -> Waits:
    posted = Heavy(address, attack.path, _HEAVY_KEY, attack.connections, attack.hangs_up_after_s, attack.chunked)
    arguments = [sys.executable, "-m", Heavy.__module__, msgspec.json.encode(posted).decode()]
    with body.open("rb") as file, Process.start(arguments, stdin=file, stdout=subprocess.PIPE, text=True) as heavy:
        if not heavy.line():
            raise BenchError("the heavy caller did not start")
        time.sleep(_LEAD_S)
        each_ms = _ask(address, attack, seconds)
        heavy.send(signal.SIGTERM)
        return Waits(each_ms, json.loads(heavy.rest(_TIMEOUT_S)))


# -- what is allowed, and what was seen ----------------------------------------------------------------------------------


def _waits(measured: Measured, cases: Iterable[str], subject: str, percent: float) -> dict[str, float | None]:
    """A percentile of the waits of all repetitions together, in each case."""
    return {case: percentile(measured[case].get(subject, ()), lambda run: run.each_ms, percent) for case in cases}


def _times(row: Row) -> str:
    p99_ms, neutral_ms = (_waits(row.measured, [row.case], subject, 99)[row.case] for subject in (row.subject, _NEUTRAL))
    return f"{p99_ms / neutral_ms:.1f}" if p99_ms and neutral_ms else ""


def _answered(row: Row) -> str:
    answers = sum((collections.Counter(run.answers) for run in row.runs), collections.Counter[str]())
    return ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))


_COLUMNS = (
    *(columns.percentile(title, lambda run: run.each_ms, percent, 1) for title, percent in _PERCENTILES.items()),
    Column("p99, times", _times),
    Column("it was answered", _answered),
)


@functools.cache
def _body(case: str) -> bytes:
    return ATTACKS[case].body()


def _title(case: str) -> str:
    return f"{case}: {format_nbytes(len(_body(case)))}"


def _tables(measured: Measured) -> list[Table]:
    what = "isolation: how long a small request takes"
    return [compare(what, ("heavy caller", ""), measured, _COLUMNS, case_title=_title)]


def _verdicts(measured: Measured) -> Iterator[Verdict]:
    """What is allowed depends on what was seen beside the neutral load."""

    def judged(what: str, at: str, cases: Sequence[str], percent: float, least_ms: float, times: float) -> Verdict:
        neutral = [ms for ms in _waits(measured, cases, _NEUTRAL, percent).values() if ms is not None]
        step_ms = 0.0 if ATTACKS[cases[0]].path == EMBEDDINGS else _STEP_MS
        limit_ms = max([least_ms, *(max(times * ms, ms + step_ms) for ms in neutral)])
        heavy = functools.partial(_waits, cases=cases, subject=_HEAVY, percent=percent)
        return Target(what, at, limit_ms, "ms", lambda runs: heavy(runs).items(), at_least=False).judge(measured)

    for case in measured:
        least_ms = _LEAST_MS if len(_body(case)) <= _LARGE_NBYTES else _LEAST_LARGE_MS
        yield judged(f"p99 of small requests beside: {case}", "one frontend", [case], 99, least_ms, _TIMES)
    for what, longest_ms, is_embedded in (("embedding", _LONGEST_MS, True), ("chat", 2 * _LONGEST_MS, False)):
        if cases := [case for case in measured if (ATTACKS[case].path == EMBEDDINGS) is is_embedded]:
            yield judged(f"longest wait of a small {what}", "beside all of them", cases, 100, longest_ms, 1.0)


PLAN = Plan(
    mode="isolation",
    cases=dict.fromkeys(ATTACKS, (_NEUTRAL, _HEAVY)),
    timing=Timing(2, 1.5),
    tables=_tables,
    targets=_verdicts,
    notes=[
        f"One frontend; embeddings of executor fingerprints, model {MODEL}; chats of 4 tokens of executor transformers, model "
        f"{chats.MODEL}. The neutral load is two processes that compute. They are no part of the server. The heavy caller has "
        "a key of its own."
    ],
)


@benchmark(PLAN)
def isolation_command(runs: Runs) -> None:
    """How long small requests wait while another caller is heavy, beside a neutral load; in about five minutes."""
    seconds = runs.plan.timing.timed_s
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        model, body = Path(directory, "model"), Path(directory, "body")
        kinds = list(dict.fromkeys(ATTACKS[case].small_path for case in runs.cases))
        if CHATS in kinds:
            chats.write_model(model)
        with serving(*(_server(model, kind) for kind in kinds)) as running:
            addresses = {kind: urlsplit(server.url).netloc for kind, server in zip(kinds, running, strict=True)}
            for case in runs.cases:
                _ask(addresses[ATTACKS[case].small_path], ATTACKS[case], _WARM_UP_S / len(runs.cases))

            def once(case: str, subject: str) -> Waits:
                attack = ATTACKS[case]
                address = addresses[attack.small_path]
                if subject == _NEUTRAL:
                    return _beside_neutral(address, attack, seconds)
                body.write_bytes(_body(case))
                return _beside_heavy(address, attack, body, seconds)

            runs.measure(once)


def _server(model: Path, kind: str) -> tuple[str, ...]:
    keys = (f"--api-key={_SMALL_KEY}", f"--api-key={_HEAVY_KEY}", "--api-server-count=1")
    if kind == EMBEDDINGS:
        return ("--executor=fingerprints", "--slab-nbytes=512MiB", NOTHING_KEPT, *keys)
    named = (f"--model={model}", f"--served-model-name={chats.MODEL}", "--name=bench-chats")
    return ("--executor=transformers", *named, "--slab-nbytes=64MiB", *keys)
