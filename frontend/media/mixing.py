"""From the channels of a recording to one, at the rate that is wanted.

Channels are mixed such that no full scale input overflows (stereo: their mean), as libswresample weighs them; rate conversion
is libswresample's.

If the two channels of a recording are each other's opposite, because a cable was soldered the wrong way round, their mean is
silence. So :class:`Mixture` counts, while a recording is mixed, what is lost in this way, and what would be lost if its first
channel were taken alone. Where the latter is less, the recording is decoded again. Only the whole of it shows this: a moment in
which the channels are opposites is common, and to go from one way to the other in the middle is heard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from shmring.frontend.media.errors import MediaError

__all__ = ["Mixture", "check_format", "first_channels", "mixed"]

# Beyond, libswresample's filters grow with the ratio of rates: 3 GB for 100 MHz.
_MIN_SAMPLE_RATE, _MAX_SAMPLE_RATE = 1_000, 768_000
_MAX_CHANNELS = 64  # libswresample's own limit
_MIXABLE_CHANNELS = (*range(1, 9), 10, 12, 14, 16, 24)  # numbers for which libav knows where the channels stand

_COUNTED = 4  # one frame in so many: all of them would cost a fifth of decoding
_OPPOSITE = 0.9  # of two channels: so much of their power is gone when they are added
_TOLERATED_SHARE = 0.01  # of a recording


def check_format(sample_rate: int, channels: int) -> None:
    """Refuses what can't be resampled or mixed.

    Args:
        sample_rate: samples a second.
        channels: how many.

    Raises:
        MediaError: they are too many, or too few.
    """
    if not _MIN_SAMPLE_RATE <= sample_rate <= _MAX_SAMPLE_RATE:
        raise MediaError(
            f"the recording has {sample_rate} samples a second; {_MIN_SAMPLE_RATE} to {_MAX_SAMPLE_RATE} are accepted"
        )
    if not 1 <= channels <= _MAX_CHANNELS:
        raise MediaError(f"the recording has {channels} channels; 1 to {_MAX_CHANNELS} are accepted")


class Mixture:
    """Counts what the mean of two channels loses, in units of power."""

    def __init__(self) -> None:
        self._total = 0.0
        self._lost_in_mean = 0.0
        self._lost_in_first = 0.0

    def counted(self, frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
        """Passes frames on, and counts one in a few."""
        for number, frame in enumerate(frames):
            if number % _COUNTED == 0 and frame.layout.nb_channels == 2:
                self._count(frame)
            yield frame

    def is_worse_than_the_first_channel(self) -> bool:
        """Whether the mean has lost more than the first channel alone would."""
        return self._lost_in_mean > max(_TOLERATED_SHARE * self._total, self._lost_in_first)

    def _count(self, frame: AudioFrame) -> None:
        samples = frame.to_ndarray()
        channels = (samples if frame.format.is_planar else samples.reshape(-1, 2).T).astype(np.float64)
        with np.errstate(all="ignore"):  # what is no number is refused where it is mixed
            channels -= channels.mean(axis=1, keepdims=True)  # silence need not be 0
            (first, common), (_, second) = (channels @ channels.T).tolist()
        self._total += first + second
        if -2 * common > _OPPOSITE * (first + second):
            self._lost_in_mean += first + second
        self._lost_in_first += second - common * common / first if first > 0 else second  # of which the first says nothing


def first_channels(frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
    """Takes the first of two channels alone."""
    for frame in frames:
        if frame.layout.nb_channels != 2:
            yield frame
            continue
        samples: NDArray[Any] = frame.to_ndarray()
        first = samples[:1] if frame.format.is_planar else samples.reshape(-1, 2)[:, 0][np.newaxis]
        alone = AudioFrame.from_ndarray(np.ascontiguousarray(first), frame.format.name, "mono")
        alone.sample_rate, alone.pts, alone.time_base = frame.sample_rate, frame.pts, frame.time_base
        yield alone


def mixed(frames: Iterator[AudioFrame], sample_rate: int) -> Iterator[AudioFrame]:
    """Mixes down to one channel, float32, and resamples. Some streams change their format on their way.

    Args:
        frames: of any format.
        sample_rate: that is wanted, in Hz.

    Raises:
        MediaError: they can't be resampled or mixed.
    """
    resampler: AudioResampler | None = None
    resampled_format: tuple[str, str, int] | None = None
    for frame in frames:
        frame_format = (frame.format.name, frame.layout.name, frame.sample_rate)
        if resampler is None or frame_format != resampled_format:
            if resampler is not None:
                yield from resampler.resample(None)
            check_format(frame.sample_rate, frame.layout.nb_channels)
            if frame.layout.nb_channels not in _MIXABLE_CHANNELS:
                raise MediaError(f"the recording has {frame.layout.nb_channels} channels in an arrangement that can't be mixed")
            # Mixing down is scaled such that full scale stays full scale; libswresample does not do that for floats.
            resampler = AudioResampler("flt", "mono", sample_rate, options={"rematrix_maxval": "1.0"})
            resampled_format = frame_format
        yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)
