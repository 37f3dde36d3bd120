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


@for_each(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested"),
        ("[]", "JSON object"),
        ('{"picture": {}}', r"does not know 'picture'; it knows image, audio, video"),
        ('{"image": 3}', "image must be"),
        ('{"image": {"colour": 1, "mode": 2}}', r"does not know 'colour', 'mode'; it knows rgba_background_color"),
        ('{"audio": {"sample_rate": 1}}', r"audio does not know 'sample_rate'; it knows nothing"),
        ('{"image": {"rgba_background_color": [1, 2]}}', "three numbers"),
        ('{"image": {"rgba_background_color": [1, 2, 256]}}', "three numbers"),
        ('{"image": {"rgba_background_color": [1, 2, true]}}', "three numbers"),
        ('{"image": {"rgba_background_color": [1, 2, 0.5]}}', "three numbers"),
        ('{"image": {"rgba_background_color": "white"}}', "three numbers"),
        ('{"video": {"num_frames": 0}}', "video.num_frames must be"),
        ('{"video": {"num_frames": -2}}', "video.num_frames must be"),
        ('{"video": {"num_frames": 2.5}}', "video.num_frames must be"),
        ('{"video": {"num_frames": true}}', "video.num_frames must be"),
        ('{"video": {"fps": 0}}', "video.fps must be"),
        ('{"video": {"fps": NaN}}', "video.fps must be"),
        ('{"video": {"fps": "2"}}', "video.fps must be"),
    ],
)
def test_everything_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MediaIoKwargs.parse(text)


def test_each_kind_has_its_limit() -> None:
    limits = MediaLimits(max_image_nbytes=1, max_audio_nbytes=2, max_video_nbytes=3, max_image_pixels=4, max_aspect_ratio=5)
    assert [limits.max_nbytes(kind) for kind in ("image", "audio", "video")] == [1, 2, 3]
    assert (limits.picture.max_nbytes, limits.picture.max_pixels, limits.picture.max_aspect_ratio) == (1, 4, 5)
