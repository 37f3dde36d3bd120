"""The way of a request's media: sizes first, then decoded, then one slot for all, and back whatever happens."""

from __future__ import annotations

import asyncio
import base64
import functools
import gc
import io
import wave
import weakref
from contextlib import AsyncExitStack, suppress
from typing import Any

import av
import msgspec
import numpy as np
import pytest

import shmring
from shmring.engine.client import MediaMemory
from shmring.engine.protocol import (
    InputSpec,
    Picture,
    PictureSpec,
    SoundSpec,
    Spectrogram,
    Video,
    VideoSpec,
    checksum_of,
    tensor_of,
)
from shmring.frontend.admission import Admission, Admitted
from shmring.frontend.errors import ApiError
from shmring.frontend.intake import MediaIntake
from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.preparation import DecodedMedium, Preparation, ProbedMedium
from shmring.frontend.media.reuse import Reuse, keys_of
from shmring.frontend.media.sources import Arrivals, MediaSource
from shmring.frontend.settings import FrontendSettings, MediaCounts

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 20, 30, 3), np.uint8)
LARGE = np.zeros((300, 300, 3), np.uint8)
SPEC = InputSpec(picture=PictureSpec(), sound=SoundSpec(), video=VideoSpec(num_frames=4))
STEPS = {"fetching": (Arrivals, "fetch"), "decoding": (Preparation, "decode"), "copying": (Preparation, "copy")}


def wav() -> bytes:
    """A second of a tone."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 16_000, "NONE", "not compressed"))
        writer.writeframes((np.sin(np.arange(16_000) / 20) * 10_000).astype("<i2").tobytes())
    return file.getvalue()


def mp4(darkest: int = 0) -> bytes:
    """Eight frames of 64 x 48 pixels, each a little lighter."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), darkest + 30 * index, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def source_of(file: bytes, kind: Any = "image", param: str = "p") -> MediaSource:
    mime = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}[kind]
    return MediaSource(kind, param, url=f"data:{mime};base64,{base64.b64encode(file).decode('ascii')}")


@pytest.fixture
def admission() -> Admission:
    """Whoever admits requests; one at a time has a turn."""
    return Admission(FrontendSettings(max_concurrent_media=1))


@pytest.fixture
def admitted(admission: Admission) -> Admitted:
    """A request that was just admitted."""
    return admission.new_request()


async def test_media_lie_in_the_slab_and_go_back(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, eventually: Any
) -> None:
    engine = await open_engine()
    sources = [source_of(encoded(pixels)) for pixels in PIXELS]
    async with open_intake(engine).take(sources, SPEC, admitted, "messages") as media:
        assert sources == []
        for medium, pixels in zip(media, PIXELS, strict=True):
            assert isinstance(medium, Picture)
            np.testing.assert_array_equal(medium.pixels.numpy(), pixels)
            assert medium.checksum is None
        assert engine.ring.statistics().kept_pinned == 3
        del medium
    assert media == []
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    await eventually(lambda: engine.ring.statistics().kept_pinned == 0)


async def test_a_medium_has_the_key_that_it_is_kept_under_if_the_executor_wants_it(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission
) -> None:
    engine = await open_engine()
    files = [encoded(pixels) for pixels in PIXELS[:2]]
    keys = []
    for intake, spec in [
        *[(open_intake(engine), msgspec.structs.replace(SPEC, keys=True))] * 2,
        (open_intake(engine), SPEC),
        (open_intake(engine, disable_mm_shm=True), msgspec.structs.replace(SPEC, keys=True)),
    ]:
        async with intake.take([source_of(file) for file in files], spec, admission.new_request(), "messages") as media:
            keys.append([medium.key for medium in media])
    new, again, unwanted, not_kept = keys
    assert new == again
    assert len({*new, None}) == 3
    assert unwanted == not_kept == [None, None]


