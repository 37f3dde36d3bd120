"""The command line options of a frontend process, which are also options of ``shmring serve``.

Names and meanings are vLLM's where it has such an option.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shmring.engine.option_types import COUNT, NBYTES, SECONDS, FiniteRange
from shmring.engine.settings import MAX_ENGINES
from shmring.frontend.keys import KEYS_VARIABLE, read_keys
from shmring.frontend.listening import check_tls
from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.settings import CorsSettings, FrontendSettings, MediaCounts, ProcessSettings, TlsSettings, parse_list

__all__ = ["DATA_PARALLEL_SIZE", "FRONTEND_OPTIONS", "LISTENING_OPTIONS", "listening_of", "settings_of"]

if TYPE_CHECKING:
    _AnyType = click.ParamType[Any]
else:
    _AnyType = click.ParamType  # which older versions of click do not let be subscripted


class _Parsed(_AnyType):
    """Text that is parsed to something else."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns what the text says."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_domains(text: str) -> tuple[str, ...]:
    return FetchSettings(allowed_media_domains=_split(text)).allowed_media_domains


def _parse_networks(text: str) -> tuple[str, ...]:
    return FetchSettings(allowed_media_networks=_split(text)).allowed_media_networks


def _parse_origins(text: str) -> tuple[str, ...]:
    return CorsSettings(allowed_origins=parse_list(text)).allowed_origins


def _parse_methods(text: str) -> tuple[str, ...]:
    return CorsSettings(allowed_methods=parse_list(text)).allowed_methods


def _parse_headers(text: str) -> tuple[str, ...]:
    return CorsSettings(allowed_headers=parse_list(text)).allowed_headers


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_root_path(context: click.Context, parameter: click.Parameter, path: str) -> str:
    if path and not _ROOT_PATH.fullmatch(path):
        raise click.BadParameter(f"{path[:64]!r} is no path such as /llm, without a slash at its end")
    return path


_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_FILE = click.Path(exists=True, dir_okay=False)

DATA_PARALLEL_SIZE = click.Option(
    ["--data-parallel-size"],
    default=1,
    type=click.IntRange(1, MAX_ENGINES),
    help="Engines, each with a slab of its own, between which requests are divided; several are called NAME-0, NAME-1, ...",
)

_DEFAULT_PROCESS = ProcessSettings()

#: Where a server listens, and how; for :func:`listening_of`.
LISTENING_OPTIONS = (
    click.Option(["--host"], default=_DEFAULT_PROCESS.host, help="Where to listen. 0.0.0.0 is everywhere."),
    click.Option(
        ["--port"],
        default=_DEFAULT_PROCESS.port,
        type=click.IntRange(0, 65535),
        help="Where to listen; 0 is any free port.",
    ),
    click.Option(["--uds"], help="A path: listen at a Unix socket there, and not at a port."),
    click.Option(["--ssl-certfile"], type=_FILE, help="The certificate to speak TLS with, in PEM, and those above it."),
    click.Option(["--ssl-keyfile"], type=_FILE, help="Its key, in PEM.  [default: in the file of the certificate]"),
    click.Option(["--ssl-ca-certs"], type=_FILE, help="The authorities whose certificates callers may have, in PEM."),
    click.Option(
        ["--ssl-cert-reqs"],
        default=0,
        type=click.IntRange(0, 2),
        help="Whether callers must have a certificate: 0 no, 1 if they have one it must be valid, 2 yes.",
    ),
    click.Option(
        ["--root-path"],
        default="",
        callback=_check_root_path,
        show_default=False,
        help="A path that a proxy in front strips, such as /llm: links on /docs have it.  [default: none]",
    ),
    click.Option(
        ["--timeout-keep-alive", "timeout_keep_alive_s"],
        default=_DEFAULT_PROCESS.timeout_keep_alive_s,
        type=SECONDS,
        help="Seconds that a connection stays open between two requests. Behind a load balancer, longer than it keeps them.",
    ),
)

