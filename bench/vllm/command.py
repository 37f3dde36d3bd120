"""``python -m bench vllm``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from bench import columns
from bench.columns import Column, compare
from bench.command_line import benchmark, environment_of, versions
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured, Number, percentile, ratio
from bench.results import Status, Table
from bench.servers import wait_until_it_answers
from bench.targets import Numbers, Target, ratios
from bench.vllm import embeds, encoders, load, workers
from bench.vllm.load import LARGE, PARALLEL, WAYS, Case, Fleet, Way, cpu_of, fleets
from bench.vllm.server import Server, serve

_OURS = "shmring"
_STARTS = 2  # of each server: of two that do the same, one may be some hundredths faster for as long as it lives

_SPEED = "requests_per_s"


_COLUMNS = (
    columns.median("requests/s", _SPEED, 1),
    columns.spread("spread", _SPEED),
    columns.ratio("shmring is", _OURS, _SPEED),
    columns.median("TTFT p50 ms", "ttft.median_ms", 1),
    columns.median("p99 ms", "ttft.p99_ms", 1),
    columns.median("engine ms", cpu_of("EngineCore"), 1),
    columns.median("API ms", cpu_of("APIServer"), 1),
    columns.percentile("lag p99 ms", lambda run: run.lags_ms, 99, 1),
    Column("tensors", lambda row: ", ".join(f"{count} {name}" for name, count in sorted(row.runs[-1].tensors.items()))),
)


def _tables(measured: Measured) -> Iterator[Table]:
    for fleet, cases in fleets(list(measured)).items():
        yield compare(fleet.title, ("requests", "way"), {case: measured[case] for case in cases}, _COLUMNS)


# -- targets -------------------------------------------------------------------------------------------------------------


def _beside(
    way: str, what: str, case: Case, limit: float, number: Number = _SPEED, *, at_least: bool = True, at: str = LARGE.title
) -> Target:
    return Target(f"vLLM, {what}", at, limit, "x", ratios(_OURS, way, number, {way: case}), at_least=at_least)


_JPEG, _UUID, _NEW, _PARALLEL = Case(LARGE, "jpeg", 8), Case(LARGE, "uuid", 8), Case(LARGE, "new", 8), Case(PARALLEL, "jpeg", 8)


def _other_sizes(measured: Measured, *, several: bool) -> Numbers:
    """Of new pictures: what was measured with other fleets."""
    for case in measured:
        if case.kind == "new" and case != _NEW and (case.fleet.api_servers > 1) == several and _OURS in measured[case]:
            yield f"{case.fleet.title}: {case.title}", ratio(measured, case, _OURS, "inline", _SPEED)


def _lags(measured: Measured) -> Numbers:
    of_case = measured.get(_NEW, {})
    ours, theirs = (percentile(of_case.get(way, ()), lambda run: run.lags_ms, 99) for way in (_OURS, "inline"))
    yield "inline", ours / theirs if ours and theirs else None


_INLINE_AGAIN = "vLLM, a new picture: requests/s of inline"
TARGETS = (
    _beside("inline", "JPEG sent again, 8 at a time: requests/s of inline", _JPEG, 1.5),
    _beside("torch_shm", "JPEG sent again, 8 at a time: requests/s of torch_shm", _JPEG, 1.02),
    _beside("inline", "only the uuid, 8 at a time: requests/s of inline", _UUID, 6),
    _beside("torch_shm", "only the uuid, 8 at a time: requests/s of torch_shm", _UUID, 1.3),
    _beside("torch_shm", "only the uuid, 1 at a time: requests/s of torch_shm", Case(LARGE, "uuid", 1), 1.1),
    _beside("torch_shm", "a hit: CPU of the engine", _JPEG, 0.9, cpu_of("EngineCore"), at_least=False),
    _beside("torch_shm", "a hit: CPU of API servers", _JPEG, 1, cpu_of("APIServer"), at_least=False),
    _beside("inline", "a new picture: requests/s of inline", _NEW, 1),
    Target(_INLINE_AGAIN, "other sizes, 2 API servers", 0.95, "x", functools.partial(_other_sizes, several=True)),
    Target(_INLINE_AGAIN, "1 API server", 0.95, "x", functools.partial(_other_sizes, several=False)),
    Target("vLLM, a new picture: lag p99 of inline", LARGE.title, 1, "x", _lags, at_least=False),
    _beside("inline", "a hit: requests/s of inline", _PARALLEL, 1.5, at=PARALLEL.title),
)


# -- the commands --------------------------------------------------------------------------------------------------------


PLAN = Plan(
    mode="vllm",
    cases={case: case.fleet.ways for case in load.CASES},
    timing=Timing(12),
    tables=_tables,
    targets=TARGETS,
    title=lambda case: f"{case.fleet.title}: {case.title}",
    notes=[
        "Real vLLM on the CPU with a model that computes nearly nothing. There is a server for each way. All run at the same "
        f"time. They are started {_STARTS} times, each for a part of the repetitions. glibc is told to keep what is freed; "
        "otherwise luck would decide whether it does.",
        "jpeg: a picture that the API server's cache has, sent as a file. uuid: only its name is sent. new: a picture that was "
        "never sent before. engine, API: milliseconds of CPU for each request, of the engine core and of all API servers. lag: "
        "the time that /health takes during the load, of all repetitions together, because one has too few for a 99th "
        "percentile. tensors: which way they went in the last repetition.",
    ],
)


@benchmark(PLAN)
def vllm_command(runs: Runs) -> None:
    """Real vLLM with its tensors inline, through shared memory of its own, and through shmring."""
    environment = environment_of("vllm", "vLLM")
    for name, way in WAYS.items():
        if not way.is_in(environment):
            runs.fail(runs.cases, [name], "not in this version of vLLM", Status.EXCLUDED)
    for (fleet, its_cases), part in itertools.product(fleets(list(runs.cases)).items(), runs.parts(_STARTS)):
        start = {way: functools.partial(_server, fleet, WAYS[way], environment) for way in fleet.ways}
        _measure(runs, its_cases, start, functools.partial(load.warm_up, fleet), load.measure, part)
    runs.notes.append(_versions(environment))


@benchmark(workers.PLAN)
def workers_command(runs: Runs) -> None:
    """Real vLLM with two tensor-parallel workers: from the engine core to them, and back."""
    environment = environment_of("vllm", "vLLM")
    start = {
        name: functools.partial(_server, workers.FLEET, way, environment, workers.OPTIONS, in_process=False)
        for name, way in workers.WAYS.items()
    }
    _measure(runs, list(runs.cases), start, workers.warm_up, workers.measure)
    runs.notes.append(_versions(environment))


@benchmark(encoders.PLAN)
def encoders_command(runs: Runs) -> None:
    """Real vLLM: an encoder's outputs to another engine, by files and through shmring."""
    environment = environment_of("vllm", "vLLM")
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(encoders.made_model(environment))
        pairs: dict[str, encoders.Pair] = {}
        for way in runs.cases[encoders.CASE]:
            click.echo(f"starting vLLM: {way}", err=True)
            pairs[way] = stack.enter_context(encoders.pair(way, environment, model))
            pairs[way].warm_up()
        runs.measure(lambda _, way: pairs[way].measure())
    runs.notes.append(_versions(environment))


