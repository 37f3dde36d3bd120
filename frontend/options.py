"""The command line options of a frontend process: those of ``python -m frontend``, and ``shmring serve`` hands them on.

Names and meanings are vLLM's where it has such an option. Keys never stand on a command line that ``shmring serve`` writes,
where every user of the machine could read them: frontends get them in their environment (:func:`frontend_environment`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from frontend.media.fetch import FetchSettings
from frontend.media.options import MediaIoKwargs, MediaLimits
from frontend.settings import FrontendSettings, MediaCounts
from shmring.config import parse_nbytes

__all__ = [
    "FiniteRange",
    "LOG_LEVELS",
    "NBYTES",
    "frontend_arguments",
    "frontend_environment",
    "frontend_options",
    "settings_of",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])

_KEYS_VARIABLE = "SHMRING_API_KEY"


if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
    _TextType = click.ParamType[str]
else:
    _IntegerType = _TextType = click.ParamType  # which older versions of click do not let be subscripted


class _Nbytes(_IntegerType):
    """A size: bytes, or text such as 64MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns bytes."""
        try:
            nbytes = parse_nbytes(value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)
        if nbytes < 1:
            self.fail("a size is at least 1 byte", param, ctx)
        return nbytes


class _Parsed(_TextType):
    """Text that something must be able to parse; it stays text, to be handed on."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the text."""
        try:
            self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def _check_domains(text: str) -> None:
    FetchSettings(allowed_media_domains=_split(text))


def _check_networks(text: str) -> None:
    FetchSettings(allowed_media_networks=_split(text))


def _check_key(text: str) -> None:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a key has visible ASCII characters and no spaces")


NBYTES = _Nbytes()
_COUNT = click.IntRange(min=1)


