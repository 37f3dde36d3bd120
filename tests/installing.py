"""Installs this checkout into the environment of the Python that runs this, and says what it is at and for how long.

``python tests/installing.py demo`` installs what runs: shmring and the packages of its extra ``demo``. With ``test``, it adds
the packages of that extra, and compiles what tests and benchmarks have beside the core. The core is compiled while packages are
fetched; a second time, only what has changed is. If ``dist/`` has a wheel of these very sources, ``demo`` takes that instead.

pip alone says either nothing for minutes (``--quiet``) or hundreds of lines. If a step fails, all that it has said is shown.
This needs nothing but the standard library, since ``make`` runs it with a new environment's Python.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core_interface import digest

ROOT = Path(__file__).resolve().parents[1]

_PIP = [sys.executable, "-m", "pip", "install", "--verbose", "--progress-bar=off", "--disable-pip-version-check"]
_PIP += ["--no-compile"]  # bytecode is made when a module is first imported, which most of torch's never are: half of the time
# What tests import of thousands of modules. Their bytecode is made while the core compiles, which leaves a core idle: else each
# worker of the first run makes it for itself, all at the same time. A test that needs one says so if it can't be imported.
LARGE = ("anthropic", "openai", "torch", "transformers.generation.utils")
_IMPORT = """if True:
    import contextlib, importlib, sys
    for name in sys.argv[1:]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
"""
_IMPORT_LARGE = [sys.executable, "-c", _IMPORT, *LARGE]
_HERE = ["--no-deps", "--no-build-isolation", "--editable", "."]
_COMPILE = [sys.executable, "setup.py", "build_ext", "--inplace"]
_COMPILERS = ("gcc", "clang", "cc")

#: What pip and setuptools say when they begin with something, and what is said of it here.
_BEGINNINGS = (
    (re.compile(r"Downloading (?:\S*/)?([^/\s]+) \((.+)\)$"), "fetching {} ({})"),
    (re.compile(r"Using cached (?:\S*/)?([^/\s]+) \((.+)\)$"), "taking {} ({}) from pip's cache"),
    (re.compile(r"Building (?:editable|wheel) for (\S+) \(.*\): started$"), "building {}"),
    (re.compile(r"translating '([\w.]+)' to C$"), "translating {} to C"),
    (re.compile(r"building '([\w.]+)' extension$"), "compiling {}"),
    (re.compile(r"Installing collected packages: (.+)$"), "installing {}"),
)
_AT_ONCE = "compiling "  # several modules are
_BUILT = re.compile(r"built '([\w.]+)' extension$")

_TICK_S = 1.0  # between two looks at the clock on a terminal
_LINE_S = 10.0  # between two lines about the time, where each stays


def news(line: str) -> str | None:
    """Returns what a line of pip's says that has begun; None if it says something else."""
    for beginning, text in _BEGINNINGS:
        if found := beginning.fullmatch(line.strip()):
            return text.format(*found.groups())
    return None


class Progress:
    """Says what has begun, and for how long what runs now has been running.

    On a terminal, the last line counts the seconds. Elsewhere, there is a line every ten seconds.

    Args:
        out: where.
        tick_s, line_s: see above.
    """

    def __init__(self, out: TextIO, tick_s: float = _TICK_S, line_s: float = _LINE_S) -> None:
        self._out = out
        self._every_s = tick_s if out.isatty() else line_s
        self._lock = threading.Lock()
        self._running: dict[tuple[int, str], tuple[str, float]] = {}
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticking.join()

    def hear(self, job: int, line: str) -> None:
        """A job has written a line. What begins ends what it did before, unless both are done at once."""
        text, built = news(line), _BUILT.fullmatch(line.strip())
        with self._lock:
            if built:
                self._running.pop((job, f"{_AT_ONCE}{built[1]}"), None)
            elif text is not None:
                self._running.pop((job, ""), None)
                self._running[job, text if text.startswith(_AT_ONCE) else ""] = text, time.monotonic()
                self._write(f"    {text}\n")

    def end(self, job: int) -> None:
        """A job has ended."""
        with self._lock:
            self._running = {key: value for key, value in self._running.items() if key[0] != job}

    def _tick(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                now = time.monotonic()
                times = "; ".join(f"{_short(text)}: {now - since:.0f} s" for text, since in self._running.values())
                self._write(f"      ... {times}" + "\n" * (not self._out.isatty()))

    def _write(self, text: str) -> None:
        if self._out.isatty():  # over the line that counts
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns]}" + "\n" * text.endswith("\n")
        self._out.write(text)
        self._out.flush()


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def install(jobs: Sequence[Sequence[Sequence[str]]], progress: Progress) -> int:
    """Runs jobs side by side, each of which is commands one after the other.

    Returns:
        The exit status of the first command that failed, whose job has ended with it, and all that it has said was printed; 0
        if none has failed.
    """

    def run(number: int) -> tuple[int, str]:
        for command in jobs[number]:
            status, said = _run(command, lambda line: progress.hear(number, line))
            if status != 0:
                break
        progress.end(number)
        return status, said

    with ThreadPoolExecutor(len(jobs)) as threads:
        outcomes = [outcome for outcome in threads.map(run, range(len(jobs))) if outcome[0] != 0]
    for _, said in outcomes:
        print(said, end="", file=sys.stderr)
    return outcomes[0][0] if outcomes else 0