_RATIO = FiniteRange(min=1)
_SHARE = FiniteRange(min=0, max=1)
_DIRECTORY = click.Path(exists=True, file_okay=False)
_DEFAULT = FrontendSettings()
_MEDIA = MediaLimits()
_FETCH = FetchSettings()


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A field of the settings, and its option on the command line.

    Attributes:
        names: as it is written.
        destination: a field of the settings, or of the one among them that ``group`` names.
        kind: its type.
        default: a tuple: it may be given several times.
        text: its help.
        group: ``media_limits``, ``fetch`` or ``cors``.
    """

    names: tuple[str, ...]
    destination: str
    kind: click.ParamType[Any] | type
    default: Any
    text: str
    group: str | None = None

    def option(self) -> click.Option:
        """Returns it as click has it."""
        multiple, flag = isinstance(self.default, tuple), self.kind is bool
        shows_default = not (flag or multiple or self.default is None)
        kind: dict[str, Any] = {"is_flag": True} if flag else {"type": self.kind, "multiple": multiple}
        return click.Option(
            [*self.names, self.destination], default=self.default, help=self.text, show_default=shows_default, **kind
        )


_SETTINGS = (
    _Setting(
        ("--served-model-name", "--model-name"),
        "served_model_name",
        str,
        None,
        "What requests must name as their model.  [default: the engine's own name of it]",
    ),
    _Setting(
        ("--max-concurrent-requests",),
        "max_concurrent_requests",
        COUNT,
        _DEFAULT.max_concurrent_requests,
        "Requests that a frontend has in flight, streams included; others wait in their sockets.",
    ),
    _Setting(
        ("--max-concurrent-media",),
        "max_concurrent_media",
        COUNT,
        _DEFAULT.max_concurrent_media,
        "Requests with large media files that a frontend decodes at a time.",
    ),
    _Setting(
        ("--max-queued-requests",),
        "max_queued_requests",
        COUNT,
        _DEFAULT.max_queued_requests,
        "Requests that may wait for either, in a frontend, before 503.",
    ),
    _Setting(("--queue-timeout",), "queue_timeout_s", SECONDS, _DEFAULT.queue_timeout_s, "Seconds they wait before 503."),
    _Setting(
        ("--body-timeout",),
        "body_timeout_s",
        SECONDS,
        _DEFAULT.body_timeout_s,
        "Seconds a body may take to arrive before 408.",
    ),
    _Setting(
        ("--slot-timeout",),
        "slot_timeout_s",
        SECONDS,
        _DEFAULT.slot_timeout_s,
        "Seconds to wait for space in the slab before 503.",
    ),
    _Setting(
        ("--request-timeout",),
        "request_timeout_s",
        SECONDS,
        _DEFAULT.request_timeout_s,
        "Seconds from the end of a request's body to the last byte of its answer before 504.",
    ),
    _Setting(("--max-body-nbytes",), "max_body_nbytes", NBYTES, _DEFAULT.max_body_nbytes, "Largest body of a request."),
    _Setting(
        ("--max-bodies-nbytes",),
        "max_bodies_nbytes",
        NBYTES,
        _DEFAULT.max_bodies_nbytes,
        "Bytes of all bodies that a frontend holds; further ones wait in their sockets.",
    ),
    _Setting(
        ("--max-decoded-nbytes",),
        "max_decoded_nbytes",
        NBYTES,
        _DEFAULT.max_decoded_nbytes,
        "Bytes of decoded media that a frontend holds outside the slab; further ones wait.",
    ),
    _Setting(
        ("--max-media-nbytes",),
        "max_media_nbytes",
        NBYTES,
        _DEFAULT.max_media_nbytes,
        "Most bytes of a request's media files together, fetched ones included.",
    ),
    _Setting(("--max-inputs",), "max_inputs", COUNT, _DEFAULT.max_inputs, "Most inputs of an embedding request."),
    _Setting(
        ("--limit-mm-per-prompt",),
        "limit_mm_per_prompt",
        _Parsed("limits", MediaCounts.parse),
        '{"image": 64, "audio": 16, "video": 8}',
        "Most media of a request: JSON, or image=16,video=2.",
    ),
    _Setting(
        ("--media-io-kwargs",),
        "media_io_kwargs",
        _Parsed("json", MediaIoKwargs.parse),
        "{}",
        'How media are read, as JSON: {"video": {"num_frames": 32}}.',
    ),
    _Setting(
        ("--decoders",),
        "decoders",
        COUNT,
        _DEFAULT.decoders,
        "Processes in which a frontend decodes media, one medium each at a time.",
    ),
    _Setting(
        ("--engine-retries",),
        "engine_retries",
        click.IntRange(0, MAX_ENGINES),
        _DEFAULT.engine_retries,
        "How often a request goes to another engine because its own died before it had answered, where there are several.",
    ),
    _Setting(
        ("--disable-mm-shm",),
        "disable_mm_shm",
        bool,
        False,
        "Decode media into private memory, and copy them to shared memory when they are sent; to compare with.",
    ),
    _Setting(
        ("--allowed-media-domains",),
        "allowed_media_domains",
        _Parsed("hosts", _parse_domains),
        (),
        "Hosts that media are fetched from: a.org, *.b.org, c.org:9000; several with commas, or in several such options.  "
        "[default: none]",
        "fetch",
    ),
    _Setting(
        ("--allowed-media-networks",),
        "allowed_media_networks",
        _Parsed("cidrs", _parse_networks),
        (),
        "Private networks that these hosts may be in: 10.1.0.0/16.  [default: none]",
        "fetch",
    ),
    _Setting(
        ("--allowed-local-media-path",),
        "allowed_local_media_path",
        _DIRECTORY,
        None,
        "A directory whose files may be read by file: URLs.  [default: none]",
        "fetch",
    ),
    _Setting(
        ("--media-fetch-timeout",),
        "fetch_timeout_s",
        SECONDS,
        _FETCH.fetch_timeout_s,
        "Seconds for fetching one medium.",
        "fetch",
    ),
    _Setting(
        ("--allowed-origins",),
        "allowed_origins",
        _Parsed("json", _parse_origins),
        "[]",
        """Other sites whose pages may call this server (CORS): '["https://chat.example.org"]', or '["*"]' for all.""",
        "cors",
    ),
    _Setting(
        ("--allow-credentials",),
        "allow_credentials",
        bool,
        False,
        "Browsers may send cookies and certificates along from such pages.",
        "cors",
    ),
    _Setting(
        ("--allowed-methods",),
        "allowed_methods",
        _Parsed("json", _parse_methods),
        '["*"]',
        "HTTP methods that such pages may use, as a JSON list.",
        "cors",
    ),
    _Setting(
        ("--allowed-headers",),
        "allowed_headers",
        _Parsed("json", _parse_headers),
        '["*"]',
        "Headers that such pages may send, as a JSON list.",
        "cors",
    ),
    _Setting(
        ("--max-pixels",), "max_image_pixels", COUNT, _MEDIA.max_image_pixels, "Most pixels of a picture.", "media_limits"
    ),
    _Setting(
        ("--max-aspect-ratio",),
        "max_aspect_ratio",
        _RATIO,
        _MEDIA.max_aspect_ratio,
        "Longer side by shorter side, of pictures and frames.",
        "media_limits",
    ),
    _Setting(
        ("--max-image-expansion",),
        "max_image_expansion",
        _RATIO,
        _MEDIA.max_image_expansion,
        "Decoded bytes for each byte of the file, of large pictures.",
        "media_limits",
    ),
    _Setting(
        ("--max-image-nbytes",),
        "max_image_nbytes",
        NBYTES,
        _MEDIA.max_image_nbytes,
        "Largest file of a picture.",
        "media_limits",
    ),
    _Setting(
        ("--max-audio-nbytes",),
        "max_audio_nbytes",
        NBYTES,
        _MEDIA.max_audio_nbytes,
        "Largest file of a recording.",
        "media_limits",
    ),
    _Setting(
        ("--max-audio-duration",),
        "max_audio_duration_s",
        SECONDS,
        _MEDIA.max_audio_duration_s,
        "Longest recording, in seconds.",
        "media_limits",
    ),
    _Setting(
        ("--max-video-nbytes",), "max_video_nbytes", NBYTES, _MEDIA.max_video_nbytes, "Largest file of a clip.", "media_limits"
    ),
    _Setting(
        ("--max-video-duration",),
        "max_video_duration_s",
        SECONDS,
        _MEDIA.max_video_duration_s,
        "Longest clip, in seconds.",
        "media_limits",
    ),
    _Setting(
        ("--max-frame-pixels",),
        "max_frame_pixels",
        COUNT,
        _MEDIA.max_frame_pixels,
        "Most pixels of a clip's frame.",
        "media_limits",
    ),
    _Setting(
        ("--max-num-frames",), "max_num_frames", COUNT, _MEDIA.max_num_frames, "Most frames taken of a clip.", "media_limits"
    ),
    _Setting(
        ("--max-decode-time",),
        "max_decode_s",
        SECONDS,
        _MEDIA.max_decode_s,
        "Seconds of a processor's core that a medium may take.",
        "media_limits",
    ),
    _Setting(
        ("--max-missing-share",),
        "max_missing_share",
        _SHARE,
        _MEDIA.max_missing_share,
        "Share of a medium that may be missing because its file is damaged or truncated: 0 to 1; callers are told what is.",
        "media_limits",
    ),
)

#: The options of a frontend; a command gets them as keyword arguments, for :func:`settings_of`.
FRONTEND_OPTIONS = (
    *(setting.option() for setting in _SETTINGS),
    click.Option(
        ["--api-key", "api_keys"],
        multiple=True,
        help="A key that callers of /v1 must send; may be given several times. Other users of this machine can read it here, "
        f"but not in the variable {KEYS_VARIABLE} (several with spaces) nor in a file. Keys of all three are accepted.",
    ),
    click.Option(["--api-key-file"], type=_FILE, help="A file of such keys, one in a line, which only its owner can read."),
)


def listening_of(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of :class:`ProcessSettings` that :data:`LISTENING_OPTIONS` ask for.

    Raises:
        click.UsageError: a certificate or its key can't be used.
    """
    certfile, others = values["ssl_certfile"], ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
    given = [f"--{name.replace('_', '-')}" for name in others if values[name]]
    if certfile is None and given:
        raise click.UsageError(f"{given[0]} needs --ssl-certfile")
    tls = None
    if certfile is not None:
        tls = TlsSettings(
            certfile=certfile,
            keyfile=values["ssl_keyfile"],
            ca_certs=values["ssl_ca_certs"],
            cert_reqs=values["ssl_cert_reqs"],
        )
        try:
            check_tls(tls)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    names = ("host", "port", "uds", "root_path", "timeout_keep_alive_s")
    return {"tls": tls, **{name: values[name] for name in names}}


def settings_of(values: dict[str, Any]) -> FrontendSettings:
    """Returns the settings that the options and the variable of keys ask for.

    Raises:
        click.UsageError: the keys are none, or their file can't be read, or can be read by everybody.
    """
    groups: dict[str | None, dict[str, Any]] = {None: {}, "media_limits": {}, "fetch": {}, "cors": {}}
    for setting in _SETTINGS:
        groups[setting.group][setting.destination] = values[setting.destination]
    own, fetch = groups[None], groups["fetch"]
    for name in ("allowed_media_domains", "allowed_media_networks"):
        fetch[name] = tuple(part for parts in fetch[name] for part in parts)
    try:
        keys = read_keys(values["api_keys"], os.environ.get(KEYS_VARIABLE), values["api_key_file"])
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    limits = MediaLimits(**groups["media_limits"])
    cors = CorsSettings(**groups["cors"])
    return FrontendSettings(api_keys=keys, media_limits=limits, fetch=FetchSettings(**fetch), cors=cors, **own)
