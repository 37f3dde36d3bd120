"""The targets of ``make fuzz`` under hypothesis: honest inputs, and honest ones that were damaged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st


def load() -> ModuleType:
    """``run.py`` imports it as a neighbour, and is no package."""
    spec = importlib.util.spec_from_file_location("fuzz_targets", Path(__file__).parent / "targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


targets = load()


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """An honest input with pieces replaced, dropped or repeated."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 16)))
        data = data[:start] + draw(st.binary(max_size=16) | st.just(data[start:end] * 2)) + data[end:]
    return data


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_keeps_its_promise(name: str) -> None:
    for seed in targets.SEEDS[name]:
        targets.TARGETS[name](seed)

    @given(damaged(targets.SEEDS[name]) | st.binary(max_size=64))
    def check(data: bytes) -> None:
        targets.TARGETS[name](data)

    check()


def test_the_honest_sessions_reach_the_books() -> None:
    """Were they refused at the door, the fuzzer would have to guess a whole session."""
    seen: list[str] = []
    book = targets.EngineBook

    class Watched(book):  # type: ignore[misc, valid-type]
        def submit(self, *arguments: object) -> None:
            super().submit(*arguments)
            seen.append("submitted")

        def claim(self, *arguments: object) -> None:
            super().claim(*arguments)
            seen.append("claimed")

        def end(self, *arguments: object) -> bool:
            seen.append("ended")
            return bool(super().end(*arguments))

    targets.EngineBook = Watched
    try:
        for seed in targets.SEEDS["books"]:
            targets.books(seed)
    finally:
        targets.EngineBook = book
    assert seen == ["submitted", "claimed", "ended"] * 2
