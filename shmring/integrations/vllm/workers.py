"""What takes the name of vLLM's ``MessageQueue`` in its executor: makes the ends of queues, or lets vLLM make its own.

vLLM's own are made for readers in other machines, from handles of its own, and where there is no memory for a ring. A process
that reads from an engine core is a worker, and what it writes to are answers.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shmring.core.loggers import logger_of
from shmring.errors import LocalProtocolError, ShmringError
from shmring.integrations.vllm.peers import Peers
from shmring.integrations.vllm.queues import Handle, Reader, Writer

if TYPE_CHECKING:
    from shmring.integrations.vllm.engine_ring import EngineRing
    from shmring.integrations.vllm.settings import Settings
    from shmring.threads import Ring

__all__ = ["Queues", "is_engine_core"]

logger = logger_of("vllm.shmring")

_NO_SLAB_NBYTES = 1 << 20  # of a ring that no frontend connects to
_ANSWERS_NBYTES = 16 << 20  # of answers that the engine core has not copied out yet; larger ones come in pieces


class Queues:
    """See the head of this file. vLLM calls it as it would the class whose name it has.

    Args:
        theirs: vLLM's class.
        settings: the plug-in's.
        engine_ring: of this process.
        worker_has_joined: called in a worker, once.
    """

    def __init__(
        self, theirs: Any, settings: Settings, engine_ring: EngineRing, worker_has_joined: Callable[[], None] = lambda: None
    ) -> None:
        self.theirs = theirs
        self._settings = settings
        self._engine_ring = engine_ring
        self._worker_has_joined = worker_has_joined
        self._worker_pid = 0  # of this process, if it is a worker: a forked one has what its engine core had
        self._peers = Peers()

    def __call__(
        self, n_reader: int, n_local_reader: int, local_reader_ranks: list[int] | None = None, *arguments: Any, **named: Any
    ) -> Any:
        """For vLLM: makes the writing end of a queue."""
        if n_reader == n_local_reader:
            ranks = list(range(n_reader)) if local_reader_ranks is None else local_reader_ranks
            try:
                return self._answers(ranks) if self._worker_pid == os.getpid() else self._steps(ranks)
            except (ShmringError, OSError, ValueError) as error:
                logger.warning(
                    "shmring stays off between process %d and its readers, and vLLM's own queue is used: %s", os.getpid(), error
                )
        else:
            logger.warning("shmring stays off between an engine core and its workers, which are in several machines")
        return self.theirs(n_reader, n_local_reader, local_reader_ranks, *arguments, **named)

    def create_from_handle(self, handle: Any, rank: int) -> Any:
        """For vLLM: makes a reading end."""
        if not isinstance(handle, Handle):
            return self.theirs.create_from_handle(handle, rank)
        if handle.is_of_steps:
            self._worker_pid = os.getpid()
            self._worker_has_joined()
            return Reader(handle, rank)
        return Reader(handle, rank, self._peers)

    def _steps(self, ranks: Sequence[int]) -> Writer:
        self._peers = Peers()
        close = self._engine_ring.leave
        if (ring := self._engines_own()) is None:
            ring = self._serve(self._settings.broadcast_nbytes)
            close = ring.close
        logger.info("shmring: %d workers are sent their steps through shared memory (%s)", len(ranks), ring.name)
        return Writer(ring, ranks, peers=self._peers, may_view=_is_to_compute, lies_in_slot=self._lies_in_slot, close=close)

    def _engines_own(self) -> Ring | None:
        """The ring that API servers connect to; None: it is none of this executor's, or another engine has its name (then the
        engine core says so, and tensors are copied for workers)."""
        if not self._engine_ring.is_expected or self._engine_ring.has_workers:
            return None
        pin: Literal["on", "off"] = "on" if self._settings.pin == "on" else "off"  # the GPUs are the workers'
        try:
            ring = self._engine_ring.open(pin, served_by="both")  # what API servers want, they want while this one sleeps, too
        except LocalProtocolError:
            return None
        self._engine_ring.has_workers = True
        return ring

    def _answers(self, ranks: Sequence[int]) -> Writer:
        return Writer(self._serve(_ANSWERS_NBYTES), ranks)

    def _serve(self, broadcast_nbytes: int) -> Ring:
        from shmring import threads

        name = f"vllm-{os.getpid()}-{secrets.token_hex(4)}"
        return threads.serve(
            name, slab_nbytes=_NO_SLAB_NBYTES, broadcast_nbytes=broadcast_nbytes, pin="off", served_by="callers"
        )

    def _lies_in_slot(self, tensor: Any) -> bool:
        receiver = self._engine_ring.receiver
        return receiver is not None and receiver.lies_in_slot(tensor)


def is_engine_core() -> bool:
    """Whether this process was started as an engine core. (Plug-ins are loaded after the object of that name was begun.)"""
    return multiprocessing.current_process().name.startswith("EngineCore")


def _is_to_compute(call: Any) -> bool:
    """Whether what vLLM calls in its workers reads its tensors and writes to none."""
    method, *_ = call
    return bool(method == "execute_model")
