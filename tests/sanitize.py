"""Runs the compiled core's tests with the core built for AddressSanitizer and UndefinedBehaviourSanitizer: ``make sanitize``.

The core is built anew, beside the one that is installed, in a temporary copy of the sources, and the tests run against that
copy. Leaks are not looked for: an interpreter that ends leaves much to the kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILED = tuple(f"tests/core/test_{name}.py" for name in ("blocks", "mapping", "message_ring", "views"))
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"


def main() -> None:
    """Exits as pytest does; a finding ends the run with the sanitizer's report."""
    compiler = os.environ.get("CC", "gcc")
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("shmring", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=copy, env=os.environ | {"CFLAGS": FLAGS, "LDFLAGS": FLAGS}, check=True)
        environment = os.environ | {
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # so that bytes objects have red zones too
            "PYTHONPATH": directory,
        }
        test = [sys.executable, "-m", "pytest", *COMPILED, "-p", "no:cacheprovider", "--timeout=600", *sys.argv[1:]]
        sys.exit(subprocess.run(test, cwd=copy, env=environment, check=False).returncode)


def _runtime(compiler: str, name: str) -> str:
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{compiler} has no {name}: install its sanitizers (Debian's gcc has them: apt install gcc)")
    return path


if __name__ == "__main__":
    main()
