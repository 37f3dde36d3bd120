"""What is prepared: from the files of a request to its media in the slab. Probe, decode, acquire, copy.

This is the second of three rooms (:mod:`shmring.frontend.intake`). Decoders say how much memory all media need. The request
takes that much of the memory for decoded media (:mod:`shmring.frontend.media.decoded_memory`), and each medium is decoded into
a memory file. Only then slots are acquired, for all of them at once, and they are copied there. So a slot is held for as long
as copying takes, and a clip that is decoded for a minute keeps no memory of the slab from others.

The event loop never decodes. Processes do that (:mod:`shmring.frontend.media.decoder_pool`), and a medium has one budget of
processor time there, for :meth:`Preparation.probe` and :meth:`Preparation.decode` together.

A request that is cancelled leaves its slot while a thread may still copy pixels to it. That is safe, because the thread itself
holds the view that it writes through, and the slot drains: its memory is not used again before the last view has died. For
the same reason no exception carries a view: its traceback would hold it for as long as anybody looks at it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import torch

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.client import MediaMemory
from shmring.engine.protocol import (
    Features,
    InputSpec,
    Medium,
    Picture,
    ProcessorSpec,
    Spectrogram,
    Video,
    Waveform,
    checksum_of,
)
from shmring.frontend.callers.key_usage import hold_slab
from shmring.frontend.errors import ErrorCode, unavailable
from shmring.frontend.media.decoded_memory import DecodedMemory
from shmring.frontend.media.decoder_pool import BudgetSpentError, DecoderDiedError, DecoderPool, Outcome, read_into
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.jobs import Decode, Decoded, Failed, Probe, Probed
from shmring.frontend.media.options import MediaKind
from shmring.frontend.media.sources import MediaFile, all_of
from shmring.frontend.settings import FrontendSettings
from shmring.service.distributions import Distribution
from shmring.service.tracing import traced

__all__ = ["DecodedMedium", "Preparation", "ProbedMedium"]

_LOG = logger_of(__name__)

_THREADS = 2  # for copies to decoders and into the slab, and for checksums: they wait for memory
_NOUNS = {"image": "picture", "audio": "recording", "video": "clip"}
# Pictures and recordings that are so small together are decoded in some ten milliseconds: two thirds of a megapixel.
_QUICK_DECODED_NBYTES = 2 << 20


@dataclasses.dataclass(slots=True)
class ProbedMedium:
    """A medium's file, and what memory decoding it needs.

    Attributes:
        file: as it came.
        shape: of what decoding it makes; recordings and clips may turn out shorter.
        dtype: of the same.
        header: what its decoder needs to know again.
        cpu_s: processor time that it has taken so far.
        probe_s: how long finding this out took.
        processor: of a picture: what is made of it there instead, and ``features_nbytes``: how large that is.
    """

    file: MediaFile
    shape: tuple[int, ...]
    dtype: torch.dtype
    header: bytes = dataclasses.field(repr=False)
    cpu_s: float
    probe_s: float = 0.0
    processor: ProcessorSpec | None = None
    features_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that decoding it writes at most."""
        return max(torch.Size(self.shape).numel() * self.dtype.itemsize, self.features_nbytes)


@dataclasses.dataclass(slots=True)
class DecodedMedium:
    """A decoded medium in a memory file. Its owner closes it.

    Attributes:
        kind: what it is.
        shape: of its pixels or samples.
        dtype: of the same.
        reply: what else its decoder found out.
        content: pixels or samples, in C order.
    """

    kind: MediaKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    reply: Decoded
    content: io.FileIO = dataclasses.field(repr=False)

    def close(self) -> None:
        """Gives the memory back. A second call does nothing."""
        self.content.close()


