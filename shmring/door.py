"""What callers hand in, made right where it comes in: times, sizes, counts, names, keys and ranks.

Theory of operation: each kind of argument has one function here, and each public call passes its arguments through it before it
does anything else. What the function returns has one type and lies in one range, so the code inside looks no further. A value
that can't be used is a ``TypeError`` (of another type) or a ``ValueError`` (out of range); its text names the argument and says
what it has to be. Nothing was begun by then.

A bool is no number here: ``timeout=True`` is a mistake, and not one second.
"""

from __future__ import annotations

import decimal
import itertools
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shmring.errors import CapacityError

__all__ = [
    "KEY_NBYTES",
    "LARGEST_NBYTES",
    "LARGEST_RANK",
    "LONGEST_S",
    "MAX_DIMENSIONS",
    "MAX_NAME_CHARACTERS",
    "FarAddress",
    "check_callable",
    "check_calls",
    "check_error",
    "check_key",
    "check_name",
    "check_retry",
    "check_route_key",
    "check_text",
    "count_of",
    "directory_of",
    "far_address_of",
    "is_far",
    "keys_of",
    "listening_place_of",
    "names_of",
    "parse_nbytes",
    "rank_of",
    "ranks_of",
    "seconds_of",
    "shape_of",
    "shown",
    "stream_of",
    "timeout_of",
    "token_of",
    "validate_name",
]

#: A timeout of so many seconds (32 years) or more is none: clocks, locks and loops have limits of their own behind that.
LONGEST_S = 1e9

#: No memory has more bytes: offsets are numbers of 64 bits, of which the core keeps one free.
LARGEST_NBYTES = 2**62

LARGEST_RANK = 2**31 - 1

#: Of a tensor: numpy and torch both stop there.
MAX_DIMENSIONS = 64

#: Of the name of a request, a method or a client. It travels in a message, and stands in logs.
MAX_NAME_CHARACTERS = 256

#: Of the key of kept content; as in messages.
KEY_NBYTES = 32

_SHOWN_CHARACTERS = 80  # of a wrong value, in an error's text

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,24}(?:\.\d{1,24})?)\s*([a-z]{0,3})\s*", re.IGNORECASE | re.ASCII)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_FAR = "tcp://"
_LABEL = r"[A-Za-z0-9_-]{1,63}"  # of a host's name: the resolver raises UnicodeError for longer and for empty ones
_PLACE = re.compile(rf"(\[[0-9A-Fa-f:.%a-z]{{2,60}}\]|(?=.{{1,254}}:){_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")
_LARGEST_PORT = 65535


def shown(value: object) -> str:
    """Returns a value as an error's text shows it: in one line, and cut where it is long."""
    try:
        text = ascii(value)
    except Exception:  # noqa: BLE001 - an int of too many digits, or an object whose __repr__ fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


# -- times -----------------------------------------------------------------------------------------------------------------


def timeout_of(timeout: Any, name: str = "timeout") -> float | None:
    """Returns how many seconds a call may wait, 0 or more; None: as long as it takes.

    Args:
        timeout: None, an int, a float, or another real number (numpy's, ``Decimal``, ``Fraction``). A negative one is a time
            that is over already, as what is left until a deadline may be: 0. ``math.inf``, and what is not less than
            :data:`LONGEST_S`, is None.
        name: of the argument, for the error.

    Raises:
        TypeError: it is something else: text, a bool, a complex number.
        ValueError: it is NaN.
    """
    if timeout is None:
        return None
    if (type(timeout) is float or type(timeout) is int) and 0 <= timeout < LONGEST_S:  # the usual ones, at once
        return float(timeout)
    seconds = _real(timeout, name, "a number of seconds, or None")
    if seconds >= LONGEST_S:
        return None
    return seconds if seconds > 0 else 0.0


