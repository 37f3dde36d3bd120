"""What a frontend and its decoders say to each other: a job, and what became of it.

Files are not in these messages: their descriptors travel beside them (:mod:`shmring.frontend.media.decoder_process`). Neither
torch nor a decoder is imported here, since each end needs only one of the two.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shmring.engine.inputs import Feature, InputSpec, ProcessorSpec
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits

__all__ = ["MAX_MESSAGE_NBYTES", "Decode", "Decoded", "Failed", "Probe", "Probed", "Ready", "Reply"]

MAX_MESSAGE_NBYTES = 128 << 10  # the header of a clip of 512 frames takes 10 KB; a Unix socket takes 200 KB at once


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Job: find out how much memory a medium needs."""

    kind: MediaKind
    spec: InputSpec
    limits: MediaLimits
    io_kwargs: MediaIoKwargs


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Job: decode a medium into the second file. ``header`` is what :class:`Probed` said, and nobody else's to read.

    ``processor`` makes what is written there of a picture, if it makes what was foreseen; else its pixels are.
    """

    kind: MediaKind
    header: bytes
    io_kwargs: MediaIoKwargs
    processor: ProcessorSpec | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A decoder's first message."""

    pid: int


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """What memory decoding takes: ``shape`` of float32 for sounds, of uint8 for everything else; or ``features_nbytes`` for a
    picture that can be processed."""

    shape: tuple[int, ...]
    header: bytes
    features_nbytes: int = 0


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """What a medium turned out to be.

    Attributes:
        length: of the memory's first dimension, how much was written.
        duration_s: of a recording or clip.
        sample_rate: of a recording.
        timestamps_s: of a clip's frames.
        shortfall: what is missing of it, for its caller; nothing if nothing is.
        layout: of the features that were made of a picture; ``length`` counts their bytes.
    """

    length: int
    duration_s: float = 0.0
    sample_rate: int = 0
    timestamps_s: list[float] = []
    shortfall: str = ""
    layout: list[Feature] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a job was not done. What is ``expected`` is the medium's fault; otherwise the text is a traceback, for the log."""

    text: str
    expected: bool


Reply: TypeAlias = Probed | Decoded | Failed
