"""The command ``shmring``."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

import shmring
from frontend.options import LOG_LEVELS, NBYTES, frontend_arguments, frontend_options
from frontend.supervisor import ServeError, ServeOptions
from frontend.supervisor import serve as run_server

__all__ = ["main"]

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Multimodal inference over shared memory: an engine, its HTTP frontends, and a demonstration of both."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen. 0.0.0.0 is everywhere.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Where to listen; 0 is any free port."
)
@click.option(
    "--api-server-count",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Frontend processes that share the port.",
)
@click.option("--name", default="shmring", show_default=True, help="The engine's name. Two servers of a user need two.")
@click.option("--socket-dir", default=None, help="Where the engine's socket lies.  [default: the user's runtime directory]")
@click.option("--slab-nbytes", default="1GiB", show_default=True, type=NBYTES, help="Size of the slab in /dev/shm.")
@click.option(
    "--executor", default="features", show_default=True, help="What computes in the engine; see `shmring engine --help`."
)
@click.option("--log-level", default="warning", show_default=True, type=LOG_LEVELS, help="What all processes log, to stderr.")
@frontend_options
def serve(
    host: str,
    port: int,
    api_server_count: int,
    name: str,
    socket_dir: str | None,
    slab_nbytes: int,
    executor: str,
    log_level: str,
    **values: Any,
) -> None:
    """Serves OpenAI's embeddings API: one engine and several frontends behind one port.

    Stops on Ctrl-C or SIGTERM. Ends with an error if the engine ends; a frontend that ends is started again.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s supervisor: %(message)s", stream=sys.stderr)
    options = ServeOptions(
        host=host,
        port=port,
        frontends=api_server_count,
        name=name,
        socket_dir=socket_dir,
        slab_nbytes=slab_nbytes,
        executor=executor,
        log_level=log_level,
        frontend_arguments=tuple(frontend_arguments(values)),
    )
    try:
        run_server(options)
    except ServeError as error:
        raise SystemExit(f"shmring: {error}") from None


def _run_module(module: str, arguments: tuple[str, ...]) -> None:
    """Becomes another program: signals and exit codes then are its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@main.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """Runs one engine process alone. All options are its own: shmring engine --help."""
    _run_module("engine", arguments)


@main.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def frontend(arguments: tuple[str, ...]) -> None:
    """Runs one frontend process alone. All options are its own: shmring frontend --help."""
    _run_module("frontend", arguments)


@main.command()
def demo() -> None:
    """Shows that it works: pictures and altered copies of them through HTTP, slab and engine, in under a minute.

    Ends with an error unless each altered copy finds its original, nothing was copied, and nothing is left behind.
    """
    from frontend.demo import run_demo  # needs the openai client, which serving does not

    raise SystemExit(run_demo())


@main.command()
def version() -> None:
    """Prints the version."""
    click.echo(f"shmring {shmring.__version__}")


if __name__ == "__main__":
    main()
