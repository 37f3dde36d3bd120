"""What a run does: the load, the media in it, the servers under it, and how often. All of it is in the stored results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

__all__ = ["PRESETS", "Endpoint", "Load", "Media", "MediaKind", "Plan", "ServerOptions", "arrival_times"]

Endpoint = Literal["chat", "embeddings"]
MediaKind = Literal["picture", "audio", "video"]

#: What ``--preset`` sets, by the names of the command's parameters. What is given besides it counts more.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # vLLM's pull request 32104, which moved tensors of media from its API servers to its engine by torch's queues instead of
    # inside messages, and measured 9.62 against 9.59 requests/s. It does not say how large its frames were; these are 360p.
    "pr32104": {
        "requests": 1000,
        "max_concurrency": 400,
        "endpoint": "chat",
        "kinds": ("video",),
        "video_frames": 10,
        "video_size": (640, 360),
        "output_tokens": 128,
        "api_servers": 3,
        "executor": "synthetic",
    }
}


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What requests have besides their text: one medium each, of the kinds in turn; none: text alone.

    Attributes:
        kinds: of media.
        picture_size, video_size: width and height in pixels.
        audio_seconds: length of a recording (16 kHz, one channel, 16 bits, WAV).
        video_frames: of a clip (H.264 at 10 frames a second, MP4).
        distinct: media made of each kind; requests take them in turn. The server keeps nothing of a medium beyond its
            request, so that one seen before costs it no less, and 64 clips of 360p are made in two seconds.
        directory: take the files of this directory instead of making any.
    """

    kinds: tuple[MediaKind, ...] = ("picture",)
    picture_size: tuple[int, int] = (512, 512)
    audio_seconds: float = 10.0
    video_frames: int = 10
    video_size: tuple[int, int] = (640, 360)
    distinct: int = 64
    directory: str | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and when.

    Attributes:
        requests: how many.
        endpoint: ``chat`` streams its answers; ``embeddings`` has one for each medium.
        request_rate: requests that become due a second; None: all at once.
        burstiness: shape of the gamma distribution of the times between them. 1 is a Poisson process, less comes in
            bursts, more is steadier.
        max_concurrency: requests in flight at most; None: as many as are due.
        output_tokens: asked for in each chat.
        warm_up_requests: sent before, four at a time, and not counted: the first requests of a process pay for imports and
            first touches.
        request_timeout_s: after which a request has failed.
        seed: of arrival times, texts and media.
        media: see there.
    """

    requests: int
    endpoint: Endpoint = "chat"
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    output_tokens: int = 128
    warm_up_requests: int = 8
    request_timeout_s: float = 600.0
    seed: int = 1
    media: Media = Media()


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is started for the run.

    Attributes:
        executor: what computes.
        executor_options: its options, as JSON.
        api_servers: frontend processes.
        slab_nbytes: size of the slab, in bytes or as ``1GiB``.
        inline: media travel inside messages instead of through the slab (``--disable-mm-shm``).
        further: further arguments of ``shmring serve``, as they are written.
        start_timeout_s: until it must be ready. Importing torch in each process takes 10 s on a busy machine.
    """

    executor: str = "synthetic"
    executor_options: str = "{}"
    api_servers: int = 2
    slab_nbytes: str = "1GiB"
    inline: bool = False
    further: tuple[str, ...] = ()
    start_timeout_s: float = 120.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        load: what is sent.
        url: of a server that runs already; None: the run has its own.
        model: what requests name as their model; None: the first one that the server lists.
        api_key: that the server asks for; not stored with the results.
        server: the run's own server.
        compare: two of them, slab and inline, with the same load in turn.
        repetitions: how often each gets the load.
    """

    load: Load
    url: str | None = None
    model: str | None = None
    api_key: str | None = None
    server: ServerOptions = ServerOptions()
    compare: bool = False
    repetitions: int = 1


def arrival_times(load: Load) -> list[float]:
    """Returns when each request is due, in seconds from the start of the load; the same for the same load."""
    if load.request_rate is None:
        return [0.0] * load.requests
    generator = np.random.default_rng((load.seed, 0))
    gaps = generator.gamma(load.burstiness, 1 / (load.request_rate * load.burstiness), load.requests - 1)
    times: list[float] = np.cumsum(np.concatenate([[0.0], gaps])).tolist()
    return times
