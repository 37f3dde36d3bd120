"""Opening the engine's end of a ring, for ``shmring.serve`` and its blocking twin."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from shmring.config import RingConfig
from shmring.core.geometry import Geometry
from shmring.gpu.cuda import Cuda, TorchCuda
from shmring.gpu.device import DeviceMemory, whole_nbytes
from shmring.gpu.driver import Driver
from shmring.memory.limits import check_open_files
from shmring.ring.claim import Claim
from shmring.ring.frontend import CallHandler
from shmring.ring.life import RingLife
from shmring.ring.reserve import reserve
from shmring.ring.shell import Shell
from shmring.transport.listener import Listener, socket_path

__all__ = ["create_shell"]

_OPEN_FILES = 8  # of a ring: its lock, directory and sockets, the slab, replies, the load page; each client takes two more

_Shell = TypeVar("_Shell", bound=Shell)


async def create_shell(
    shell_type: type[_Shell],
    name: str,
    config: RingConfig,
    *,
    payload_type: Any = Any,
    calls: Mapping[str, CallHandler] | None = None,
    cuda: Cuda | None = None,
    device_memory: DeviceMemory | None = None,
    offload_nbytes: int | None = None,
) -> _Shell:
    """Takes the name, sweeps what a crash left, reserves the slab and listens. See :func:`shmring.serve`.

    Args:
        shell_type: of what is created.
        cuda, device_memory: how to call CUDA.
        offload_nbytes: copies larger than this are made on a thread; None: those that would hold a loop up.
    """
    path = socket_path(name, config.socket_dir)
    check_open_files(_OPEN_FILES, f"ring {name!r}")
    geometry = Geometry.of(
        int(config.slab_nbytes),
        None if config.reply_nbytes is None else int(config.reply_nbytes),
        whole_nbytes(int(config.device_slab_nbytes)),
        page_nbytes=mmap.PAGESIZE,
    )
    life = RingLife(name, config, secrets.randbits(63), offload_nbytes)
    listener = Listener.create(path, others_may_connect=config.allowed_uids is not None)
    cuda = cuda or TorchCuda()
    try:
        reserved = await reserve(name, geometry, life.epoch, config, cuda, device_memory or Driver())
    except BaseException:
        listener.close()
        raise
    try:
        return shell_type(
            life,
            geometry=geometry,
            reserved=reserved,
            cuda=cuda,
            listener=listener,
            payload_type=payload_type,
            calls=calls or {},
            claim_type=Claim,
        )
    except BaseException:  # msgspec knows no such payload_type
        reserved.close()
        listener.close()
        raise
