"""The way of a request's media: sizes first, then decoded, then one slot for all, and back whatever happens."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import wave
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
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
from shmring.frontend.callers.admission import Admission, Admitted
from shmring.frontend.errors import ApiError
from shmring.frontend.intake import MediaIntake
from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.preparation import DecodedMedium, Preparation, ProbedMedium
from shmring.frontend.media.reuse import Reuse, keys_of
from shmring.frontend.media.sources import Arrivals, MediaSource
from shmring.frontend.settings import FrontendSettings, MediaCounts
from tests.frontend.talking import LARGE_PICTURE, picture_url
from tests.waiting import eventually

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 20, 30, 3), np.uint8)
LARGE = np.zeros((300, 300, 3), np.uint8)
SPEC = InputSpec(picture=PictureSpec(), sound=SoundSpec(), video=VideoSpec(num_frames=4))
CHECKED = msgspec.structs.replace(SPEC, checksum=True)
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


def source_of(file: Any, kind: Any = "image", param: str = "p") -> MediaSource:
    """The source of a file, or of a picture."""
    if not isinstance(file, bytes):
        return MediaSource(kind, param, url=picture_url(file))
    mime = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}[kind]
    return MediaSource(kind, param, url=f"data:{mime};base64,{base64.b64encode(file).decode('ascii')}")


class Taking:
    """An engine, and an intake before it; one request at a time has a turn."""

    def __init__(self, engine: Any, intake: MediaIntake) -> None:
        self.engine = engine
        self.intake = intake
        self.admission = Admission(FrontendSettings(max_concurrent_media=1))
        self.admitted = self.admission.new_request()

    def take(self, *media: Any, spec: InputSpec = SPEC, admitted: Admitted | None = None) -> Any:
        """A request that takes pictures, files of pictures, or sources."""
        sources = [medium if isinstance(medium, MediaSource) else source_of(medium) for medium in media]
        return self.intake.take(sources, spec, admitted or self.admission.new_request(), "messages")

    async def show(self, *pictures: Any) -> None:
        """A request gets these pictures, in order."""
        async with self.take(*pictures) as media:
            for medium, pixels in zip(media, pictures, strict=True):
                np.testing.assert_array_equal(tensor_of(medium).numpy(), pixels)
            del medium

    async def refusal(self, *media: Any, spec: InputSpec = SPEC) -> tuple[int, str, str | None, str]:
        """The status, the code, the place and the message of the error that a request gets."""
        try:
            async with self.take(*media, spec=spec):
                pytest.fail("it was taken in")
        except ApiError as error:  # and its traceback, which has the frames that made the views, is gone
            return error.status, error.code, error.param, str(error)

    @property
    def slots(self) -> int:
        return int(self.engine.client.ring.statistics().slots_in_use)

    @property
    def pinned(self) -> int:
        return int(self.engine.ring.statistics().kept_pinned)

    @property
    def waiting(self) -> int:
        """Requests that wait for what another one prepares."""
        return sum(reuse.waiting for reuse in self.intake._reuse.values())

    def most_of_the_slab(self) -> Any:
        """A slot that leaves little."""
        return self.engine.client.ring.slot(self.engine.ring.statistics().leasable_nbytes - (128 << 10))


OpenTaking = Callable[..., Awaitable[Taking]]


@pytest.fixture
def open_taking(open_engine: Any, open_intake: Any) -> OpenTaking:
    """``await open_taking(slab_nbytes="1MiB", **settings)``; ``open_taking(engine)``: another frontend of that engine."""

    async def make(engine: Any = None, **options: Any) -> Taking:
        of_ring = {name: options.pop(name) for name in ("slab_nbytes", "kept_nbytes") if name in options}
        engine = engine or await open_engine(**of_ring)
        return Taking(engine, open_intake(engine, **options))

    return make


async def test_media_lie_in_the_slab_and_go_back(open_taking: OpenTaking) -> None:
    taking = await open_taking()
    sources = [source_of(pixels) for pixels in PIXELS]
    async with taking.intake.take(sources, SPEC, taking.admitted, "messages") as media:
        assert sources == []
        for medium, pixels in zip(media, PIXELS, strict=True):
            assert isinstance(medium, Picture)
            np.testing.assert_array_equal(medium.pixels.numpy(), pixels)
            assert medium.checksum is None
        assert taking.pinned == 3
        del medium
    assert media == []
    await eventually(lambda: (taking.slots, taking.pinned) == (0, 0))


async def test_a_medium_has_the_key_that_it_is_kept_under_if_the_executor_wants_it(open_taking: OpenTaking) -> None:
    taking = await open_taking()
    private = await open_taking(taking.engine, disable_mm_shm=True)
    wanted = msgspec.structs.replace(SPEC, keys=True)
    keys = []
    for each, spec in ((taking, wanted), (taking, wanted), (taking, SPEC), (private, wanted)):
        async with each.take(*PIXELS[:2], spec=spec) as media:
            keys.append([medium.key for medium in media])
    new, again, unwanted, not_kept = keys
    assert new == again
    assert len({*new, None}) == 3
    assert unwanted == not_kept == [None, None]


async def test_every_modality_arrives_in_the_slab(open_taking: OpenTaking) -> None:
    taking = await open_taking(slab_nbytes="16MiB")
    recording = MediaSource("audio", "p", base64=base64.b64encode(wav()).decode("ascii"))
    sources = [source_of(mp4(), "video"), PIXELS[0], source_of(wav(), "audio"), recording]
    async with taking.take(*sources, spec=CHECKED) as media:
        video, picture, sound, same = media
        assert [type(medium) for medium in media] == [Video, Picture, Spectrogram, Spectrogram]
        assert tuple(video.frames.shape) == (4, 48, 64, 3)
        assert video.frames.float().mean(dim=(1, 2, 3)).diff().min() > 10
        assert abs(sound.log_mel.shape[0] - 100) <= 3
        assert same.checksum == sound.checksum
        assert [medium.checksum for medium in media] == [checksum_of(tensor_of(medium)) for medium in media]
        del video, picture, sound, same


async def test_a_turn_is_taken_for_large_files_only_and_given_back_before_the_engine_gets_the_request(
    open_taking: OpenTaking,
) -> None:
    taking = await open_taking()
    async with taking.take(LARGE_PICTURE, admitted=taking.admitted):
        assert (taking.admitted.has_turn, taking.admitted._turns._free) == (False, 1)
        await asyncio.wait_for(taking.admitted.take_turn(), 1)  # it is free, and somebody else has it now
        other = taking.admission.new_request()
        for few in ([], [PIXELS[0]]):  # what is small needs none
            async with taking.take(*few, admitted=other) as media:
                assert len(media) == len(few)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(taking.take(bytes(400_000), admitted=other).__aenter__(), 0.05)


@contextlib.asynccontextmanager
async def slow_host(answer: Any) -> AsyncIterator[tuple[str, FetchSettings]]:
    """A host that media may be fetched from: its address, and the settings that allow it."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as host:
        place = "127.0.0.1:" + str(host.sockets[0].getsockname()[1])
        yield place, FetchSettings(allowed_media_domains=(place,), allowed_media_networks=("127.0.0.0/8",))


