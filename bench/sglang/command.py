"""``python -m bench sglang``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from bench import command_line
from bench.command_line import DIRECTORY, ROOT, finish
from bench.machine import Machine
from bench.results import Coverage, Findings, Repetitions, Spread, Table, Verdict, median_ratio
from bench.sglang.ends import Measurement, Order
from bench.targets import judge
from shmring.processes.process import Process

__all__ = ["Measured", "announced", "report", "sglang_command"]

_OURS, _THEIRS = "shmring", "sglang"
WAYS: Mapping[str, Mapping[str, str]] = {_OURS: {"SHMRING_SGLANG": "1"}, _THEIRS: {}}

_REPETITIONS = 7
_MB = 1_000_000
_SMALL, _LARGE = 10_800_000, 43_000_000  # a picture of 672 x 672 pixels of Qwen2-VL, and one of 1,344 x 1,344
_COUNTS = {_SMALL: 40, _LARGE: 20}
_KILLED = Order(10 * _MB, 40)
_QUIET_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensors of a size, to a scheduler of so many ranks."""

    nbytes: int
    ranks: int

    @property
    def title(self) -> str:
        """It in words."""
        return f"{self.nbytes / _MB:.1f} MB, {self.ranks} rank{'s' * (self.ranks > 1)}"


CASES = (Case(_SMALL, 1), Case(_LARGE, 1), Case(_SMALL, 2), Case(_LARGE, 2))
#: Which end is killed, and the ranks that there are.
KILLS = {"scheduler": 1, "tokenizer": 1, "rank": 2}

#: The repetitions of each case and way, in the order in which they were made.
Measured = Mapping[tuple[Case, str], Sequence[Measurement]]
#: What is left in ``/dev/shm``, in bytes, by the end that was killed and the way.
Left = Mapping[tuple[str, str], int]


def _p50_ms(run: Measurement) -> float:
    return run.p50_ms


def _tokenizer_ms(run: Measurement) -> float:
    return run.tokenizer_ms


def _ranks_ms(run: Measurement) -> float:
    return run.ranks_ms


def _cpu_ms(run: Measurement) -> float:
    return run.tokenizer_ms + run.ranks_ms


def _median(runs: Sequence[Measurement], number: Callable[[Measurement], float]) -> float:
    return statistics.median(map(number, runs))


# -- the report --------------------------------------------------------------------------------------------------------


def report(measured: Measured, left: Left, coverage: Coverage, environment: Mapping[str, str]) -> Findings:
    """Returns the report of a run: a table of times, one of what kills leave, and the verdicts on the targets."""
    columns = ["tensors", "way", "p50 ms", "spread", "CPU ms", "tokenizer", "ranks", "of sglang's p50", "CPU", "inline"]
    rows = [_row(case, way, runs, measured) for (case, way), runs in measured.items()]
    tables = [Table("Both ends of SGLang", columns, rows, ("way",), grouped=True)]
    if left:
        killed = [[end, way, f"{nbytes / _MB:.0f} MB"] for (end, way), nbytes in left.items()]
        title = f"Left in /dev/shm when an end was killed, {_KILLED.count} tensors of {_KILLED.nbytes // _MB} MB under way"
        tables.append(Table(title, ["killed", "way", "left"], killed, ("way",)))
    notes = [
        "SGLang's own code sends tensors from a tokenizer to the ranks of a scheduler, each of which copies them to memory "
        "that stands for a GPU's; with shmring, the plug-in is loaded as in a server. There is no HTTP, no processor and no "
        "model. The ends of both ways are up at once, and one after the other is measured, in alternating order. Medians of "
        "the repetitions; CPU is user and system time of all threads, for each tensor; ratios are medians of those within a "
        "repetition. inline: tensors that were sent in SGLang's message.",
        "One end is killed with SIGKILL when a fifth of the tensors was received. What is left is looked at when nothing "
        "changes any more, and the other processes still live.",
        ", ".join(f"{name} {version}" for name, version in environment.items()),
    ]
    return Findings(
        mode="sglang",
        machine=Machine.here(),
        tables=tables,
        notes=notes,
        targets=_targets(measured, left),
        results=None,
        coverage=coverage,
    )


def _row(case: Case, way: str, runs: Sequence[Measurement], measured: Measured) -> list[str]:
    p50_ms = Spread.of(map(_p50_ms, runs))
    ratios = [_ratio(measured, case, number) if way == _OURS else None for number in (_p50_ms, _cpu_ms)]
    return [
        case.title,
        way,
        f"{p50_ms.median:.2f}",
        f"-{1 - p50_ms.minimum / p50_ms.median:.0%} +{p50_ms.maximum / p50_ms.median - 1:.0%}",
        *(f"{_median(runs, number):.2f}" for number in (_cpu_ms, _tokenizer_ms, _ranks_ms)),
        *("" if ratio is None else f"{ratio:.2f} x" for ratio in ratios),
        f"{sum(run.inline for run in runs)}",
    ]


def _ratio(measured: Measured, case: Case, number: Callable[[Measurement], float]) -> float | None:
    """Shmring's number over SGLang's, in the same repetition; None where one of them is missing."""
    return median_ratio(map(number, measured.get((case, _OURS), ())), map(number, measured.get((case, _THEIRS), ())))


