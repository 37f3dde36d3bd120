"""Loading: decoded in processes, copied into the caller's memory, cancel-safe, and without a view outliving its use."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shmring
from shmring.engine.protocol import InputSpec, Medium, Picture, PictureSpec, SoundSpec, Spectrogram, Video, VideoSpec, Waveform
from shmring.frontend.media import decoder_pool
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fetch import Fetcher, FetchSettings
from shmring.frontend.media.loader import MediaLoader, MediaSource, PreparedMedium
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits

Array = np.ndarray[Any, Any]
OpenLoader = Callable[..., MediaLoader]

SPEC = InputSpec(picture=PictureSpec(), sound=SoundSpec(form="waveform"), video=VideoSpec(num_frames=4))


@pytest.fixture
async def open_loader() -> AsyncIterator[OpenLoader]:
    """``open_loader(io_kwargs, **limits)``: a loader of two threads, which is closed in the end."""
    pool = ThreadPoolExecutor(1)
    fetcher = Fetcher(FetchSettings(), pool)
    loaders: list[MediaLoader] = []

    def make_loader(io_kwargs: MediaIoKwargs | None = None, **limits: Any) -> MediaLoader:
        loaders.append(MediaLoader(2, MediaLimits(**limits), io_kwargs or MediaIoKwargs(), fetcher))
        return loaders[-1]

    yield make_loader
    for loader in loaders:
        loader.close()
    await fetcher.close()
    pool.shutdown()


@pytest.fixture
def loader(open_loader: OpenLoader) -> MediaLoader:
    return open_loader()


def picture(width: int = 40, height: int = 30, alpha: bool = False) -> tuple[Array, MediaSource]:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 4 if alpha else 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return pixels, MediaSource("image", "messages[0]", url=url)


async def load(loader: MediaLoader, source: MediaSource, spec: InputSpec) -> PreparedMedium:
    return await loader.prepare(source, await loader.fetch(source, spec), spec)


async def decode(loader: MediaLoader, prepared: PreparedMedium) -> tuple[Medium, torch.Tensor]:
    """Returns the medium, and the memory that it was copied to."""
    with closing(await loader.decode(prepared)) as decoded:
        target = torch.full(decoded.shape, 7, dtype=decoded.dtype)
        return await loader.copy(decoded, target), target


def truncate(prepared: PreparedMedium) -> None:
    prepared.data = prepared.data[: len(prepared.data) // 2]


async def test_a_picture_is_decoded_into_the_callers_memory(loader: MediaLoader) -> None:
    pixels, source = picture()
    prepared = await load(loader, source, SPEC)
    assert (prepared.source_param, prepared.kind) == ("messages[0]", "image")
    assert (prepared.shape, prepared.dtype, prepared.nbytes) == ((30, 40, 3), torch.uint8, 3600)
    medium, target = await decode(loader, prepared)
    assert isinstance(medium, Picture)
    assert medium.pixels is target
    np.testing.assert_array_equal(target.numpy(), pixels)


async def test_files_are_let_go_of(loader: MediaLoader) -> None:
    _, source = picture()
    prepared = await load(loader, source, SPEC)
    assert source.url is None
    assert "data=" not in repr(prepared)
    await decode(loader, prepared)
    assert prepared.data == b""


async def test_a_recording_is_as_long_as_it_is(loader: MediaLoader, recording_of: Callable[..., bytes]) -> None:
    samples = np.sin(np.arange(16_000) / 10) / 2
    text = base64.b64encode(recording_of(samples, 16_000, codec="pcm_f32le")).decode()
    prepared = await load(loader, MediaSource("audio", "input[0]", base64=text), SPEC)
    assert prepared.dtype == torch.float32
    assert prepared.shape[0] > 16_000
    medium, target = await decode(loader, prepared)
    assert isinstance(medium, Waveform)
    assert medium.sample_rate == 16_000
    assert medium.samples.data_ptr() == target.data_ptr()
    np.testing.assert_allclose(medium.samples.numpy(), samples, atol=1e-6)


async def test_an_executor_may_want_a_spectrogram(loader: MediaLoader, recording_of: Callable[..., bytes]) -> None:
    text = base64.b64encode(recording_of(np.zeros(16_000), 16_000)).decode()
    prepared = await load(loader, MediaSource("audio", "x", base64=text), InputSpec(sound=SoundSpec(mel_bands=64)))
    medium, target = await decode(loader, prepared)
    assert isinstance(medium, Spectrogram)
    assert medium.log_mel.shape == (98, 64)
    assert medium.log_mel.data_ptr() == target.data_ptr()
    assert medium.duration_s == 1.0


async def test_a_clip_has_as_many_frames_as_it_has(loader: MediaLoader, clip_of: Callable[..., bytes]) -> None:
    for count, expected in ((3, 3), (25, 4)):
        url = "data:video/mp4;base64," + base64.b64encode(clip_of([50] * count)).decode()
        prepared = await load(loader, MediaSource("video", "x", url=url), SPEC)
        assert prepared.shape == (expected, 64, 96, 3)
        medium, target = await decode(loader, prepared)
        assert isinstance(medium, Video)
        assert medium.frames.shape == (expected, 64, 96, 3)
        assert medium.frames.data_ptr() == target.data_ptr()
        assert len(medium.timestamps_s) == expected
        assert medium.duration_s == pytest.approx(count / 25)


async def test_the_servers_io_kwargs_are_used(open_loader: OpenLoader, clip_of: Callable[..., bytes]) -> None:
    loader = open_loader(MediaIoKwargs(num_frames=2, rgba_background_color=(1, 2, 3)))
    url = "data:video/mp4;base64," + base64.b64encode(clip_of([50] * 10)).decode()
    assert (await load(loader, MediaSource("video", "x", url=url), SPEC)).shape[0] == 2
    pixels, source = picture(alpha=True)
    prepared = await load(loader, source, SPEC)
    _, target = await decode(loader, prepared)
    transparent = pixels[..., 3] == 0
    assert transparent.any()
    assert (target.numpy()[transparent] == [1, 2, 3]).all()


async def test_pictures_are_scaled_to_what_the_executor_takes(loader: MediaLoader) -> None:
    prepared = await load(loader, picture(80, 60)[1], InputSpec(picture=PictureSpec(max_pixels=1200)))
    assert prepared.shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("image", InputSpec(text=True), "takes text; it does not take image"),
        ("audio", InputSpec(picture=PictureSpec(), video=VideoSpec()), "takes image, video; it does not take audio"),
        ("video", InputSpec(), "takes no media; it does not take video"),
    ],
)
async def test_what_the_executor_does_not_take_is_not_even_fetched(
    loader: MediaLoader, kind: Any, spec: InputSpec, reason: str
) -> None:
    with pytest.raises(MediaError, match=reason):
        await load(loader, MediaSource(kind, "x", url="not a URL"), spec)


async def test_limits_are_of_the_kind(open_loader: OpenLoader) -> None:
    loader = open_loader(max_image_nbytes=100, max_audio_nbytes=200)
    with pytest.raises(MediaError, match="more than the 100"):
        await load(loader, picture()[1], SPEC)
    with pytest.raises(MediaError, match="more than the 200"):
        await load(loader, MediaSource("audio", "x", base64="A" * 1000), SPEC)


async def test_bad_media_is_a_media_error(loader: MediaLoader) -> None:
    with pytest.raises(MediaError):
        await load(loader, MediaSource("image", "x", url="http://127.0.0.1/"), SPEC)
    prepared = await load(loader, picture()[1], SPEC)
    truncate(prepared)
    with pytest.raises(MediaError, match="truncated"):
        await loader.decode(prepared)


@pytest.mark.parametrize("target", [torch.empty(40, 30, 3, dtype=torch.uint8), torch.empty(30, 40, 3, dtype=torch.int8)])
async def test_memory_of_another_shape_is_the_caller_s_mistake(loader: MediaLoader, target: torch.Tensor) -> None:
    decoded = await loader.decode(await load(loader, picture()[1], SPEC))
    with closing(decoded), pytest.raises(ValueError, match=r"the medium needs torch\.uint8 \(30, 40, 3\)"):
        await loader.copy(decoded, target)


async def test_a_target_that_is_refused_is_not_kept_by_the_error(
    loader: MediaLoader,
    serve: Callable[..., Awaitable[shmring.Ring]],
    connect: Callable[..., Awaitable[shmring.Client]],
    eventually: Callable[..., Awaitable[Any]],
) -> None:
    await serve()
    client = await connect()
    with closing(await loader.decode(await load(loader, picture()[1], SPEC))) as decoded:
        slot = await client.slot(100, drain=True)
        with pytest.raises(ValueError, match="the medium needs") as raised:  # as a log or a debugger would keep it
            await loader.copy(decoded, slot.tensor((10,), torch.uint8))
        slot.close()
        await eventually(lambda: client.statistics().slots_in_use == 0)
    assert str(raised.value)


async def test_a_copy_that_is_cancelled_holds_its_slot_until_its_thread_has_ended(
    loader: MediaLoader,
    serve: Callable[..., Awaitable[shmring.Ring]],
    connect: Callable[..., Awaitable[shmring.Client]],
    eventually: Callable[..., Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    read_all = decoder_pool._read_all

    def read_late(*arguments: Any) -> None:
        copying.set()
        go_on.wait()
        read_all(*arguments)

    monkeypatch.setattr(decoder_pool, "_read_all", read_late)
    await serve(slab_nbytes="4MiB")
    client = await connect()
    with closing(await loader.decode(await load(loader, picture(800, 600)[1], SPEC))) as decoded:
        async with client.slot(shmring.nbytes_for((decoded.shape, decoded.dtype)), drain=True) as slot:
            task = asyncio.create_task(loader.copy(decoded, slot.tensor(decoded.shape, decoded.dtype)))
            await asyncio.to_thread(copying.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    del task
    assert client.statistics().slots_draining == 1
    go_on.set()  # the file is closed; the thread has one of its own
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_a_decoder_is_killed_when_its_caller_goes(
    open_loader: OpenLoader, eventually: Callable[..., Awaitable[Any]], many_scans: Callable[..., bytes]
) -> None:
    loader = open_loader(max_image_scans=100_000, max_decode_s=600.0)
    text = base64.b64encode(many_scans(20_000)).decode()  # half a minute
    prepared = await load(loader, MediaSource("image", "x", base64=text), InputSpec(picture=PictureSpec(max_pixels=10_000)))
    decoding = asyncio.create_task(loader.decode(prepared))
    await eventually(lambda: loader.statistics().free == 1)
    decoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding
    await eventually(lambda: loader.statistics().free == 2)  # which it is when the process is dead, and long before its end


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
async def test_a_medium_that_is_damaged_behind_its_header_is_a_media_error(
    loader: MediaLoader, clip_of: Callable[..., bytes], recording_of: Callable[..., bytes], kind: Any
) -> None:
    samples = np.zeros(16_000)
    samples[9000] = np.nan
    sources = {
        "image": picture()[1],
        "audio": MediaSource("audio", "x", base64=base64.b64encode(recording_of(samples, 16_000, codec="pcm_f32le")).decode()),
        "video": MediaSource("video", "x", base64=base64.b64encode(clip_of([50] * 25, codec="mpeg4")).decode()),
    }
    prepared = await load(loader, sources[kind], SPEC)
    if kind != "audio":
        prepared.data = prepared.data[: len(prepared.data) * 2 // 3]
    with pytest.raises(MediaError, match=r"truncated|damaged"):
        await loader.decode(prepared)


async def test_a_fault_of_ours_is_reported(loader: MediaLoader, caplog: pytest.LogCaptureFixture) -> None:
    prepared = await load(loader, picture()[1], SPEC)
    prepared.header = b"no header"
    with pytest.raises(RuntimeError, match="ValidationError"):
        await loader.decode(prepared)
    assert "Traceback" in caplog.text


async def test_what_a_library_says_about_a_medium_is_in_its_error(loader: MediaLoader, damaged_tiff: bytes) -> None:
    prepared = await load(loader, MediaSource("image", "x", base64=base64.b64encode(damaged_tiff).decode()), SPEC)
    with pytest.raises(MediaError, match=r"damaged or truncated: .* \(ZIPDecode: "):
        await loader.decode(prepared)


async def test_the_error_about_a_medium_that_takes_too_long_names_the_limit(
    open_loader: OpenLoader, many_scans: Callable[..., bytes]
) -> None:
    loader = open_loader(max_image_scans=100_000, max_decode_s=0.3)
    source = MediaSource("image", "x", base64=base64.b64encode(many_scans(1000)).decode())
    prepared = await load(loader, source, SPEC)
    with pytest.raises(MediaError, match=r"more than the 0\.3 s of processor time that are accepted \(max_decode_s\); send"):
        await loader.decode(prepared)
