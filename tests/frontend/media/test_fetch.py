"""URLs of media: data URLs come out as their bytes, files and other hosts where they are allowed, and everything else is a
MediaError that says why. What hosts can do is tested with the network, what URLs of theirs can be with the URLs."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import socket
import threading
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmring.frontend.media import fetch
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fetch import Fetcher, FetchSettings, LocalDirectory, MediaKind, decode_base64, decode_data_url
from tests.tables import for_each

LIMIT = 1 << 20
KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")


def in_base64(data: bytes, header: str = "image/png;base64") -> str:
    return f"data:{header},{base64.b64encode(data).decode('ascii')}"


@given(st.binary(max_size=3000))
def test_percent_encoding_comes_out_as_it_went_in(data: bytes) -> None:
    assert decode_data_url(f"data:image/png,{urllib.parse.quote_from_bytes(data)}", LIMIT) == data


@for_each("size", [11, 12, 13, 23, 24, 25, 36])
def test_pieces_are_joined(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(fetch, "_PIECE_CHARACTERS", 16)
    data = bytes(range(size))
    assert decode_data_url(in_base64(data), LIMIT) == data


def test_padding_between_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_PIECE_CHARACTERS", 16)
    padded = base64.b64encode(b"eleven char").decode()
    assert len(padded) == 16
    with pytest.raises(MediaError, match="padding before its end"):
        decode_data_url(f"data:image/png;base64,{padded}{padded}", LIMIT)


def test_base64_may_have_lines() -> None:
    """As ``base64 FILE`` and MIME write it."""
    data = bytes(range(256)) * 3
    assert decode_data_url("data:image/png;base64," + base64.encodebytes(data).decode(), LIMIT) == data
    assert decode_base64(base64.encodebytes(data).decode().replace("\n", "\r\n"), LIMIT) == data


@given(st.binary(max_size=3000))
@example(b"\xfb\xef\xbe")  # of nothing but "-"
@example(b"\xff\xff\xff")  # of nothing but "_"
def test_base64_may_be_that_of_urls_and_without_padding(data: bytes) -> None:
    for text in (base64.urlsafe_b64encode(data).decode(), base64.b64encode(data).decode()):
        for spelled in (text, text.rstrip("=")):
            assert decode_base64(spelled, LIMIT) == data
            assert decode_data_url(f"data:image/png;base64,{spelled}", LIMIT) == data


def test_base64_may_be_percent_encoded() -> None:
    data = b"\xfb\xff\xfe?>"
    text = urllib.parse.quote(base64.b64encode(data).decode("ascii"), safe="")
    assert "%2B" in text or "%2F" in text
    assert decode_data_url(f"data:image/png;base64,{text}", LIMIT) == data


@for_each(
    "header",
    [
        *("image/png;base64", "IMAGE/JPEG;BASE64", ";base64", "image/svg+xml;charset=utf-8;base64"),
        "application/octet-stream;base64",
    ],
)
def test_headers_that_are_accepted(header: str) -> None:
    url = in_base64(b"some bytes", header)
    assert decode_data_url(url, LIMIT) == decode_data_url(f"DATA{url[4:]}", LIMIT) == b"some bytes"


BASE64 = "data:image/png;base64,"
DAMAGED_URLS = {
    "only data: URLs are accepted": [
        *("http://127.0.0.1/a.png", "https://example.org/a.png", "file:///etc/passwd", "", "data", "a.png"),
    ],
    "no comma": ["data:image/png;base64", "data:image/png;base64" + " " * 2000 + ",QUJD"],
    "text/html": ["data:text/html;base64,QUJD"],
    "text/image/png": ["data:text/image/png;base64,QUJD"],
    "where image/... is expected": ["data:image/;base64,QUJD"],
    "video/mp4": ["data:video/mp4;base64,QUJD"],
    "not valid base64": [f"{BASE64}{text}" for text in ("QUJDR", "QU JD", "QUI=QUJD", "=QUJ", "QUJ\u00e9", "QUJ*")],
    "'%' without": [f"{BASE64}QUJ%4", "data:image/png,%zz", "data:image/png,abc%"],
    "ASCII": ["data:image/png,caf\u00e9"],
    "more than the 100": [f"{BASE64}{'!' * 1000}", f"data:image/png,{'!' * 1000}"],  # also if its characters are wrong
}


@pytest.mark.parametrize(("url", "reason"), [(url, reason) for reason, urls in DAMAGED_URLS.items() for url in urls])
def test_damaged_urls_are_refused(url: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        decode_data_url(url, 100)


@pytest.mark.parametrize("text", ["QUJDR", "QU JD", "QUJD%3D", "QUJ\u00e9", "data:audio/wav;base64,QUJD", "!" * 1000])
def test_damaged_base64_by_itself_is_refused(text: str) -> None:
    reasons = {"d": "only the base64 after its comma", "!": "more than the 100"}
    with pytest.raises(MediaError, match=reasons.get(text[0], "the data is not valid base64")):
        decode_base64(text, 100)


def test_the_limit_itself_is_accepted() -> None:
    assert len(decode_data_url(in_base64(bytes(99)), 99)) == 99
    assert len(decode_data_url("data:,%00%00%00", 3)) == 3


ACCEPTED = {
    "image": ["image/png", "IMAGE/GIF"],
    "audio": ["audio/wav", "Audio/x-m4a", "video/mp4", "application/ogg"],
    "video": ["video/mp4", "VIDEO/webm", "image/gif", "application/ogg"],
}
TYPES = ["image/png", "image/gif", "audio/wav", "video/mp4", "application/ogg", "application/json", "text/plain"]


@for_each("kind", KINDS)
def test_types_fit_the_kind(kind: MediaKind) -> None:
    for media_type in ["", "application/octet-stream", "Application/Octet-Stream", *ACCEPTED[kind]]:
        assert decode_data_url(in_base64(b"x", f"{media_type};base64"), LIMIT, kind) == b"x"
    for media_type in set(TYPES) - set(map(str.lower, ACCEPTED[kind])):
        with pytest.raises(MediaError, match=f"of type '{media_type}', where {kind}/... is expected"):
            decode_data_url(in_base64(b"x", f"{media_type};base64"), LIMIT, kind)


# -- settings -----------------------------------------------------------------------------------------------------------


@for_each(
    ("settings", "reason"),
    [
        ({"allowed_media_domains": ("https://example.org",)}, "^allowed_media_domains: 'https://example.org' is not a host"),
        ({"allowed_media_domains": ("*",)}, "^allowed_media_domains: "),
        ({"allowed_media_networks": ("10.0.0.0/33",)}, "^allowed_media_networks: '10.0.0.0/33'"),
        ({"fetch_timeout_s": 0}, "^fetch_timeout_s must be positive"),
        ({"fetch_timeout_s": float("nan")}, "^fetch_timeout_s must be positive"),
        ({"max_redirects": -1}, "^max_redirects must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FetchSettings(**settings)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="media") as threads:
        yield threads


@pytest.fixture
async def open_fetcher(pool: ThreadPoolExecutor) -> AsyncIterator[Callable[..., Fetcher]]:
    """``open_fetcher(resolver=None, **settings)``"""
    fetchers: list[Fetcher] = []

    def open_fetcher(resolver: Any = None, **settings: Any) -> Fetcher:
        fetchers.append(Fetcher(FetchSettings(**settings), pool, resolver=resolver))
        return fetchers[-1]

    yield open_fetcher
    for fetcher in fetchers:
        await fetcher.close()


# -- fetching -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_data_urls_are_decoded_on_the_pool(open_fetcher: Any, kind: MediaKind, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return decode_data_url(*arguments)

    monkeypatch.setattr(fetch, "decode_data_url", watched)
    assert await open_fetcher().fetch(in_base64(b"x", f"{kind}/x;base64"), kind, LIMIT) == b"x"
    assert threads == ["media_0"]
    with pytest.raises(MediaError, match="is expected"):
        await open_fetcher().fetch(in_base64(b"x", "text/plain;base64"), kind, LIMIT)
    with pytest.raises(MediaError, match="more than the 100"):
        await open_fetcher().fetch(in_base64(bytes(103)), kind="image", max_nbytes=100)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        *(("http://127.0.0.1/a.png", "http"), ("HTTPS://example.org/a.png", "https"), ("file:///etc/passwd", "file")),
        *(("ftp://example.org/a.png", "ftp"), ("s3://bucket/a.png", "s3"), ("blob:https://example.org/1", "blob")),
        *((url, "") for url in ("a.png", "/etc/passwd", "", " data:,x", "x" * 100_000 + ":")),
    ],
)
async def test_by_default_nothing_else_is_accepted(open_fetcher: Any, url: str, scheme: str) -> None:
    with pytest.raises(MediaError) as caught:
        await open_fetcher().fetch(url, "image", LIMIT)
    problem = f"{scheme}: URLs are not accepted" if scheme else "this is not a URL"
    assert str(caught.value) == f"{problem}; this server takes media from data: URLs only"


async def test_errors_say_what_is_accepted(open_fetcher: Any, tmp_path: Path) -> None:
    both = open_fetcher(allowed_media_domains=("example.org",), allowed_local_media_path=str(tmp_path))
    with pytest.raises(MediaError, match=r"takes media from data:, https:, http:, file: URLs$"):
        await both.fetch("ftp://example.org/", "image", LIMIT)
    with pytest.raises(
        MediaError, match=r"file: URLs are not accepted; this server takes media from data:, https:, http: URLs$"
    ):
        await open_fetcher(allowed_media_domains=("example.org",)).fetch("file:///a", "image", LIMIT)
    with pytest.raises(MediaError, match=r"http: URLs are not accepted; this server takes media from data:, file: URLs$"):
        await open_fetcher(allowed_local_media_path=str(tmp_path)).fetch("http://example.org", "image", LIMIT)


@pytest.mark.both_loops
async def test_hosts_that_are_allowed_are_fetched_from(open_fetcher: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")
        await writer.drain()
        writer.close()

    async def resolve(host: str, port: int) -> Sequence[str]:
        return {"a.media.test": ["127.0.0.1"], "b.media.test": ["10.0.0.1"]}[host]

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        domains, networks = (f"*.media.test:{port}",), ("127.0.0.0/8",)
        fetcher = open_fetcher(resolve, allowed_media_domains=domains, allowed_media_networks=networks)
        assert await fetcher.fetch(f"HTTP://a.media.test:{port}/x", "video", 5) == b"bytes"
        with pytest.raises(MediaError, match="more than the 4"):
            await fetcher.fetch(f"http://a.media.test:{port}/x", "video", 4)
        with pytest.raises(MediaError, match="does not connect to"):
            await fetcher.fetch(f"http://b.media.test:{port}/x", "video", 5)
        strict = open_fetcher(resolve, allowed_media_domains=domains)
        with pytest.raises(MediaError, match="does not connect to"):
            await strict.fetch(f"http://a.media.test:{port}/x", "video", 5)


@pytest.mark.parametrize(
    "url",
    [
        *("http://localhost/", "http://[::1]/", "http://0x7f.1/", "http://127.0.0.1\\@example.org/", "http://example.org:22/"),
        *("http:", "https://example.org/\x00"),
    ],
)
async def test_hostile_urls_reach_nobody(open_fetcher: Any, url: str) -> None:
    """Which ones are, the tests of URLs say."""
    resolved_hosts: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        resolved_hosts.append(host)
        return ["127.0.0.1"]

    fetcher = open_fetcher(resolve, allowed_media_domains=("example.org", "*.example.org"))
    with pytest.raises(MediaError):
        await fetcher.fetch(url, "image", LIMIT)
    assert resolved_hosts == []


# -- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What may be read, beside what may not."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "media-secret").mkdir()
    (tmp_path / "media-secret" / "a.png").write_bytes(b"secret")
    allowed = tmp_path / "media"
    allowed.mkdir()
    (allowed / "a.png").write_bytes(b"a picture")
    (allowed / "sub").mkdir()
    (allowed / "sub" / "caf\u00e9 100%.png").write_bytes(b"another")
    return allowed


@pytest.fixture
def read_file(open_fetcher: Any, directory: Path) -> Callable[..., Awaitable[bytes]]:
    """``await read_file(url, max_nbytes)``, where the directory is allowed."""
    fetcher = open_fetcher(allowed_local_media_path=str(directory))

    async def read(url: str, max_nbytes: int = LIMIT) -> bytes:
        data: bytes = await fetcher.fetch(url, "image", max_nbytes)
        return data

    return read


NO_SUCH_FILE = "names no readable file in the directory"


@for_each("form", ["file://{}", "file://localhost{}", "FILE://LOCALHOST{}", "file:{}"])
async def test_files_of_the_directory_are_read(read_file: Any, directory: Path, form: str) -> None:
    assert await read_file(form.format(directory / "a.png")) == b"a picture"
    assert await read_file(form.format(f"{directory}/sub/caf%C3%A9%20100%25.png")) == b"another"
    assert await read_file(form.format(f"{directory}/.//a.png")) == b"a picture"
    assert await read_file(form.format(f"{directory}/%61.png")) == b"a picture"


async def test_the_directory_may_be_a_link(open_fetcher: Any, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    fetcher = open_fetcher(allowed_local_media_path=str(tmp_path / "link"))
    assert await fetcher.fetch(f"file://{tmp_path}/link/a.png", "image", LIMIT) == b"a picture"
    assert await fetcher.fetch(f"file://{directory}/a.png", "image", LIMIT) == b"a picture"


async def test_all_files_can_be_allowed(open_fetcher: Any, directory: Path) -> None:
    assert await open_fetcher(allowed_local_media_path="/").fetch(f"file://{directory}/a.png", "image", LIMIT) == b"a picture"


async def test_links_that_stay_inside_are_followed(read_file: Any, directory: Path) -> None:
    (directory / "link.png").symlink_to("a.png")
    (directory / "sub" / "up").symlink_to(directory)
    assert await read_file(f"file://{directory}/link.png") == b"a picture"
    assert await read_file(f"file://{directory}/sub/up/a.png") == b"a picture"


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/there-is-no-such-file", "/proc/self/environ", "{outside}/secret.png"),
        *("{outside}/media-secret/a.png", "{outside}/media", "{outside}/media/", "/{outside}/media/a.png"),
        *("{inside}/missing.png", "{inside}/a.png/b", "{inside}/link.png", "{inside}/up/secret.png"),
        *("{inside}/root/etc/passwd", "{inside}/dangling", "{inside}/loop", "{inside}/environ", "{inside}/" + "a" * 300),
    ],
)
async def test_what_is_elsewhere_looks_like_what_is_nowhere(read_file: Any, directory: Path, path: str) -> None:
    for name, place in {"link.png": "../secret.png", "up": "..", "root": "/", "loop": "loop"}.items():
        (directory / name).symlink_to(place)
    (directory / "dangling").symlink_to("/there-is-no-such-file")
    (directory / "environ").symlink_to("/proc/self/environ")
    with pytest.raises(MediaError, match=NO_SUCH_FILE) as caught:
        await read_file("file://" + path.format(outside=directory.parent, inside=directory))
    assert len(str(caught.value)) < 200


AMBIGUOUS_PATHS = {
    "'..'": [
        *("file://{}/../secret.png", "file://{}/%2e%2e/secret.png", "file://{}/.%2E/secret.png"),
        *("file://{}%2f..%2fsecret.png", "file://{}/sub/../a.png"),
    ],
    "null character": ["file://{}/a.png%00.jpg"],
    "'%'": ["file://{}/a.png%0", "file://{}/a.png%zz"],
    "not of the form file:///path": [
        *("file://{}/a.png?x", "file://{}/a.png#x", "file://{}/a b.png", "file://{}/..\\secret.png", "file://{}/a.png\n"),
        *("file:", "file://", "file:a.png", "file://example.org{}/a.png", "file://127.0.0.1{}/a.png"),
        "file://localhost:80{}/a.png",
    ],
    "beyond ASCII": ["file://{}/caf\u00e9.png", "file://{}/\udcff.png"],
    "at most": ["file://{}/" + "a" * 20_000],
}


@pytest.mark.parametrize(("url", "reason"), [(url, reason) for reason, urls in AMBIGUOUS_PATHS.items() for url in urls])
async def test_ambiguous_paths_are_refused(read_file: Any, directory: Path, url: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        await read_file(url.format(directory))


async def test_only_regular_files_are_read(read_file: Any, directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    (directory / "directory").mkdir()
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        here = os.getcwd()
        os.chdir(directory)  # the address has to be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        for name in ("fifo", "directory", "socket"):
            with pytest.raises(MediaError, match="not a regular file"):
                await read_file(f"file://{directory}/{name}")


async def test_devices_are_not_opened(open_fetcher: Any) -> None:
    with pytest.raises(MediaError, match="not a regular file"):
        await open_fetcher(allowed_local_media_path="/dev").fetch("file:///dev/zero", "image", LIMIT)


def test_a_file_nobody_may_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "a.png").chmod(0)
    if os.access(directory / "a.png", os.R_OK):  # root may: let the kernel's answer be played
        really_open = os.open

        def deny(path: Any, flags: int, *arguments: Any) -> int:
            if not flags & os.O_PATH:
                raise PermissionError(errno.EACCES, "Permission denied")
            return really_open(path, flags, *arguments)

        monkeypatch.setattr(os, "open", deny)
    with pytest.raises(MediaError, match=NO_SUCH_FILE):
        LocalDirectory(str(directory)).read(f"file://{directory}/a.png", LIMIT)


def test_what_is_the_server_s_fault_is_not_the_caller_s(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    local = LocalDirectory(str(directory))
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="Too many"):
        local.read(f"file://{directory}/a.png", LIMIT)


def test_a_file_that_is_swapped_while_it_is_looked_at(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_stat = os.stat

    def swap(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        status = really_stat(path, *arguments, **options)
        if str(path).startswith("/proc/self/fd/"):
            (directory / "a.png").unlink()
            (directory / "a.png").symlink_to("../secret.png")
        return status

    local = LocalDirectory(str(directory))
    monkeypatch.setattr(os, "stat", swap)
    assert local.read(f"file://{directory}/a.png", LIMIT) == b"a picture"


@pytest.mark.parametrize("change", [b"a picture that grows", b"a pic"])
def test_a_file_that_changes_while_it_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch, change: bytes) -> None:
    really_stat = os.stat

    def write(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        status = really_stat(path, *arguments, **options)
        if str(path).startswith("/proc/self/fd/"):
            (directory / "a.png").write_bytes(change)
        return status

    local = LocalDirectory(str(directory))
    monkeypatch.setattr(os, "stat", write)
    with pytest.raises(MediaError, match="changed while it was read"):
        local.read(f"file://{directory}/a.png", LIMIT)


async def test_large_files_are_refused_unread(read_file: Any, directory: Path) -> None:
    os.truncate(directory / "a.png", 1 << 40)
    with pytest.raises(MediaError, match="has 1099511627776 bytes, more than the 1048576"):
        await read_file(f"file://{directory}/a.png")
    os.truncate(directory / "a.png", 100)
    assert len(await read_file(f"file://{directory}/a.png", 100)) == 100


async def test_no_descriptor_is_left_open(read_file: Any, directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    await read_file(f"file://{directory}/a.png")
    for name in ("fifo", "missing"):
        with pytest.raises(MediaError):
            await read_file(f"file://{directory}/{name}")
    with pytest.raises(MediaError):
        await read_file(f"file://{directory}/a.png", 1)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["missing", "media/a.png"])
def test_the_directory_must_be_one(directory: Path, pool: ThreadPoolExecutor, name: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_local_media_path: .* is not a directory"):
        Fetcher(FetchSettings(allowed_local_media_path=str(directory.parent / name)), pool)
