"""The peers that are packages of others: each moves checked messages of one and of two producers, and leaves nothing.

Their ends are processes, since most of these packages keep state for the life of one; forked, which takes no time where torch
has been imported. As spawned ones they run in ``test_transport.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest

import bench.peers
from bench.children import BenchError
from bench.messages import Cell
from bench.peers import PEERS
from bench.peers.peer import Adapter
from bench.processes import PeerGroup
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
LIMIT_S = 60.0  # for a cell, on a machine that does much else
END_S = 10.0  # for a process to end

# Two producers come first: both have so been connected when they are told to end.
CELLS = [
    (2, 4 << 10, {"dtype": "bfloat16"}),
    (2, 1 << 20, {"dtype": "uint8"}),
    (1, 4 << 10, {"dtype": "float32", "window": 1}),
    (1, 1 << 20, {"dtype": "float32"}),
]


@pytest.fixture
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield Cell(nbytes=4 << 10, window=4, warm_up_s=0.01, timed_s=0.03, limit_s=LIMIT_S, directory=directory)


@pytest.fixture
def open_group() -> Iterator[Callable[[str], PeerGroup]]:
    """``open_group(name)``: a consumer and two producers of a peer; skips the test where the package is missing."""
    with contextlib.ExitStack() as stack:

        def open_it(name: str) -> PeerGroup:
            if (reason := PEERS[name].missing()) is not None:
                pytest.skip(reason)
            group = stack.enter_context(PeerGroup(PEERS[name], PRODUCERS, get_context("fork")))
            group.start()
            return group

        yield open_it


def segments(group: PeerGroup) -> set[Path]:
    """What its processes have mapped of /dev/shm and is still there."""
    found = set()
    for child in group.children:
        for line in Path(f"/proc/{child.process.pid}/maps").read_text().splitlines():
            if f"{SHM_DIRECTORY}/" in line and not line.endswith("(deleted)"):
                found.add(Path(line.split(maxsplit=5)[5]))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_checked_messages_arrive_and_nothing_is_left(open_group: Callable[[str], PeerGroup], cell: Cell, name: str) -> None:
    group = open_group(name)
    mapped = set()
    for producers, nbytes, options in CELLS:
        now = msgspec.structs.replace(cell, producers=producers, nbytes=nbytes, **options)
        assert PEERS[name].limits(now) is None
        measurement = group.run(now)
        assert measurement.messages >= now.window
        assert (measurement.latencies_ns > 0).all()
        mapped |= segments(group)
    left = [path for path in Path(cell.directory).rglob("*") if not path.is_dir()]
    assert left == []
    group.close()
    assert [path for path in mapped if path.exists()] == []
    assert traces(group) == []


@pytest.mark.parametrize("name", MODULES)
def test_content_that_is_not_what_was_sent_is_noticed_and_nothing_is_left(
    open_group: Callable[[str], PeerGroup], cell: Cell, name: str, spoil: Callable[..., None]
) -> None:
    spoil(10)
    group = open_group(name)
    with pytest.raises(BenchError, match=r"message 10 .* corrupted"):
        group.run(msgspec.structs.replace(cell, producers=PRODUCERS))
    assert traces(group) == []  # of processes that were killed


def traces(group: PeerGroup) -> list[str]:
    """What has the name of what its processes shared: segments, directories, processes that a package has started."""
    own = group._shared.own
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
