"""What is said about media on the command line: vLLM's JSON, strictly."""

from __future__ import annotations

import pytest

from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from tests.tables import for_each


def test_what_vllm_takes_is_taken() -> None:
    text = '{"image": {"rgba_background_color": [0, 128, 255]}, "video": {"num_frames": 32, "fps": 2}, "audio": {}}'
    assert MediaIoKwargs.parse(text) == MediaIoKwargs(rgba_background_color=(0, 128, 255), num_frames=32, fps=2.0)


def test_nothing_said_is_the_default() -> None:
    assert MediaIoKwargs.parse("{}") == MediaIoKwargs()
    assert MediaIoKwargs() == MediaIoKwargs(rgba_background_color=(255, 255, 255), num_frames=None, fps=None)


def test_minus_one_is_no_limit() -> None:
    assert MediaIoKwargs.parse('{"video": {"num_frames": -1, "fps": -1}}') == MediaIoKwargs(num_frames=-1, fps=None)


REFUSED = {
    "not JSON": ["{"],
    "nested": ["[" * 100_000],
    "JSON object": ["[]"],
    r"does not know 'picture'; it knows image, audio, video": ['{"picture": {}}'],
    "image must be": ['{"image": 3}'],
    r"does not know 'colour', 'mode'; it knows rgba_background_color": ['{"image": {"colour": 1, "mode": 2}}'],
    r"audio does not know 'sample_rate'; it knows nothing": ['{"audio": {"sample_rate": 1}}'],
    "three numbers": [
        f'{{"image": {{"rgba_background_color": {colour}}}}}'
        for colour in ("[1, 2]", "[1, 2, 256]", "[1, 2, true]", "[1, 2, 0.5]", '"white"')
    ],
    "video.num_frames must be": [f'{{"video": {{"num_frames": {number}}}}}' for number in ("0", "-2", "2.5", "true")],
    "video.fps must be": [f'{{"video": {{"fps": {fps}}}}}' for fps in ("0", "NaN", '"2"')],
}


@for_each(("text", "reason"), [(text, reason) for reason, texts in REFUSED.items() for text in texts])
def test_everything_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MediaIoKwargs.parse(text)


def test_each_kind_has_its_limit() -> None:
    limits = MediaLimits(max_image_nbytes=1, max_audio_nbytes=2, max_video_nbytes=3)
    assert [limits.max_nbytes(kind) for kind in ("image", "audio", "video")] == [1, 2, 3]
