"""Preparing: decoded in processes, copied into other memory, cancel-safe, and without a view outliving its use."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
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
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.preparation import Preparation, ProbedMedium
from shmring.frontend.media.sources import MediaFile
from shmring.frontend.settings import FrontendSettings
from tests.waiting import eventually

Array = np.ndarray[Any, Any]
OpenPreparation = Callable[..., Preparation]

SPEC = InputSpec(picture=PictureSpec(), sound=SoundSpec(form="waveform"), video=VideoSpec(num_frames=4))


@pytest.fixture
async def open_preparation() -> AsyncIterator[OpenPreparation]:
    """``open_preparation(io_kwargs, **limits)``: two decoders, which are closed in the end."""
    opened: list[Preparation] = []

    def make(io_kwargs: MediaIoKwargs | None = None, **limits: Any) -> Preparation:
        io_kwargs = io_kwargs or MediaIoKwargs()
        settings = FrontendSettings(decoders=2, media_limits=MediaLimits(**limits), media_io_kwargs=io_kwargs)
        opened.append(Preparation(settings))
        return opened[-1]

    yield make
    for preparation in opened:
        preparation.close()


@pytest.fixture
def preparation(open_preparation: OpenPreparation) -> Preparation:
    return open_preparation()


def picture(width: int = 40, height: int = 30, alpha: bool = False) -> tuple[Array, MediaFile]:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 4 if alpha else 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pixels, MediaFile("image", "messages[0]", file.getvalue())


async def decode(preparation: Preparation, probed: ProbedMedium) -> tuple[Medium, torch.Tensor]:
    """Returns the medium, and the memory that it was copied to."""
    with closing(await preparation.decode(probed)) as decoded:
        target = torch.full(decoded.shape, 7, dtype=decoded.dtype)
        return await preparation.copy(decoded, target), target


def truncate(probed: ProbedMedium, share: float = 0.5) -> None:
    file = probed.file
    probed.file = dataclasses.replace(file, data=file.data[: int(len(file.data) * share)])


async def test_a_picture_is_decoded_into_the_callers_memory(preparation: Preparation) -> None:
    pixels, file = picture()
    probed = await preparation.probe(file, SPEC)
    assert probed.file is file
    assert (probed.shape, probed.dtype, probed.nbytes) == ((30, 40, 3), torch.uint8, 3600)
    medium, target = await decode(preparation, probed)
    assert isinstance(medium, Picture)
    assert medium.pixels is target
    np.testing.assert_array_equal(target.numpy(), pixels)


async def test_a_recording_is_as_long_as_it_is(preparation: Preparation, recording_of: Callable[..., bytes]) -> None:
    samples = np.sin(np.arange(16_000) / 10) / 2
    file = recording_of(samples, 16_000, codec="pcm_f32le")
    probed = await preparation.probe(MediaFile("audio", "input[0]", file), SPEC)
    assert probed.dtype == torch.float32
    assert probed.shape[0] > 16_000
    medium, target = await decode(preparation, probed)
    assert isinstance(medium, Waveform)
    assert medium.sample_rate == 16_000
    assert medium.samples.data_ptr() == target.data_ptr()
    np.testing.assert_allclose(medium.samples.numpy(), samples, atol=1e-6)


async def test_an_executor_may_want_a_spectrogram(preparation: Preparation, recording_of: Callable[..., bytes]) -> None:
    file = recording_of(np.zeros(16_000), 16_000)
    probed = await preparation.probe(MediaFile("audio", "x", file), InputSpec(sound=SoundSpec(mel_bands=64)))
    medium, target = await decode(preparation, probed)
    assert isinstance(medium, Spectrogram)
    assert medium.log_mel.shape == (98, 64)
    assert medium.log_mel.data_ptr() == target.data_ptr()
    assert medium.duration_s == 1.0


async def test_a_clip_has_as_many_frames_as_it_has(preparation: Preparation, clip_of: Callable[..., bytes]) -> None:
    for count, expected in ((3, 3), (25, 4)):
        clip = clip_of([50] * count)
        probed = await preparation.probe(MediaFile("video", "x", clip), SPEC)
        assert probed.shape == (expected, 64, 96, 3)
        medium, target = await decode(preparation, probed)
        assert isinstance(medium, Video)
        assert medium.frames.shape == (expected, 64, 96, 3)
        assert medium.frames.data_ptr() == target.data_ptr()
        assert len(medium.timestamps_s) == expected
        assert medium.duration_s == pytest.approx(count / 25)


async def test_the_servers_io_kwargs_are_used(open_preparation: OpenPreparation, clip_of: Callable[..., bytes]) -> None:
    preparation = open_preparation(MediaIoKwargs(num_frames=2, rgba_background_color=(1, 2, 3)))
    clip = clip_of([50] * 10)
    assert (await preparation.probe(MediaFile("video", "x", clip), SPEC)).shape[0] == 2
    pixels, file = picture(alpha=True)
    probed = await preparation.probe(file, SPEC)
    _, target = await decode(preparation, probed)
    transparent = pixels[..., 3] == 0
    assert transparent.any()
    assert (target.numpy()[transparent] == [1, 2, 3]).all()


async def test_pictures_are_scaled_to_what_the_executor_takes(preparation: Preparation) -> None:
    probed = await preparation.probe(picture(80, 60)[1], InputSpec(picture=PictureSpec(max_pixels=1200)))
    assert probed.shape == (30, 40, 3)


async def test_a_copy_that_is_cancelled_holds_its_slot_until_its_thread_has_ended(
    preparation: Preparation,
    serve: Callable[..., Awaitable[shmring.Ring]],
    connect: Callable[..., Awaitable[shmring.Client]],
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
    with closing(await preparation.decode(await preparation.probe(picture(800, 600)[1], SPEC))) as decoded:
        async with client.slot(shmring.nbytes_for((decoded.shape, decoded.dtype)), drain=True) as slot:
            task = asyncio.create_task(preparation.copy(decoded, slot.tensor(decoded.shape, decoded.dtype)))
            await asyncio.to_thread(copying.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    del task
    assert client.statistics().slots_draining == 1
    go_on.set()  # the file is closed; the thread has one of its own
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_a_decoder_is_killed_when_its_caller_goes(
    open_preparation: OpenPreparation, many_scans: Callable[..., bytes]
) -> None:
    preparation = open_preparation(max_image_scans=100_000, max_decode_s=600.0)
    file = many_scans(20_000)  # half a minute
    probed = await preparation.probe(MediaFile("image", "x", file), InputSpec(picture=PictureSpec(max_pixels=10_000)))
    decoding = asyncio.create_task(preparation.decode(probed))
    await eventually(lambda: preparation.decoders.statistics().free == 1)
    decoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding
    # It is free when the process is dead, which is long before its end.
    await eventually(lambda: preparation.decoders.statistics().free == 2)


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
async def test_a_medium_that_is_damaged_behind_its_header_is_a_media_error(
    preparation: Preparation, clip_of: Callable[..., bytes], recording_of: Callable[..., bytes], kind: Any
) -> None:
    samples = np.zeros(16_000)
    samples[9000] = np.nan
    files = {
        "image": picture()[1],
        "audio": MediaFile("audio", "x", recording_of(samples, 16_000, codec="pcm_f32le")),
        "video": MediaFile("video", "x", clip_of([50] * 25, codec="mpeg4")),
    }
    probed = await preparation.probe(files[kind], SPEC)
    if kind != "audio":
        truncate(probed, 2 / 3)
    with pytest.raises(MediaError, match=r"truncated|damaged"):
        await preparation.decode(probed)


async def test_a_fault_of_ours_is_reported(preparation: Preparation, caplog: pytest.LogCaptureFixture) -> None:
    probed = await preparation.probe(picture()[1], SPEC)
    probed.header = b"no header"
    with pytest.raises(RuntimeError, match="ValidationError"):
        await preparation.decode(probed)
    assert "Traceback" in caplog.text


async def test_what_a_library_says_about_a_medium_is_in_its_error(preparation: Preparation, damaged_tiff: bytes) -> None:
    probed = await preparation.probe(MediaFile("image", "x", damaged_tiff), SPEC)
    with pytest.raises(MediaError, match=r"damaged or truncated: .* \(ZIPDecode: "):
        await preparation.decode(probed)


async def test_the_error_about_a_medium_that_takes_too_long_names_the_limit(
    open_preparation: OpenPreparation, many_scans: Callable[..., bytes]
) -> None:
    preparation = open_preparation(max_image_scans=100_000, max_decode_s=0.3)
    file = MediaFile("image", "x", many_scans(1000))
    probed = await preparation.probe(file, SPEC)
    with pytest.raises(MediaError, match=r"more than the 0\.3 s of processor time that are accepted \(max_decode_s\); send"):
        await preparation.decode(probed)
