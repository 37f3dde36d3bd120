"""The media of a request, from their source to the slab: fetch, prepare, decode, acquire, copy.

The order is this. First, files from other hosts are fetched, which may take long and keeps nobody else waiting. Then the
request takes a turn, if its files are large. Decoders say how much memory all media need. The request takes that much of
the memory for decoded media (:mod:`shmring.frontend.decoded_memory`), and each medium is decoded into a memory file. Only then
slots are acquired, for all of them at once, and they are copied there. So a slot is held for as long as copying takes, and a
clip that is decoded for a minute keeps no memory of the slab from others.

What was prepared is given to the engine to keep, under a hash of its file and of how it was prepared. Whoever sends the same
file again, through any frontend, finds it there: it is neither decoded nor copied. Two requests with the same new file have it
decoded once (:mod:`shmring.frontend.media.flights`). While keeping everything is in vain, because callers send more in turn
than can be kept, most new media are not kept (:mod:`shmring.frontend.media.keeping`).

The views of the slots are in one list, which the engine's request shares. The list is emptied when the block is left: a slot
that was left drains until its last view has died, and the answer may go on for minutes. By then the request must have been
sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

import shmring
from shmring.engine.client import EngineClientProtocol, MediaMemory
from shmring.engine.protocol import InputSpec, Medium, checksum_of, tensor_of
from shmring.frontend.admission import Admitted
from shmring.frontend.decoded_memory import DecodedMemory
from shmring.frontend.errors import ApiError, unavailable
from shmring.frontend.media.decoder_pool import DecoderDiedError, DecoderStatistics
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fetch import Fetcher
from shmring.frontend.media.flights import Flights
from shmring.frontend.media.identity import key_of, preparation_of
from shmring.frontend.media.keeping import Keeping
from shmring.frontend.media.loader import DecodedMedium, MediaLoader, MediaSource, PreparedMedium
from shmring.frontend.openai.messages import check_counts
from shmring.frontend.settings import FrontendSettings

__all__ = ["IntakeStatistics", "MediaIntake", "shortfalls_of"]

_FETCH_THREADS = 2  # for base64 and local files: they hold the interpreter lock, or wait for a disk
# Requests whose files are brought from elsewhere at a time, up to their turn: as many as there may be connections. They hold
# what has arrived.
_MAX_FETCHING = 32
# Files that are so small together need no turn: a thousand requests with such files take no more than eight with large ones.
_SMALL_NBYTES = 256 << 10
# Pictures and recordings that are so small together are decoded in some ten milliseconds: two thirds of a megapixel.
_QUICK_DECODED_NBYTES = 2 << 20

# Hashing so much takes 0.15 ms, or 0.4 ms on a processor without instructions for it; to wake a thread for it, and then the
# loop, takes 0.07 ms more.
_HASHED_AT_ONCE_NBYTES = 256 << 10
_MAX_TOLD = 8  # media of which a header says what is missing: 2 KB, a quarter of what proxies take for all headers
# How often a request looks for its media before it decodes all of them itself.
_ATTEMPTS = 3

_Loaded = TypeVar("_Loaded")
_Source = TypeVar("_Source", "MediaSource", "_File")


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """The file of a medium.

    Attributes:
        key: what the medium is kept under.
        source: where it came from.
        data: its bytes.
    """

    key: bytes
    source: MediaSource
    data: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """What a frontend's media are doing.

    Attributes:
        decoders: how busy they are.
        decoded_nbytes: memory of requests whose media are decoded, or being decoded, and not in the slab yet.
        decoded_waiting: requests that wait for such memory.
        decoded: media that were decoded so far.
        passed_over: media that were decoded and not given to the engine to keep, since keeping was in vain lately.
    """

    decoders: DecoderStatistics
    decoded_nbytes: int
    decoded_waiting: int
    decoded: int
    passed_over: int


class MediaIntake:
    """Takes in the media of requests. Make it in a running loop, and close it.

    Args:
        engine: whose slab they go to.
        settings: limits.
    """

    def __init__(self, engine: EngineClientProtocol, settings: FrontendSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="fetch")
        self._fetcher = Fetcher(settings.fetch, self._pool)
        self._fetching = asyncio.Semaphore(_MAX_FETCHING)
        self._decoded_memory = DecodedMemory(settings.max_decoded_nbytes, settings.queue_timeout_s)
        self._loader = MediaLoader(settings.decoders, settings.media_limits, settings.media_io_kwargs, self._fetcher)
        self._flights: dict[str, Flights] = {}  # by engine: each keeps media of its own
        self._keeping: dict[str, Keeping] = {}
        self._unkept = 0  # media that had to have a key of their own, since nothing is kept
        self._decoded_media = self._passed_over = 0

    def statistics(self) -> IntakeStatistics:
        """Returns how busy the decoders are, and how much memory decoded media take."""
        memory = self._decoded_memory
        return IntakeStatistics(
            self._loader.statistics(), memory.nbytes, memory.waiting, self._decoded_media, self._passed_over
        )

    async def close(self) -> None:
        """Starts nothing more."""
        self._loader.close()
        await self._fetcher.close()
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
        media: list[Medium] = []
        if not sources:
            admitted.release_turn()
            yield media
            return
        check_counts(sources, self._settings.limit_mm_per_prompt, param)
        for source in sources:
            source.take_long(admitted.long_texts)
        files = await self._load(sources, spec, admitted, param)
        sources.clear()
        async with contextlib.AsyncExitStack() as stack:
            try:
                unique: dict[bytes, _File] = {}
                for file in files:
                    unique.setdefault(file.key, file)  # of two that are the same, errors name the first
                prepared = await self._obtain(unique, spec, stack)
                unique.clear()
                media += [prepared[file.key] for file in files]
                prepared.clear()
                files.clear()
                admitted.release_turn()
                yield media
            finally:
                media.clear()  # a slot that is left without views needs not wait for these frames to end

    async def _load(self, sources: Sequence[MediaSource], spec: InputSpec, admitted: Admitted, param: str) -> list[_File]:
        """Brings all files, and takes a turn to decode them."""
        sizes = _Sizes(self._settings.max_media_nbytes, param)

        async def fetch(source: MediaSource) -> bytes:
            sizes.check()  # before another one takes memory
            return sizes.count(await self._loader.fetch(source, spec))

        async def identify(source: MediaSource) -> _File:
            data = fetched.pop(id(source), None)
            data = await fetch(source) if data is None else data
            return _File(await self._key_of(source, data, spec), source, data)

        elsewhere = [source for source in sources if source.is_elsewhere]
        async with self._fetching if elsewhere else contextlib.nullcontext():
            inline_nbytes = sum(source.inline_nbytes for source in sources)
            fetched = {id(source): data for source, data in zip(elsewhere, await self._each(fetch, elsewhere), strict=True)}
            if inline_nbytes + sizes.nbytes > _SMALL_NBYTES:
                await admitted.take_turn()
        return await self._each(identify, sources)

    async def _key_of(self, source: MediaSource, data: bytes, spec: InputSpec) -> bytes:
        """Returns what a medium is kept under; something that nothing else has if nothing is kept."""
        if not self._keeps():
            self._unkept += 1
            return self._unkept.to_bytes(32, "little")
        limits, io_kwargs = self._settings.media_limits, self._settings.media_io_kwargs
        preparation = preparation_of(source.kind, spec, limits, io_kwargs)
        if len(data) <= _HASHED_AT_ONCE_NBYTES:
            return key_of(preparation, data)
        return await asyncio.get_running_loop().run_in_executor(self._pool, key_of, preparation, data)

    def _keeps(self) -> bool:
        return self._engine.kept_nbytes > 0 and not self._settings.disable_mm_shm

    # -- what is kept ------------------------------------------------------------------------------------------------

    async def _obtain(
        self, files: dict[bytes, _File], spec: InputSpec, stack: contextlib.AsyncExitStack
    ) -> dict[bytes, Medium]:
        """Returns all media, at one engine: the next one, if that one dies meanwhile."""
        while True:
            memory = self._engine.media_memory()
            try:
                return await self._obtain_at(memory, files, spec, stack)
            except shmring.EngineDeadError:
                if len(self._engine.engines) == 1 or not self._engine.is_running:
                    raise

    async def _obtain_at(
        self, memory: MediaMemory, files: dict[bytes, _File], spec: InputSpec, stack: contextlib.AsyncExitStack
    ) -> dict[bytes, Medium]:
        """Returns all media: those that are kept from where they lie, the others decoded.

        Nothing is held while something is waited for, neither slots nor what was found, or requests could wait for each other.
        So what was found may have gone when the rest is there. Then this begins again, and at last it decodes everything
        itself.

        Args:
            memory: where they are to lie.
            files: of the media, by key.
            spec: what the executor takes.
            stack: leaves what they lie in, at its end.
        """
        flights = self._flights.setdefault(memory.name, Flights())
        keeping = self._keeping_at(memory)
        media: dict[bytes, Medium] = {}
        for _ in range(_ATTEMPTS if self._keeps() else 0):
            async with contextlib.AsyncExitStack() as held:
                try:
                    landed = flights.landed
                    found_nbytes = await self._find(memory, files, media, held)
                    keeping.found(len(media))
                    if len(media) == len(files):
                        await stack.enter_async_context(held.pop_all())
                        return media
                    missing = {key: file for key, file in files.items() if key not in media}
                    media.clear()
                    await held.aclose()
                    others = flights.join(missing)
                    mine = {key: file for key, file in missing.items() if key not in others}
                    with flights.lead(mine):
                        if mine and flights.landed != landed:  # somebody else may have prepared it since
                            found_nbytes += await self._find(memory, mine, media, held)
                            mine = {key: file for key, file in mine.items() if key not in media}
                            media.clear()
                            await held.aclose()
                        if mine:
                            media |= await self._prepare(memory, mine, spec, held, found_nbytes)
                            # With others beside them, they may be looked for once more.
                            await self._keep(memory, media, keeping, flights, held, keeps_all=len(mine) < len(files))
                    if not others:
                        await self._find(memory, {key: file for key, file in files.items() if key not in media}, media, held)
                        if len(media) == len(files):
                            await stack.enter_async_context(held.pop_all())
                            return media
                except BaseException:
                    media.clear()
                    raise
                media.clear()
            await flights.wait(others)
        return await self._prepare(memory, files, spec, stack, [])

    def _keeping_at(self, memory: MediaMemory) -> Keeping:
        """Returns who decides what is worth keeping at an engine, in this life of it."""
        keeping = self._keeping.get(memory.name)
        if keeping is None or keeping.epoch != memory.epoch:
            keeping = self._keeping[memory.name] = Keeping(memory.kept_nbytes, memory.epoch)
        return keeping

    async def _find(
        self, memory: MediaMemory, files: Collection[bytes], media: dict[bytes, Medium], stack: contextlib.AsyncExitStack
    ) -> list[int]:
        """Adds the media that are kept, which the stack leaves at its end; returns the sizes of their slots."""
        sizes = []
        for key in files:
            try:
                kept = await memory.find(key)
            except shmring.WouldBlock:  # too much is pinned: as if it were not there
                continue
            if kept is None:
                continue
            stack.enter_context(kept)
            with contextlib.suppress(shmring.RemoteError):  # something else is kept under this key: as if it were not there
                media[key] = kept.payload
                sizes.append(kept.nbytes)
        return sizes

    async def _prepare(
        self,
        memory: MediaMemory,
        files: dict[bytes, _File],
        spec: InputSpec,
        stack: contextlib.AsyncExitStack,
        found_nbytes: Sequence[int],
    ) -> dict[bytes, Medium]:
        """Decodes media into slots, which the stack leaves at its end.

        Args:
            memory: where they are to lie.
            files: of the media, by key.
            spec: what the executor takes.
            stack: of the caller.
            found_nbytes: of the slots of the request's other media.
        """
        targets: list[torch.Tensor] = []
        media: list[Medium] = []

        async def measure(file: _File) -> PreparedMedium:
            return await self._loader.prepare(file.source, file.data, spec)

        try:
            prepared = await self._each(measure, list(files.values()))
            async with self._decoded(memory, prepared, found_nbytes) as decoded:
                targets += await self._acquire(memory, decoded, stack)
                media += await self._copy(decoded, targets)
            targets.clear()
            if spec.checksum:
                await self._add_checksums(media)
            return dict(zip(files, media, strict=True))
        finally:
            targets.clear()
            media.clear()

    async def _keep(
        self,
        memory: MediaMemory,
        media: Mapping[bytes, Medium],
        keeping: Keeping,
        flights: Flights,
        stack: contextlib.AsyncExitStack,
        *,
        keeps_all: bool,
    ) -> None:
        """Gives the slots of media to the engine to keep, if it can and that is worth it: they are sent from there either way.

        Args:
            memory: where they lie.
            media: that were prepared, by key.
            keeping: which of them are worth it.
            flights: they are kept as well if somebody waits for them.
            stack: leaves what is kept at its end.
            keeps_all: they are all worth it.
        """
        worth = {key for key, medium in media.items() if keeping.prepared(key, tensor_of(medium).nbytes)}
        left = list(media)
        while chosen := [key for key in left if keeps_all or key in worth or flights.is_wanted(key)]:
            left = [key for key in left if key not in chosen]
            for key in chosen:  # somebody may begin to wait for one of the others meanwhile
                with contextlib.suppress(shmring.WouldBlock, shmring.CapacityError):
                    stack.enter_context(await memory.keep(key, media[key]))
        self._passed_over += len(left)

    async def _each(self, load: Callable[[_Source], Awaitable[_Loaded]], sources: Sequence[_Source]) -> list[_Loaded]:
        """Loads all sources, a few at a time: only then is it known whether they are too large together."""
        results: list[_Loaded | Exception | None] = [None] * len(sources)
        places = iter(enumerate(sources))

        async def load_in_turn() -> None:
            for place, source in places:
                try:
                    results[place] = await load(source)
                except Exception as error:  # noqa: BLE001 - it is the result, and raised below
                    results[place] = error

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._settings.decoders, len(sources))):
                tasks.create_task(load_in_turn())
        _raise_first(results, [source.source if isinstance(source, _File) else source for source in sources])
        return [result for result in results if result is not None and not isinstance(result, Exception)]

    @contextlib.asynccontextmanager
    async def _decoded(
        self, memory: MediaMemory, prepared: Sequence[PreparedMedium], found_nbytes: Sequence[int]
    ) -> AsyncIterator[list[DecodedMedium]]:
        """Decodes media into memory files, which are there for as long as the block lasts."""
        if not self._settings.disable_mm_shm:
            sizes = [shmring.nbytes_for((medium.shape, medium.dtype)) for medium in prepared]
            memory.check_capacity(*found_nbytes, *sizes)
        nbytes = sum(medium.nbytes for medium in prepared)
        is_quick = nbytes <= _QUICK_DECODED_NBYTES and all(medium.kind != "video" for medium in prepared)
        async with self._decoded_memory.take(nbytes, is_quick=is_quick):
            with contextlib.ExitStack() as files:

                async def decode(medium: PreparedMedium) -> DecodedMedium:
                    return files.enter_context(contextlib.closing(await self._loader.decode(medium)))

                results = await asyncio.gather(*map(decode, prepared), return_exceptions=True)
                _raise_first(results, prepared)
                self._decoded_media += len(results)
                yield [result for result in results if not isinstance(result, BaseException)]

    async def _acquire(
        self, memory: MediaMemory, decoded: Sequence[DecodedMedium], stack: contextlib.AsyncExitStack
    ) -> list[torch.Tensor]:
        """Returns memory for each medium, in a slot of its own that the stack leaves at its end."""
        shapes = [(medium.shape, medium.dtype) for medium in decoded]
        if self._settings.disable_mm_shm:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        sizes = [shmring.nbytes_for(shape) for shape in shapes]
        try:
            slots = await memory.slots(sizes, timeout=self._settings.slot_timeout_s)
        except TimeoutError:
            message = f"no space for {sum(sizes)} bytes came free in the slab within {self._settings.slot_timeout_s:g} s"
            raise unavailable(message, "slab_full") from None
        for slot in slots:
            stack.enter_context(slot)
        return [slot.tensor(shape, dtype) for slot, (shape, dtype) in zip(slots, shapes, strict=True)]

    async def _copy(self, decoded: Sequence[DecodedMedium], targets: Sequence[torch.Tensor]) -> list[Medium]:
        results = await asyncio.gather(*map(self._loader.copy, decoded, targets), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            results.clear()
            raise errors.pop(0)  # no variable keeps it, as this frame is in its traceback
        return [result for result in results if not isinstance(result, BaseException)]

    async def _add_checksums(self, media: Sequence[Medium]) -> None:
        loop = asyncio.get_running_loop()
        summing = (loop.run_in_executor(self._pool, checksum_of, tensor_of(medium)) for medium in media)
        for medium, checksum in zip(media, await asyncio.gather(*summing), strict=True):
            medium.checksum = checksum


def shortfalls_of(media: Sequence[Medium]) -> str:
    """Returns what a request's caller is told of media that are not all there, by their order; nothing if all are."""
    texts = [f"{number} of {len(media)}: {medium.shortfall}" for number, medium in enumerate(media, 1) if medium.shortfall]
    more = [f"and of {len(texts) - _MAX_TOLD} more"] if len(texts) > _MAX_TOLD else []
    return " | ".join([*texts[:_MAX_TOLD], *more])


class _Sizes:
    """The size of all files of a request together, as far as they have arrived."""

    def __init__(self, max_nbytes: int, param: str) -> None:
        self.nbytes = 0
        self._max_nbytes = max_nbytes
        self._param = param

    def check(self) -> None:
        """Raises ApiError if they are too large."""
        if self.nbytes > self._max_nbytes:
            message = f"the request's media are larger together than the {self._max_nbytes} bytes that are accepted"
            raise ApiError(413, message, code="media_too_large", param=self._param)

    def count(self, data: bytes) -> bytes:
        """Returns a further file, unless they are too large with it."""
        self.nbytes += len(data)
        self.check()
        return data


def _raise_first(results: Sequence[object], media: Sequence[MediaSource | PreparedMedium]) -> None:
    """Raises the error of the first medium in order that failed, and not of the first in time, which is chance."""
    for result, medium in zip(results, media, strict=True):
        if isinstance(result, MediaError):
            param = medium.param if isinstance(medium, MediaSource) else medium.source_param
            raise ApiError(400, str(result), code=f"invalid_{medium.kind}", param=param)
        if isinstance(result, DecoderDiedError):
            raise unavailable(str(result), "decoder_lost")
        if isinstance(result, BaseException):
            raise result
