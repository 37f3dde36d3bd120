"""``bench vllm-workers``: what goes from an engine core to two tensor-parallel workers, and back.

What is compared is CPU, and how soon each process hears of the next step. Digests say whether the ways compute the same.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from bench import columns
from bench.columns import Column
from bench.plan import Plan, Timing
from bench.repetitions import Number
from bench.servers import picture
from bench.targets import Target, medians, ratios
from bench.vllm.load import Fleet, Way, cpu_of
from bench.vllm.server import Server, question

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
_SHORT, _PICTURES, _DECODES, _TOKENS, _IDLE_S, _PAUSE_S = 6, 6, 7, 200, 10.0, 0.6
_QUIET_S = 1.5  # after which vLLM's queues spin no longer: those of the server that was measured before, too
_PROCESSES = ("APIServer", "EngineCore", "Worker")


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
    time.sleep(_QUIET_S)
    before = server.cpu_s_of(*_PROCESSES)
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
    cpu_ms = {name: (after - before[name]) * 1e3 / parts for name, after in server.cpu_s_of(*_PROCESSES).items()}
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
    choice = server.post(f"/v1/{path}", body, 300)["choices"][0]
    return [choice.get("text") or choice["message"]["content"], choice["logprobs"]]


# -- what came of it ---------------------------------------------------------------------------------------------------

_COLUMNS = (
    columns.median("all ms", "all_ms", 1),
    columns.median("API ms", cpu_of("APIServer"), 1),
    columns.median("engine ms", cpu_of("EngineCore"), 1),
    columns.median("workers ms", cpu_of("Worker"), 1),
    columns.ratio("shmring is", _OURS, "all_ms"),
    columns.median("p50 ms", lambda run: run.p50_ms or None, 1),
    columns.median("tokens/s", lambda run: run.tokens_per_s or None),
    Column("digest", lambda row: ", ".join(sorted({run.digest for run in row.runs}))),
)


def _beside(what: str, kind: Kind, number: Number, limits: Mapping[str, float], *, at_least: bool = False) -> Iterator[Target]:
    for way, limit in limits.items():
        numbers = ratios(_OURS, way, number, {way: kind})
        yield Target(f"vLLM, -tp 2, {what} of {way}", "43 MB", limit, "x", numbers, at_least=at_least)


_THEIRS, _ARENA = "MessageQueue", "its arena"
TARGETS = (
    *_beside("a short request: CPU", "short", "all_ms", {_THEIRS: 1 / 8, _ARENA: 1 / 8}),
    *_beside(
        "a new picture: CPU of engine core and workers", "new picture", "behind_ms", {_THEIRS: 1 / 3, _ARENA: 1}
    ),
    *_beside("a new picture: p50", "new picture", "p50_ms", {_THEIRS: 0.8, _ARENA: 1}),
    *_beside("decoding: tokens/s", "decode", "tokens_per_s", {_THEIRS: 0.97, _ARENA: 0.97}, at_least=True),
    *_beside("idle: CPU", "idle", "all_ms", {_THEIRS: 1}),
    Target(
        "vLLM, -tp 2, a new picture: CPU of the engine core", "43 MB", 10, "ms",
        medians(_OURS, cpu_of("EngineCore"), {_OURS: "new picture"}), at_least=False,
    ),
)  # fmt: skip

PLAN = Plan(
    mode="vllm-workers",
    cases=dict.fromkeys(KINDS, tuple(WAYS)),
    timing=Timing(7),
    tables=columns.shown_as("2 tensor-parallel workers, one request at a time", ("requests", "way"), _COLUMNS),
    targets=TARGETS,
    notes=[
        "Real vLLM on the CPU with a model that computes nearly nothing. There is a server for each way. All run at the same "
        "time. ms: of CPU, for a request. idle: for a second. digest: of all answers and their logprobs."
    ],
)
