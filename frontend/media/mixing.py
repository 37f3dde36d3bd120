"""From the channels of a recording to one, at the rate that is wanted.

Channels are mixed such that no full scale input overflows (stereo: their mean), as libswresample weighs them; rate conversion
is libswresample's.

If the channels of a recording cancel each other out, because a cable was soldered the wrong way round, their mean is silence.
So :class:`Mixture` counts, while a recording is mixed, what is lost in this way, and what would be lost if one of its channels
were taken alone. Where the latter is less, the recording is decoded again. Only the whole of it shows this: a moment in which
channels are opposites is common, and to go from one way to the other in the middle is heard.

Channels that stand where nobody has said how they are mixed count as the usual ones of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from shmring.frontend.media.errors import MediaError

__all__ = ["Mixture", "check_format", "mixed"]

# Beyond, libswresample's filters grow with the ratio of rates: 3 GB for 100 MHz.
_MIN_SAMPLE_RATE, _MAX_SAMPLE_RATE = 1_000, 768_000
_MAX_CHANNELS = 64  # libswresample's own limit
_MIXABLE_CHANNELS = (*range(1, 9), 10, 12, 14, 16, 24)  # numbers for which libav knows where the channels stand
_PLACES = " channels ("  # in the name of an arrangement that has no name of its own

_COUNTED = 4  # one frame in so many: all of them would cost a fifth of decoding
_OPPOSITE = 0.9  # so much of the power of all channels is gone when they are added
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
    """Counts what the mean of channels loses, in units of power. Recordings of different numbers of channels may be joined."""

    def __init__(self) -> None:
        self._losses: dict[int, _Losses] = {}

    def counted(self, frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
        """Passes frames on, and counts one in a few."""
        for number, frame in enumerate(frames):
            num_channels = frame.layout.nb_channels
            if number % _COUNTED == 0 and num_channels > 1:
                if num_channels not in self._losses:
                    self._losses[num_channels] = _Losses(num_channels)
                self._losses[num_channels].count(_channels_of(frame).astype(np.float64))
            yield frame

    def is_worse_than_a_channel(self) -> bool:
        """Whether the mean has lost more than a channel alone would."""
        return any(losses.are_too_many for losses in self._losses.values())

    def without_losses(self, frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
        """Takes a channel alone where the mean of all has lost more."""
        for frame in frames:
            losses = self._losses.get(frame.layout.nb_channels)
            if losses is None or not losses.are_too_many:
                yield frame
            else:
                alone = _channels_of(frame)[losses.best_channel][np.newaxis]
                yield _frame_like(frame, alone, frame.format.name, "mono")


class _Losses:
    """What the mean of so many channels loses, and what each of them would, of whatever is in the others."""

    def __init__(self, num_channels: int) -> None:
        self._total = 0.0
        self._in_mean = 0.0
        self._in_channel = np.zeros(num_channels)

    @property
    def best_channel(self) -> int:
        """The first of those that lose least, or not noticeably more."""
        return int(np.argmax(self._in_channel <= self._in_channel.min() + _TOLERATED_SHARE * self._total))

    @property
    def are_too_many(self) -> bool:
        return self._in_mean > max(_TOLERATED_SHARE * self._total, float(self._in_channel.min()))

    def count(self, channels: NDArray[np.float64]) -> None:
        with np.errstate(all="ignore"):  # what is no number is refused where it is mixed
            channels = channels - channels.mean(axis=1, keepdims=True)  # silence need not be 0
            common = channels @ channels.T
            powers = np.diag(common)
            alone = np.divide((common**2).sum(axis=1), powers, out=np.zeros_like(powers), where=powers > 0)
            total = powers.sum()
            self._total += total
            self._in_mean += total if common.sum() < (1 - _OPPOSITE) * total else 0
            self._in_channel += total - alone


def _channels_of(frame: AudioFrame) -> NDArray[Any]:
    samples = frame.to_ndarray()
    return samples if frame.format.is_planar else samples.reshape(-1, frame.layout.nb_channels).T


def _frame_like(frame: AudioFrame, samples: NDArray[Any], sample_format: str, layout: str) -> AudioFrame:
    """Returns a frame of other samples, or of another layout, for the same time."""
    made = AudioFrame.from_ndarray(np.ascontiguousarray(samples), sample_format, layout)
    made.sample_rate, made.pts, made.time_base = frame.sample_rate, frame.pts, frame.time_base
    return made


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
        number, has_places, _ = frame.layout.name.partition(_PLACES)
        if has_places:
            frame = _frame_like(frame, frame.to_ndarray(), frame.format.name, f"{number} channels")
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
