"""The command as it is installed: what it says where an extra is missing. Otherwise it is what test_cli.py tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from shmring.frontend.entry_point import EXTRAS
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# A module at whose use somebody presses Ctrl-C.
INTERRUPTED = """
class Interrupted:
    def __getattr__(self, name):
        raise KeyboardInterrupt
"""


def run_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process that can't import a module."""
    return run_with(f"sys.modules[{module!r}] = None", *arguments)


def run_with(statement: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs what the project's metadata says the command is, in a process that executes a statement before."""
    place, _, function = PROJECT["scripts"]["shmring"].partition(":")
    program = (
        f"import sys{INTERRUPTED}\n{statement}; sys.argv[1:] = {list(arguments)!r}\n"
        f"from {place} import {function}; sys.exit({function}())"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@for_each(
    ("module", "arguments", "extra"),
    [
        ("click", ["--help"], "serve"),
        ("click", ["doctor"], "serve"),
        ("rich", ["doctor"], "serve"),
        ("openai", ["demo"], "demo"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(module: str, arguments: list[str], extra: str) -> None:
    done = run_without(module, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    *before, said = done.stderr.splitlines()
    assert len(before) == (module == "rich"), "but for the doctor, which looks before it shows, nothing is promised before"
    assert said.startswith(f"shmring: this command needs the extra [{extra}]")
    assert repr(module) in said or f"import of {module}" in said
    assert said.endswith(f"pip install 'shmring[{extra}]'")


@for_each(
    ("module", "arguments", "code"),
    [("click", ["inspect"], 130), ("rich", ["top"], 0)],
)
def test_ctrl_c_while_it_is_being_imported_ends_it_quietly(module: str, arguments: list[str], code: int) -> None:
    done = run_with(f"sys.modules[{module!r}] = Interrupted()", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_with_all_extras_it_is_the_command() -> None:
    done = run_without("no_such_module", "version")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"shmring {PROJECT.get('version', metadata.version('shmring'))}\n",
        "",
    )


def test_a_module_of_no_extra_that_is_missing_is_our_own_failure() -> None:
    done = run_without("shmring.service.option_types", "--help")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@for_each("extra", EXTRAS)
def test_all_that_an_extra_installs_is_known(extra: str) -> None:
    distributions = {
        name.lower().replace("_", "-")
        for requirement in PROJECT["optional-dependencies"][extra]
        if (name := re.split(r"[^A-Za-z0-9._-]", requirement)[0]) != "shmring"
    }
    imported = {
        module
        for module, providers in metadata.packages_distributions().items()
        if distributions & {provider.lower().replace("_", "-") for provider in providers} and not module.startswith("_")
    }
    assert EXTRAS[extra] <= imported, "no requirement of this extra installs this"
    providers = metadata.packages_distributions()
    covered = {provider.lower().replace("_", "-") for module in EXTRAS[extra] for provider in providers[module]}
    assert distributions <= covered, "what this installs is not known"
