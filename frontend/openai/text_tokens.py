"""Which tokens of an answer are those of its text.

The engine says how likely a token was as soon as there is the token. Its text may come later, if it could have become something
else, and tokens of reasoning, of calls and of the marks around these have no text at all. So tokens wait here, and a text takes
those that have its bytes, one after the other.

Invariant: a text that comes as it is made, without marks, takes all tokens, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shmring.engine.protocol import TokenLogprobs

__all__ = ["TextTokens"]


class _Match(msgspec.Struct):
    """Where a text stands in what waits: which tokens, the end exclusive, and what of the last one is behind it."""

    start: int
    end: int
    rest: bytes


class TextTokens:
    """The tokens of one answer that wait for their text."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, TokenLogprobs | None]] = []  # what is left of each; None: it was told

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Takes the tokens that come next."""
        self._waiting += [(token.token, token) for token in tokens]

    def drop(self) -> None:
        """No text is made of those that wait."""
        self._waiting.clear()

    def take(self, text: str) -> list[TokenLogprobs]:
        """Returns the tokens of the text that comes next; all that wait, if they do not make it."""
        if not text or not self._waiting:
            return []
        match = self._find(text.encode()) or _Match(0, len(self._waiting), b"")
        taken = [token for _, token in self._waiting[match.start : match.end] if token is not None]
        self._waiting[: match.end] = [(match.rest, None)] if match.rest else []
        return taken

    def _find(self, text: bytes) -> _Match | None:
        """Returns the place where a text ends with the last token, as most do, or the first place."""
        first: _Match | None = None
        for start in range(len(self._waiting)):
            match = self._match(text, start)
            if match is not None and match.end == len(self._waiting) and not match.rest:
                return match
            first = first or match
        return first

    def _match(self, text: bytes, start: int) -> _Match | None:
        place = 0
        for index in range(start, len(self._waiting)):
            token, _ = self._waiting[index]
            if index == start and not text.startswith(token):
                token = token.lstrip()  # a decoder has taken the space, or what reads calls
                if not token:
                    return None
            left = len(text) - place
            if len(token) >= left:
                return _Match(start, index + 1, token[left:]) if token.startswith(text[place:]) else None
            if not text.startswith(token, place):
                return None
            place += len(token)
        return None
