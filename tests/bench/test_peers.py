"""The peers of streams: each moves checked messages of one and of two producers, gives up when told to, and leaves nothing.

Their ends are the benchmark's own groups of processes; forked, which takes no time where torch has been imported. As spawned
ones they run in ``test_transport.py``. Most packages of others keep state for the life of a process.
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
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import pytest

import bench.peers
from bench.children import BenchError, play_cell
from bench.groups import Part, PeerGroup, consume
from bench.messages import Cell
from bench.peers import PEERS, shmring_ring
from bench.peers.peer import Adapter
from shmring.memory.slab import SHM_DIRECTORY
from tests.tables import for_each, slow

#: Of those whose cells may be too large for the machine, or for themselves, what they say.
TOO_LARGE = dict.fromkeys(PEERS, "GiB of memory are available") | {"faster-fifo": "does not fit into its ring"}
#: The modules that adapters import when they are used, by the adapters' own.
PACKAGES = {"iceoryx2_slices": "iceoryx2", "queues": "faster_fifo", "pyzmq_sockets": "zmq"}
EACH = [name if name.startswith("shmring") else slow(name) for name in PEERS]
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
        assert [path for path in Path(directory).rglob("*") if not path.is_dir()] == []


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


def maps(group: PeerGroup) -> list[str]:
    """What its processes have mapped."""
    return [line for child in group.children for line in Path(f"/proc/{child.process.pid}/maps").read_text().splitlines()]


def segments(group: PeerGroup) -> set[Path]:
    """What of that is in /dev/shm and still there."""
    there = (line for line in maps(group) if f"{SHM_DIRECTORY}/" in line and not line.endswith("(deleted)"))
    return {Path(line.split(maxsplit=5)[5]) for line in there}


@pytest.mark.parametrize("name", EACH)
def test_checked_messages_arrive_and_nothing_is_left(open_group: Callable[[str], PeerGroup], cell: Cell, name: str) -> None:
    group = open_group(name)
    mapped = set()
    for producers, nbytes, options in CELLS:
        now = msgspec.structs.replace(cell, producers=producers, nbytes=nbytes, **options)
        assert PEERS[name].limits(now) is None
        measurement = group.run(now)
        assert measurement.messages >= now.window
        assert (measurement.latencies_ns > 0).all()
        assert [cost.messages > now.window for cost in measurement.producers] == [True] * producers
        mapped |= segments(group)
        assert not any("bench-spinning-ring" in line for line in maps(group)), "rings are unmapped after a cell"
    group.kill()
    assert [path for path in mapped if path.exists()] == []
    assert traces(group) == []


@pytest.mark.parametrize("name", EACH)
def test_content_that_is_not_what_was_sent_is_noticed_and_nothing_is_left(
    open_group: Callable[[str], PeerGroup], cell: Cell, name: str, spoil: Callable[..., None]
) -> None:
    spoil(10)
    group = open_group(name)
    with pytest.raises(BenchError, match=r"message 10 .* corrupted"):
        group.run(msgspec.structs.replace(cell, producers=PRODUCERS, timed_s=5.0))  # which is over at message 10
    assert traces(group) == []  # of processes that were killed
    for path in Path(cell.directory).rglob("*"):
        if not path.is_dir():
            path.unlink()  # sockets of theirs, which go with the directory of a run


def traces(group: PeerGroup) -> list[str]:
    """What has the name of what its processes shared: segments, directories, processes that a package has started."""
    own = getattr(group._shared, "own", None)
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


@pytest.mark.parametrize("name", [name for name in PEERS if PEERS[name].requires in (None, "pyzmq")])
def test_a_consumer_that_nobody_sends_to_gives_up(cell: Cell, name: str) -> None:
    peer, context = PEERS[name], get_context("spawn")
    if (reason := peer.missing()) is not None:
        pytest.skip(reason)
    ours, control = context.Pipe()
    shared = peer.create_shared(context, 1)
    try:
        with ours, control:
            part = Part(peer, shared, 0, context.RawArray("q", 2))
            outcome = play_cell(functools.partial(consume, part), control, msgspec.structs.replace(cell, limit_s=0.1))
    finally:
        peer.close_shared(shared)
    assert isinstance(outcome, BenchError)
    assert outcome.message == "it took longer than 0.1 s"


def test_busy_polling_ends_say_what_they_take_when_nothing_comes(
    open_group: Callable[[str], PeerGroup], cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shmring_ring, "_IDLE_S", 0.3)
    group = open_group("shmring-busy-poll")
    measurement = group.run(msgspec.structs.replace(cell, window=1))
    for cost in (*measurement.consumer, *measurement.producers):
        assert cost.idle_share is not None
        assert 0 < cost.idle_share < 0.5  # of a core; one that looked all the time would take it
    assert group.run(cell).producers[0].idle_share is None  # of a larger window


@for_each("name", TOO_LARGE)
def test_what_does_not_fit_is_said_beforehand(cell: Cell, name: str) -> None:
    assert PEERS[name].limits(cell) is None
    assert TOO_LARGE[name] in (PEERS[name].limits(msgspec.structs.replace(cell, nbytes=1 << 40)) or "")


def test_segments_that_nobody_has_read_are_removed() -> None:
    peer, context = PEERS["shared-memory"], get_context("spawn")
    shared = peer.create_shared(context, 1)
    try:
        segment = SharedMemory(f"{shared.own}-0-7", create=True, size=1)
        segment.close()
        assert (SHM_DIRECTORY / segment.name).exists()
    finally:
        peer.close_shared(shared)
    assert not (SHM_DIRECTORY / segment.name).exists()


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    for peer in PEERS.values():
        assert peer.missing() == (None if peer.requires is None else f"not installed: pip install {peer.requires}")
    assert {peer.requires for peer in PEERS.values()} == {None, "faster-fifo", "iceoryx2", "pyzmq"}


@for_each("module_name", PACKAGES)
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
