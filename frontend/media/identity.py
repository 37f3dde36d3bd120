"""The key of a prepared medium: a hash of its file, and of everything that affects its preparation.

Two files with the same bytes that are prepared in the same way become the same pixels or samples, for every caller. So they are
kept and found under this key. Limits are part of the key: a medium that is found has passed them.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version

import msgspec

import shmring
from shmring.engine.protocol import InputSpec
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits

__all__ = ["key_of", "preparation_of"]

#: Raise it when a decoder makes something else of the same file.
_PREPARATION = 2
_DECODERS = ("pillow", "pillow-heif", "av", "numpy")


@functools.lru_cache(maxsize=16)
def preparation_of(kind: MediaKind, spec: InputSpec, limits: MediaLimits, io_kwargs: MediaIoKwargs) -> bytes:
    """Returns what is said of how media of a kind are prepared.

    Args:
        kind: of the media.
        spec: what the executor takes.
        limits: what media may be.
        io_kwargs: how they are prepared, where that is not the executor's choice.
    """
    versions = [shmring.__version__, *map(version, _DECODERS)]
    return msgspec.json.encode([_PREPARATION, versions, kind, spec, limits, io_kwargs])


def key_of(preparation: bytes, data: bytes) -> bytes:
    """Returns the key of a file that is prepared in some way. It releases the interpreter lock for large ones.

    Args:
        preparation: from :func:`preparation_of`.
        data: the file.
    """
    digest = hashlib.sha256(len(preparation).to_bytes(8, "little"))
    digest.update(preparation)
    digest.update(data)
    return digest.digest()
