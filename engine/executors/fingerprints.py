"""The ``fingerprints`` executor: from pictures, sounds, clips and texts to fingerprints, on the CPU, without a model.

An executor in one file, to be read as an example of one (docs/executors.md). The fingerprints themselves are
:mod:`shmring.engine.fingerprints`: a fingerprint says what a thing looks or sounds like, or how it is worded, and altered
copies of it stay close. They make the whole path testable where there is no accelerator, and are useful by themselves for
finding near-duplicates. All fingerprints have one size, and each kind of thing has a space of its own, so that one index can
hold them all; a picture of a dog is not near the word for it.

Invariants: deterministic; a request fails alone, and its error holds no view of the slab.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from shmring.engine.executors.encoding import Encoded, EncodingLine
from shmring.engine.executors.interface import ExecutorOptions, StepInput, StepOutput
from shmring.engine.fingerprints.clips import FRAMES_LIMIT, fingerprint_clip_in_steps
from shmring.engine.fingerprints.pictures import fingerprint_picture
from shmring.engine.fingerprints.sounds import MEL_BANDS, fingerprint_sound
from shmring.engine.fingerprints.texts import count_words, fingerprint_text
from shmring.engine.fingerprints.vectors import FINGERPRINT_SIZE
from shmring.engine.protocol import (
    EncodeRequest,
    Features,
    InputSpec,
    Medium,
    ModelDescription,
    Picture,
    PictureSpec,
    SoundSpec,
    Spectrogram,
    Text,
    Video,
    VideoSpec,
    Waveform,
    tensor_of,
)

__all__ = ["FingerprintsExecutor"]

_MAX_BATCH_SIZE = 1024  # a step takes some milliseconds however many there are, and who waits outside is not seen to be small
_NOT_GENERATING = "the fingerprints executor does not generate: ask for embeddings, or choose another executor"

# Fingerprints look at 96 lines a side: more pixels of a frame would only fill the slab.
_FRAME_PIXELS = 512 * 512
_FRAMES = 16  # as many as moments are described

_PIXELS_LIMIT = 1 << 40  # a million squared: no picture has more, so a larger number is a mistake


class FingerprintsExecutor:
    """Describes things; deterministic.

    Args:
        options: of these it takes ``mm_processor_kwargs`` only: ``max_pixels``, to which pictures and frames are scaled down
            before they come (default: pictures as they are, frames 512 * 512), and ``num_frames`` of a clip (default: 16).

    Raises:
        ValueError: there is an option that it does not have, or one that makes no sense.
    """

    def __init__(self, options: ExecutorOptions = ExecutorOptions()) -> None:  # noqa: B008  it is frozen
        if options.model is not None:
            raise ValueError("the fingerprints executor loads no model; leave the model out, or choose another executor")
        if options.options:
            raise ValueError(f"the fingerprints executor has no options; remove {', '.join(sorted(options.options))}")
        self._input = _input_spec(options.mm_processor_kwargs)
        self._line = EncodingLine(_describe, _expected_s)

    def describe(self) -> ModelDescription:
        return ModelDescription(
            executor="fingerprints",
            model="shmring-fingerprints",
            tasks=["encode"],
            input=self._input,
            max_batch_size=_MAX_BATCH_SIZE,
            pauses=True,
            embedding_size=FINGERPRINT_SIZE,
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Describes inputs for some milliseconds."""
        requests = {step.request_id: step.payload for step in batch if isinstance(step.payload, EncodeRequest)}
        outputs = self._line.execute(requests)
        return [outputs.get(step.request_id) or ValueError(_NOT_GENERATING) for step in batch]

    def forget(self, request_id: int) -> None:
        """Lets go of a request's fingerprints so far."""
        self._line.forget(request_id)

    def close(self) -> None:
        """Holds nothing."""


def _input_spec(mm_processor_kwargs: Mapping[str, Any]) -> InputSpec:
    limits = {"max_pixels": _PIXELS_LIMIT, "num_frames": FRAMES_LIMIT}
    for name, value in mm_processor_kwargs.items():
        if name not in limits:
            raise ValueError(
                f"the fingerprints executor does not know {name!r} of mm_processor_kwargs; it knows {', '.join(limits)}"
            )
        if type(value) is not int or not 1 <= value <= limits[name]:
            raise ValueError(f"{name} of mm_processor_kwargs is a whole number from 1 to {limits[name]}; got {value!r}")
    max_pixels = mm_processor_kwargs.get("max_pixels")
    return InputSpec(
        text=True,
        picture=PictureSpec(max_pixels=max_pixels),
        sound=SoundSpec(form="log_mel", mel_bands=MEL_BANDS),
        video=VideoSpec(
            num_frames=mm_processor_kwargs.get("num_frames", _FRAMES),
            max_pixels=_FRAME_PIXELS if max_pixels is None else max_pixels,
        ),
    )


def _describe(items: Sequence[Text | Medium]) -> list[Encoded | Exception] | Generator[None, None, Encoded]:
    """Returns a fingerprint of the first, and how many words were read; a clip's in steps."""
    match items[0]:
        case Text(text=str() as text):
            return [(fingerprint_text(text), count_words(text))]
        case Text():
            raise ValueError("the fingerprints executor has no tokens; send the text")
        case Picture() as picture:
            return [(fingerprint_picture(picture.pixels), 0)]
        case Spectrogram() as sound:
            return [(fingerprint_sound(sound.log_mel), 0)]
        case Video() as clip:
            return _describe_clip(clip)
        case Waveform():
            raise ValueError("the fingerprints executor takes sounds as log-mel spectrograms; got a waveform")
        case Features():
            raise ValueError("the fingerprints executor takes pictures as pixels; got features")


def _describe_clip(clip: Video) -> Generator[None, None, Encoded]:
    return (yield from fingerprint_clip_in_steps(clip.frames, clip.timestamps_s, clip.duration_s)), 0


def _expected_s(item: Text | Medium) -> float:
    """About what describing takes: a fixed part, and one for each character or byte."""
    if isinstance(item, Text):
        return 0.0001 + len(item.text) * 0.2e-6
    return 0.002 + tensor_of(item).nbytes * 1e-9