async def test_every_modality_arrives_in_the_slab(open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted) -> None:
    engine = await open_engine(slab_nbytes="16MiB")
    recording = MediaSource("audio", "p", base64=base64.b64encode(wav()).decode("ascii"))
    sources = [source_of(mp4(), "video"), source_of(encoded(PIXELS[0])), source_of(wav(), "audio"), recording]
    checked = InputSpec(picture=SPEC.picture, sound=SPEC.sound, video=SPEC.video, checksum=True)
    async with open_intake(engine).take(sources, checked, admitted, "messages") as media:
        video, picture, sound, same = media
        assert isinstance(video, Video)
        assert tuple(video.frames.shape) == (4, 48, 64, 3)
        assert video.frames.float().mean(dim=(1, 2, 3)).diff().min() > 10
        assert isinstance(picture, Picture)
        assert isinstance(sound, Spectrogram)
        assert abs(sound.log_mel.shape[0] - 100) <= 3
        assert isinstance(same, Spectrogram)
        assert same.checksum == sound.checksum
        assert [medium.checksum for medium in media] == [checksum_of(tensor_of(medium)) for medium in media]
        del video, picture, sound, same


async def test_a_turn_is_taken_for_large_files_only_and_given_back_before_the_engine_gets_the_request(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, admitted: Admitted
) -> None:
    intake = open_intake(await open_engine())
    async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admitted, "messages"):
        await asyncio.wait_for(admitted.take_turn(), 1)  # it is free, and somebody else has it now
        other = admission.new_request()
        async with intake.take([], SPEC, other, "messages") as media:
            assert media == []
        async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, other, "messages") as media:
            assert len(media) == 1  # what is small needs none
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(intake.take([source_of(bytes(400_000))], SPEC, other, "messages").__aenter__(), 0.05)


async def test_a_request_that_fetches_has_no_turn_meanwhile(open_engine: Any, open_intake: Any, admitted: Admitted) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await go_on.wait()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as host:
        place = "127.0.0.1:" + str(host.sockets[0].getsockname()[1])
        allowed = FetchSettings(allowed_media_domains=(place,), allowed_media_networks=("127.0.0.0/8",))
        intake = open_intake(await open_engine(), fetch=allowed)
        sources = [MediaSource("image", "p", url=f"http://{place}/silent"), source_of(bytes(400_000))]
        fetching = asyncio.create_task(intake.take(sources, SPEC, admitted, "messages").__aenter__())
        await reached.wait()
        assert admitted._turns._free == 1
        go_on.set()
        with pytest.raises(ApiError, match="the host ended the connection"):
            await fetching


async def test_who_fetches_from_slow_hosts_leaves_places_to_others(
    open_engine: Any, open_intake: Any, admission: Admission, encoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.frontend.media.sources._MAX_FETCHING", 4)
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/silent" in head:
            await reader.read()
        file = encoded(PIXELS[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(file), file))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as host:
        place = "127.0.0.1:" + str(host.sockets[0].getsockname()[1])
        allowed = FetchSettings(allowed_media_domains=(place,), allowed_media_networks=("127.0.0.0/8",))
        intake = open_intake(await open_engine(), fetch=allowed)

        async def take(who: str, path: str) -> int:
            source = MediaSource("image", "p", url=f"http://{place}{path}")
            async with intake.take([source], SPEC, admission.new_request(who=who), "messages") as media:
                return len(media)

        slow = [asyncio.create_task(take("greedy", "/silent")) for _ in range(10)]
        async with asyncio.timeout(20):
            while connections < 2:
                await asyncio.sleep(0)
        assert await asyncio.wait_for(take("other", "/fast"), 60) == 1
        assert connections == 3
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)


