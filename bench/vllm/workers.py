"""``bench vllm --workers``: what goes from an engine core to two tensor-parallel workers, and back.

The requests are asked one at a time: what is compared is CPU, and how soon each process hears of the next step. Digests of all
answers and their logprobs say whether the ways compute the same.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bench.machine import Machine
from bench.meter import process_cpu_s
from bench.results import Coverage, Findings, Table, Verdict, median_ratio
from bench.targets import judge
from bench.vllm.load import Fleet, Way
from bench.vllm.server import Server, picture, question

__all__ = ["FLEET", "KINDS", "OPTIONS", "WAYS", "Kind", "WorkersRun", "measure", "report", "targets", "warm_up"]

#: ``short``: a text of 8 tokens, 0.6 s after the last one; ``new picture``: of 43 MB; ``decode``: a text of 200 tokens.
Kind = Literal["short", "new picture", "decode", "idle"]
KINDS: tuple[Kind, ...] = ("short", "new picture", "decode", "idle")

FLEET = Fleet(2688, 1)
OPTIONS = ("-tp", "2", "--distributed-executor-backend", "mp")

#: The first is what the others are compared with.
WAYS: Mapping[str, Way] = {
    "shmring": Way({"SHMRING_VLLM": "1"}),
    "MessageQueue": Way(),
    "its arena": Way(options=("--enable-shm-tensor-arena",)),
}

_OURS = "shmring"
_SHORT, _PICTURES, _DECODES, _TOKENS, _IDLE_S, _PAUSE_S = 6, 6, 3, 200, 10.0, 0.6
_QUIET_S = 1.5  # after which vLLM's queues spin no longer: those of the server that was measured before, too
_PROCESSES = ("APIServer", "EngineCore", "Worker")
_COLUMNS = ["requests", "way", "all ms", "API ms", "engine ms", "workers ms", "shmring is", "p50 ms", "tokens/s", "digest"]


class WorkersRun(msgspec.Struct, frozen=True):
    """One repetition of a kind on a server.

    Attributes:
        cpu_ms: of a request, by kind of process; idle: of a second.
        p50_ms: of a request.
        tokens_per_s: of one that decodes.
        digest: of all answers, and of the logprobs of their tokens.
    """

    cpu_ms: dict[str, float]
    p50_ms: float = 0.0
    tokens_per_s: float = 0.0
    digest: str = ""

    @property
    def all_ms(self) -> float:
        """CPU of all processes."""
        return sum(self.cpu_ms.values())

    @property
    def behind_ms(self) -> float:
        """CPU of those behind the API server."""
        return self.cpu_ms["EngineCore"] + self.cpu_ms["Worker"]


def warm_up(server: Server) -> None:
    """Has it compute one of each."""
    for kind in ("short", "new picture"):
        _ask(server, kind, 0)


def measure(kind: Kind, server: Server) -> WorkersRun:
    """Asks a server, once."""
    time.sleep(_QUIET_S)
    before = _cpu_s(server)
    began_s = time.perf_counter()
    answers: list[Any] = []
    took_s: list[float] = []
    if kind == "idle":
        time.sleep(_IDLE_S)
    for number in range({"short": _SHORT, "new picture": _PICTURES, "decode": _DECODES, "idle": 0}[kind]):
        asked_s = time.perf_counter()
        answers.append(_ask(server, kind, number))
        took_s.append(time.perf_counter() - asked_s)
        if kind == "short":
            time.sleep(_PAUSE_S)
    seconds = time.perf_counter() - began_s
    parts = len(answers) or seconds
    cpu_ms = {name: (after - before[name]) * 1e3 / parts for name, after in _cpu_s(server).items()}
    return WorkersRun(
        cpu_ms,
        p50_ms=statistics.median(took_s) * 1e3 if took_s else 0.0,
        tokens_per_s=_TOKENS / statistics.median(took_s) if kind == "decode" else 0.0,
        digest=hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:12] if answers else "",
    )


def _ask(server: Server, kind: Kind, number: int) -> Any:
    """Returns an answer with its logprobs."""
    if kind == "new picture":
        body = question(picture(server.side, number), uuid=uuid.uuid4().hex, max_tokens=4)
        body |= {"logprobs": True, "top_logprobs": 4}
        path = "chat/completions"
    else:
        tokens = _TOKENS if kind == "decode" else 8
        body = {"model": "tiny", "prompt": f"What is in picture {number}?", "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 4}
        path = "completions"
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    return [choice.get("text") or choice["message"]["content"], choice["logprobs"]]


def _cpu_s(server: Server) -> Mapping[str, float]:
    processes = {name: server.processes(name) for name in _PROCESSES}
    processes["APIServer"] = processes["APIServer"] or [server.launcher]
    return {name: sum(process_cpu_s(process.pid) for process in of_name) for name, of_name in processes.items()}


# -- what came of it ---------------------------------------------------------------------------------------------------


Measured = Mapping[Kind, Mapping[str, Sequence[WorkersRun]]]


def report(measured: Measured, coverage: Coverage, environment: Mapping[str, str]) -> Findings:
    """Returns the report of a run."""
    return Findings(
        mode="vllm",
        machine=Machine.here(),
        tables=[table(measured)],
        notes=[
            "Real vLLM on the CPU with a model that computes nearly nothing. The servers of all ways are up at once, and are "
            "asked in turn. Medians of the repetitions. ms: of CPU, for a request; idle: for a second. shmring is: its CPU "
            "over the row's, in the same repetition. digest: of all answers and their logprobs.",
            ", ".join(f"{name} {version}" for name, version in environment.items()),
        ],
        targets=targets(measured),
        results=[],
        coverage=coverage,
    )


def table(measured: Measured) -> Table:
    """Returns a row for each kind and way."""
    rows = [
        [
            kind,
            way,
            f"{statistics.median(run.all_ms for run in runs):.1f}",
            *(f"{statistics.median(run.cpu_ms[name] for run in runs):.1f}" for name in _PROCESSES),
            "" if way == _OURS else f"{_ratio(of_kind, way, 'all_ms') or 0:.2f} x",
            f"{statistics.median(run.p50_ms for run in runs):.1f}" if runs[0].p50_ms else "",
            f"{statistics.median(run.tokens_per_s for run in runs):.0f}" if runs[0].tokens_per_s else "",
            ", ".join(sorted({run.digest for run in runs})),
        ]
        for kind, of_kind in measured.items()
        for way, runs in of_kind.items()
    ]
    return Table("2 tensor-parallel workers, one request at a time", _COLUMNS, rows, ("way",), grouped=True)


def _ratio(of_kind: Mapping[str, Sequence[WorkersRun]], way: str, number: str) -> float | None:
    ours, theirs = of_kind.get(_OURS, ()), of_kind.get(way, ())
    return median_ratio((getattr(run, number) for run in ours), (getattr(run, number) for run in theirs))


def targets(measured: Measured) -> list[Verdict]:
    """Judges what was measured."""

    def verdict(what: str, kind: Kind, number: str, limits: Mapping[str, float], *, at_least: bool = False) -> list[Verdict]:
        return [
            judge(
                f"vLLM, -tp 2, {what} of {way}", "43 MB", limit, "x",
                iter([(way, _ratio(measured.get(kind, {}), way, number))]), at_least=at_least,
            )
            for way, limit in limits.items()
        ]  # fmt: skip

    theirs, arena = "MessageQueue", "its arena"
    pictures = measured.get("new picture", {}).get(_OURS, ())
    engine_ms = statistics.median(run.cpu_ms["EngineCore"] for run in pictures) if pictures else None
    return [
        *verdict("a short request: CPU", "short", "all_ms", {theirs: 1 / 8, arena: 1 / 8}),
        *verdict("a new picture: CPU of engine core and workers", "new picture", "behind_ms", {theirs: 1 / 3, arena: 1}),
        *verdict("a new picture: p50", "new picture", "p50_ms", {theirs: 0.8, arena: 1}),
        *verdict("decoding: tokens/s", "decode", "tokens_per_s", {theirs: 0.97, arena: 0.97}, at_least=True),
        *verdict("idle: CPU", "idle", "all_ms", {theirs: 1}),
        judge(
            "vLLM, -tp 2, a new picture: CPU of the engine core", "43 MB", 10, "ms", iter([(_OURS, engine_ms)]), at_least=False
        ),
    ]
