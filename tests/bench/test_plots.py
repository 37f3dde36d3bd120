"""Plots: drawn for what there is, with every peer's name in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import plots
from bench.messages import Case
from bench.records import Result

Make = Callable[..., Any]
SIZES = (4 << 10, 1 << 20, 64 << 20)
PEERS = ("shmring", "shmring-in-place", "iceoryx2", "pyzmq", "inline-msgpack")


def drawn(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def found(made_result: Make) -> list[Result]:
    return [
        made_result(name, Case(nbytes, window=window), [1e9 / nbytes / (1 + place)], p50_us=10.0 * (1 + place))
        for place, name in enumerate(PEERS)
        for nbytes in SIZES
        for window in (16, 1)
    ]


def test_there_is_a_plot_for_each_question_that_was_asked(
    tmp_path: Path, made_result: Make, made_results: Make, found: list[Result]
) -> None:
    several = [made_result(name, Case(1 << 20, producers=producers), [100.0]) for name in PEERS for producers in (2, 8)]
    limits = {nbytes: 1e10 / nbytes for nbytes in SIZES}
    paths = plots.draw(made_results([*found, *several], limits), tmp_path / "x", ["svg"])
    assert drawn(tmp_path) == {f"x-{name}.svg" for name in ("throughput", "latency", "scaling", "cpu")}
    assert {path.name for path in paths} == drawn(tmp_path)
    text = (tmp_path / "x-throughput.svg").read_text()
    assert all(f">{name}<" in text for name in PEERS)
    assert "memcpy, cold" in text
    assert "64 MB" in text


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, made_results: Make, found: list[Result]) -> None:
    plots.draw(made_results([result for result in found if result.case.window == 16]), tmp_path / "x", ["svg"])
    assert drawn(tmp_path) == {"x-throughput.svg", "x-cpu.svg"}
    assert plots.draw(made_results([]), tmp_path / "y") == []


def test_the_readmes_plot_shows_both_sizes_and_each_way(tmp_path: Path, made_results: Make, found: list[Result]) -> None:
    plots.draw_overview(made_results(found), tmp_path / "x", ["svg"])
    text = (tmp_path / "x.svg").read_text()
    for shown in ("tensors of 1 MB", "tensors of 64 MB", "shmring", "vLLM: zmq (direct_rpc)"):
        assert f">{shown}<" in text
    assert ">iceoryx2<" not in text
    small = [result for result in found if result.case.nbytes < 64 << 20]
    assert plots.draw_overview(made_results(small), tmp_path / "y", ["svg"]) == []


def test_the_same_results_give_the_same_file(tmp_path: Path, made_results: Make, made_result: Make) -> None:
    results = made_results([made_result("shmring", Case(4096, window=1), [1.0])])
    for name in ("x", "y"):
        plots.draw(results, tmp_path / name)
    assert (tmp_path / "x-latency.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x-latency.svg").read_bytes() == (tmp_path / "y-latency.svg").read_bytes()
