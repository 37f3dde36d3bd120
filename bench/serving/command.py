"""``python -m bench serve``: loads two servers of ours in turn, and compares what they answer a second."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import version

from bench import columns
from bench.columns import Column, compare
from bench.command_line import benchmark
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured, Number
from bench.results import Table
from bench.serving import run
from bench.serving.load import WARM_UP_REQUESTS
from bench.serving.plan import PRESETS
from bench.targets import Target, ratios

_SPEED = "requests_per_s"


def _cpu(part: str) -> Number:
    return lambda run: 1e3 * run.cpu_s[part] / run.requests


def _columns(first: str) -> tuple[Column, ...]:
    return (
        columns.median("requests/s", _SPEED, 2),
        columns.spread("spread", _SPEED),
        columns.ratio(f"{first} is", first, _SPEED),
        columns.median("TTFT p50 ms", "ttft.median_ms", 1),
        columns.median("p99 ms", "ttft.p99_ms", 1),
        columns.median("TPOT ms", "tpot.median_ms", 1),
        columns.median("E2E p50 ms", "e2e.median_ms", 1),
        columns.median("p99 ms", "e2e.p99_ms", 1),
        columns.median("engine ms", _cpu("engine"), 1),
        columns.median("frontends ms", _cpu("frontends"), 1),
        columns.median("generator %", lambda run: 100 * run.generator_cpu_s / run.duration_s),
    )


def _tables(measured: Measured) -> Iterator[Table]:
    for preset, runs in measured.items():
        chosen = PRESETS[preset]
        shown = _columns(next(iter(chosen.compared)))
        yield compare(f"serve: {chosen.load.title}", ("preset", "server"), {preset: runs}, shown)


def _target(preset: str) -> Target:
    chosen = PRESETS[preset]
    ours, theirs = chosen.compared
    at = f"preset {preset}, {chosen.load.requests:,} requests"
    return Target(chosen.what, at, chosen.limit, "x", ratios(ours, theirs, _SPEED, {theirs: preset}))


PLAN = Plan(
    mode="serve",
    cases={preset: list(chosen.compared) for preset, chosen in PRESETS.items()},
    timing=Timing(3),
    tables=_tables,
    targets=[_target(preset) for preset in PRESETS],
    notes=[
        f"{WARM_UP_REQUESTS} requests before do not count. Sent by aiohttp {version('aiohttp')}, on the same machine.",
        "A latency begins when the turn of a request has come. TTFT: until the first text; TPOT: the rest, divided by the "
        "tokens after the first; E2E: until the end. engine, frontends: milliseconds of CPU for each request. generator: of "
        "the core that it can have; above 70 %, it may be what was measured.",
    ],
)


@benchmark(PLAN)
def serve_command(runs: Runs) -> None:
    """Loads two HTTP servers in turn: throughput, TTFT, TPOT, end-to-end times, CPU."""
    for preset in runs.cases:
        run.run(runs, preset)
        servers = (shlex.join(["shmring", "serve", *server]) for server in PRESETS[preset].servers.values())
        runs.notes.append(f"{preset}: {'; '.join(servers)}")
