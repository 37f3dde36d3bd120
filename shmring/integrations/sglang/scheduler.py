"""A scheduler's half: the ring of the rank that gets its messages, and the other ranks, which join it as workers.

SGLang's scheduler is a loop without asyncio: it looks for messages between two steps, and all the time when it has no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shmring import threads
from shmring.config import RingConfig
from shmring.core.loggers import logger_of
from shmring.errors import LocalProtocolError, ShmringError
from shmring.integrations.sglang.settings import Settings

if TYPE_CHECKING:
    import torch

__all__ = ["Named", "Owner", "Sharer"]

logger = logger_of("sglang.shmring")

_UNTAKEN_S = 600.0  # a tensor whose message has not been decoded by then: a scheduler that compiles can take minutes
_TAKE_S = 5.0  # a tensor is always there before its message
_SHARE_S = 1.0  # for ranks that are behind; then the message has the tensor
_JOIN_S = 1800.0  # ranks load a model as they start, each at its pace
_MAX_INFLIGHT = 4096  # of each tokenizer
_OTHER_NBYTES = 1 << 20  # there are no replies, and ranks are sent what lies in a slot, or takes some kilobytes

Named = tuple[int, int, int]  # the epoch of the ring, the ids of the client there and of its request


class Owner:
    """Of the rank that gets a scheduler's messages from tokenizers.

    Args:
        settings: the plug-in's.
        place: the scheduler's data-parallel rank.
        ranks: the other ranks that it sends messages on to.

    Raises:
        ShmringError, OSError: there can't be a ring.
    """

    def __init__(self, settings: Settings, place: int, ranks: int) -> None:
        self._place = place
        self._ranks = (*range(ranks),)
        self._taken = self._shared = self._lost = 0
        self._wait_s = 0.0
        self._reporting = ThreadPoolExecutor(1, "shmring")
        config = RingConfig(
            slab_nbytes=settings.slab_nbytes,
            reply_nbytes=_OTHER_NBYTES,
            broadcast_nbytes=_OTHER_NBYTES,
            max_lease_nbytes=settings.slab_nbytes,
            max_inflight=_MAX_INFLIGHT,
            pin="off",  # SGLang does not wait for what it copies to a GPU from pinned memory
        )
        self._ring = threads.serve(
            settings.ring_name(place),
            config,
            calls={"report": self._answer_report},
            untaken_s=_UNTAKEN_S,
            served_by="both",  # no message wakes or waits for a thread; tokenizers are served while the scheduler computes
        )
        logger.info(
            "shmring: scheduler %d has a slab of %d MiB (%s); its tensors are %s",
            place,
            settings.slab_nbytes >> 20,
            self._ring.name,
            "copied out" if settings.copies else "read in place",
        )

    def take(self, named: Named) -> tuple[threads.Claim | None, torch.Tensor]:
        """Takes what a message names.

        Returns:
            The claim, if it is to be shared with other ranks, and the tensor.

        Raises:
            ShmringError, TimeoutError: it is not there.
        """
        epoch, client_id, request_id = named
        if epoch != self._ring.epoch:
            self._lost += 1
            raise LocalProtocolError(f"it is in the slab of another scheduler than {self._place}, to which its request came")
        began_s = time.monotonic()
        try:
            claim = self._ring.take(client_id, request_id, timeout=_TAKE_S)
        except BaseException:
            self._lost += 1
            raise
        finally:
            self._wait_s += time.monotonic() - began_s
        self._taken += 1
        (tensor,) = claim.payload
        if self._ranks:
            return claim, tensor
        claim.done()  # the slot goes back when the last view of it has died
        return None, tensor

    def share(self, claim: threads.Claim, named: Named) -> bool:
        """Sends a claim's tensor to the other ranks, where it lies; returns whether they all get it."""
        if self._ring.ranks != self._ranks:
            return False  # one has not joined yet, or is gone
        try:
            claim.share(list(named), to=self._ranks, timeout=_SHARE_S)
        except (ShmringError, TimeoutError) as error:
            logger.warning("shmring: a tensor goes to the other ranks in SGLang's message: %s", error)
            return False
        self._shared += 1
        return True

    def report(self) -> dict[str, Any]:
        """Returns what :func:`~shmring.integrations.traffic.engine_gauges` shows, and what else was counted."""
        ring = self._ring.statistics()
        return {
            "slots_in_use": ring.slots_in_use,
            "free_bytes": ring.free_nbytes,
            "quarantined_bytes": ring.quarantined_nbytes,
            "wait_seconds": self._wait_s,
            "lost": self._lost,
            "taken": self._taken,
            "shared": self._shared,
            "tokenizers": ring.clients,
            "ranks": len(self._ring.ranks),
        }

    async def _answer_report(self) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._reporting, self.report)  # which waits for this loop

    def close(self) -> None:
        """Gives the slab up."""
        self._ring.close()


class Sharer:
    """Of another rank. It joins on a thread, as the rank that it joins may still load its part of the model.

    Args:
        settings: the plug-in's.
        place: the scheduler's data-parallel rank.
        rank: this one's, from 1 on.
    """

    def __init__(self, settings: Settings, place: int, rank: int) -> None:
        self._worker: threads.Worker | None = None
        self._error: Exception | None = None
        self._joining = threading.Thread(target=self._join, args=(settings.ring_name(place), rank), daemon=True, name="shmring")
        self._joining.start()

    def _join(self, name: str, rank: int) -> None:
        try:
            self._worker = threads.join(name, rank=rank - 1, label=f"rank {rank}", connect_timeout_s=_JOIN_S)
        except (ShmringError, OSError, ValueError) as error:
            self._error = error
            logger.warning("shmring: rank %d gets tensors in SGLang's messages: %s", rank, error)
        else:
            logger.info("shmring: rank %d reads tensors in the slab of rank 0 (%s)", rank, name)

    def receive(self, named: Named) -> torch.Tensor:
        """Returns what was shared under a name; the engine has shared it before it sent the message.

        Raises:
            ShmringError, TimeoutError: it was not shared with this rank.
        """
        self.wait_joined(_TAKE_S)
        if self._worker is None:
            raise LocalProtocolError(f"a tensor was shared with a rank that has not joined: {self._error}")
        while True:
            message = self._worker.receive(timeout=_TAKE_S)
            with message:  # views of it live on
                if message.beside == list(named):
                    tensor: torch.Tensor = message.payload[0]
                    return tensor

    def wait_joined(self, timeout: float | None = None) -> None:
        """Waits until it has joined, or has failed to, for so many seconds."""
        self._joining.join(timeout)

    def close(self) -> None:
        """Leaves the ring."""
        with contextlib.suppress(ShmringError):
            if self._worker is not None:
                self._worker.close()
