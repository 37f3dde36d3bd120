"""What lets frontends reach an engine on another host: the token that both sides know, and the files of TLS.

The token is a secret: it stands in a file or in a variable, never on a command line, which other users of the machine can read.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from shmring.door import token_of

__all__ = ["TOKEN_VARIABLE", "EngineTls", "context_of_engine", "context_of_frontend", "read_token"]

#: The variable of the token. A file counts before it.
TOKEN_VARIABLE = "SHMRING_ENGINE_TOKEN"

#: How connections between frontends and engines are encrypted.
EngineTls: TypeAlias = Literal["auto", "off"]


def read_token(file: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> str | None:
    """Returns the token of a file, or of the variable; None: there is neither.

    Raises:
        OSError: the file can't be read.
        ValueError: others than its owner can read it, or what stands there can be no token. No text shows it.
    """
    place, text = TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE)
    if file is not None:
        path = Path(file)
        with path.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(1 << 16).decode("latin-1")
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            raise ValueError(f"{path} can be read by others than its owner (mode {mode:04o}): chmod 600 {path}")
        place = str(path)
    if text is None:
        return None
    token = text.strip()
    try:
        token_of(token)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return token


def context_of_engine(certfile: str | None, keyfile: str | None, tls: EngineTls) -> ssl.SSLContext | Literal["off"] | None:
    """Returns what ``tls=`` of :func:`shmring.serve` is to be.

    Raises:
        ValueError: the files can't be used, or say something else than ``tls``.
    """
    if certfile is None:
        if keyfile is not None:
            raise ValueError("--engine-keyfile needs --engine-certfile")
        return "off" if tls == "off" else None
    if tls == "off":
        raise ValueError("--engine-tls off and --engine-certfile exclude each other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_to_ask)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"--engine-certfile {certfile} and its key can't be used: {error.strerror or error}") from None
    return context


def context_of_frontend(ca_certs: str | None, tls: EngineTls) -> ssl.SSLContext | Literal["off"] | None:
    """Returns what ``tls=`` of :func:`shmring.connect` is to be.

    Raises:
        ValueError: the file can't be used, or says something else than ``tls``.
    """
    if ca_certs is None:
        return "off" if tls == "off" else None
    if tls == "off":
        raise ValueError("--engine-tls off and --engine-ca-certs exclude each other")
    try:
        return ssl.create_default_context(cafile=ca_certs)
    except OSError as error:
        raise ValueError(f"--engine-ca-certs {ca_certs} can't be used: {error.strerror or error}") from None


def _refuse_to_ask() -> NoReturn:
    raise ValueError("the key of --engine-keyfile is encrypted; give one that is not, in a file that only you can read")
