"""What came: where the parts of a request say that its media are, and their files.

This is the first of three rooms (:mod:`shmring.frontend.intake`). Files from other hosts are fetched first, which may take
long and keeps nobody else waiting. Then the request takes a turn, if its files are large. Only then, files that are part of the
request are decoded from base64.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from shmring.engine.inputs import InputSpec
from shmring.frontend.callers.admission import Admitted
from shmring.frontend.callers.places import Places
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fetch import Fetcher, decode_base64
from shmring.frontend.media.options import MediaKind
from shmring.frontend.settings import FrontendSettings, MediaCounts
from shmring.service.distributions import Distribution
from shmring.service.tracing import traced

__all__ = ["Arrivals", "MediaFile", "MediaSource", "all_of", "check_counts"]

# Requests whose files are brought from elsewhere at a time, up to their turn: as many as there may be connections. They hold
# what has arrived. One caller may have half of them: a slow host keeps a place for as long as it may take to fetch a medium.
_MAX_FETCHING = 32
# Files that are so small together need no turn: a thousand requests with such files take no more than eight with large ones.
_SMALL_NBYTES = 256 << 10

_Result = TypeVar("_Result")


@dataclasses.dataclass(slots=True)
class MediaSource:
    """Where a medium of a request comes from; one of the three is set.

    Attributes:
        kind: what it is to be.
        param: where in the request it stands, for errors.
        url: of any scheme that the fetcher takes; in bytes, if it is a long ``data:`` URL.
        base64: the file itself, as OpenAI's ``input_audio`` has it.
        file: the same, as it came in a form.
    """

    kind: MediaKind
    param: str
    url: str | bytes | bytearray | None = dataclasses.field(default=None, repr=False)
    base64: str | bytes | bytearray | None = dataclasses.field(default=None, repr=False)
    file: bytes | None = dataclasses.field(default=None, repr=False)

    def take_long(self, long_texts: dict[str, bytearray]) -> None:
        """Takes what was cut out of the request's body (:mod:`shmring.frontend.http.body_scan`), if the source was."""
        if isinstance(self.url, str) and self.url in long_texts:
            self.url = long_texts.pop(self.url)
        if isinstance(self.base64, str) and self.base64 in long_texts:
            self.base64 = long_texts.pop(self.base64)

    @property
    def is_elsewhere(self) -> bool:
        """Whether somebody else has the file, who may take his time: a host, or a disk."""
        return self.url is not None and self.url[:5].lower() not in ("data:", b"data:")

    @property
    def inline_nbytes(self) -> int:
        """About how large the file is, if it is part of the request."""
        return 0 if self.is_elsewhere else len(self.file or b"") or len(self.url or self.base64 or "") // 4 * 3


@dataclasses.dataclass(frozen=True, slots=True)
class MediaFile:
    """The file of a medium.

    Attributes:
        kind: what it is to be.
        param: where in the request it stands, for errors.
        data: its bytes.
    """

    kind: MediaKind
    param: str
    data: bytes = dataclasses.field(repr=False)