@benchmark(embeds.PLAN)
def embeds_command(runs: Runs) -> None:
    """Real vLLM with two tensor-parallel workers: a long prompt as embeddings, to the engine core and to the workers."""
    environment = environment_of("vllm", "vLLM")
    for way in runs.cases[embeds.KINDS[0]]:
        click.echo(f"starting vLLM: {way}", err=True)
        with embeds.prompts(way, environment) as engine:
            engine.measure("embeddings")
            runs.measure(lambda kind, _, engine=engine: engine.measure(kind), subjects=[way])  # type: ignore[misc]
    runs.notes.append(_versions(environment))


def _measure(
    runs: Runs,
    cases: Sequence[Any],
    start: Mapping[str, Callable[[], AbstractContextManager[Server]]],
    warm_up: Callable[[Server], object],
    measure: Callable[[Any, Server], Any],
    part: slice = slice(None),
) -> None:
    """Measures cases on servers, which are started for them, each by its way.

    A server that does not come up has failed in these cases, and is not started again.
    """
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        for way in start:
            click.echo(f"starting vLLM: {way}", err=True)
            if not runs.has_failed(cases, way):
                servers[way] = stack.enter_context(start[way]())
        for way, server in servers.items():
            try:
                wait_until_it_answers(server)
                warm_up(server)
            except Exception as error:  # noqa: BLE001 # it has its place among the results
                runs.fail(cases, [way], str(error)[-300:])
        for case in cases:
            runs.measure(lambda case, way: measure(case, servers[way]), [case], part=part)


@contextlib.contextmanager
def _server(
    fleet: Fleet, way: Way, environment: Path, options: Sequence[str] = (), *, in_process: bool = True
) -> Iterator[Server]:
    """Starts one, and does not wait for it."""
    engines = ("--data-parallel-size", str(fleet.engines)) if fleet.engines > 1 else ()
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory,
        serve(
            Path(directory),
            side=fleet.side,
            api_servers=fleet.api_servers,
            environment=way.environment,
            options=[*way.options, *engines, *options],
            in_process=in_process,
            installation=environment,
            waits=False,
        ) as server,
    ):
        yield server


def _versions(environment: Path) -> str:
    return versions(environment, "vllm", "torch", "transformers")
