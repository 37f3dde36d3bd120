"""What is used again: media that an engine keeps, and media that another request prepares just now.

This is the third of three rooms (:mod:`shmring.frontend.intake`). What was prepared is given to the engine to keep, under a
key: a hash of its file, and of everything that decides what becomes of it. Whoever sends the same file again, through any
frontend, finds it there: it is neither decoded nor copied. Limits are part of the key: whatever is found has passed them.

Two requests with the same new file have it decoded once. The first one *leads*: it prepares the file. The others *join*: they
wait until that is over, however it ended, and then look for it. So what somebody has joined for is kept in any case. If
preparing it failed, or its request was cancelled, nothing is there, and one of the others leads. While keeping everything is in
vain, because callers send more in turn than can be kept, most other new media are not kept
(:mod:`shmring.frontend.media.keeping`).

Invariant: a key has one leader at a time, and its flight ends with the leader's block.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from importlib.metadata import version
from types import TracebackType

import msgspec

import shmring
from shmring.engine.client import MediaMemory
from shmring.engine.protocol import InputSpec, Medium, tensor_of
from shmring.frontend.media.keeping import Keeping
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits
from shmring.frontend.media.packages import DECODERS
from shmring.frontend.media.sources import MediaFile
from shmring.frontend.settings import FrontendSettings

__all__ = ["Held", "Reuse", "keys_of"]

#: Raise it when a decoder makes something else of the same file.
_PREPARATION = 5

# Hashing so much takes 0.15 ms, or 0.4 ms on a processor without instructions for it; to wake a thread for it, and then the
# loop, takes 0.07 ms more.
_HASHED_AT_ONCE_NBYTES = 256 << 10


# -- keys ---------------------------------------------------------------------------------------------------------------


async def keys_of(files: Sequence[MediaFile], spec: InputSpec, settings: FrontendSettings, pool: Executor) -> list[bytes]:
    """Returns what media are kept under.

    Args:
        files: of the media.
        spec: what the executor takes.
        settings: limits, and how media are prepared where that is not the executor's choice.
        pool: threads on which the files are hashed if they are large together.
    """
    media = [(_preparation_of(file.kind, spec, settings.media_limits, settings.media_io_kwargs), file.data) for file in files]
    if sum(len(file.data) for file in files) <= _HASHED_AT_ONCE_NBYTES:
        return list(itertools.starmap(_hash_of, media))
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(pool, _hash_of, preparation, data) for preparation, data in media))


@functools.lru_cache(maxsize=16)
def _preparation_of(kind: MediaKind, spec: InputSpec, limits: MediaLimits, io_kwargs: MediaIoKwargs) -> bytes:
    """Returns what is said of how media of a kind are prepared."""
    versions = [shmring.__version__, *map(version, (*DECODERS, "numpy"))]
    return msgspec.json.encode([_PREPARATION, versions, kind, spec, limits, io_kwargs])


def _hash_of(preparation: bytes, data: bytes) -> bytes:
    """Returns the key of a file that is prepared in some way. It releases the interpreter lock for large ones."""
    digest = hashlib.sha256(len(preparation).to_bytes(8, "little"))
    digest.update(preparation)
    digest.update(data)
    return digest.digest()


# -- an engine ----------------------------------------------------------------------------------------------------------


class Held(contextlib.ExitStack):
    """The slots and the kept content that a request uses, which it leaves at the block's end or with :meth:`close`.

    Attributes:
        media: that lie there, by key. They go first: a slot that is left without views is free at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.media: dict[bytes, Medium] = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        """Leaves everything; more can be held afterwards."""
        self.media.clear()
        return bool(super().__exit__(kind, error, traceback))


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """The media that one request prepares: when that is over, and which of them others wait for."""

    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    wanted: set[bytes] = dataclasses.field(default_factory=set)


class Reuse:
    """What can be used again at an engine, in one life of it.

    Args:
        memory: of the engine.

    Attributes:
        memory: as given.
        epoch: which life of the engine.
        keeping: decides what is worth keeping.
        waiting: requests that wait for others to prepare something.
    """

    def __init__(self, memory: MediaMemory) -> None:
        self.memory = memory
        self.epoch = memory.epoch
        self.keeping = Keeping(memory.kept_nbytes)
        self.waiting = 0
        self._flights: dict[bytes, _Flight] = {}  # by key

    async def find(self, keys: Collection[bytes], held: Held) -> list[int]:
        """Adds the media that are kept to what is held; returns the sizes of their slots."""
        sizes = []
        for key in keys:
            try:
                kept = await self.memory.find(key)
            except shmring.WouldBlock:  # too much is pinned: as if it were not there
                continue
            if kept is None:
                continue
            held.enter_context(kept)
            with contextlib.suppress(shmring.RemoteError):  # something else is kept under this key: as if it were not there
                held.media[key] = kept.payload
                sizes.append(kept.nbytes)
        return sizes

    @contextlib.contextmanager
    def lead(self, keys: Collection[bytes]) -> Iterator[None]:
        """Leads for as long as the block lasts. Nobody else may lead for one of these keys."""
        assert not any(key in self._flights for key in keys), "somebody else prepares this medium"
        flight = _Flight()
        self._flights.update(dict.fromkeys(keys, flight))
        try:
            yield
        finally:
            for key in keys:
                del self._flights[key]
            flight.ended.set()

    def join(self, keys: Collection[bytes]) -> list[bytes]:
        """Returns those of the keys for which somebody leads now, who learns that his medium is wanted."""
        joined = [key for key in keys if key in self._flights]
        for key in joined:
            self._flights[key].wanted.add(key)
        return joined

    async def wait(self, keys: Collection[bytes]) -> None:
        """Waits until those who lead for these keys now are done."""
        flights = {self._flights[key] for key in keys if key in self._flights}
        self.waiting += 1
        try:
            for flight in flights:
                await flight.ended.wait()
        finally:
            self.waiting -= 1

    async def keep(self, held: Held, *, keeps_all: bool) -> int:
        """Gives the engine the slots of media to keep, if it can and that is worth it: they are sent from there either way.

        Args:
            held: media that were prepared; this request leads for them.
            keeps_all: they are all worth it.

        Returns:
            How many were not worth it.
        """
        worth = {key for key, medium in held.media.items() if self.keeping.prepared(key, tensor_of(medium).nbytes)}
        left = list(held.media)
        # Somebody may begin to wait for one of the others while these are being kept.
        while chosen := [key for key in left if keeps_all or key in worth or key in self._flights[key].wanted]:
            left = [key for key in left if key not in chosen]
            for key in chosen:
                with contextlib.suppress(shmring.WouldBlock, shmring.CapacityError):
                    held.enter_context(await self.memory.keep(key, held.media[key]))
        return len(left)
