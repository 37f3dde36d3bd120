"""The peers that are packages of others: each moves checked messages of one and of two producers, and leaves nothing.

Their ends are processes, since most of these packages keep state for the life of one; forked, which takes no time where torch
has been imported. As spawned ones they run in ``test_transport.py``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

import bench.peers
from bench.children import Failed, play_cell
from bench.messages import Cell
from bench.peers import PEERS
from bench.peers.peer import Adapter
from bench.processes import Part, consume, produce
from shmring.memory.slab import SHM_DIRECTORY
from tests.tables import for_each

MODULES = {
    "iceoryx2": "iceoryx2_slices",
    "iceoryx2-loaned": "iceoryx2_slices",
    "faster-fifo": "queues",
}
PACKAGES = {
    "iceoryx2_slices": "iceoryx2",
    "queues": "faster_fifo",
    "pyzmq_sockets": "zmq",
}
PRODUCERS = 2
REPORT_S = 60.0  # for a process to report, on a machine that does much else
END_S = 10.0  # for a process to end

# Two producers come first: both have so been connected when they are told to end.
CELLS = [
    (2, 4 << 10, {"dtype": "bfloat16"}),
    (2, 1 << 20, {"dtype": "uint8"}),
    (1, 4 << 10, {"dtype": "float32", "window": 1}),
    (1, 1 << 20, {"dtype": "float32"}),
]


class Ends:
    """A consumer and two producers of a peer. :meth:`run` has a cell played by it and as many of them as it wants."""

    def __init__(self, name: str) -> None:
        context = get_context("fork")
        self.peer = PEERS[name]
        self.shared = self.peer.create_shared(context, PRODUCERS)  # type: ignore[arg-type] # all contexts have pipes
        self._moments = context.RawArray("q", 2)
        self._controls: list[Connection] = []
        self.processes: list[Any] = []
        self._closed = False
        for number in range(1 + PRODUCERS):
            ours, theirs = context.Pipe()
            part = Part(self.peer, self.shared, number - 1, self._moments)
            process = context.Process(target=live, args=(produce if number else consume, part, theirs), daemon=True)
            process.start()
            theirs.close()
            self._controls.append(ours)
            self.processes.append(process)

    def run(self, cell: Cell) -> list[Any]:
        """Returns the outcomes: the consumer's, and then those of the producers."""
        consumer, *producers = self._controls[: 1 + cell.producers]
        self._moments[:] = 0, 0
        consumer.send(cell)
        report(consumer)  # it listens
        for producer in producers:
            producer.send(cell)
        outcome = report(consumer)
        if isinstance(outcome, Failed):
            self.kill()
            return [outcome]
        return [outcome, *map(report, producers)]

    def close(self) -> None:
        """Ends the processes, in order if they live. Twice is once."""
        if self._closed:
            return
        self._closed = True
        for control, process in zip(self._controls, self.processes, strict=True):
            if process.is_alive():
                control.send(None)
        for process in self.processes:
            process.join(END_S)
        self.kill()
        self.peer.close_shared(self.shared)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def live(play: Callable[..., Any], part: Part, control: Connection) -> None:
    while (cell := control.recv()) is not None:
        control.send(play_cell(functools.partial(play, part), control, cell))


def report(control: Connection) -> Any:
    assert control.poll(REPORT_S), "a process does not report"
    return control.recv()


@pytest.fixture
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield Cell(nbytes=4 << 10, window=4, warm_up_s=0.01, timed_s=0.03, limit_s=REPORT_S, directory=directory)


@pytest.fixture
def open_ends() -> Iterator[Callable[[str], Ends]]:
    """``open_ends(name)``; skips the test where the package is missing."""
    opened: list[Ends] = []

    def open_them(name: str) -> Ends:
        if (reason := PEERS[name].missing()) is not None:
            pytest.skip(reason)
        opened.append(Ends(name))
        return opened[-1]

    yield open_them
    for ends in opened:
        ends.close()


def segments(processes: list[Any]) -> set[Path]:
    """What processes have mapped of /dev/shm and is still there."""
    found = set()
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if f"{SHM_DIRECTORY}/" in line and not line.endswith("(deleted)"):
                found.add(Path(line.split(maxsplit=5)[5]))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_checked_messages_arrive_and_nothing_is_left(open_ends: Callable[[str], Ends], cell: Cell, name: str) -> None:
    ends = open_ends(name)
    mapped = set()
    for producers, nbytes, options in CELLS:
        now = msgspec.structs.replace(cell, producers=producers, nbytes=nbytes, **options)
        assert ends.peer.limits(now) is None
        outcome, *others = ends.run(now)
        assert not [end for end in (outcome, *others) if isinstance(end, Failed)]
        assert outcome.messages >= now.window
        assert (outcome.latencies_ns > 0).all()
        mapped |= segments(ends.processes)
    left = [path for path in Path(cell.directory).rglob("*") if not path.is_dir()]
    assert left == []
    ends.close()
    assert [path for path in mapped if path.exists()] == []
    assert traces(ends) == []


@pytest.mark.parametrize("name", MODULES)
def test_content_that_is_not_what_was_sent_is_noticed_and_nothing_is_left(
    open_ends: Callable[[str], Ends], cell: Cell, name: str, spoil: Callable[..., None]
) -> None:
    spoil(10)
    ends = open_ends(name)
    (outcome,) = ends.run(msgspec.structs.replace(cell, producers=PRODUCERS))
    assert isinstance(outcome, Failed)
    assert "message 10" in outcome.error
    assert "corrupted" in outcome.error
    ends.close()  # of processes that were killed
    assert traces(ends) == []


def traces(ends: Ends) -> list[str]:
    """What has the name of what the ends shared: segments, directories, processes that a package has started."""
    own = ends.shared.own
    names = [item for item in (own if isinstance(own, tuple) else (own,)) if isinstance(item, str)]
    deadline = time.monotonic() + END_S  # for processes that are ending
    while (found := [trace for name in names for trace in traces_of(name)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def traces_of(name: str) -> list[str]:
    found = [str(path) for path in SHM_DIRECTORY.glob(f"*{Path(name).name}*")]
    if os.path.exists(name):
        found.append(name)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed by now, or its process has ended
            if os.readlink(descriptor).startswith(f"{name}/"):
                found.append(str(descriptor))
    return found


@for_each("name", [name for name in MODULES if name != "faster-fifo"])
def test_what_takes_more_memory_than_there_is_is_said_beforehand(cell: Cell, name: str) -> None:
    assert "GiB are available" in (PEERS[name].limits(msgspec.structs.replace(cell, nbytes=1 << 40)) or "")


def test_what_does_not_fit_into_a_queue_is_said_beforehand(cell: Cell) -> None:
    large = msgspec.structs.replace(cell, nbytes=1 << 40)
    assert "does not fit into its ring" in (PEERS["faster-fifo"].limits(large) or "")


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert PEERS[name].missing() == f"not installed: pip install {PEERS[name].requires}"


@pytest.mark.parametrize("module_name", PACKAGES)
def test_an_adapter_can_be_imported_without_its_package(monkeypatch: pytest.MonkeyPatch, module_name: str) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[module_name], None)  # importing it fails
    spec = importlib.util.spec_from_file_location("imported_anew", Path(bench.peers.__path__[0], f"{module_name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # msgspec looks types up there
    spec.loader.exec_module(module)
    assert any(
        isinstance(kind, type) and issubclass(kind, Adapter) and kind.__module__ == spec.name for kind in vars(module).values()
    )
