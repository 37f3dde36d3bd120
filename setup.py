"""Builds the compiled parts: the core (Cython) and large copies (C). Everything else is said in pyproject.toml.

The flags are the project's own and not those that this Python was built with, which may name its directories (rpath), its
machine's processor (-march) or another compiler than the one that is here. So the same sources give the same code everywhere,
for every processor of an architecture; what needs more than its baseline asks the processor at run time (_copying.c).
As usual, $CC is the compiler, and $CFLAGS and $LDFLAGS replace the flags that are a matter of taste.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.append(str(Path.cwd()))  # pip builds without it

from core_interface import DECLARATIONS, MAIN, STUB, declarations, stub, write

#: No check that the core's code has made needless: every index there is bounded where it is taken from a peer. And no code for
#: pickling, which nothing of it can be: that was an eighth of the C.
DIRECTIVES = {
    "language_level": "3",
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "annotation_typing": False,
    "auto_pickle": False,
}

CFLAGS = "-O3 -fwrapv -DNDEBUG -Wall"
QUICK_CFLAGS = "-O0 -fwrapv -DNDEBUG -w"
SHARED = ["-fPIC", "-fno-plt", "-fvisibility=hidden", "-pthread"]  # most calls are of Python's functions, in another library

#: The compiler of the package ziglang. -I: where pip builds, it hides the environment's packages by variables. It compiles for
#: this machine's processor and with debug information, unless it is told not to.
ZIG = [sys.executable, "-I", "-m", "ziglang", "cc", "-mcpu=baseline", "-Wl,--strip-debug"]


def compiler() -> list[str]:
    """Returns the command of the C compiler: $CC, or the one that built Python, or another one that is here.

    Raises:
        SystemExit: there is none, or Python's headers are missing.
    """
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SystemExit(missing("Python's headers are not installed"))
    named = os.environ.get("CC")
    for command in [named] if named else [sysconfig.get_config_var("CC") or "cc", "gcc", "clang", "cc"]:
        if shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    if named:
        raise SystemExit(missing(f"the compiler {named!r}, which $CC names, is not on the PATH"))
    if subprocess.run([*ZIG[:4], "version"], capture_output=True, check=False).returncode != 0:
        raise SystemExit(missing("no C compiler (gcc, clang, cc) is on the PATH"))
    return ZIG


def missing(what: str) -> str:
    """Returns a sentence that says what is missing and what to do about it."""
    return (
        f"shmring builds its core from C, and {what}: install gcc or clang and Python's headers "
        "(Debian: apt install gcc python3-dev), or install a wheel, which needs neither"
    )


class Build(build_ext):
    """Translates the core to C, under build/, and compiles it with the flags above, on all cores.

    ``--quick``: it is not optimised. The next real build takes nothing of that for its own: it is in a directory apart, and
    what is put beside the sources seems to be old.
    """

    user_options: ClassVar = [*build_ext.user_options, ("quick", None, "compile without optimising, to try something")]
    boolean_options: ClassVar = [*build_ext.boolean_options, "quick"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.quick = False

    def run(self) -> None:
        if self.inplace or self.editable_mode:  # pip has a new directory each time, in which everything would be compiled anew
            self.build_lib = self.build_temp = f"build/{sys.implementation.cache_tag}{'-quick' if self.quick else ''}"
        self.parallel = self.parallel or len(os.sched_getaffinity(0))
        super().run()
        if self.quick:
            for extension in self.extensions:
                os.utime(self.get_ext_fullpath(extension.name), (0, 0))

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        print(f"built '{ext.name}' extension", flush=True)  # as above: several are compiled at once

    def build_extensions(self) -> None:
        declared = DECLARATIONS / "shmring/core/compiled.pxd"
        write(declared, declarations())
        command = compiler()
        flags = shlex.split(os.environ.get("CFLAGS", QUICK_CFLAGS if self.quick else CFLAGS))
        self.compiler.set_executables(
            compiler_so=[*command, *flags, *SHARED],
            linker_so=[*command, *flags, "-shared", "-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))],
        )
        self.compiler.set_library_dirs([])  # those of Python, which Zig's compiler would write into what it links
        for extension in self.extensions:
            print(f"translating '{extension.name}' to C", flush=True)  # which tests/installing.py shows
            is_core = str(MAIN) in extension.sources  # it declares itself
            [translated] = cythonize(
                extension,
                compiler_directives=DIRECTIVES,
                include_path=[] if is_core else [str(DECLARATIONS)],
                build_dir="build",
                quiet=True,
                force=not is_core and _is_newer(declared, extension),  # Cython itself looks in the first extension's paths only
            )
            extension.sources, extension.depends = translated.sources, translated.depends
        super().build_extensions()


def _is_newer(declared: Path, extension: Extension) -> bool:
    """Whether the core's declarations have changed since an extension was translated."""
    translated = Path("build", extension.sources[0]).with_suffix(".c")
    return translated.exists() and translated.stat().st_mtime < declared.stat().st_mtime


def extensions() -> list[Extension]:
    """Returns what is compiled: the core and, where the sources are used in their place, what tests have beside it."""
    beside = Path().glob("tests/model/*.pyx") if {"--inplace", "editable_wheel"} & {*sys.argv} else ()
    sources = [MAIN, *beside]
    headers = ["shmring/core"]  # which what lies beside the core uses as well
    core = [
        Extension(str(path.with_suffix("")).replace("/", "."), [str(path)], include_dirs=headers) for path in sorted(sources)
    ]
    copies = [f"shmring/memory/{name}" for name in ("_copying.c", "copy_helpers.c")]
    return [
        *core,
        Extension("shmring.memory._copying", copies, depends=["shmring/memory/copy_helpers.h"]),
    ]


write(STUB, stub())  # before anything looks for what is in the package
setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
