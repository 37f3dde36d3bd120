"""The command line: what is there, what it costs, and what becomes another program. ``serve`` is in commands/test_serve.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from click.testing import CliRunner

import shmring
from shmring.frontend.cli import main
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


@for_each("argument", ["version", "--version"])
def test_it_says_its_version(argument: str) -> None:
    result = CliRunner().invoke(main, [argument])
    assert (result.exit_code, result.output) == (0, f"shmring {shmring.__version__}\n")


def test_the_version_is_that_of_the_package() -> None:
    assert metadata.version("shmring") == shmring.__version__


@for_each(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["serve", "-h"],
        ["demo", "--help"],
        ["doctor", "--help"],
        ["engine", "--help"],
        ["frontend", "-h"],
    ],
)
def test_it_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert result.output.startswith(" ".join(["Usage: main", *(word for word in arguments if word[0] != "-")]))


def test_every_command_is_listed() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    for command in ("serve", "engine", "frontend", "demo", "doctor", "version"):
        assert f"\n  {command} " in output


WRONG = [
    ["serve", "--port=x"],
    ["serve", "--executor=nothing"],
    ["serve", "--model=/nonexistent"],
    ["serve", "--api-key-file=/nonexistent"],
    ["serve", "--limit-mm-per-prompt=images=3"],
    ["engine", "--slab-nbytes=many"],
    ["engine", "--executor=no_such_module:Executor"],
    ["frontend", "--port=x"],
    ["frontend", "--media-io-kwargs={"],
    ["doctor", "--slab-nbytes=many"],
    ["sevre"],
]
RIGHT = [["--help"], ["--version"], ["serve", "--help"], ["engine", "--help"], ["frontend", "--help"]]


def test_help_and_bad_options_are_answered_before_anything_large_is_imported() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from shmring.frontend.cli import main\n"
        f"for arguments in {RIGHT + WRONG}:\n"
        "    print(CliRunner().invoke(main, arguments).exit_code, end=' ')\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'av', 'uvicorn', 'starlette', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0 " * len(RIGHT) + "2 " * len(WRONG) + "[]\n"


def test_the_list_of_commands_says_of_each_in_a_line_what_it_does() -> None:
    listed = CliRunner().invoke(main, ["--help"], terminal_width=80).output.partition("Commands:\n")[2].splitlines()
    assert len(listed) == len(main.commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed), listed


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
