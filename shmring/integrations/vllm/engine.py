"""The engine core's half: its ring, and tensors for vLLM's input thread, viewed in the slab.

Theory of operation: vLLM's input thread decodes one message after the other, and asks a *provider* for each tensor that
came another way. Frontends have submitted these before they sent the message, so a claim is there already, or arrives in a
moment. A tensor for one request is taken and its claim ended; its views keep the slot until the request has ended. A kept
tensor's claim stays open until its API server drops it, in the same stream of messages, or is gone.

An engine core may have no ring: there is no memory, or another engine has its name. Then it says so to who asks, is told no
references, and vLLM's messages carry the tensors. A name may come free, so that is waited for.

The provider must not raise, since vLLM's input thread would end with it. What is not there is noted; the wrapped
``preprocess_add_request`` raises then, and vLLM fails that one request.

Invariants: only ``_kept`` refers to a kept claim; no view is held here between two messages.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from shmring.core.loggers import logger_of
from shmring.errors import LocalProtocolError, ShmringError
from shmring.integrations.vllm.engine_ring import NOT_SET, EngineRing
from shmring.integrations.vllm.payloads import checksum
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from shmring.threads import Claim, Ring

__all__ = ["HandedOver", "LostTensorError", "Receiver"]

logger = logger_of("vllm.shmring")

_FREE_S = 1.0  # between two looks at a name that another engine has: a look costs microseconds
_WAITED_S = 0.001  # to find what is there takes microseconds

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
        engine_ring: of this process, where workers may have joined it; ``None``: one that nobody else uses.
        gpu: the one that this process runs the model on, for a device slab; or why there is none.
        own: vLLM's own provider, for tensors that did not go through shmring; None: it has none.
    """

    def __init__(
        self,
        settings: Settings,
        engine_index: int,
        *,
        copies: bool,
        pin: Literal["auto", "on", "off"],
        engine_ring: EngineRing | None = None,
        gpu: int | str = NOT_SET,
        own: Callable[[str, Sequence[int], dict[str, Any]], torch.Tensor] | None = None,
    ) -> None:
        self.copies = copies
        self._settings = settings
        self._own = own
        self._engine_ring = engine_ring or EngineRing(settings)
        self._kept: dict[_Key, Claim] = {}
        self._lent: dict[int, tuple[int, int]] = {}  # tensors that vLLM has: address and bytes of each, by a number of its own
        self._on_gpu: dict[int, tuple[range, Claim]] = {}  # the same of those in the device slab: addresses, and the claim
        self._lent_numbers = itertools.count()
        self._losses: list[str] = []  # of the message that is being decoded
        self._taken = self._hits = self._waits = self._lost = 0
        self._wait_s = 0.0
        self._index = engine_index
        self._opened: Ring | None = None
        self._why_not = ""  # it is not open
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the ring, for who opens and who closes
        if not self._engine_ring.is_expected:
            self._engine_ring.expect(engine_index)
        self._engine_ring.receiver = self
        try:
            self._open(pin, gpu)
        except LocalProtocolError as error:  # another engine has the name
            self._why_not = str(error)
            threading.Thread(target=self._open_when_free, args=(pin, gpu), daemon=True, name="shmring opening").start()
            self._say_that_there_is_none("; it opens one when the name is free")
        except (ShmringError, OSError, ValueError) as error:
            self._why_not = str(error)
            self._say_that_there_is_none("")

    def _open(self, pin: Literal["auto", "on", "off"], gpu: int | str) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._opened = self._engine_ring.open(pin, gpu=gpu)
        logger.info(
            "shmring: engine core %d has a slab of %d MiB (%s); its tensors are %s; %s",
            self._index,
            self._settings.slab_nbytes >> 20,
            self._opened.name,
            self._what_becomes_of_tensors(),
            self._what_becomes_of_those_on_gpus(),
        )

    def _open_when_free(self, pin: Literal["auto", "on", "off"], gpu: int | str) -> None:
        while not self._closing.wait(_FREE_S):
            try:
                self._open(pin, gpu)
            except LocalProtocolError as error:
                self._why_not = str(error)
                continue
            except (ShmringError, OSError, ValueError) as error:
                self._why_not = str(error)
                self._say_that_there_is_none("")
            return

    def _say_that_there_is_none(self, what_then: str) -> None:
        logger.warning(
            "shmring: engine core %d has no slab, and tensors go inline: %s%s", self._index, self._why_not, what_then
        )

    @property
    def _ring(self) -> Ring:
        """The ring.

        Raises:
            LostTensorError: it is not open.
        """
        if self._opened is None:
            raise LostTensorError(f"this engine core has no slab: {self._why_not}")
        return self._opened

    def where(self) -> tuple[str, int] | str:
        """Returns what API servers are told who ask: the ring's name and its epoch; or why there is none."""
        ring = self._opened
        return self._why_not if ring is None else (ring.name, ring.epoch)

    def _what_becomes_of_tensors(self) -> str:
        if not self.copies:
            return "read in place"
        if not self._engine_ring.has_workers:
            return "copied out, since vLLM keeps them in its cache"
        most_mib = self._settings.keep_nbytes >> 20
        return f"read in place while vLLM's cache has no more than {most_mib} MiB of them, else copied out"

    def _what_becomes_of_those_on_gpus(self) -> str:
        if reason := self._engine_ring.no_device_slab:
            return f"there is no device slab, since {reason}"
        return f"those on a GPU are read in a device slab of {self._settings.device_slab_nbytes >> 20} MiB"

    # -- in the input thread -------------------------------------------------------------------------------------------

    def __call__(self, dtype: str, shape: Sequence[int], reference: dict[str, Any]) -> torch.Tensor:
        """For vLLM's decoder: the tensor that a message refers to. Never raises, where vLLM's own provider does not."""
        if self._own is not None and "shmring" not in reference:
            return self._own(dtype, shape, reference)
        try:
            client_id, request_id, is_kept, epoch = reference["shmring"]
            if epoch != self._ring.epoch:
                raise LostTensorError("it is in the slab of another engine core")
            key = client_id, request_id
            tensor = self._tensor_of(key, is_kept=is_kept)
            self.drop(client_id, reference.get("drop", ()))
            _check(tensor, dtype, shape, reference.get("crc"))
        except Exception as error:  # noqa: BLE001 - the input thread would end, and the engine core with it
            self._lost += 1
            self._losses.append(f"{dtype} tensor of {list(shape)}: {type(error).__name__}: {error}")
            return torch.empty(0)
        return tensor

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
        if claim.on_gpu:
            return self._lend_on_gpu(tensor, claim)
        if self._is_copied_out():
            tensor = tensor.clone()
        elif self._engine_ring.has_workers:
            return self._lend(tensor, claim, is_kept=is_kept)
        elif is_kept:
            return tensor.detach()  # a new view for each request: vLLM's code may set attributes of what it is given
        if not is_kept:
            claim.done()
        return tensor

    def _is_copied_out(self) -> bool:
        """Whether vLLM gets a copy. Its cache would else keep the slab full."""
        if not self.copies:
            return False
        lent_nbytes = sum(nbytes for _, nbytes in list(self._lent.values()))
        return not self._engine_ring.has_workers or lent_nbytes >= self._settings.keep_nbytes

    def _lend(self, tensor: torch.Tensor, claim: Claim, *, is_kept: bool) -> torch.Tensor:
        """Returns a view whose claim stays open for as long as vLLM has it: what lies in other slots is copied for workers."""
        lent = tensor.detach()
        number = next(self._lent_numbers)
        self._lent[number] = lent.data_ptr(), lent.nbytes
        weakref.finalize(lent, self._given_back, number, None if is_kept else claim).atexit = False
        return lent

    def _given_back(self, number: int, claim: Claim | None) -> None:
        """vLLM has dropped a tensor, in any thread and at any moment."""
        del self._lent[number]
        if claim is not None:
            claim.done()

    def _lend_on_gpu(self, tensor: torch.Tensor, claim: Claim) -> torch.Tensor:
        """Returns a view in the device slab whose claim stays open for as long as vLLM has it: the claim is told of streams
        that use it."""
        lent = tensor.detach()
        number, start = next(self._lent_numbers), lent.data_ptr()
        self._on_gpu[number] = range(start, start + lent.nbytes), claim
        weakref.finalize(lent, self._given_back_on_gpu, number).atexit = False
        return lent

    def _given_back_on_gpu(self, number: int) -> None:
        """vLLM has dropped it, in any thread and at any moment. What it has made of it (a view) may live longer."""
        _, claim = self._on_gpu.pop(number)
        claim.done()

    def before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """In the thread that runs the model: work that reads these tensors is about to be queued on its current stream.

        Raises:
            CudaError: CUDA failed.
            ClosedError: the ring is closed.
        """
        if not self._on_gpu:
            return
        for tensor in tensors:
            address = tensor.data_ptr()
            for addresses, claim in list(self._on_gpu.values()):
                if address in addresses:
                    claim.use_on_gpu()

    def lies_in_slot(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are those of one that vLLM has from here."""
        address = tensor.data_ptr()
        return any(lent == address for lent, _ in list(self._lent.values()))

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
                except (ShmringError, TimeoutError, LostTensorError):
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
            "device_slab_nbytes": ring.device_slab_nbytes,
            "no_device_slab": self._engine_ring.no_device_slab,
            "slots_in_use": ring.slots_in_use,
            "free_bytes": ring.free_nbytes,
            "quarantined_bytes": ring.quarantined_nbytes,
            "kept_tensors": len(kept),
            "kept_bytes": sum(claim.nbytes for claim in kept),
            "waits": self._waits,
            "wait_seconds": self._wait_s,
            "lost": self._lost,
            "workers": sum(worker.is_member for worker in ring.workers),
            "workers_in_place_bytes": ring.broadcast_in_place_nbytes,
            "workers_copied_bytes": ring.broadcast_copied_nbytes,
            "taken": self._taken,
            "hits": self._hits,
        }

    def close(self) -> None:
        """Gives the slab up, and says in the log what came through it."""
        with self._lock:
            self._closing.set()
            opened, self._opened, self._why_not = self._opened, None, "it has ended"
        if opened is not None:
            self._engine_ring.leave()
        logger.info(
            "shmring: tensors received through shared memory: %d copied once, %d found in its cache, %d lost",
            self._taken,
            self._hits,
            self._lost,
        )


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
