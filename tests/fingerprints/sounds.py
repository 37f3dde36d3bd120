"""The sample recordings, whole and in pieces of two seconds, altered."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator

import av
import numpy as np
import numpy.typing as npt
import torch
from av.audio.resampler import AudioResampler

from shmring.engine.fingerprints.sounds import MEL_BANDS, fingerprint_sound
from shmring.frontend.media.mel import LogMelWriter, num_mel_frames
from tests.fingerprints.scores import Kind, sample_files, score

_SAMPLE_RATE = 16_000
_PIECE_S = 2

Samples = npt.NDArray[np.float32]


def score_sounds() -> Iterator[Kind]:
    """Scores whole recordings, and pieces of them every second: neighbours have half in common."""
    recordings = [_read(file) for file in sample_files(".wav")]
    starts = [(samples, start) for samples in recordings for start in range(len(samples) // _SAMPLE_RATE - 1)]
    pieces = [samples[start * _SAMPLE_RATE : (start + _PIECE_S) * _SAMPLE_RATE] for samples, start in starts]
    for name, originals in (("Recordings", recordings), ("Pieces of two seconds", pieces)):
        copies = {title: [_fingerprint(alter(samples)) for samples in originals] for title, alter in _ALTERATIONS.items()}
        copies["another of them mixed in, 10 dB below"] = _mixed(originals, 10)
        copies["another of them mixed in, as loud (0 dB)"] = _mixed(originals, 0)
        yield score(name, [_fingerprint(samples) for samples in originals], copies)


def _fingerprint(samples: Samples) -> torch.Tensor:
    log_mel = np.empty((num_mel_frames(len(samples), _SAMPLE_RATE), MEL_BANDS), np.float32)
    writer = LogMelWriter(log_mel, _SAMPLE_RATE)
    writer.write(samples.astype(np.float32))
    writer.finish()
    return fingerprint_sound(torch.from_numpy(log_mel))


def _mixed(originals: list[Samples], below_db: float) -> list[torch.Tensor]:
    """Returns fingerprints of each recording with the next one in it."""
    mixtures = []
    for samples, other in zip(originals, originals[1:] + originals[:1], strict=True):
        long_enough = np.resize(other, len(samples))
        mixtures.append(_fingerprint(samples + long_enough * (samples.std() / long_enough.std() / 10 ** (below_db / 20))))
    return mixtures


# -- through codecs and sample rates ----------------------------------------------------------------------------------------


def _frame(samples: Samples, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[np.newaxis].astype(np.float32), "flt", "mono")
    frame.sample_rate = rate
    return frame


def _resampled(frames: Iterable[av.AudioFrame], rate: int) -> Samples:
    resampler = AudioResampler("flt", "mono", rate)
    pieces = [piece.to_ndarray()[0] for frame in [*frames, None] for piece in resampler.resample(frame)]
    samples: Samples = np.concatenate(pieces).astype(np.float32)
    return samples


def _read(file: bytes) -> Samples:
    with av.open(io.BytesIO(file), "r") as container:
        return _resampled(container.decode(audio=0), _SAMPLE_RATE)


def _mp3(samples: Samples, bit_rate: int) -> Samples:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp3") as container:
        stream = container.add_stream("mp3", rate=22_050, layout="mono", bit_rate=bit_rate)
        assert isinstance(stream, av.AudioStream)
        resampler = AudioResampler(stream.format, "mono", 22_050, stream.frame_size)
        for frame in (_frame(samples, _SAMPLE_RATE), None):
            for piece in resampler.resample(frame):
                container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return _read(encoded.getvalue())


def _narrow(samples: Samples, rate: int) -> Samples:
    """Takes a lower sample rate and comes back: higher frequencies get lost."""
    return _resampled([_frame(_resampled([_frame(samples, _SAMPLE_RATE)], rate), rate)], _SAMPLE_RATE)


def _faster(samples: Samples, factor: float) -> Samples:
    """Plays a recording faster, and so higher, as a tape does."""
    return _resampled([_frame(samples, round(_SAMPLE_RATE * factor))], _SAMPLE_RATE)


def _noisy(samples: Samples, below_db: float) -> Samples:
    noise = np.random.default_rng(1).standard_normal(len(samples))
    noisy: Samples = (samples + noise * (samples.std() / 10 ** (below_db / 20))).astype(np.float32)
    return noisy


def _cut(samples: Samples, start: float, end: float) -> Samples:
    return samples[round(len(samples) * start) : round(len(samples) * (1 - end))]


_ALTERATIONS: dict[str, Callable[[Samples], Samples]] = {
    "a tenth as loud": lambda samples: samples * np.float32(0.1),
    "three times as loud, clipped": lambda samples: (samples * 3).clip(-1, 1),
    "white noise, 20 dB below": lambda samples: _noisy(samples, 20),
    "white noise, 10 dB below": lambda samples: _noisy(samples, 10),
    "white noise, as loud (0 dB)": lambda samples: _noisy(samples, 0),
    "MP3, 32 kbit/s": lambda samples: _mp3(samples, 32_000),
    "resampled to 8 kHz": lambda samples: _narrow(samples, 8_000),
    "half a second of silence before": lambda samples: np.concatenate([np.zeros(_SAMPLE_RATE // 2, np.float32), samples]),
    "a twentieth cut at each end": lambda samples: _cut(samples, 0.05, 0.05),
    "a fifth cut at the start": lambda samples: _cut(samples, 0.2, 0),
    "the second half only": lambda samples: _cut(samples, 0.5, 0),
    "5 % faster": lambda samples: _faster(samples, 1.05),
    "10 % faster": lambda samples: _faster(samples, 1.1),
    "25 % faster": lambda samples: _faster(samples, 1.25),
    "backwards": lambda samples: samples[::-1],
}
