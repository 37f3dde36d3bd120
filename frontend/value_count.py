"""How many values a JSON body has, counted while its bytes come and before anything is decoded.

A body of 16 MB may be one long text, which is decoded in milliseconds, or five million empty lists, which take seconds and a
gigabyte: what decoding costs depends on how many values there are. msgspec looks at the length of a list only when all of it
has been decoded, and holds the interpreter meanwhile, so a thread would not help the others either.

A value stands before a comma, or is the first one in brackets or braces; so commas and openings outside of strings are counted.
Names of fields are strings, too, and there is at most one beside each value.
"""

from __future__ import annotations

import re

__all__ = ["MAX_VALUES", "ValueCount"]

#: Of a body. The largest one of use has 4096 parts with media, which take four values each. So many of the most costly kinds
#: are decoded in some 5 ms.
MAX_VALUES = 32_768

_MAX_STRINGS = 2 * MAX_VALUES + 16  # a name and a text for each value; more are no JSON, but would be counted all the same

# Possessive: what a string may hold is never looked at twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class ValueCount:
    """Counts, piece by piece."""

    def __init__(self) -> None:
        self._values = 1
        self._strings = 0
        self._begun = b""  # how the string begins in whose midst the last piece ended

    def add(self, piece: bytes) -> bool:
        """Counts the next piece; returns whether there are no more values than :data:`MAX_VALUES` so far."""
        if self._begun and b'"' not in piece:  # the midst of a long text, or of a file in base64
            outside, strings = self._begun + piece, 0
        else:
            outside, strings = _STRING.subn(b"", self._begun + piece)
        outside, quote, unfinished = outside.partition(b'"')
        is_in_escape = (len(unfinished) - len(unfinished.rstrip(b"\\"))) % 2
        self._begun = quote + b"\\" * is_in_escape
        self._strings += strings
        self._values += sum(map(outside.count, (b",", b"[", b"{")))
        return self._values <= MAX_VALUES and self._strings <= _MAX_STRINGS
