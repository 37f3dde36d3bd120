"""Log-mel spectrograms, written into the caller's memory while the recording is still being decoded.

What it is: windows of 25 ms (Hann) every 10 ms, the power of their spectrum, summed in overlapping triangular bands, and of
that the natural logarithm, floored at ``log(1e-10)``. The bands are evenly spaced on Slaney's mel scale (linear below 1 kHz,
logarithmic above) from 0 Hz to half the sample rate, and each triangle has the same area, so that white noise is level; both as
in Whisper and in librosa's defaults. Nothing is padded: the first window begins with the first sample, and the last is the
last that fits. A recording that is shorter than a window is followed by silence up to one.

Only a block of windows is in private memory at a time.

Source: M. Slaney, "Auditory Toolbox", Interval Research Technical Report 1998-010.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["LogMelWriter", "mel_filters", "num_mel_frames"]

_WINDOW_S = 0.025
_HOP_S = 0.010
_FLOOR = 1e-10  # of power; a tone at full scale has about 130
_BLOCK_FRAMES = 256  # 2.5 s: about 1 MB of windows and spectra, which stay in a core's second-level cache

_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0  # below, a mel is 66.7 Hz
_LOG_STEP = math.log(6.4) / 27  # above, 27 mel are a factor of 6.4


def _window_and_hop(sample_rate: int) -> tuple[int, int]:
    return max(1, round(_WINDOW_S * sample_rate)), max(1, round(_HOP_S * sample_rate))


def num_mel_frames(num_samples: int, sample_rate: int) -> int:
    """Returns the number of windows of a recording; at least 1."""
    window, hop = _window_and_hop(sample_rate)
    return 1 + max(0, num_samples - window) // hop


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < _BREAK_MEL, mel * (_BREAK_HZ / _BREAK_MEL), _BREAK_HZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))


def _hz_to_mel(hz: float) -> float:
    return hz * _BREAK_MEL / _BREAK_HZ if hz < _BREAK_HZ else _BREAK_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


@functools.lru_cache(maxsize=8)
def mel_filters(sample_rate: int, mel_bands: int) -> NDArray[np.float32]:
    """Returns the weight of each frequency in each band.

    The transform is as long as the lowest band needs to be wider than the distance of two frequencies, so that none is empty.

    Returns:
        (transform length // 2 + 1, bands), float32; read-only.

    Raises:
        ValueError: there are no bands, or more than 512.
    """
    if not 1 <= mel_bands <= 512:
        raise ValueError(f"there can be 1 to 512 mel bands, not {mel_bands}")
    edges = _mel_to_hz(np.linspace(0.0, _hz_to_mel(sample_rate / 2), mel_bands + 2))
    length = 1 << (_window_and_hop(sample_rate)[0] - 1).bit_length()
    while sample_rate / length > edges[1]:
        length *= 2
    hz = np.linspace(0.0, sample_rate / 2, length // 2 + 1)[:, np.newaxis]
    lower, centre, upper = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.minimum((hz - lower) / (centre - lower), (upper - hz) / (upper - centre)).clip(min=0.0)
    filters: NDArray[np.float32] = (triangles * (2.0 / (upper - lower))).astype(np.float32)
    filters.setflags(write=False)
    return filters


class LogMelWriter:
    """Takes samples as they come, and writes rows of a spectrogram.

    Args:
        target: (frames, bands), float32; :func:`num_mel_frames` says how many are needed.
        sample_rate: of the samples, in Hz.

    Attributes:
        length: rows written so far.
    """

    def __init__(self, target: NDArray[np.float32], sample_rate: int) -> None:
        self.length = 0
        self._target = target
        self._filters = mel_filters(sample_rate, target.shape[1])
        self._window_samples, self._hop_samples = _window_and_hop(sample_rate)
        phase = 2 * np.pi * np.arange(self._window_samples) / self._window_samples
        self._window = (0.5 - 0.5 * np.cos(phase)).astype(np.float32)
        self._waiting: list[NDArray[np.float32]] = []
        self._num_waiting = 0

    def write(self, samples: NDArray[np.float32]) -> None:
        """Takes samples, (samples,)."""
        self._waiting.append(samples)
        self._num_waiting += len(samples)
        if self._num_waiting >= self._window_samples + _BLOCK_FRAMES * self._hop_samples:
            self._write_windows()

    def finish(self) -> None:
        """Writes what is left; to be called once, after the last samples."""
        if self.length == 0 and 0 < self._num_waiting < self._window_samples:
            self.write(np.zeros(self._window_samples - self._num_waiting, np.float32))
        self._write_windows()

    def _write_windows(self) -> None:
        """Writes all windows that are complete, and keeps the samples of those that are not."""
        if self._num_waiting < self._window_samples:
            return
        samples = np.concatenate(self._waiting)
        windows = np.lib.stride_tricks.sliding_window_view(samples, self._window_samples)[:: self._hop_samples]
        for first in range(0, len(windows), _BLOCK_FRAMES):
            block = windows[first : first + _BLOCK_FRAMES]
            spectrum = np.fft.rfft(block * self._window, n=2 * (len(self._filters) - 1))
            power = np.square(spectrum.real) + np.square(spectrum.imag)
            rows = self._target[self.length : self.length + len(block)]
            np.matmul(power, self._filters, out=rows)
            np.log(np.maximum(rows, _FLOOR, out=rows), out=rows)
            self.length += len(block)
        rest = samples[len(windows) * self._hop_samples :].copy()
        self._waiting, self._num_waiting = [rest], len(rest)