def _run(command: Sequence[str], hear: Callable[[str], None]) -> tuple[int, str]:
    said = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            hear(line)
    return process.returncode, "".join(said)


def requirements(extra: str) -> list[str]:
    """Returns what shmring needs with an extra, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def of(extra: str) -> Iterator[str]:
        for requirement in project["optional-dependencies"][extra]:
            if ours := re.fullmatch(r"shmring\[(.+)\]", requirement):
                for name in ours[1].split(","):
                    yield from of(name)
            else:
                yield requirement

    return list(dict.fromkeys([*project["dependencies"], *of(extra)]))


def fitting_wheel(directory: Path) -> Path | None:
    """Returns a wheel in a directory that is for this Python and made of the sources that are here; None if there is none."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for path in sorted(directory.glob(f"shmring-*-{tag}-*_{platform.machine()}.whl")):
        with zipfile.ZipFile(path) as wheel, contextlib.suppress(KeyError):
            compiled = wheel.read("shmring/core/compiled.pyi").decode()
            if digest() in compiled and _python_of(wheel) == _python_here():
                return path
    return None


def _python_of(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    return {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}


def _python_here() -> dict[str, bytes]:
    links = [path for path in (ROOT / "shmring").iterdir() if path.is_symlink()]
    files = {file: f"shmring/{file.relative_to(ROOT / 'shmring')}" for file in (ROOT / "shmring").rglob("*.py")}
    for link in links:  # which rglob follows in some versions of Python
        files |= {file: f"shmring/{link.name}/{file.relative_to(link.resolve())}" for file in link.resolve().rglob("*.py")}
    return {name: file.read_bytes() for file, name in files.items()}


def _tools() -> list[str]:
    """What building needs besides Python, its headers and pip."""
    tools: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    if os.environ.get("CC") or any(map(shutil.which, _COMPILERS)):
        return tools
    print(f"  No C compiler is on the PATH ({', '.join(_COMPILERS)}): taking one from the package index (ziglang, 100 MB) ...")
    return [*tools, "ziglang"]


def main(extra: str) -> int:
    """Installs; returns 0, or the exit status of what failed."""
    os.chdir(ROOT)
    pip = [*_PIP, "-c", "constraints.txt"]
    with Progress(sys.stdout) as progress:
        if extra != "test" and (wheel := fitting_wheel(ROOT / "dist")) is not None:
            print(f"  Taking {wheel.relative_to(ROOT)}, which is of these sources.", flush=True)
            return install([[[*pip, *requirements(extra)]], [[*pip, "--force-reinstall", "--no-deps", str(wheel)]]], progress)
        tools = _tools()
        print("  1 of 2: what builds ...", flush=True)
        if status := install([[[*pip, *tools]]], progress):
            if "ziglang" in tools:
                print("  It did not come. Install gcc or clang (Debian: apt install gcc python3-dev).")
            return status
        print("  2 of 2: packages, and meanwhile the core ...", flush=True)
        packages, build = [[*pip, *requirements(extra)]], [[*pip, *_HERE]]
        if extra == "test":
            packages, build = [*packages, _IMPORT_LARGE], [_COMPILE, *build]
        return install([packages, build], progress)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
