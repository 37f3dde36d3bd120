"""The command line: what is there, what it costs, and what becomes another program. ``serve`` is in test_serve_command.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import shmring
from frontend import cli
from frontend.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_it_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> str:
        raise cli.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.metadata, "version", find_nothing)  # as in a checkout
    result = CliRunner().invoke(main, ["version"])
    assert (result.exit_code, result.output) == (0, f"shmring {shmring.__version__}\n")


def test_an_installed_one_says_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert CliRunner().invoke(main, ["version"]).output == "shmring 1.2.3 of shmring\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["serve", "-h"], ["demo", "--help"], ["doctor", "--help"]]
)
def test_it_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_command_is_listed() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    for command in ("serve", "engine", "frontend", "bench", "demo", "doctor", "version"):
        assert f"\n  {command} " in output


def test_listing_the_commands_imports_nothing_large() -> None:
    program = (
        "import sys; from frontend.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'uvicorn', 'starlette'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.endswith("[]\n")


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["sevre"])
    assert result.exit_code == 2
    assert "No such command 'sevre'" in result.output


def test_a_server_that_can_not_start_is_one_line_and_an_exit_code(socket_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["serve", "--port", str(port), "--socket-dir", str(socket_dir)])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert result.output.startswith("shmring: can't listen on 127.0.0.1")


@pytest.mark.parametrize("command", ["engine", "frontend", "bench"])
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
