"""Variables of the environment that no command reads are named at the start, with what they may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from shmring.frontend.callers.keys import ADMIN_KEYS_VARIABLE, KEYS_VARIABLE
from shmring.frontend.cli import main
from shmring.frontend.commands.variables import known_variables, unknown_variables
from shmring.service.option_table import Option
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[3]


@for_each(
    ("name", "value", "said"),
    [
        ("SHMRING_SLAB_NBYTS", "1GiB", "SHMRING_SLAB_NBYTS (it may be SHMRING_SLAB_NBYTES)"),
        ("SHMRING_API_KEYS", "a-secret", "SHMRING_API_KEYS (it may be SHMRING_API_KEY)"),
        ("SHMRING_UVICORN_LOG_LEVEL", "info", "SHMRING_UVICORN_LOG_LEVEL (it may be SHMRING_LOG_LEVEL)"),
        ("SHMRING_QQ", "1", "SHMRING_QQ"),
        ("SHMRING_ENABLE_AUTO_TOOL_CHOICE", "1", "SHMRING_ENABLE_AUTO_TOOL_CHOICE (leave it out: tools work where "),
        ("SHMRING_" + "A" * 100 + "\x1b", "1", "SHMRING_" + "A" * 56),
        # One that a command reads, whichever is started.
        ("SHMRING_PORT", "8000", ""),
        ("SHMRING_MAX_NUM_SEQS", "3", ""),
        ("SHMRING_NUM_REPLICAS", "3", ""),
        ("SHMRING_API_KEY", "a", ""),
        # Of plug-ins, which say it themselves, of others, and what Kubernetes makes for a service.
        ("SHMRING_VLLM_SLAP", "1", ""),
        ("SHMRING_SGLANG", "1", ""),
        ("SHMRNG_PORT", "1", ""),
        ("SHMRING_PORT", "tcp://10.0.0.1:8000", ""),
        ("SHMRING_SERVICE_HOST", "10.0.0.1", ""),
        ("SHMRING_SERVICE_PORT", "8000", ""),
        ("SHMRING_CHAT_SERVICE_PORT_HTTP", "8000", ""),
        ("SHMRING_PORT_8000_TCP", "tcp://10.0.0.1:8000", ""),
        ("SHMRING_PORT_8000_TCP_ADDR", "10.0.0.1", ""),
    ],
)
def test_a_variable_that_no_command_reads_is_named_with_what_it_may_be(name: str, value: str, said: str) -> None:
    found = unknown_variables({"PATH": "/bin", name: value})
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert value not in found or len(value) < 8
    assert found.isprintable()


def test_all_of_them_stand_in_one_line() -> None:
    assert unknown_variables({"SHMRING_QQ": "1", "SHMRING_PORTT": "1"}) == "SHMRING_PORTT (it may be SHMRING_PORT), SHMRING_QQ"


def test_each_variable_of_each_command_is_known() -> None:
    known = set(known_variables().values())
    assert {KEYS_VARIABLE, ADMIN_KEYS_VARIABLE} <= known
    for name in ("serve", "engine", "frontend"):
        _, command, _ = main.resolve_command(click.Context(main), [name])
        assert command is not None
        options = [option for option in command.params if isinstance(option, Option)]
        assert len(options) > 10
        assert {option.envvar for option in options if isinstance(option.envvar, str)} <= known


@pytest.mark.parametrize("command", ["serve", "engine", "frontend"])
def test_a_command_names_them_when_it_starts(tmp_path: Path, command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SHMRING_SLAB_NBYTS": "a-secret", "SHMRING_LOG_FORMAT": "json"}
    (tmp_path / "a-file").touch()
    options = [f"--socket-dir={tmp_path / 'a-file'}", *(["--connect-timeout=0"] if command == "frontend" else [])]
    program = [sys.executable, "-P", "-m", "shmring.frontend.cli", command, *options]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line["level"] == "WARNING"]
    assert line["message"] == "variables that no option has: SHMRING_SLAB_NBYTS (it may be SHMRING_SLAB_NBYTES)"
    assert "a-secret" not in done.stderr
