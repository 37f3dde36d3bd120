"""One life of an engine, for all its parts: its name and configuration, its loop, and whether it may be used now, in this
process."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque

from shmring.config import RingConfig
from shmring.core.compiled import BaseClaim, Origin, largest_record_nbytes
from shmring.errors import AbortedError, ClosedError, LocalProtocolError
from shmring.ring import limits
from shmring.snapshot import MAX_ERRORS
from shmring.transport.loops import check_loop, poller_of

__all__ = ["RingLife"]

_MAX_ERROR_CHARACTERS = 500  # of an error in a snapshot; the log has the rest


class RingLife:
    """See above. It begins in the loop that it is made in.

    Attributes:
        name: the engine's name.
        config: as configured.
        epoch: identity of this life.
        loop: the event loop it lives in.
        poller: of that loop.
        record_nbytes: of a message, at most.
        offload_nbytes: copies larger than this are made on a thread.
        is_over: whether the ring is closed.
        protocol_errors: how often a frontend or a worker broke the rules.
        errors: the last ones of any kind, with their times, for ``ring.inspect()``.
        context: the context variables of who serves it; what is called for a frontend sees a copy of them.
    """

    def __init__(self, name: str, config: RingConfig, epoch: int, offload_nbytes: int | None = None) -> None:
        self.name = name
        self.config = config
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        self.poller = poller_of(self.loop)
        self.record_nbytes = largest_record_nbytes(int(config.message_ring_nbytes))
        self.offload_nbytes = limits.COPY_OFFLOAD_NBYTES if offload_nbytes is None else offload_nbytes
        self.is_over = False
        self.protocol_errors = 0
        self.errors: deque[tuple[float, str]] = deque(maxlen=MAX_ERRORS)
        self.context = contextvars.copy_context()
        self._origin = Origin()

    def note_error(self, text: str) -> None:
        """Notes what went wrong."""
        self.errors.append((time.monotonic(), text[:_MAX_ERROR_CHARACTERS]))

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, which must not touch its parent's sockets."""
        return self._origin.forked

    def check_open(self) -> None:
        """Raises :class:`ClosedError` unless the ring may be used in this process."""
        if self.is_over or self._origin.forked:
            raise self.closed_error()

    def check_loop(self) -> None:
        """Raises :class:`LocalProtocolError` in another loop than the ring's; :class:`ClosedError` in a forked child."""
        self.check_process()
        if asyncio.get_running_loop() is not self.loop:
            check_loop(self.loop, f"this ring {self.name!r}")

    def check_process(self) -> None:
        """Raises :class:`ClosedError` in a forked child."""
        if self._origin.forked:
            raise self.closed_error()

    def ended_error(self, claim: BaseClaim) -> AbortedError | LocalProtocolError:
        """Returns why a request that has ended can't be answered."""
        if claim.aborted:
            by = "the end of its ring" if self.is_over else "its frontend"
            return AbortedError(f"request {claim.request_id} was aborted by {by}", request_id=claim.request_id)
        return LocalProtocolError(f"request {claim.request_id} has ended; answer before leaving its claim")

    def closed_error(self) -> ClosedError:
        """Returns why the ring can't be used."""
        if not self._origin.forked:
            return ClosedError(f"ring {self.name!r} is closed")
        return self._origin.stray(f"ring {self.name!r}", "serve your own")
