"""What a heavy caller sends, again and again, on so many connections.

Each is a request that a server may be sent by mistake or on purpose, by one caller who costs the others something. Sizes are
those that were seen to hurt: what a body costs to decode depends on how many values it has, what it costs to answer on how many
inputs, and what its media cost on how many they are, and how large.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.serving.media import picture_part, video_part

MODEL = "shmring-fingerprints"
EMBEDDINGS, CHATS = "/v1/embeddings", "/v1/chat/completions"
NUMBER = "@NUMBER@"  # in a body: another one each time

_MB = 1 << 20
_INPUTS = f'{{"model":"{MODEL}","input":['


def _encoded(**fields: object) -> bytes:
    return json.dumps({"model": MODEL} | fields).encode()


_SMALL = _encoded(input="hello")


class Attack(NamedTuple):
    """A heavy caller: what each of its connections posts, and what others post to the same server meanwhile.

    Attributes:
        title: of it.
        connections: how many.
        body: makes what they post.
        hangs_up_after_s: how long after that is sent they hang up; None: they read the answer.
        chunked: whether it goes in chunks of one byte.
        path: of what they post.
        small: what the others post, to embeddings or chats.
    """

    title: str
    connections: int
    body: Callable[[], bytes]
    hangs_up_after_s: float | None = None
    chunked: bool = False
    path: str = EMBEDDINGS
    small: bytes = _SMALL

    @property
    def small_path(self) -> str:
        """Where the others post."""
        return EMBEDDINGS if self.path == EMBEDDINGS else CHATS


def _parts(parts: list[dict[str, object]]) -> bytes:
    return _encoded(messages=[{"role": "user", "content": parts}])


def _texts(count: int, text: str = "abc") -> bytes:
    return _parts([{"type": "text", "text": text}] * count)


def _picture(width: int, height: int, seed: int = 0) -> dict[str, object]:
    return picture_part((width, height), np.random.default_rng(seed))


def _filled(before: str, item: str, after: str, nbytes: int) -> bytes:
    """Returns a body of about so many bytes, most of which is one thing again and again."""
    return (before + ",".join([item] * (nbytes // (len(item) + 1))) + after).encode()


def _every() -> Iterator[Attack]:
    yield Attack("2000 texts as parts", 4, lambda: _texts(2000))
    yield Attack("2000 texts as parts", 40, lambda: _texts(2000))
    yield Attack("2048 texts of 6 KB", 1, lambda: _texts(2048, "ab cd " * 1000))
    yield Attack("64 pictures of 64 x 64", 4, lambda: _parts([_picture(64, 64)] * 64))
    yield Attack("64 different pictures of 64 x 64", 4, lambda: _parts([_picture(64, 64, seed) for seed in range(64)]))
    yield Attack("64 pictures of 64 x 64", 40, lambda: _parts([_picture(64, 64)] * 64))
    yield Attack("empty lists, 1 MB", 4, lambda: _filled(_INPUTS, "[]", "]}", 1 * _MB))
    yield Attack("empty lists, 16 MB", 1, lambda: _filled(_INPUTS, "[]", "]}", 16 * _MB))
    yield Attack("empty messages, 16 MB", 1, lambda: _filled(
        f'{{"model":"{MODEL}","messages":[', '{"role":"user","content":[]}', "]}", 16 * _MB
    ))  # fmt: skip
    yield Attack("numbers, 40 MB", 1, lambda: _filled(_INPUTS, "1", "]}", 40 * _MB))
    yield Attack("a text of 15 MB", 1, lambda: _texts(1, "ab cd " * (15 * _MB // 6)))
    yield Attack("a text of quotes, 1 MB", 4, lambda: _filled(f'{{"model":"{MODEL}","input":["', r"\"\"", '"]}', 1 * _MB))
    yield Attack("2000 texts as parts and hanging up", 4, lambda: _texts(2000), hangs_up_after_s=0.0)
    yield Attack("1 MB in chunks of one byte", 8, lambda: b" " * _MB, chunked=True)
    yield Attack("a picture of 56 megapixels", 4, lambda: _parts([_picture(8640, 6480)]))
    yield Attack("a clip of 720p", 4, lambda: _parts([video_part((1280, 720), 30, np.random.default_rng(1))]))


EMBEDDING_ATTACKS = tuple(_every())
