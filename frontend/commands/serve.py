"""``shmring serve``: passes each option to its process. All are checked here, before a process is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from shmring.core.loggers import logger_of
from shmring.door import validate_name
from shmring.engine.options import ENGINE_OPTIONS, MODEL_ARGUMENT, engine_settings_of, notice_of
from shmring.engine.settings import engine_names
from shmring.frontend.options import FRONTEND_OPTIONS, TLS_OPTIONS, process_settings_of
from shmring.frontend.processes.supervisor import ServeError, ServeOptions
from shmring.frontend.processes.supervisor import serve as run_server
from shmring.frontend.settings import FarEngineSettings, ProcessSettings
from shmring.service.logs import configure_logging, ending
from shmring.service.option_table import CONFIG, ELSEWHERE, Option, options_of, warn_of_variables
from shmring.service.vllm_options import advice_on

__all__ = ["options_of_words", "serve", "without_options"]

logger = logger_of("shmring.frontend.processes.supervisor")

_STDIN_FD = 0
_FAR = tuple(str(option.name) for option in options_of(FarEngineSettings()))  # frontends here have the engines of this server
_OWN = (
    CONFIG,
    *options_of(ProcessSettings(log_level="warning"), without=("listen_fd", "connect_timeout_s", *_FAR)),
    *TLS_OPTIONS,
    *options_of(ServeOptions),
    Option(
        ["--stop-with-stdin"],
        is_flag=True,
        help="Stop when standard input ends: with a pipe of the program that starts the server, also when that is killed.",
    ),
)
_ENGINE = tuple(option for option in ENGINE_OPTIONS if option.name not in {own.name for own in _OWN})


class _ServeCommand(click.Command):
    """Lists its many options in groups: its own, the engine's, and the rest, which are the frontends'. Says what does the same
    as an option of vLLM's that is not there."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the command line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if advice := advice_on(error.option_name):
                raise click.UsageError(f"there is no option {error.option_name}: {advice}", ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes them."""
        for title, parameters in (("Server", _OWN), ("Engine", _ENGINE), ("Frontends", FRONTEND_OPTIONS)):
            with formatter.section(title):
                formatter.write_dl(
                    [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
                )


@click.command(
    cls=_ServeCommand,
    params=[MODEL_ARGUMENT, *_OWN, *_ENGINE, *FRONTEND_OPTIONS],
    epilog=ELSEWHERE,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as vLLM has it
    },
)
def serve(**values: Any) -> None:
    """Serves OpenAI's API: one engine, or several, and several frontends behind one port.

    MODEL is a local path or a hub's name. Without one, fingerprints of media and texts are served.

    Stops on Ctrl-C, SIGTERM or SIGHUP. Ends with an error if the engine ends; a frontend that ends is started again, and so is
    one of several engines.
    """
    options = _options_of(values)
    configure_logging(values["log_level"], "supervisor", values["log_format"])
    warn_of_variables(logger)
    try:
        run_server(options)
    except ServeError as error:
        raise ending(f"shmring: {error}") from None


def options_of_words(words: Sequence[str]) -> ServeOptions:
    """Returns what ``shmring serve`` would run that has these words on its command line.

    Raises:
        click.UsageError: they make no sense.
    """
    with serve.make_context("shmring serve", list(words)) as context:
        return _options_of(context.params)


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for a server that is told all its options on its command line."""
    names = {option.envvar for option in serve.params if isinstance(option.envvar, str)}
    return {name: value for name, value in environment.items() if name not in names}


def _options_of(values: dict[str, Any]) -> ServeOptions:
    """Returns the supervisor's options.

    Raises:
        click.UsageError: some options make no sense, by themselves or together.
    """
    engine = engine_settings_of(values)
    try:
        engines = tuple(
            dataclasses.replace(
                engine,
                name=validate_name(name),
                data_parallel_size=values["data_parallel_size"],
                listening=engine.listening.of_rank(rank),
            )
            for rank, name in enumerate(engine_names(engine.name, values["data_parallel_size"]))
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    frontend = process_settings_of(values | {"connect_timeout_s": values["start_timeout_s"], "listen_fd": None})
    return ServeOptions(
        engines=engines,
        frontend=frontend,
        frontends=values["frontends"],
        start_timeout_s=values["start_timeout_s"],
        heartbeat_timeout_s=values["heartbeat_timeout_s"],
        lifeline_fd=_STDIN_FD if values["stop_with_stdin"] else None,
        ready_fd=values["ready_fd"],
        health_port=values["health_port"],
        notice=notice_of(values, "shmring serve"),
    )
