"""A JSON body, looked through while its bytes come and before anything is decoded: how many values it has, and its long texts.

A body of 16 MB may be one long text, which is decoded in milliseconds, or five million empty lists, which take seconds and a
gigabyte: what decoding costs depends on how many values there are. msgspec looks at the length of a list only when all of it
has been decoded, and holds the interpreter meanwhile, so a thread would not help the others either. So values are counted: one
stands before each comma, and one is the first in brackets or braces, outside of strings.

What is long is a file in base64. It is cut out: in the body stands a short text in its place, which begins as it does, and its
bytes wait beside it (:attr:`BodyScan.long_texts`) until a thread makes the file of them. So what is left of a body is decoded
in a few milliseconds, however large the file. A text that is as long and no file is refused.

What is looked through is the grammar of strings, and nothing else: whatever else is wrong with a body, its decoder says. That
takes longer than decoding, where strings are short. So of a body in which no text can be long, commas and brackets are counted
first, those in strings as well, in a thirtieth of the time; as long as that many values would be accepted, nothing is looked
through.
"""

from __future__ import annotations

import re
import secrets

from shmring.frontend.errors import ApiError

__all__ = ["LONG_NBYTES", "MAX_VALUES", "BodyScan", "is_cut"]

#: Of a body. The largest one of use has 4096 parts with media, which take four values each. So many of the most costly kinds
#: are decoded in some 5 ms.
MAX_VALUES = 32_768

#: From which a text is cut out, or refused. A text of 1 MiB has a quarter of a million tokens.
LONG_NBYTES = 1 << 20

_MAX_STRINGS = 2 * MAX_VALUES + 16  # a name and a text for each value; more are no JSON, but would be counted all the same

# Possessive: what a string may hold is never looked at twice. Where a string does not end, a search for one would begin anew at
# each quote in it; so the search is among those that end.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'  # of a string, behind its first quote
_REST_OF_STRING = re.compile(_REST, re.DOTALL)
_STRING = re.compile(b'"' + _REST, re.DOTALL)
_ALL_THAT_END = re.compile(b'[^"]*+(?:"' + _REST + b'[^"]*+)*+', re.DOTALL)
_BEGINNING = re.compile(rb"[A-Za-z0-9+/=:;,.-]{0,64}")  # of a text, that stands in its place: a data: URL's type is in it

# In no text that a caller sends, unless it was told to him; and then it stands for nothing.
_MARK = f"...cut-{secrets.token_hex(16)}-"


def is_cut(text: str) -> bool:
    """Whether a text stands in the place of a long one."""
    return _MARK in text[:128]


class BodyScan:
    """Looks through one body, piece by piece.

    Args:
        nbytes: that it will have, if that is known; a body that is large enough for a long text is looked through at once.

    Attributes:
        long_texts: what was cut out, by what stands in its place.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.long_texts: dict[str, bytearray] = {}
        # All that came, while nothing of it can be too much.
        self._unread: bytearray | None = bytearray() if nbytes <= LONG_NBYTES else None
        self._at_most = 1  # values in it
        self._values = 1
        self._strings = 0
        self._text: bytearray | None = None  # of the string in whose midst the last piece ended
        self._held = b""  # a backslash that ended it

    def add(self, piece: bytes) -> bytes:
        """Takes the next piece; returns what is left of it, and of those before that were kept.

        Raises:
            ApiError: 413, there are too many values, or a text is too long.
        """
        if self._unread is not None:
            self._unread += piece
            self._at_most += _count_values(piece)
            if len(self._unread) <= LONG_NBYTES and self._at_most <= MAX_VALUES:
                return b""
            piece, self._unread = bytes(self._unread), None
        ending = b""
        if self._text is not None:
            piece = self._held + piece
            end = _end_of_string(piece)
            if end < 0:
                self._continue(self._text, piece)
                return b""
            self._continue(self._text, piece[:end])
            ending = self._end_text() + b'"'
            piece = piece[end + 1 :]
        outside, strings, ended = _without_strings(piece)
        self._strings += strings
        self._values += _count_values(outside)
        if self._values > MAX_VALUES or self._strings > _MAX_STRINGS:
            message = f"the request's body has more than the {MAX_VALUES} values that are accepted"
            raise ApiError(413, message, code="too_many_values")
        if ended < len(piece):  # there a string begins
            self._text = bytearray()
            self._continue(self._text, piece[ended + 1 :])
            piece = piece[: ended + 1]
        return ending + piece

    def finish(self) -> bytes | bytearray:
        """The body is over; returns what is left of it."""
        return self._end_text() if self._unread is None else self._unread

    def _end_text(self) -> bytes:
        """The string that was begun is over; returns what is left of it."""
        text, held, self._text, self._held = self._text, self._held, None, b""
        if text is None:
            return b""
        if len(text) <= LONG_NBYTES:
            return bytes(text + held)
        begins = _BEGINNING.match(text)
        assert begins is not None
        name = f"{begins[0].decode()}{_MARK}{len(self.long_texts)}"
        self.long_texts[name] = text
        return name.encode()

    def _continue(self, text: bytearray, piece: bytes) -> None:
        ends_in_escape = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._held = b"\\" * ends_in_escape
        text += piece[: len(piece) - ends_in_escape]
        if len(text) <= LONG_NBYTES:
            return
        first = len(text) - len(piece) <= LONG_NBYTES
        if b"\\" in (text if first else piece):
            self._unescape(text, 0 if first else len(text) - len(piece))
        if b" " in (text if first else piece):
            raise _too_long()

    @staticmethod
    def _unescape(text: bytearray, start: int) -> None:
        """Some write slashes with a backslash, and base64 in lines. Whatever else has escapes is no file."""
        plain = bytes(text[start:]).replace(b"\\/", b"/").replace(b"\\r", b"").replace(b"\\n", b"")
        if b"\\" in plain:
            raise _too_long()
        text[start:] = plain


def _end_of_string(json: bytes) -> int:
    """Returns where the quote is that ends a string that was begun, or -1."""
    quote = json.find(b'"')
    if quote < 0 or json.find(b"\\", 0, quote) < 0:
        return quote
    rest = _REST_OF_STRING.match(json)
    return -1 if rest is None else rest.end() - 1


def _without_strings(json: bytes) -> tuple[bytes, int, int]:
    """Returns what is outside of strings, how many end, and where one begins that does not, or all ends."""
    if b"\\" in json:
        end = _ALL_THAT_END.match(json).end()  # type: ignore[union-attr]  # it matches whatever comes, if nothing of it
        return *_STRING.subn(b"", json[:end]), end
    parts = json.split(b'"')
    end = len(json) if len(parts) % 2 else len(json) - len(parts.pop()) - 1
    return b"".join(parts[::2]), len(parts) // 2, end


def _count_values(json: bytes) -> int:
    """Returns how many values are behind commas, or the first in brackets or braces."""
    return sum(map(json.count, (b",", b"[", b"{")))


def _too_long() -> ApiError:
    message = f"a text in the request's body has more than the {LONG_NBYTES} bytes that are accepted; only files may, in base64"
    return ApiError(413, message, code="text_too_long")