@pytest.mark.parametrize(
    ("kind", "file", "code"),
    [
        ("image", b"no picture", "invalid_image"),
        ("audio", b"no sound", "invalid_audio"),
        ("video", b"no clip", "invalid_video"),
    ],
)
async def test_the_error_about_a_bad_medium_names_its_place(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, kind: str, file: bytes, code: str
) -> None:
    engine = await open_engine(slab_nbytes="1MiB")
    intake = open_intake(engine, slot_timeout_s=0.01)
    async with engine.client.ring.slot(engine.ring.statistics().leasable_nbytes - (128 << 10)):
        sources = [source_of(encoded(LARGE), param="first"), source_of(file, kind, "second")]
        with pytest.raises(ApiError) as raised:  # and not that there is no slot: none was needed yet
            await intake.take(sources, SPEC, admitted, "messages").__aenter__()
        assert (raised.value.status, raised.value.code, raised.value.param) == (400, code, "second")
        with pytest.raises(ApiError, match="no space for 270000 bytes"):
            await intake.take([source_of(encoded(LARGE))], SPEC, admitted, "messages").__aenter__()


async def test_a_modality_that_the_model_lacks_is_refused(open_engine: Any, open_intake: Any, admitted: Admitted) -> None:
    intake = open_intake(await open_engine())
    with pytest.raises(ApiError, match="does not take audio") as raised:
        await intake.take([source_of(wav(), "audio")], InputSpec(picture=PictureSpec()), admitted, "x").__aenter__()
    assert (raised.value.status, raised.value.code) == (400, "invalid_audio")