class Arrivals:
    """Brings the files of requests. Made in a running loop; close it.

    Args:
        settings: limits, and from where media may come.
        pool: threads to decode base64 and to read files on. They stay the caller's.

    Attributes:
        fetch_s: how long it took to fetch each medium that was elsewhere.
    """

    def __init__(self, settings: FrontendSettings, pool: Executor) -> None:
        self._settings = settings
        self._pool = pool
        self._fetcher = Fetcher(settings.fetch, pool)
        waiting = settings.max_queued_requests, settings.queue_timeout_s
        self._fetching = Places(_MAX_FETCHING, *waiting, most=_MAX_FETCHING // 2)
        self.fetch_s = Distribution()

    async def files(self, sources: Sequence[MediaSource], spec: InputSpec, admitted: Admitted, param: str) -> list[MediaFile]:
        """Brings all files of a request, in the order of their sources; it has its turn if they are large.

        Args:
            sources: where they are. Each is empty when its file is there: a ``data:`` URL holds the file once more.
            spec: what the executor takes; what it does not take is not fetched.
            admitted: the request.
            param: the parameter that errors about all media together name.

        Raises:
            ApiError: what the caller did wrong, or that the turn did not come.
        """
        check_counts(sources, self._settings.limit_mm_per_prompt, param)
        for source in sources:
            source.take_long(admitted.long_texts)
        elsewhere = [source for source in sources if source.is_elsewhere]
        inline = [source for source in sources if not source.is_elsewhere]
        inline_nbytes = sum(source.inline_nbytes for source in inline)
        arrived: dict[int, MediaFile] = {}
        max_nbytes, nbytes = self._settings.max_media_nbytes, 0
        # A few at a time: only when they are there, it is known whether they are too large together.
        gate = asyncio.Semaphore(self._settings.decoders)

        def check_size() -> None:
            if nbytes > max_nbytes:
                message = f"the request's media are larger together than the {max_nbytes} bytes that are accepted"
                raise ApiError(ErrorCode.MEDIA_TOO_LARGE, message, param=param)

        async def bring(source: MediaSource) -> None:
            nonlocal nbytes
            async with gate:
                check_size()  # before another one takes memory
                data = await self.fetch(source, spec)
                nbytes += len(data)
                check_size()
            arrived[id(source)] = MediaFile(source.kind, source.param, data)

        async with self._place(admitted.caller) if elsewhere else contextlib.nullcontext():
            await all_of(map(bring, elsewhere), elsewhere)
            if inline_nbytes + nbytes > _SMALL_NBYTES:
                await admitted.take_turn()
        await all_of(map(bring, inline), inline)
        return [arrived[id(source)] for source in sources]

    @contextlib.asynccontextmanager
    async def _place(self, who: str) -> AsyncIterator[None]:
        await self._fetching.take(who)
        try:
            yield
        finally:
            self._fetching.give_back(who)

    async def fetch(self, source: MediaSource, spec: InputSpec) -> bytes:
        """Returns a medium's file, and lets go of its URL or text.

        Raises:
            MediaError: it can't be taken.
        """
        kinds = {"text": spec.text, "image": spec.picture, "audio": spec.sound, "video": spec.video}
        if not kinds[source.kind]:
            taken = ", ".join(name for name, part in kinds.items() if part) or "no media"
            raise MediaError(f"this server's model takes {taken}; it does not take {source.kind}")
        max_nbytes = self._settings.media_limits.max_nbytes(source.kind)
        if source.url is not None:
            started_at = time.monotonic() if source.is_elsewhere else None
            try:
                with traced("media fetch") if source.is_elsewhere else contextlib.nullcontext():
                    data = await self._fetcher.fetch(source.url, source.kind, max_nbytes)
            finally:
                if started_at is not None:
                    self.fetch_s.add(time.monotonic() - started_at)
        elif source.file is not None:
            data = source.file  # how large it may be is checked where it is probed
        else:
            assert source.base64 is not None, "a source has a URL, base64 or a file"
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._pool, decode_base64, source.base64, max_nbytes)
        source.url = source.base64 = source.file = None
        return data

    async def close(self) -> None:
        """Closes all connections; fetches that are under way fail."""
        await self._fetcher.close()


def check_counts(sources: Iterable[MediaSource], accepted: MediaCounts, param: str) -> None:
    """Checks how many media a request has.

    Raises:
        ApiError: more than are accepted of one kind.
    """
    for kind, count in Counter(source.kind for source in sources).items():
        if count > accepted.of(kind):
            message = f"the request has {count} media of kind {kind}, at most {accepted.of(kind)} are accepted"
            raise ApiError(ErrorCode.TOO_MANY_MEDIA, message, param=param)


async def all_of(results: Iterable[Awaitable[_Result]], media: Sequence[MediaSource | MediaFile]) -> list[_Result]:
    """Waits for all results of a request's media.

    If some fail, the error of the first medium in order is raised, and not of the first in time, which is chance. No variable
    keeps it: the frames in its traceback would keep each other alive, and whatever views of slots they have.

    Args:
        results: one for each medium.
        media: whose kinds and places errors name.

    Raises:
        ApiError: for a :class:`MediaError`.
    """
    outcomes = await asyncio.gather(*results, return_exceptions=True)
    # No variable has the pairs: zip keeps the last one, and so the error or the view in it.
    errors = [(error, medium) for error, medium in zip(outcomes, media, strict=True) if isinstance(error, BaseException)]
    if errors:
        outcomes.clear()
        del errors[1:]
        raise _for_the_caller(*errors.pop())
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _for_the_caller(error: BaseException, medium: MediaSource | MediaFile) -> BaseException:
    if isinstance(error, MediaError):
        return ApiError(ErrorCode[f"INVALID_{medium.kind.upper()}"], str(error), param=medium.param)
    return error
