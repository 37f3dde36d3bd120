"""What the demonstration sends: real files, altered as they say."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from shmring.frontend.demo import media
from shmring.frontend.demo.media import Sample


def open_picture(sample: Sample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sample.file)).convert("RGB")).astype(float)


def decode_sound(sample: Sample) -> np.ndarray:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=22_050)
    with av.open(io.BytesIO(sample.file)) as container:
        frames = [part.to_ndarray().reshape(-1) for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    return np.concatenate(frames)


def test_every_sample_picture_is_sent_as_it_is_and_altered() -> None:
    families = list(media.pictures())
    assert len(families) == 8
    original, recompressed, scaled, brightened, cropped = families[0]
    assert (original.name, original.alteration, original.size) == ("astronaut", "", "512x512")
    assert len(recompressed.file) < len(original.file) / 2
    assert open_picture(scaled).shape == (256, 256, 3)
    assert open_picture(cropped).shape == (488, 488, 3)
    dark = open_picture(original) < 200  # the others can't become brighter
    assert 1.05 < open_picture(brightened)[dark].mean() / open_picture(original)[dark].mean() < 1.15


def test_every_sample_recording_is_sent_as_it_is_and_altered() -> None:
    families = list(media.recordings())
    assert len(families) == 4
    original, noisy, quiet, mp3 = families[0]
    assert original.media_type == "audio/wav"
    assert mp3.media_type == "audio/mpeg"
    samples = decode_sound(original)
    noise = decode_sound(noisy) - samples
    assert 19 < 10 * np.log10(np.mean(samples**2) / np.mean(noise**2)) < 21
    assert np.abs(decode_sound(quiet) - 0.3 * samples).max() < 1e-3
    assert len(mp3.file) < len(original.file) / 5
    assert abs(decode_sound(mp3).size - samples.size) < 2500


def test_clips_fly_over_pictures_and_are_encoded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    families = media.clips()
    first = next(families)
    monkeypatch.setattr(media, "_CLIP_SECONDS", 0.2)  # of the others: what they show is looked at in the first
    assert [family[0].name for family in (first, *families)] == ["chelsea", "coffee", "hubble", "rocket"]
    shapes = []
    for sample in first:
        with av.open(io.BytesIO(sample.file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        shapes.append((len(frames), *frames[0].shape))
        assert np.abs(frames[0].astype(float) - frames[-1]).mean() > 20, "the camera does not move"
    assert shapes == [(60, 240, 320, 3), (29, 120, 160, 3), (72, 180, 240, 3)]
