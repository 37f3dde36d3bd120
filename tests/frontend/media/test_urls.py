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
        *(("http://a.org:80/", "a.org"), ("https://a.org:80/", "a.org:80")),
        *(("https://[::1]/", "[::1]"), ("https://[::1]:9000/", "[::1]:9000")),
    ],
)
def test_the_host_header(url: str, authority: str) -> None:
    assert parse_url(url).authority == authority


HOSTILE_URLS = {
    "neither a name nor an IPv4 address": [
        *("http://2130706433/", "http://127.1/", "http://0x7f.1/", "http://0x7f000001/", "http://0/"),
        *("http://0X7F.0.0.0x1/", "http://017700000001/", "http://0177.0.0.1/", "http://127.0.0.1.0/", "http://example.0x/"),
        "http://256.1.1.1/",
    ],
    "of an IPv4 address": ["http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"],
    "zone": ["http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/"],
    "not an IPv6 address": ["http://[]/", "http://[127.0.0.1]/", "http://[v1.x]/"],
    "not a host": [
        *("http://[::1/", "http://::1/", "http://[::1]example.org/", "http://example.org:/", "http://example.org:99999999/"),
        *("http://example.org:+80/", "http://example.org:\u0661/", "http://example.org:80:80/"),
    ],
    "not a port": ["http://example.org:0/", "http://example.org:65536/"],
    "user's name": [
        *("http://user@example.org/", "http://user:password@example.org/", "http://example.org@127.0.0.1/"),
        "http://@example.org/",
    ],
    "backslash": ["http://127.0.0.1\\@example.org/", "http://example.org\\.evil.test/", "http:\\\\example.org/"],
    "space": ["http://example.org/a b", "http://example.org\u00a0/", " http://example.org/"],
    "control": [
        *("http://example.org/\r\nHost:%20evil", "http://exa\tmple.org/", "http://example.org/\x00"),
        *("http://example.org/\x7f", "http://example.org/\u0085"),
    ],
    "can't be part": [
        *("http://example\u3002org/", "http://example\uff0eorg/", "http://\uff11\uff12\uff17.0.0.1/"),
        *("http://\u24d4xample.org/", "http://\uff45xample.org/", "http://fa\u00df.example/", "http://B\u00dcCHER.example/"),
        *("http://exam\u200dple.org/", "http://\u212aelvin.example/", "http://example.org\u2024evil/"),
        *("http://%31%32%37.0.0.1/", "http://exa%6dple.org/", "http://example..org/", "http://example.org../"),
        *("http://.example.org/", "http://./", "http://*.example.org/", "http://example.org,evil.test/"),
        "http://" + "a" * 64 + ".org/",
    ],
    "at most 253": ["http://" + "a." * 200 + "org/", "http://" + "\u00fc." * 100 + "org/"],
    "names no host": ["http:///path", "http://?x", "http://:80/", "http://"],
    "not of the form": [
        *("http:/example.org/", "http:example.org", "//example.org/", "http", "http:", "", "ftp://example.org/"),
        *("http\u017f://example.org/", "gopher://example.org:70/_x"),
    ],
    "Unicode": ["http://example.org/\ud800"],
    "at most 8192": ["http://example.org/" + "a" * 9000],
}


@pytest.mark.parametrize(
    ("url", "reason"),
    [pytest.param(url, reason, id=ascii(url)[1:60]) for reason, urls in HOSTILE_URLS.items() for url in urls],
)
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
        *(b"file:///etc/passwd", b"data:image/png;base64,AAAA", b"gopher://example.org/", b"javascript:alert(1)"),
        *(b"http://user@example.org/", b"http://127.0.0.1\\@example.org/", b"/\\evil.test/", b"/a\tb", b"http://[::1/"),
        *(b"http://0x7f.1/", b"http://\xff/", b"http://example.org/" + b"a" * 9000),
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
        *("http://example.org/", "https://EXAMPLE.org./", "https://example.org:80/", "https://a.cdn.example/"),
        *("https://a.b.cdn.example/", "http://store.local:9000/", "https://xn--bcher-kva.example/"),
        *("https://b\u00fccher.example/", "https://a.ports.example:8443/", "http://10.0.0.5/", "http://[::1]:81/"),
        "http://[0:0:0:0:0:0:0:1]:81/",
    ],
)
def test_listed_hosts_are_allowed(url: str) -> None:
    assert parse_url(url) in HOSTS


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.com/", "http://www.example.org/", "http://evilexample.org/", "http://example.org.evil.test/"),
        *("http://example/", "http://org/", "http://cdn.example/", "http://evilcdn.example/"),
        *("http://a.cdn.example.evil.test/", "http://example.org:8080/", "http://example.org:22/", "http://store.local/"),
        *("http://store.local:9001/", "https://a.ports.example/", "http://localhost/", "http://127.0.0.1/"),
        *("http://10.0.0.6/", "http://[::1]/", "http://127.0.0.1#@example.org/", "http://127.0.0.1?@example.org/"),
        *("http://169.254.169.254/latest/meta-data/", "http://evil.test/example.org", "http://localhost./"),
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
