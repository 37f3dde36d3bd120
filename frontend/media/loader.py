"""Loading and decoding on a bounded pool of threads, so that the event loop never decodes.

A request that is cancelled leaves its slot while a thread may still write to it. That is safe, because the thread itself
holds the view that it writes through, and the slot drains: its memory is not used again before the last view has died. For
the same reason no exception leaves the thread that wrote: its traceback would hold the view for as long as anybody looks at it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from frontend.media.errors import MediaError
from frontend.media.fetch import decode_data_url
from frontend.media.image import PictureHeader, PictureLimits, decode_into, probe

__all__ = ["LoadedPicture", "MediaLoader"]


@dataclasses.dataclass(slots=True)
class LoadedPicture:
    """A picture's file, and what its header says.

    Attributes:
        data: the file; let go of once it is decoded.
        header: its size.
    """

    data: bytes
    header: PictureHeader


class MediaLoader:
    """A pool of threads for media.

    Args:
        threads: how many decode at a time. A picture of 12 megapixels takes 48 MB in Pillow meanwhile.
        limits: what pictures may be.
    """

    def __init__(self, threads: int, limits: PictureLimits) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media")
        self._limits = limits

    async def load(self, url: str) -> LoadedPicture:
        """Fetches a picture and reads its header.

        Raises:
            MediaError: it can't be taken.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, _load, url, self._limits)

    async def decode(self, picture: LoadedPicture, target: NDArray[np.uint8]) -> None:
        """Decodes a picture into memory of shape (height, width, 3), and lets go of its file.

        Raises:
            MediaError: it is damaged.
        """
        loop = asyncio.get_running_loop()
        problem = await loop.run_in_executor(self._pool, _decode, picture.data, picture.header, target)
        if problem is not None:
            del target  # this frame is in the traceback
            raise MediaError(problem)
        picture.data = b""

    def close(self) -> None:
        """Starts nothing more; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _load(url: str, limits: PictureLimits) -> LoadedPicture:
    data = decode_data_url(url, limits.max_nbytes)
    return LoadedPicture(data, probe(data, limits))


def _decode(data: bytes, header: PictureHeader, target: NDArray[np.uint8]) -> str | None:
    """Returns what was wrong, as text: see the head of this file."""
    try:
        decode_into(data, header, target)
    except MediaError as error:
        return str(error)
    return None
