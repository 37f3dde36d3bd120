"""Reads the keys that callers must send from the places where operators keep them. No message ever shows a key.

A mistake never opens the server: a variable or a file that exists but holds no key is an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

__all__ = ["ADMIN_KEYS_VARIABLE", "KEYS_VARIABLE", "read_keys"]

KEYS_VARIABLE = "SHMRING_API_KEY"
ADMIN_KEYS_VARIABLE = "SHMRING_ADMIN_KEY"

_RULE = "a key has visible ASCII characters only, and no spaces"


def read_keys(
    options: Iterable[str],
    variable: str | None,
    file: str | os.PathLike[str] | None,
    *,
    flag: str = "--api-key",
    variable_name: str = KEYS_VARIABLE,
) -> tuple[str, ...]:
    """Returns all keys, each once.

    Args:
        options: from the command line.
        variable: keys with spaces between them, from the environment; None: it is not set.
        file: its path; one key in a line.
        flag, variable_name: what the first two are called.

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
        keys += _read_file(Path(file), variable_name)
    return tuple(dict.fromkeys(keys))


def _read_file(path: Path, variable_name: str) -> list[str]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        content = file.read()
    if stat.S_IMODE(status.st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        raise ValueError(
            f"{path} can be read by others than its owner (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}, "
            f"or give its keys in {variable_name}"
        )
    keys = []
    for number, line in enumerate(content.splitlines(), 1):
        key = line.strip().decode("latin-1")
        if key:
            _check(key, f"{path}, line {number}")
            keys.append(key)
    if not keys:
        raise ValueError(f"{path} has no keys; write one in a line")
    return keys


def _check(key: str, place: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{place}: {_RULE}")
