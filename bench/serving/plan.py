"""What ``bench serve`` does: loads, the media in them, the servers under them, and what is compared. A preset has all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

Endpoint = Literal["chat", "embeddings"]


class Media(NamedTuple):
    """A medium of each request: of so many different ones, which requests take in turn."""

    size: tuple[int, int]  # width and height in pixels
    frames: int = 0  # of a clip of 10 frames a second (H.264, MP4); 0: it is a picture (JPEG)
    distinct: int = 64

    @property
    def title(self) -> str:
        pixels = f"{self.size[0]}x{self.size[1]}"
        return f"a clip of {self.frames} frames of {pixels}" if self.frames else f"a picture of {pixels}"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, all of it due at once; text alone, if it has no media.

    Answers of ``chat`` are streamed. ``embeddings`` has one for each medium.
    """

    requests: int
    max_concurrency: int
    endpoint: Endpoint = "chat"
    output_tokens: int = 1
    media: Media | None = None

    @property
    def title(self) -> str:
        carried = "text only" if self.media is None else self.media.title
        tokens = f", {self.output_tokens} tokens each" if self.endpoint == "chat" else ""
        return f"{self.requests:,} {self.endpoint} requests with {carried}{tokens}, {self.max_concurrency} at a time"


#: How a server is started for the run: with these arguments of ``shmring serve``.
Server = tuple[str, ...]


class Preset(NamedTuple):
    """A load, a server, and two of it that are compared; and the target: requests a second of the first one to those of the
    second.
    """

    load: Load
    server: Server
    compared: Mapping[str, Server]  # by name: what each of the two has besides
    what: str
    limit: float

    @property
    def servers(self) -> dict[str, Server]:
        return {name: (*self.server, *besides) for name, besides in self.compared.items()}


_SYNTHETIC = "--executor=synthetic"
NOTHING_KEPT = "--mm-processor-cache-gb=0"  # each request's media are prepared
_ENGINES: Mapping[str, Server] = {"2 engines": ("--data-parallel-size=2",), "1 engine": ()}
_KEPT: Mapping[str, Server] = {"kept": (), "not kept": (NOTHING_KEPT,)}


PRESETS: Mapping[str, Preset] = {
    # vLLM's pull request 32104, which moved tensors of media from its API servers to its engine by torch's queues instead of
    # inside messages, and measured 9.62 against 9.59 requests/s. It does not say how large its frames were; these are 360p, and
    # a tenth of its requests.
    "pr32104": Preset(
        Load(requests=100, max_concurrency=40, output_tokens=128, media=Media((640, 360), frames=10)),
        ("--api-server-count=3", _SYNTHETIC, NOTHING_KEPT, '--mm-processor-kwargs={"num_frames": 10}'),
        {"slab": (), "copied": ("--disable-mm-shm",)},
        "decoded into slots: requests/s of copying there",
        1.0,
    ),
    # Engines whose steps take 20 ms of somebody else's time, as a GPU's do, and have four requests at most: what they answer a
    # second is theirs, and not that of the machine's cores.
    "engines-wait": Preset(
        Load(requests=400, max_concurrency=32, output_tokens=8),
        (_SYNTHETIC, '--executor-options={"step_s": 0.02, "max_batch_size": 4}', NOTHING_KEPT),
        _ENGINES,
        "two engines whose steps wait 20 ms, two frontends: requests/s of one",
        1.9,
    ),
    # Engines whose steps compute, and want the cores that the other one has.
    "engines-compute": Preset(
        Load(requests=400, max_concurrency=32, endpoint="embeddings", media=Media((512, 512))),
        ("--executor=fingerprints", NOTHING_KEPT),
        _ENGINES,
        "two engines whose steps compute: requests/s of one",
        1.0,
    ),
    # One photograph that everybody asks about.
    "repeated": Preset(
        Load(requests=40, max_concurrency=4, media=Media((4000, 3000), distinct=1)),
        (_SYNTHETIC,),
        _KEPT,
        "kept content: requests/s of a new picture",
        5.0,
    ),
    # 200 pictures of 2.4 MB in turn, on 224 MiB that can be leased: each has gone when it is its turn again. What can't be kept
    # is no worse than without, within what two equal servers differ by.
    "twice-the-slab": Preset(
        Load(requests=400, max_concurrency=8, media=Media((1024, 768), distinct=200)),
        (_SYNTHETIC, "--slab-nbytes=240MiB"),
        _KEPT,
        "kept content: requests/s of without",
        0.97,
    ),
}
