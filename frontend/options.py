"""The command line options of a frontend process: those of ``python -m frontend``, and ``shmring serve`` hands them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from frontend.media.image import PictureLimits
from frontend.settings import FrontendSettings
from shmring.config import parse_nbytes

__all__ = ["LOG_LEVELS", "NBYTES", "frontend_arguments", "frontend_options", "settings_of"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])


if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # which older versions of click do not let be subscripted


class _Nbytes(_IntegerType):
    """A size: bytes, or text such as 64MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns bytes."""
        try:
            return parse_nbytes(value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


NBYTES = _Nbytes()
_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_DEFAULT = FrontendSettings()

# Option, its destination (a field of FrontendSettings, or of its picture_limits), type, default, help.
_OPTIONS: tuple[tuple[str, str, click.ParamType[Any] | type, Any, str], ...] = (
    ("--model-name", "model_name", str, _DEFAULT.model_name, "What requests must name as their model."),
    (
        "--max-concurrent-requests",
        "max_concurrent_requests",
        _COUNT,
        _DEFAULT.max_concurrent_requests,
        "Requests that a frontend reads, decodes or has embedded at a time; others wait in their sockets.",
    ),
    (
        "--max-queued-requests",
        "max_queued_requests",
        _COUNT,
        _DEFAULT.max_queued_requests,
        "Requests that may wait for that, in a frontend.",
    ),
    ("--queue-timeout", "queue_timeout_s", _SECONDS, _DEFAULT.queue_timeout_s, "Seconds they wait before 503."),
    ("--body-timeout", "body_timeout_s", _SECONDS, _DEFAULT.body_timeout_s, "Seconds a body may take to arrive before 408."),
    (
        "--slot-timeout",
        "slot_timeout_s",
        _SECONDS,
        _DEFAULT.slot_timeout_s,
        "Seconds to wait for space in the slab before 503.",
    ),
    ("--request-timeout", "request_timeout_s", _SECONDS, _DEFAULT.request_timeout_s, "Seconds the engine may take before 504."),
    ("--max-body-nbytes", "max_body_nbytes", NBYTES, _DEFAULT.max_body_nbytes, "Largest body of a request."),
    ("--max-pictures", "max_pictures", _COUNT, _DEFAULT.max_pictures, "Most pictures of a request."),
    ("--max-pixels", "max_pixels", _COUNT, _DEFAULT.picture_limits.max_pixels, "Most pixels of a picture."),
    ("--decode-threads", "decode_threads", _COUNT, _DEFAULT.decode_threads, "Pictures a frontend decodes at a time."),
)


def frontend_options(command: _Command) -> _Command:
    """Adds the options to a command; it gets them as keyword arguments, for :func:`settings_of`."""
    for option, destination, kind, default, text in reversed(_OPTIONS):
        command = click.option(option, destination, type=kind, default=default, show_default=True, help=text)(command)
    return command


def settings_of(values: dict[str, Any]) -> FrontendSettings:
    """Returns the settings that the options ask for."""
    values = dict(values)
    limits = PictureLimits(max_pixels=values.pop("max_pixels"), max_nbytes=values["max_body_nbytes"])
    return FrontendSettings(picture_limits=limits, **values)


def frontend_arguments(values: dict[str, Any]) -> list[str]:
    """Returns the options as they are written, for a frontend's command line."""
    return [f"{option}={values[destination]}" for option, destination, *_ in _OPTIONS]
