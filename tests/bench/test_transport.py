"""``bench transport`` with real processes: every peer passes its checks and fails them when it should, nothing is left."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bench import report, transport
from bench.__main__ import main
from bench.messages import Cell
from bench.peers import PEERS
from bench.processes import BenchError, Failed, Group, Part, run_cell
from shmring.memory.slab import SHM_DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
SMALL = Cell(nbytes=4096, window=16, warm_up_s=0.02, timed_s=0.1, limit_s=20.0, directory="")


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield dataclasses.replace(SMALL, directory=directory)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Group]]:
    """A pair of every peer; all of them start at the same time."""
    started = {name: Group(name) for name in PEERS}
    try:
        for pair in started.values():
            pair.start()
        yield started
    finally:
        for pair in started.values():
            pair.close()


# The tests of one peer use one pair of processes, in this order: a pair does not survive a failure.


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_passes_its_checks_again_and_again(pairs: dict[str, Group], cell: Cell, name: str) -> None:
    for window in (16, 1):
        measurement = pairs[name].run(dataclasses.replace(cell, window=window, timed_s=0.05))
        assert measurement.messages >= window
        assert measurement.messages_per_s > 0
        assert (measurement.latencies_ns > 0).all()
    assert list(Path(cell.directory).glob("*.sock")) == []


@pytest.mark.parametrize("name", PEERS)
def test_a_corrupted_message_is_detected(pairs: dict[str, Group], cell: Cell, name: str) -> None:
    with pytest.raises(BenchError, match=r"consumer failed: CheckError: message 20 holds .* it is corrupted") as caught:
        pairs[name].run(dataclasses.replace(cell, corrupt_sequence=20))
    assert PEERS[name].title in str(caught.value)
    with pytest.raises(BenchError, match="were ended after a failure"):
        pairs[name].run(cell)


def test_a_cell_that_takes_too_long_is_an_error(cell: Cell) -> None:
    control, ours = multiprocessing.Pipe()
    with control, ours:
        outcome = run_cell("consumer", Part("inline-msgpack"), control, dataclasses.replace(cell, limit_s=0.05))
    assert outcome == Failed("it took longer than 0.05 s")  # no producer ever came


def test_a_process_that_dies_is_an_error(cell: Cell) -> None:
    with Group("inline-msgpack") as pair:
        pair.start()
        pair.processes[0].kill()
        with pytest.raises(BenchError, match="the consumer has died with exit code -9"):
            pair.run(cell)
        assert not any(process.is_alive() for process in pair.processes)


def bench(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench", "transport", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_prints_ratios_and_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    before = set(SHM_DIRECTORY.iterdir())
    sizes = ("--size", "4KiB", "--repetitions", "2", "--seconds", "0.1")
    running = bench("--quick", *sizes, "--peer", "torch-queue", "--json", str(path))
    table, progress = running.communicate(timeout=60)
    assert running.returncode == 0, progress
    assert "4,096 bytes, repetition 2 of 2: torch.multiprocessing.Queue" in progress
    rows = {title: line for line in table.splitlines() for title in ("one copy", "Queue", "memcpy") if title in line}
    assert "1.00 x" in rows["one copy"]
    assert all(" x " in row and "4 KB" in row for row in rows.values())

    stored = json.loads(path.read_bytes())
    ours, queue = stored["results"]
    assert (ours["peer"], queue["peer"]) == ("shmring", "torch-queue")
    assert ours["shmring_ratio"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    assert queue["shmring_ratio"]["minimum"] > 1
    assert queue["messages_per_s"]["minimum"] <= queue["messages_per_s"]["median"] <= queue["messages_per_s"]["maximum"]
    assert 0 < queue["latency_p50_us"] <= queue["latency_p99_us"]
    assert stored["machine"].keys() >= {"cpu", "cores", "kernel", "python", "torch", "shmring", "commit"}
    assert stored["limits"][0]["nbytes"] == 4096
    left = {path.name for path in set(SHM_DIRECTORY.iterdir()) - before}
    assert not [name for name in left if name.startswith(("torch_", "shmring-"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_it_stops_all_of_it(number: signal.Signals) -> None:
    with bench("--size", "4KiB", "--peer", "shmring", "--seconds", "60") as running:
        try:
            assert running.stderr is not None
            while "repetition 1" not in (line := running.stderr.readline()):
                assert line, "it ended by itself"
            children = psutil.Process(running.pid).children(recursive=True)
            assert len(children) >= 2
            os.kill(running.pid, number)
            running.wait(timeout=20)
            _, alive = psutil.wait_procs(children, timeout=10)
            assert alive == []
            assert running.returncode != 0
        finally:
            running.kill()


def test_sizes_must_be_whole_numbers_of_floats() -> None:
    result = CliRunner().invoke(main, ["transport", "--size", "4097"])
    assert result.exit_code == 2
    assert "multiple of 4 bytes" in result.output


@pytest.mark.parametrize(("nbytes", "text"), [(65536, "64 KB"), (16 << 20, "16 MB"), (1000, "1000 B")])
def test_sizes_are_shown_as_people_say_them(nbytes: int, text: str) -> None:
    assert report.format_nbytes(nbytes) == text


def test_the_ratio_is_taken_within_each_repetition() -> None:
    ratio = transport.Spread.of([ours / theirs for ours, theirs in zip([100.0, 10.0, 50.0], [10.0, 1.0, 10.0], strict=True)])
    assert (ratio.median, ratio.minimum, ratio.maximum) == (10.0, 5.0, 10.0)
