"""``bench vllm-embeds``: a long prompt that comes as embeddings, over both hops: to an engine core, and to two workers.

What is compared is CPU. Beside it is the same number of tokens as ids, which are small: the model computes the same, so the
difference is what the embeddings' way costs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import columns
from bench.columns import Column
from bench.plan import Plan, Timing
from bench.programs import Program
from bench.targets import Target, ratios
from bench.vllm.embeds_program import TOKENS, WIDTH, Answered, Kind, Order
from bench.vllm.load import Way, cpu_of
from bench.vllm.server import model

_OURS, _THEIRS = "shmring", "vLLM's own"
WAYS: Mapping[str, Way] = {_OURS: Way({"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "512MiB"}), _THEIRS: Way()}
KINDS: tuple[Kind, ...] = ("embeddings", "token ids")

_LIMIT_S = 600.0  # ten times what a prompt takes on a busy machine


class Prompts:
    """The engine of a way, and the prompts that it has had.

    Args:
        program: it.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._numbers = itertools.count()

    def measure(self, kind: Kind) -> Answered:
        return self._program.order(Order(kind, next(self._numbers)), Answered)


@contextlib.contextmanager
def prompts(way: str, installation: Path) -> Iterator[Prompts]:
    """Starts a way's engine."""
    inherited = {name: value for name, value in os.environ.items() if "SHMRING_VLLM" not in name}
    command = [str(installation / "bin" / "python"), "-m", "bench.vllm.embeds_program", str(model(416, installation))]
    with Program(command, inherited | dict(WAYS[way].environment), _LIMIT_S) as program:
        program.start()
        yield Prompts(program)


# -- what came of it ---------------------------------------------------------------------------------------------------------


def _all_ms(run: Answered) -> float:
    return sum(run.cpu_ms.values())


_COLUMNS = (
    columns.median("all ms", _all_ms),
    columns.ratio("shmring is", _OURS, _all_ms),
    columns.spread("spread", _all_ms),
    columns.median("LLM ms", cpu_of("LLM")),
    columns.median("engine ms", cpu_of("EngineCore")),
    columns.median("workers ms", cpu_of("Worker")),
    columns.median("first token ms", "wall_ms"),
    Column("digests", lambda row: " ".join(run.digest for run in row.runs)),
)

_AT = f"{TOKENS * WIDTH * 2 / 1e6:.0f} MB"
TARGETS = tuple(
    Target(f"vLLM, -tp 2, a prompt as embeddings, {what} of vLLM's own", _AT, limit, "x", numbers, at_least=False)
    for what, limit, numbers in (
        ("CPU of all processes", 1, ratios(_OURS, _THEIRS, _all_ms, {_THEIRS: KINDS[0]})),
        ("CPU of the engine core", 0.5, ratios(_OURS, _THEIRS, cpu_of("EngineCore"), {_THEIRS: KINDS[0]})),
        ("time to the first token", 1, ratios(_OURS, _THEIRS, "wall_ms", {_THEIRS: KINDS[0]})),
    )
)

PLAN = Plan(
    mode="vllm-embeds",
    cases=dict.fromkeys(KINDS, tuple(WAYS)),
    timing=Timing(5),
    tables=columns.shown_as("2 tensor-parallel workers, one prompt at a time", ("prompt", "way"), _COLUMNS),
    targets=TARGETS,
    notes=[
        f"Real vLLM on the CPU: LLM, an engine core and two workers. A prompt is {TOKENS:,} tokens; as embeddings of {WIDTH} "
        f"bfloat16 numbers each, {_AT}. The model is that wide, has one layer, and computes little else. Engines run one after "
        "the other, as two would take 16 GB. ms: of CPU, for a prompt and its first token. token ids: as many tokens, of which "
        "the model looks the embeddings up. digests: of the token and logprobs, by repetition."
    ],
)
