"""Reads the keys that callers must send from the places where operators keep them. No message ever shows a key.

A mistake never opens the server: a variable or a file that exists but holds no key is an error.

Behind a key in the file, its owner's name and limits may stand::

    KEY name=alice max-concurrent-requests=8 max-requests-per-minute=600 max-slab-nbytes=1GiB max-priority=10

Keys of one name are one owner's, and count together: an old key and the one that takes its place.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shmring.door import parse_nbytes

__all__ = ["ADMIN_KEYS_VARIABLE", "KEYS_VARIABLE", "KeyOwner", "read_keys"]

KEYS_VARIABLE = "SHMRING_API_KEY"
ADMIN_KEYS_VARIABLE = "SHMRING_ADMIN_KEY"

_RULE = "a key has visible ASCII characters only, and no spaces"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_MAX_OWNERS = 1000  # each is a label of numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyOwner:
    """Whose keys these are.

    Attributes:
        name: of the owner, for people and numbers.
        keys: one or several.
        max_concurrent_requests: of all its keys; None: no limit, and so below.
        max_requests_per_minute: in any 60 seconds.
        max_slab_nbytes: of media that its requests have in the slab, or wait for.
        max_priority: how urgent its requests may be; None: as those of others.
    """

    name: str
    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    max_concurrent_requests: int | None = None
    max_requests_per_minute: int | None = None
    max_slab_nbytes: int | None = None
    max_priority: int | None = None


_WORDS = [field.name.replace("_", "-") for field in dataclasses.fields(KeyOwner) if field.name != "keys"]


def read_keys(
    options: Iterable[str],
    variable: str | None,
    file: str | os.PathLike[str] | None,
    *,
    flag: str = "--api-key",
    variable_name: str = KEYS_VARIABLE,
    owners: dict[str, KeyOwner] | None = None,
) -> tuple[str, ...]:
    """Returns all keys, each once.

    Args:
        options: from the command line.
        variable: keys with spaces between them, from the environment; None: it is not set.
        file: its path; one key in a line.
        flag, variable_name: what the first two are called.
        owners: gets the owners of those that have one, by name. None: they may have none.

    Raises:
        OSError: the file can't be read.
        ValueError: a text is no key, a place holds no keys, or users other than its owner may read the file. The message says
            where, and what to do.
    """
    keys = list(options)
    for number, key in enumerate(keys, 1):
        _check(key, flag if len(keys) == 1 else f"{flag} number {number}")
    if variable is not None:
        variable_keys = variable.split()
        if not variable_keys:
            raise ValueError(f"{variable_name} is set and holds no key; unset it to serve without keys")
        for number, key in enumerate(variable_keys, 1):
            _check(key, variable_name if len(variable_keys) == 1 else f"{variable_name}, key {number}")
        keys += variable_keys
    if file is not None:
        keys += _read_file(Path(file), variable_name, owners)
    return tuple(dict.fromkeys(keys))


def _read_file(path: Path, variable_name: str, owners: dict[str, KeyOwner] | None) -> list[str]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        content = file.read()
    if stat.S_IMODE(status.st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        raise ValueError(
            f"{path} can be read by others than its owner (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}, "
            f"or give its keys in {variable_name}"
        )
    keys: dict[str, bool] = {}  # with whether they have an owner
    for number, line in enumerate(content.splitlines(), 1):
        key, *words = (word.decode("latin-1") for word in line.split() or [b""])
        if not key:
            continue
        place = f"{path}, line {number}"
        _check(key, place)
        if key in keys and (words or keys[key]):
            raise ValueError(f"{place}: this key stands in another line too")
        if words:
            _add_owner(owners, key, words, place)
        keys[key] = bool(words)
    if not keys:
        raise ValueError(f"{path} has no keys; write one in a line")
    return list(keys)


def _add_owner(owners: dict[str, KeyOwner] | None, key: str, words: Sequence[str], place: str) -> None:
    if owners is None or not all("=" in word for word in words):
        raise ValueError(f"{place}: {_RULE}")
    values = dict(word.split("=", 1) for word in words)
    if len(values) < len(words) or not values.keys() <= set(_WORDS) or "name" not in values:
        raise ValueError(f"{place}: behind a key, name=NAME may stand, and then each of these once: {', '.join(_WORDS[1:])}")
    if not _NAME.fullmatch(name := values.pop("name")):
        raise ValueError(f"{place}: a name has up to 64 letters, digits, dots, dashes and underscores")
    limits: dict[str, Any] = {}  # all are numbers
    for word, value in values.items():
        try:
            limits[word.replace("-", "_")] = _nbytes(value) if word.endswith("nbytes") else _count(value)
        except ValueError as error:
            raise ValueError(f"{place}: {word}: {error}") from None
    first = owners.setdefault(name, KeyOwner(name=name, **limits))
    owner = KeyOwner(name=name, keys=(*first.keys, key), **limits)
    if dataclasses.replace(owner, keys=first.keys) != first:
        raise ValueError(f"{place}: the name {name} stands in another line with other limits")
    if len(owners) > _MAX_OWNERS:
        raise ValueError(f"{place}: there are more than {_MAX_OWNERS} names")
    owners[name] = owner


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError("write a number of at least 1")
    return int(text)


def _nbytes(text: str) -> int:
    if (nbytes := parse_nbytes(text)) < 1:
        raise ValueError("a size is at least 1 byte")
    return nbytes


def _check(key: str, place: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{place}: {_RULE}")