async def test_too_many_are_refused_before_anything_is_loaded(
    open_engine: Any, open_intake: Any, admitted: Admitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(*_: object) -> None:
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr(Arrivals, "fetch", load)
    intake = open_intake(await open_engine(), limit_mm_per_prompt=MediaCounts(image=1))
    with pytest.raises(ApiError, match="has 2 media of kind image, at most 1 are accepted") as raised:
        await intake.take([source_of(b""), source_of(b"")], SPEC, admitted, "messages").__aenter__()
    assert (raised.value.status, raised.value.param) == (400, "messages")


@pytest.mark.parametrize(("count", "threads"), [(2, 1), (3, 1), (3, 4)])
async def test_media_that_are_too_large_together_are_refused(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, count: int, threads: int
) -> None:
    intake = open_intake(await open_engine(), max_media_nbytes=3000, decoders=threads)
    sources = [source_of(encoded(pixels)) for pixels in PIXELS[:count]]  # 1.9 KB each
    with pytest.raises(ApiError) as raised:
        await intake.take(sources, SPEC, admitted, "messages").__aenter__()
    assert (raised.value.status, raised.value.code) == (413, "media_too_large")


async def test_a_picture_that_is_damaged_behind_its_header_gives_the_slot_back(
    open_engine: Any, open_intake: Any, encoded: Any, eventually: Any, admitted: Admitted
) -> None:
    engine = await open_engine()
    sources = [source_of(encoded(PIXELS[0])), source_of(encoded(PIXELS[1])[:1000], param="this")]
    with pytest.raises(ApiError, match="truncated") as raised:
        await open_intake(engine).take(sources, SPEC, admitted, "messages").__aenter__()
    assert raised.value.param == "this"
    del raised  # its traceback has the frames that made the views
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_an_error_while_a_medium_is_copied_is_not_kept(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback holds the frames of whoever asks, and what was sent to be answered."""

    class Broken(Exception):
        pass

    async def fail(*_: object) -> None:
        error = Broken()
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    errors: list[weakref.ref[Broken]] = []
    intake = open_intake(await open_engine())
    monkeypatch.setattr(intake._preparation, "copy", fail)
    gc.disable()
    try:
        with pytest.raises(Broken):
            async with intake.take([source_of(encoded(pixels)) for pixels in PIXELS], SPEC, admitted, "messages"):
                pass
        await asyncio.sleep(0)  # the loop lets go of tasks
        assert [error() for error in errors] == [None] * len(PIXELS)
        with pytest.raises(Broken):
            async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admitted, "messages"):
                pass
        await asyncio.sleep(0)
        assert errors[-1]() is None, "the only one's"
    finally:
        gc.enable()


async def test_media_that_are_passed_over_at_the_same_time_are_all_counted(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(*_: object, **__: object) -> int:
        await asyncio.sleep(0.01)
        return 1

    async def ask(number: int) -> None:
        async with intake.take([source_of(encoded(PIXELS[number]))], SPEC, admitted, "messages"):
            pass

    intake = open_intake(await open_engine())
    monkeypatch.setattr(Reuse, "keep", keep)
    await asyncio.gather(*map(ask, range(len(PIXELS))))
    assert intake.statistics().passed_over == len(PIXELS)


async def test_a_clip_that_is_decoded_slowly_holds_no_slot_and_keeps_no_picture_waiting(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more clips than the slab has room for. They wait for each other's memory, and the picture does not."""
    started, go_on = 0, asyncio.Event()
    decode = Preparation.decode

    async def decode_clips_late(preparation: Preparation, probed: ProbedMedium) -> DecodedMedium:
        nonlocal started
        if probed.file.kind == "video":
            started += 1
            await go_on.wait()
        return await decode(preparation, probed)

    async def take(source: MediaSource) -> tuple[int, ...]:
        async with intake.take([source], SPEC, admission.new_request(), "messages") as [medium]:
            return tuple(tensor_of(medium).shape)

    monkeypatch.setattr(Preparation, "decode", decode_clips_late)
    engine = await open_engine(slab_nbytes="1MiB")
    intake = open_intake(engine, max_decoded_nbytes=200_000, slot_timeout_s=0.1)
    clips = [asyncio.create_task(take(source_of(mp4(darkest), "video"))) for darkest in range(40)]  # 37 KB each
    await eventually(lambda: started == 4)  # in three quarters of that memory
    assert engine.client.ring.statistics().slots_in_use == 0
    assert await take(source_of(encoded(PIXELS[0]))) == PIXELS[0].shape
    assert started == 4
    go_on.set()
    assert await asyncio.gather(*clips) == [(4, 48, 64, 3)] * 40
    assert intake._preparation.decoded_memory.nbytes == 0
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_what_can_never_fit_the_slab_is_not_decoded(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode(*_: object) -> None:
        raise AssertionError("nothing is to be decoded")

    monkeypatch.setattr(Preparation, "decode", decode)
    intake = open_intake(await open_engine(slab_nbytes="1MiB"))
    sources = [source_of(encoded(LARGE + light)) for light in np.arange(4, dtype=np.uint8)]
    with pytest.raises(shmring.CapacityError, match="can never fit"):
        await intake.take(sources, SPEC, admitted, "messages").__aenter__()


@pytest.mark.parametrize(
    "moment", ["fetching", "waiting for memory", "decoding", "waiting for a slot", "copying", "in the block"]
)
async def test_cancelling_at_any_moment_gives_everything_back(
    open_engine: Any,
    open_intake: Any,
    encoded: Any,
    eventually: Any,
    admitted: Admitted,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    reached = asyncio.Event()

    async def stay(*_: object) -> Any:
        reached.set()
        await asyncio.Event().wait()

    async def take() -> None:
        try:
            async with intake.take([source_of(encoded(LARGE))], SPEC, admitted, "messages"):
                await stay()
        finally:
            admitted.release_turn()  # as admission does

    engine = await open_engine(slab_nbytes="1MiB")
    intake = open_intake(engine, max_decoded_nbytes=LARGE.nbytes)
    memory = intake._preparation.decoded_memory
    async with AsyncExitStack() as blocker:
        match moment:
            case "waiting for memory":
                await blocker.enter_async_context(memory.take(1, is_quick=True))
            case "waiting for a slot":
                slot = engine.client.ring.slot(engine.ring.statistics().leasable_nbytes - (128 << 10))
                await blocker.enter_async_context(slot)
            case "fetching" | "decoding" | "copying":
                monkeypatch.setattr(*STEPS[moment], stay)
        task = asyncio.create_task(take())
        match moment:
            case "waiting for memory":
                await eventually(lambda: memory._quick._waiting)
            case "waiting for a slot":
                await eventually(lambda: engine.client.ring.statistics().waiting == 1)
            case _:
                await reached.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        del task
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    assert engine.client.ring.statistics().waiting == 0
    assert memory.nbytes == 0
    await asyncio.wait_for(admitted.take_turn(), 1)


async def test_without_shared_memory_it_is_private(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted
) -> None:
    engine = await open_engine()
    intake = open_intake(engine, disable_mm_shm=True)
    async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admitted, "messages") as [picture]:
        np.testing.assert_array_equal(tensor_of(picture).numpy(), PIXELS[0])
        assert engine.client.ring.statistics().slots_in_use == 0


# -- what is prepared once ---------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the media that were decoded."""
    kinds: list[str] = []
    decode = Preparation.decode

    async def count(preparation: Preparation, probed: ProbedMedium) -> DecodedMedium:
        kinds.append(probed.file.kind)
        return await decode(preparation, probed)

    monkeypatch.setattr(Preparation, "decode", count)
    return kinds


async def test_what_was_prepared_is_neither_decoded_nor_copied_again(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str]
) -> None:
    """By another frontend as well, and with its checksum and times."""
    engine = await open_engine(slab_nbytes="16MiB")
    spec = InputSpec(picture=SPEC.picture, sound=SPEC.sound, video=SPEC.video, checksum=True)

    def sources() -> list[MediaSource]:
        return [source_of(mp4(), "video"), source_of(encoded(PIXELS[0])), source_of(wav(), "audio")]

    first, other = open_intake(engine), open_intake(engine)
    async with first.take(sources(), spec, admission.new_request(), "messages") as media:
        expected = [(type(medium), tensor_of(medium).clone(), medium.checksum) for medium in media]
    before = engine.client.ring.statistics()
    assert sorted(decoded) == ["audio", "image", "video"]
    for intake in (first, other):
        async with intake.take(sources(), spec, admission.new_request(), "messages") as media:
            for medium, (kind, tensor, checksum) in zip(media, expected, strict=True):
                assert type(medium) is kind
                assert medium.checksum == checksum == checksum_of(tensor)
                np.testing.assert_array_equal(tensor_of(medium).numpy(), tensor.numpy())
            del medium
    after = engine.client.ring.statistics()
    assert len(decoded) == 3
    assert (after.copies, after.kept_hits - before.kept_hits) == (before.copies, 6)
    assert after.slots_writing == 0


async def test_how_it_is_prepared_and_its_limits_are_part_of_what_is_found(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str]
) -> None:
    engine = await open_engine(slab_nbytes="4MiB")
    intake = open_intake(engine)
    small = InputSpec(picture=PictureSpec(max_pixels=100))
    async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages") as [medium]:
        assert tuple(tensor_of(medium).shape) == PIXELS[0].shape
        del medium
    async with intake.take([source_of(encoded(PIXELS[0]))], small, admission.new_request(), "messages") as [medium]:
        assert tensor_of(medium).shape.numel() <= 300
        del medium
    assert decoded == ["image", "image"]
    dark = open_intake(engine, media_io_kwargs=MediaIoKwargs(rgba_background_color=(0, 0, 0)))
    async with dark.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages"):
        assert decoded == ["image"] * 3
    strict = open_intake(engine, media_limits=MediaLimits(max_image_pixels=100))
    with pytest.raises(ApiError, match="pixels"):  # as if nobody had ever sent it
        await strict.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages").__aenter__()


async def test_the_same_picture_twice_in_a_request_is_decoded_once(
    open_engine: Any, open_intake: Any, encoded: Any, admitted: Admitted, decoded: list[str]
) -> None:
    intake = open_intake(await open_engine())
    sources = [source_of(encoded(PIXELS[index])) for index in (0, 1, 0)]
    async with intake.take(sources, SPEC, admitted, "messages") as media:
        for medium, index in zip(media, (0, 1, 0), strict=True):
            np.testing.assert_array_equal(tensor_of(medium).numpy(), PIXELS[index])
        del medium
    assert len(decoded) == 2


async def test_two_requests_with_the_same_new_picture_have_it_decoded_once(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str]
) -> None:
    intake = open_intake(await open_engine())

    async def take() -> tuple[int, ...]:
        async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages") as [medium]:
            return tuple(tensor_of(medium).shape)

    assert await asyncio.gather(*(take() for _ in range(20))) == [PIXELS[0].shape] * 20
    assert decoded == ["image"]


