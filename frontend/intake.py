"""The media of a request, from their sources to the slab, for as long as its request needs them there.

There are three rooms. In the first, the files of a request arrive (:mod:`shmring.frontend.media.sources`). In the second, media
are prepared (:mod:`shmring.frontend.media.preparation`). In the third, what was prepared before is found, and what is new is
given to the engine to keep (:mod:`shmring.frontend.media.reuse`). No room calls another one: :class:`MediaIntake` takes what
one room returns to the next.

The media are in one list, which the engine's request shares. The list is emptied when the block is left: a slot that was left
drains until its last view has died, and the answer may go on for minutes. By then the request must have been sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.client import EngineClient, MediaMemory
from shmring.engine.protocol import InputSpec, Medium, ProcessorSpec
from shmring.frontend.callers.admission import Admitted
from shmring.frontend.errors import not_installed
from shmring.frontend.media.decoder_pool import DecoderStatistics
from shmring.frontend.media.packages import what_is_missing
from shmring.frontend.media.preparation import Preparation
from shmring.frontend.media.reuse import Held, Reuse, keys_of
from shmring.frontend.media.sources import Arrivals, MediaFile, MediaSource
from shmring.frontend.settings import FrontendSettings
from shmring.service.distributions import Distribution
from shmring.service.numbers import Count, Number
from shmring.service.tracing import traced

__all__ = ["IntakeStatistics", "MediaIntake"]

_LOG = logger_of(__name__)

_FILE_THREADS = 2  # for base64, local files and hashes: they hold the interpreter lock, or wait for a disk
# How often a request looks for its media before it decodes all of them itself.
_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """What a frontend's media are doing.

    Attributes:
        decoders: how busy they are.
        decoded_nbytes: bytes taken by requests whose media are decoded, or being decoded, and not in the slab yet.
        decoded_waiting: requests that wait for such memory.
        decoded: media decoded.
        passed_over: media decoded and not kept, since callers send more in turn than can be kept
            ([why](guarantees.md#when-more-is-sent-than-can-be-kept)).
        fetch: time to fetch a medium from a URL or a file, failures included.
        preparation: time to decode a medium, the wait for a decoder included, by ``kind``: ``image``, ``audio``, ``video``.
        slot_wait: how long requests with new media waited for space in the slab, those that gave up included.
    """

    decoders: DecoderStatistics
    decoded_nbytes: Annotated[int, Number("shmring_frontend_decoded_bytes")]
    decoded_waiting: Annotated[int, Number("shmring_frontend_decoded_waiters")]
    decoded: Annotated[Count, Number("shmring_frontend_media_decoded")]
    passed_over: Annotated[Count, Number("shmring_frontend_media_passed_over")]
    fetch: Annotated[Distribution, Number("shmring_media_fetch_seconds")] = dataclasses.field(default_factory=Distribution)
    preparation: Annotated[Mapping[tuple[str, ...], Distribution], Number("shmring_media_preparation_seconds", ("kind",))] = (
        dataclasses.field(default_factory=dict)
    )
    slot_wait: Annotated[Distribution, Number("shmring_slot_wait_seconds")] = dataclasses.field(default_factory=Distribution)


class MediaIntake:
    """Takes in the media of requests. Make it in a running loop, and close it.

    Args:
        engine: whose slab they go to.
        settings: limits.
    """

    def __init__(self, engine: EngineClient, settings: FrontendSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._pool = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="fetch")
        self._arrivals = Arrivals(settings, self._pool)
        self._preparation = Preparation(settings)
        self._reuse: dict[str, Reuse] = {}  # by engine: each keeps media of its own
        self._passed_over = 0

    def statistics(self) -> IntakeStatistics:
        """Returns how busy the decoders are, and how much memory decoded media take."""
        preparation, memory = self._preparation, self._preparation.decoded_memory
        decoders = preparation.decoders.statistics()
        return IntakeStatistics(
            decoders,
            memory.nbytes,
            memory.waiting,
            preparation.decoded,
            self._passed_over,
            self._arrivals.fetch_s,
            preparation.preparation_s,
            preparation.slot_wait_s,
        )

    def take_decoding_seconds(self) -> dict[str, float]:
        """Returns for how many seconds each caller has had decoders since this was asked last."""
        return self._preparation.decoders.take_seconds()

    async def get_ready(self, spec: InputSpec) -> None:
        """Says if media can't be decoded here. Starts a decoder, if pictures need one that imports for seconds."""
        takes_media = spec.picture is not None or spec.sound is not None or spec.video is not None
        if takes_media and (missing := what_is_missing()) is not None:
            _LOG.warning("pictures, recordings and clips can't be decoded, and get 501: %s", missing)
            return
        picture = _usable(spec).picture
        if picture is not None and picture.processor is not None:
            await self._preparation.decoders.get_ready(picture.processor)

    async def close(self) -> None:
        """Starts nothing more."""
        self._preparation.close()
        await self._arrivals.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def take(
        self, sources: list[MediaSource], spec: InputSpec, admitted: Admitted, param: str
    ) -> AsyncIterator[list[Medium]]:
        """Keeps the media in the slab for as long as the block lasts.

        Args:
            sources: where they come from; emptied, because ``data:`` URLs hold the files once more.
            spec: what the executor takes.
            admitted: the request; it has a turn from the time when its files have arrived until the block begins.
            param: the parameter that errors about all media together name.

        Yields:
            The media in the order of their sources, with checksums if the executor wants them. The list is emptied when the
            block is left.

        Raises:
            ApiError: what the caller did wrong, or that there is no space.
            shmring.CapacityError: all media together can never fit the slab; nothing was decoded.
            shmring.ShmringError: from the engine.
        """
        if sources and (missing := what_is_missing()) is not None:
            raise not_installed(f"this server decodes no media: {missing}", param)
        media: list[Medium] = []
        spec = _usable(spec)
        with Held() as held:
            try:
                if sources:
                    with traced("media preparation", {"shmring.media": len(sources)}):
                        media += await self._media(sources, spec, admitted, param, held)
                admitted.release_turn()
                yield media
            finally:
                media.clear()  # a slot that is left without views needs not wait for these frames to end

    async def _media(
        self, sources: list[MediaSource], spec: InputSpec, admitted: Admitted, param: str, held: Held
    ) -> list[Medium]:
        """Returns all media, at one engine: the next one, if that one dies meanwhile."""
        files = await self._arrivals.files(sources, spec, admitted, param)
        sources.clear()
        keeps = self._engine.kept_nbytes > 0 and not self._settings.disable_mm_shm
        keys = await keys_of(files, spec, self._settings, self._pool) if keeps else []
        while True:
            memory = self._engine.media_memory()
            try:
                return await self._media_at(memory, files, keys, spec, held)
            except shmring.EngineDeadError:
                held.close()
                if len(self._engine.engines) == 1 or not self._engine.is_running:
                    raise

    async def _media_at(
        self, memory: MediaMemory, files: list[MediaFile], keys: list[bytes], spec: InputSpec, held: Held
    ) -> list[Medium]:
        """Returns all media. Without keys, nothing is used again."""
        if not keys:
            return await self._preparation.prepare(files, spec, memory, held)
        unique: dict[bytes, MediaFile] = {}
        for key, file in zip(keys, files, strict=True):
            unique.setdefault(key, file)  # of two that are the same, errors name the first
        reuse = self._reuse.get(memory.name)
        if reuse is None or reuse.epoch != memory.epoch:
            reuse = self._reuse[memory.name] = Reuse(memory)
        await self._obtain(reuse, unique, spec, held)
        if spec.keys:
            for key, medium in held.media.items():
                medium.key = key.hex()
        return [held.media[key] for key in keys]

    async def _obtain(self, reuse: Reuse, files: dict[bytes, MediaFile], spec: InputSpec, held: Held) -> None:
        """Obtains all media: those that are kept from where they lie, the others decoded.

        Nothing is held while something is waited for, neither slots nor what was found, or requests could wait for each other.
        So what was found may have gone when the rest is there. Then this begins again, and at last it decodes everything
        itself. A medium that another request begins and ends to prepare while this one looks for it is decoded twice, and kept
        once.

        Args:
            reuse: what there is at the engine.
            files: of the media, by key.
            spec: what the executor takes.
            held: the media, in the end.
        """
        for _ in range(_ATTEMPTS):
            joined = reuse.join(files)  # before it looks: of these, what is ready meanwhile may not be found
            found_nbytes = await reuse.find(files, held)
            reuse.keeping.found(len(held.media))
            if len(held.media) == len(files):
                return
            missing = [key for key in files if key not in held.media]
            held.close()
            joined += reuse.join(missing)
            others = [key for key in missing if key in joined]
            new = {key: files[key] for key in missing if key not in others}
            if new:
                with reuse.lead(new):
                    await self._prepare(reuse, new, spec, held, found_nbytes)
                    # With others beside them, they may be looked for once more.
                    passed_over = await reuse.keep(held, keeps_all=len(new) < len(files))
                self._passed_over += passed_over
            if not others:
                await reuse.find([key for key in files if key not in held.media], held)
                if len(held.media) == len(files):
                    return
            held.close()
            await reuse.wait(others)
        await self._prepare(reuse, files, spec, held)

    async def _prepare(
        self, reuse: Reuse, files: dict[bytes, MediaFile], spec: InputSpec, held: Held, other_nbytes: Sequence[int] = ()
    ) -> None:
        media = await self._preparation.prepare(list(files.values()), spec, reuse.memory, held, other_nbytes)
        held.media.update(zip(files, media, strict=True))


def _usable(spec: InputSpec) -> InputSpec:
    """Returns what the executor takes, without an image processor that can't be run here."""
    if spec.picture is None or spec.picture.processor is None or _can_run(spec.picture.processor):
        return spec
    return msgspec.structs.replace(spec, picture=msgspec.structs.replace(spec.picture, processor=None))


@functools.lru_cache(maxsize=1)
def _can_run(processor: ProcessorSpec) -> bool:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    if version != processor.version:
        message = "pictures are processed in the engine: transformers is %s here, and %s there"
        _LOG.info(message, version, processor.version)
    return version == processor.version
