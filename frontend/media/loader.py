"""Loading and decoding, so that the event loop never decodes: fetch a file, prepare it, decode it, copy the result.

There are four steps, because a request waits for something between them: :meth:`MediaLoader.fetch` brings a file,
:meth:`MediaLoader.prepare` reads from it how much memory it needs decoded, :meth:`MediaLoader.decode` decodes it into a memory
file of that size, and :meth:`MediaLoader.copy` copies that to where the caller wants it. Preparing and decoding run in
processes (:mod:`shmring.frontend.media.decoder_pool`), together within one budget of processor time.

A request that is cancelled leaves its slot while a thread may still copy pixels to it. That is safe, because the thread itself
holds the view that it writes through, and the slot drains: its memory is not used again before the last view has died. For
the same reason no exception carries a view: its traceback would hold it for as long as anybody looks at it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shmring.engine.protocol import InputSpec, Medium, Picture, Spectrogram, Video, Waveform
from shmring.frontend.media.decoder_pool import (
    BudgetSpentError,
    DecoderDiedError,
    DecoderPool,
    DecoderStatistics,
    Outcome,
    read_into,
)
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fetch import Fetcher, decode_base64
from shmring.frontend.media.jobs import Decode, Decoded, Failed, Probe, Probed
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits

__all__ = ["DecodedMedium", "MediaLoader", "MediaSource", "PreparedMedium"]

_LOG = logging.getLogger(__name__)

_THREADS = 2  # for base64 and for copies into the slab: they hold the interpreter lock, or wait for memory
_NOUNS = {"image": "picture", "audio": "recording", "video": "clip"}


@dataclasses.dataclass(slots=True)
class MediaSource:
    """Where a medium of a request comes from; either of the two is set.

    Attributes:
        kind: what it is to be.
        param: where in the request it stands, for errors.
        url: of any scheme that the fetcher takes; in bytes, if it is a long ``data:`` URL.
        base64: the file itself, as OpenAI's ``input_audio`` has it.
    """

    kind: MediaKind
    param: str
    url: str | bytes | bytearray | None = dataclasses.field(default=None, repr=False)
    base64: str | bytes | bytearray | None = dataclasses.field(default=None, repr=False)

    def take_long(self, long_texts: dict[str, bytearray]) -> None:
        """Takes what was cut out of the request's body (:mod:`shmring.frontend.body_scan`), if the source was."""
        if isinstance(self.url, str) and self.url in long_texts:
            self.url = long_texts.pop(self.url)
        if isinstance(self.base64, str) and self.base64 in long_texts:
            self.base64 = long_texts.pop(self.base64)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the file comes from a host or a disk, which may be slow."""
        return self.url is not None and self.url[:5].lower() not in ("data:", b"data:")

    @property
    def inline_nbytes(self) -> int:
        """About how large the file is, if it is part of the request."""
        return 0 if self.is_elsewhere else len(self.url or self.base64 or "") // 4 * 3


@dataclasses.dataclass(slots=True)
class PreparedMedium:
    """A medium's file, and what memory decoding it needs.

    Attributes:
        source_param: where in the request it stands.
        kind: what it is.
        shape: of what decoding it makes; recordings and clips may turn out shorter.
        dtype: of the same.
        data: the file; let go of once it is decoded.
        header: what its decoder needs to know again.
        cpu_s: processor time that it has taken so far.
    """

    source_param: str
    kind: MediaKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes = dataclasses.field(repr=False)
    header: bytes = dataclasses.field(repr=False)
    cpu_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory that decoding it writes at most."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(slots=True)
class DecodedMedium:
    """A decoded medium in a memory file. Its owner closes it.

    Attributes:
        kind: what it is.
        shape: of its pixels or samples.
        dtype: of the same.
        reply: what else its decoder found out.
        file: pixels or samples, in C order; after them, unused room for promised ones that are missing.
    """

    kind: MediaKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    reply: Decoded
    file: io.FileIO = dataclasses.field(repr=False)

    def close(self) -> None:
        """Gives the memory back. A second call does nothing."""
        self.file.close()


class MediaLoader:
    """Fetches and decodes media.

    Args:
        decoders: how many are decoded at a time, each in a process and on one core. A picture of 12 megapixels takes 90 MB
            meanwhile, a clip of 4096 x 2160 up to 300 MB and what its frames take.
        limits: what media may be.
        io_kwargs: how they are prepared, where that is not the executor's choice.
        fetcher: who fetches URLs. It stays the caller's, who closes it.
    """

    def __init__(self, decoders: int, limits: MediaLimits, io_kwargs: MediaIoKwargs, fetcher: Fetcher) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="media")
        self._decoders = DecoderPool(decoders, self._threads)
        self._limits = limits
        self._io_kwargs = io_kwargs
        self._fetcher = fetcher

    async def fetch(self, source: MediaSource, spec: InputSpec) -> bytes:
        """Returns a medium's file.

        Args:
            source: where it is. Its URL or text is let go of when its file is there.
            spec: what the executor takes; what it does not take is not fetched.

        Raises:
            MediaError: it can't be taken.
        """
        _check_taken(source.kind, spec)
        max_nbytes = self._limits.max_nbytes(source.kind)
        if source.url is not None:
            data = await self._fetcher.fetch(source.url, source.kind, max_nbytes)
        else:
            assert source.base64 is not None, "a source has a URL or base64"
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._threads, decode_base64, source.base64, max_nbytes)
        source.url = source.base64 = None  # a data: URL holds the file once more
        return data

    async def prepare(self, source: MediaSource, data: bytes, spec: InputSpec) -> PreparedMedium:
        """Finds out how much memory a medium needs.

        Args:
            source: where it came from.
            data: its file.
            spec: what the executor takes.

        Raises:
            MediaError: it can't be taken.
            DecoderDiedError: its decoder died twice.
            RuntimeError: the decoder failed in a way that is not the medium's fault; the log says how.
        """
        job = Probe(source.kind, spec, self._limits, self._io_kwargs)
        outcome = await self._run(job, data, 0, self._limits.max_decode_s)
        probed = outcome.reply
        assert isinstance(probed, Probed), probed
        dtype = torch.float32 if source.kind == "audio" else torch.uint8
        return PreparedMedium(source.param, source.kind, probed.shape, dtype, data, probed.header, outcome.cpu_s)

    async def decode(self, prepared: PreparedMedium) -> DecodedMedium:
        """Decodes a medium into memory of its own, and lets go of its file. If it is cancelled, decoding ends at once.

        Args:
            prepared: what :meth:`prepare` returned.

        Returns:
            The medium; the caller closes it.

        Raises:
            MediaError: it is damaged, or takes too long.
            DecoderDiedError: its decoder died twice.
            RuntimeError: the decoder failed in a way that is not the medium's fault; the log says how.
        """
        job = Decode(prepared.kind, prepared.header, self._io_kwargs)
        outcome = await self._run(job, prepared.data, prepared.nbytes, self._limits.max_decode_s - prepared.cpu_s)
        prepared.data = b""
        reply = outcome.reply
        assert isinstance(reply, Decoded), reply
        assert outcome.result is not None
        return DecodedMedium(prepared.kind, (reply.length, *prepared.shape[1:]), prepared.dtype, reply, outcome.result)

    async def copy(self, decoded: DecodedMedium, target: torch.Tensor) -> Medium:
        """Copies a decoded medium into the caller's memory.

        If it is cancelled, a thread that copies holds the target for some milliseconds more.

        Args:
            decoded: what :meth:`decode` returned. It stays open.
            target: contiguous, of ``decoded.shape`` and ``decoded.dtype``; undefined after an error.

        Returns:
            The medium; its tensor is the target.

        Raises:
            ValueError: the target has another shape or dtype.
        """
        if tuple(target.shape) != decoded.shape or target.dtype != decoded.dtype:
            expected, actual = f"{decoded.dtype} {decoded.shape}", f"{target.dtype} {tuple(target.shape)}"
            del target  # this frame is in the traceback
            raise ValueError(f"the target is {actual}, the medium needs {expected}")
        try:
            await read_into(target.numpy().reshape(-1).view(np.uint8).data, decoded.file, self._threads)
        except BaseException:
            del target
            raise
        reply, shortfall = decoded.reply, decoded.reply.shortfall or None
        match decoded.kind:
            case "image":
                return Picture(target, shortfall=shortfall)
            case "video":
                return Video(target, reply.timestamps_s, reply.duration_s, shortfall=shortfall)
            case "audio" if len(decoded.shape) == 2:
                return Spectrogram(target, reply.duration_s, shortfall=shortfall)
            case "audio":
                return Waveform(target, reply.sample_rate, shortfall=shortfall)

    def statistics(self) -> DecoderStatistics:
        """Returns how busy the decoders are."""
        return self._decoders.statistics()

    def close(self) -> None:
        """Starts nothing more; what runs ends by itself."""
        self._decoders.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, job: Probe | Decode, data: bytes, result_nbytes: int, budget_s: float) -> Outcome:
        """Has a job done, and says what went wrong in words for the caller or the log."""
        noun = _NOUNS[job.kind]
        try:
            outcome = await self._decoders.run(job, data, result_nbytes, budget_s)
        except BudgetSpentError:
            raise MediaError(
                f"decoding the {noun} takes more than the {self._limits.max_decode_s:g} s of processor time that are accepted "
                "(max_decode_s); send a smaller one, or one that is encoded more simply"
            ) from None
        except DecoderDiedError as death:
            _LOG.warning("two decoders died while they had a %s: %s", noun, death)
            message = f"the {noun} could not be decoded now: its decoder died, and so did another one"
            raise DecoderDiedError(message) from None
        reply = outcome.reply
        if not isinstance(reply, Failed):
            return outcome
        if outcome.result is not None:
            outcome.result.close()
        if reply.expected:
            raise MediaError(reply.text)
        _LOG.error("decoding a medium failed unexpectedly:\n%s", reply.text)
        raise RuntimeError(f"decoding failed unexpectedly ({reply.text.splitlines()[-1][:64]}); the log says more")


def _check_taken(kind: MediaKind, spec: InputSpec) -> None:
    parts = {"text": spec.text, "image": spec.picture, "audio": spec.sound, "video": spec.video}
    if not parts[kind]:
        kinds = ", ".join(name for name, part in parts.items() if part) or "no media"
        raise MediaError(f"this server's model takes {kinds}; it does not take {kind}")
