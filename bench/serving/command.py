"""``python -m bench serve``: loads two servers of ours in turn, and compares what they answer a second."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import click
import msgspec
import uvloop

from bench.children import BenchError
from bench.command_line import NotMeasured, benchmark, shown_progress
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
@click.option("--serve-option", "further", multiple=True, help="Of `shmring serve`: --serve-option=--decoders=2.")
def serve_command(timing: Timing, preset: str, scale: float, further: tuple[str, ...], **comparisons: bool) -> Findings:
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
    server = msgspec.structs.replace(chosen.server, further=(*chosen.server.further, *further))
    servers = {name: msgspec.structs.replace(server, **changes) for name, changes in COMPARISONS[comparison].items()}
    results = _carried_out(load, servers, timing.repetitions)
    return report(preset if comparison == chosen.comparison and not further else "", load, server, results, timing)


def _carried_out(load: Any, servers: Any, repetitions: int) -> run.Results:
    try:
        with (
            shown_progress(run.steps(servers, repetitions)) as progress,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_until_terminated(run.run(load, servers, repetitions, progress)))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except (BenchError, OSError) as error:
        raise NotMeasured(str(error)) from error


async def _until_terminated(running: Coroutine[Any, Any, run.Results]) -> run.Results:
    """Runs it; SIGTERM cancels it, as SIGINT does by itself, so that what was started is stopped on the way out.

    A handler that raises, as other modes have, may raise inside the HTTP client, which takes it for a failed request.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running
