"""``python -m bench transport``, and ``quick``: streams of messages by every peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import cases, command_line, plots, tables, targets, transport
from bench.coverage import Key
from bench.interleaving import Plan, Round
from bench.messages import DTYPES
from bench.peers import BASELINE, PEERS
from bench.records import Results
from bench.results import Findings, Verdict
from bench.stamps import ITEM_NBYTES

__all__ = ["quick_command", "quick_plan", "transport_command", "transport_plan"]

# A quick run has 9 cases in under 5 minutes: 15 peers, 3 repetitions, and what connecting and closing take besides.
_QUICK = {"repetitions": 3, "timed_s": 0.15, "warm_up_s": 0.05}
_FULL = {"repetitions": 5, "timed_s": 0.5, "warm_up_s": 0.15}
#: Where one thing of a quick run was chosen, the others are the first of each.
_QUICK_CHOICE: dict[str, tuple[object, ...]] = {
    "sizes": cases.QUICK_SIZES, "dtypes": ("float32",), "producers": (1,), "windows": (16,), "copies_out": (False,)
}  # fmt: skip


@click.command("transport", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="Few cases and short repetitions, in under 5 minutes.")
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
@click.option("--product", is_flag=True, help="Measure every combination, instead of varying one thing at a time.")
@command_line.peer_option(PEERS)
@command_line.repetitions_option("Of each case and peer, interleaved.  [default: 5]")
@command_line.seconds_option("0.5")
@command_line.json_option
@command_line.plot_option
def transport_command(json_path: Path | None, plot_stem: Path | None, **choices: Any) -> None:
    """One-way messages from producer processes to a consumer process, every one checked."""
    _measure(transport_plan(**choices), json_path, plot_stem)


def transport_plan(
    quick: bool,
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    producers: tuple[int, ...],
    windows: tuple[int, ...],
    copies_out: bool | None,
    product: bool,
    peers: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
) -> Plan:
    """Returns what the options of ``bench transport`` mean."""
    names = _peers(peers)
    given = {"sizes": sizes, "dtypes": dtypes, "producers": producers, "windows": windows}
    given["copies_out"] = () if copies_out is None else (copies_out,)
    chosen = {name: values for name, values in given.items() if values}
    if quick and not chosen:
        return quick_plan(repetitions, seconds, names)
    choice = cases.Choice(**_QUICK_CHOICE | chosen if quick else chosen)  # type: ignore[arg-type] # each is of its field
    return _plan((cases.product if product else cases.sweeps)(choice, names), quick, repetitions, seconds, {})


def quick_plan(repetitions: int | None, seconds: float | None, names: Sequence[str] = tuple(PEERS)) -> Plan:
    """Returns what the options of ``bench quick`` mean."""
    return _plan(cases.quick(names), True, repetitions, seconds, cases.quick_without(names))


@click.command("quick", context_settings=command_line.SETTINGS)
@command_line.repetitions_option("Of each case and peer.  [default: 3]")
@command_line.seconds_option("0.15")
@command_line.json_option
@command_line.plot_option
def quick_command(repetitions: int | None, seconds: float | None, json_path: Path | None, plot_stem: Path | None) -> None:
    """Transports in under 5 minutes; ends with 1 if a target that this measures is missed, with 3 if a measurement failed."""
    _measure(quick_plan(repetitions, seconds), json_path, plot_stem, targets.evaluate)


def _peers(chosen: Sequence[str]) -> list[str]:
    return [name for name in PEERS if not chosen or name in chosen or name == BASELINE]


def _plan(
    rounds: Sequence[Round],
    quick: bool,
    repetitions: int | None,
    seconds: float | None,
    left_out: Mapping[Key, str],
) -> Plan:
    base = _QUICK if quick else _FULL
    return Plan(
        rounds=rounds,
        repetitions=repetitions or int(base["repetitions"]),
        timed_s=seconds or base["timed_s"],
        warm_up_s=base["warm_up_s"],
        left_out=left_out,
    )


def _measure(
    plan: Plan,
    json_path: Path | None,
    plot_stem: Path | None,
    judge: Callable[[Results], list[Verdict]] = lambda results: [],
) -> None:
    """Runs a plan, prints its tables and what becomes of the targets, and draws its plots."""
    if plot_stem is not None:
        plots.check_plotter()  # before the run, so that nobody learns an hour later that it is missing
    results, _ = transport.carry_out(plan, json_path, lambda results: results)
    verdicts = judge(results)
    load = f"Load {results.load_before:.1f} before the run."
    shown = list(tables.transport_tables(results))
    tables.show(Findings(results.mode, results.machine, shown, [load], verdicts, coverage=results.coverage))
    if plot_stem is not None:
        plots.draw(results, plot_stem)
    command_line.conclude(len(results.failed), verdicts)
