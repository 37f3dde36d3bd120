"""``python -m bench transport``, and ``quick``: streams of messages by every peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import cases, command_line, plots, tables, targets, transport
from bench.interleaving import Plan
from bench.messages import DTYPES
from bench.peers import BASELINE, PEERS
from bench.results import Findings
from bench.stamps import ITEM_NBYTES

__all__ = ["quick_command", "quick_plan", "transport_command", "transport_plan"]

# A quick run has 9 cases in under 5 minutes: 15 peers, 3 repetitions, and what connecting and closing take besides.
_QUICK: dict[str, Any] = {"repetitions": 3, "timed_s": 0.15, "warm_up_s": 0.05}
_FULL: dict[str, Any] = {"repetitions": 5, "timed_s": 0.5, "warm_up_s": 0.15}
_PLOTS = "Also draw FILE-*.png and FILE-*.svg."
#: Where one thing of a quick run was chosen, the others are the first of each.
_QUICK_CHOICE: dict[str, Any] = {
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
@command_line.plot_option(_PLOTS)
def transport_command(json_path: Path | None, plot_stem: Path | None, **choices: Any) -> None:
    """One-way messages from producer processes to a consumer process, every one checked."""
    _measure(transport_plan(**choices), json_path, plot_stem)


def transport_plan(
    quick: bool,
    copies_out: bool | None,
    product: bool,
    peers: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
    **dimensions: tuple[Any, ...],
) -> Plan:
    """Returns what the options of ``bench transport`` mean, of which the dimensions are those of :func:`cases.sweeps`."""
    names = [name for name in PEERS if not peers or name in peers or name == BASELINE]
    dimensions["copies_out"] = () if copies_out is None else (copies_out,)
    chosen = {name: values for name, values in dimensions.items() if values}
    if quick and not chosen:
        return quick_plan(repetitions, seconds, names)
    rounds = cases.sweeps(names, **_QUICK_CHOICE | chosen if quick else chosen, product=product)
    return Plan(rounds=rounds, **_timing(_QUICK if quick else _FULL, repetitions, seconds))


def quick_plan(repetitions: int | None, seconds: float | None, names: Sequence[str] = tuple(PEERS)) -> Plan:
    """Returns what the options of ``bench quick`` mean."""
    timing = _timing(_QUICK, repetitions, seconds)
    return Plan(rounds=cases.quick(names), left_out=cases.quick_without(names), **timing)


def _timing(defaults: dict[str, Any], repetitions: int | None, seconds: float | None) -> dict[str, Any]:
    given = {"repetitions": repetitions, "timed_s": seconds}
    return defaults | {name: value for name, value in given.items() if value}


@click.command("quick", context_settings=command_line.SETTINGS)
@command_line.repetitions_option("Of each case and peer.  [default: 3]")
@command_line.seconds_option("0.15")
@command_line.json_option
@command_line.plot_option(_PLOTS)
def quick_command(repetitions: int | None, seconds: float | None, json_path: Path | None, plot_stem: Path | None) -> None:
    """Transports in under 5 minutes; ends with 1 if a target that this measures is missed, with 3 if a measurement failed."""
    _measure(quick_plan(repetitions, seconds), json_path, plot_stem, is_judged=True)


def _measure(
    plan: Plan,
    json_path: Path | None,
    plot_stem: Path | None,
    is_judged: bool = False,
) -> None:
    """Runs a plan, prints its tables and what becomes of the targets, and draws its plots."""
    results, _ = transport.carry_out(plan, json_path, lambda results: results)
    verdicts = targets.evaluate(results) if is_judged else []
    load = f"Load {results.load_before:.1f} before the run."
    shown = list(tables.transport_tables(results))
    tables.show(Findings(results.mode, results.machine, shown, [load], verdicts, coverage=results.coverage))
    if plot_stem is not None:
        plots.draw(results, plot_stem)
    command_line.conclude(len(results.failed), verdicts)
