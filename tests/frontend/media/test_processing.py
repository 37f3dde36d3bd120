"""Pictures that decoders process: what the model's own processor would have made, bit for bit, or else their pixels."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import shmring
from shmring.engine.protocol import Feature, Features, InputSpec, Medium, Picture, PictureSpec, ProcessorSpec
from shmring.frontend.callers.admission import Admission
from shmring.frontend.errors import ApiError
from shmring.frontend.intake import MediaIntake
from shmring.frontend.media.decoder_pool import DecoderPool, Outcome
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.preparation import Preparation
from shmring.frontend.media.reuse import keys_of
from shmring.frontend.media.sources import MediaFile, MediaSource
from shmring.frontend.settings import FrontendSettings
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

SIDE = 28
ARGUMENTS = {"input_data_format": "channels_last"}


def clip(dtype: str = "bfloat16", **changes: Any) -> ProcessorSpec:
    """LLaVA's: every picture becomes as large."""
    settings = json.dumps({"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}})
    features = (Feature("pixel_values", dtype, (1, 3, SIDE, SIDE)),)
    spec = ProcessorSpec(
        transformers.__version__, "CLIPImageProcessorPil", settings, json.dumps(ARGUMENTS), dtype, False, features
    )
    return msgspec.structs.replace(spec, **changes)


def qwen2_vl(dtype: str = "bfloat16") -> ProcessorSpec:
    """Larger pictures become more patches."""
    settings = json.dumps({"size": {"shortest_edge": 56 * 56, "longest_edge": 280 * 280}})
    features = (Feature("pixel_values", dtype, (0, 1176)), Feature("image_grid_thw", "int64", (1, 3)))
    return clip(dtype, name="Qwen2VLImageProcessorPil", settings=settings, features=features)


def spec_of(processor: ProcessorSpec | None, max_pixels: int | None = None) -> InputSpec:
    return InputSpec(picture=PictureSpec(max_pixels, processor))


def noise(height: int, width: int, channels: int = 3) -> Any:
    return np.random.default_rng(height).integers(0, 256, (height, width, channels)[: 2 + (channels > 1)], np.uint8)


def file_of(pixels: Any, kind: str = "PNG", **options: Any) -> MediaFile:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return MediaFile("image", "messages[0]", file.getvalue())


def rotated() -> MediaFile:
    exif = Image.Exif()
    exif[274] = 6
    return file_of(noise(90, 60), "JPEG", exif=exif)


FILES = {
    "a photograph": file_of(noise(120, 160), "JPEG"),
    "turned": rotated(),
    "transparent": file_of(noise(50, 70, 4)),
    "grey": file_of(noise(64, 64, 1)),
    "tiny": file_of(noise(1, 1)),
    "wide": file_of(noise(3, 300)),
    "large": file_of(noise(700, 900)),
}


@pytest.fixture
async def preparation() -> AsyncIterator[Preparation]:
    preparation = Preparation(FrontendSettings(decoders=2))
    yield preparation
    preparation.close()


async def prepare(preparation: Preparation, file: MediaFile, spec: InputSpec) -> Medium:
    probed = await preparation.probe(file, spec)
    with closing(await preparation.decode(probed)) as decoded:
        assert decoded.shape[0] * torch.Size(decoded.shape[1:]).numel() <= probed.nbytes, "what was counted"
        return await preparation.copy(decoded, torch.full(decoded.shape, 7, dtype=decoded.dtype))


def expected_of(spec: ProcessorSpec, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the processor itself makes, brought to the model's dtype as the model would do it."""
    processor = getattr(transformers, spec.name)(**json.loads(spec.settings))
    made = processor([pixels], return_tensors="pt", **json.loads(spec.arguments))
    dtype = getattr(torch, spec.dtype)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


@for_each("processor", [clip("bfloat16"), clip("float32"), clip("float16"), qwen2_vl()])
async def test_features_are_those_of_the_processor_to_the_bit(processor: ProcessorSpec, preparation: Preparation) -> None:
    for name, file in FILES.items():
        plain = await prepare(preparation, file, spec_of(None, 100_000))
        medium = await prepare(preparation, file, spec_of(processor, 100_000))
        assert isinstance(plain, Picture)
        assert isinstance(medium, Features), name
        found, expected = medium.tensors(), expected_of(processor, plain.pixels)
        assert list(found) == list(expected)
        for part, tensor in expected.items():
            assert found[part].dtype == tensor.dtype
            assert torch.equal(found[part], tensor), (name, part)


async def test_decoders_have_no_torch(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    await prepare(preparation, FILES["tiny"], spec_of(clip()))
    (decoder,) = preparation.decoders._idle
    assert "libtorch" not in Path(f"/proc/{decoder._process.pid}/maps").read_text()


async def test_a_picture_that_the_processor_does_not_take_is_its_callers_fault() -> None:
    preparation = Preparation(FrontendSettings(media_limits=MediaLimits(max_aspect_ratio=1000)))
    with closing(preparation), pytest.raises(MediaError, match="the model does not take the picture: absolute aspect ratio"):
        await prepare(preparation, file_of(noise(1, 201)), spec_of(qwen2_vl()))


@for_each(
    "processor",
    [
        clip(name="NoSuchProcessor"),
        clip(name="AutoModel"),  # which is none
        clip(version="0.1"),
        clip(settings='{"size": "none"}'),
        clip(features=(Feature("pixel_values", "bfloat16", (1, 3, SIDE, SIDE + 1)),)),  # it makes something else
        clip(features=(Feature("pixel_values", "bfloat16", (0, 3, SIDE, SIDE)),)),  # it does not say how much it will be
    ],
)
async def test_what_can_not_be_processed_here_goes_to_the_engine_as_pixels(
    processor: ProcessorSpec, preparation: Preparation
) -> None:
    medium = await prepare(preparation, file_of(noise(30, 40)), spec_of(processor))
    assert isinstance(medium, Picture)
    np.testing.assert_array_equal(medium.pixels.numpy(), noise(30, 40))


async def test_a_decoder_that_is_killed_while_it_processes_is_replaced(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prepare(preparation, FILES["tiny"], spec_of(clip()))
    (first,) = preparation.decoders._idle
    os.kill(first._process.pid, signal.SIGSTOP)
    preparing = asyncio.create_task(prepare(preparation, FILES["large"], spec_of(clip())))
    while first in preparation.decoders._idle:
        await asyncio.sleep(0)
    os.kill(first._process.pid, signal.SIGKILL)
    medium = await preparing
    assert isinstance(medium, Features)
    assert first not in preparation.decoders._idle


async def test_pictures_for_several_processors_in_turn(preparation: Preparation) -> None:
    """As when an engine is replaced by one with another model. A decoder that has another processor, or none, ends."""
    for processor, kind in ((None, Picture), (clip(), Features), (qwen2_vl(), Features), (None, Picture), (clip(), Features)):
        medium = await prepare(preparation, FILES["grey"], spec_of(processor))
        assert isinstance(medium, kind)
        if isinstance(medium, Features):
            assert processor is not None
            assert [feature.name for feature in medium.layout] == [feature.name for feature in processor.features]
            assert preparation.decoders._idle[-1].processor == processor, "it had it when it was forked"
    assert len(preparation.decoders._idle) == 1


async def test_a_processor_that_needs_torch_has_it_after_one_that_does_not(preparation: Preparation) -> None:
    """A process that has begun without torch can't import it any more: there is a new one for an engine that needs it."""
    parents, with_torch = [], []
    for needs_torch in (False, True, False):
        medium = await prepare(preparation, FILES["tiny"], spec_of(clip(needs_torch=needs_torch)))
        assert isinstance(medium, Features)
        (decoder,) = preparation.decoders._idle
        process = Path(f"/proc/{decoder._process.pid}")
        with_torch.append("libtorch" in (process / "maps").read_text())
        parents.append((process / "stat").read_text().rpartition(")")[2].split()[1])
    assert with_torch == [False, True, True]
    assert parents[0] != parents[1] == parents[2]


# -- requests ---------------------------------------------------------------------------------------------------------------


def source() -> MediaSource:
    return MediaSource("image", "p", base64=_base64(FILES["a photograph"].data))


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode("ascii")


async def take(intake: MediaIntake, spec: InputSpec) -> Medium:
    admitted = Admission(FrontendSettings()).new_request()
    async with intake.take([source()], spec, admitted, "messages") as [medium]:
        if isinstance(medium, Features):
            return msgspec.structs.replace(medium, content=medium.content.clone())
        assert isinstance(medium, Picture)
        return msgspec.structs.replace(medium, pixels=medium.pixels.clone())


async def test_a_picture_that_comes_again_is_not_processed_again(open_engine: Any, open_intake: Any) -> None:
    engine = await open_engine()
    first, other = open_intake(engine), open_intake(engine)
    medium = await take(first, spec_of(clip()))
    assert isinstance(medium, Features)
    for intake in (first, other):
        again = await take(intake, spec_of(clip()))
        assert isinstance(again, Features)
        assert again.layout == medium.layout
        assert torch.equal(again.content, medium.content)
    assert [intake.statistics().decoded for intake in (first, other)] == [1, 0]
    assert engine.client.ring.statistics().slots_in_use == 0


async def test_how_a_picture_is_processed_is_part_of_what_is_found(open_engine: Any, open_intake: Any) -> None:
    intake = open_intake(await open_engine())
    changed = json.dumps(ARGUMENTS | {"image_mean": [0.0, 0.0, 0.0]})
    specs = [spec_of(clip()), spec_of(clip(arguments=changed)), spec_of(clip("float32")), spec_of(None)]
    media = [await take(intake, spec) for spec in (*specs, *specs)]
    assert intake.statistics().decoded == len(specs)
    contents = [medium.content for medium in media if isinstance(medium, Features)]
    assert len(contents) == 6
    assert not torch.equal(contents[0], contents[1])
    keys = [await keys_of([FILES["grey"]], spec, FrontendSettings(), intake._pool) for spec in specs]
    assert len({key for (key,) in keys}) == len(specs)


async def test_features_that_do_not_fit_the_slab_are_pixels(open_engine: Any, open_intake: Any) -> None:
    intake = open_intake(await open_engine(slab_nbytes="1MiB"))
    large = json.dumps({"size": {"shortest_edge": 400}, "crop_size": {"height": 400, "width": 400}})
    processor = clip("float32", settings=large, features=(Feature("pixel_values", "float32", (1, 3, 400, 400)),))
    medium = await take(intake, spec_of(processor))
    assert isinstance(medium, Picture)
    assert tuple(medium.pixels.shape) == (120, 160, 3)


async def test_what_fits_neither_way_is_refused(open_engine: Any, open_intake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await open_engine(slab_nbytes="1MiB")
    monkeypatch.setitem(FILES, "a photograph", FILES["large"])
    with pytest.raises(shmring.CapacityError):
        await take(open_intake(engine), spec_of(clip()))


async def test_another_version_of_transformers_processes_nothing(
    open_engine: Any, open_intake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    run = DecoderPool.run

    async def note(pool: DecoderPool, job: Any, *arguments: Any) -> Outcome:
        jobs.append(job)
        return await run(pool, job, *arguments)

    monkeypatch.setattr(DecoderPool, "run", note)
    medium = await take(open_intake(await open_engine()), spec_of(clip(version="0.1")))
    assert isinstance(medium, Picture)
    assert [getattr(job, "processor", None) for job in jobs] == [None, None]
    assert jobs[0].spec.picture.processor is None


async def test_an_error_of_the_processor_is_answered_as_one_of_the_picture(
    open_engine: Any, open_intake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "a photograph", file_of(noise(1, 201)))
    intake = open_intake(await open_engine(), media_limits=MediaLimits(max_aspect_ratio=1000))
    with pytest.raises(ApiError, match="the model does not take the picture") as failure:
        await take(intake, spec_of(qwen2_vl()))
    assert (failure.value.status, failure.value.code) == (400, "invalid_image")


async def test_a_decoder_is_ready_before_the_first_picture_comes(
    open_engine: Any, open_intake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = open_intake(await open_engine())
    decoders = intake._preparation.decoders
    await intake.get_ready(spec_of(None))
    await intake.get_ready(spec_of(clip(version="0.1")))
    assert decoders._idle == [], "nothing takes long to import"
    await intake.get_ready(spec_of(clip()))
    (ready,) = decoders._idle
    assert isinstance(await take(intake, spec_of(clip())), Features)
    assert decoders._idle == [ready]
    assert decoders.statistics().free == decoders.statistics().total
