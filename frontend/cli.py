"""The command ``shmring``: its commands, and what they need only when they are run.

Importing torch takes a second or two, so nothing here does: ``shmring version`` and ``shmring --help`` answer at once.
``serve``, whose options include those of frontends, lives in a module of its own, imported when it is asked for.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

import click

__all__ = ["main"]

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_serve_stand_in = click.Command("serve", help="Serves OpenAI's API: one engine and several frontends behind one port.")


class _Commands(click.Group):
    """A group in which ``serve`` is listed without being imported."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that is to be run."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is _serve_stand_in:
            from frontend.serve_command import serve  # imports torch

            command = serve
        return name, command, rest


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Multimodal inference over shared memory: an engine, its HTTP frontends, and a demonstration of both."""


main.add_command(_serve_stand_in)


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


@main.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measures, on this machine. All commands are its own: shmring bench --help."""
    _run_module("bench", arguments)


@main.command()
def demo() -> None:
    """Shows that it works: pictures and altered copies of them through HTTP, slab and engine, in under a minute.

    Ends with an error unless each altered copy finds its original, nothing was copied, and nothing is left behind.
    """
    from frontend.demo import run_demo  # needs the openai client, which serving does not

    raise SystemExit(run_demo())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects with name, status, found and advice.")
@click.option("--slab-nbytes", default="1GiB", show_default=True, help="The slab that an engine is to have here.")
@click.option("--socket-dir", default=None, help="Where its socket is to lie.  [default: the user's runtime directory]")
def doctor(as_json: bool, slab_nbytes: str, socket_dir: str | None) -> None:
    """Checks whether this machine is fit for an engine, and says what to do where it is not.

    Ends with exit code 1 if there is a problem.
    """
    import msgspec
    from rich.console import Console

    from frontend.doctor import has_problem, run_checks, show  # imports torch
    from shmring.config import parse_nbytes

    try:
        checks = run_checks(parse_nbytes(slab_nbytes), socket_dir)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(checks)))
    else:
        show(checks, Console(width=None if sys.stdout.isatty() else 132))
    raise SystemExit(1 if has_problem(checks) else 0)


@main.command()
def version() -> None:
    """Prints the version."""
    click.echo(f"shmring {_version()}")


def _version() -> str:
    try:
        return metadata.version("shmring")
    except metadata.PackageNotFoundError:  # run from a checkout
        import shmring

        return shmring.__version__


if __name__ == "__main__":
    main()
