"""URLs of media: data URLs come out as their bytes, and everything else is a MediaError that says why."""

from __future__ import annotations

import base64
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.media import fetch
from frontend.media.errors import MediaError
from frontend.media.fetch import decode_data_url

LIMIT = 1 << 20


def in_base64(data: bytes, header: str = "image/png;base64") -> str:
    return f"data:{header},{base64.b64encode(data).decode('ascii')}"


@given(st.binary(max_size=3000))
def test_base64_comes_out_as_it_went_in(data: bytes) -> None:
    assert decode_data_url(in_base64(data), LIMIT) == data


@given(st.binary(max_size=3000))
def test_percent_encoding_comes_out_as_it_went_in(data: bytes) -> None:
    assert decode_data_url(f"data:image/png,{urllib.parse.quote_from_bytes(data)}", LIMIT) == data


@pytest.mark.parametrize("size", [11, 12, 13, 23, 24, 25, 36])
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


def test_base64_may_be_percent_encoded() -> None:
    data = b"\xfb\xff\xfe?>"
    text = urllib.parse.quote(base64.b64encode(data).decode("ascii"), safe="")
    assert "%2B" in text or "%2F" in text
    assert decode_data_url(f"data:image/png;base64,{text}", LIMIT) == data


@pytest.mark.parametrize(
    "header",
    [
        "image/png;base64",
        "IMAGE/JPEG;BASE64",
        ";base64",
        "image/svg+xml;charset=utf-8;base64",
        "application/octet-stream;base64",
    ],
)
def test_headers_that_are_accepted(header: str) -> None:
    assert decode_data_url(in_base64(b"some bytes", header), LIMIT) == b"some bytes"


def test_the_scheme_s_case_does_not_matter() -> None:
    assert decode_data_url(f"DATA:{in_base64(b'x')[5:]}", LIMIT) == b"x"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "https://example.org/a.png", "file:///etc/passwd", "", "data", "a.png"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaError, match="only data: URLs are accepted"):
        decode_data_url(url, LIMIT)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64" + " " * 2000 + ",QUJD", "no comma"),
        ("data:text/html;base64,QUJD", "text/html"),
        ("data:video/mp4;base64,QUJD", "video/mp4"),
        ("data:image/png;base64,QUJ", "base64"),
        ("data:image/png;base64,QU JD", "base64"),
        ("data:image/png;base64,QUJD\n", "base64"),
        ("data:image/png;base64,QUI=QUJD", "base64"),
        ("data:image/png;base64,=QUJ", "base64"),
        ("data:image/png;base64,QUJ\u00e9", "base64"),
        ("data:image/png;base64,QUJ-", "base64"),
        ("data:image/png;base64,QUJ%4", "%"),
        ("data:image/png,%zz", "%"),
        ("data:image/png,abc%", "%"),
        ("data:image/png,caf\u00e9", "ASCII"),
    ],
)
def test_damaged_urls_are_refused(url: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        decode_data_url(url, LIMIT)


@pytest.mark.parametrize("header", ["data:image/png;base64,", "data:image/png,"])
def test_too_large_is_refused_before_decoding(header: str) -> None:
    with pytest.raises(MediaError, match="more than the 100"):
        decode_data_url(header + "!" * 1000, 100)  # decoding it would complain about the characters


def test_the_limit_itself_is_accepted() -> None:
    assert len(decode_data_url(in_base64(bytes(99)), 99)) == 99
    assert len(decode_data_url("data:,%00%00%00", 3)) == 3
