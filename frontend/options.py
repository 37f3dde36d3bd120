"""The options of a frontend process, which ``shmring serve`` has as well. They are made of its settings."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import click
import msgspec

from shmring.frontend.callers.keys import ADMIN_KEYS_VARIABLE, KEYS_VARIABLE, KeyOwner, read_keys
from shmring.frontend.http.listening import check_tls
from shmring.frontend.settings import FrontendSettings, ProcessSettings, TlsSettings
from shmring.service.far_engines import read_token
from shmring.service.option_table import Option, filled, options_of

__all__ = ["FRONTEND_OPTIONS", "PROCESS_OPTIONS", "TLS_OPTIONS", "limits_of", "process_settings_of", "settings_of"]

PROCESS_OPTIONS = options_of(ProcessSettings())
TLS_OPTIONS = options_of(TlsSettings)

_SETTINGS = options_of(FrontendSettings())

#: The options of what a frontend serves, and of its limits.
FRONTEND_OPTIONS = (
    *_SETTINGS,
    Option(
        ["--api-key", "api_keys"],
        envvar=(),
        multiple=True,
        help="A key that callers of /v1 must send; may be given several times. Other users of this machine can read it here, "
        f"but not in the variable {KEYS_VARIABLE} (several with spaces) nor in a file.",
    ),
    Option(
        ["--api-key-file"],
        type=click.Path(exists=True, dir_okay=False),
        help="A file of such keys, one in a line, which only its owner can read. Behind a key may stand its owner and limits: "
        "KEY name=alice max-concurrent-requests=8 max-requests-per-minute=600 max-slab-nbytes=1GiB max-priority=10.",
    ),
    Option(
        ["--admin-key", "admin_keys"],
        envvar=(),
        multiple=True,
        help="A key for the routes that pause, resume, profile and abort, which exist only with such a key. As --api-key; the "
        f"variable is {ADMIN_KEYS_VARIABLE}.",
    ),
    Option(
        ["--admin-key-file"],
        type=click.Path(exists=True, dir_okay=False),
        help="A file of such keys, one in a line, which only its owner can read.",
    ),
)


# Of one request, beside what its media may be. Callers meet these in errors.
_LIMITS = (
    *("body_timeout_s", "limit_mm_per_prompt", "max_body_nbytes", "max_inputs", "max_media_nbytes", "request_timeout_s"),
    "fetch_timeout_s",
)


def limits_of(settings: FrontendSettings) -> dict[str, dict[str, Any]]:
    """Returns the limits of requests, for callers: by the name of each option, its value and its help."""
    limits = {}
    for option in _SETTINGS:
        if option.name in _LIMITS or option.path[0] == "media_limits":
            value = msgspec.to_builtins(functools.reduce(getattr, option.path, settings))
            limits[option.opts[0][2:]] = {"value": value, "description": option.help}
    return limits


def process_settings_of(values: dict[str, Any]) -> ProcessSettings:
    """Returns a frontend process's settings from its options.

    Raises:
        click.UsageError: a certificate, a key or a token can't be used, or is not there.
    """
    try:
        settings = filled(ProcessSettings(), _options_in(values), values)
        if settings.far.engine:
            if settings.data_parallel_size > 1:
                raise ValueError("--engine and --data-parallel-size exclude each other: give --engine for each")
            token = read_token(settings.far.engine_token_file, os.environ)
            settings = dataclasses.replace(settings, far=dataclasses.replace(settings.far, engine_token=token))
        settings.far.check()
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    return dataclasses.replace(settings, tls=_tls_of(values), http=settings_of(values))


def _options_in(values: dict[str, Any]) -> list[Option]:
    """Frontends of a server have its engines: their command line has nothing about engines on other hosts."""
    return [option for option in PROCESS_OPTIONS if option.path[0] != "far" or "engine" in values]


def _tls_of(values: dict[str, Any]) -> TlsSettings | None:
    certfile, *others = TLS_OPTIONS
    if values["certfile"] is None:
        given = [option.opts[0] for option in others if values[option.name]]
        if given:
            raise click.UsageError(f"{given[0]} needs {certfile.opts[0]}")
        return None
    tls = filled(TlsSettings(certfile=values["certfile"]), TLS_OPTIONS, values)
    try:
        check_tls(tls)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return tls


def settings_of(values: dict[str, Any]) -> FrontendSettings:
    """Returns the settings that the options and the variable of keys ask for.

    Raises:
        click.UsageError: the keys are none, or their file can't be read, or can be read by everybody.
    """
    owners: dict[str, KeyOwner] = {}
    try:
        keys = read_keys(values["api_keys"], os.environ.get(KEYS_VARIABLE), values["api_key_file"], owners=owners)
        admin_keys = read_keys(
            *(values["admin_keys"], os.environ.get(ADMIN_KEYS_VARIABLE), values["admin_key_file"]),
            flag="--admin-key",
            variable_name=ADMIN_KEYS_VARIABLE,
        )
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if not set(keys).isdisjoint(admin_keys):
        raise click.UsageError("a key of --admin-key is also one of --api-key: callers of /v1 could pause the server")
    return dataclasses.replace(
        filled(FrontendSettings(), _SETTINGS, values),
        api_keys=keys,
        key_owners=tuple(owners.values()),
        admin_keys=admin_keys,
    )
