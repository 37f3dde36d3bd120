"""The memory that an engine reserves when it starts: the slab in host memory, pinned or not, perhaps a device slab, and a load
page.

It reserves all of it or nothing: if one part fails, the parts before it are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os

from shmring.config import RingConfig
from shmring.core.compiled import LoadPage
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.loggers import logger_of
from shmring.gpu.cuda import Cuda, CudaError, cuda_index
from shmring.gpu.device import DeviceMemory, DeviceSlab
from shmring.gpu.pinned import PinnedSlab, pin_slab
from shmring.memory.slab import Slab, sweep
from shmring.transport.load import create_load_page

__all__ = ["Reserved", "reserve"]

logger = logger_of("shmring.ring")


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """The memory that an engine reserves.

    Attributes:
        slab: in host memory.
        pinned: what of it is registered with CUDA.
        device_slabs: on a GPU: none or one.
        load_fd, load: the page in which it publishes its load.
    """

    slab: Slab
    pinned: PinnedSlab
    device_slabs: tuple[DeviceSlab, ...]
    load_fd: int
    load: LoadPage

    def close(self) -> None:
        """Gives all of it up, before it is used."""
        os.close(self.load_fd)
        self.pinned.close()
        self.slab.close()
        for device_slab in self.device_slabs:
            try:
                device_slab.close()
            except CudaError as error:
                logger.error("the device slab stays allocated until this process ends: %s", error)


async def reserve(
    name: str, geometry: Geometry, epoch: int, config: RingConfig, cuda: Cuda, device_memory: DeviceMemory
) -> Reserved:
    """Reserves and pins on a thread: that takes a second per 4 GiB, and the caller's loop may have other work.

    Args:
        name, epoch: of the engine and of its life.
        geometry: what to reserve.
        config: how.
        cuda, device_memory: how to call CUDA.

    Raises:
        SlabError: a part can't be had. The others were given back.
    """
    swept = sweep()
    if swept:
        logger.warning("removed the name of a slab in /dev/shm that no living engine holds: %s", ", ".join(swept))
    device_nbytes = geometry.device_blocks * BLOCK_NBYTES
    # Of this thread: the one that creates has none of its own.
    device_index = cuda_index(cuda, config.device_slab_device) if device_nbytes else cuda.current_device()

    def create() -> Reserved:
        with contextlib.ExitStack() as undo:
            slab = Slab.create(
                name,
                geometry.slab_nbytes,
                epoch,
                prefault=config.prefault,
                reply_nbytes=geometry.reply_nbytes,
                backing=config.backing,
            )
            undo.callback(slab.close)
            load_fd, load = create_load_page()
            undo.callback(os.close, load_fd)
            # Before anything is pinned: without CUDA both fail, and this error says more.
            device_slabs = (DeviceSlab.create(cuda, device_memory, device_index, device_nbytes),) if device_nbytes else ()
            for device_slab in device_slabs:
                undo.callback(device_slab.close)
            reserved = Reserved(slab, pin_slab(slab, config.pin, cuda, device_index), device_slabs, load_fd, load)
            undo.pop_all()
            return reserved

    def discard(done: asyncio.Future[Reserved]) -> None:
        if done.exception() is None:
            done.result().close()

    creating = asyncio.get_running_loop().run_in_executor(None, create)
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        creating.add_done_callback(discard)
        raise
