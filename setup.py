"""Builds the compiled parts: the core (Cython) and the streaming copies (C). Everything else is said in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

#: No check that the core's code has made needless: every index there is bounded where it is taken from a peer.
DIRECTIVES = {
    "language_level": "3",
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "annotation_typing": False,
}


def compiler() -> str:
    """Returns the C compiler that distutils would run.

    Raises:
        SystemExit: there is none.
    """
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(command) is None:
        raise SystemExit(
            f"shmring builds its core from C, and the compiler {command!r} is not on the PATH: install gcc or clang and "
            "Python's headers (Debian: apt install gcc python3-dev), or install a wheel, which needs neither"
        )
    return command


def extensions() -> list[Extension]:
    """Returns what is compiled."""
    compiler()
    core = [
        Extension(str(path.with_suffix("")).replace("/", "."), [str(path)], extra_compile_args=["-O2"])
        for path in sorted(Path("shmring/core").glob("*.pyx"))
    ]
    streaming = Extension("shmring.memory._streaming", ["shmring/memory/_streaming.c"], extra_compile_args=["-O2"])
    return [*cythonize(core, compiler_directives=DIRECTIVES, build_dir="build"), streaming]


setup(ext_modules=extensions())
