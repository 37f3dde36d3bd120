"""A group of processes: cells run on it again and again, and a failure, a death or silence ends all of it."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.context import SpawnContext
from typing import Any

import msgspec
import pytest

from bench.children import BenchError, play_cell
from bench.groups import Part, PeerGroup, consume
from bench.messages import Cell
from bench.peers import PEERS

SMALL = Cell(nbytes=4096, window=4, warm_up_s=0.02, timed_s=0.05, limit_s=20.0, directory="")
NAME = "shmring"


@pytest.fixture
def cell() -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        yield msgspec.structs.replace(SMALL, directory=directory)


@pytest.mark.slow
def test_a_group_runs_cells_again_and_again_until_one_fails(cell: Cell) -> None:
    cell = msgspec.structs.replace(cell, producers=2)
    with PeerGroup(PEERS[NAME], 2) as group:
        group.start()
        for window in (4, 1):
            measurement = group.run(msgspec.structs.replace(cell, window=window))
            assert measurement.messages > 0
            costs = [*measurement.consumer, *measurement.producers]
            assert len(costs) == 3
            for cost in costs:
                assert cost.messages >= window
                assert cost.cpu_s > 0
                assert cost.resident_nbytes > 10 << 20
                assert cost.stall_ms is not None
            assert all(cost.connect_s is not None for cost in measurement.producers)
        with pytest.raises(BenchError, match=r"the consumer failed: KeyError: 'nonsense'") as caught:
            group.run(msgspec.structs.replace(cell, dtype="nonsense"))
        assert PEERS[NAME].title in str(caught.value)
        assert not any(child.process.is_alive() for child in group.children)
        with pytest.raises(BenchError, match="were ended after a failure"):
            group.run(cell)


@pytest.mark.slow
def test_a_process_that_dies_is_an_error(cell: Cell) -> None:
    with PeerGroup(PEERS[NAME]) as group:
        group.start()
        group.children[0].process.kill()
        with pytest.raises(BenchError, match="the consumer has died with exit code -9"):
            group.run(cell)
        assert not any(child.process.is_alive() for child in group.children)


def test_a_cell_that_takes_too_long_is_an_error(cell: Cell) -> None:
    control, ours = multiprocessing.Pipe()
    with control, ours:
        outcome = play_cell(functools.partial(consume, Part(PEERS[NAME])), control, msgspec.structs.replace(cell, limit_s=0.05))
    assert isinstance(outcome, BenchError)
    assert outcome.message == "it took longer than 0.05 s"  # no producer ever came


def test_what_can_not_be_made_for_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: SpawnContext, producers: int) -> Any:
        raise ValueError(f"not for {producers}")

    monkeypatch.setattr(PEERS[NAME], "create_shared", refuse)
    with pytest.raises(BenchError, match="ValueError: not for 3"):
        PeerGroup(PEERS[NAME], 3)
