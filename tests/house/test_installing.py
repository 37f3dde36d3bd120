"""``make install`` says what it is at, and all of it if it fails."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from core_interface import digest
from tests.installing import LARGE, Progress, _python_here, fitting_wheel, install, news, requirements
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


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
    installing = run_python("-c", installs(pip), stdin=subprocess.PIPE)
    assert installing.line() == "    compiling shmring.core.compiled"
    installing.rest(60)
    assert installing.returncode == 0


def installs(*programs: str, line_s: float = 100.0) -> str:
    """A program that runs programs in the place of pip, side by side."""
    jobs = [[["{sys.executable}", "-c", program]] for program in programs]
    text = repr(jobs).replace("'{sys.executable}'", "sys.executable")
    return (
        "import sys; from tests.installing import Progress, install\n"
        f"with Progress(sys.stdout, line_s={line_s}) as progress: status = install({text}, progress)\n"
        "sys.exit(status)"
    )


def test_what_takes_long_is_said_again_with_its_seconds_until_it_is_done(run_python: Any) -> None:
    lines = ["building 'a' extension", "building 'b' extension", "built 'b' extension"]
    pip = f"import sys; print(*{lines}, sep='\\n', flush=True); sys.stdin.readline()"
    installing = run_python("-c", installs(pip, line_s=0.01), stdin=subprocess.PIPE)
    said = []
    while not re.fullmatch(r"      \.\.\. compiling a: \d+ s", line := installing.line()) or "    compiling b" not in said:
        said.append(line)
    assert [line for line in said if "..." not in line] == ["    compiling a", "    compiling b"]
    installing.rest(60)


def test_what_fails_is_shown_whole(capfd: pytest.CaptureFixture[str]) -> None:
    pip = "import sys; print('Collecting click'); print('ERROR: no such version'); sys.exit(3)"
    with Progress(sys.stdout) as progress:
        assert install([[[sys.executable, "-c", "pass"]], [[sys.executable, "-c", pip]]], progress) == 3
    assert capfd.readouterr().err == "Collecting click\nERROR: no such version\n"


def test_a_demonstration_needs_no_tools_of_tests() -> None:
    """What it installs is less than a third of what tests need."""
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements("demo")}
    assert {"torch", "starlette", "openai"} <= names
    assert not names & {"playwright", "kubernetes-validate", "mypy", "pytest", "transformers", "matplotlib"}
    assert set(requirements("demo")) < set(requirements("test"))


def test_bytecode_is_made_of_what_tests_need() -> None:
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements("test")}
    assert {name.partition(".")[0] for name in LARGE} <= names
    assert all(importlib.util.find_spec(name) for name in LARGE)


def test_a_wheel_is_taken_where_it_is_of_these_very_sources(tmp_path: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    path = tmp_path / f"shmring-0-{tag}-{tag}-manylinux_2_17_{platform.machine()}.whl"
    stub = {"shmring/core/compiled.pyi": f"# {digest()}\n".encode()}

    def write(files: dict[str, bytes]) -> None:
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)

    ours = _python_here()
    assert {"shmring/__init__.py", "shmring/engine/core.py", "shmring/frontend/demo/media.py"} <= ours.keys()
    write(ours | stub)
    assert fitting_wheel(tmp_path) == path
    for other in (ours | {"shmring/errors.py": b"1"}, ours | {"shmring/more.py": b""}):
        write(other | stub)
        assert fitting_wheel(tmp_path) is None
    write(ours | {"shmring/core/compiled.pyi": b"# of other sources"})
    assert fitting_wheel(tmp_path) is None


def test_make_installs_nothing_in_silence() -> None:
    """All that is fetched and compiled goes through the program that says it."""
    _, _, target = (ROOT / "Makefile").read_text().partition("\n$(RUNNABLE): ")
    recipe, _, _ = target.partition("\nclean:")
    assert "pip install" not in recipe
    assert recipe.count("tests/installing.py") == 1
    assert recipe.count("$(call installing,") == 2
