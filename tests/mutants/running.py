"""Puts faults into copies of the sources, and looks whether checks notice.

What is compiled is built once, with all faults that are tried in it, each behind a switch (:mod:`tests.mutants.switches`). The
sources beside it have the fault as well, for checks that read them, and because it is all that Python needs: if only faults in
Python are tried, nothing is built, and the copies have what was compiled here. As many checks run at a time as there are cores,
each in a copy of its own: in a process that is forked from this one, which has imported what takes longest.
"""

from __future__ import annotations

import collections
import compileall
import contextlib
import dataclasses
import importlib
import os
import py_compile
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from shmring.memory.slab import sweep
from tests.mutants.fault import CYTHON, ROOT, Fault, check_place
from tests.mutants.switches import DECLARATION, HEADER, VARIABLE, Change, with_switches

_COPIED = (
    "shmring",
    "engine",
    "frontend",
    "bench",
    "tests",
    "docs",
    "setup.py",
    "core_interface.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_PACKAGES = ("shmring", "engine", "frontend", "bench", "tests")
_IMPORTED = ("torch", "numpy", "hypothesis", "msgspec", "uvloop")
_TIMEOUT_S = 15  # of a check, or so many times as long as it takes without a fault
_TIMES = 10
_IN_C_S = 15  # later a check is killed that no signal of pytest's reaches
_ALL_TIMEOUT_S = 900  # of all without a fault


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a check ended.

    Attributes:
        how: ``passed``, ``failed``, ``hung``, or the name of the signal that ended it.
        who: the first test that failed; empty if none could say so.
        seconds: how long it took.
        output: what it printed.
    """

    how: str
    who: str
    seconds: float
    output: str

    @property
    def is_noticed(self) -> bool:
        """Whether the check did not just pass."""
        return self.how != "passed"


def try_all(faults: Sequence[Fault]) -> Iterator[tuple[Fault, Outcome]]:
    """Tries faults, and yields how the check of each ended, as soon as it has.

    Ends the program if a check fails without any fault. Where it is skipped, on a machine with one core say, nothing is tried.
    """
    for fault in faults:
        check_place(fault)
    with tempfile.TemporaryDirectory() as directory:
        copies = _make_copies(faults, Path(directory))
        took_s, skipped = _passes_without(faults, copies)
        jobs = []
        for number, fault in enumerate(faults, 1):
            if fault.test in skipped:
                print(f"not tried  {fault.name}: {fault.test} is skipped here: {skipped[fault.test]}", flush=True)
            else:
                jobs.append(_Job(fault.test, _timeout_s(fault.test, took_s), fault, number))
        for job, outcome in _run(jobs, copies):
            sweep()  # a test that has failed may leave a segment, which others would take for their own
            if job.fault is not None:
                yield job.fault, outcome


def _make_copies(faults: Sequence[Fault], directory: Path) -> list[Path]:
    """Returns a copy for each core; if one of the faults is in what is compiled, all are built there."""
    begun_s = time.monotonic()
    first = directory / "0"
    first.mkdir()
    is_built = any(fault.is_compiled for fault in faults)
    if is_built:
        copy_sources(first)
        _build_faults(faults, first)
    else:
        copy_sources(first, left_out=("__pycache__",))
    # By what stands in a file and not by its date: the faults of a second have the same.
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    for name in _PACKAGES:
        compileall.compile_dir(first / name, quiet=2, invalidation_mode=by_content)
    copies = [first, *(directory / str(number) for number in range(1, len(os.sched_getaffinity(0))))]
    for copy in copies[1:]:
        shutil.copytree(first, copy, symlinks=True, ignore=shutil.ignore_patterns("build"))
    print(f"{'built' if is_built else 'copied'} in {time.monotonic() - begun_s:.0f} s", flush=True)
    return copies


def _build_faults(faults: Sequence[Fault], copy: Path) -> None:
    changes = collections.defaultdict(list)
    for number, fault in enumerate(faults, 1):
        if fault.is_compiled:
            changes[fault.file].append(Change(number, fault.old, fault.new))
    for file, of_file in changes.items():
        (copy / file).write_text(with_switches((ROOT / file).read_text(), file.endswith(CYTHON), of_file))
    (copy / "shmring/core/fault.h").write_text(HEADER)
    (copy / "shmring/core/fault.pxd").write_text(DECLARATION)
    _build(copy, ["-include", str(copy / "shmring/core/fault.h")])
    for file in changes:
        shutil.copy(ROOT / file, copy / file)


def copy_sources(directory: Path, *, left_out: Sequence[str] = ("*.so", "__pycache__")) -> None:
    """Copies what is built and tested; if nothing else is said, without what was compiled."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(source, directory / name)


def _build(copy: Path, flags: Sequence[str]) -> None:
    """Without optimising, which takes half of the time."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", f"--parallel={len(os.sched_getaffinity(0))}"]
    cflags = shlex.join(["-O0", "-fwrapv", "-fstack-protector-all", "-DNDEBUG", "-w", *flags])
    result = subprocess.run(build, cwd=copy, env={**os.environ, "CFLAGS": cflags}, capture_output=True, check=False)
    if result.returncode:
        sys.exit(f"the core can't be built:\n{result.stdout.decode()}{result.stderr.decode()}")


# -- checks ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """Tests to be run, with a fault or without one."""

    test: str
    timeout_s: float
    fault: Fault | None = None
    number: int = 0


def _passes_without(chosen: Sequence[Fault], copies: Sequence[Path]) -> tuple[dict[str, float], dict[str, str]]:
    """Ends the program unless all checks pass without a fault; returns the seconds of each test, and why some are skipped."""
    begun_s = time.monotonic()
    tests = sorted({fault.test for fault in chosen})
    plain = [test for test in tests if " " not in test]
    parts = [" ".join(plain[place :: len(copies)]) for place in range(min(len(copies), len(plain)))]
    jobs = [_Job(test, _ALL_TIMEOUT_S) for test in (*parts, *(test for test in tests if " " in test))]
    took_s: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for job, outcome in _run(jobs, copies):
        if outcome.is_noticed:
            sys.exit(f"without a fault, {outcome.who or job.test} {outcome.how}:\n{outcome.output}")
        took_s |= {
            name: float(seconds) for seconds, name in re.findall(r"^([\d.]+)s call +(\S+)", outcome.output, re.MULTILINE)
        }
        ran = set(re.findall(r"^PASSED ([^\s\[]+)", outcome.output, re.MULTILINE))
        for name, reason in re.findall(r"^SKIPPED ([^\s\[]+).* - (.*)$", outcome.output, re.MULTILINE):
            skipped |= {} if name in ran else {name: reason}  # else some of its parameters are tried
    print(f"without a fault, all pass in {time.monotonic() - begun_s:.0f} s", flush=True)
    return took_s, skipped


def _timeout_s(test: str, took_s: Mapping[str, float]) -> float:
    """After how long a check hangs."""
    return max(_TIMEOUT_S, _TIMES * sum(seconds for name, seconds in took_s.items() if name.startswith(test.partition(" ")[0])))


def _run(jobs: Sequence[_Job], copies: Sequence[Path]) -> Iterator[tuple[_Job, Outcome]]:
    """Runs one in each copy at a time; yields each with its outcome as soon as that is there."""
    waiting, free = collections.deque(jobs), list(copies)
    running: dict[_Job, _Check] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, copy = waiting.popleft(), free.pop()
                if job.fault is not None:
                    source = (ROOT / job.fault.file).read_text()
                    (copy / job.fault.file).write_text(source.replace(job.fault.old, job.fault.new))
                running[job] = _start(job, copy)
            job, outcome = _next_to_end(running)
            copy = running.pop(job).copy
            if job.fault is not None:
                shutil.copy(ROOT / job.fault.file, copy / job.fault.file)
            free.append(copy)
            yield job, outcome
    finally:
        for check in running.values():
            _kill(check.pid)


@dataclasses.dataclass(frozen=True)
class _Check:
    pid: int
    pidfd: int
    printed: Path
    copy: Path
    begun_s: float
    deadline_s: float


def _start(job: _Job, copy: Path) -> _Check:
    """Runs tests in a child, until one of them fails."""
    for name in _IMPORTED:
        importlib.import_module(name)
    printed = copy / "printed"
    environment = {VARIABLE: str(job.number)} if job.fault is not None and job.fault.is_compiled else {}
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _be_pytest(job, copy, environment, printed)
    now_s = time.monotonic()
    return _Check(pid, os.pidfd_open(pid), printed, copy, now_s, now_s + job.timeout_s + _IN_C_S)


def _be_pytest(job: _Job, copy: Path, environment: Mapping[str, str], printed: Path) -> None:
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(copy)
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = True
        # What was freed does not look as it did before.
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", MALLOC_PERTURB_="165", **environment)
        sys.path[0] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
            del sys.modules[name]
        says = ["-q", "-rfEsp", "--no-fold-skipped", "--durations=0", "--durations-min=1"]
        arguments = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
        code = pytest.main([*arguments, *says, *shlex.split(job.test)], plugins=[_Bounded(job.timeout_s)])
    except Exception:  # noqa: BLE001 - it ends here, and says so
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Bounded:
    """A plugin of pytest: each test has so many seconds, whatever its file or its own mark gives it on a busy machine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.timeout(self._timeout_s), append=False)


