"""The command ``shmring`` and its subcommands, which import their modules only when they run.

Importing torch takes seconds, so nothing here does, and no command does before its options are known to make sense.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import click

from shmring import __version__
from shmring.frontend.commands.variables import unknown_variables
from shmring.memory.limits import check_open_files
from shmring.service.option_table import UNKNOWN_VARIABLES

__all__ = ["main"]

_OPEN_FILES = 16  # of a loop, an engine's socket and a terminal; what starts processes needs more, and says so

# Imported when they are run; --help shows these texts.
_ELSEWHERE = {
    "serve": ("shmring.frontend.commands.serve:serve", "Serves OpenAI's API: engines and frontends behind one port."),
    "engine": ("shmring.engine.__main__:main", "Runs one engine process alone."),
    "frontend": ("shmring.frontend.__main__:main", "Runs one frontend process alone."),
    "store": ("shmring.engine.store.__main__:main", "Runs a store of tensors for the processes of this machine."),
}


class _Commands(click.Group):
    """A group some of whose commands are listed without being imported."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command to run."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in _ELSEWHERE:
            module, _, attribute = _ELSEWHERE[name][0].partition(":")
            command = getattr(importlib.import_module(module), attribute)
            ctx.meta[UNKNOWN_VARIABLES] = unknown_variables(os.environ)
        return name, command, rest


@click.group(
    cls=_Commands,
    commands=[click.Command(name, help=text) for name, (_, text) in _ELSEWHERE.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="shmring", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Multimodal inference over shared memory: an engine, its HTTP frontends, and a demonstration of both."""
    if context.invoked_subcommand == "doctor":
        return  # it says so itself, beside all else
    try:
        check_open_files(_OPEN_FILES, f"shmring {context.invoked_subcommand}")
    except OSError as error:
        raise SystemExit(f"shmring: {error.strerror}") from None


@main.command(short_help="Shows that it works, in under a minute.")
def demo() -> None:
    """Shows that it works: pictures and altered copies of them through HTTP, slab and engine, in under a minute.

    Ends with an error unless each altered copy finds its original, nothing was copied, and nothing is left behind.
    """
    import openai  # noqa: F401 - which serving does not need: whoever has not installed it need not wait for torch

    click.echo("shmring demo: an engine and two frontends are started twice; this takes under a minute", err=True)
    from shmring.frontend.demo import run_demo

    raise SystemExit(run_demo())


@main.command(
    short_help="Checks whether this machine is fit for a server.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF shmring serve]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects with name, status, found and advice.")
@click.option("--sweep", is_flag=True, help="First remove what engines of this user that were killed have left.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def doctor(as_json: bool, sweep: bool, words: tuple[str, ...]) -> None:
    """Checks whether this machine is fit for a server, and says what to do if it is not.

    The server is what `shmring serve` would start with the same options, variables and file of --config.

    Ends with exit code 1 if there is a problem.
    """
    from shmring.frontend.commands.serve import options_of_words

    options = options_of_words(words)
    click.echo("shmring doctor: looking at this machine, which takes a few seconds", err=True)
    import msgspec
    from rich.console import Console

    from shmring.frontend.commands.doctor import has_problem, remove_leftovers, run_checks, show  # imports torch

    try:
        if sweep:
            removed = remove_leftovers(options.frontend.socket_dir)
            click.echo(f"shmring doctor: removed {', '.join(removed) or 'nothing'}", err=True)
        checks = run_checks(options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(checks)))
    else:
        show(checks, Console(width=None if sys.stdout.isatty() else 132))
    raise SystemExit(1 if has_problem(checks) else 0)


_SOCKET_DIR = click.option("--socket-dir", default=None, help="Where its socket lies.  [default: the user's runtime directory]")


def _of_a_ring(command: Callable[..., None]) -> Callable[..., None]:
    """The argument and the option of a command that looks at a ring."""
    return click.argument("name", default="shmring")(_SOCKET_DIR(command))


@main.command(short_help="Shows what an engine is doing now.")
@_of_a_ring
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a RingSnapshot, as docs/operations.md describes it.")
def inspect(name: str, socket_dir: str | None, as_json: bool) -> None:
    """Shows what an engine is doing now: its memory block by block, frontends, the oldest requests, the last errors.

    NAME is the engine's; it may be any ring of this user, whatever program serves it. The engine lends nothing for it.
    """
    from shmring.frontend.commands.top import print_once

    raise SystemExit(print_once(name, socket_dir, as_json=as_json))


@main.command(short_help="Shows what an engine is doing, each second.")
@_of_a_ring
def top(name: str, socket_dir: str | None) -> None:
    """Shows what `shmring inspect` shows, and rates, anew each second. Ctrl-C ends it.

    Without a terminal, it prints a line for each engine and second: shmring top NAME | tee log.
    """
    try:
        from shmring.frontend.commands.top import watch

        raise SystemExit(watch(name, socket_dir))
    except KeyboardInterrupt:  # before it watches: importing takes a while
        raise SystemExit(0) from None


_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    default=900.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds until a process must have ended, and the next one must serve.",
)


@main.command(short_help="Ends a server, or a process of it, when requests have ended.")
@click.argument("name")
@_SOCKET_DIR
@click.option(
    "--engine", type=click.IntRange(min=0), help="End this engine, and no other: 0 is the first. Another one is started."
)
@click.option("--frontend", type=click.IntRange(min=0), help="The same for this frontend.")
@_TIMEOUT
def drain(name: str, socket_dir: str | None, engine: int | None, frontend: int | None, timeout_s: float) -> None:
    """Ends a server, one of its engines or one of its frontends when its requests have ended.

    NAME is the server's (--name). Running requests have the server's --shutdown-timeout. To end an engine or a frontend, there
    must be another one, which gets new requests. This command waits until the next one serves. Ctrl-C ends only the waiting.
    """
    if engine is not None and frontend is not None:
        raise click.UsageError("--engine and --frontend exclude each other")
    from shmring.frontend.commands.drain import drain as drain_server

    raise SystemExit(drain_server(name, socket_dir, timeout_s, engine=engine, frontend=frontend))


@main.command(short_help="Restarts a server's engines in turn; no request fails.")
@click.argument("name")
@_SOCKET_DIR
@_TIMEOUT
def restart(name: str, socket_dir: str | None, timeout_s: float) -> None:
    """Restarts all engines of a server, one after the other, as `shmring drain --engine` does; no request fails.

    The server must have two engines or more. If an engine does not serve again in time, those behind it are left alone.
    """
    from shmring.frontend.commands.drain import restart as restart_engines

    raise SystemExit(restart_engines(name, socket_dir, timeout_s))


@main.command()
def version() -> None:
    """Prints the version."""
    click.echo(f"shmring {__version__}")


if __name__ == "__main__":
    main()
