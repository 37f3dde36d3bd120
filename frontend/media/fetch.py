"""From the URL of a medium to its bytes. So far only ``data:`` URLs (RFC 2397): nothing is fetched from anywhere.

What is in them is checked strictly: whatever a lenient decoder would skip is more likely a caller's mistake.
"""

from __future__ import annotations

import binascii
import re
import urllib.parse

from frontend.media.errors import MediaError

__all__ = ["decode_data_url"]

# The decoder holds the interpreter lock: 11 MB at once would stop the event loop for about 20 ms, a piece for 1 ms.
_PIECE_CHARACTERS = 512 << 10
_MAX_HEADER_CHARACTERS = 1024  # of "data:image/png;charset=...;base64": before the comma

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ACCEPTED_TYPES = re.compile(r"(?:image/[\w.+-]+|application/octet-stream)?", re.ASCII | re.IGNORECASE)


def decode_data_url(url: str, max_nbytes: int) -> bytes:
    """Returns the bytes of a ``data:`` URL. Takes a while: call it on a thread.

    Args:
        url: base64 or percent-encoded, of an image type, of ``application/octet-stream`` or of none.
        max_nbytes: refused above, before anything is decoded.

    Raises:
        MediaError: it is another kind of URL, too large, or damaged.
    """
    if url[:5].lower() != "data:":
        raise MediaError("only data: URLs are accepted")
    comma = url.find(",", 5, _MAX_HEADER_CHARACTERS)
    if comma < 0:
        raise MediaError("the data: URL has no comma that ends its header")
    media_type, *parameters = url[5:comma].split(";")
    if not _ACCEPTED_TYPES.fullmatch(media_type.strip()):
        raise MediaError(f"the data: URL is of type {media_type[:64]!r}; pictures are image/...")
    if parameters and parameters[-1].strip().lower() == "base64":
        return _decode_base64(url, comma + 1, max_nbytes)
    return _decode_percent(url, comma + 1, max_nbytes)


def _decode_base64(url: str, start: int, max_nbytes: int) -> bytes:
    if url.find("%", start) >= 0:  # URLs may spell "+", "/" and "=" that way
        url, start = _unquote(url[start:]).decode("latin-1"), 0
    nbytes = (len(url) - start) // 4 * 3
    _check_size(nbytes, max_nbytes)
    pieces = []
    for offset in range(start, len(url), _PIECE_CHARACTERS):
        try:
            piece = binascii.a2b_base64(url[offset : offset + _PIECE_CHARACTERS], strict_mode=True)
        except ValueError as error:  # binascii.Error is one; characters beyond ASCII raise it plainly
            raise MediaError(f"the data: URL is not valid base64: {error}") from None
        if offset + _PIECE_CHARACTERS < len(url) and len(piece) < _PIECE_CHARACTERS // 4 * 3:
            raise MediaError("the data: URL is not valid base64: padding before its end")
        pieces.append(piece)
    return b"".join(pieces)


def _decode_percent(url: str, start: int, max_nbytes: int) -> bytes:
    escapes = url.count("%", start)
    _check_size(len(url) - start - 2 * escapes, max_nbytes)
    return _unquote(url[start:])


def _unquote(text: str) -> bytes:
    if _BAD_ESCAPE.search(text):
        raise MediaError("the data: URL is not valid: '%' without two hexadecimal digits")
    if not text.isascii():
        raise MediaError("the data: URL is not valid: it has characters beyond ASCII")
    return urllib.parse.unquote_to_bytes(text)


def _check_size(nbytes: int, max_nbytes: int) -> None:
    if nbytes > max_nbytes:
        raise MediaError(f"the data: URL holds about {nbytes} bytes, more than the {max_nbytes} that are accepted")
