"""``python -m bench omni``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import shmring
from bench import columns
from bench.children import BenchError
from bench.command_line import benchmark
from bench.omni import layer
from bench.omni.stages import LOOPED, OWN, STORE, WOKEN, Measurement, Order
from bench.plan import Plan, Runs, Timing
from bench.programs import Program
from bench.targets import Target, medians, ratios

_ORDER_LIMIT_S = 300.0  # a hundred times what one takes


@dataclasses.dataclass(frozen=True)
class Case:
    """So many chunks of a size; none: a receiver that waits for chunks that do not come."""

    title: str
    nbytes: int
    count: int


CASES = (
    Case("64 KB", 64 << 10, 60),
    Case("1 MB", 1 << 20, 40),
    Case("16 MB", 16 << 20, 12),
    Case("64 MB", 64 << 20, 6),
    Case("waiting, 8 requests", 0, 0),
)
_SMALL, _MIDDLE, _LARGE, _, _WAITING = CASES
WAYS = (OWN, LOOPED, WOKEN)
_TITLES = {OWN: "SharedMemoryConnector", LOOPED: "shmring, in the same loop", WOKEN: "shmring, woken"}

_COLUMNS = (
    columns.median("p50 ms", "p50_ms", 2),
    columns.median("CPU ms", "cpu_ms", 2),
    columns.spread("spread", "cpu_ms"),
    columns.median("sender", "sender_ms", 2),
    columns.median("receiver", "receiver_ms", 2),
    columns.median("store", "store_ms", 2),
    columns.ratio("CPU of its own", WOKEN, "cpu_ms", inverse=True),
)


def _cpu_of_its_own(case: Case, limit: float) -> Target:
    numbers = ratios(WOKEN, OWN, "cpu_ms", {case.title: case})
    return Target("CPU of vLLM-Omni's own connector", case.title, limit, "x", numbers, at_least=False)


TARGETS = (
    _cpu_of_its_own(_SMALL, 1.0),
    _cpu_of_its_own(_MIDDLE, 0.25),
    _cpu_of_its_own(_LARGE, 0.1),
    Target(
        "CPU of a receiver that waits", "a second", 1.0, "ms", medians(WOKEN, "cpu_ms", {"woken": _WAITING}), at_least=False
    ),
)

PLAN = Plan(
    mode="omni",
    cases=dict.fromkeys(CASES, WAYS),
    timing=Timing(5),
    tables=columns.shown_as("Two stages of vLLM-Omni", ("a chunk", "connector"), _COLUMNS, _TITLES),
    targets=TARGETS,
    titles=_TITLES,
    notes=[
        "vLLM-Omni's own factory, serializer, connector and receiving loop, unchanged, between two processes; no model. CPU is "
        "of both stages and the store, for each chunk; of a receiver that waits, in a second. A chunk is put 2 ms after "
        "the one before was taken; the receiver reads one value of each tensor. The processes of all ways run at the same time."
    ],
)


@benchmark(PLAN)
def omni_command(runs: Runs) -> None:
    """Two stages of vLLM-Omni, by its own connector for shared memory and through a store."""
    found = layer.sources()
    if found is None:
        raise BenchError(layer.WHY_NOT)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp"))
        stack.callback(_end_store, directory)
        programs = {
            way: stack.enter_context(
                Program([sys.executable, "-m", "bench.omni.stages", way, directory], dict(os.environ), _ORDER_LIMIT_S)
            )
            for way in WAYS
        }

        def measure(case: Case, way: str, programs: Mapping[str, Program] = programs) -> Measurement:
            return programs[way].order(Order(case.nbytes, case.count), Measurement)

        runs.measure(measure)
    runs.notes.append(f"vllm-omni {_version(found)}")


def _version(directory: Path) -> str:
    information = sorted(directory.glob("vllm_omni-*.dist-info"))
    return information[0].name.removeprefix("vllm_omni-").removesuffix(".dist-info") if information else "of unknown version"


def _end_store(directory: str) -> None:
    """Ends the store that the first connector has started."""
    with contextlib.suppress(shmring.ShmringError, OSError, TimeoutError):
        snapshot = asyncio.run(shmring.inspect(STORE, socket_dir=directory))
        os.kill(snapshot.program["store"]["pid"], signal.SIGTERM)