class FiniteRange(click.FloatRange):
    """A number in a range, and a number: no comparison keeps NaN out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


_SECONDS = FiniteRange(min=0, min_open=True)
_RATIO = FiniteRange(min=1)
_DIRECTORY = click.Path(exists=True, file_okay=False)
_FILE = click.Path(exists=True, dir_okay=False)
_DEFAULT = FrontendSettings()
_MEDIA = MediaLimits()
_FETCH = FetchSettings()


@dataclasses.dataclass(frozen=True)
class _Option:
    """An option of the command line.

    Attributes:
        names: as it is written; the first one is handed on.
        destination: a field of the settings, or of the one among them that ``group`` names.
        kind: its type.
        default: a tuple: it may be given several times.
        text: its help.
        group: ``media_limits`` or ``fetch``.
    """

    names: tuple[str, ...]
    destination: str
    kind: click.ParamType[Any] | type
    default: Any
    text: str
    group: str | None = None

    def add_to(self, command: _Command) -> _Command:
        """Returns the command with this option."""
        multiple, flag = isinstance(self.default, tuple), self.kind is bool
        shown = {} if flag or self.default is None or multiple else {"show_default": True}
        kind = {"is_flag": True} if flag else {"type": self.kind, "multiple": multiple}
        envvar = _KEYS_VARIABLE if self.destination == "api_keys" else None
        settings: dict[str, Any] = {"default": self.default, "help": self.text, "envvar": envvar, **kind, **shown}
        return click.option(*self.names, self.destination, **settings)(command)

    def written(self, value: Any) -> list[str]:
        """Returns it as it is written for a value."""
        if self.kind is bool:
            return [self.names[0]] if value else []
        values = value if isinstance(self.default, tuple) else [] if value is None else [value]
        return [f"{self.names[0]}={one}" for one in values]


_OPTIONS = (
    _Option(
        ("--served-model-name", "--model-name"),
        "served_model_name",
        str,
        None,
        "What requests must name as their model.  [default: the engine's own name of it]",
    ),
    _Option(
        ("--max-concurrent-requests",),
        "max_concurrent_requests",
        _COUNT,
        _DEFAULT.max_concurrent_requests,
        "Requests that a frontend has in flight, streams included; others wait in their sockets.",
    ),
    _Option(
        ("--max-concurrent-media",),
        "max_concurrent_media",
        _COUNT,
        _DEFAULT.max_concurrent_media,
        "Requests whose media a frontend decodes at a time.",
    ),
    _Option(
        ("--max-queued-requests",),
        "max_queued_requests",
        _COUNT,
        _DEFAULT.max_queued_requests,
        "Requests that may wait for either, in a frontend, before 503.",
    ),
    _Option(("--queue-timeout",), "queue_timeout_s", _SECONDS, _DEFAULT.queue_timeout_s, "Seconds they wait before 503."),
    _Option(
        ("--body-timeout",),
        "body_timeout_s",
        _SECONDS,
        _DEFAULT.body_timeout_s,
        "Seconds a body may take to arrive before 408.",
    ),
    _Option(
        ("--slot-timeout",),
        "slot_timeout_s",
        _SECONDS,
        _DEFAULT.slot_timeout_s,
        "Seconds to wait for space in the slab before 503.",
    ),
    _Option(
        ("--request-timeout",),
        "request_timeout_s",
        _SECONDS,
        _DEFAULT.request_timeout_s,
        "Seconds from the end of a request's body to the last byte of its answer before 504.",
    ),
    _Option(("--max-body-nbytes",), "max_body_nbytes", NBYTES, _DEFAULT.max_body_nbytes, "Largest body of a request."),
    _Option(
        ("--max-bodies-nbytes",),
        "max_bodies_nbytes",
        NBYTES,
        _DEFAULT.max_bodies_nbytes,
        "Bytes of all bodies that a frontend holds; further ones wait in their sockets.",
    ),
    _Option(
        ("--max-media-nbytes",),
        "max_media_nbytes",
        NBYTES,
        _DEFAULT.max_media_nbytes,
        "Most bytes of a request's media files together, fetched ones included.",
    ),
    _Option(("--max-inputs",), "max_inputs", _COUNT, _DEFAULT.max_inputs, "Most inputs of an embedding request."),
    _Option(
        ("--limit-mm-per-prompt",),
        "limit_mm_per_prompt",
        _Parsed("limits", MediaCounts.parse),
        '{"image": 64, "audio": 16, "video": 8}',
        "Most media of a request: JSON, or image=16,video=2.",
    ),
    _Option(
        ("--media-io-kwargs",),
        "media_io_kwargs",
        _Parsed("json", MediaIoKwargs.parse),
        "{}",
        'How media are read, as JSON: {"video": {"num_frames": 32}}.',
    ),
    _Option(("--decode-threads",), "decode_threads", _COUNT, _DEFAULT.decode_threads, "Media a frontend decodes at a time."),
    _Option(
        ("--disable-mm-shm",),
        "disable_mm_shm",
        bool,
        False,
        "Send media inside messages instead of through shared memory; to compare with.",
    ),
    _Option(
        ("--allowed-media-domains",),
        "allowed_media_domains",
        _Parsed("hosts", _check_domains),
        (),
        "Hosts that media are fetched from: a.org, *.b.org, c.org:9000; several with commas, or again.  [default: none]",
        "fetch",
    ),
    _Option(
        ("--allowed-media-networks",),
        "allowed_media_networks",
        _Parsed("cidrs", _check_networks),
        (),
        "Private networks that these hosts may be in: 10.1.0.0/16.  [default: none]",
        "fetch",
    ),
    _Option(
        ("--allowed-local-media-path",),
        "allowed_local_media_path",
        _DIRECTORY,
        None,
        "A directory whose files may be read by file: URLs.  [default: none]",
        "fetch",
    ),
    _Option(
        ("--media-fetch-timeout",),
        "fetch_timeout_s",
        _SECONDS,
        _FETCH.fetch_timeout_s,
        "Seconds for fetching one medium.",
        "fetch",
    ),
    _Option(
        ("--max-pixels",), "max_image_pixels", _COUNT, _MEDIA.max_image_pixels, "Most pixels of a picture.", "media_limits"
    ),
    _Option(
        ("--max-aspect-ratio",),
        "max_aspect_ratio",
        _RATIO,
        _MEDIA.max_aspect_ratio,
        "Longer side by shorter side, of pictures and frames.",
        "media_limits",
    ),
    _Option(
        ("--max-image-expansion",),
        "max_image_expansion",
        _RATIO,
        _MEDIA.max_image_expansion,
        "Decoded bytes for each byte of the file, of large pictures.",
        "media_limits",
    ),
    _Option(
        ("--max-image-nbytes",),
        "max_image_nbytes",
        NBYTES,
        _MEDIA.max_image_nbytes,
        "Largest file of a picture.",
        "media_limits",
    ),
    _Option(
        ("--max-audio-nbytes",),
        "max_audio_nbytes",
        NBYTES,
        _MEDIA.max_audio_nbytes,
        "Largest file of a recording.",
        "media_limits",
    ),
    _Option(
        ("--max-audio-duration",),
        "max_audio_duration_s",
        _SECONDS,
        _MEDIA.max_audio_duration_s,
        "Longest recording, in seconds.",
        "media_limits",
    ),
    _Option(
        ("--max-video-nbytes",), "max_video_nbytes", NBYTES, _MEDIA.max_video_nbytes, "Largest file of a clip.", "media_limits"
    ),
    _Option(
        ("--max-video-duration",),
        "max_video_duration_s",
        _SECONDS,
        _MEDIA.max_video_duration_s,
        "Longest clip, in seconds.",
        "media_limits",
    ),
    _Option(
        ("--max-frame-pixels",),
        "max_frame_pixels",
        _COUNT,
        _MEDIA.max_frame_pixels,
        "Most pixels of a clip's frame.",
        "media_limits",
    ),
    _Option(
        ("--max-num-frames",), "max_num_frames", _COUNT, _MEDIA.max_num_frames, "Most frames taken of a clip.", "media_limits"
    ),
)

_KEYS = _Option(
    ("--api-key",),
    "api_keys",
    _Parsed("key", _check_key),
    (),
    f"A key that callers of /v1 must send; may be given several times. Other users of this machine can read it here, but "
    f"not in {_KEYS_VARIABLE} (several with spaces) nor in a file.",
)
_KEY_FILE = _Option(("--api-key-file",), "api_key_file", _FILE, None, "A file of such keys, one in a line.")


def frontend_options(command: _Command) -> _Command:
    """Adds the options to a command; it gets them as keyword arguments, for :func:`settings_of`."""
    for option in reversed((*_OPTIONS, _KEYS, _KEY_FILE)):
        command = option.add_to(command)
    return command


def settings_of(values: dict[str, Any]) -> FrontendSettings:
    """Returns the settings that the options ask for.

    Raises:
        OSError, ValueError: the file of keys can't be read, or has none.
    """
    groups: dict[str | None, dict[str, Any]] = {None: {}, "media_limits": {}, "fetch": {}}
    for option in _OPTIONS:
        groups[option.group][option.destination] = values[option.destination]
    own, fetch = groups[None], groups["fetch"]
    for name in ("allowed_media_domains", "allowed_media_networks"):
        fetch[name] = tuple(one for text in fetch[name] for one in _split(text))
    own["limit_mm_per_prompt"] = MediaCounts.parse(own["limit_mm_per_prompt"])
    own["media_io_kwargs"] = MediaIoKwargs.parse(own["media_io_kwargs"])
    limits = MediaLimits(**groups["media_limits"])
    return FrontendSettings(api_keys=_keys_of(values), media_limits=limits, fetch=FetchSettings(**fetch), **own)


def frontend_arguments(values: dict[str, Any]) -> list[str]:
    """Returns the options as they are written, for a frontend's command line; without the keys."""
    return [argument for option in _OPTIONS for argument in option.written(values[option.destination])]


def frontend_environment(values: dict[str, Any]) -> dict[str, str]:
    """Returns what a frontend's environment must have besides: the keys.

    Raises:
        OSError, ValueError: the file of keys can't be read, or has none.
    """
    keys = _keys_of(values)
    return {_KEYS_VARIABLE: " ".join(keys)} if keys else {}


def _keys_of(values: dict[str, Any]) -> tuple[str, ...]:
    keys = list(values["api_keys"])
    if values["api_key_file"] is not None:
        lines = [line.strip() for line in Path(values["api_key_file"]).read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line]
        if not found:
            raise ValueError(f"{values['api_key_file']} has no keys; write one in a line")
        for key in found:
            _check_key(key)
        keys += found
    return tuple(dict.fromkeys(keys))


def _split(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())
