"""``python -m bench serve``: loads two servers of ours in turn, and compares what they answer a second."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib.metadata import version

import click
import msgspec

from bench import columns
from bench.columns import Column, compare
from bench.command_line import benchmark, repeatable
from bench.repetitions import Number, Timing
from bench.results import Coverage, Findings, Verdict
from bench.serving import run
from bench.serving.load import WARM_UP_REQUESTS, Measurement
from bench.serving.plan import PRESETS, Load
from bench.serving.run import LOAD, Results
from bench.targets import Target, ratios
from shmring.engine.option_types import FiniteRange

_BUSY_SHARE = 0.7  # of the generator's one core; above it, waiting for the generator shows in the latencies

_SPEED = "requests_per_s"


def _cpu(part: str) -> Number:
    return lambda run: 1e3 * run.cpu_s[part] / run.requests


def _columns(first: str) -> Sequence[Column]:
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
    )


def report(preset: str, load: Load, results: Results) -> Findings:
    first, _ = results.runs.subjects[LOAD]
    notes = [
        f"A body has {results.request_nbytes:,} bytes. {WARM_UP_REQUESTS} requests before do not count. Sent by "
        f"aiohttp {version('aiohttp')}, on the same machine.",
        "A latency begins when the turn of a request has come. TTFT: until the first text; TPOT: the rest, divided by the "
        "tokens after the first; E2E: until the end. engine, frontends: milliseconds of CPU for each request.",
        f"Servers: {'; '.join(shlex.join(['shmring', 'serve', *server]) for server in PRESETS[preset].servers.values())}",
        *_counted(results),
        *_generator(results),
    ]
    return Findings(
        mode="serve",
        tables=[compare(f"serve: {load.title}", ("", "server"), results.runs.measured, _columns(first))],
        notes=notes,
        targets=list(_verdicts(preset, load, results)),
        coverage=results.runs.coverage(),
    )


def _loads(results: Results) -> Mapping[str, Sequence[Measurement]]:
    """The loads on each server."""
    return results.runs.measured.get(LOAD, {})


def _counted(results: Results) -> Iterator[str]:
    for name, counters in results.counters.items():
        requests = WARM_UP_REQUESTS + sum(run.requests for run in _loads(results).get(name, ()))
        yield (
            f"{name}: {counters['slab_bytes'] // requests:,} bytes of a request went through the slab; "
            f"{counters['media_decoded']:,} media were decoded, {counters['copied_bytes']:,} bytes copied for sending."
        )


def _generator(results: Results) -> Iterator[str]:
    for name, runs in _loads(results).items():
        share = sum(run.generator_cpu_s for run in runs) / sum(run.duration_s for run in runs)
        doubt = ": it may be what was measured" if share > _BUSY_SHARE else ""
        yield f"The load generator was busy {share:.0%} of the {name} load{doubt}."


def _verdicts(preset: str, load: Load, results: Results) -> Iterator[Verdict]:
    chosen, (ours, theirs) = PRESETS[preset], results.runs.subjects[LOAD]
    at = f"preset {preset}, {load.requests:,} requests"
    target = Target(chosen.what, at, chosen.limit, "x", ratios(ours, theirs, _SPEED, {theirs: LOAD}))
    yield target.judge(results.runs.measured)
    if preset == "repeated":
        copied = [(ours, results.counters[ours]["copied_bytes"])]
        yield Target("kept content: bytes copied", at, 0, "bytes", lambda _: copied, at_least=False).judge(results)


@benchmark("serve", Timing(3))
@repeatable("--preset", "presets", PRESETS, "The load, both servers and the target")
@click.option("--scale", default=1.0, type=FiniteRange(min=0, min_open=True), help="Multiplies requests and their concurrency.")
def serve_command(timing: Timing, presets: Sequence[str], scale: float) -> Generator[Findings, None, None]:
    """Loads two HTTP servers in turn: throughput, TTFT, TPOT, end-to-end times, CPU, failures."""
    together = Findings(mode="serve", coverage=Coverage([], []))
    for preset in presets or PRESETS:
        load, servers = PRESETS[preset].load.scaled(scale), PRESETS[preset].servers
        found = report(preset, load, run.run(load, servers, timing.repetitions))
        assert together.coverage is not None, "it is a plan of nothing at first"
        assert found.coverage is not None, "it has a plan"
        together = msgspec.structs.replace(
            together,
            tables=[*together.tables, *found.tables],
            notes=[*together.notes, *(note for note in found.notes if note not in together.notes)],
            targets=[*together.targets, *found.targets],
            coverage=together.coverage + found.coverage,
        )
        yield together
