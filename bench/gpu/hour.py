"""``make gpu-hour``: all that is to be known of a GPU that is at hand for some minutes, in one JSON with its commit.

It compiles the core, runs the tests that need a GPU, and ``bench gpu`` beside ``pin_memory()``, ``tensor.to`` and CUDA IPC.
Each step is bounded, all of them by eight minutes together. It is run as a script and knows nothing but the standard library,
since the core may not be compiled yet: ``python3 bench/gpu/hour.py`` in a checkout, with a Python that has what the tests need.
Nothing is fetched.

Ends with 1 if a step failed or a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_ALL_LIMIT_S = 480.0
_BUILD_LIMIT_S = 150.0
_TESTS_LIMIT_S = 170.0
_SPARE_S = 10.0  # to write the JSON
_TAIL_CHARACTERS = 6000  # of what a step says, that are kept

_BENCH = (
    *("--size", "64KiB", "--size", "1MiB", "--size", "8MiB", "--size", "64MiB", "--repetitions", "5"),
    *("--from", "slot-pinned", "--from", "pin-memory", "--from", "pin-memory-to", "--from", "clone"),
)


def step(name: str, limit_s: float, *arguments: str) -> dict[str, Any]:
    """Runs a step in a process of its own; returns its exit code (None: it took too long), seconds, and what it said last.

    Args:
        name: for who watches.
        limit_s: it is ended then, with what it has started.
        arguments: of Python.
    """
    print(f"gpu-hour: {name} ...", file=sys.stderr, flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, limit_s))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # what it has started, too
        said, _ = process.communicate()
        code = None
    result = {"code": code, "seconds": round(time.monotonic() - started_s, 1), "said": said[-_TAIL_CHARACTERS:]}
    print(f"gpu-hour: {name}: {'too long' if code is None else f'exit code {code}'}, {result['seconds']} s", file=sys.stderr)
    return result


def commit() -> str:
    """Returns the commit that is checked out, with a + if files have changed since; "unknown" outside of a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds, tests and measures on a GPU, in at most eight minutes.")
    parser.add_argument("--json", type=Path, default=Path("gpu-hour.json"), help="where the result goes")
    parser.add_argument("--commit", help="that this is, where no git is")
    path, told = (parsed := parser.parse_args()).json.absolute(), parsed.commit
    end_s = time.monotonic() + _ALL_LIMIT_S - _SPARE_S
    found: dict[str, Any] = {"commit": told or commit(), "python": sys.version.split()[0]}
    found["build"] = step("build", _BUILD_LIMIT_S, "setup.py", "--quiet", "build_ext", "--inplace")
    if found["build"]["code"] == 0:
        tests = ("-X", "faulthandler", "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "tests/bench/test_gpu.py")
        found["tests"] = step("tests", _TESTS_LIMIT_S, *tests)
        measured = path.with_suffix(".bench.json")
        measured.unlink(missing_ok=True)
        found["bench"] = step("bench", end_s - time.monotonic(), "-m", "bench", "gpu", *_BENCH, "--json", str(measured))
        if measured.exists():
            found["findings"] = json.loads(measured.read_text())
            measured.unlink()
    path.write_text(json.dumps(found, indent=1) + "\n")
    for target in found.get("findings", {}).get("targets", []):
        state = {True: "met", False: "missed", None: "not measured"}[target["met"]]
        print(f"{target['what']}, {target['at']}: {target['measured'] or '-'} ({target['asked']}): {state}")
    steps = [found.get(name, {}).get("code") for name in ("build", "tests", "bench")]
    if any(steps):
        print("\n".join(found[name]["said"] for name in ("build", "tests") if found.get(name, {}).get("code")))
    print(f"written to {path}")
    return int(steps != [0, 0, 0])


if __name__ == "__main__":
    sys.exit(main())
