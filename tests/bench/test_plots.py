"""The README's plot: drawn if there is what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plots
from bench.messages import Case
from bench.transport import Stored

SIZES = (4 << 10, 1 << 20, 64 << 20)
PEERS = ("shmring", "shmring-in-place", "iceoryx2", "pyzmq", "inline-msgpack")


@pytest.fixture
def found() -> list[Stored]:
    return [
        Stored(Case(nbytes, window=window), name, 1e9 / nbytes / (1 + place), 10.0 * (1 + place), 1.0)
        for place, name in enumerate(PEERS)
        for nbytes in SIZES
        for window in (16, 1)
    ]


def test_the_readmes_plot_shows_both_sizes_and_each_way(tmp_path: Path, found: list[Stored]) -> None:
    assert plots.draw_overview(found, None, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    for shown in ("tensors of 1 MB", "tensors of 64 MB", "shmring", "vLLM: zmq (direct_rpc)"):
        assert f">{shown}<" in text
    assert ">iceoryx2<" not in text
    assert not plots.draw_overview([one for one in found if one.case.nbytes < 64 << 20], None, tmp_path / "y.svg")


def test_the_same_results_give_the_same_file(tmp_path: Path, found: list[Stored]) -> None:
    for name in ("x.svg", "y.svg"):
        plots.draw_overview(found, None, tmp_path / name)
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "y.svg").read_bytes()
