"""``--limit-mm-per-prompt`` as vLLM spells it."""

from __future__ import annotations

import pytest

from shmring.frontend.settings import FrontendSettings, MediaCounts
from tests.tables import for_each


@for_each(
    ("text", "counts"),
    [
        ('{"image": 16, "video": 2, "audio": 4}', MediaCounts(image=16, video=2, audio=4)),
        ("image=16,video=2", MediaCounts(image=16, video=2)),
        (" audio = 0 ", MediaCounts(audio=0)),
        ("{}", MediaCounts()),
    ],
)
def test_both_spellings(text: str, counts: MediaCounts) -> None:
    assert MediaCounts.parse(text) == counts


@for_each(
    "text",
    [
        *("", "image", "image=", "image=x", "image=-1", "images=3"),
        *("{", '{"image": "3"}', '{"image": -1}', '{"image": true}', '{"text": 1}'),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="limit-mm-per-prompt"):
        MediaCounts.parse(text)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(FrontendSettings(api_keys=("secret",)))
