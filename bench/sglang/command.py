"""``python -m bench sglang``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import columns
from bench.columns import Column
from bench.command_line import benchmark, environment_of, versions
from bench.plan import Plan, Runs, Timing
from bench.programs import Program
from bench.sglang.ends import QUIET_ENVIRONMENT, Measurement, Order
from bench.targets import Target, ratios

_OURS, _THEIRS = "shmring", "sglang"
WAYS: Mapping[str, Mapping[str, str]] = {_OURS: {"SHMRING_SGLANG": "1"}, _THEIRS: {}}

_MB = 1_000_000
_SMALL, _LARGE = 10_800_000, 43_000_000  # a picture of 672 x 672 pixels of Qwen2-VL, and one of 1,344 x 1,344
_COUNTS = {_SMALL: 40, _LARGE: 20}
_ORDER_LIMIT_S = 300.0  # a hundred times what one takes


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensors of a size, to a scheduler of so many ranks."""

    nbytes: int
    ranks: int

    @property
    def title(self) -> str:
        return f"{self.nbytes / _MB:.1f} MB, {self.ranks} rank{'s' * (self.ranks > 1)}"


CASES = (Case(_SMALL, 1), Case(_LARGE, 1), Case(_SMALL, 2), Case(_LARGE, 2))


# -- the report --------------------------------------------------------------------------------------------------------

_COLUMNS = (
    columns.median("p50 ms", "p50_ms", 2),
    columns.spread("spread", "p50_ms"),
    columns.median("CPU ms", "cpu_ms", 2),
    columns.median("tokenizer", "tokenizer_ms", 2),
    columns.median("ranks", "ranks_ms", 2),
    columns.ratio("of sglang's p50", _THEIRS, "p50_ms", inverse=True),
    columns.ratio("CPU", _THEIRS, "cpu_ms", inverse=True),
    Column("inline", lambda row: str(sum(run.inline for run in row.runs))),
)


def _of_its_own(what: str, case: Case, number: str, limit: float) -> Target:
    numbers = ratios(_OURS, _THEIRS, number, {_THEIRS: case})
    return Target(f"SGLang, {what} of its own", case.title, limit, "x", numbers, at_least=False)


TARGETS = (
    _of_its_own("CPU", CASES[0], "cpu_ms", 0.25),
    _of_its_own("p50", CASES[0], "p50_ms", 0.25),
    _of_its_own("CPU", CASES[1], "cpu_ms", 0.25),
    _of_its_own("CPU", CASES[2], "cpu_ms", 0.6),
    _of_its_own("p50", CASES[2], "p50_ms", 0.8),
)


PLAN = Plan(
    mode="sglang",
    cases=dict.fromkeys(CASES, tuple(WAYS)),
    timing=Timing(7),
    tables=columns.shown_as("Both ends of SGLang", ("tensors", "way"), _COLUMNS),
    targets=TARGETS,
    notes=[
        "SGLang's own code sends tensors from a tokenizer to the ranks of a scheduler. Each rank copies them to memory that "
        "stands for a GPU's. With shmring, the plug-in is loaded as in a server. There is no HTTP, no processor and no model. "
        "The processes of both ways run at the same time. CPU is for each tensor. inline: tensors that were sent in SGLang's "
        "message."
    ],
)


# -- the run -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ends(way: str, ranks: int, environment: Path) -> Iterator[Program]:
    """Both ends of a way, in processes of an environment that has SGLang."""
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        inherited = {name: value for name, value in os.environ.items() if "SHMRING_SGLANG" not in name}
        settled = {**inherited, **QUIET_ENVIRONMENT, **WAYS[way], "XDG_RUNTIME_DIR": directory}
        command = [str(environment / "bin" / "python"), "-m", "bench.sglang.ends", str(ranks)]
        with Program(command, settled, _ORDER_LIMIT_S) as ends:
            ends.start()
            yield ends


@benchmark(PLAN)
def sglang_command(runs: Runs) -> None:
    """Both ends of SGLang, its tensors by its own way and through shmring."""
    environment = environment_of("sglang", "SGLang")
    for ranks in dict.fromkeys(case.ranks for case in runs.cases):
        with contextlib.ExitStack() as stack:
            ends = {way: stack.enter_context(_ends(way, ranks, environment)) for way in WAYS}

            def measure(case: Case, way: str, ends: Mapping[str, Program] = ends) -> Measurement:
                return ends[way].order(Order(case.nbytes, _COUNTS[case.nbytes]), Measurement)

            runs.measure(measure, [case for case in runs.cases if case.ranks == ranks])
    runs.notes.append(versions(environment, "sglang", "torch"))
