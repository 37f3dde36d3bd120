"""What of one request goes through the slab: placed there before vLLM encodes the request, referred to in its message.

The life of :class:`RequestTensors`: ``place_now`` finds what is kept and copies what is small; ``place`` waits for the rest;
then vLLM's encoder runs, without an ``await``, and asks ``reference_to`` for each tensor; ``settle`` or ``abandon`` ends it,
whether the message was sent or not. What was placed and is referred to by no message is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shmring.core.loggers import logger_of
from shmring.errors import WouldBlock
from shmring.integrations.traffic import Reason, Traffic, reason_of
from shmring.integrations.vllm.kept import Book, Entry
from shmring.integrations.vllm.link import LONGEST_IN_LOOP_NBYTES, AsyncLink, ThreadLink
from shmring.integrations.vllm.on_gpu import NotOnThisGpuError, gpu_of
from shmring.integrations.vllm.payloads import checksum

if TYPE_CHECKING:
    import torch

    from shmring import Submission

__all__ = ["RequestTensors"]

logger = logger_of("vllm.shmring")


_Way = Literal["copied", "kept", "device"]


class _Piece:
    """A tensor that is in the slab: kept there by an entry, or for this message alone. Or in the device slab, for this one."""

    __slots__ = ("book", "checksum", "client", "entry", "is_used", "nbytes", "submission", "way")

    def __init__(
        self, link: AsyncLink | ThreadLink, nbytes: int, submission: Any, entry: Entry | None, way: _Way, *, checksum: int
    ) -> None:
        self.client = link.client_id, link.epoch  # of this connection, as the book: another one may follow before it is sent
        self.book = link.book
        self.nbytes = nbytes
        self.submission: Submission = submission
        self.entry = entry
        self.way = way
        self.checksum = checksum
        self.is_used = False


class RequestTensors:
    """See the head of this file.

    Args:
        link: to the engine core that gets the message.
        traffic: counts what goes which way, once the message is sent.
        checks: whether references carry checksums.
    """

    def __init__(self, link: AsyncLink | ThreadLink, traffic: Traffic, *, checks: bool) -> None:
        self._link = link
        self._traffic = traffic
        self._checks = checks
        self._pieces: dict[int, _Piece] = {}
        self._inline: dict[int, Reason] = {}
        self._drops: list[tuple[Book, list[int]]] = []
        self._copied_in_loop_nbytes = 0

    # -- before the message is made ------------------------------------------------------------------------------------

    def place_now(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Places what needs no waiting, and returns the rest."""
        if not self._link.is_connected:
            self._inline.update((id(tensor), self._link.reason) for tensor in tensors)
            return []
        return [tensor for tensor in tensors if not (self._find(tensor) or self._copy_now(tensor))]

    async def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Places tensors, or finds why they go inline. One after the other: they share the memory bandwidth anyway.

        Where one has waited for space in vain, the others of the request do not wait for the same slab as well.
        """
        full: set[bool] = set()  # slabs, by whether they are on a GPU
        for tensor in tensors:
            on_gpu = gpu_of(tensor) is not None
            if on_gpu in full:
                self._inline[id(tensor)] = "space"
                continue
            try:
                await self._copy(tensor)
            except Exception as error:  # noqa: BLE001 - whatever it is, the tensor goes inline, and the reason is counted
                self._inline[id(tensor)] = _reason_of(error)
                if isinstance(error, TimeoutError):
                    full.add(on_gpu)

    def _find(self, tensor: torch.Tensor) -> bool:
        book = self._link.book
        entry = book.find(tensor) if book is not None else None
        if entry is None:
            return False
        self._pieces[id(tensor)] = _Piece(self._link, tensor.nbytes, entry.submission, entry, "kept", checksum=entry.checksum)
        return True

    def _copy_now(self, tensor: torch.Tensor) -> bool:
        """Copies a small tensor in the loop, or has a GPU copy one that is there; false if it has to be awaited."""
        link = self._link
        if isinstance(link, AsyncLink) and gpu_of(tensor) is None:
            copied_nbytes = self._copied_in_loop_nbytes + tensor.nbytes
            if copied_nbytes > LONGEST_IN_LOOP_NBYTES or id(tensor) in link.placing:
                return False
            self._copied_in_loop_nbytes = copied_nbytes
        try:
            self._placed(tensor, link.submit_now(tensor))
        except WouldBlock:
            return False
        except Exception as error:  # noqa: BLE001 - as above
            self._inline[id(tensor)] = _reason_of(error)
        return True

    async def _copy(self, tensor: torch.Tensor) -> None:
        link = self._link
        assert isinstance(link, AsyncLink)
        while (other := link.placing.get(id(tensor))) is not None:
            await other.wait()
            if self._find(tensor):
                return
        link.placing[id(tensor)] = ended = asyncio.Event()
        try:
            self._placed(tensor, await link.submit(tensor))
        except TimeoutError:
            if link.book is not None and gpu_of(tensor) is None:
                link.book.evict(tensor.nbytes)  # kept tensors have what others leave: the next request finds space
            raise
        finally:
            del link.placing[id(tensor)]
            ended.set()

    def _placed(self, tensor: torch.Tensor, submission: Any) -> None:
        """It is in the slab: for this message, or for others as well. The device slab keeps none: a copy on a GPU is cheap."""
        book, on_gpu = self._link.book, gpu_of(tensor) is not None
        entry = book.add(tensor, submission) if book is not None and not on_gpu and book.make_room(tensor.nbytes) else None
        piece = _Piece(self._link, tensor.nbytes, submission, entry, "device" if on_gpu else "copied", checksum=0)
        self._pieces[id(tensor)] = piece
        if self._checks:
            piece.checksum = checksum(tensor)
            if entry is not None:
                entry.checksum = piece.checksum

    # -- while it is made ------------------------------------------------------------------------------------------------

    def reference_to(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Returns what the message says instead of a tensor; None: the tensor itself."""
        piece = self._pieces.get(id(tensor))
        if piece is None:
            return None
        if piece.submission.ended:
            self._inline[id(tensor)] = "engine"  # the connection was lost while another tensor was copied
            return None
        if piece.is_used and piece.entry is None:
            self._inline[id(tensor)] = "twice"  # as a claim for one message is taken once
            return None
        piece.is_used = True
        client_id, epoch = piece.client
        reference: dict[str, Any] = {"shmring": [client_id, piece.submission.request_id, piece.entry is not None, epoch]}
        if self._checks:
            reference["crc"] = piece.checksum
        book = piece.book
        if book is not None and book.has_drops:  # whatever was sent before this has its views already
            drops = book.take_drops()
            self._drops.append((book, drops))
            reference["drop"] = drops
        return reference

    # -- afterwards --------------------------------------------------------------------------------------------------------

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """The message was sent: counts what went which way."""
        for tensor in tensors:
            piece = self._pieces.get(id(tensor))
            if piece is not None and piece.is_used:
                self._traffic.count(piece.way, piece.nbytes)
            if (reason := self._inline.get(id(tensor))) is not None:
                self._traffic.count("inline", tensor.nbytes, reason)
        self._leave()

    def abandon(self) -> None:
        """The message was not sent: nobody will take what is there for it alone."""
        for piece in self._pieces.values():
            piece.is_used = False
        for book, drops in self._drops:
            book.put_back(drops)
        self._leave()

    def _leave(self) -> None:
        for piece in self._pieces.values():
            if piece.entry is not None and piece.book is not None:
                piece.book.used(piece.entry)
            elif not piece.is_used:
                piece.submission.abort()
        self._pieces.clear()


def _reason_of(error: Exception) -> Reason:
    return "gpu" if isinstance(error, NotOnThisGpuError) else reason_of(error, logger)
