"""``python -m bench vllm``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from bench import command_line, plots
from bench.command_line import finish
from bench.machine import Machine
from bench.results import Coverage, Findings, Repetitions, Spread, Table, Verdict, format_times, median_ratio
from bench.targets import Numbers, judge
from bench.vllm import workers
from bench.vllm.load import (
    API_SERVERS,
    KINDS,
    LARGE,
    PARALLEL,
    QUICK,
    SIDES,
    WAYS,
    Case,
    Fleet,
    Measurement,
    fleets,
    full_cases,
    measure,
    warm_up,
)
from bench.vllm.server import Server, serve, wait_until_it_answers

__all__ = ["Measured", "draw", "report", "vllm_command"]

#: The repetitions of each case and way, in the order in which they were made.
Measured = Mapping[tuple[Case, str], Sequence[Measurement]]

_OURS = "shmring"
_REPETITIONS = 12
_WORKERS_REPETITIONS = 7
_STARTS = 2  # of each server: of two that do the same, one may be some hundredths faster for as long as it lives
_COLOURS = {_OURS: "#d62728", "inline": "#7f7f7f", "torch_shm": "#1f77b4"}
_COLUMNS = ["requests", "way", "requests/s", "spread", "shmring is", "TTFT p50 ms", "p99 ms", "engine ms", "API ms"]
_COLUMNS += ["lag p99 ms", "tensors"]


class Stored(msgspec.Struct, frozen=True):
    """Medians of a case and way, as they are stored and drawn.

    Attributes:
        cpu_ms: milliseconds of CPU for each request, of all processes.
    """

    fleet: str
    case: str
    way: str
    requests_per_s: float
    cpu_ms: float

    @classmethod
    def of(cls, case: Case, way: str, runs: Sequence[Measurement]) -> Stored:
        """Sums the repetitions up."""
        speed, cpu_ms = _median(runs, lambda run: run.requests_per_s), _median(runs, lambda run: sum(run.cpu_ms.values()))
        return cls(case.fleet.title, case.title, way, speed, cpu_ms)


def report(measured: Measured, coverage: Coverage, environment: Mapping[str, str]) -> Findings:
    """Returns the report of a run: a table for each fleet, and the verdicts on the targets."""
    fleets = dict.fromkeys(case.fleet for case, _ in measured)
    tables = [
        Table(
            fleet.title,
            _COLUMNS,
            [_row(case, way, runs, measured) for (case, way), runs in measured.items() if case.fleet == fleet],
            ("way",),
            grouped=True,
        )
        for fleet in fleets
    ]
    notes = [
        "Real vLLM on the CPU with a model that computes nearly nothing. The servers of all ways are up at once, and the load "
        f"goes to one after the other, in alternating order; they are started {_STARTS} times, each for a part of the "
        "repetitions, and glibc is told to keep what is freed, or luck would decide whether it does. Medians of the "
        "repetitions; spread: slowest and fastest against the median; shmring is: its requests/s over the row's in the same "
        "repetition.",
        "jpeg: a picture that the API server's cache knows, sent as a file; uuid: only named; new: never seen. engine, API: "
        "milliseconds of CPU for each request, of the engine core and of all API servers. lag: the time that /health takes "
        "beside the load, of all repetitions together: one has too few for a 99th percentile. tensors: which way they went in "
        "the last repetition.",
        ", ".join(f"{name} {version}" for name, version in environment.items()),
    ]
    return Findings(
        mode="vllm",
        machine=Machine.here(),
        tables=tables,
        notes=notes,
        targets=_targets(measured),
        results=[Stored.of(case, way, runs) for (case, way), runs in measured.items()],
        coverage=coverage,
    )


def _row(case: Case, way: str, runs: Sequence[Measurement], measured: Measured) -> list[str]:
    speed = Spread.of(run.requests_per_s for run in runs)
    ratio = _ratio(measured, case, way, lambda run: run.requests_per_s)
    return [
        case.title,
        way,
        f"{speed.median:.1f}",
        f"-{1 - speed.minimum / speed.median:.0%} +{speed.maximum / speed.median - 1:.0%}",
        "" if way == _OURS or ratio is None else format_times(ratio),
        f"{_median(runs, lambda run: run.p50_ms):.1f}",
        f"{_median(runs, lambda run: run.p99_ms):.1f}",
        f"{_median(runs, lambda run: run.cpu_ms['EngineCore']):.1f}",
        f"{_median(runs, lambda run: run.cpu_ms['APIServer']):.1f}",
        f"{_lag_p99_ms(runs):.1f}",
        ", ".join(f"{count} {name}" for name, count in sorted(runs[-1].tensors.items())),
    ]


def _median(runs: Sequence[Measurement], number: Callable[[Measurement], float]) -> float:
    return statistics.median(number(run) for run in runs)


def _lag_p99_ms(runs: Sequence[Measurement]) -> float:
    lags_ms = [lag_ms for run in runs for lag_ms in run.lags_ms]
    return float(np.percentile(lags_ms, 99)) if lags_ms else math.nan


def _ratio(measured: Measured, case: Case, way: str, number: Callable[[Measurement], float]) -> float | None:
    """Shmring's number over a way's, in the same repetition; None where one of them is missing."""
    return median_ratio(map(number, measured.get((case, _OURS), ())), map(number, measured.get((case, way), ())))


def _targets(measured: Measured) -> list[Verdict]:
    jpeg, uuid, uuid_alone, new = Case(LARGE, "jpeg", 8), Case(LARGE, "uuid", 8), Case(LARGE, "uuid", 1), Case(LARGE, "new", 8)
    parallel = Case(PARALLEL, "jpeg", 8)
    at = LARGE.title

    def speed(run: Measurement) -> float:
        return run.requests_per_s

    others = [case for case, way in measured if way == _OURS and case.kind == "new" and case != new]

    def of_others(*, several: bool) -> Numbers:
        for case in others:
            if (case.fleet.api_servers > 1) == several:
                yield f"{case.fleet.title}: {case.title}", _ratio(measured, case, "inline", speed)

    def verdict(
        what: str,
        case: Case,
        limit: float,
        *ways: str,
        number: Callable[[Measurement], float] = speed,
        at_least: bool = True,
        at: str = at,
    ) -> Verdict:
        places: Numbers = ((way, _ratio(measured, case, way, number)) for way in ways)
        return judge(f"vLLM, {what}", at, limit, "x", places, at_least=at_least)

    return [
        verdict("JPEG sent again, 8 at a time: requests/s of inline", jpeg, 1.5, "inline"),
        verdict("JPEG sent again, 8 at a time: requests/s of torch_shm", jpeg, 1.02, "torch_shm"),
        verdict("only the uuid, 8 at a time: requests/s of inline", uuid, 6, "inline"),
        verdict("only the uuid, 8 at a time: requests/s of torch_shm", uuid, 1.3, "torch_shm"),
        verdict("only the uuid, 1 at a time: requests/s of torch_shm", uuid_alone, 1.1, "torch_shm"),
        verdict(
            "a hit: CPU of the engine", jpeg, 0.9, "torch_shm", number=lambda run: run.cpu_ms["EngineCore"], at_least=False
        ),
        verdict("a hit: CPU of API servers", jpeg, 1, "torch_shm", number=lambda run: run.cpu_ms["APIServer"], at_least=False),
        verdict("a new picture: requests/s of inline", new, 1, "inline"),
        judge("vLLM, a new picture: requests/s of inline", "other sizes, 2 API servers", 0.95, "x", of_others(several=True)),
        judge("vLLM, a new picture: requests/s of inline", "1 API server", 0.95, "x", of_others(several=False)),
        judge("vLLM, a new picture: lag p99 of inline", at, 1, "x", _lags(measured, new), at_least=False),
        verdict("a hit: requests/s of inline", parallel, 1.5, "inline", at=parallel.fleet.title),
    ]


def _lags(measured: Measured, case: Case) -> Numbers:
    ours, theirs = (_lag_p99_ms(measured.get((case, way), ())) for way in (_OURS, "inline"))
    yield "inline", None if math.isnan(ours / theirs) else ours / theirs


def _figure(stored: Sequence[Stored]) -> Any:
    cases = list(dict.fromkeys((entry.fleet, entry.case) for entry in stored))
    figure, (speed, cpu) = plots.panels(2, "vLLM, by how its tensors travel", (12.8, 1.6 + 0.62 * len(cases)))
    _draw_bars(speed, stored, cases, lambda entry: entry.requests_per_s)
    speed.set(title="requests per second")
    speed.set_yticks(range(len(cases)), [f"{fleet}:\n{case}" for fleet, case in cases])
    _draw_bars(cpu, stored, cases, lambda entry: entry.cpu_ms)
    cpu.set(title="CPU of all processes for a request, milliseconds: lower is better")
    cpu.set_yticks([])
    cpu.legend(fontsize="small")
    return figure


def _draw_bars(
    axes: Any, stored: Sequence[Stored], cases: Sequence[tuple[str, str]], number: Callable[[Stored], float]
) -> None:
    """A group of bars for each case, the first on top; from zero, since what is seen of a bar is its length."""
    height = 0.8 / len(_COLOURS)
    for place, (way, colour) in enumerate(_COLOURS.items()):
        medians = {(entry.fleet, entry.case): number(entry) for entry in stored if entry.way == way}
        tops = [cases.index(case) + (place - 1) * height for case in medians]
        bars = axes.barh(tops, list(medians.values()), height, color=colour, label=way)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=2)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.08)
    axes.set_xlim(left=0)


#: Draws requests per second and CPU, a bar for each way.
draw = functools.partial(plots.draw_stored, list[Stored], _figure)
#: The targets, of which nothing was measured.
announced = functools.partial(_targets, {})

_SIDES = [str(side) for side in SIDES]
_API_SERVERS = [str(number) for number in API_SERVERS]


@click.command("vllm", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="What most targets speak about: 43 MB, two API servers; under ten minutes.")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Repeatable.  [default: all]")
@click.option("--side", "sides", multiple=True, type=click.Choice(_SIDES), help="Of pictures; repeatable.  [default: all]")
@click.option("--api-servers", multiple=True, type=click.Choice(_API_SERVERS), help="Repeatable.  [default: all]")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Of requests; repeatable.  [default: all]")
@click.option("--workers", "with_workers", is_flag=True, help="Instead: what goes to two tensor-parallel workers, and back.")
@command_line.repetitions_option(f"Of each case and way, in alternating order.  [default: {_REPETITIONS}]")
@command_line.environment_option
@command_line.json_option
@command_line.plot_option()
def vllm_command(
    quick: bool,
    ways: tuple[str, ...],
    sides: tuple[str, ...],
    api_servers: tuple[str, ...],
    kinds: tuple[str, ...],
    with_workers: bool,
    repetitions: int | None,
    environment: Path,
    json_path: Path | None,
    plot_stem: Path | None,
) -> None:
    """Real vLLM with its tensors inline, through torch_shm and through shmring; fails if a measured target is missed."""
    if (missing := command_line.missing_vllm(environment)) is not None:
        raise click.UsageError(missing)
    if with_workers:
        if quick or ways or sides or api_servers or kinds:
            raise click.UsageError("--workers measures all that there is of them")
        finish(_measure_workers(repetitions or _WORKERS_REPETITIONS, environment), json_path, plot_stem, draw)
        return
    cases = [
        case
        for case in (QUICK if quick else full_cases())
        if (not sides or str(case.fleet.side) in sides)
        and (not api_servers or str(case.fleet.api_servers) in api_servers)
        and (not kinds or case.kind in kinds)
    ]
    chosen = [way for way in WAYS if not ways or way in ways]
    runs = Repetitions[Case, Measurement]({case: case.fleet.ways(chosen) for case in cases}, repetitions or _REPETITIONS, _name)
    starts = len(runs.parts(_STARTS)) * sum(len(fleet.ways(chosen)) for fleet in fleets(cases))
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
    """Measures all of it, a fleet after the other, and each with servers that are started again and again."""
    for (fleet, its_cases), part in itertools.product(fleets(cases).items(), runs.parts(_STARTS)):
        with contextlib.ExitStack() as stack:
            servers: dict[str, Server] = {}
            for way in fleet.ways(ways):
                progress(f"starting vLLM: {fleet.title}, {way}")
                if not runs.has_failed(its_cases, way):
                    servers[way] = stack.enter_context(_server(fleet, way, environment))
            for way, server in servers.items():
                try:
                    wait_until_it_answers(server)
                    asyncio.run(warm_up(fleet, server))
                except Exception as error:  # noqa: BLE001 # it has its place among the results
                    runs.fail(its_cases, [way], str(error)[-300:])

            def play(case: Case, way: str, servers: Mapping[str, Server] = servers) -> Measurement:
                return asyncio.run(measure(case, servers[way]))

            for case in its_cases:
                runs.measure([case], play, progress, part=part)


def _measure_workers(repetitions: int, environment: Path) -> Findings:
    """Measures all that :mod:`bench.vllm.workers` has, with a server of each way."""
    ways = list(workers.WAYS)
    runs = Repetitions[workers.Kind, workers.WorkersRun](dict.fromkeys(workers.KINDS, ways), repetitions, str)
    with command_line.measuring(len(ways) + runs.steps) as progress, contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for way, started in workers.WAYS.items():
            progress(f"starting vLLM: 2 workers, {way}")
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp"))
            try:
                servers[way] = stack.enter_context(
                    serve(
                        Path(directory),
                        side=workers.FLEET.side,
                        environment=started.environment,
                        options=[*workers.OPTIONS, *started.options],
                        in_process=False,
                        installation=environment,
                    )
                )
                workers.warm_up(servers[way])
            except Exception as error:  # noqa: BLE001 # it has its place among the results
                runs.fail(workers.KINDS, [way], str(error)[-300:])
        runs.measure(workers.KINDS, lambda kind, way: workers.measure(kind, servers[way]), progress)
    return workers.report(runs.measured, runs.coverage(), _versions(environment))


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
            waits=False,
        ) as server:
            yield server


def _name(case: Case) -> str:
    return f"{case.fleet.title}: {case.title}"


def _versions(environment: Path) -> dict[str, str]:
    program = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'), m.version('transformers'))"
    done = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(("vllm", "torch", "transformers"), done.stdout.split(), strict=True))
