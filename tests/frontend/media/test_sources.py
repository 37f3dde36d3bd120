"""What came: files are fetched as far as the executor takes them and limits allow, and their texts are let go of."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shmring.engine.protocol import InputSpec, PictureSpec, SoundSpec, VideoSpec
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.sources import Arrivals, MediaFile, MediaSource
from shmring.frontend.settings import FrontendSettings
from tests.tables import for_each

SPEC = InputSpec(picture=PictureSpec(), sound=SoundSpec(), video=VideoSpec())


@pytest.fixture
async def open_arrivals() -> AsyncIterator[Callable[..., Arrivals]]:
    """``open_arrivals(**limits)``: closed in the end."""
    opened: list[Arrivals] = []

    def make(**limits: Any) -> Arrivals:
        opened.append(Arrivals(FrontendSettings(media_limits=MediaLimits(**limits)), pool))
        return opened[-1]

    with ThreadPoolExecutor(1) as pool:
        yield make
        for arrivals in opened:
            await arrivals.close()


async def test_texts_are_let_go_of(open_arrivals: Callable[..., Arrivals]) -> None:
    text = base64.b64encode(b"some file").decode()
    for source in (MediaSource("image", "x", url=f"data:image/png;base64,{text}"), MediaSource("audio", "x", base64=text)):
        assert await open_arrivals().fetch(source, SPEC) == b"some file"
        assert source.url is source.base64 is None
    assert "some file" not in repr(MediaFile("image", "x", b"some file"))


@for_each(
    ("kind", "spec", "reason"),
    [
        ("image", InputSpec(text=True), "takes text; it does not take image"),
        ("audio", InputSpec(picture=PictureSpec(), video=VideoSpec()), "takes image, video; it does not take audio"),
        ("video", InputSpec(), "takes no media; it does not take video"),
    ],
)
async def test_what_the_executor_does_not_take_is_not_even_fetched(
    open_arrivals: Callable[..., Arrivals], kind: Any, spec: InputSpec, reason: str
) -> None:
    with pytest.raises(MediaError, match=reason):
        await open_arrivals().fetch(MediaSource(kind, "x", url="not a URL"), spec)


async def test_limits_are_of_the_kind(open_arrivals: Callable[..., Arrivals]) -> None:
    arrivals = open_arrivals(max_image_nbytes=100, max_audio_nbytes=200)
    with pytest.raises(MediaError, match="more than the 100"):
        await arrivals.fetch(MediaSource("image", "x", url="data:image/png;base64," + "A" * 1000), SPEC)
    with pytest.raises(MediaError, match="more than the 200"):
        await arrivals.fetch(MediaSource("audio", "x", base64="A" * 1000), SPEC)
    with pytest.raises(MediaError, match="URLs are not accepted"):
        await arrivals.fetch(MediaSource("image", "x", url="http://127.0.0.1/"), SPEC)