def _targets(measured: Measured, left: Left) -> list[Verdict]:
    small, large, shared, _ = CASES

    def verdict(what: str, case: Case, number: Callable[[Measurement], float], limit: float) -> Verdict:
        places = iter([("sglang", _ratio(measured, case, number))])
        return judge(f"SGLang, {what} of its own", case.title, limit, "x", places, at_least=False)

    return [
        verdict("CPU", small, _cpu_ms, 0.25),
        verdict("p50", small, _p50_ms, 0.25),
        verdict("CPU", large, _cpu_ms, 0.25),
        verdict("CPU", shared, _cpu_ms, 0.6),
        verdict("p50", shared, _p50_ms, 0.8),
        judge(
            "SGLang, left in /dev/shm when an end is killed",
            "40 x 10 MB under way",
            0,
            "MB",
            ((end, left[end, _OURS] / _MB if (end, _OURS) in left else None) for end in KILLS),
            at_least=False,
        ),
    ]


def announced() -> list[Verdict]:
    """The targets, of which nothing was measured."""
    return _targets({}, {})


# -- the run -------------------------------------------------------------------------------------------------------------


def _order(ends: Process, order: Order) -> str:
    """Has both ends of a way do something, and returns what they say then; nothing, if they have ended."""
    ends.write(msgspec.json.encode(order).decode() + "\n")
    return ends.line()


@contextlib.contextmanager
def _ends(way: str, ranks: int, environment: Path) -> Iterator[Process]:
    """Both ends of a way, in processes of an environment that has SGLang."""
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory, (Path(directory) / "log").open("w+") as log:
        inherited = {name: value for name, value in os.environ.items() if "SHMRING_SGLANG" not in name}
        settled = {**inherited, **_QUIET_ENVIRONMENT, **WAYS[way], "XDG_RUNTIME_DIR": directory, "PYTHONPATH": str(ROOT)}
        with Process.start(
            [str(environment / "bin" / "python"), "-m", "bench.sglang.ends", str(ranks)],
            env=settled,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as ends:
            try:
                if not ends.line():
                    log.seek(0)
                    raise RuntimeError(f"SGLang's ends did not start: {log.read()[-600:]}")
                yield ends
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ends.pid, signal.SIGKILL)  # its ranks too


def _measure(
    runs: Repetitions[Case, Measurement], cases: Sequence[Case], environment: Path, progress: Callable[[str], None]
) -> None:
    for ranks in dict.fromkeys(case.ranks for case in cases):
        of_ranks = [case for case in cases if case.ranks == ranks]
        with contextlib.ExitStack() as stack:
            ends = {way: stack.enter_context(_ends(way, ranks, environment)) for way in WAYS}

            def measure(case: Case, way: str, ends: Mapping[str, Process] = ends) -> Measurement:
                answer = _order(ends[way], Order(case.nbytes, _COUNTS[case.nbytes]))
                return msgspec.json.decode(answer, type=Measurement)

            runs.measure(of_ranks, measure, progress)


def _kill(way: str, end: str, environment: Path) -> int:
    """Kills an end, and returns how much is left in ``/dev/shm``."""
    with _ends(way, KILLS[end], environment) as ends:
        before = _segments()
        _order(ends, msgspec.structs.replace(_KILLED, kill=end))
        left: dict[str, int] = {}
        while (now := {name: nbytes for name, nbytes in _segments().items() if name not in before}) != left:
            left = now  # the ends that live go on with what they have been sent
            time.sleep(2)
    for name in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")
    return sum(left.values())


def _segments() -> dict[str, int]:
    segments = {}
    for entry in os.scandir("/dev/shm"):
        if entry.name.startswith(("sgl_shm_mm", "shmring-")):
            with contextlib.suppress(FileNotFoundError):
                segments[entry.name] = entry.stat().st_size
    return segments


def _versions(environment: Path) -> dict[str, str]:
    program = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
    done = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(("sglang", "torch"), done.stdout.split(), strict=True))


@click.command("sglang", context_settings=command_line.SETTINGS)
@click.option("--ranks", multiple=True, type=click.Choice(["1", "2"]), help="Repeatable.  [default: all]")
@click.option("--kills/--no-kills", default=True, help="Whether ends are killed, to see what they leave.")
@command_line.repetitions_option(f"Of each case and way, in alternating order.  [default: {_REPETITIONS}]")
@click.option("--environment", default=ROOT / ".venv-sglang", type=DIRECTORY, help="Which has SGLang; see `make test-sglang`.")
@command_line.json_option
def sglang_command(
    ranks: tuple[str, ...], kills: bool, repetitions: int | None, environment: Path, json_path: Path | None
) -> None:
    """Both ends of SGLang, its tensors by its own way and through shmring; fails if a measured target is missed."""
    if not (environment / "bin" / "sglang").exists():
        raise click.UsageError(f"{environment} has no SGLang; `make test-sglang` makes an environment that has")
    cases = [case for case in CASES if not ranks or str(case.ranks) in ranks]
    subjects = {case: list(WAYS) for case in cases}
    runs = Repetitions[Case, Measurement](subjects, repetitions or _REPETITIONS, lambda case: case.title)
    left: dict[tuple[str, str], int] = {}
    with command_line.measuring(runs.steps + kills * len(KILLS) * len(WAYS)) as progress:
        _measure(runs, cases, environment, progress)
        for end in KILLS if kills else ():
            for way in WAYS:
                progress(f"kill -9 of the {end}, {way}")
                left[end, way] = _kill(way, end, environment)
    measured = {(case, way): runs for case, of_case in runs.measured.items() for way, runs in of_case.items()}
    finish(report(measured, left, runs.coverage(), _versions(environment)), json_path)
