"""The settings of a store: frozen, and without torch, so that a command line is checked before torch is imported."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from shmring.config import RingConfig
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.door import parse_nbytes, validate_name
from shmring.engine.settings import LogFormat, LogLevel
from shmring.service.flags import NO_OPTION, Flag

__all__ = ["StoreSettings"]

#: Which part of a slab is for content that is being written: so writers find room although all content is in use.
_WRITTEN_PART = 8

# Registering its slab with CUDA would help no other process.
_RING = RingConfig(reply_nbytes="64KiB", pin="off")

_RING_FLAGS = {
    "slab_nbytes": Flag(names=("--slab", "--slab-nbytes"), text="The memory that the store reserves, all of it at its start."),
    "backing": Flag(names=("--slab-backing",)),
    "kept_nbytes": Flag(text="How much of it may hold content. None: seven eighths."),
    "client_quota_nbytes": Flag(
        text="How much memory one client may have at a time to write content to. None: three quarters."
    ),
    "client_pinned_nbytes": Flag(text="How much content one client may use at a time. None: all of it."),
    "max_clients": Flag(),
    "socket_dir": Flag(text="Where the store's socket lies. None: the user's runtime directory."),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """One store.

    Attributes:
        name: its name, which clients connect to.
        ring: the slab, and what clients may do.
        host: Where /metrics and /health listen.
        port: The port for them. None: they are not served.
        idle_timeout_s: Seconds without any client after which the store ends; 0: it never does.
        shutdown_timeout_s: Seconds that clients may go on with content that they use, after SIGTERM, SIGINT or SIGHUP. A second
            signal ends the store at once.
        log_level: What is logged, to stderr.
        log_format: How: text for people, or json, an object in a line.
    """

    name: Annotated[str, NO_OPTION] = "store"
    ring: Annotated[RingConfig, _RING_FLAGS] = _RING
    host: str = "127.0.0.1"
    port: Annotated[int | None, Flag(least=0, most=65535)] = None
    idle_timeout_s: Annotated[float, Flag(least=0)] = 0.0
    shutdown_timeout_s: Annotated[float, Flag(least=0)] = 20.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def checked(self) -> StoreSettings:
        """Returns these settings with all sizes settled.

        Raises:
            ValueError: the name can't be one, or the slab is too small.
        """
        validate_name(self.name)
        blocks = Geometry.of(parse_nbytes(self.ring.slab_nbytes), parse_nbytes(self.ring.reply_nbytes or 0)).leasable_blocks
        kept_nbytes = self.ring.kept_nbytes
        if kept_nbytes is None:
            kept_nbytes = (blocks - blocks // _WRITTEN_PART) * BLOCK_NBYTES
        return dataclasses.replace(self, ring=dataclasses.replace(self.ring, kept_nbytes=kept_nbytes))
