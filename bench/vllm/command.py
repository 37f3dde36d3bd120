"""``python -m bench vllm``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from bench import command_line
from bench.coverage import Repetitions
from bench.tables import finish
from bench.vllm.load import Measurement, measure, warm_up
from bench.vllm.plan import KINDS, QUICK, SIDES, WAYS, Case, Fleet, fleets, full_cases
from bench.vllm.report import draw, report
from bench.vllm.server import Server, serve

__all__ = ["vllm_command"]

_SIDES = [str(side) for side in SIDES]


@click.command("vllm", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="What most targets speak about: 43 MB, two API servers; under ten minutes.")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Repeatable.  [default: all]")
@click.option("--side", "sides", multiple=True, type=click.Choice(_SIDES), help="Of pictures; repeatable.  [default: all]")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Of requests; repeatable.  [default: all]")
@command_line.repetitions_option("Of each case and way, in alternating order.  [default: 5]")
@command_line.environment_option
@command_line.json_option
@command_line.plot_option()
def vllm_command(
    quick: bool,
    ways: tuple[str, ...],
    sides: tuple[str, ...],
    kinds: tuple[str, ...],
    repetitions: int | None,
    environment: Path,
    json_path: Path | None,
    plot_stem: Path | None,
) -> None:
    """Real vLLM with its tensors inline, through torch_shm and through shmring; fails if a measured target is missed."""
    if (missing := command_line.missing_vllm(environment)) is not None:
        raise click.UsageError(missing)
    cases = [
        case
        for case in (QUICK if quick else full_cases())
        if (not sides or str(case.fleet.side) in sides) and (not kinds or case.kind in kinds)
    ]
    chosen = [way for way in WAYS if not ways or way in ways]
    runs = Repetitions[Case, Measurement]({case: case.fleet.ways(chosen) for case in cases}, repetitions or 5, _name)
    starts = sum(len(fleet.ways(chosen)) for fleet in fleets(cases))
    with command_line.measuring(starts + runs.steps) as progress:
        _measure(runs, cases, chosen, environment, progress)
    measured = {(case, way): runs for case, of_case in runs.measured.items() for way, runs in of_case.items()}
    findings = report(measured, runs.coverage(), _versions(environment))
    finish(findings, json_path, plot_stem, draw)


def _measure(
    runs: Repetitions[Case, Measurement],
    cases: Sequence[Case],
    ways: Sequence[str],
    environment: Path,
    progress: Callable[[str], None],
) -> None:
    """Measures all of it, a fleet after the other."""
    for fleet, its_cases in fleets(cases).items():
        with contextlib.ExitStack() as stack:
            servers: dict[str, Server] = {}
            for way in fleet.ways(ways):
                progress(f"starting vLLM: {fleet.title}, {way}")
                try:
                    servers[way] = stack.enter_context(_server(fleet, way, environment))
                    asyncio.run(warm_up(servers[way]))
                except RuntimeError as error:
                    runs.fail(its_cases, [way], str(error)[-300:])

            def play(case: Case, way: str, servers: Mapping[str, Server] = servers) -> Measurement:
                return asyncio.run(measure(case, servers[way]))

            for case in its_cases:
                runs.measure([case], play, progress)


@contextlib.contextmanager
def _server(fleet: Fleet, way: str, environment: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        options = [*WAYS[way].options, *(("--data-parallel-size", str(fleet.engines)) if fleet.engines > 1 else ())]
        with serve(
            Path(directory),
            side=fleet.side,
            api_servers=fleet.api_servers,
            environment=WAYS[way].environment,
            options=options,
            installation=environment,
        ) as server:
            yield server


def _name(case: Case) -> str:
    return f"{case.fleet.title}: {case.title}"


def _versions(environment: Path) -> dict[str, str]:
    program = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'), m.version('transformers'))"
    done = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(("vllm", "torch", "transformers"), done.stdout.split(), strict=True))
