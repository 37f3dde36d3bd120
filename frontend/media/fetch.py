"""From the URL of a medium to its bytes: ``data:`` URLs always, other hosts and local files where the operator allows it.

URLs are checked strictly: text that a lenient reader would skip is more likely a caller's mistake, or an attack. By default
nothing is fetched from anywhere. What other hosts may do to us is bounded in :mod:`shmring.frontend.media.network`; what
remains here are ``data:`` URLs (RFC 2397), base64 by itself, and files.

Files are looked up once, without opening them (``O_PATH``): only if the file is a regular one, and its real place is below the
allowed directory, it is opened, through ``/proc/self/fd``. So neither a symbolic link that changes meanwhile nor a FIFO or a
device can be opened by naming it. The operator is responsible for hard links and mounts inside of the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import io
import os
import re
import ssl
import stat
import urllib.parse
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Annotated

import pybase64

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.network import RemoteClient, Resolver, parse_networks
from shmring.frontend.media.options import MediaKind
from shmring.frontend.media.urls import FORBIDDEN_CHARACTERS, AllowedHosts
from shmring.service.flags import NO_OPTION, Flag

__all__ = ["FetchSettings", "Fetcher", "LocalDirectory", "decode_base64", "decode_data_url"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE | re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """From where media may come, besides ``data:`` URLs. By default from nowhere.

    Attributes:
        allowed_media_domains: Hosts that media are fetched from: a.org, *.b.org, c.org:9000; several with commas, or in several
            such options. Empty: none.

            ``*.b.org`` is every name below it. Without a port, both 80 and 443 are meant.
        allowed_media_networks: Private networks that these hosts may be in: 10.1.0.0/16. Empty: none.

            Their names must be among the domains all the same.
        allowed_local_media_path: A directory whose files may be read by file: URLs. None: none.

            Only regular files are read.
        fetch_timeout_s: Seconds for fetching one medium.

            Redirects and waiting for its turn are included.
        max_redirects: of one fetch. Object stores and mirrors use one or two.

    Raises:
        ValueError: one of them is not what it should be; says which.
    """

    allowed_media_domains: Annotated[tuple[str, ...], Flag(parse=_split, metavar="HOSTS")] = ()
    allowed_media_networks: Annotated[tuple[str, ...], Flag(parse=_split, metavar="CIDRS")] = ()
    allowed_local_media_path: Annotated[str | None, Flag(path="directory")] = None
    fetch_timeout_s: Annotated[float, Flag(names=("--media-fetch-timeout",))] = 30.0
    max_redirects: Annotated[int, NO_OPTION] = 3

    def __post_init__(self) -> None:
        for name, parse in (("allowed_media_domains", AllowedHosts), ("allowed_media_networks", parse_networks)):
            try:
                parse(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not self.fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, not {self.fetch_timeout_s}")
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects must not be negative, not {self.max_redirects}")


def _split(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


class Fetcher:
    """Gets media by their URLs. One for a process; close it with :meth:`close`.

    Args:
        settings: from where they may come.
        pool: threads to decode and to read files on.
        resolver: from a host's name to its addresses; the system's if None.
        ssl_context: how hosts of ``https:`` URLs must prove who they are; certificates of the usual authorities if None.

    Raises:
        ValueError: ``allowed_local_media_path`` is not a directory.
    """

    def __init__(
        self,
        settings: FetchSettings,
        pool: Executor,
        *,
        resolver: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._pool = pool
        path = settings.allowed_local_media_path
        self._directory = None if path is None else LocalDirectory(path)
        self._remote: RemoteClient | None = None
        if settings.allowed_media_domains:
            self._remote = RemoteClient(
                AllowedHosts(settings.allowed_media_domains),
                parse_networks(settings.allowed_media_networks),
                timeout_s=settings.fetch_timeout_s,
                max_redirects=settings.max_redirects,
                resolver=resolver,
                ssl_context=ssl_context,
            )

    async def fetch(self, url: str | bytes | bytearray, kind: MediaKind, max_nbytes: int) -> bytes:
        """Returns the bytes of a medium. Whether they are one is for its decoder to say.

        Args:
            url: ``data:``, or what the settings allow of ``https:``, ``http:`` and ``file:``. A long one is in bytes.
            kind: what is expected; it matters for the types of ``data:`` URLs only.
            max_nbytes: refused above, and before anything is decoded or read where its size is known by then.

        Raises:
            MediaError: the URL, its host or its file is to blame; the text is for the caller.
        """
        loop = asyncio.get_running_loop()
        if url[:5].lower() in ("data:", b"data:"):
            return await loop.run_in_executor(self._pool, decode_data_url, url, max_nbytes, kind)
        if not isinstance(url, str):
            url = url.decode("utf-8", "replace")
        match = _SCHEME.match(url)
        scheme = match[1].lower() if match else ""
        if scheme in ("http", "https") and self._remote is not None:
            return await self._remote.get(url, max_nbytes)
        if scheme == "file" and self._directory is not None:
            return await loop.run_in_executor(self._pool, self._directory.read, url, max_nbytes)
        problem = f"{scheme}: URLs are not accepted" if scheme else "this is not a URL"
        raise MediaError(f"{problem}; {self._accepted()}")

    async def close(self) -> None:
        """Closes all connections; fetches that are under way fail."""
        if self._remote is not None:
            await self._remote.close()

    def _accepted(self) -> str:
        schemes = ["data:"]
        if self._remote is not None:
            schemes += ["https:", "http:"]
        if self._directory is not None:
            schemes.append("file:")
        return f"this server takes media from {', '.join(schemes)} URLs" + (" only" if len(schemes) == 1 else "")


# -- data: --------------------------------------------------------------------------------------------------------------

# The decoder holds the interpreter lock: for a piece, well below a millisecond, also on processors whose vectors it can't use.
# What malloc would map for larger pieces costs more than decoding them.
_PIECE_CHARACTERS = 256 << 10
_MAX_HEADER_CHARACTERS = 1024  # of "data:image/png;charset=...;base64": before the comma

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_OF_URLS = bytes.maketrans(b"-_", b"+/")

# A container is often called by what it can hold and not by what it does: sound comes as video/mp4, a clip as image/gif.
_EXPECTED_TYPES: dict[MediaKind, re.Pattern[str]] = {
    "image": re.compile(r"image/[\w.+-]+", re.ASCII | re.IGNORECASE),
    "audio": re.compile(r"(?:audio|video)/[\w.+-]+|application/ogg", re.ASCII | re.IGNORECASE),
    "video": re.compile(r"video/[\w.+-]+|application/ogg|image/gif", re.ASCII | re.IGNORECASE),
}
_UNTYPED = ("", "application/octet-stream")


def decode_data_url(url: str | bytes | bytearray, max_nbytes: int, kind: MediaKind = "image") -> bytes:
    """Returns the bytes of a ``data:`` URL. Takes a while: call it on a thread.

    Args:
        url: base64 or percent-encoded, of a type that fits the kind, of ``application/octet-stream`` or of none.
        max_nbytes: refused above, before anything is decoded.
        kind: what it is meant to be.

    Raises:
        MediaError: it is another kind of URL, too large, or damaged.
    """
    text = _bytes_of(url)
    if text[:5].lower() != b"data:":
        raise MediaError("only data: URLs are accepted")
    comma = text.find(b",", 5, _MAX_HEADER_CHARACTERS)
    if comma < 0:
        raise MediaError("the data: URL has no comma that ends its header")
    media_type, *parameters = text[5:comma].decode("utf-8", "replace").split(";")
    media_type = media_type.strip()
    if media_type.lower() not in _UNTYPED and not _EXPECTED_TYPES[kind].fullmatch(media_type):
        raise MediaError(f"the data: URL is of type {media_type[:64]!r}, where {kind}/... is expected")
    if parameters and parameters[-1].strip().lower() == "base64":
        start = comma + 1
        if text.find(b"%", start) >= 0:  # URLs may spell "+", "/" and "=" that way
            text, start = _unquote(text[start:], "the data: URL"), 0
        return _decode_base64(text, start, max_nbytes, "the data: URL")
    return _decode_percent(text, comma + 1, max_nbytes)


def decode_base64(text: str | bytes | bytearray, max_nbytes: int) -> bytes:
    """Returns the bytes of a medium that comes as base64 and not as a URL. Takes a while: call it on a thread.

    Args:
        text: base64, and nothing else but ends of lines. It may be that of URLs ("-" and "_"), and without padding.
        max_nbytes: refused above, before anything is decoded.

    Raises:
        MediaError: it is too large, or damaged.
    """
    data = _bytes_of(text)
    if data[:5].lower() == b"data:":
        raise MediaError("the data is a data: URL; only the base64 after its comma is accepted here")
    return _decode_base64(data, 0, max_nbytes, "the data")


def _bytes_of(text: str | bytes | bytearray) -> bytes | bytearray:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _decode_base64(text: bytes | bytearray, start: int, max_nbytes: int, name: str) -> bytes:
    if (len(text) - start) // 4 * 3 <= max_nbytes:
        with contextlib.suppress(MediaError):  # nearly all are like this; to look for the rest first would take as long
            return _decode_pieces(text, start, name, of_urls=False)
    if text.find(b"\n", start) >= 0:  # lines, as tools write it
        text, start = text[start:].replace(b"\n", b"").replace(b"\r", b""), 0
    _check_size((len(text) - start) // 4 * 3, max_nbytes, name)
    of_urls = text.find(b"-", start) >= 0 or text.find(b"_", start) >= 0
    return _decode_pieces(text, start, name, of_urls=of_urls)


def _decode_pieces(text: bytes | bytearray, start: int, name: str, *, of_urls: bool) -> bytes:
    data = io.BytesIO()  # it grows in place, and what is read from it in the end is not copied
    view = memoryview(text)
    for offset in range(start, len(text), _PIECE_CHARACTERS):
        characters: bytes | memoryview = view[offset : offset + _PIECE_CHARACTERS]
        if of_urls or len(characters) % 4:
            characters = bytes(characters).translate(_OF_URLS) + b"=" * (-len(characters) % 4)
        try:
            piece = pybase64.b64decode(characters, validate=True)
        except ValueError:  # binascii.Error is one
            raise MediaError(f"{name} is not valid base64: other characters than its 64, or cut off") from None
        if offset + _PIECE_CHARACTERS < len(text) and len(piece) < _PIECE_CHARACTERS // 4 * 3:
            raise MediaError(f"{name} is not valid base64: padding before its end")
        data.write(piece)
    return data.getvalue()


def _decode_percent(url: bytes | bytearray, start: int, max_nbytes: int) -> bytes:
    escapes = url.count(b"%", start)
    _check_size(len(url) - start - 2 * escapes, max_nbytes, "the data: URL")
    return _unquote(url[start:], "the data: URL")


def _unquote(text: bytes | bytearray, name: str) -> bytes:
    if _BAD_ESCAPE.search(text):
        raise MediaError(f"{name} is not valid: '%' without two hexadecimal digits")
    if not text.isascii():
        raise MediaError(f"{name} is not valid: it has characters beyond ASCII")
    return urllib.parse.unquote_to_bytes(text)


def _check_size(nbytes: int, max_nbytes: int, name: str) -> None:
    if nbytes > max_nbytes:
        raise MediaError(f"{name} holds about {nbytes} bytes, more than the {max_nbytes} that are accepted")


# -- file: --------------------------------------------------------------------------------------------------------------

_FILE_URL = re.compile(r"file:(?://(?:localhost)?|(?!//))(/[^?#]*)", re.IGNORECASE | re.ASCII)
_MAX_FILE_URL_CHARACTERS = 3 * 4096 + 64  # Linux takes paths of 4096 bytes; each can be spelled as %xx

# One answer for all of these, so that callers can't find out which files exist outside of the directory.
_NO_SUCH_FILE = "the file: URL names no readable file in the directory that this server takes media from"
_CALLERS_FAULT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG})


class LocalDirectory:
    """The directory whose files may be read.

    Args:
        path: of the directory; it may be a symbolic link.

    Raises:
        ValueError: it is not a directory.
    """

    def __init__(self, path: str) -> None:
        self._named = os.path.abspath(os.fsencode(path))
        self._real = os.path.realpath(self._named)
        if not os.path.isdir(self._real):
            raise ValueError(f"allowed_local_media_path: {path!r} is not a directory")

    def read(self, url: str, max_nbytes: int) -> bytes:
        """Returns the bytes of a file. Takes a while: call it on a thread.

        Args:
            url: ``file:///path``, absolute and percent-encoded.
            max_nbytes: refused above, before it is read.

        Raises:
            MediaError: it names no file that may be read, or one that is too large.
        """
        path = _path_of(url)
        if not (_is_below(path, self._named) or _is_below(path, self._real)):
            raise MediaError(_NO_SUCH_FILE)
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                return self._read_place(f"/proc/self/fd/{place}", max_nbytes)
            finally:
                os.close(place)
        except OSError as error:
            if error.errno not in _CALLERS_FAULT:
                raise
            raise MediaError(_NO_SUCH_FILE) from None

    def _read_place(self, path: str, max_nbytes: int) -> bytes:
        """Reads what a descriptor refers to, if it may be read."""
        if not _is_below(os.fsencode(os.readlink(path)), self._real):
            raise MediaError(_NO_SUCH_FILE)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("the file: URL names something that is not a regular file")
        if status.st_size > max_nbytes:
            raise MediaError(f"the file has {status.st_size} bytes, more than the {max_nbytes} that are accepted")
        # Without O_NONBLOCK, somebody who has a lease on the file (fcntl) could keep this thread for 45 s.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(status.st_size + 1)
        if len(data) != status.st_size:
            raise MediaError("the file changed while it was read")
        return data


def _path_of(url: str) -> bytes:
    if len(url) > _MAX_FILE_URL_CHARACTERS:
        raise MediaError(f"the file: URL has {len(url)} characters; at most {_MAX_FILE_URL_CHARACTERS} are accepted")
    match = _FILE_URL.fullmatch(url)
    if match is None or FORBIDDEN_CHARACTERS.search(url):
        raise MediaError("the file: URL is not of the form file:///path, with special characters percent-encoded")
    path = _unquote(match[1].encode("utf-8", "surrogatepass"), "the file: URL")
    if b"\0" in path or b".." in path.split(b"/"):
        raise MediaError("the file: URL has '..' or a null character in its path")
    return path


def _is_below(path: bytes, directory: bytes) -> bool:
    return path.startswith(directory.rstrip(b"/") + b"/")
