"""The engine core's half: a ring in a thread of its own, and tensors for vLLM's input thread, viewed in the slab.

Theory of operation: vLLM's input thread decodes one message after the other, and asks a *provider* for each tensor that
came another way. Frontends have submitted these before they sent the message, so a claim is there already, or arrives in a
moment. A tensor for one request is taken and its claim ended; its views keep the slot until the request has ended. A kept
tensor's claim stays open until its API server drops it, in the same stream of messages, or is gone.

The provider must not raise, since vLLM's input thread would end with it. What is not there is noted; the wrapped
``preprocess_add_request`` raises then, and vLLM fails that one request.

Invariants: ``_kept`` has a claim and nobody else refers to it; nothing here holds a view between two messages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from shmring.config import RingConfig
from shmring.errors import ShmringError
from shmring.integrations.vllm.payloads import checksum
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from shmring.threads import Claim, Ring

__all__ = ["HandedOver", "LostTensorError", "Receiver"]

logger = logging.getLogger("vllm.shmring")

_UNTAKEN_S = 60.0  # a tensor whose message has not come by then: its API server failed to send it, and to say so
_WAITED_S = 0.001  # to find what is there takes microseconds
_MAX_INFLIGHT = 4096  # what each API server may have here at once, kept tensors included (at most 1,024)

_Key = tuple[int, int]  # ids of the client and of its request


class LostTensorError(RuntimeError):
    """A request names tensors that are not in the slab (any more): that request fails, and no other."""


class Receiver:
    """What vLLM's decoder calls an out-of-band tensor provider. Called by the input thread; see the head of this file.

    Args:
        settings: the plug-in's.
        engine_index: vLLM's number of this engine core.
        copies: whether tensors are copied out of the slab, since vLLM's own cache would keep them.
        pin: as ``RingConfig.pin``.

    Raises:
        ShmringError, OSError: there can't be a ring.
    """

    def __init__(self, settings: Settings, engine_index: int, *, copies: bool, pin: Literal["auto", "on", "off"]) -> None:
        from shmring import threads

        self.copies = copies
        self._settings = settings
        self._kept: dict[_Key, Claim] = {}
        self._losses: list[str] = []  # of the message that is being decoded
        self._taken = self._hits = self._waits = self._lost = 0
        self._wait_s = 0.0
        config = RingConfig(slab_nbytes=settings.slab_nbytes, max_inflight=_MAX_INFLIGHT, pin=pin)
        self._ring: Ring = threads.serve(
            settings.ring_name(engine_index), config, calls={"report": self._report_in_loop}, untaken_s=_UNTAKEN_S
        )
        logger.info(
            "shmring: engine core %d has a slab of %d MiB (%s); its tensors are %s",
            engine_index,
            settings.slab_nbytes >> 20,
            self._ring.name,
            "copied out, since vLLM keeps them in its cache" if copies else "read in place",
        )

    # -- in the input thread -------------------------------------------------------------------------------------------

    def __call__(self, dtype: str, shape: Sequence[int], reference: dict[str, Any]) -> torch.Tensor:
        """For vLLM's decoder: the tensor that a message refers to. Never raises."""
        try:
            client_id, request_id, is_kept = reference["shmring"]
            key = client_id, request_id
            tensor = self._tensor_of(key, is_kept=is_kept)
            self.drop(client_id, reference.get("drop", ()))
            _check(tensor, dtype, shape, reference.get("crc"))
        except Exception as error:  # noqa: BLE001 - the input thread would end, and the engine core with it
            self._lost += 1
            self._losses.append(f"{dtype} tensor of {list(shape)}: {type(error).__name__}: {error}")
            return torch.empty(0)
        return tensor.clone() if self.copies else tensor

    def _tensor_of(self, key: _Key, *, is_kept: bool) -> torch.Tensor:
        claim = self._kept.get(key)
        if claim is None:
            claim = self._take(key)
            if is_kept:
                self._kept[key] = claim
                claim.on_abort(functools.partial(self._let_go, key))
        else:
            self._hits += 1
        (tensor,) = claim.payload
        assert isinstance(tensor, torch.Tensor)
        if not is_kept:
            claim.done()
        # Of a kept claim a new view for each request: vLLM's code may set attributes of what it is given.
        return tensor.detach() if is_kept else tensor

    def _take(self, key: _Key) -> Claim:
        began_s = time.monotonic()
        try:
            claim = self._ring.take(*key, timeout=self._settings.take_timeout_s)
        finally:
            waited_s = time.monotonic() - began_s
            if waited_s > _WAITED_S:
                self._waits += 1
                self._wait_s += waited_s
        self._taken += 1
        return claim

    def take_losses(self) -> LostTensorError | None:
        """Called for each request that was decoded: returns what is to be said if tensors of it are not there."""
        if not self._losses:
            return None
        losses, self._losses = self._losses, []
        return LostTensorError("shmring: a request's tensors are not in the slab: " + "; ".join(losses))

    # -- in any thread ---------------------------------------------------------------------------------------------------

    def drop(self, client_id: int, request_ids: Sequence[int]) -> None:
        """Ends kept claims; requests that have views of them keep the slots."""
        for request_id in request_ids:
            key = client_id, request_id
            claim = self._kept.pop(key, None)
            if claim is None:  # no request that names it was decoded, as happens where one was not sent
                try:
                    claim = self._ring.take(*key, timeout=0)
                except (ShmringError, TimeoutError):
                    continue  # it has ended with its API server
            claim.done()

    def _let_go(self, key: _Key) -> None:
        """Its API server has gone, or gave the request up."""
        claim = self._kept.pop(key, None)
        if claim is not None:
            claim.release()

    def report(self) -> dict[str, Any]:
        """Returns what :func:`~shmring.integrations.traffic.engine_gauges` shows, and ``copies``."""
        ring = self._ring.statistics()
        kept = list(self._kept.values())
        return {
            "copies": self.copies,
            "slots_in_use": ring.slots_in_use,
            "free_bytes": ring.free_nbytes,
            "quarantined_bytes": ring.quarantined_nbytes,
            "kept_tensors": len(kept),
            "kept_bytes": sum(claim.nbytes for claim in kept),
            "waits": self._waits,
            "wait_seconds": self._wait_s,
            "lost": self._lost,
            "taken": self._taken,
            "hits": self._hits,
        }

    async def _report_in_loop(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.report)  # which asks this loop

    def close(self) -> None:
        """Gives the slab up, and says in the log what came through it."""
        logger.info(
            "shmring: tensors received through shared memory: %d copied once, %d kept ones again, %d lost",
            self._taken,
            self._hits,
            self._lost,
        )
        self._ring.close()


def _check(tensor: torch.Tensor, dtype: str, shape: Sequence[int], crc: int | None) -> None:
    """Raises LostTensorError unless a tensor is the one that a message describes."""
    if str(tensor.dtype) != f"torch.{dtype}" or list(tensor.shape) != list(shape):
        raise LostTensorError(f"what is there is {tensor.dtype} of {list(tensor.shape)}")
    if crc is not None and checksum(tensor) != crc:
        raise LostTensorError("its checksum is wrong")


class HandedOver:
    """A request on its way from vLLM's input thread to its main one, which unpacks it once.

    The input thread's loop holds what it handed over in a local variable until its next message, and with it views of the
    slab: when the last API server is killed there is no next message, and its memory would never come back. What it holds
    is this, which is empty after it was unpacked.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        parts, self._parts = self._parts, ()
        return iter(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        return self._parts[index]
