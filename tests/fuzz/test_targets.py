"""The targets of ``make fuzz`` under hypothesis: honest inputs, and honest ones that were damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.core.compiled import EngineEnd
from tests.fuzz import hostile_engine, mutate, targets
from tests.model.engine_book import EngineBook as ModelEngineBook
from tests.tables import for_each


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


def test_whatever_is_compiled_is_fuzzed_under_the_sanitizers() -> None:
    in_python = {"frames", "bodies", "requests", "addresses", "media-headers"}
    assert sorted((*mutate.PARSERS, *mutate.BEHIND)) == sorted(targets.TARGETS.keys() - in_python)


def test_the_honest_sessions_reach_the_books() -> None:
    """Were they refused at the door, the fuzzer would have to guess a whole session."""
    ends: list[EngineEnd] = []
    claimed: list[object] = []

    class Watched(EngineEnd):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            ends.append(self)

        def claim_next(self) -> Any:
            claim = super().claim_next()
            if claim is not None:
                claimed.append(claim)
            return claim

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "EngineEnd", Watched)
        for seed in targets.SEEDS["books"]:
            targets.books(seed)
    assert [(end.submitted, end.finished) for end in ends] == [(1, 1)] * 3
    assert len(claimed) == 3


def test_the_honest_scripts_reach_what_a_client_can_do() -> None:
    """Were they refused, or nobody answered, hostile engines would lie to nobody."""
    statistics: list[Any] = []
    ended: list[bool] = []

    class Watched(hostile_engine.Callers):
        def leave(self) -> None:
            statistics.append(self.client.statistics())
            ended.extend(map(ended_well, self.tasks))
            super().leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostile_engine, "Callers", Watched)
        for seed in targets.SEEDS["attached-engines"]:
            targets.TARGETS["attached-engines"](seed)
    assert sum(each.finished for each in statistics) >= 5
    assert sum(each.replies for each in statistics) >= 6
    assert sum(each.kept_hits for each in statistics) >= 2
    assert sum(ended) >= 12


def ended_well(task: Any) -> bool:
    return not task.cancelled() and task.exception() is None


@for_each("event", ["submit", "claim", "release_slots", "end", "abort", "request_lease", "keep"])
def test_a_book_that_does_not_what_its_model_does_is_noticed(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelEngineBook, event, lambda *_: [])
    with pytest.raises(AssertionError, match="the model"):
        any(map(targets.books, targets.SEEDS["books"]))


def test_honest_contents_are_decoded_and_not_refused() -> None:
    decoded: list[object] = []
    decode = targets.decode_content

    def watched(*arguments: Any) -> Any:
        result = decode(*arguments)
        decoded.append(result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "decode_content", watched)
        for seed in targets.SEEDS["payloads"]:
            targets.payloads(seed)
    assert len(decoded) > 2 * len(targets.SEEDS["payloads"])  # of three decoders, one of which is typed
