"""URLs of other hosts: parts come out in normal form, whatever is ambiguous is a MediaError, and hosts are listed or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.urls import AllowedHosts, RemoteUrl, is_address, parse_redirect, parse_url
from tests.tables import for_each


@for_each(
    ("url", "expected"),
    [
        ("http://example.org", RemoteUrl("http", "example.org", 80, "/")),
        ("HTTPS://Example.ORG./A/b?C=d#fragment", RemoteUrl("https", "example.org", 443, "/A/b?C=d")),
        ("https://example.org?x=1", RemoteUrl("https", "example.org", 443, "/?x=1")),
        ("https://example.org/?", RemoteUrl("https", "example.org", 443, "/?")),
        ("http://example.org:8080/a%20b", RemoteUrl("http", "example.org", 8080, "/a%20b")),
        ("http://my_store-1:9000/x", RemoteUrl("http", "my_store-1", 9000, "/x")),
        ("http://b\u00fccher.example/caf\u00e9?\u00fc", RemoteUrl("http", "xn--bcher-kva.example", 80, "/caf%C3%A9?%C3%BC")),
        ('http://example.org/a|b<c>"d', RemoteUrl("http", "example.org", 80, "/a%7Cb%3Cc%3E%22d")),
        ("http://example.org/a@b:c[d]", RemoteUrl("http", "example.org", 80, "/a@b:c[d]")),
        ("http://93.184.216.34/", RemoteUrl("http", "93.184.216.34", 80, "/")),
        ("http://[2001:DB8:0:0::1]:81/", RemoteUrl("http", "2001:db8::1", 81, "/")),
    ],
)
def test_parts_come_out_in_normal_form(url: str, expected: RemoteUrl) -> None:
    assert parse_url(url) == expected


@for_each(
    ("url", "authority"),
    [
        ("http://example.org:80/", "example.org"),
        ("https://example.org:80/", "example.org:80"),
        ("https://[::1]/", "[::1]"),
        ("https://[::1]:9000/", "[::1]:9000"),
    ],
)
def test_the_host_header(url: str, authority: str) -> None:
    assert parse_url(url).authority == authority


HOSTILE_URLS = [
    ("http://2130706433/", "neither a name nor an IPv4 address"),
    ("http://127.1/", "neither a name nor an IPv4 address"),
    ("http://0x7f.1/", "neither a name nor an IPv4 address"),
    ("http://0x7f000001/", "neither a name nor an IPv4 address"),
    ("http://0X7F.0.0.0x1/", "neither a name nor an IPv4 address"),
    ("http://017700000001/", "neither a name nor an IPv4 address"),
    ("http://0177.0.0.1/", "neither a name nor an IPv4 address"),
    ("http://127.0.0.1.0/", "neither a name nor an IPv4 address"),
    ("http://example.0x/", "neither a name nor an IPv4 address"),
    ("http://256.1.1.1/", "neither a name nor an IPv4 address"),
    ("http://[::ffff:127.0.0.1]/", "of an IPv4 address"),
    ("http://[::ffff:7f00:1]/", "of an IPv4 address"),
    ("http://[fe80::1%25eth0]/", "zone"),
    ("http://[fe80::1%eth0]/", "zone"),
    ("http://[::1/", "not a host"),
    ("http://::1/", "not a host"),
    ("http://[]/", "not an IPv6 address"),
    ("http://[127.0.0.1]/", "not an IPv6 address"),
    ("http://[v1.x]/", "not an IPv6 address"),
    ("http://[::1]example.org/", "not a host"),
    ("http://user@example.org/", "user's name"),
    ("http://user:password@example.org/", "user's name"),
    ("http://example.org@127.0.0.1/", "user's name"),
    ("http://@example.org/", "user's name"),
    ("http://127.0.0.1\\@example.org/", "backslash"),
    ("http://example.org\\.evil.test/", "backslash"),
    ("http:\\\\example.org/", "backslash"),
    ("http://example.org/a b", "space"),
    ("http://example.org/\r\nHost:%20evil", "control"),
    ("http://exa\tmple.org/", "control"),
    ("http://example.org/\x00", "control"),
    ("http://example.org/\x7f", "control"),
    ("http://example.org/\u0085", "control"),
    ("http://example.org\u00a0/", "space"),
    (" http://example.org/", "space"),
    ("http://example\u3002org/", "can't be part"),
    ("http://example\uff0eorg/", "can't be part"),
    ("http://\uff11\uff12\uff17.0.0.1/", "can't be part"),
    ("http://\u24d4xample.org/", "can't be part"),
    ("http://fa\u00df.example/", "can't be part"),
    ("http://B\u00dcCHER.example/", "can't be part"),
    ("http://exam\u200dple.org/", "can't be part"),
    ("http://\u212aelvin.example/", "can't be part"),
    ("http://example.org\u2024evil/", "can't be part"),
    ("http://%31%32%37.0.0.1/", "can't be part"),
    ("http://exa%6dple.org/", "can't be part"),
    ("http://example..org/", "can't be part"),
    ("http://example.org../", "can't be part"),
    ("http://.example.org/", "can't be part"),
    ("http://./", "can't be part"),
    ("http://*.example.org/", "can't be part"),
    ("http://example.org,evil.test/", "can't be part"),
    ("http://" + "a" * 64 + ".org/", "can't be part"),
    ("http://" + "a." * 200 + "org/", "at most 253"),
    ("http://" + "\u00fc." * 100 + "org/", "at most 253"),
    ("http:///path", "names no host"),
    ("http://?x", "names no host"),
    ("http://:80/", "names no host"),
    ("http://example.org:/", "not a host"),
    ("http://example.org:0/", "not a port"),
    ("http://example.org:65536/", "not a port"),
    ("http://example.org:99999999/", "not a host"),
    ("http://example.org:+80/", "not a host"),
    ("http://example.org:\u0661/", "not a host"),
    ("http://example.org:80:80/", "not a host"),
    ("http:/example.org/", "not of the form"),
    ("http:example.org", "not of the form"),
    ("//example.org/", "not of the form"),
    ("http", "not of the form"),
    ("", "not of the form"),
    ("ftp://example.org/", "not of the form"),
    ("http\u017f://example.org/", "not of the form"),
    ("gopher://example.org:70/_x", "not of the form"),
    ("http://example.org/\ud800", "Unicode"),
    ("http://example.org/" + "a" * 9000, "at most 8192"),
]


@pytest.mark.parametrize(("url", "reason"), HOSTILE_URLS, ids=[ascii(url)[1:60] for url, _ in HOSTILE_URLS])
def test_ambiguous_urls_are_refused(url: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        parse_url(url)
    assert len(str(caught.value)) < 300
    str(caught.value).encode()  # it can be sent


@given(st.text(max_size=60), st.sampled_from(["", "http://", "https://example.org", "http://[", "https://example.org/"]))
def test_anything_else_is_refused_or_comes_out_in_plain_characters(text: str, start: str) -> None:
    try:
        url = parse_url(start + text)
    except MediaError:
        return
    assert url.scheme in ("http", "https")
    assert 0 < url.port < 65536
    assert url.target.startswith("/")
    assert all("!" <= character <= "~" for character in url.host + url.target)
    assert not set(url.host) & set("/?#@\\%[]")
    assert parse_url(f"{url.scheme}://{url.authority}{url.target}") == url


# -- redirects ----------------------------------------------------------------------------------------------------------


@for_each(
    ("location", "expected"),
    [
        (b"http://other.example/x", RemoteUrl("http", "other.example", 80, "/x")),
        (b"https://other.example/x", RemoteUrl("https", "other.example", 443, "/x")),
        (b"//other.example/x", RemoteUrl("http", "other.example", 80, "/x")),
        (b"/x?y", RemoteUrl("http", "example.org", 8080, "/x?y")),
        (b"x", RemoteUrl("http", "example.org", 8080, "/a/x")),
        (b"../x", RemoteUrl("http", "example.org", 8080, "/x")),
        (b"?y", RemoteUrl("http", "example.org", 8080, "/a/b?y")),
        ("/caf\u00e9".encode(), RemoteUrl("http", "example.org", 8080, "/caf%C3%A9")),
    ],
)
def test_redirects_may_be_relative(location: bytes, expected: RemoteUrl) -> None:
    assert parse_redirect(parse_url("http://example.org:8080/a/b?c"), location) == expected


def test_a_redirect_from_an_address_keeps_its_brackets() -> None:
    assert parse_redirect(parse_url("http://[2001:db8::1]:81/a"), b"b") == RemoteUrl("http", "2001:db8::1", 81, "/b")


@pytest.mark.parametrize(
    "location",
    [
        b"file:///etc/passwd",
        b"data:image/png;base64,AAAA",
        b"gopher://example.org/",
        b"javascript:alert(1)",
        b"http://user@example.org/",
        b"http://127.0.0.1\\@example.org/",
        b"/\\evil.test/",
        b"/a\tb",
        b"http://[::1/",
        b"http://0x7f.1/",
        b"http://\xff/",
        b"http://example.org/" + b"a" * 9000,
    ],
)
def test_redirects_to_anything_else_are_refused(location: bytes) -> None:
    with pytest.raises(MediaError, match="redirects to a URL that is not accepted"):
        parse_redirect(parse_url("http://example.org/a"), location)


def test_a_redirect_does_not_give_up_encryption() -> None:
    with pytest.raises(MediaError, match="from https: to http:"):
        parse_redirect(parse_url("https://example.org/"), b"http://example.org/")


# -- hosts --------------------------------------------------------------------------------------------------------------

HOSTS = AllowedHosts(
    ["Example.ORG.", "*.cdn.example", "store.local:9000", "b\u00fccher.example", "*.ports.example:8443", "10.0.0.5", "[::1]:81"]
)


@for_each(
    "url",
    [
        "http://example.org/",
        "https://EXAMPLE.org./",
        "https://example.org:80/",
        "https://a.cdn.example/",
        "https://a.b.cdn.example/",
        "http://store.local:9000/",
        "https://xn--bcher-kva.example/",
        "https://b\u00fccher.example/",
        "https://a.ports.example:8443/",
        "http://10.0.0.5/",
        "http://[::1]:81/",
        "http://[0:0:0:0:0:0:0:1]:81/",
    ],
)
def test_listed_hosts_are_allowed(url: str) -> None:
    assert parse_url(url) in HOSTS


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "http://www.example.org/",
        "http://evilexample.org/",
        "http://example.org.evil.test/",
        "http://example/",
        "http://org/",
        "http://cdn.example/",
        "http://evilcdn.example/",
        "http://a.cdn.example.evil.test/",
        "http://example.org:8080/",
        "http://example.org:22/",
        "http://store.local/",
        "http://store.local:9001/",
        "https://a.ports.example/",
        "http://localhost/",
        "http://127.0.0.1/",
        "http://10.0.0.6/",
        "http://[::1]/",
    ],
)
def test_hosts_and_ports_that_are_not_listed_are_not_allowed(url: str) -> None:
    assert parse_url(url) not in HOSTS


@for_each(
    "domain",
    [
        *("", "*", "*.", "**.example.org", "a.*.example.org", "https://example.org", "example.org/", "example.org:"),
        *("example.org:http", "example.org:0", "user@example.org", "a b", "0x7f.1", "*.10.0.0.5", "::1", "*.[::1]"),
        "[::ffff:10.0.0.1]",
    ],
)
def test_other_entries_are_refused(domain: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host, host:port or \*\.domain") as caught:
        AllowedHosts([domain])
    assert not isinstance(caught.value, MediaError), "it is the operator's mistake and no caller's"


@for_each(("host", "expected"), [("10.0.0.1", True), ("::1", True), ("example.org", False), ("localhost", False)])
def test_addresses_and_names_are_distinguished(host: str, expected: bool) -> None:
    assert is_address(host) is expected