async def test_a_picture_that_is_ready_a_moment_after_another_request_has_looked_for_it_is_decoded_once(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looked while it was prepared, and hears that it is not there when it is ready."""
    intake = open_intake(await open_engine())
    looked = asyncio.Event()
    other: list[asyncio.Task[None]] = []
    find, keep = MediaMemory.find, MediaMemory.keep

    async def take() -> None:
        async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages") as [medium]:
            np.testing.assert_array_equal(tensor_of(medium).numpy(), PIXELS[0])
            del medium

    async def find_slowly(memory: MediaMemory, key: bytes) -> Any:
        kept = await find(memory, key)
        if other and asyncio.current_task() is other[0] and not looked.is_set():
            looked.set()
            await first
        return kept

    async def keep_late(memory: MediaMemory, key: bytes, medium: Any) -> Any:
        other.append(asyncio.create_task(take()))
        await looked.wait()
        return await keep(memory, key, medium)

    monkeypatch.setattr(MediaMemory, "find", find_slowly)
    monkeypatch.setattr(MediaMemory, "keep", keep_late)
    first = asyncio.create_task(take())
    await first
    await other[0]
    assert decoded == ["image"]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_if_the_first_of_two_ends_early_the_other_goes_on_by_itself(
    open_engine: Any,
    open_intake: Any,
    encoded: Any,
    admission: Admission,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    decode = Preparation.decode
    calls, go_on = 0, asyncio.Event()

    async def fail_first(preparation: Preparation, probed: ProbedMedium) -> DecodedMedium:
        nonlocal calls
        calls += 1
        if calls == 1:
            await go_on.wait()
            raise RuntimeError("the decoder broke")
        return await decode(preparation, probed)

    monkeypatch.setattr(Preparation, "decode", fail_first)
    engine = await open_engine()
    intake = open_intake(engine)

    async def take() -> tuple[int, ...]:
        async with intake.take([source_of(encoded(PIXELS[0]))], SPEC, admission.new_request(), "messages") as [medium]:
            return tuple(tensor_of(medium).shape)

    first = asyncio.create_task(take())
    await eventually(lambda: calls == 1)
    second = asyncio.create_task(take())
    await eventually(lambda: sum(reuse.waiting for reuse in intake._reuse.values()) == 1)
    if end == "cancelled":
        first.cancel()
    else:
        go_on.set()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else RuntimeError):
        await first
    assert await second == PIXELS[0].shape
    assert calls == 2
    await eventually(lambda: engine.ring.statistics().kept_pinned == 0)


async def take_in_order(intake: MediaIntake, admission: Admission, encoded: Any, pictures: Any, *order: int) -> None:
    """A request for some of the pictures gets them, in its order."""
    sources = [source_of(encoded(pictures[index])) for index in order]
    async with intake.take(sources, SPEC, admission.new_request(), "messages") as media:
        for medium, index in zip(media, order, strict=True):
            np.testing.assert_array_equal(tensor_of(medium).numpy(), pictures[index])
        del medium


async def test_two_requests_that_share_pictures_in_opposite_order_do_not_wait_for_each_other(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str]
) -> None:
    intake = open_intake(await open_engine())

    take = functools.partial(take_in_order, intake, admission, encoded, PIXELS)
    await asyncio.wait_for(asyncio.gather(take(0, 1), take(1, 2), take(2, 0), take(2, 1, 0)), 30)
    assert len(decoded) == 3


@pytest.mark.parametrize("kept_nbytes", [0, 4096], ids=["off", "smaller than the picture"])
async def test_what_is_not_kept_is_decoded_each_time(
    open_engine: Any,
    open_intake: Any,
    encoded: Any,
    admission: Admission,
    decoded: list[str],
    eventually: Any,
    kept_nbytes: int,
) -> None:
    engine = await open_engine(kept_nbytes=kept_nbytes, slab_nbytes="4MiB")
    intake = open_intake(engine)
    for _ in range(3):
        async with intake.take([source_of(encoded(LARGE))], SPEC, admission.new_request(), "messages") as [medium]:
            np.testing.assert_array_equal(tensor_of(medium).numpy(), LARGE)
            del medium
    assert len(decoded) == 3
    assert engine.ring.statistics().kept == 0
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_more_pictures_than_the_slab_holds_are_answered_one_after_the_other(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, eventually: Any
) -> None:
    """Some are kept while others have to go, many at a time, with several in a request."""
    engine = await open_engine(slab_nbytes="1MiB")
    intake = open_intake(engine)
    pictures = [LARGE[:160, :200] + light for light in np.arange(12, dtype=np.uint8)]  # 96 KB each: 1.2 times the slab

    take = functools.partial(take_in_order, intake, admission, encoded, pictures)
    orders = [[(5 * number + step) % 12 for step in range(1 + number % 3)] for number in range(60)]
    await asyncio.wait_for(asyncio.gather(*(take(*order) for order in orders)), 60)
    assert engine.ring.statistics().kept_evictions > 0
    await eventually(lambda: engine.ring.statistics().kept_pinned == 0)
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


# -- where more is sent than can be kept -----------------------------------------------------------------------------------


def shades(count: int, first: int = 0) -> list[Any]:
    """Pictures of 96 KB, all different."""
    return [LARGE[:160, :200] + np.uint8(shade) for shade in range(first, first + count)]


@pytest.fixture
def open_crowded(open_engine: Any, open_intake: Any, encoded: Any, admission: Admission) -> Any:
    """``await open_crowded()``: an engine that keeps four of those, an intake that had six, and ``take(*pictures)``."""

    async def make() -> tuple[Any, MediaIntake, Any]:
        engine = await open_engine(kept_nbytes="416KiB")
        intake = open_intake(engine)

        async def take(*pictures: Any) -> None:
            sources = [source_of(encoded(pixels)) for pixels in pictures]
            async with intake.take(sources, SPEC, admission.new_request(), "messages") as media:
                for medium, pixels in zip(media, pictures, strict=True):
                    np.testing.assert_array_equal(tensor_of(medium).numpy(), pixels)
                del medium

        for pixels in shades(6):
            await take(pixels)
        assert intake.statistics().passed_over == 1
        return engine, intake, take

    return make


async def test_of_more_pictures_in_turn_than_can_be_kept_those_that_are_there_stay_and_are_found(
    open_crowded: Any, decoded: list[str], eventually: Any
) -> None:
    """If all were kept, each would push out another, and none would be found."""
    engine, intake, take = await open_crowded()
    evictions = engine.ring.statistics().kept_evictions
    assert len(decoded) == 6
    for _ in range(3):
        for pixels in shades(5) + shades(4, first=100):
            await take(pixels)
    assert len(decoded) == 6 + 3 * 5
    assert engine.ring.statistics().kept_evictions == evictions
    assert intake.statistics().passed_over == 1 + 3 * 5
    await eventually(lambda: engine.ring.statistics().kept_pinned == 0)
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_a_picture_that_becomes_popular_there_is_decoded_twice_and_then_found(
    open_crowded: Any, decoded: list[str]
) -> None:
    engine, _, take = await open_crowded()
    decoded.clear()
    [popular, other] = shades(2, first=100)
    for pixels in (popular, other, popular, popular, popular):
        await take(pixels)
    assert len(decoded) == 3
    assert engine.ring.statistics().kept_hits == 2


async def test_there_as_well_two_requests_with_the_same_new_picture_have_it_decoded_once(
    open_crowded: Any, decoded: list[str], eventually: Any
) -> None:
    """Alone in its request, or beside others; and whoever comes while others are being kept is waited for, too."""
    engine, _, take = await open_crowded()
    decoded.clear()
    alone, shared, one, another = shades(4, first=100)
    await asyncio.gather(*(take(alone) for _ in range(10)))
    assert len(decoded) == 1
    await asyncio.gather(take(shared, one), take(another, shared), take(shared))
    assert len(decoded) == 4
    await eventually(lambda: engine.ring.statistics().kept_pinned == 0)


async def test_what_somebody_begins_to_wait_for_while_others_are_being_kept_is_kept_as_well(
    open_crowded: Any, decoded: list[str], monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    _, intake, take = await open_crowded()
    [again, new] = shades(2, first=100)
    await take(again)
    waiting: list[asyncio.Task[None]] = []
    keep = MediaMemory.keep

    async def keep_late(memory: MediaMemory, key: bytes, medium: Any) -> shmring.Kept:
        if not waiting:
            waiting.append(asyncio.create_task(take(new)))
            await eventually(lambda: sum(reuse.waiting for reuse in intake._reuse.values()) == 1)
        return await keep(memory, key, medium)

    monkeypatch.setattr(MediaMemory, "keep", keep_late)
    decoded.clear()
    await take(again, new)
    await waiting[0]
    assert len(decoded) == 2


async def test_an_engine_that_was_restarted_keeps_everything_again(
    open_crowded: Any, open_engine: Any, decoded: list[str], eventually: Any
) -> None:
    engine, intake, take = await open_crowded()
    epoch = engine.client.ring.epoch
    await engine.ring.close()
    await open_engine(kept_nbytes="416KiB")
    await eventually(lambda: engine.client.ring.epoch not in (0, epoch))
    decoded.clear()
    for _ in range(3):
        await take(*shades(1, first=100))
    assert len(decoded) == 1
    assert intake.statistics().passed_over == 1


async def test_what_somebody_else_keeps_under_a_key_is_not_shown(
    open_engine: Any, open_intake: Any, encoded: Any, admission: Admission, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no medium at all. The picture is decoded each time, and shown."""
    engine = await open_engine()
    intake = open_intake(engine)
    keys: list[bytes] = []

    async def remember(*arguments: Any) -> list[bytes]:
        keys.extend(await keys_of(*arguments))
        return keys[-1:]

    monkeypatch.setattr("shmring.frontend.intake.keys_of", remember)
    picture = encoded(PIXELS[0])
    for _ in range(2):
        async with intake.take([source_of(picture)], SPEC, admission.new_request(), "messages") as [medium]:
            np.testing.assert_array_equal(tensor_of(medium).numpy(), PIXELS[0])
            del medium
        if len(decoded) == 1:
            await _replace_what_is_kept(engine, keys[-1])
    assert decoded == ["image", "image"]


async def _replace_what_is_kept(engine: Any, key: bytes) -> None:
    ring = engine.client.ring
    async with ring.slot(engine.ring.statistics().leasable_nbytes - 64, timeout=5):
        assert engine.ring.statistics().kept == 0
    (await ring.keep(key, {"other": np.zeros(100)})).close()
