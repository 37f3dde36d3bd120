"""``make install`` says what it is at, and all of it if it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.installing import install, news
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[1]


@for_each(
    ("line", "text"),
    [
        ("  Downloading torch-2.13.0-cp311-manylinux.whl (190.2 MB)\n", "fetching torch-2.13.0-cp311-manylinux.whl (190.2 MB)"),
        ("  Downloading https://a.b/c/click-8.whl (98 kB)\n", "fetching click-8.whl (98 kB)"),
        ("  Using cached click-8.whl (98 kB)\n", "taking click-8.whl (98 kB) from pip's cache"),
        ("  Building editable for shmring (pyproject.toml): started\n", "building shmring"),
        ("  translating 'shmring.core.compiled' to C\n", "translating shmring.core.compiled to C"),
        ("  building 'shmring.core.compiled' extension\n", "compiling shmring.core.compiled"),
        ("Installing collected packages: click, torch\n", "installing click, torch"),
        ("Requirement already satisfied: click in x\n", None),
        ("  adding 'shmring/py.typed'\n", None),
    ],
)
def test_what_begins_is_said(line: str, text: str | None) -> None:
    assert news(line) == text


def test_a_line_is_said_while_pip_goes_on(run_python: Any) -> None:
    """The stand-in for pip ends only when the line has been read."""
    pip = "import sys; print(\"building 'shmring.core.compiled' extension\", flush=True); sys.stdin.readline()"
    program = f"import sys; from tests.installing import install; sys.exit(install([sys.executable, '-c', {pip!r}]))"
    installing = run_python("-c", program, stdin=subprocess.PIPE)
    assert installing.line() == "    compiling shmring.core.compiled"
    installing.rest(60)
    assert installing.returncode == 0


def test_what_fails_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    pip = "import sys; print('Collecting click'); print('ERROR: no such version'); sys.exit(3)"
    assert install([sys.executable, "-c", pip]) == 3
    assert capsys.readouterr().err == "Collecting click\nERROR: no such version\n"


def test_make_installs_nothing_in_silence() -> None:
    """Each step of the target of ``make install`` has a line of its own, and pip says what it is at."""
    _, _, target = (ROOT / "Makefile").read_text().partition("\n$(INSTALLED): ")
    recipe, _, _ = target.partition("\nclean:")
    assert "pip install" not in recipe
    assert recipe.count("$(INSTALL)") == 3
    assert recipe.count("of 3:") == 3
