"""``shmring serve``: its options, and what of them goes to whom.

The supervisor's own options and those of the engine are here; what is not given is left to the engine's own defaults. Those of
frontends are in :mod:`frontend.options`. The engine's are handed on as they are written: it knows what they mean.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from engine.logs import configure_logging
from frontend.options import LOG_LEVELS, NBYTES, FiniteRange, frontend_arguments, frontend_environment, frontend_options
from frontend.supervisor import ServeError, ServeOptions
from frontend.supervisor import serve as run_server

__all__ = ["serve"]

# Requests without the slab are whole messages, and may then be as large as their media. For comparison only.
_INLINE_FRAME_NBYTES = "256MiB"

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType  # which older versions of click do not let be subscripted


class _JsonObject(_TextType):
    """The text of a JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the text, once it is known to be JSON."""
        try:
            msgspec.json.decode(value, type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"{error}; write a JSON object such as '{{\"num_frames\": 8}}'", param, ctx)
        return str(value)


_JSON_OBJECT = _JsonObject()
_COUNT = click.IntRange(min=1)
_SECONDS = FiniteRange(min=0, min_open=True)

_OWN = (
    click.Option(["--host"], default="127.0.0.1", help="Where to listen. 0.0.0.0 is everywhere."),
    click.Option(["--port"], default=8000, type=click.IntRange(0, 65535), help="Where to listen; 0 is any free port."),
    click.Option(["--api-server-count"], default=2, type=_COUNT, help="Frontend processes that share the port."),
    click.Option(["--name"], default="shmring", help="The engine's name. Two servers of a user need two."),
    click.Option(["--socket-dir"], help="Where the engine's socket lies.  [default: the user's runtime directory]"),
    click.Option(
        ["--start-timeout"],
        default=600.0,
        type=_SECONDS,
        help="Seconds until all processes must be ready. Loading a large model takes minutes.",
    ),
    click.Option(
        ["--shutdown-timeout"],
        default=2.0,
        type=FiniteRange(min=0),
        help="Seconds that running requests may go on after SIGTERM or SIGINT; then, or with 0 at once, they are aborted. "
        "Stopping takes up to 3 s more. A second signal kills.",
    ),
    click.Option(["--log-level"], default="warning", type=LOG_LEVELS, help="What all processes log, to stderr."),
)

_ENGINE = (
    click.Option(
        ["--executor"], help="What computes: a name (see `shmring engine --help`), or module:Class.  [default: fingerprints]"
    ),
    click.Option(["--model"], help="What it loads, if it loads a model: a local path or a hub's name."),
    click.Option(["--executor-options"], type=_JSON_OBJECT, help="Further options of the executor, as a JSON object."),
    click.Option(
        ["--mm-processor-kwargs"],
        type=_JSON_OBJECT,
        help="How media are prepared, as a JSON object: what the executor makes of it, frontends follow.",
    ),
    click.Option(["--slab-nbytes"], default="1GiB", type=NBYTES, help="Size of the slab in /dev/shm."),
    click.Option(["--reply-nbytes"], type=NBYTES, help="The part of it that is kept for replies.  [default: a sixteenth]"),
    click.Option(["--max-num-seqs"], type=_COUNT, help="Requests in a step.  [default: what the executor takes]"),
    click.Option(["--max-batch-nbytes"], type=NBYTES, help="Bytes of media from which a step admits no further request."),
    click.Option(["--max-waiting"], type=_COUNT, help="Requests that may wait for a step."),
    click.Option(
        ["--step-timeout"], type=_SECONDS, help="Seconds from which a running step makes the engine report ill health."
    ),
    click.Option(["--profiler-dir"], help="Where profiling, when it is started, writes its traces.  [default: no profiling]"),
)


class _ServeCommand(click.Command):
    """Lists its many options in groups: its own, the engine's, and the rest, which are the frontends'."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes them."""
        others = [parameter for parameter in self.get_params(ctx) if parameter not in (*_OWN, *_ENGINE)]
        for title, parameters in (("Server", _OWN), ("Engine", _ENGINE), ("Frontends", others)):
            with formatter.section(title):
                formatter.write_dl(
                    [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
                )


@click.command(
    cls=_ServeCommand,
    params=[*_OWN, *_ENGINE],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
@frontend_options
def serve(
    host: str,
    port: int,
    api_server_count: int,
    name: str,
    socket_dir: str | None,
    start_timeout: float,
    shutdown_timeout: float,
    log_level: str,
    **values: Any,
) -> None:
    """Serves OpenAI's API: one engine and several frontends behind one port.

    Stops on Ctrl-C or SIGTERM. Ends with an error if the engine ends; a frontend that ends is started again.
    """
    configure_logging(log_level, "supervisor")
    try:
        environment = frontend_environment(values)
    except (OSError, ValueError) as error:
        raise SystemExit(f"shmring: {error}") from None
    options = ServeOptions(
        host=host,
        port=port,
        frontends=api_server_count,
        name=name,
        socket_dir=socket_dir,
        log_level=log_level,
        start_timeout_s=start_timeout,
        shutdown_timeout_s=shutdown_timeout,
        engine_arguments=tuple(engine_arguments(values)),
        frontend_arguments=tuple(frontend_arguments(values)),
        frontend_environment=environment,
    )
    try:
        run_server(options)
    except ServeError as error:
        raise SystemExit(f"shmring: {error}") from None
    _leave()


def engine_arguments(values: dict[str, Any]) -> list[str]:
    """Returns the engine's options that were given, as they are written on its command line."""
    given = [(option.opts[0], values.get(option.name)) for option in _ENGINE if option.name is not None]
    arguments = [f"{written}={value}" for written, value in given if value is not None]
    if values.get("disable_mm_shm"):
        arguments.append(f"--max-frame-nbytes={_INLINE_FRAME_NBYTES}")
    return arguments


def _leave() -> None:
    """Ends the process without unloading torch, which takes half a second; all children have ended."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