def seconds_of(seconds: Any, name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """Returns a time in seconds, of an option or an argument that can't be None.

    Args:
        seconds: an int, a float, or another real number.
        name: of the argument, for the error.
        least, most: its range.

    Returns:
        A float; of ``math.inf``, and of all that is longer, :data:`LONGEST_S`.

    Raises:
        TypeError: it is something else: text, a bool, a complex number, None.
        ValueError: it is NaN, or not in the range.
    """
    number = _real(seconds, name, "a number of seconds")
    if not least <= number <= most:
        wanted = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{name} must be {wanted} seconds, not {shown(seconds)}")
    return min(number, LONGEST_S)


def _real(value: Any, name: str, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
        raise TypeError(f"{name} is {wanted}, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int, or a Fraction
        number = math.inf if operator.gt(value, 0) else -math.inf
    except ValueError:  # a signalling NaN of Decimal
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} is {wanted}, not {shown(value)}")
    return number


# -- sizes and counts ------------------------------------------------------------------------------------------------------


def parse_nbytes(size: Any, name: str = "") -> int:
    """Returns a size in bytes, given as a number of bytes or as text with a unit.

    Args:
        size: ``4096``, ``"4096"``, ``"64MiB"``, ``"1.5 GiB"``, ``"10MB"`` (decimal), ``"64M"`` (binary, as in ``docker run``);
            or an integer of another type, such as numpy's.
        name: of the argument, for the error; empty: it has none.

    Raises:
        ValueError: the text is not a size, or the size is negative.
        CapacityError: it is more than :data:`LARGEST_NBYTES`.
        TypeError: it is neither an integer nor text.
    """
    if isinstance(size, str):
        nbytes = _sized(size, name)
    else:
        number = size if type(size) is int else _integer(size)
        if number is None:
            raise TypeError(f"{name or 'a size'} is an int of bytes or text such as '4GiB', not {type(size).__name__}")
        if number < 0:
            raise ValueError(f"{name or 'a size'} can't be negative: {shown(size)}")
        nbytes = number
    if nbytes > LARGEST_NBYTES:
        message = f"{name or 'a size'} is more than any memory has: {shown(size)}"
        raise CapacityError(message, needed=nbytes, capacity=LARGEST_NBYTES)
    return nbytes


def _sized(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        where = f"{name}: " if name else ""
        raise ValueError(f"{where}{shown(text)} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def count_of(count: Any, name: str, *, least: int = 1, most: int | None = None) -> int:
    """Returns a number of things, or of one thing.

    Args:
        count: an int, or an integer of another type, such as numpy's.
        name: of the argument, for the error.
        least, most: its range; ``most`` None: it has no end.

    Raises:
        TypeError: it is no integer, or a bool.
        ValueError: it is not in the range.
    """
    number = count if type(count) is int else _integer(count)
    if number is None:
        raise TypeError(f"{name} is an int, not {shown(count)}")
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {wanted}, not {shown(number)}")
    return number


def _integer(value: Any) -> int | None:
    """Returns an integer of any type as an int; None: it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shape_of(shape: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor.

    Raises:
        TypeError: it is no sequence of integers.
        ValueError: an extent is negative or more than any memory has, or there are more than :data:`MAX_DIMENSIONS`.
    """
    if isinstance(shape, str | bytes) or not isinstance(shape, Iterable):
        raise TypeError(f"shape is a tuple of ints, not {shown(shape)}")
    extents = tuple(itertools.islice(shape, MAX_DIMENSIONS + 1))
    if len(extents) > MAX_DIMENSIONS:
        raise ValueError(f"shape has at most {MAX_DIMENSIONS} extents")
    return tuple(count_of(extent, "an extent of shape", least=0, most=LARGEST_NBYTES) for extent in extents)


def rank_of(rank: Any) -> int:
    """Returns a worker's rank, from 0 on. Raises as :func:`count_of`."""
    return count_of(rank, "a rank", least=0, most=LARGEST_RANK)


def ranks_of(to: Iterable[Any] | None) -> tuple[int, ...] | None:
    """Returns ranks in order, each once; None: those of all workers.

    Raises:
        TypeError, ValueError: this is no list of ranks.
    """
    if to is None:
        return None
    if isinstance(to, str | bytes) or not isinstance(to, Iterable):
        raise TypeError(f"to is a list of ranks, such as [0, 2], not {shown(to)}")
    return tuple(sorted({rank_of(rank) for rank in to}))


# -- names, paths and keys -------------------------------------------------------------------------------------------------


def validate_name(name: Any) -> str:
    """Returns an engine's name if it can be part of a path and of a shared memory name.

    Raises:
        TypeError: it is no text.
        ValueError: it can't be one.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an engine is a str, not {shown(name)}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{shown(name)} can't name an engine: use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


class FarAddress(NamedTuple):
    """Where an engine on another host listens, and its name there."""

    host: str
    port: int
    name: str

    def __str__(self) -> str:
        return f"tcp://{_bracketed(self.host)}:{self.port}/{self.name}"


def is_far(name: Any) -> bool:
    """Whether this is the address of an engine on another host, and not the name of one on this host."""
    return isinstance(name, str) and name.startswith(_FAR)


def far_address_of(address: str) -> FarAddress:
    """Returns what an address says: ``tcp://host:port/name``, an IPv6 address in brackets.

    Raises:
        ValueError: it can't be one.
    """
    place, slash, name = address.removeprefix(_FAR).partition("/")
    if not slash:
        raise ValueError(f"{shown(address)} is no address: write tcp://host:port/name")
    host, port = listening_place_of(place, "the address of an engine")
    made = FarAddress(host, count_of(port, "a port", most=_LARGEST_PORT), validate_name(name))
    if str(made) != address:  # it names the engine: there is one way to write it
        raise ValueError(f"{shown(address)} is written {made}")
    return made


def listening_place_of(place: Any, name: str) -> tuple[str, int]:
    """Returns host and port of ``host:port``; an IPv6 address stands in brackets, and port 0 is any that is free.

    Args:
        place: as above.
        name: of the argument, for the error.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(place, str):
        raise TypeError(f"{name} is text such as '127.0.0.1:7000', not {shown(place)}")
    match = _PLACE.fullmatch(place)
    if match is None or int(match[2]) > _LARGEST_PORT:
        raise ValueError(f"{name} has host and port, such as 127.0.0.1:7000 or [::1]:7000; {shown(place)} has not")
    return match[1].strip("[]"), int(match[2])


def token_of(token: Any) -> bytes:
    """Returns the secret that lets clients on other hosts in.

    Raises:
        TypeError: it is neither text nor bytes.
        ValueError: it has fewer than 16 bytes, which could be guessed, or more than 1024.
    """
    if not isinstance(token, str | bytes):
        raise TypeError(f"token is a str or bytes that both sides know, not {type(token).__name__}")
    secret = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token
    if not 16 <= len(secret) <= 1024:  # the text of the error must not show it
        raise ValueError(f"token has 16 to 1024 bytes, such as those of secrets.token_hex(); this one has {len(secret)}")
    return secret


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def directory_of(path: Any, name: str) -> str | None:
    """Returns the path of a directory, as text; None: the default one.

    Args:
        path: a str, or a ``pathlib.Path``.
        name: of the argument, for the error.

    Raises:
        TypeError: it is something else.
        ValueError: no path is like that.
    """
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{name} is the path of a directory, or None, not {shown(path)}")
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ValueError(f"{name} is the path of a directory, or None, not {shown(path)}")


def check_text(text: Any, name: str) -> None:
    """Raises TypeError unless this is text, of any length, which people read.

    Args:
        text: it is cut, and made printable, where it is used.
        name: of the argument, for the error.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} is a str, not {shown(text)}")


def check_error(error: Any) -> None:
    """Raises TypeError unless a request can fail with this."""
    if not isinstance(error, BaseException):
        raise TypeError(f"error is an exception, not {shown(error)}")


def check_calls(calls: Any) -> None:
    """Raises TypeError unless these can be control calls: functions by their names."""
    if calls is not None and not (isinstance(calls, Mapping) and all(isinstance(name, str) for name in calls)):
        raise TypeError(f"calls is a dict of coroutine functions by their names, or None, not {shown(calls)}")


def check_callable(function: Any, name: str) -> None:
    """Raises TypeError unless this can be called back."""
    if not callable(function):
        raise TypeError(f"{name} is a function, not {shown(function)}")


def check_name(name: Any, what: str) -> None:
    """Raises unless this can name a request, a method or a client.

    Args:
        name: which may be empty.
        what: the argument, for the error.

    Raises:
        TypeError: it is no text.
        ValueError: it is too long, or has half of a surrogate pair, which UTF-8 does not.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} is a str, not {shown(name)}")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"{what} has at most {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{what} is text without lone surrogates, not {shown(name)}") from None


def names_of(request_id: Any) -> set[str]:
    """Returns the names of requests: of one, or of several.

    Raises:
        TypeError: it is neither a str nor several of them.
    """
    if isinstance(request_id, str):
        return {request_id}
    if not isinstance(request_id, bytes) and isinstance(request_id, Iterable):
        names = list(request_id)
        if all(isinstance(name, str) for name in names):
            return set(names)
    raise TypeError(f"request_id is a str, or a list of them, not {shown(request_id)}")


def check_key(key: Any) -> None:
    """Raises unless content can be kept under this key.

    Raises:
        TypeError, ValueError: it is no ``bytes``, or has not 32 of them.
    """
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if len(key) != KEY_NBYTES:
        raise ValueError(f"a key has {KEY_NBYTES} bytes, not {len(key)}: use a hash, such as hashlib.sha256")


def keys_of(keys: Any) -> list[bytes]:
    """Returns keys of kept content, in their order.

    Raises:
        TypeError, ValueError: these are none, or one is none.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise TypeError(f"keys is a list of keys, not {shown(keys)}")
    listed = list(keys)
    for key in listed:
        check_key(key)
    return listed


def stream_of(stream: Any) -> tuple[int, int]:
    """Returns the numbers of a stream of torch's: of its GPU, and its own there.

    Raises:
        TypeError: it is none. A number alone is none: each GPU has a stream of that number.
    """
    device, number = getattr(stream, "device_index", None), getattr(stream, "cuda_stream", None)
    if not isinstance(device, int) or not isinstance(number, int):
        raise TypeError(f"stream is a stream of torch's, such as torch.cuda.current_stream(), or None, not {shown(stream)}")
    return device, number


def check_route_key(key: Any) -> None:
    """Raises TypeError unless requests can be routed by this key."""
    if key is not None and not isinstance(key, str | bytes):
        raise TypeError(f"a key is a str or bytes, not {type(key).__name__}")


def check_retry(retry: Any, engine: str | None) -> int:
    """Returns how often a request may be sent again.

    Raises:
        TypeError, ValueError: it is no number, or an engine was named, which leaves no other one.
    """
    if type(retry) is int and not retry:
        return 0
    times = count_of(retry, "retry", least=0)
    if times and engine is not None:
        raise ValueError(f"engine={shown(engine)} leaves no other engine to try; leave out retry or engine")
    return times
