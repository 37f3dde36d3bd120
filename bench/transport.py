"""``python -m bench transport``, and ``quick``: streams of messages by every peer.

A case is one kind of message stream. Every combination of sizes, dtypes, producers, windows and copying out would take a
day, so each dimension is varied by itself around a base (:func:`sweeps`). What is compared with each other stands in one round,
so that whatever else the machine does hits all of it alike: :mod:`bench.interleaving`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from bench import command_line, interleaving, plots, targets
from bench.interleaving import Plan, Round
from bench.messages import DTYPES, Case
from bench.modes import MODES, Mode
from bench.peers import BASELINE, PEERS
from bench.records import Results, transport_tables
from bench.results import Findings, Key, Verdict
from bench.stamps import ITEM_NBYTES
from bench.targets import Target

#: The sizes of the full benchmark, and of the quick one.
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = SIZES[:-1]

_QUICK_LARGE_PEERS = ("shmring", "shmring-in-place", "iceoryx2", "spinning-arena", "pyzmq")
_QUICK_LATENCY_PEERS = ("shmring", "shmring-in-place")
#: Small enough for the fixed cost of a message to show, and no case of another round: ratios are taken within one.
_QUICK_SCALING = Case(64 << 10, "uint8")
_QUICK_SCALING_PRODUCERS = 8


def sweeps(
    peers: Sequence[str],
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = ("float32", "bfloat16", "uint8"),
    producers: Sequence[int] = (1, 2, 4, 8),
    windows: Sequence[int] = (16, 1),
    copies_out: Sequence[bool] = (False, True),
) -> list[Round]:
    """Returns rounds in which each dimension is varied by itself, at every size: windows, copying out, dtypes, producers.

    Args:
        peers: in every case.
        sizes, dtypes, producers, windows, copies_out: the first value of each is the base.
    """
    rounds: list[Round] = []
    for number, nbytes in itertools.product(producers, sizes):
        base = Case(nbytes, dtypes[0], number, windows[0], copies_out[0])
        cases = [base]
        if number == producers[0]:
            cases += [msgspec.structs.replace(base, window=window) for window in windows[1:]]
            cases += [msgspec.structs.replace(base, copies_out=copies) for copies in copies_out[1:]]
            cases += [msgspec.structs.replace(base, dtype=dtype) for dtype in dtypes[1:]]
        # With windows as large as memory allows, each once.
        distinct = tuple(dict.fromkeys(case.bounded() for case in cases))
        rounds.append(Round(distinct, tuple(peers), limits=number == producers[0]))
    return rounds


def quick_rounds(peers: Sequence[str]) -> list[Round]:
    """Returns the rounds that tell whether targets are met, and no more: up to 64 MB, and 8 producers of the baseline."""
    *small, large_nbytes, largest_nbytes = QUICK_SIZES
    return [  # in an order in which no process is started twice
        *(Round((Case(nbytes), Case(nbytes, window=1)), tuple(peers), limits=True) for nbytes in small),
        Round((Case(large_nbytes),), tuple(peers), limits=True),
        # Where most peers take seconds for two windows; those stay that a target is about.
        Round((Case(largest_nbytes),), tuple(name for name in peers if name in _QUICK_LARGE_PEERS), limits=True),
        # Where latency is compared with that of smaller ones, not with that of others.
        Round((Case(large_nbytes, window=1),), tuple(name for name in peers if name in _QUICK_LATENCY_PEERS)),
        Round((msgspec.structs.replace(_QUICK_SCALING, producers=_QUICK_SCALING_PRODUCERS), _QUICK_SCALING), (BASELINE,)),
    ]


def quick_without(peers: Sequence[str]) -> dict[Key, str]:
    """Returns what a quick run leaves out of those peers, by case and peer, and why."""
    return {
        (case.title, name): "left out: no target is about it in this case"
        for part in quick_rounds(peers)[:-1]  # the last one is about the baseline alone
        for case, name in itertools.product(part.cases, peers)
        if name not in part.peers
    }


def again(plan: Plan, results: Results, missed: Sequence[Target]) -> Plan:
    """Returns a plan of what misses: the cases and peers that decide it, with the repetitions of a full run."""

    def misses(results: Results) -> list[list[tuple[str, float]]]:
        return [target.misses(results) for target in missed]

    all_of_it = misses(results)

    def decides(case: Case, *peers: str) -> bool:
        others = [result for result in results.results if result.case != case or result.peer not in peers]
        return misses(msgspec.structs.replace(results, results=others)) != all_of_it

    rounds = []
    for part in plan.rounds:
        cases = tuple(case for case in part.cases if decides(case, *part.peers))
        peers = tuple(name for name in part.peers if name == BASELINE or any(decides(case, name) for case in cases))
        if cases:
            rounds.append(dataclasses.replace(part, cases=cases, peers=peers))
    return Plan(rounds=rounds, **_MODE.timing()._asdict())


# -- commands --------------------------------------------------------------------------------------------------------------

_MODE = MODES["transport"]
_PLOTS = "Also draw FILE-*.png and FILE-*.svg."


@click.command("transport", context_settings=command_line.SETTINGS)
@command_line.size_option(
    "--size", "sizes", item_nbytes=ITEM_NBYTES, item="a stamp", text="Of a tensor; repeatable.  [default: 4KiB to 256MiB]"
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)), help="Of a tensor; repeatable.  [default: all]"
)
@click.option("--producers", multiple=True, type=click.IntRange(1, 127), help="Repeatable.  [default: 1, 2, 4, 8]")
@click.option(
    "--window",
    "windows",
    multiple=True,
    type=click.IntRange(1, 1024),
    help="Messages in flight of each producer; repeatable.  [default: 16, 1]",
)
@click.option(
    "--copies-out/--no-copies-out",
    default=None,
    help="The consumer copies every byte into a buffer of its own, or not.  [default: both]",
)
@command_line.peer_option(PEERS)
@command_line.repetitions_option("Of each case and peer, interleaved.", _MODE)
@command_line.seconds_option(_MODE)
@command_line.json_option
@command_line.plot_option(_PLOTS)
def transport_command(json_path: Path | None, plot_stem: Path | None, **choices: Any) -> None:
    """One-way messages from producer processes to a consumer process, every one checked."""
    _measure(transport_plan(**choices), json_path, plot_stem)


def transport_plan(
    copies_out: bool | None,
    peers: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
    **dimensions: tuple[Any, ...],
) -> Plan:
    """Returns what the options of ``bench transport`` mean, of which the dimensions are those of :func:`sweeps`."""
    names = [name for name in PEERS if not peers or name in peers or name == BASELINE]
    dimensions["copies_out"] = () if copies_out is None else (copies_out,)
    rounds = sweeps(names, **command_line.chosen({}, **dimensions))
    return Plan(rounds=rounds, **_MODE.timing(False, repetitions, seconds)._asdict())


def quick_plan(repetitions: int | None, seconds: float | None) -> Plan:
    """Returns what the options of ``bench quick`` mean."""
    names, timing = tuple(PEERS), _MODE.timing(True, repetitions, seconds)
    return Plan(rounds=quick_rounds(names), left_out=quick_without(names), **timing._asdict())


@click.command("quick", context_settings=command_line.SETTINGS)
@command_line.repetitions_option("Of each case and peer.", Mode((), _MODE.quick))
@command_line.seconds_option(Mode((), _MODE.quick))
@command_line.json_option
@command_line.plot_option(_PLOTS)
def quick_command(repetitions: int | None, seconds: float | None, json_path: Path | None, plot_stem: Path | None) -> None:
    """Transports in about 5 minutes, and more where a target is missed, to measure again, longer, what misses it.

    Ends with 1 if a target that this measures is missed both times, with 3 if a measurement failed.
    """
    _measure(quick_plan(repetitions, seconds), json_path, plot_stem, is_judged=True)


def _measure(
    plan: Plan,
    json_path: Path | None,
    plot_stem: Path | None,
    is_judged: bool = False,
) -> None:
    """Runs a plan, prints its tables and what becomes of the targets, and draws its plots."""
    results, _ = interleaving.carry_out(plan, json_path, lambda results: results)
    verdicts = _judged(plan, results) if is_judged else []
    load = f"Load {results.load_before:.1f} before the run."
    shown = list(transport_tables(results))
    command_line.show(Findings(results.mode, results.machine, shown, [load], verdicts, coverage=results.coverage))
    if plot_stem is not None:
        plots.draw(results, plot_stem)
    command_line.conclude(len(results.failed), verdicts)


def _judged(plan: Plan, results: Results) -> list[Verdict]:
    """Returns a verdict on every target; where it is missed, after a second and longer look at what misses it."""
    verdicts = {target: target.judge(results) for target in targets.TARGETS}
    missed = [target for target, verdict in verdicts.items() if verdict.fails]
    if missed and not results.failed:
        second, _ = interleaving.carry_out(again(plan, results, missed), None, lambda results: results)
        newer = _replaced(results, second)
        for target in missed:
            first, verdict = verdicts[target], target.judge(newer)
            detail = f"{verdict.detail}; measured again, longer: at first {first.measured}"
            verdicts[target] = msgspec.structs.replace(verdict, detail=detail)
    return list(verdicts.values())


def _replaced(results: Results, newer: Results) -> Results:
    """Returns results with newer ones in the places of those that were measured again."""
    found = {(result.case, result.peer): result for result in newer.results}
    limits = {limit.nbytes: limit for limit in newer.limits}
    return msgspec.structs.replace(
        results,
        results=[found.get((result.case, result.peer), result) for result in results.results],
        limits=[limits.get(limit.nbytes, limit) for limit in results.limits],
    )
