"""An answer ends before its first stop text, however it comes in pieces, and nothing of that text gets out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.engine.executors.stopping import StopTexts
from tests.tables import for_each

TEXTS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


def read(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Returns what was let go after each piece, and the stop text that was found."""
    texts, let_go = StopTexts(stops), []
    for piece in pieces:
        text, stopped = texts.push(piece)
        let_go.append(text)
        assert stopped == (texts.found is not None)
        if stopped:
            return let_go, texts.found
    let_go.append(texts.flush())
    return let_go, None


def end_of(text: str, stops: list[str]) -> int | None:
    """Returns where an answer ends that is read character by character."""
    for length in range(1, len(text) + 1):
        starts = [length - len(stop) for stop in stops if text[:length].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(TEXTS, STOPS, st.lists(st.integers(0, 30)))
def test_pieces_make_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    let_go, found = read(stops, pieces)
    end = end_of(text, stops)
    assert (found is not None) == (end is not None)
    assert "".join(let_go) == text[:end]
    assert found is None or (found in stops and text[end:].startswith(found))


@given(TEXTS, STOPS)
def test_nothing_is_held_back_that_can_no_longer_be_a_stop(text: str, stops: list[str]) -> None:
    let_go, found = read(stops, list(text))
    if found is None:
        held = let_go[-1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stop_texts_everything_goes_at_once() -> None:
    assert read([], ["a", "b"]) == (["a", "b", ""], None)


def test_a_stop_over_several_pieces_is_held_back_until_it_is_found() -> None:
    assert read(["###END"], ["Hi #", "##E", "ND more"]) == (["Hi ", "", ""], "###END")


def test_what_turns_out_not_to_be_a_stop_is_let_go() -> None:
    assert read(["###END"], ["Hi #", "##E", "nd"]) == (["Hi ", "", "###End", ""], None)


def test_a_beginning_at_the_end_of_the_answer_is_let_go() -> None:
    assert read(["END"], ["the EN"]) == (["the ", "EN"], None)


def test_of_two_stop_texts_the_first_that_is_complete_is_told() -> None:
    assert read(["c", "ab"], ["xabc"]) == (["x"], "ab")
    assert read(["abc", "b"], ["abc"]) == (["a"], "b")


@for_each("stops", [[""], ["ok", ""], ["x" * 1025], ["a"] * 17], ids=["empty", "one-empty", "long", "many"])
def test_stop_texts_that_can_not_be_looked_for_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop text"):
        StopTexts(stops)


class Counting(str):
    """A stop text that counts how often it is compared."""

    compared = 0

    def startswith(self, *arguments: Any) -> bool:
        Counting.compared += 1
        return super().startswith(*arguments)


def test_no_character_is_looked_at_again_that_can_not_begin_a_stop() -> None:
    """Others may hold text back in which a stop text could have begun at every character, and did not."""
    stops = ["a" * 1000 + "b", *(Counting("a" + letter * 1000) for letter in "cdef")]
    Counting.compared = 0
    let_go, _ = read(stops, ["aaa"] * 300)
    assert let_go[-1] == "a" * 900
    assert Counting.compared <= 4 * (900 + 300)
