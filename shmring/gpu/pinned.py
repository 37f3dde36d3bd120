"""The slab, registered with CUDA, so that a copy from a slot to a GPU is one DMA, without waiting.

Pageable memory is copied twice: by the driver into memory of its own, while the caller waits, and from there by the GPU.
Registering the slab once (``cudaHostRegister``) makes every slot pinned memory for as long as the engine lives.

Registration is all or nothing: half a pinned slab would be fast for some requests and slow for others, without a visible
reason. What replies are in is mapped by itself, so it is registered by itself. Where one call can't take the rest, that is
registered in chunks. A copy must not cross a boundary (:meth:`PinnedSlab.split`), because to CUDA they are different
allocations.

Invariants:

- memory that CUDA has registered is never unmapped: what is registered keeps the mapping alive, in this module, until it
  is unregistered, so a ring that is not closed costs memory until the process ends, but never causes a DMA to other memory;
- a failed call leaves no error pending: the next kernel on that thread would report it as its own;
- :meth:`PinnedSlab.close` may come twice, and from every way out.

Source: that a single call of 512 GiB or more fails, takes about 0.1 s a GB, and leaves its error pending is vLLM PR 51081,
whose chunks of 64 GiB these are.
"""

from __future__ import annotations

import logging
import time
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shmring.core.loggers import logger_of
from shmring.gpu.cuda import Cuda, CudaError
from shmring.memory.slab import Slab

__all__ = ["PIN_MODES", "PinMode", "PinnedSlab", "pin_slab"]

logger = logger_of("shmring.ring")

#: ``auto``: pin where CUDA works, else say so once and go on; ``on``: pin, or fail; ``off``: leave CUDA alone.
PinMode = Literal["auto", "on", "off"]
PIN_MODES: tuple[PinMode, ...] = get_args(PinMode)

#: Registered in one call where the whole slab can't be. The driver's limit was 512 GiB; an eighth of it leaves room for
#: drivers that keep more per page, and a slab of a terabyte is still only sixteen calls.
CHUNK_NBYTES = 64 << 30

_registered: set[PinnedSlab] = set()


class PinnedSlab:
    """What of a slab is registered with CUDA: all of it, or nothing.

    Attributes:
        device_index: the GPU in whose context it was registered; it is pinned for all of them.
        nbytes: registered, in bytes; 0 if the slab is not pinned.
        seconds: what registering took.
    """

    def __init__(self, cuda: Cuda, device_index: int, address: int) -> None:
        self.device_index = device_index
        self.nbytes = 0
        self.seconds = 0.0
        self._cuda = cuda
        self._address = address
        self._mapping: NDArray[np.uint8] | None = None
        self._chunks: list[tuple[int, int]] = []  # (offset, bytes), by offset

    @classmethod
    def register(cls, slab: Slab, cuda: Cuda, device_index: int, *, chunk_nbytes: int = CHUNK_NBYTES) -> PinnedSlab:
        """Registers a slab, whole or in chunks. Blocks for about 0.1 s a GB: call it on a thread.

        Args:
            slab: prefaulted, or registering has to fault every page in.
            cuda: how to call CUDA.
            device_index: in whose context; the GPU that copies will go to, so that no other one gets a context.
            chunk_nbytes: how much at a time, a multiple of the page size, where one call can't take it all.

        Raises:
            CudaError: CUDA refused, in one call and in chunks. Nothing stays registered, and no error pending.
        """
        pinned = cls(cuda, device_index, slab.address)
        pinned._mapping = slab.bytes_at(0, slab.nbytes)
        _registered.add(pinned)
        started = time.monotonic()
        try:
            pinned._register(slab, chunk_nbytes)
        except BaseException:
            pinned.close()
            raise
        pinned.seconds = time.monotonic() - started
        return pinned

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Address and bytes of what each call has registered, by address; none once it is closed."""
        return [(self._address + offset, nbytes) for offset, nbytes in self._chunks]

    def close(self) -> None:
        """Unregisters, last chunk first; twice is once. Blocks: call it on a thread, when no copy is under way.

        A chunk that CUDA does not give back is logged, and stays mapped until the process ends.
        """
        self._unregister()
        if not self.nbytes:
            self._mapping = None
            _registered.discard(self)

    def _register(self, slab: Slab, chunk_nbytes: int) -> None:
        try:
            self._register_in_chunks(slab.parts, slab.nbytes)
        except CudaError as error:
            if slab.nbytes <= chunk_nbytes:
                raise
            logger.info("pinning %d bytes at once failed, going on with %d at a time: %s", slab.nbytes, chunk_nbytes, error)
            self._register_in_chunks(slab.parts, chunk_nbytes)

    def _register_in_chunks(self, parts: list[tuple[int, int]], chunk_nbytes: int) -> None:
        chunks = [
            (offset, min(chunk_nbytes, start + length - offset))
            for start, length in parts
            for offset in range(start, start + length, chunk_nbytes)
        ]
        for offset, nbytes in chunks:
            try:
                self._cuda.host_register(self.device_index, self._address + offset, nbytes)
            except CudaError:
                self._clear_error()
                self._unregister()
                raise
            self._chunks.append((offset, nbytes))
            self.nbytes += nbytes

    def _unregister(self) -> None:
        while self._chunks:
            offset, nbytes = self._chunks.pop()
            try:
                self._cuda.host_unregister(self.device_index, self._address + offset)
            except CudaError as error:
                self._clear_error()
                logger.error("%d bytes of the slab stay pinned and mapped until this process ends: %s", nbytes, error)
            else:
                self.nbytes -= nbytes

    def _clear_error(self) -> None:
        try:
            self._cuda.clear_error(self.device_index)
        except CudaError as error:
            logger.error("the GPU is in trouble beyond that call: %s", error)


def pin_slab(slab: Slab, mode: PinMode, cuda: Cuda, device_index: int) -> PinnedSlab:
    """Pins a slab as configured. Blocks, as :meth:`PinnedSlab.register` does.

    Args:
        slab: of an engine.
        mode: see :data:`PinMode`. That ``auto`` finds no GPU is said, and worth no warning: nothing can be copied to one then,
            slowly or not. PyPI's torch is built for CUDA, so that it is says nothing about the machine.
        cuda: how to call CUDA.
        device_index: in whose context.

    Raises:
        CudaError: ``mode`` is ``on``, and the slab can't be pinned.
    """
    if mode == "off":
        return PinnedSlab(cuda, device_index, slab.address)
    reason = cuda.unavailable()
    try:
        if reason is not None:
            raise CudaError(reason, call="cudaHostRegister", nbytes=slab.nbytes)
        pinned = PinnedSlab.register(slab, cuda, device_index)
    except CudaError as error:
        if mode == "on":
            message = f"the slab can't be pinned: {error}; pin='auto' would go on without"
            raise CudaError(message, call=error.call, code=error.code, nbytes=slab.nbytes) from None
        level = logging.WARNING if reason is None else logging.INFO
        logger.log(level, "the slab is not pinned, copies to a GPU will be slower: %s; set pin='off' if that is meant", error)
        return PinnedSlab(cuda, device_index, slab.address)
    logger.info(
        "pinned %d bytes of the slab in %.2f s, in %d calls, on GPU %d",
        pinned.nbytes,
        pinned.seconds,
        len(pinned.chunks),
        device_index,
    )
    return pinned
