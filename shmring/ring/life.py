"""One life of an engine, for all its parts: its name and configuration, its loop, and whether it may be used now, in this
process."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque

from shmring.config import RingConfig
from shmring.core.compiled import BaseClaim, Home, largest_record_nbytes
from shmring.errors import AbortedError, LocalProtocolError
from shmring.ring import limits
from shmring.snapshot import MAX_ERRORS
from shmring.transport.loops import poller_of

__all__ = ["RingLife"]

_MAX_ERROR_CHARACTERS = 500  # of an error in a snapshot; the log has the rest


class RingLife:
    """See above. It begins in the loop that it is made in.

    Attributes:
        home: where the ring may be used.
        loop: of its home.
        name: the engine's name.
        config: as configured.
        epoch: identity of this life.
        poller: of that loop.
        record_nbytes: of a message, at most.
        offload_nbytes: copies larger than this are made on a thread.
        protocol_errors: how often a frontend or a worker broke the rules.
        errors: the last ones of any kind, with their times, for ``ring.inspect()``.
        context: the context variables of who serves it; what is called for a frontend sees a copy of them.
    """

    def __init__(self, name: str, config: RingConfig, epoch: int, offload_nbytes: int | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.home = Home(f"ring {name!r}", "serve your own", self.loop)
        self.name = name
        self.config = config
        self.epoch = epoch
        self.poller = poller_of(self.loop)
        self.record_nbytes = largest_record_nbytes(int(config.message_ring_nbytes))
        self.offload_nbytes = limits.COPY_OFFLOAD_NBYTES if offload_nbytes is None else offload_nbytes
        self.protocol_errors = 0
        self.errors: deque[tuple[float, str]] = deque(maxlen=MAX_ERRORS)
        self.context = contextvars.copy_context()

    def note_error(self, text: str) -> None:
        """Notes what went wrong."""
        self.errors.append((time.monotonic(), text[:_MAX_ERROR_CHARACTERS]))

    def ended_error(self, claim: BaseClaim) -> AbortedError | LocalProtocolError:
        """Returns why a request that has ended can't be answered."""
        if claim.aborted:
            by = "the end of its ring" if self.home.is_closed else "its frontend"
            return AbortedError(f"request {claim.request_id} was aborted by {by}", request_id=claim.request_id)
        return LocalProtocolError(f"request {claim.request_id} has ended; answer before leaving its claim")
