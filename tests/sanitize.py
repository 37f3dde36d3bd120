"""Runs the compiled core's tests with the core built for sanitizers: ``make sanitize``; or fuzzes it so: ``--fuzz SECONDS``.

First for AddressSanitizer and UndefinedBehaviourSanitizer; then, those in which threads meet, for ThreadSanitizer. It is fuzzed
with the first two (``tests/fuzz/mutate.py``). With the first two it also has the checks that its own build leaves out: an
attribute of None raises, which is otherwise read from where None lies, and so does an index that is none.

The core is built anew, beside the one that is installed, in a temporary copy of the sources, and the tests run against that
copy. Leaks are not looked for: an interpreter that ends leaves much to the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.running import copy_sources

ROOT = Path(__file__).resolve().parents[1]
#: Everything in here is about compiled code.
CORE = tuple(sorted(f"tests/core/{path.name}" for path in (ROOT / "tests/core").glob("test_*.py")))
#: What uses the core from beside it, or is compiled itself.
BESIDE = (
    *(
        f"tests/memory/test_{name}.py"
        for name in ("bundles", "codec", "copier", "copying", "huge_pages", "layout", "payload", "tensors", "upload", "views")
    ),
    *(
        f"tests/memory/test_{name}.py"  # with the made-up driver
        for name in ("device", "device_views", "watcher")
    ),
    *(f"tests/transport/test_{name}.py" for name in ("link", "load", "polling", "rings")),
)
#: Both ends, over real rings and a real slab: what asyncio does for them is not compiled.
ENDS = (
    *("tests/simulation/test_simulation.py", "tests/simulation/test_fan_out.py", "tests/integration/test_forged.py"),
    *(f"tests/client/test_{name}.py" for name in ("kept", "session", "several_engines")),
    *(f"tests/ring/test_{name}.py" for name in ("claim", "injecting", "ring")),
    *(f"tests/ends/test_{name}.py" for name in ("awaiting", "door", "dropped")),
    "tests/worker/test_workers.py",
)
COMPILED = (*CORE, *BESIDE, *ENDS)
#: What uses the compiled core and is not run, and why.
LEFT_OUT = {
    **dict.fromkeys(("tests/gpu/test_device_slab.py", "tests/gpu/test_pinned_slab.py"), "they need a GPU"),
    "tests/bench/test_allocation.py": "it is about a benchmark, which has one small part of the core",
    "tests/fuzz/test_targets.py": "the same targets are fuzzed: see --fuzz",
    "tests/simulation/test_kept.py": "it breaks the product on purpose; test_simulation.py goes through the same code",
}
#: Walks of minutes, and searches that break the product, go through the same code as the short ones. How much memory something
#: takes, and how long, is not to be seen there: what is freed is kept for a while, and each access is looked at.
QUICK = (
    *("-m", "not slow"),
    *("--deselect", "tests/core/test_received.py::test_nothing_is_left_of_a_content_with_many_slots"),
    *("--deselect", "tests/core/test_pressure.py::test_a_crowd_of_lease_requests_is_served_in_no_time"),
    *("--deselect", "tests/memory/test_huge_pages.py::test_mapping_reserves_no_address_space_that_it_does_not_return"),
)
#: What goes on in several threads of one process.
THREADED = (
    *("tests/core/test_views.py", "tests/core/test_worker_end.py", "tests/memory/test_copying.py"),
    *("-k", "thread or autograd or whole or room"),
)


@dataclasses.dataclass(frozen=True)
class Sanitizers:
    """What is compiled for, and run with.

    Attributes:
        names: of ``-fsanitize``.
        libraries: of the compiler, to be loaded first.
        options: environment variables.
        tests: arguments of pytest.
        is_checked: whether Cython's checks are there as well.
    """

    names: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    tests: tuple[str, ...]
    is_checked: bool = False


RUNS = (
    Sanitizers(
        "address,undefined",
        ("libasan.so", "libubsan.so"),
        {
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # so that bytes objects have red zones too
        },
        (*COMPILED, *QUICK),
        is_checked=True,
    ),
    Sanitizers("thread", ("libtsan.so",), {"TSAN_OPTIONS": "halt_on_error=1"}, THREADED),
)


def main() -> None:
    """Exits as what it runs does; a finding ends the run with the sanitizer's report. Other arguments are pytest's."""
    parser = argparse.ArgumentParser(
        description="Runs the compiled core's tests under the compiler's sanitizers, or fuzzes it."
    )
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="instead of running its tests")
    options, pytest_arguments = parser.parse_known_args()
    if options.fuzz is not None:
        _run(RUNS[0], [sys.executable, "-m", "tests.fuzz.mutate", "--seconds", str(options.fuzz)])
        return
    for sanitizers in RUNS:
        pytest = [sys.executable, "-m", "pytest", *sanitizers.tests, "-p", "no:cacheprovider", "--timeout=600"]
        _run(sanitizers, [*pytest, *pytest_arguments])


def _run(sanitizers: Sanitizers, command: list[str]) -> None:
    libraries = [_runtime(os.environ.get("CC", "gcc"), name) for name in sanitizers.libraries]
    with tempfile.TemporaryDirectory() as directory:
        _build(Path(directory), sanitizers)
        environment = os.environ | sanitizers.options | {"LD_PRELOAD": " ".join(libraries), "PYTHONPATH": directory}
        print(f"-fsanitize={sanitizers.names}", flush=True)
        ended = subprocess.run(command, cwd=directory, env=environment, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


def _build(copy: Path, sanitizers: Sanitizers) -> None:
    copy_sources(copy)
    if sanitizers.is_checked:
        _check(copy)
    flags = f"-O1 -g -fno-omit-frame-pointer -fsanitize={sanitizers.names} -fno-sanitize-recover=undefined -Wno-tsan"
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=copy, env=os.environ | {"CFLAGS": flags, "LDFLAGS": flags}, check=True)


def _check(copy: Path) -> None:
    """Has Cython check for None and for bounds. Without the interpreter's lock it then takes no ``record.count += 1``."""
    setup = (copy / "setup.py").read_text()
    unchecked = '"boundscheck": False,'
    assert unchecked in setup
    (copy / "setup.py").write_text(setup.replace(unchecked, '"boundscheck": True,\n    "nonecheck": True,'))
    for source in (copy / "shmring/core").glob("*.pyx"):
        text = re.sub(r"^( +)(\w+\.\w+) ([-+])= ([^#\n]+?)(  #.*)?$", r"\1\2 = \2 \3 (\4)\5", source.read_text(), flags=re.M)
        source.write_text(text)


def _runtime(compiler: str, name: str) -> str:
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{compiler} has no {name}: install its sanitizers (Debian's gcc has them: apt install gcc)")
    return path


if __name__ == "__main__":
    main()
