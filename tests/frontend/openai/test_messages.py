"""Parts of messages, and how many media of each modality a request may have."""

from __future__ import annotations

import msgspec
import pytest

from shmring.frontend.errors import ApiError
from shmring.frontend.media.sources import MediaSource, check_counts
from shmring.frontend.openai.messages import ContentPart, TextPart, data_url_kind, source_of
from shmring.frontend.settings import MediaCounts
from tests.tables import for_each


@for_each(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, MediaSource("image", "p.image_url", url="u")),
        ({"type": "image_url", "image_url": "u"}, MediaSource("image", "p.image_url", url="u")),
        ({"type": "audio_url", "audio_url": "u"}, MediaSource("audio", "p.audio_url", url="u")),
        ({"type": "video_url", "video_url": "u"}, MediaSource("video", "p.video_url", url="u")),
        ({"type": "audio_url", "audio_url": {"url": "u"}}, MediaSource("audio", "p.audio_url", url="u")),
        ({"type": "video_url", "video_url": {"url": "u"}}, MediaSource("video", "p.video_url", url="u")),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            MediaSource("audio", "p.input_audio", base64="AAAA"),
        ),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, MediaSource("audio", "p.input_audio", base64="AAAA")),
    ],
)
def test_parts_say_where_their_medium_comes_from(part: object, source: MediaSource) -> None:
    decoded = msgspec.convert(part, ContentPart)
    assert not isinstance(decoded, TextPart)
    assert source_of(decoded, "p") == source


@for_each(
    ("text", "kind"),
    [
        ("data:image/png;base64,AA==", "image"),
        ("DATA:Audio/wav;base64,AA==", "audio"),
        ("data:video/mp4,x", "video"),
        ("data:text/plain,x", None),
        ("data: my notes", None),
        ("see data:image/png;base64,AA==", None),
        ("https://example.org/a.png", None),
    ],
)
def test_texts_that_are_media(text: str, kind: str | None) -> None:
    assert data_url_kind(text) == kind


def test_media_are_counted_by_modality() -> None:
    sources = [MediaSource("image", "a")] * 3 + [MediaSource("video", "b")]
    check_counts(sources, MediaCounts(image=3, video=1, audio=0), "messages")
    for accepted in (MediaCounts(image=2), MediaCounts(video=0)):
        with pytest.raises(ApiError, match="at most") as raised:
            check_counts(sources, accepted, "messages")
        assert (raised.value.status, raised.value.param, raised.value.code) == (400, "messages", "too_many_media")
    with pytest.raises(ApiError, match="has 3 media of kind image, at most 2 are accepted"):
        check_counts(sources, MediaCounts(image=2), "messages")
