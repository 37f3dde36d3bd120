"""Texts at which an answer ends, found while it is being written.

A stop text may begin in one token and end in a later one. So text that could be its beginning is held back until the next
tokens decide. So text that was given out is never taken back, and no part of a stop text is given out.

Text is held back for one stop text, and others begin later in it, or do not. Of each is remembered where it may begin: no
character is looked at again that can't be.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopTexts"]

# OpenAI's API takes 4 of them. Each is searched for at every token: 16 of the longest take 20 us.
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1024


class StopTexts:
    """Looks for stop texts in one answer.

    Args:
        stops: the texts.

    Attributes:
        found: the stop text that has ended the answer; None: none has.

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
        self.found: str | None = None
        self._held = ""
        self._begun = [0] * len(stops)  # how many of the last characters are the beginning of each

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the text that was written next.

        Returns:
            The text that can be given out, and whether a stop text was found. The stop text and the rest are dropped, and no
            more text may be pushed.
        """
        if not self._stops:
            return text, False
        before, text = len(self._held), self._held + text
        matches = []
        for number, stop in enumerate(self._stops):
            looked = before - self._begun[number]
            if (start := text.find(stop, looked)) >= 0:
                matches.append((start + len(stop), start, stop))
            self._begun[number] = len(text) - _find_beginning(text, stop, max(looked, len(text) - len(stop) + 1))
        if matches:
            self._held = ""
            _, start, self.found = min(matches)  # the first that is complete, however the text is cut into pieces
            return text[:start], True
        given = len(text) - max(self._begun, default=0)
        self._held = text[given:]
        return text[:given], False

    def flush(self) -> str:
        """Returns the text that was held back; the answer has ended in another way."""
        held, self._held = self._held, ""
        return held


def _find_beginning(text: str, stop: str, start: int) -> int:
    """Returns where the end of ``text``, from a place on, begins to be the beginning of ``stop``; the end if nowhere."""
    while not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
        if start < 0:
            return len(text)
    return start
