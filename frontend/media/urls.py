"""URLs of media on other hosts: taking them apart, and whether their host is one that the operator lists.

A URL is taken apart here and nowhere else: the parts go into the request as they are, so that there is no second parser
that reads it differently. What parsers are known to disagree about is refused, whichever of them may be right: backslashes,
controls, names and passwords before the host, addresses in unusual forms, characters that some map to others. The parts are
ASCII.

Sources: RFC 3986, the WHATWG URL standard (which host is an address), vLLM's GHSA-v359-jj2v-j536 (a backslash that two
parsers read differently, and a list of hosts that was passed that way).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import string
import urllib.parse
from collections.abc import Iterable

from shmring.frontend.media.errors import MediaError

__all__ = ["AllowedHosts", "FORBIDDEN_CHARACTERS", "RemoteUrl", "is_address", "parse_redirect", "parse_url"]

#: Controls and spaces end a URL for some parsers and vanish for others; backslashes are slashes for some.
FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x20\x7f-\xa0\\]")

_MAX_URL_CHARACTERS = 8192  # what common servers take as one line; signed URLs of object stores have about 2000
_MAX_HOST_CHARACTERS = 253  # RFC 1035: 255 octets on the wire
_DEFAULT_PORTS = {"http": 80, "https": 443}

_URL = re.compile(r"(https?)://([^/?#]*)([^?#]*)((?:\?[^#]*)?)(?:#.*)?", re.IGNORECASE | re.ASCII | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LOWER_CASE = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_KEPT_IN_TARGETS = "%:/?#[]@!$&'()*+,;=-._~"  # reserved and unreserved in RFC 3986; all others are percent-encoded


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteUrl:
    """The parts of an ``http:`` or ``https:`` URL.

    Attributes:
        scheme: in lower case.
        host: a name in lower case and ASCII, without a final dot, or an address in its usual form, without brackets.
        port: the scheme's own if the URL says none.
        target: path and query.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """What the ``Host`` header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> RemoteUrl:
    """Takes a URL apart.

    Raises:
        MediaError: it is anything but a plain ``http:`` or ``https:`` URL.
    """
    if len(url) > _MAX_URL_CHARACTERS:
        raise MediaError(f"the URL has {len(url)} characters; at most {_MAX_URL_CHARACTERS} are accepted")
    if FORBIDDEN_CHARACTERS.search(url):
        raise MediaError("the URL has a space, a control character or a backslash in it; they must be percent-encoded")
    match = _URL.fullmatch(url)
    if match is None:
        raise MediaError("the URL is not of the form http://host/path or https://host/path")
    scheme, authority, path, query = match[1].lower(), match[2], match[3], match[4]
    if "@" in authority:
        raise MediaError("the URL has a user's name or a password in it; none are accepted")
    host, port = _split_authority(authority)
    try:
        target = urllib.parse.quote((path or "/") + query, safe=_KEPT_IN_TARGETS)
    except UnicodeEncodeError:
        raise MediaError("the URL has characters in it that are not valid Unicode") from None
    return RemoteUrl(scheme, host, _DEFAULT_PORTS[scheme] if port is None else port, target)


def parse_redirect(url: RemoteUrl, location: bytes) -> RemoteUrl:
    """Returns where a redirect leads.

    Args:
        url: that was asked for.
        location: the header that answered it; it may be relative.

    Raises:
        MediaError: it is not a URL that :func:`parse_url` accepts, or leads from ``https:`` to ``http:``.
    """
    try:
        text = location.decode()
        if FORBIDDEN_CHARACTERS.search(text):  # urljoin would drop some of them
            raise MediaError("it has a space, a control character or a backslash in it")
        target = parse_url(urllib.parse.urljoin(f"{url.scheme}://{url.authority}{url.target}", text))
    except ValueError as error:  # it is not UTF-8, its brackets don't match, or it is a MediaError
        reason = error if isinstance(error, MediaError) else "it is not a URL"
        raise MediaError(f"the host redirects to a URL that is not accepted: {reason}") from None
    if url.scheme == "https" and target.scheme == "http":
        raise MediaError("the host redirects from https: to http:, which is not accepted")
    return target


class AllowedHosts:
    """The hosts that the operator lists; a :class:`RemoteUrl` is in it or not.

    Args:
        domains: ``example.org`` is that host; ``*.example.org`` are all names below it, at any depth, and not itself. Each with
            the ports 80 and 443, or with the one port of ``example.org:9000``. Addresses are written as in URLs.

    Raises:
        ValueError: one of them is nothing of that kind.
    """

    def __init__(self, domains: Iterable[str]) -> None:
        self._hosts: set[tuple[str, int]] = set()
        self._parents: set[tuple[str, int]] = set()
        for domain in domains:
            try:
                host, port = _split_authority(domain.removeprefix("*."))
            except MediaError as error:
                raise ValueError(f"{domain!r} is not a host, host:port or *.domain: {error}") from None
            is_parent = domain.startswith("*.")
            if is_parent and is_address(host):
                raise ValueError(f"{domain!r} is not a host, host:port or *.domain: there are no names below an address")
            ports = _DEFAULT_PORTS.values() if port is None else (port,)
            (self._parents if is_parent else self._hosts).update((host, port) for port in ports)

    def __contains__(self, url: RemoteUrl) -> bool:
        if (url.host, url.port) in self._hosts:
            return True
        labels = url.host.split(".")
        return any((".".join(labels[start:]), url.port) in self._parents for start in range(1, len(labels)))


def is_address(host: str) -> bool:
    """Whether a host's normal form is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _split_authority(authority: str) -> tuple[str, int | None]:
    """Returns the normal form of the host, and the port if there is one."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise MediaError(f"{authority[:64]!r} is not a host, optionally with a port")
    host, port = match[1], None if match[2] is None else int(match[2])
    if port is not None and not 0 < port < 65536:
        raise MediaError(f"{port} is not a port")
    return _normal_ipv6(host) if host.startswith("[") else _normal_name(host), port


def _normal_ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text[1:-1])
    except ValueError:
        raise MediaError(f"{text[:64]!r} is not an IPv6 address") from None
    if address.scope_id is not None or address.ipv4_mapped is not None:
        raise MediaError(f"{text[:64]!r} is an IPv6 address with a zone, or that of an IPv4 address; neither is accepted")
    return address.compressed


def _normal_name(text: str) -> str:
    if not text:
        raise MediaError("the URL names no host")
    _check_length(text.removesuffix("."))
    host = ".".join(map(_normal_label, text.removesuffix(".").split(".")))
    _check_length(host)  # international names grow
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):  # no name ends so
        return host
    try:
        return ipaddress.IPv4Address(host).compressed
    except ValueError:  # inet_aton() takes many more forms: octal, hexadecimal, fewer than four numbers
        raise MediaError(f"{text[:64]!r} is neither a name nor an IPv4 address of four decimal numbers") from None


def _check_length(host: str) -> None:
    if len(host) > _MAX_HOST_CHARACTERS:
        raise MediaError(f"the name of the host has {len(host)} characters; at most {_MAX_HOST_CHARACTERS} are possible")


def _normal_label(label: str) -> str:
    lower = label.translate(_LOWER_CASE)
    if not lower.isascii():
        try:
            encoded = lower.encode("idna")
            # What the codec maps to other characters (full-width digits, ideographic dots) does not come back as it was.
            lower = encoded.decode("ascii") if encoded.decode("idna") == lower else ""
        except UnicodeError:
            lower = ""
    if not _LABEL.fullmatch(lower):
        raise MediaError(f"{label[:64]!r} can't be part of a host's name (international names: in lower case, or as xn--...)")
    return lower
