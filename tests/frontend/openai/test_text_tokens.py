"""Which tokens are those of an answer's text, however text and tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shmring.engine.protocol import TokenLogprobs
from shmring.frontend.openai.text_tokens import TextTokens
from tests.tables import for_each


def described(*tokens: str | bytes) -> list[TokenLogprobs]:
    return [TokenLogprobs(token if isinstance(token, bytes) else token.encode(), -1.0, []) for token in tokens]


def told(*steps: tuple[Sequence[str | bytes], str]) -> list[list[str]]:
    """What each text of an answer gets: of each step, the tokens that come, and the text."""
    waiting = TextTokens()
    found = []
    for tokens, text in steps:
        waiting.add(described(*tokens))
        found.append([token.token.decode(errors="replace") for token in waiting.take(text)])
    return found


@for_each(
    ("steps", "expected"),
    [
        ([(["It", " rains"], "It rains")], [["It", " rains"]]),
        ([(["It"], "It"), ([" rains"], " rains"), (["<|end|>"], "")], [["It"], [" rains"], []]),
        ([(["It", " rains", "<|end|>"], "It rains")], [["It", " rains"]]),  # the end is no text
        ([(["I", "EN"], "I"), (["T"], "ENT")], [["I"], ["EN", "T"]]),  # held back: it could have become a stop text
        ([(["fooE"], "foo"), (["N"], "EN")], [["fooE"], ["N"]]),  # and in the midst of a token
        ([(["fooE", "ND"], "foo"), (["x"], "x")], [["fooE"], ["x"]]),  # it became one
        ([([b"\xf0\x9f", b"\x99\x82", "!"], "🙂!")], [["\ufffd", "\ufffd\ufffd", "!"]]),
        ([([b"\xf0\x9f"], ""), ([b"\x99\x82"], "🙂")], [[], ["\ufffd", "\ufffd\ufffd"]]),
        ([([" It", " rains"], "It rains")], [[" It", " rains"]]),  # a decoder has taken the first space
        ([(["</", "think", ">", "\n\n", "this"], "this")], [["this"]]),
        ([(["</", "t", "h", "ink>", "t"], "t")], [["t"]]),  # the last one, since a text is let go as soon as it can be
        ([(["t", "h", "ink>", "t", "h", "is", "<|end|>"], "this")], [["t", "h", "is"]]),
        ([([b"\xff", "a"], "\ufffda")], [["\ufffd", "a"]]),  # what is no text is no token's: all that came are told
        ([(["a"], "a"), ([], "b"), (["c"], "c")], [["a"], [], ["c"]]),
    ],
)
def test_a_text_has_its_own_tokens(steps: list[tuple[list[str | bytes], str]], expected: list[list[str]]) -> None:
    assert told(*steps) == expected


@given(st.lists(st.text("abé 🙂", min_size=1), min_size=1), st.data())
def test_a_text_that_comes_as_it_is_made_has_all_tokens(texts: list[str], data: st.DataObject) -> None:
    """However its bytes are cut into tokens."""
    waiting = TextTokens()
    found: list[bytes] = []
    whole: list[bytes] = []
    for text in texts:
        content = text.encode()
        cuts = sorted(data.draw(st.sets(st.integers(1, len(content) - 1)))) if len(content) > 1 else []
        tokens = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        waiting.add(described(*tokens))
        found += [token.token for token in waiting.take(text)]
        whole += tokens
    assert found == whole
