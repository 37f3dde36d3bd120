"""``python -m bench request``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from bench import command_line
from bench.interleaving import Plan, Round, carry_out
from bench.peers import BASELINE, REQUEST_PEERS
from bench.records import Results
from bench.request.questions import MAX_CLIENTS, Case
from bench.request.report import report, scaling_report
from bench.request.scaling import MAX_SCALING_NBYTES, VARIANT_GROUPS, VARIANTS
from bench.results import Findings
from bench.stamps import ITEM_NBYTES
from bench.tables import show
from shmring.config import parse_nbytes

__all__ = ["request_command", "request_plan"]

_SIZES = tuple(parse_nbytes(size) for size in ("4KiB", "64KiB", "1MiB", "8MiB"))
_QUICK_SIZES = _SIZES[:3]
_SCALING_SIZES = _SIZES[:1]
_IN_FLIGHT = (1, 16, 64)
_QUICK_IN_FLIGHT = (16,)
_SCALING_IN_FLIGHT = (32,)  # one of each client, where all of them ask
_CLIENTS = (1, 4)
_QUICK_CLIENTS = (1,)
_LIMIT_S = 120.0  # of a repetition

_size_option = functools.partial(command_line.size_option, item_nbytes=ITEM_NBYTES, item="a float32")


@click.command("request", context_settings=command_line.SETTINGS)
@_size_option("--size", "sizes", text="Of a tensor; repeatable.  [default: 4KiB, 64KiB, 1MiB, 8MiB]")
@click.option(
    "--in-flight", multiple=True, type=click.IntRange(1, 1024), help="Of each client; repeatable.  [default: 1, 16, 64]"
)
@click.option("--clients", multiple=True, type=click.IntRange(1, MAX_CLIENTS), help="Processes; repeatable.  [default: 1, 4]")
@_size_option("--reply-size", "reply_nbytes", text="Of a reply's tensor.", default="64")
@command_line.peer_option(REQUEST_PEERS)
@command_line.repetitions_option("Interleaved.  [default: 7; 5 if quick]")
@command_line.seconds_option("1; 0.2 if quick")
@click.option("--quick", is_flag=True, help="Up to 1 MiB, 16 in flight, 1 client, 5 repetitions of 0.2 s.")
@click.option("--scaling", is_flag=True, help="Instead: what a request costs at 1 and 32 clients, 10 and 10,000 slots in use.")
@command_line.json_option
def request_command(json_path: Path | None, **choices: Any) -> None:
    """Requests with a payload, each with its reply, many in flight; all of them checked."""
    plan = request_plan(**choices)

    def summarize(results: Results) -> Findings:
        return scaling_report(results) if choices["scaling"] else report(results, choices["reply_nbytes"])

    results, findings = carry_out(plan, json_path, summarize, mode="request", peers=REQUEST_PEERS | VARIANTS)
    show(findings)
    command_line.conclude(len(results.failed), [])


def request_plan(
    sizes: tuple[int, ...],
    in_flight: tuple[int, ...],
    clients: tuple[int, ...],
    reply_nbytes: int,
    peers: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
    quick: bool,
    scaling: bool,
) -> Plan:
    """Returns what the options of ``bench request`` mean."""
    if scaling:
        _check_scaling(sizes, peers, clients)
        groups = VARIANT_GROUPS
        sizes, in_flight, clients = sizes or _SCALING_SIZES, in_flight or _SCALING_IN_FLIGHT, (1,)
    else:
        groups = [[name for name in REQUEST_PEERS if not peers or name in peers or name == BASELINE]]
    sizes = sizes or (_QUICK_SIZES if quick else _SIZES)
    in_flight = in_flight or (_QUICK_IN_FLIGHT if quick else _IN_FLIGHT)
    clients = clients or (_QUICK_CLIENTS if quick else _CLIENTS)
    return Plan(
        # In an order in which no process is started twice.
        rounds=[
            Round((Case(nbytes, producers=number, window=requests, reply_nbytes=reply_nbytes),), tuple(group))
            for group in groups
            for number in clients
            for requests in in_flight
            for nbytes in sizes
        ],
        repetitions=repetitions or (5 if quick else 7),
        timed_s=seconds or (0.2 if quick else 1.0),
        warm_up_s=0.1 if quick else 0.25,
        limit_s=_LIMIT_S,
    )


def _check_scaling(sizes: tuple[int, ...], peers: tuple[str, ...], clients: tuple[int, ...]) -> None:
    if peers or clients:
        raise click.UsageError("--scaling measures shmring alone, and sets the clients itself: no --peer, no --clients")
    if max(sizes, default=0) > MAX_SCALING_NBYTES:
        raise click.UsageError(f"--scaling takes sizes up to {MAX_SCALING_NBYTES:,} bytes, of which 20,000 slots fit its slab")
