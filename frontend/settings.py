"""The settings of a frontend process: frozen objects, every limit with its reason. They travel to it as JSON.

Command line, help and page are made of them (:mod:`shmring.service.flags`). Names and meanings of options are vLLM's where it
has such an option.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from shmring.door import far_address_of
from shmring.engine.settings import DEFAULT_SHUTDOWN_TIMEOUT_S, MAX_ENGINES, LogFormat, LogLevel
from shmring.frontend.callers.keys import KeyOwner
from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits
from shmring.service.far_engines import EngineTls, context_of_frontend
from shmring.service.flags import NO_OPTION, Flag
from shmring.service.tracing import parse_endpoint

__all__ = [
    "CorsSettings",
    "FarEngineSettings",
    "FrontendSettings",
    "MediaCounts",
    "ProcessSettings",
    "TlsSettings",
    "frontend_name",
    "parse_list",
]

_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s@]+|null")  # RFC 6454, as browsers send it
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaCounts:
    """How many media of each modality a request may have.

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

        A modality that is not named keeps its default.

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
        allowed_origins: Other sites whose pages may call this server (CORS): '["https://chat.example.org"]', or '["*"]' for
            all.
        allow_credentials: Browsers may send cookies and certificates along from such pages.
        allowed_methods: HTTP methods that such pages may use, as a JSON list. ``*`` is all.
        allowed_headers: Headers that such pages may send, as a JSON list. ``*`` is all.

    Raises:
        ValueError: something is no origin, no method or no name of a header.
    """

    allowed_origins: Annotated[tuple[str, ...], Flag(parse=parse_list, default="[]", metavar="JSON")] = ()
    allow_credentials: bool = False
    allowed_methods: Annotated[tuple[str, ...], Flag(parse=parse_list, default='["*"]', metavar="JSON")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Flag(parse=parse_list, default='["*"]', metavar="JSON")] = ("*",)

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
    """Limits of one frontend process, and the names of its model.

    Attributes:
        served_model_name: What requests may name as their model; several if given several times. Empty: the engine's own name.
        api_keys: what callers of ``/v1`` must have one of. None: anybody may call.
        admin_keys: what callers of the routes for operators must have one of. None: there are no such routes.
        key_owners: the owners of those that have one, and their limits.
        max_concurrent_requests: Requests that a frontend has in flight, streams included; others wait in their sockets.

            The engine takes 1024 from one frontend (``RingConfig.max_inflight``).
        max_concurrent_media: Requests with media files of more than 256 KiB that a frontend decodes at a time.

            Such a file is in memory twice until it is decoded.
        max_queued_requests: Requests that may wait for either, in a frontend, before 503.

            Each costs a connection, up to 320 KB of body, and its part of ``max_bodies_nbytes``.
        queue_timeout_s: Seconds they wait before 503.

            A request waits as long for memory to decode into. The ``openai`` client gives up after 600 s.
        body_timeout_s: Seconds a body may take to arrive before 408.
        slot_timeout_s: Seconds to wait for space in the slab before 503.
        request_timeout_s: Seconds from the end of a request's body to the last byte of its answer before 504.

            The ``openai`` client waits for 600 s.
        max_body_nbytes: Largest body of a request.

            64 MiB hold six pictures of 12 megapixels as JPEG in base64.
        max_bodies_nbytes: Bytes of all bodies that a frontend holds; further ones wait in their sockets.

            Bodies that are not in the slab yet; one at a time may exceed it.
        max_decoded_nbytes: Bytes of decoded media that a frontend holds outside the slab; further ones wait.

            A quarter is for requests that are decoded quickly; the rest holds five pictures of 12 megapixels. A larger request
            is decoded alone.
        max_media_nbytes: Most bytes of a request's media files together, fetched ones included.
        max_inputs: Most inputs of an embedding request.

            As many as in OpenAI's API.
        response_store_nbytes: Bytes of conversations and answers of /v1/responses that the server keeps, unless they say store:
            false; of all frontends together.

            What is too old goes first, then the oldest of whoever has most.
        response_lifetime_s: Seconds for which it keeps them at most. 0: it keeps none.
        limit_mm_per_prompt: Most media of a request: JSON, or image=16,video=2.
        max_priority: How urgent callers may say that a request is: priority -N is the most urgent. 0: none more than usual.

            More urgent requests go first, whoever sends them. ``max-priority=N`` behind a key says it for its owner.
        engine_retries: With several engines: how often a request is sent to another engine because its own died before it had
            replied.

            A request that crashes engines can crash this many and one more.
        decoders: Processes in which a frontend decodes media, one medium each at a time.

            Of two or more, one is for small pictures and recordings.
        disable_mm_shm: Decode media into private memory, and copy them to shared memory when they are sent; to compare with.
        access_log: Write a line for each request to stderr, whatever --log-level says: caller, method, path, status, seconds.
        media_limits: what media may be.
        media_io_kwargs: How media are read, as JSON: {"video": {"num_frames": 32}}.
        fetch: where they may come from.
        cors: which pages of other sites may call.
    """

    served_model_name: Annotated[tuple[str, ...], Flag(names=("--served-model-name", "--model-name"))] = ()
    api_keys: Annotated[tuple[str, ...], NO_OPTION] = dataclasses.field(default=(), repr=False)
    admin_keys: Annotated[tuple[str, ...], NO_OPTION] = dataclasses.field(default=(), repr=False)
    key_owners: Annotated[tuple[KeyOwner, ...], NO_OPTION] = ()
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
    response_store_nbytes: int = 64 << 20
    response_lifetime_s: Annotated[float, Flag(least=0)] = 3600.0
    limit_mm_per_prompt: Annotated[MediaCounts, Flag(metavar="LIMITS")] = dataclasses.field(default_factory=MediaCounts)
    max_priority: Annotated[int, Flag(least=0)] = 0
    engine_retries: Annotated[int, Flag(least=0, most=MAX_ENGINES)] = 1
    decoders: int = 4
    disable_mm_shm: bool = False
    access_log: Annotated[bool, Flag(names=("--access-log/--disable-uvicorn-access-log",))] = False
    media_limits: MediaLimits = dataclasses.field(default_factory=MediaLimits)
    media_io_kwargs: Annotated[MediaIoKwargs, Flag(default="{}", metavar="JSON")] = dataclasses.field(
        default_factory=MediaIoKwargs
    )
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    cors: CorsSettings = dataclasses.field(default_factory=CorsSettings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """The certificates and keys of a server; files in PEM.

    Attributes:
        certfile: The certificate to speak TLS with, in PEM, and those above it.
        keyfile: Its key, in PEM. None: in the file of the certificate.
        ca_certs: The authorities whose certificates callers may have, in PEM.
        cert_reqs: Whether callers must have a certificate: 0 no, 1 if they have one it must be valid, 2 yes.
    """

    certfile: Annotated[str, Flag(names=("--ssl-certfile",), path="file")]
    keyfile: Annotated[str | None, Flag(names=("--ssl-keyfile",), path="file")] = None
    ca_certs: Annotated[str | None, Flag(names=("--ssl-ca-certs",), path="file")] = None
    cert_reqs: Annotated[int, Flag(names=("--ssl-cert-reqs",), least=0, most=2)] = 0


def _checked_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    for address in addresses:
        far_address_of(address)
    return tuple(addresses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarEngineSettings:
    """Engines on other hosts, which listen there (--listen).

    Attributes:
        engine: The address of an engine on another host, tcp://HOST:PORT/NAME; given several times, of several. Empty: the
            engine of --name on this host.
        engine_token_file: A file of the token that these engines want, which only its owner can read. None: the variable
            SHMRING_ENGINE_TOKEN.
        engine_ca_certs: The authorities whose certificates these engines have, in PEM. None: only this host is reached.
        engine_tls: off: connections to these engines are not encrypted, also beyond this host.
        engine_token: the token.
    """

    engine: Annotated[tuple[str, ...], Flag(parse=_checked_addresses, metavar="ADDRESS")] = ()
    engine_token_file: Annotated[str | None, Flag(path="file")] = None
    engine_ca_certs: Annotated[str | None, Flag(path="file")] = None
    engine_tls: EngineTls = "auto"
    engine_token: Annotated[str | None, NO_OPTION] = dataclasses.field(default=None, repr=False)

    def check(self) -> None:
        """Looks whether the token and the file are there.

        Raises:
            ValueError: they are not; says what to do.
        """
        if self.engine and self.engine_token is None:
            raise ValueError("--engine needs a token: --engine-token-file, or the variable SHMRING_ENGINE_TOKEN")
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """Returns what :func:`shmring.connect` is to get."""
        if not self.engine:
            return {}
        return {"token": self.engine_token, "tls": context_of_frontend(self.engine_ca_certs, self.engine_tls)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """One frontend process.

    Attributes:
        name: The engine's name. Two servers of a user need two.
        data_parallel_size: Engines, each with a slab of its own, between which requests are divided; several are called
            NAME-0, NAME-1, ...
        socket_dir: Where the engine's socket lies. None: the user's runtime directory.
        far: engines on other hosts, in place of those of this host.
        host: Where to listen. 0.0.0.0 is everywhere.
        port: Where to listen; 0 is any free port.
        uds: A path: listen at a Unix socket there, and not at a port.
        tls: certificates and keys; None: no TLS.
        root_path: A path that a proxy in front strips, such as /llm: links on /docs have it. Empty: none.
        timeout_keep_alive_s: Seconds that a connection stays open between two requests. Behind a load balancer, set more than
            the balancer's own time.
        listen_fd: A listening socket to inherit instead.
        connect_timeout_s: Seconds to wait for the engine, which may be loading a model.

            It imports torch and fills its slab, about 1 s for each 4 GiB.
        index: which one of its server's it is; None: it has no supervisor.
        shutdown_delay_s: Seconds that it goes on listening after SIGTERM, SIGINT or SIGHUP, while /ready answers 503, so that a
            load balancer notices.
        shutdown_timeout_s: Seconds that running requests may go on after that; then, or with 0 at once, they are aborted.
            Stopping takes up to 6 s more, and 0.5 s for each GiB of slab; a second signal kills.
        log_level: What is logged, to stderr.
        log_format: How: text for people, or json, an object in a line.
        otlp_traces_endpoint: Where traces go, by OTLP: http://localhost:4317 for gRPC, http://localhost:4318 for HTTP. None:
            there are none.
        http: what it serves, and its limits.
        usage_fd: the inherited descriptor of a memory in which all frontends count what owners of keys use. None: none.
        responses_fd: that of the memory in which they keep responses. None: none.
    """

    name: str = "shmring"
    data_parallel_size: Annotated[int, Flag(names=("--data-parallel-size", "-dp"), least=1, most=MAX_ENGINES)] = 1
    socket_dir: str | None = None
    far: FarEngineSettings = dataclasses.field(default_factory=FarEngineSettings)
    host: str = "127.0.0.1"
    port: Annotated[int, Flag(least=0, most=65535)] = 8000
    uds: str | None = None
    tls: Annotated[TlsSettings | None, NO_OPTION] = None
    root_path: Annotated[str, Flag(parse=_parse_root_path)] = ""
    timeout_keep_alive_s: float = 5.0
    listen_fd: Annotated[int | None, Flag(least=0)] = None
    connect_timeout_s: Annotated[float, Flag(least=0)] = 30.0
    index: Annotated[int | None, NO_OPTION] = None
    shutdown_delay_s: Annotated[float, Flag(least=0)] = 0.0
    shutdown_timeout_s: Annotated[float, Flag(least=0)] = DEFAULT_SHUTDOWN_TIMEOUT_S
    log_level: Annotated[LogLevel, Flag(names=("--log-level", "--uvicorn-log-level"))] = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: Annotated[str | None, Flag(parse=parse_endpoint, metavar="URL")] = None
    http: Annotated[FrontendSettings, NO_OPTION] = dataclasses.field(default_factory=FrontendSettings)
    usage_fd: Annotated[int | None, NO_OPTION] = None
    responses_fd: Annotated[int | None, NO_OPTION] = None


def frontend_name(index: int) -> str:
    """Returns what the engine's snapshots and log call a frontend of a server."""
    return f"frontend {index}"


def _parse_root_path(path: str) -> str:
    if path and not _ROOT_PATH.fullmatch(path):
        raise ValueError(f"{path[:64]!r} is no path such as /llm, without a slash at its end")
    return path
