"""Texts at which an answer ends, found while it is being written.

A stop text may begin in one token and end in a later one. So text that could be its beginning is held back until the next
tokens decide. So text that was given out is never taken back, and no part of a stop text is given out.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopTexts"]

# OpenAI's API takes 4 of them. Each is searched for at every token, so there is a limit.
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1024


class StopTexts:
    """Looks for stop texts in one answer.

    Args:
        stops: the texts.

    Raises:
        ValueError: one of them is empty or too long, or there are too many.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > _MAX_STOPS:
            raise ValueError(f"there are {len(stops)} stop texts, at most {_MAX_STOPS} are taken")
        for stop in stops:
            if not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop text has 1 to {_MAX_STOP_CHARACTERS} characters, got one of {len(stop)}")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the text that was written next.

        Returns:
            The text that can be given out, and whether a stop text was found. The stop text and the rest are dropped, and no
            more text may be pushed.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, start = min(matches)  # the first that is complete, however the text is cut into pieces
            return text[:start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Returns the text that was held back; the answer has ended in another way."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns how many of the last characters of ``text`` are the first of ``stop``, which is not in ``text``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