def _next_to_end(running: Mapping[_Job, _Check]) -> tuple[_Job, Outcome]:
    """Waits for one to end, or ends it because its time is over."""
    first_s = min(check.deadline_s for check in running.values())
    poll = select.poll()
    for check in running.values():
        poll.register(check.pidfd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(max(0.0, first_s - time.monotonic()) * 1000)}
    job = next(job for job, check in running.items() if check.pidfd in ready or (not ready and check.deadline_s == first_s))
    return job, _ended(job.test, running[job], is_late=not ready)


def _ended(test: str, check: _Check, *, is_late: bool) -> Outcome:
    _kill(check.pid)  # and whatever its tests have left
    for left in Path("/tmp").glob(f"shmr-{check.pid}-*"):  # by fixtures whose end it did not reach
        shutil.rmtree(left, ignore_errors=True)
    os.close(check.pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(check.pid, 0)[1])
    output = check.printed.read_text(errors="replace")
    how = "failed"
    if is_late or "Failed: Timeout" in output or "+++ Timeout +++" in output:
        how = "hung"
    elif code < 0:
        how = signal.Signals(-code).name
    elif code == 0:
        how = "passed"
    elif code > 2:  # 2: what a test imports fails
        sys.exit(f"{test} could not be run:\n{output}")
    return Outcome(how, _who(output), time.monotonic() - check.begun_s, output)


def _who(output: str) -> str:
    """The first test that failed, or in which it crashed or hung."""
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE)
    inside = re.search(r'^  File "\S*/tests/(\S+)", line \d+ in (test_\w+)', output, re.MULTILINE)
    return failed[1] if failed else f"{inside[1]}::{inside[2]}" if inside else ""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
