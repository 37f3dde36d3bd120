"""``python -m bench vllm``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from bench import command_line
from bench.coverage import Coverage, Key, Planned, Status
from bench.plots import check_plotter
from bench.tables import deliver
from bench.vllm.load import Measurement, measure, warm_up
from bench.vllm.plan import KINDS, QUICK, SIDES, WAYS, Case, Fleet, fleets, full_cases
from bench.vllm.report import Measured, draw, report
from bench.vllm.server import Server, serve

__all__ = ["vllm_command"]

_ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-vllm"
_SIDES = [str(side) for side in SIDES]


@click.command("vllm", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="What most targets speak about: 43 MB, two API servers; under ten minutes.")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Repeatable.  [default: all]")
@click.option("--side", "sides", multiple=True, type=click.Choice(_SIDES), help="Of pictures; repeatable.  [default: all]")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Of requests; repeatable.  [default: all]")
@command_line.repetitions_option("Of each case and way, in alternating order.  [default: 5]")
@click.option("--environment", default=_ENVIRONMENT, type=command_line.DIRECTORY, help="Which has vLLM; see `make test-vllm`.")
@command_line.json_option
@click.option("--plot", "plot_stem", default=None, type=command_line.FILE, help="Also draw FILE.png and FILE.svg.")
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
    if not (environment / "bin" / "vllm").exists():
        raise click.UsageError(f"{environment} has no vLLM; `make test-vllm` makes an environment that has")
    if plot_stem is not None:
        check_plotter()  # before the run, so that nobody learns minutes later that it is missing
    cases = [
        case
        for case in (QUICK if quick else full_cases())
        if (not sides or str(case.fleet.side) in sides) and (not kinds or case.kind in kinds)
    ]
    run = _Run(environment, [way for way in WAYS if not ways or way in ways], repetitions or 5)
    with command_line.measuring(run.steps(cases)) as progress:
        asyncio.run(run.measure(cases, progress))
    findings = report(run.measured(cases), run.coverage(cases), _versions(environment))
    deliver(findings, json_path)
    if plot_stem is not None:
        draw(findings, plot_stem)
    if run.failures:
        raise command_line.NotMeasured(f"{len(run.failures)} measurements failed: see the table")
    missed = sum(verdict.met is False for verdict in findings.targets)
    if missed:
        raise click.ClickException(f"{missed} target{'s' * (missed > 1)} missed: see the table")


class _Run:
    """The measurements of a run."""

    def __init__(self, environment: Path, ways: Sequence[str], repetitions: int) -> None:
        self.failures: dict[Key, tuple[Status, str]] = {}
        self._environment = environment
        self._ways = ways
        self._repetitions = repetitions
        self._runs: defaultdict[tuple[Case, str], list[Measurement]] = defaultdict(list)

    def steps(self, cases: Sequence[Case]) -> int:
        """How many lines of progress there will be."""
        starts = sum(len(fleet.ways(self._ways)) for fleet in fleets(cases))
        return starts + sum(len(case.fleet.ways(self._ways)) * self._repetitions for case in cases)

    def measured(self, cases: Sequence[Case]) -> Measured:
        """What there is, in the order of the plan."""
        return {(case, way): runs for case in cases for way in self._ways if (runs := self._runs.get((case, way)))}

    def coverage(self, cases: Sequence[Case]) -> Coverage:
        """What was planned, and what of it is missing."""
        planned = [Planned(_name(case), case.fleet.ways(self._ways), self._repetitions) for case in cases]
        counts = {(_name(case), way): len(runs) for (case, way), runs in self._runs.items()}
        return Coverage.of(planned, counts, self.failures)

    async def measure(self, cases: Sequence[Case], progress: Callable[[str], None]) -> None:
        """Measures all of it, a fleet after the other."""
        for fleet, its_cases in fleets(cases).items():
            with contextlib.ExitStack() as stack:
                servers: dict[str, Server] = {}
                for way in fleet.ways(self._ways):
                    progress(f"starting vLLM: {fleet.title}, {way}")
                    try:
                        server = stack.enter_context(self._server(fleet, way))
                        await warm_up(server)
                    except RuntimeError as error:
                        self.failures |= {(_name(case), way): (Status.FAILED, str(error)[-300:]) for case in its_cases}
                    else:
                        servers[way] = server
                for case in its_cases:
                    await self._alternate(case, servers, progress)

    @contextlib.contextmanager
    def _server(self, fleet: Fleet, way: str) -> Iterator[Server]:
        with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
            options = [*WAYS[way].options, *(("--data-parallel-size", str(fleet.engines)) if fleet.engines > 1 else ())]
            with serve(
                Path(directory),
                side=fleet.side,
                api_servers=fleet.api_servers,
                environment=WAYS[way].environment,
                options=options,
                installation=self._environment,
            ) as server:
                yield server

    async def _alternate(self, case: Case, servers: dict[str, Server], progress: Callable[[str], None]) -> None:
        for repetition in range(self._repetitions):
            order = list(servers) if repetition % 2 == 0 else list(servers)[::-1]
            for way in order:
                progress(f"{_name(case)}: {way}")
                try:
                    self._runs[case, way].append(await measure(case, servers[way]))
                except (OSError, RuntimeError) as error:
                    self.failures[_name(case), way] = Status.FAILED, f"{type(error).__name__}: {error}"


def _name(case: Case) -> str:
    return f"{case.fleet.title}: {case.title}"


def _versions(environment: Path) -> dict[str, str]:
    program = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'), m.version('transformers'))"
    done = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(("vllm", "torch", "transformers"), done.stdout.split(), strict=True))
