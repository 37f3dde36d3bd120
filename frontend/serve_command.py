"""``shmring serve``: its options, and which process each of them is for.

The supervisor's own options are here; those of the engine are in :mod:`shmring.engine.options`, those of frontends in
:mod:`shmring.frontend.options`. All are checked here, before a process is started.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from shmring.config import validate_name
from shmring.engine.logs import configure_logging
from shmring.engine.option_types import COUNT, LOG_LEVELS, SECONDS, FiniteRange
from shmring.engine.options import ENGINE_OPTIONS, MODEL_ARGUMENT, engine_settings_of, notice_of
from shmring.engine.settings import engine_names
from shmring.frontend.options import DATA_PARALLEL_SIZE, FRONTEND_OPTIONS, LISTENING_OPTIONS, listening_of, settings_of
from shmring.frontend.settings import ProcessSettings
from shmring.frontend.supervisor import ServeError, ServeOptions
from shmring.frontend.supervisor import serve as run_server

__all__ = ["serve"]

_STDIN_FD = 0
_SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0  # a busy machine may well leave a process waiting for its turn for tenths of a second


def _check_heartbeat_timeout(context: click.Context, parameter: click.Parameter, timeout_s: float) -> float:
    if 0 < timeout_s < _SHORTEST_HEARTBEAT_TIMEOUT_S:
        raise click.BadParameter(f"{timeout_s:g} is neither 0 nor at least {_SHORTEST_HEARTBEAT_TIMEOUT_S:g} s")
    return timeout_s


_OWN = (
    *LISTENING_OPTIONS,
    click.Option(["--api-server-count", "frontends"], default=2, type=COUNT, help="Frontend processes that share the port."),
    DATA_PARALLEL_SIZE,
    click.Option(["--name"], default="shmring", help="The engine's name. Two servers of a user need two."),
    click.Option(["--socket-dir"], help="Where the engine's socket lies.  [default: the user's runtime directory]"),
    click.Option(
        ["--start-timeout", "start_timeout_s"],
        default=600.0,
        type=SECONDS,
        help="Seconds until all processes must be ready. Loading a large model takes minutes.",
    ),
    click.Option(
        ["--shutdown-timeout", "shutdown_timeout_s"],
        default=2.0,
        type=FiniteRange(min=0),
        help="Seconds that running requests may go on after SIGTERM, SIGINT or SIGHUP; then, or with 0 at once, they are "
        "aborted. Stopping takes up to 6 s more, and 0.5 s for each GiB of slab. A second signal kills.",
    ),
    click.Option(
        ["--heartbeat-timeout", "heartbeat_timeout_s"],
        default=30.0,
        type=FiniteRange(min=0),
        callback=_check_heartbeat_timeout,
        help="Seconds without a sign of life of its event loop after which a process is killed and replaced; a single engine "
        "ends the server. 0: never, for whoever stops processes to debug them.",
    ),
    click.Option(
        ["--stop-with-stdin"],
        is_flag=True,
        help="Stop when standard input ends. A program that starts the server with a pipe there takes it along, even if it is "
        "killed.",
    ),
    click.Option(["--log-level"], default="warning", type=LOG_LEVELS, help="What all processes log, to stderr."),
)


class _ServeCommand(click.Command):
    """Lists its many options in groups: its own, the engine's, and the rest, which are the frontends'."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes them."""
        for title, parameters in (("Server", _OWN), ("Engine", ENGINE_OPTIONS), ("Frontends", FRONTEND_OPTIONS)):
            with formatter.section(title):
                formatter.write_dl(
                    [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
                )


@click.command(
    cls=_ServeCommand,
    params=[MODEL_ARGUMENT, *_OWN, *ENGINE_OPTIONS, *FRONTEND_OPTIONS],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
def serve(**values: Any) -> None:
    """Serves OpenAI's API: one engine, or several, and several frontends behind one port.

    MODEL is a local path or a hub's name. Without one, fingerprints of media and texts are served.

    Stops on Ctrl-C, SIGTERM or SIGHUP. Ends with an error if the engine ends; a frontend that ends is started again, and so is
    one of several engines.
    """
    options = _options_of(values)
    configure_logging(values["log_level"], "supervisor")
    try:
        run_server(options)
    except ServeError as error:
        raise SystemExit(f"shmring: {error}") from None


def _options_of(values: dict[str, Any]) -> ServeOptions:
    """Returns what the supervisor is to do.

    Raises:
        click.UsageError: some options make no sense, by themselves or together.
    """
    engine = engine_settings_of(values)
    try:
        engines = tuple(
            dataclasses.replace(engine, name=validate_name(name), data_parallel_size=values["data_parallel_size"])
            for name in engine_names(engine.name, values["data_parallel_size"])
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    frontend = ProcessSettings(
        name=engine.name,
        data_parallel_size=values["data_parallel_size"],
        socket_dir=engine.ring.socket_dir,
        **listening_of(values),
        connect_timeout_s=values["start_timeout_s"],
        shutdown_timeout_s=values["shutdown_timeout_s"],
        log_level=values["log_level"],
        http=settings_of(values),
    )
    return ServeOptions(
        engines=engines,
        frontend=frontend,
        frontends=values["frontends"],
        start_timeout_s=values["start_timeout_s"],
        heartbeat_timeout_s=values["heartbeat_timeout_s"],
        lifeline_fd=_STDIN_FD if values["stop_with_stdin"] else None,
        notice=notice_of(values, "shmring serve"),
    )
