"""An earlier commit, built as this checkout is, to be measured beside it."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: What runs and what builds it.
_TAKEN = ("shmring", "engine", "frontend", "setup.py", "core_interface.py", "pyproject.toml", "README.md", "LICENSE")

#: If these files are equal, so is what is compiled of them.
_COMPILED = ("setup.py", "core_interface.py", "shmring/core/*.pyx", "shmring/core/*.h", "shmring/memory/*.[ch]")

_DIRECTORY = ROOT / "build" / "instructions"
_TIMEOUT_S = 900


class NotThere(Exception):
    """The commit is not in this repository, or there is no repository."""


def commit_of(name: str) -> str:
    """Returns the full number of a commit, by any name that git knows.

    Raises:
        NotThere: it is not here.
    """
    try:
        found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotThere(name) from error
    return found.decode().strip()


def built(commit: str) -> Path:
    """Returns a directory with that commit, built; from one run to the next, the last one is kept.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    directory = _DIRECTORY / f"{commit}-{sys.implementation.cache_tag}"
    done = directory / "built"
    if not done.exists():
        shutil.rmtree(_DIRECTORY, ignore_errors=True)
        directory.mkdir(parents=True)
        subprocess.run(["tar", "-x"], cwd=directory, input=_git("archive", commit, "--", *_TAKEN), check=True)
        if _sources(directory) == _sources(ROOT):
            for library in (ROOT / "shmring").glob("*/*.so"):
                shutil.copy2(library, directory / library.relative_to(ROOT))
        else:
            print(f"Compiling {commit[:12]}, once.", flush=True)
            command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(command, cwd=directory, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)
        done.touch()
    return directory


def is_compiled() -> bool:
    """Whether what is compiled in this checkout is not older than its sources."""
    libraries = [path.stat().st_mtime for path in (ROOT / "shmring").glob("*/*.so")]
    sources = [path.stat().st_mtime for path in (ROOT / "shmring").glob("*/*.[pch]*") if path.suffix in {".pyx", ".c", ".h"}]
    return bool(libraries) and max(libraries) >= max(sources)


def keep_bytecode(checkout: Path) -> None:
    """Has Python's bytecode there: a process that compiles its modules has another heap than one that loads them."""
    for package in (checkout / "shmring", checkout / "engine", checkout / "frontend", Path(__file__).parent):
        compileall.compile_dir(package, quiet=2)


def _sources(checkout: Path) -> dict[Path, bytes]:
    return {path.relative_to(checkout): path.read_bytes() for pattern in _COMPILED for path in checkout.glob(pattern)}


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout
