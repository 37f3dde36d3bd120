"""What a run does: the load, the media in it, the servers under it, and how often. All of it is in the stored results.

Fields are what the options of ``bench serve`` set; their help says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

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
    },
    # Engines whose steps take 20 ms of somebody else's time, as a GPU's do, and have four requests at most: what they answer a
    # second is theirs, and not that of the machine's cores.
    "engines-wait": {
        "requests": 400,
        "max_concurrency": 32,
        "endpoint": "chat",
        "kinds": (),
        "output_tokens": 8,
        "api_servers": 2,
        "executor": "synthetic",
        "executor_options": '{"step_s": 0.02, "max_batch_size": 4}',
        "compare_engines": 2,
    },
    # Engines whose steps compute, and want the cores that the other one has.
    "engines-compute": {
        "requests": 400,
        "max_concurrency": 32,
        "endpoint": "embeddings",
        "kinds": ("picture",),
        "picture_size": (512, 512),
        "api_servers": 2,
        "executor": "fingerprints",
        "compare_engines": 2,
    },
    # One photograph that everybody asks about.
    "repeated": {
        "requests": 40,
        "max_concurrency": 4,
        "endpoint": "chat",
        "kinds": ("picture",),
        "picture_size": (4000, 3000),
        "distinct": 1,
        "output_tokens": 1,
        "executor": "synthetic",
    },
    # 200 pictures of 2.4 MB in turn, on 224 MiB that can be leased: each has gone when it is its turn again.
    "twice-the-slab": {
        "requests": 400,
        "max_concurrency": 8,
        "endpoint": "chat",
        "kinds": ("picture",),
        "picture_size": (1024, 768),
        "distinct": 200,
        "output_tokens": 1,
        "slab_nbytes": "240MiB",
        "executor": "synthetic",
    },
}


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What requests have besides their text: one medium each, of the kinds in turn; none: text alone.

    Recordings have one channel of 16 kHz and 16 bits (WAV), clips 10 frames a second (H.264, MP4). Of each kind ``distinct``
    ones are made, which requests take in turn: unless it keeps them, a server has nothing of a medium beyond its request, so
    one seen before costs it no less, and 64 clips of 360p are made in two seconds.
    """

    kinds: tuple[MediaKind, ...] = ("picture",)
    picture_size: tuple[int, int] = (512, 512)
    audio_seconds: float = 10.0
    video_frames: int = 10
    video_size: tuple[int, int] = (640, 360)
    distinct: int = 64


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and when.

    Attributes:
        endpoint: ``chat`` streams its answers; ``embeddings`` has one for each medium.
        request_rate: requests that become due a second; None: all at once.
        burstiness: shape of the gamma distribution of the times between them; 1 is a Poisson process.
        max_concurrency: None: as many as are due.
        warm_up_requests: sent before, four at a time, and not counted: the first requests of a process pay for imports and
            first touches.
        seed: of arrival times, texts and media.
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
    """A server that is started for the run: arguments of ``shmring serve``, of which ``further`` are as they are written there.

    Attributes:
        engines: that requests are divided between.
        copied: media are decoded into private memory, and copied when they are sent (``--disable-mm-shm``).
        kept: what was prepared is kept, and used again (``--mm-processor-cache-gb``); else each request's media are prepared.
        start_timeout_s: until it must be ready. Importing torch in each process takes 10 s on a busy machine.
    """

    executor: str = "synthetic"
    executor_options: str = "{}"
    api_servers: int = 2
    engines: int = 1
    slab_nbytes: str = "1GiB"
    copied: bool = False
    kept: bool = False
    further: tuple[str, ...] = ()
    start_timeout_s: float = 120.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        url: of a server that runs already; None: the run has its own.
        model: None: the first one that the server lists.
        api_key: that the server asks for; not stored with the results.
        compare: two servers, slab and copied, with the same load in turn.
        compare_engines: two servers likewise, with so many engines and with one; 0: no such comparison.
        compare_kept: two servers, of which one keeps what it has prepared, with the same load in turn.
        repetitions: how often each gets the load.
    """

    load: Load
    url: str | None = None
    model: str | None = None
    api_key: str | None = None
    server: ServerOptions = ServerOptions()
    compare: bool = False
    compare_engines: int = 0
    compare_kept: bool = False
    repetitions: int = 1

    @property
    def compares(self) -> bool:
        """Whether two servers are compared."""
        return self.compare or bool(self.compare_engines) or self.compare_kept


def arrival_times(load: Load) -> list[float]:
    """Returns when each request is due, in seconds from the start of the load; the same for the same load."""
    if load.request_rate is None:
        return [0.0] * load.requests
    generator = np.random.default_rng((load.seed, 0))
    gaps = generator.gamma(load.burstiness, 1 / (load.request_rate * load.burstiness), load.requests - 1)
    times: list[float] = np.cumsum(np.concatenate([[0.0], gaps])).tolist()
    return times
