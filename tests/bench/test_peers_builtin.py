"""The peers that are a package away at most: each moves checked messages, gives up when told to, and leaves nothing.

Both ends run here, each on a thread with a loop of its own: what is between them is what is between processes, and a cell takes
a fraction of a second. In processes of their own they run in ``test_transport.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.children import Failed, play_cell
from bench.messages import Cell, Measurement
from bench.peers import PEERS, shmring_ring
from bench.processes import Part, consume, produce
from shmring.memory.slab import SHM_DIRECTORY
from tests.tables import for_each

BOUNDED = ("pyzmq", "shared-memory", "spinning-ring", "spinning-arena", "multiprocessing-queue")
OWN = ("shmring", "shmring-in-place", "shmring-busy-poll", "inline-msgpack", "torch-queue")
NAMES = (*OWN, *BOUNDED)
SIZES = (4 << 10, 1 << 20)
SMALL = Cell(nbytes=4 << 10, window=4, warm_up_s=0.01, timed_s=0.03, limit_s=20.0, directory="")
LISTENING_S = 10.0  # for a consumer to listen, on a machine that does much else


@pytest.fixture
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield msgspec.structs.replace(SMALL, directory=directory)
        assert list(Path(directory).glob("*.sock")) == []


@contextlib.contextmanager
def parts(name: str, producers: int) -> Iterator[Part]:
    """Yields what the ends of a peer share; skips the test where its package is missing."""
    peer, context = PEERS[name], get_context("spawn")
    if (reason := peer.missing()) is not None:
        pytest.skip(reason)
    shared = peer.create_shared(context, producers)
    try:
        yield Part(peer, shared, 0, context.RawArray("q", 2))
    finally:
        peer.close_shared(shared)


def run(name: str, cell: Cell) -> list[Any]:
    """Plays all parts of a cell, and returns their outcomes: the consumer's, and then those of the producers."""
    with parts(name, cell.producers) as part, ThreadPoolExecutor(1 + cell.producers) as ends, contextlib.ExitStack() as stack:
        controls = []
        for _ in range(1 + cell.producers):
            ours, theirs = (stack.enter_context(end) for end in get_context("spawn").Pipe())
            controls.append((ours, theirs))
        outcomes = [ends.submit(play_cell, functools.partial(consume, part), controls[0][1], cell)]
        assert controls[0][0].poll(LISTENING_S), "the consumer does not listen"
        for producer, (_, control) in enumerate(controls[1:]):
            role = dataclasses.replace(part, number=producer)
            outcomes.append(ends.submit(play_cell, functools.partial(produce, role), control, cell))
        if isinstance(outcomes[0].result(), Failed):
            for ours, _ in controls[1:]:
                ours.close()  # a run would have killed them
        return [outcome.exception() or outcome.result() for outcome in outcomes]


@pytest.mark.parametrize("name", NAMES)
@for_each("nbytes", SIZES)
@for_each(
    ("producers", "options"),
    [(1, {"dtype": "float32", "window": 1}), (2, {"dtype": "bfloat16"}), (2, {"dtype": "uint8"})],
)
def test_checked_messages_arrive(cell: Cell, name: str, producers: int, options: dict[str, Any], nbytes: int) -> None:
    cell = msgspec.structs.replace(cell, nbytes=nbytes, producers=producers, **options)
    outcome, *others = run(name, cell)
    assert not [end for end in (outcome, *others) if isinstance(end, Failed | BaseException)]
    measurement: Measurement = outcome
    assert measurement.messages >= cell.window
    assert all(cost.messages > 2 * cell.window for cost in others)
    assert (measurement.latencies_ns > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_content_that_is_not_what_was_sent_is_noticed(cell: Cell, name: str, spoil: Callable[..., None]) -> None:
    spoil(20)
    outcome, _ = run(name, msgspec.structs.replace(cell, timed_s=5.0))  # which is over at message 20
    assert isinstance(outcome, Failed)
    assert "message 20" in outcome.error
    assert "corrupted" in outcome.error


@pytest.mark.parametrize("name", NAMES)
def test_a_consumer_that_nobody_sends_to_gives_up(cell: Cell, name: str) -> None:
    ours, control = get_context("spawn").Pipe()
    with parts(name, 1) as part, ours, control:
        outcome = play_cell(functools.partial(consume, part), control, msgspec.structs.replace(cell, limit_s=0.1))
    assert outcome == Failed("it took longer than 0.1 s")


def test_busy_polling_ends_say_what_they_take_when_nothing_comes(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shmring_ring, "_IDLE_S", 0.3)
    outcome, producer = run("shmring-busy-poll", msgspec.structs.replace(cell, window=1))
    for cost in (*outcome.consumer, producer):
        assert 0 < cost.idle_share < 0.5  # of a core, by both ends, which are one process here; they would take two
    assert run("shmring-busy-poll", cell)[1].idle_share is None  # of a larger window


@pytest.mark.parametrize("name", BOUNDED)
def test_what_does_not_fit_is_said_beforehand(cell: Cell, name: str) -> None:
    assert PEERS[name].limits(cell) is None
    reason = PEERS[name].limits(msgspec.structs.replace(cell, nbytes=1 << 40))
    assert reason is not None
    assert "GiB" in reason


def test_rings_are_unmapped_after_a_cell(cell: Cell) -> None:
    for name in ("spinning-ring", "spinning-arena"):
        run(name, cell)
    assert "bench-spinning-ring" not in Path("/proc/self/maps").read_text()


def test_segments_that_nobody_has_read_are_removed() -> None:
    with parts("shared-memory", 1) as part:
        segment = SharedMemory(f"{part.shared.own}-0-7", create=True, size=1)
        segment.close()
        assert (SHM_DIRECTORY / segment.name).exists()
    assert not (SHM_DIRECTORY / segment.name).exists()


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert PEERS["pyzmq"].missing() == "not installed: pip install pyzmq"
    assert [PEERS[name].missing() for name in BOUNDED[1:]] == [None] * 4  # the standard library
