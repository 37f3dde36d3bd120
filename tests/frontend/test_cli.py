"""The command line."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from click.testing import CliRunner

import shmring
from frontend.cli import main


def test_it_says_its_version() -> None:
    result = CliRunner().invoke(main, ["version"])
    assert (result.exit_code, result.output) == (0, f"shmring {shmring.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["serve", "-h"], ["demo", "--help"]])
def test_it_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_command_is_listed() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    for command in ("serve", "engine", "frontend", "demo", "version"):
        assert f"\n  {command} " in output


def test_a_server_that_can_not_start_is_one_line_and_an_exit_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(main, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert result.output.startswith("shmring: can't listen on 127.0.0.1")


@pytest.mark.parametrize(
    "arguments", [["--slab-nbytes", "much"], ["--port", "70000"], ["--api-server-count", "0"], ["--nonsense"]]
)
def test_nonsense_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["serve", *arguments]).exit_code == 2


@pytest.mark.parametrize("command", ["engine", "frontend"])
def test_other_programs_get_their_options_untouched(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        """What this process has been, by another program."""

    def execute(path: str, arguments: list[str]) -> None:
        raise Replaced(path, arguments)

    monkeypatch.setattr(os, "execv", execute)
    arguments = ["--name", "x", "--help", "--", "-v"]
    result = CliRunner().invoke(main, [command, *arguments])
    assert isinstance(result.exception, Replaced)
    assert result.exception.args == (sys.executable, [sys.executable, "-m", command, *arguments])