async def test_a_request_that_fetches_has_no_turn_meanwhile(open_taking: OpenTaking) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await go_on.wait()
        writer.close()

    async with slow_host(answer) as (place, allowed):
        taking = await open_taking(fetch=allowed)
        fetched = MediaSource("image", "p", url=f"http://{place}/silent")
        fetching = asyncio.create_task(taking.take(fetched, bytes(400_000), admitted=taking.admitted).__aenter__())
        await reached.wait()
        assert taking.admitted._turns._free == 1
        go_on.set()
        with pytest.raises(ApiError, match="the host ended the connection"):
            await fetching


async def test_who_fetches_from_slow_hosts_leaves_places_to_others(
    open_taking: OpenTaking, encoded: Any, monkeypatch: pytest.MonkeyPatch
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

    async with slow_host(answer) as (place, allowed):
        taking = await open_taking(fetch=allowed)

        async def take(who: str, path: str) -> int:
            source = MediaSource("image", "p", url=f"http://{place}{path}")
            async with taking.take(source, admitted=taking.admission.new_request(who=who)) as media:
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
async def test_the_error_about_a_bad_medium_names_its_place(open_taking: OpenTaking, kind: str, file: bytes, code: str) -> None:
    """And not that there is no slot: none was needed yet."""
    taking = await open_taking(slab_nbytes="1MiB", slot_timeout_s=0.01)
    async with taking.most_of_the_slab():
        assert (await taking.refusal(LARGE, source_of(file, kind, "second")))[:3] == (400, code, "second")
        twice = (source_of(file, kind, name) for name in ("first", "second"))
        assert (await taking.refusal(*twice))[:3] == (400, code, "first")
        assert "no space for 270000 bytes" in (await taking.refusal(LARGE))[-1]


async def test_a_modality_that_the_model_lacks_is_refused(open_taking: OpenTaking) -> None:
    taking = await open_taking()
    status, code, _, message = await taking.refusal(source_of(wav(), "audio"), spec=InputSpec(picture=PictureSpec()))
    assert (status, code) == (400, "invalid_audio")
    assert "does not take audio" in message


async def test_too_many_are_refused_before_anything_is_loaded(open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: object) -> None:
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr(Arrivals, "fetch", load)
    taking = await open_taking(limit_mm_per_prompt=MediaCounts(image=1))
    status, _, param, message = await taking.refusal(b"", b"")
    assert (status, param) == (400, "messages")
    assert "has 2 media of kind image, at most 1 are accepted" in message


@pytest.mark.parametrize(("count", "threads"), [(2, 1), (3, 1), (3, 4)])
async def test_media_that_are_too_large_together_are_refused(open_taking: OpenTaking, count: int, threads: int) -> None:
    taking = await open_taking(max_media_nbytes=3000, decoders=threads)
    assert (await taking.refusal(*PIXELS[:count]))[:2] == (413, "media_too_large")  # 1.9 KB each


async def test_a_picture_that_is_damaged_behind_its_header_gives_the_slot_back(open_taking: OpenTaking, encoded: Any) -> None:
    taking = await open_taking()
    _, _, param, message = await taking.refusal(PIXELS[0], source_of(encoded(PIXELS[1])[:1000], param="this"))
    assert param == "this"
    assert "truncated" in message
    await eventually(lambda: taking.slots == 0)


async def test_an_error_while_a_medium_is_copied_is_not_kept(open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch) -> None:
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
    taking = await open_taking()
    monkeypatch.setattr(taking.intake._preparation, "copy", fail)
    gc.disable()
    try:
        for pictures in (PIXELS, PIXELS[:1]):  # several, or one alone
            errors.clear()
            with pytest.raises(Broken):
                async with taking.take(*pictures):
                    pass
            await asyncio.sleep(0)  # the loop lets go of tasks
            assert [error() for error in errors] == [None] * len(pictures)
    finally:
        gc.enable()


async def test_media_that_are_passed_over_at_the_same_time_are_all_counted(
    open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(*_: object, **__: object) -> int:
        await asyncio.sleep(0.01)
        return 1

    taking = await open_taking()
    monkeypatch.setattr(Reuse, "keep", keep)
    await asyncio.gather(*map(taking.show, PIXELS))
    assert taking.intake.statistics().passed_over == len(PIXELS)


async def test_a_clip_that_is_decoded_slowly_holds_no_slot_and_keeps_no_picture_waiting(
    open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch
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

    async def take(clip: MediaSource) -> tuple[int, ...]:
        async with taking.take(clip) as [medium]:
            return tuple(tensor_of(medium).shape)

    monkeypatch.setattr(Preparation, "decode", decode_clips_late)
    taking = await open_taking(slab_nbytes="1MiB", max_decoded_nbytes=200_000, slot_timeout_s=0.1)
    clips = [asyncio.create_task(take(source_of(mp4(darkest), "video"))) for darkest in range(40)]  # 37 KB each
    await eventually(lambda: started == 4)  # in three quarters of that memory
    assert taking.slots == 0
    await taking.show(PIXELS[0])
    assert started == 4
    go_on.set()
    assert await asyncio.gather(*clips) == [(4, 48, 64, 3)] * 40
    assert taking.intake._preparation.decoded_memory.nbytes == 0
    await eventually(lambda: taking.slots == 0)


async def test_what_can_never_fit_the_slab_is_not_decoded(open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch) -> None:
    async def decode(*_: object) -> None:
        raise AssertionError("nothing is to be decoded")

    monkeypatch.setattr(Preparation, "decode", decode)
    taking = await open_taking(slab_nbytes="1MiB")
    with pytest.raises(shmring.CapacityError, match="can never fit"):
        await taking.show(*(LARGE + light for light in np.arange(4, dtype=np.uint8)))


@pytest.mark.parametrize(
    "moment", ["fetching", "waiting for memory", "decoding", "waiting for a slot", "copying", "in the block"]
)
async def test_cancelling_at_any_moment_gives_everything_back(
    open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    reached = asyncio.Event()

    async def stay(*_: object) -> Any:
        reached.set()
        await asyncio.Event().wait()

    async def take() -> None:
        try:
            async with taking.take(LARGE, admitted=taking.admitted):
                await stay()
        finally:
            taking.admitted.release_turn()  # as admission does

    taking = await open_taking(slab_nbytes="1MiB", max_decoded_nbytes=LARGE.nbytes)
    memory, ring = taking.intake._preparation.decoded_memory, taking.engine.client.ring
    async with AsyncExitStack() as blocker:
        if moment == "waiting for memory":
            await blocker.enter_async_context(memory.take(1, is_quick=True))
        elif moment == "waiting for a slot":
            await blocker.enter_async_context(taking.most_of_the_slab())
        elif moment in STEPS:
            monkeypatch.setattr(*STEPS[moment], stay)
        task = asyncio.create_task(take())
        if moment == "waiting for memory":
            await eventually(lambda: memory.waiting)
        elif moment == "waiting for a slot":
            await eventually(lambda: ring.statistics().waiting == 1)
        else:
            await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
    await eventually(lambda: taking.slots == 0)
    assert (ring.statistics().waiting, memory.nbytes) == (0, 0)
    await asyncio.wait_for(taking.admitted.take_turn(), 1)


async def test_without_shared_memory_it_is_private(open_taking: OpenTaking) -> None:
    taking = await open_taking(disable_mm_shm=True)
    async with taking.take(PIXELS[0]) as [picture]:
        np.testing.assert_array_equal(tensor_of(picture).numpy(), PIXELS[0])
        assert taking.slots == 0


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


async def test_what_was_prepared_is_neither_decoded_nor_copied_again(open_taking: OpenTaking, decoded: list[str]) -> None:
    """By another frontend as well, and with its checksum and times."""

    def sources() -> list[MediaSource]:
        return [source_of(mp4(), "video"), source_of(PIXELS[0]), source_of(wav(), "audio")]

    first = await open_taking(slab_nbytes="16MiB")
    async with first.take(*sources(), spec=CHECKED) as media:
        expected = [(type(medium), tensor_of(medium).clone(), medium.checksum) for medium in media]
    before = first.engine.client.ring.statistics()
    assert sorted(decoded) == ["audio", "image", "video"]
    for taking in (first, await open_taking(first.engine)):
        async with taking.take(*sources(), spec=CHECKED) as media:
            for medium, (kind, tensor, checksum) in zip(media, expected, strict=True):
                assert type(medium) is kind
                assert medium.checksum == checksum == checksum_of(tensor)
                np.testing.assert_array_equal(tensor_of(medium).numpy(), tensor.numpy())
            del medium
    after = first.engine.client.ring.statistics()
    assert len(decoded) == 3
    assert (after.copies, after.kept_hits - before.kept_hits) == (before.copies, 6)
    assert after.slots_writing == 0


async def test_how_it_is_prepared_and_its_limits_are_part_of_what_is_found(open_taking: OpenTaking, decoded: list[str]) -> None:
    taking = await open_taking()
    await taking.show(PIXELS[0])
    async with taking.take(PIXELS[0], spec=InputSpec(picture=PictureSpec(max_pixels=100))) as [medium]:
        assert tensor_of(medium).shape.numel() <= 300
        del medium
    assert decoded == ["image", "image"]
    dark = await open_taking(taking.engine, media_io_kwargs=MediaIoKwargs(rgba_background_color=(0, 0, 0)))
    await dark.show(PIXELS[0])
    assert decoded == ["image"] * 3
    strict = await open_taking(taking.engine, media_limits=MediaLimits(max_image_pixels=100))
    assert "pixels" in (await strict.refusal(PIXELS[0]))[-1], "as if nobody had ever sent it"


async def test_two_requests_with_the_same_new_picture_have_it_decoded_once(open_taking: OpenTaking, decoded: list[str]) -> None:
    """So has one that has it twice. Requests that share pictures in opposite order do not wait for each other."""
    taking = await open_taking()
    await taking.show(*PIXELS[[0, 1, 0]])
    assert len(decoded) == 2
    await asyncio.gather(*(taking.show(PIXELS[2]) for _ in range(20)))
    assert len(decoded) == 3
    new = PIXELS[:, ::-1]
    orders = ([0, 1], [1, 2], [2, 0], [2, 1, 0])
    await asyncio.wait_for(asyncio.gather(*(taking.show(*new[order]) for order in orders)), 30)
    assert len(decoded) == 6


async def test_a_picture_that_is_ready_a_moment_after_another_request_has_looked_for_it_is_decoded_once(
    open_taking: OpenTaking, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looked while it was prepared, and hears that it is not there when it is ready."""
    taking = await open_taking()
    looked = asyncio.Event()
    other: list[asyncio.Task[None]] = []
    find, keep = MediaMemory.find, MediaMemory.keep

    async def find_slowly(memory: MediaMemory, key: bytes) -> Any:
        kept = await find(memory, key)
        if other and asyncio.current_task() is other[0] and not looked.is_set():
            looked.set()
            await first
        return kept

    async def keep_late(memory: MediaMemory, key: bytes, medium: Any) -> Any:
        other.append(asyncio.create_task(taking.show(PIXELS[0])))
        await looked.wait()
        return await keep(memory, key, medium)

    monkeypatch.setattr(MediaMemory, "find", find_slowly)
    monkeypatch.setattr(MediaMemory, "keep", keep_late)
    first = asyncio.create_task(taking.show(PIXELS[0]))
    await first
    await other[0]
    assert decoded == ["image"]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_if_the_first_of_two_ends_early_the_other_goes_on_by_itself(
    open_taking: OpenTaking, monkeypatch: pytest.MonkeyPatch, end: str
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
    taking = await open_taking()
    first = asyncio.create_task(taking.show(PIXELS[0]))
    await eventually(lambda: calls == 1)
    second = asyncio.create_task(taking.show(PIXELS[0]))
    await eventually(lambda: taking.waiting == 1)
    if end == "cancelled":
        first.cancel()
    else:
        go_on.set()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else RuntimeError):
        await first
    await second
    assert calls == 2
    await eventually(lambda: taking.pinned == 0)


@pytest.mark.parametrize("kept_nbytes", [0, 4096], ids=["off", "smaller than the picture"])
async def test_what_is_not_kept_is_decoded_each_time(open_taking: OpenTaking, decoded: list[str], kept_nbytes: int) -> None:
    taking = await open_taking(kept_nbytes=kept_nbytes)
    for _ in range(3):
        await taking.show(LARGE)
    assert len(decoded) == 3
    assert taking.engine.ring.statistics().kept == 0
    await eventually(lambda: taking.slots == 0)


async def test_more_pictures_than_the_slab_holds_are_answered_one_after_the_other(open_taking: OpenTaking) -> None:
    """Some are kept while others have to go, many at a time, with several in a request."""
    taking = await open_taking(slab_nbytes="1MiB")
    pictures = shades(12)  # 1.2 times the slab
    orders = [[(5 * number + step) % 12 for step in range(1 + number % 3)] for number in range(60)]
    await asyncio.wait_for(asyncio.gather(*(taking.show(*(pictures[index] for index in order)) for order in orders)), 60)
    assert taking.engine.ring.statistics().kept_evictions > 0
    await eventually(lambda: (taking.pinned, taking.slots) == (0, 0))


# -- where more is sent than can be kept -----------------------------------------------------------------------------------


def shades(count: int, first: int = 0) -> list[Any]:
    """Pictures of 96 KB, all different."""
    return [LARGE[:160, :200] + np.uint8(shade) for shade in range(first, first + count)]


@pytest.fixture
async def crowded(open_taking: OpenTaking, decoded: list[str]) -> Taking:
    """An engine that keeps four of those, and has been sent six."""
    taking = await open_taking(kept_nbytes="416KiB")
    for pixels in shades(6):
        await taking.show(pixels)
    assert len(decoded) == 6
    assert taking.intake.statistics().passed_over == 1
    decoded.clear()
    return taking


async def test_of_more_pictures_in_turn_than_can_be_kept_those_that_are_there_stay_and_are_found(
    crowded: Taking, decoded: list[str]
) -> None:
    """If all were kept, each would push out another, and none would be found."""
    evictions = crowded.engine.ring.statistics().kept_evictions
    for _ in range(3):
        for pixels in shades(5) + shades(4, first=100):
            await crowded.show(pixels)
    assert len(decoded) == 3 * 5
    assert crowded.engine.ring.statistics().kept_evictions == evictions
    assert crowded.intake.statistics().passed_over == 1 + 3 * 5
    await eventually(lambda: (crowded.pinned, crowded.slots) == (0, 0))


async def test_a_picture_that_becomes_popular_there_is_decoded_twice_and_then_found(
    crowded: Taking, decoded: list[str]
) -> None:
    [popular, other] = shades(2, first=100)
    for pixels in (popular, other, popular, popular, popular):
        await crowded.show(pixels)
    assert len(decoded) == 3
    assert crowded.engine.ring.statistics().kept_hits == 2


async def test_there_as_well_two_requests_with_the_same_new_picture_have_it_decoded_once(
    crowded: Taking, decoded: list[str]
) -> None:
    """Alone in its request, or beside others; and whoever comes while others are being kept is waited for, too."""
    alone, shared, one, another = shades(4, first=100)
    await asyncio.gather(*(crowded.show(alone) for _ in range(10)))
    assert len(decoded) == 1
    await asyncio.gather(crowded.show(shared, one), crowded.show(another, shared), crowded.show(shared))
    assert len(decoded) == 4
    await eventually(lambda: crowded.pinned == 0)


async def test_what_somebody_begins_to_wait_for_while_others_are_being_kept_is_kept_as_well(
    crowded: Taking, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [again, new] = shades(2, first=100)
    await crowded.show(again)
    waiting: list[asyncio.Task[None]] = []
    keep = MediaMemory.keep

    async def keep_late(memory: MediaMemory, key: bytes, medium: Any) -> shmring.Kept:
        if not waiting:
            waiting.append(asyncio.create_task(crowded.show(new)))
            await eventually(lambda: crowded.waiting == 1)
        return await keep(memory, key, medium)

    monkeypatch.setattr(MediaMemory, "keep", keep_late)
    decoded.clear()
    await crowded.show(again, new)
    await waiting[0]
    assert len(decoded) == 2


async def test_an_engine_that_was_restarted_keeps_everything_again(
    crowded: Taking, open_engine: Any, decoded: list[str]
) -> None:
    client = crowded.engine.client
    epoch = client.ring.epoch
    await crowded.engine.ring.close()
    await open_engine(kept_nbytes="416KiB")
    await eventually(lambda: client.ring.epoch not in (0, epoch))
    for _ in range(3):
        await crowded.show(*shades(1, first=100))
    assert len(decoded) == 1
    assert crowded.intake.statistics().passed_over == 1


async def test_what_somebody_else_keeps_under_a_key_is_not_shown(
    open_taking: OpenTaking, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no medium at all. The picture is decoded each time, and shown."""
    taking = await open_taking()
    keys: list[bytes] = []

    async def remember(*arguments: Any) -> list[bytes]:
        keys.extend(await keys_of(*arguments))
        return keys[-1:]

    monkeypatch.setattr("shmring.frontend.intake.keys_of", remember)
    for _ in range(2):
        await taking.show(PIXELS[0])
        if len(decoded) == 1:
            await _replace_what_is_kept(taking.engine, keys[-1])
    assert decoded == ["image", "image"]


async def _replace_what_is_kept(engine: Any, key: bytes) -> None:
    ring = engine.client.ring
    async with ring.slot(engine.ring.statistics().leasable_nbytes - 64, timeout=5):
        assert engine.ring.statistics().kept == 0
    (await ring.keep(key, {"other": np.zeros(100)})).close()
