"""``python -m bench serve``: loads two servers of ours in turn, and compares what they answer a second."""

from __future__ import annotations

import click
import msgspec

from bench.command_line import benchmark, measuring
from bench.modes import Timing
from bench.results import Findings
from bench.serving import run
from bench.serving.plan import COMPARISONS, PRESETS
from bench.serving.report import report
from shmring.engine.option_types import FiniteRange


@benchmark("serve", repetitions="Of the load on each server, in turn.", seconds=False)
@click.option("--preset", required=True, type=click.Choice(list(PRESETS)), help="The load, the servers and the target.")
@click.option("--scale", default=1.0, type=FiniteRange(min=0, min_open=True), help="Multiplies requests and their concurrency.")
@click.option("--compare", is_flag=True, help="Decoding into slots with --disable-mm-shm.  [default: what the preset is about]")
@click.option("--compare-engines", is_flag=True, help="Two engines with one.")
@click.option("--compare-kept", is_flag=True, help="A server that keeps prepared media with one that does not.")
def serve_command(timing: Timing, preset: str, scale: float, **comparisons: bool) -> Findings:
    """Loads two HTTP servers in turn: throughput, TTFT, TPOT, end-to-end times, CPU, failures."""
    chosen = PRESETS[preset]
    if sum(comparisons.values()) > 1:
        raise click.UsageError("make one comparison after the other")
    comparison = next((name for name, is_asked in comparisons.items() if is_asked), chosen.comparison)
    load = msgspec.structs.replace(
        chosen.load,
        requests=max(1, round(chosen.load.requests * scale)),
        max_concurrency=max(1, round(chosen.load.max_concurrency * scale)),
    )
    servers = {name: msgspec.structs.replace(chosen.server, **changes) for name, changes in COMPARISONS[comparison].items()}
    with measuring(run.steps(servers, timing.repetitions)) as progress:
        results = run.run(load, servers, timing.repetitions, progress)
    return report(preset if comparison == chosen.comparison else "", load, chosen.server, results)
