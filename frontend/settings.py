"""The settings of a frontend process: frozen objects, every limit with its reason. They travel to it as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits

__all__ = ["CorsSettings", "FrontendSettings", "MediaCounts", "ProcessSettings", "TlsSettings", "parse_list"]

_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s@]+|null")  # RFC 6454, as browsers send it
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaCounts:
    """How many media of each modality a request may have. All of a request's media share one slot.

    Attributes:
        image: 64 pictures of two megapixels take 384 MB of the slab.
        audio: 16 recordings of ten minutes take 300 MB of it as mel bands.
        video: 8 clips of 16 frames of 1280 x 720 take 354 MB of it.
    """

    image: int = 64
    audio: int = 16
    video: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            count = getattr(self, field.name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"limit-mm-per-prompt: {field.name} must be a number of at least 0, not {str(count)[:64]!r}")

    def of(self, kind: MediaKind) -> int:
        """Returns how many of a kind are accepted."""
        return {"image": self.image, "audio": self.audio, "video": self.video}[kind]

    @classmethod
    def parse(cls, text: str) -> MediaCounts:
        """Reads vLLM's ``--limit-mm-per-prompt``: ``{"image": 16, "video": 2}`` or ``image=16,video=2``.

        What is not named keeps its default.

        Raises:
            ValueError: the text has neither form, or names a modality that does not exist.
        """
        counts = _json_counts(text) if text.lstrip().startswith("{") else _listed_counts(text)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = counts.keys() - set(known)
        if unknown:
            raise ValueError(f"limit-mm-per-prompt: there is no modality {min(unknown)[:64]!r}; there are {', '.join(known)}")
        return cls(**counts)


def _json_counts(text: str) -> dict[str, Any]:
    try:
        counts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"limit-mm-per-prompt is not JSON: {error}") from None
    assert isinstance(counts, dict), "it begins with a brace"
    return counts


def _listed_counts(text: str) -> dict[str, int]:
    counts = {}
    for item in text.split(","):
        name, equals, count = item.partition("=")
        if not equals or not count.strip().isdecimal():
            raise ValueError(f"limit-mm-per-prompt: write image=16,video=2 or a JSON object, not {text[:64]!r}")
        counts[name.strip()] = int(count)
    return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorsSettings:
    """Which pages of other sites a browser lets call this server (CORS).

    Attributes:
        allowed_origins: of such pages, ``https://chat.example.org``; ``*``: all. None: no such page may call.
        allow_credentials: whether a browser sends its cookies and certificates along.
        allowed_methods: that such pages may use; ``*``: all.
        allowed_headers: that such pages may send; ``*``: all.

    Raises:
        ValueError: something is no origin, no method or no name of a header.
    """

    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed-origins: {origin[:64]!r} is no origin: write https://chat.example.org, without a path"
                )
        for name, texts in (("allowed-methods", self.allowed_methods), ("allowed-headers", self.allowed_headers)):
            for text in texts:
                if not _TOKEN.fullmatch(text):
                    raise ValueError(f"{name}: {text[:64]!r} is none")


def parse_list(text: str) -> tuple[str, ...]:
    """Reads vLLM's lists of texts: ``["a", "b"]``. Also takes ``a,b``.

    Raises:
        ValueError: the text has neither form.
    """
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not a JSON list: {error}") from None
    if not all(isinstance(part, str) for part in texts):
        raise ValueError("this is not a list of texts")
    return tuple(texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """Limits of one frontend process, and what it calls its model.

    Attributes:
        served_model_name: what requests must name as ``model``; None: as the engine's executor calls it.
        api_keys: what callers of ``/v1`` must have one of; none: anybody may call.
        max_concurrent_requests: requests in flight, from those that wait for their turn to streams that are being answered.
            1024 is what the engine takes from one frontend (``RingConfig.max_inflight``).
        max_concurrent_media: requests with large media files that are decoded at a time. Such a file stays in memory until it
            is decoded, and its decoder has a copy of it.
        max_queued_requests: requests that wait for either; further ones are turned away. Each costs a connection, up to
            320 KB of body that arrived with its header, and its part of ``max_bodies_nbytes``.
        queue_timeout_s: how long they wait, and how long a request waits for memory to decode its media into. Shorter than the
            600 s after which the ``openai`` client gives up.
        body_timeout_s: how long a body may take to arrive. It keeps nobody waiting, but is memory and a connection.
        slot_timeout_s: how long a request waits for space in the slab.
        request_timeout_s: from the end of a request's body to the last byte of its answer: media, slot, engine and sending.
            600 s are what the ``openai`` client waits.
        max_body_nbytes: of a request. 64 MiB hold six pictures of 12 megapixels as JPEG in base64.
        max_bodies_nbytes: of all bodies together that have arrived and are not in the slab yet. Further ones wait in their
            sockets, where flow control bounds them; one at a time may exceed it.
        max_decoded_nbytes: of media that are decoded and not in the slab yet, of all requests together. A quarter of it is for
            requests that are decoded quickly; the rest holds five pictures of 12 megapixels, or four clips of 16 frames of
            1280 x 720. A larger request is decoded alone.
        max_media_nbytes: of the files of a request's media together, wherever they come from; for clips that are fetched.
        max_inputs: texts and media of an embedding request, as in OpenAI's API.
        limit_mm_per_prompt: how many media a request may have.
        engine_retries: how often a request is sent to another engine because its own died before it had answered, where there
            are several. A request that kills engines kills one more than this.
        decoders: processes that decode, each one medium at a time and on one core. With two or more, one is kept for small
            pictures and recordings.
        disable_mm_shm: media are decoded into private memory, and copied to the slab when they are sent; to compare with.
        media_limits: what media may be.
        media_io_kwargs: how they are prepared, where that is not the executor's choice.
        fetch: where they may come from.
        cors: which pages of other sites may call.
    """

    served_model_name: str | None = None
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    max_concurrent_requests: int = 1024
    max_concurrent_media: int = 8
    max_queued_requests: int = 1024
    queue_timeout_s: float = 300.0
    body_timeout_s: float = 60.0
    slot_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_body_nbytes: int = 64 << 20
    max_bodies_nbytes: int = 256 << 20
    max_decoded_nbytes: int = 256 << 20
    max_media_nbytes: int = 512 << 20
    max_inputs: int = 2048
    limit_mm_per_prompt: MediaCounts = dataclasses.field(default_factory=MediaCounts)
    engine_retries: int = 1
    decoders: int = 4
    disable_mm_shm: bool = False
    media_limits: MediaLimits = dataclasses.field(default_factory=MediaLimits)
    media_io_kwargs: MediaIoKwargs = dataclasses.field(default_factory=MediaIoKwargs)
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    cors: CorsSettings = dataclasses.field(default_factory=CorsSettings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """With what a server speaks TLS; files in PEM.

    Attributes:
        certfile: its certificate, and those between it and the authority's.
        keyfile: the key of its certificate; None: that is in ``certfile``.
        ca_certs: the authorities whose certificates callers may have.
        cert_reqs: whether callers must have one: ``ssl.CERT_NONE`` (0), ``CERT_OPTIONAL`` (1) or ``CERT_REQUIRED`` (2).
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """One frontend process.

    Attributes:
        name: of the engine.
        data_parallel_size: how many engines there are: with several, they are called NAME-0, NAME-1 and so on.
        socket_dir: where the engine's socket lies; None: the default.
        host, port: where to listen; port 0 is any free one.
        uds: the path of a Unix socket to listen at, instead.
        tls: what it speaks TLS with; None: it does not.
        root_path: what a proxy in front strips from paths, for links to this server; empty: nothing.
        timeout_keep_alive_s: how long a connection stays open between two requests. A proxy that keeps connections must give
            them up sooner, or it sends requests to some that have just been closed.
        listen_fd: an inherited socket that listens, instead.
        connect_timeout_s: how long to wait for the engine. It imports torch and fills its slab, about 1 s for each 4 GiB;
            loading a model takes longer.
        shutdown_timeout_s: how long requests may go on after the process was told to end.
        log_level: what is logged, to stderr.
        http: what it serves, and its limits.
    """

    name: str = "shmring"
    data_parallel_size: int = 1
    socket_dir: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls: TlsSettings | None = None
    root_path: str = ""
    timeout_keep_alive_s: float = 5.0
    listen_fd: int | None = None
    connect_timeout_s: float = 30.0
    shutdown_timeout_s: float = 2.0
    log_level: str = "info"
    http: FrontendSettings = dataclasses.field(default_factory=FrontendSettings)