class Preparation:
    """Prepares media. Close it.

    As many as the settings have ``decoders`` are decoded at a time, each in a process and on one core. A picture of 12
    megapixels takes 90 MB meanwhile, a clip of 4096 x 2160 up to 300 MB and what its frames take.

    Args:
        settings: limits, and how media are prepared where that is not the executor's choice.

    Attributes:
        decoders: who decodes.
        decoded_memory: of requests whose media are decoded, or being decoded, and not in the slab yet.
        decoded: how many media were decoded so far.
        preparation_s: how long they took, the wait for a decoder included, by kind.
        slot_wait_s: how long requests waited for slots.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._limits = settings.media_limits
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="media")
        self.decoders = DecoderPool(settings.decoders, self._threads)
        self.decoded_memory = DecodedMemory(settings.max_decoded_nbytes, settings.queue_timeout_s)
        self.decoded = 0
        self.preparation_s: dict[tuple[str, ...], Distribution] = collections.defaultdict(Distribution)
        self.slot_wait_s = Distribution()

    async def prepare(
        self,
        files: Sequence[MediaFile],
        spec: InputSpec,
        memory: MediaMemory,
        stack: contextlib.ExitStack,
        other_nbytes: Sequence[int] = (),
    ) -> list[Medium]:
        """Prepares media, each in a slot of its own.

        Args:
            files: of the media.
            spec: what the executor takes.
            memory: where they are to lie.
            stack: leaves the slots at its end.
            other_nbytes: of the slots of the request's other media.

        Returns:
            The media in the order of their files, with checksums if the executor wants them.

        Raises:
            ApiError: what is wrong with a medium, or that there is no memory.
            shmring.CapacityError: all media together can never fit the slab; nothing was decoded.
        """
        probed = await all_of((self.probe(file, spec) for file in files), files)
        if not self._settings.disable_mm_shm:
            hold_slab(_fitting_nbytes(probed, memory, other_nbytes), stack)  # before they are decoded, or wait for slots
        nbytes = sum(medium.nbytes for medium in probed)
        is_quick = nbytes <= _QUICK_DECODED_NBYTES and all(file.kind != "video" for file in files)
        targets: list[torch.Tensor] = []
        async with self.decoded_memory.take(nbytes, is_quick=is_quick):
            with contextlib.ExitStack() as contents:

                async def decode(medium: ProbedMedium) -> DecodedMedium:
                    return contents.enter_context(contextlib.closing(await self.decode(medium)))

                decoded = await all_of(map(decode, probed), files)
                self.decoded += len(decoded)
                try:
                    targets += await self._acquire(memory, decoded, stack)
                    return await all_of(map(self.copy, decoded, targets, repeat(spec.checksum)), files)
                finally:
                    targets.clear()

    async def probe(self, file: MediaFile, spec: InputSpec) -> ProbedMedium:
        """Finds out how much memory a medium needs.

        Raises:
            MediaError: it can't be taken.
            ApiError: 503, its decoder died twice.
            RuntimeError: the decoder failed in a way that is not the medium's fault; the log says how.
        """
        job = Probe(file.kind, spec, self._limits, self._settings.media_io_kwargs)
        started_at = time.monotonic()
        outcome = await self._run(job, file.data, 0, self._limits.max_decode_s)
        probed = outcome.reply
        assert isinstance(probed, Probed), probed
        dtype = torch.float32 if file.kind == "audio" else torch.uint8
        processor = spec.picture.processor if probed.features_nbytes and spec.picture is not None else None
        probe_s = time.monotonic() - started_at
        return ProbedMedium(file, probed.shape, dtype, probed.header, outcome.cpu_s, probe_s, processor, probed.features_nbytes)

    async def decode(self, probed: ProbedMedium) -> DecodedMedium:
        """Decodes a medium into memory of its own, which the caller closes. If it is cancelled, decoding ends at once.

        Raises:
            MediaError: it is damaged, or takes too long.
            ApiError: 503, its decoder died twice.
            RuntimeError: the decoder failed in a way that is not the medium's fault; the log says how.
        """
        kind = probed.file.kind
        job = Decode(kind, probed.header, self._settings.media_io_kwargs, probed.processor)
        started_at = time.monotonic()
        with traced("media decode", {"shmring.media.kind": kind}):
            outcome = await self._run(job, probed.file.data, probed.nbytes, self._limits.max_decode_s - probed.cpu_s)
        self.preparation_s[kind,].add(time.monotonic() - started_at + probed.probe_s)
        reply = outcome.reply
        assert isinstance(reply, Decoded), reply
        assert outcome.result is not None
        shape = (reply.length,) if reply.layout else (reply.length, *probed.shape[1:])
        return DecodedMedium(kind, shape, probed.dtype, reply, outcome.result)

    async def copy(self, decoded: DecodedMedium, target: torch.Tensor, with_checksum: bool = False) -> Medium:
        """Copies a decoded medium into other memory.

        If it is cancelled, a thread that copies holds the target for some milliseconds more.

        Args:
            decoded: what :meth:`decode` returned. It stays open.
            target: contiguous, of ``decoded.shape`` and ``decoded.dtype``; undefined after an error.
            with_checksum: the medium has one.

        Returns:
            The medium; its tensor is the target.
        """
        checksum = None
        try:
            await read_into(target.numpy().reshape(-1).view(np.uint8).data, decoded.content, self._threads)
            if with_checksum:
                checksum = await asyncio.get_running_loop().run_in_executor(self._threads, checksum_of, target)
        except BaseException:
            del target  # this frame is in the traceback
            raise
        reply, shortfall = decoded.reply, decoded.reply.shortfall or None
        match decoded.kind:
            case "image" if reply.layout:
                return Features(target, reply.layout, checksum=checksum, shortfall=shortfall)
            case "image":
                return Picture(target, checksum=checksum, shortfall=shortfall)
            case "video":
                return Video(target, reply.timestamps_s, reply.duration_s, checksum=checksum, shortfall=shortfall)
            case "audio" if len(decoded.shape) == 2:
                return Spectrogram(target, reply.duration_s, checksum=checksum, shortfall=shortfall)
            case "audio":
                return Waveform(target, reply.sample_rate, checksum=checksum, shortfall=shortfall)

    def close(self) -> None:
        """Starts nothing more; what runs ends by itself."""
        self.decoders.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _acquire(
        self, memory: MediaMemory, decoded: Sequence[DecodedMedium], stack: contextlib.ExitStack
    ) -> list[torch.Tensor]:
        """Returns memory for each medium, in a slot of its own that the stack leaves at its end."""
        shapes = [(medium.shape, medium.dtype) for medium in decoded]
        if self._settings.disable_mm_shm:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        sizes = [shmring.nbytes_for(shape) for shape in shapes]
        started_at = time.monotonic()
        try:
            with traced("slot wait", {"shmring.slot_nbytes": sum(sizes), "shmring.engine": memory.name}):
                slots = await memory.slots(sizes, timeout=self._settings.slot_timeout_s)
        except TimeoutError:
            message = f"no space for {sum(sizes)} bytes came free in the slab within {self._settings.slot_timeout_s:g} s"
            raise unavailable(message, ErrorCode.SLAB_FULL) from None
        finally:
            self.slot_wait_s.add(time.monotonic() - started_at)
        for slot in slots:
            stack.enter_context(slot)
        return [slot.tensor(shape, dtype) for slot, (shape, dtype) in zip(slots, shapes, strict=True)]

    async def _run(self, job: Probe | Decode, data: bytes, result_nbytes: int, budget_s: float) -> Outcome:
        """Has a job done, and says what went wrong in words for the caller or the log."""
        noun = _NOUNS[job.kind]
        try:
            outcome = await self.decoders.run(job, data, result_nbytes, budget_s)
        except BudgetSpentError:
            raise MediaError(
                f"decoding the {noun} takes more than the {self._limits.max_decode_s:g} s of processor time that are accepted "
                "(max_decode_s); send a smaller one, or one that is encoded more simply"
            ) from None
        except DecoderDiedError as death:
            _LOG.warning("two decoders died while they had a %s: %s", noun, death)
            message = f"the {noun} could not be decoded now: its decoder died, and so did another one"
            raise unavailable(message, ErrorCode.DECODER_LOST) from None
        reply = outcome.reply
        if not isinstance(reply, Failed):
            return outcome
        if outcome.result is not None:
            outcome.result.close()
        if reply.expected:
            raise MediaError(reply.text)
        _LOG.error("decoding a medium failed unexpectedly:\n%s", reply.text)
        raise RuntimeError(f"decoding failed unexpectedly ({reply.text.splitlines()[-1][:64]}); the log says more")


def _fitting_nbytes(probed: Sequence[ProbedMedium], memory: MediaMemory, other_nbytes: Sequence[int]) -> int:
    """Returns how much of the slab media take; if they fit it together only as pixels, pictures are not processed here.

    Raises:
        shmring.CapacityError: they can never fit.
    """
    sizes = [shmring.nbytes_for(((medium.nbytes,), torch.uint8)) for medium in probed]
    try:
        memory.check_capacity(*other_nbytes, *sizes)
    except shmring.CapacityError:
        if not any(medium.processor for medium in probed):
            raise
        for medium in probed:
            medium.processor, medium.features_nbytes = None, 0
        return _fitting_nbytes(probed, memory, other_nbytes)
    return sum(sizes)
