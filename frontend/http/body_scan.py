"""Scans a JSON body while its bytes come and before anything is decoded: counts its values, and cuts out its long texts.

A body of 16 MB may be one long text, which is decoded in milliseconds, or five million empty lists, which take seconds and a
gigabyte: the cost of decoding depends on the number of values. msgspec checks the length of a list only when all of it has been
decoded, and holds the interpreter meanwhile, so a thread would not help other requests. So values are counted: one stands
before each comma, and one is the first in brackets or braces, outside of strings.

A long text should be a file in base64. It is cut out: a short text, which begins in the same way, takes its place in the body,
and its bytes wait beside it (:attr:`BodyScan.long_texts`) until a thread decodes the file. So the rest of a body is decoded in
a few milliseconds, even with a large file. A long text that is no file is refused.

The scan only knows the grammar of strings; the decoder reports all other errors of a body. If strings are short, the scan takes
longer than decoding. So in a body in which no text can be long, all commas and brackets are counted first, also those in
strings, in a thirtieth of the time. As long as that many values would be accepted, there is no scan. In a body with fewer bytes
than values are accepted, nothing is counted.
"""

from __future__ import annotations

import re
import secrets

from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["LONG_NBYTES", "MAX_VALUES", "BodyScan", "has_too_many_values", "is_cut", "too_many_values"]

#: Of a body. The largest one of use has 4096 parts with media, which take four values each. So many of the most costly kinds
#: are decoded in some 5 ms.
MAX_VALUES = 32_768

#: From this length on, a text is cut out or refused. A text of 1 MiB has a quarter of a million tokens.
LONG_NBYTES = 1 << 20

_MAX_STRINGS = 2 * MAX_VALUES + 16  # a name and a text for each value; more are no JSON, but would still be counted

# Possessive: no part of a string is scanned twice. Where a string does not end, a search for one would begin anew at each
# quote in it; so the search is among those that end.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'  # of a string, behind its first quote
_REST_OF_STRING = re.compile(_REST, re.DOTALL)
_STRING = re.compile(b'"' + _REST, re.DOTALL)
_ALL_THAT_END = re.compile(b'[^"]*+(?:"' + _REST + b'[^"]*+)*+', re.DOTALL)
_BEGINNING = re.compile(rb"[A-Za-z0-9+/=:;,.-]{0,64}")  # of a text, that stands in its place: a data: URL's type is in it

# A caller can't guess it; and in a caller's own text it has no effect.
_MARK = f"...cut-{secrets.token_hex(16)}-"


def is_cut(text: str) -> bool:
    """Whether a text stands in the place of a long one."""
    return _MARK in text[:128]


def has_too_many_values(json: bytes) -> bool:
    """Whether a whole text of JSON has more values than a body may have."""
    if len(json) < MAX_VALUES or _count_values(json) < MAX_VALUES:
        return False
    outside, _, _ = _without_strings(json)
    return _count_values(outside) >= MAX_VALUES


class BodyScan:
    """Looks through one body, piece by piece.

    Args:
        nbytes: that it will have, if that is known; a body that is large enough for a long text is looked through at once.

    Attributes:
        long_texts: the texts that were cut out, by the texts in their place.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.long_texts: dict[str, bytearray] = {}
        # The body so far, as long as it can't have too many values.
        self._unread: bytearray | None = bytearray() if nbytes <= LONG_NBYTES else None
        self._at_most = 1  # values in it
        self._values = 1
        self._strings = 0
        self._text: bytearray | None = None  # of the string in the middle of which the last piece ended
        self._held = b""  # a backslash that ended it

    def add(self, piece: bytes) -> bytes:
        """Takes the next piece; returns the rest of it, and of earlier pieces that were kept, without long texts.

        Raises:
            ApiError: 413, there are too many values, or a text is too long.
        """
        if self._unread is not None:
            before = len(self._unread)
            self._unread += piece
            if len(self._unread) < MAX_VALUES:  # so it can't have more of them
                return b""
            self._at_most += _count_values(piece if before >= MAX_VALUES else self._unread)
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
            raise too_many_values()
        if ended < len(piece):  # there a string begins
            self._text = bytearray()
            self._continue(self._text, piece[ended + 1 :])
            piece = piece[: ended + 1]
        return ending + piece

    def finish(self) -> bytes | bytearray:
        """The body is over; returns the rest of it."""
        return self._end_text() if self._unread is None else self._unread

    def _end_text(self) -> bytes:
        """The string is over; returns the text that stays in the body."""
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
        """Some write slashes with a backslash, and base64 in lines. A text with other escapes is no file."""
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
    """Returns the bytes outside of strings, how many strings end, and where an unended string begins, or the end of the
    bytes."""
    if b"\\" in json:
        end = _ALL_THAT_END.match(json).end()  # type: ignore[union-attr]  # it matches whatever comes, if nothing of it
        return *_STRING.subn(b"", json[:end]), end
    parts = json.split(b'"')
    end = len(json) if len(parts) % 2 else len(json) - len(parts.pop()) - 1
    return b"".join(parts[::2]), len(parts) // 2, end


def _count_values(json: bytes | bytearray) -> int:
    """Returns how many values are behind commas, or the first in brackets or braces."""
    return sum(map(json.count, (b",", b"[", b"{")))


def too_many_values() -> ApiError:
    """Returns the error for a body that has too many values."""
    message = f"the request's body has more than the {MAX_VALUES} values that are accepted"
    return ApiError(ErrorCode.TOO_MANY_VALUES, message)


def _too_long() -> ApiError:
    message = f"a text in the request's body has more than the {LONG_NBYTES} bytes that are accepted; only files may, in base64"
    return ApiError(ErrorCode.TEXT_TOO_LONG, message)
