"""Loading and decoding on a bounded pool of threads, so that the event loop never decodes.

Two steps, with the acquiring of a slot between them: :meth:`MediaLoader.load` fetches a file and reads how much memory it needs
decoded, :meth:`MediaLoader.decode` decodes it into that memory.

A request that is cancelled leaves its slot while a thread may still write to it. That is safe, because the thread itself
holds the view that it writes through, and the slot drains: its memory is not used again before the last view has died. For
the same reason no exception leaves the thread that wrote: its traceback would hold the view for as long as anybody looks at it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import av.logging
import torch

from engine.protocol import InputSpec, Medium, Picture, Spectrogram, Video, Waveform
from frontend.media import audio, image, video
from frontend.media.errors import MediaError
from frontend.media.fetch import Fetcher, MediaKind, decode_base64
from frontend.media.options import MediaIoKwargs, MediaLimits

__all__ = ["MediaKind", "MediaLoader", "MediaSource", "PreparedMedium"]

_LOG = logging.getLogger(__name__)

_Header: TypeAlias = image.PictureHeader | audio.SoundHeader | video.ClipHeader


@dataclasses.dataclass(slots=True)
class MediaSource:
    """Where a medium of a request comes from; either of the two is set.

    Attributes:
        kind: what it is to be.
        param: where in the request it stands, for errors.
        url: of any scheme that the fetcher takes.
        base64: the file itself, as OpenAI's ``input_audio`` has it.
    """

    kind: MediaKind
    param: str
    url: str | None = dataclasses.field(default=None, repr=False)
    base64: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(slots=True)
class PreparedMedium:
    """A medium's file, and what memory decoding it needs.

    Attributes:
        source_param: where in the request it stands.
        kind: what it is.
        shape: of the memory that :meth:`MediaLoader.decode` is to be given; recordings and clips may turn out shorter.
        dtype: of that memory.
        data: the file; let go of once it is decoded.
        header: what the file's header says.
    """

    source_param: str
    kind: MediaKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes = dataclasses.field(repr=False)
    header: _Header

    @property
    def nbytes(self) -> int:
        """Bytes of that memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class MediaLoader:
    """A pool of threads for media.

    Args:
        threads: how many read headers or decode at a time; each decoder is told to start no threads of its own. A picture of
            12 megapixels takes 48 MB meanwhile, a clip of 4096 x 2160 up to 300 MB.
        limits: what media may be.
        io_kwargs: how they are prepared, where that is not the executor's choice.
        fetcher: who fetches URLs. It stays the caller's, who closes it.
    """

    def __init__(self, threads: int, limits: MediaLimits, io_kwargs: MediaIoKwargs, fetcher: Fetcher) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media")
        self._limits = limits
        self._io_kwargs = io_kwargs
        self._fetcher = fetcher
        # PyAV's default, unless somebody in this process has changed it: libav would write about damaged files to stderr, or
        # wait for the interpreter lock in a callback while it holds locks of its own.
        av.logging.set_level(None)
        # Pillow reports some damage as an error of the program; what is wrong with a caller's file, the caller is told.
        logging.getLogger("PIL").setLevel(logging.CRITICAL)

    async def load(self, source: MediaSource, spec: InputSpec) -> PreparedMedium:
        """Fetches a medium and reads its header.

        Args:
            source: where it is. Its URL or text is let go of when its file is there.
            spec: what the executor takes.

        Raises:
            MediaError: it can't be taken.
        """
        read_header = self._header_reader(source, spec)
        data = await self._fetch(source)
        source.url = source.base64 = None  # a data: URL holds the file once more
        header = await asyncio.get_running_loop().run_in_executor(self._pool, read_header, data)
        dtype = torch.float32 if source.kind == "audio" else torch.uint8
        return PreparedMedium(source.param, source.kind, header.shape, dtype, data, header)

    async def decode(self, prepared: PreparedMedium, target: torch.Tensor) -> Medium:
        """Decodes a medium into the caller's memory, and lets go of its file.

        If it is cancelled, the thread goes on for at most the next frame or block, and holds the target until then.

        Args:
            prepared: what :meth:`load` returned.
            target: of ``prepared.shape`` and ``prepared.dtype``; undefined after an error.

        Returns:
            The medium; its tensor is the target, or as much of its beginning as there was to decode.

        Raises:
            MediaError: it is damaged.
            ValueError: the target has another shape or dtype.
            RuntimeError: the decoder failed in a way that is not the medium's fault; the log says how.
        """
        if tuple(target.shape) != prepared.shape or target.dtype != prepared.dtype:
            wanted, given = f"{prepared.dtype} {prepared.shape}", f"{target.dtype} {tuple(target.shape)}"
            del target  # this frame is in the traceback
            raise ValueError(f"the target is {given}, the medium needs {wanted}")
        cancelled = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(
                self._pool, _decode, prepared.data, prepared.header, target, self._io_kwargs, cancelled.is_set
            )
        except asyncio.CancelledError:
            cancelled.set()
            del target
            raise
        prepared.data = b""
        if isinstance(result, _Failure):
            del target  # this frame is in the traceback
            raise result.error()
        return result

    def close(self) -> None:
        """Starts nothing more; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _header_reader(self, source: MediaSource, spec: InputSpec) -> Callable[[bytes], _Header]:
        """Refuses what the executor does not take, before anything is fetched."""
        limits, io_kwargs = self._limits, self._io_kwargs
        if source.kind == "image" and (picture := spec.picture) is not None:
            return lambda data: image.probe(data, limits.picture, picture.max_pixels)
        if source.kind == "audio" and (sound := spec.sound) is not None:
            return lambda data: audio.probe(data, sound, limits)
        if source.kind == "video" and (clip := spec.video) is not None:
            return lambda data: video.probe(data, clip, limits, io_kwargs)
        parts = {"text": spec.text, "image": spec.picture, "audio": spec.sound, "video": spec.video}
        taken = ", ".join(name for name, part in parts.items() if part) or "no media"
        raise MediaError(f"this server's model takes {taken}; it does not take {source.kind}")

    async def _fetch(self, source: MediaSource) -> bytes:
        max_nbytes = self._limits.max_nbytes(source.kind)
        if source.url is not None:
            return await self._fetcher.fetch(source.url, source.kind, max_nbytes)
        assert source.base64 is not None, "a source has a URL or base64"
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, decode_base64, source.base64, max_nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """Why a medium was not decoded, as text: see the head of this file."""

    text: str
    expected: bool

    def error(self) -> Exception:
        return MediaError(self.text) if self.expected else RuntimeError(self.text)


def _decode(
    data: bytes, header: _Header, target: torch.Tensor, io_kwargs: MediaIoKwargs, is_cancelled: Callable[[], bool]
) -> Medium | _Failure:
    try:
        return _decode_by_kind(data, header, target, io_kwargs, is_cancelled)
    except MediaError as error:
        return _Failure(str(error), expected=True)
    except Exception as error:  # noqa: BLE001 - reported where it can be: in the log, and by the error that decode() raises
        _LOG.error("decoding a medium failed unexpectedly:\n%s", traceback.format_exc())
        return _Failure(f"decoding failed unexpectedly ({type(error).__name__}); the log says more", expected=False)


def _decode_by_kind(
    data: bytes, header: _Header, target: torch.Tensor, io_kwargs: MediaIoKwargs, is_cancelled: Callable[[], bool]
) -> Medium:
    memory = target.numpy()
    if isinstance(header, image.PictureHeader):
        image.decode_into(data, header, memory, io_kwargs.rgba_background_color)
        return Picture(target)
    if isinstance(header, video.ClipHeader):
        clip = video.decode_into(data, header, memory, is_cancelled)
        return Video(target[: len(clip.timestamps_s)], clip.timestamps_s, clip.duration_s)
    sound = audio.decode_into(data, header, memory, is_cancelled)
    if header.mel_bands is not None:
        return Spectrogram(target[: sound.length], sound.duration_s)
    return Waveform(target[: sound.length], header.sample_rate)
