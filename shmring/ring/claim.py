"""A claim: one request in the engine's hands, from its claim to its last view.

A claim ends in exactly one way: finished (``with claim:`` left normally), failed (left by an exception), or aborted by
its frontend. Whichever comes first is told to the frontend; the others are no-ops, because the messages of the two ends
cross. Releasing its slots is another matter: that happens when the claim is left, and for slots of which views are still
alive, when the last of them dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shmring.core.messages import Submit
from shmring.core.states import RequestEvent
from shmring.errors import AbortedError, LocalProtocolError

if TYPE_CHECKING:
    import torch

    from shmring.gpu.cuda import Stream
    from shmring.ring.ring import Ring

__all__ = ["Claim"]

_RELEASED = object()


class Claim:
    """A request that this engine is working on. Use it as ``with claim:``.

    Leaving the block releases the slots and tells the frontend: done, or failed with the exception, which goes on
    propagating. Only this claim's own :class:`AbortedError` ends with the block: that the caller gave up is no failure of
    whoever was answering.

    Attributes:
        client_id: the frontend, as this engine numbers its connections.
        request_id: the request, as that frontend numbers its submissions.
        name: the caller's own name for the request; may be empty.
        nbytes: bytes of tensors in its slots.
    """

    __slots__ = (
        "_aborted",
        "_callbacks",
        "_ended",
        "_payload",
        "_ring",
        "_submit",
        "_waits",
        "client_id",
        "name",
        "nbytes",
        "request_id",
    )

    def __init__(self, ring: Ring, client_id: int, submit: Submit, payload: Any) -> None:
        self._ring = ring
        self._submit = submit
        self._payload = payload
        self._ended = False
        self._aborted = False
        self._callbacks: list[Callable[[], object]] = []
        self._waits: list[Callable[[], object]] = []
        self.client_id = client_id
        self.request_id = submit.request_id
        self.name = submit.name
        self.nbytes = sum([slot.nbytes for slot in submit.content.slots])

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "ended" if self._ended else "running"
        return f"<Claim {self.client_id}:{self.request_id} {self.name or ''} {self.nbytes} bytes, {state}>"

    @property
    def payload(self) -> Any:
        """The payload, its tensors viewed in place. Views taken from it keep their slot after the claim is left.

        Tensors in slots of the device slab are on its GPU, to be used on the stream that was this thread's current one when the
        request was claimed: it waits for what their frontend has queued. A further stream that is to use them must wait for
        it, and it for that stream before the last view is dropped.

        Raises:
            LocalProtocolError: the claim has released it.
        """
        if self._payload is _RELEASED:
            raise LocalProtocolError(f"request {self.request_id} was released; keep what you need of its payload before")
        return self._payload

    @property
    def aborted(self) -> bool:
        """Whether the frontend gave the request up, or has gone."""
        return self._aborted

    @property
    def released(self) -> bool:
        """Whether its slots were released, or will be when their copy to a GPU is over."""
        return self._payload is _RELEASED

    async def to(self, device: torch.device | str | int, stream: Stream | None = None) -> Any:
        """Copies the tensors to a GPU, and releases the slots when that is done: never earlier, and with no further call.

        One copy per slot, on a stream of the ring's own; ``stream`` waits for it, and this does not: the tensors may be
        used at once by what is queued there. From a pinned slab that is a DMA; from another one, the copy is made on a
        thread if it is large. What is awaited is space in the GPU's staging memory (``RingConfig.staging_nbytes``), whose
        part of it the request has until the last of its tensors is gone.

        Tensors in slots of the device slab are on their GPU already. They are given as they are, with ``stream`` waiting for
        what their frontend has queued; their slots drain until the last of them is gone and ``stream`` has come to what was
        queued on it by then.

        Do not copy from ``payload`` with ``non_blocking=True`` instead: a pinned slab makes that copy outlive its call,
        and nothing then keeps the slot until it ends.

        Args:
            device: a CUDA device; ``"cuda"`` is this thread's current one.
            stream: that will use the tensors; ``None``: the current one of this thread. A further stream that is to use them
                must wait for it, and it for that stream before the last tensor is dropped.

        Returns:
            The payload with its tensors on the device. numpy arrays become tensors there too; those of dtypes that torch
            does not have (text, times) are copied on the host. ``payload`` is released, as by :meth:`release`.

        Raises:
            ValueError: ``device`` is no CUDA device, or another than that of the device slab in which a tensor lies.
            CapacityError: the tensors can never fit the staging memory.
            CudaError: CUDA is not there, or failed.
            AbortedError: the request was aborted.
            LocalProtocolError: the claim was released, or has ended.
            msgspec.ValidationError: ``payload_type`` wants a numpy array where a tensor came, which a GPU can't hold.
        """
        self._check_unreleased()
        payload = await self._ring.upload(self.client_id, self._submit, device, stream, self._check_unreleased)
        self._release(copying=True)
        return payload

    def to_nowait(self, device: torch.device | str | int, stream: Stream | None = None) -> Any:
        """The same if nothing has to be waited for.

        Raises:
            WouldBlock: the GPU's staging memory is full or was never used; or the slab is not pinned, and the copy large.
            ValueError, CapacityError, CudaError, AbortedError, LocalProtocolError, msgspec.ValidationError: as :meth:`to`.
        """
        self._check_unreleased()
        payload = self._ring.upload_nowait(self.client_id, self._submit, device, stream)
        self._release(copying=True)
        return payload

    def _check_unreleased(self) -> None:
        self.check_running()
        _ = self.payload

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Calls back in the loop when the request is aborted; at once if it was."""
        if self._aborted:
            callback()
        else:
            self._callbacks.append(callback)

    def on_end(self, callback: Callable[[], object]) -> None:
        """For the ring: calls back in the loop when the request has ended, in whichever way."""
        self._waits.append(callback)

    def forget_on_end(self, callback: Callable[[], object]) -> None:
        """For the ring: takes that back, if it was not called yet."""
        with contextlib.suppress(ValueError):
            self._waits.remove(callback)

    def _end_waits(self) -> None:
        waits, self._waits = self._waits, []
        for callback in waits:
            self._ring.loop.call_soon(callback)

    async def reply(self, payload: object) -> None:
        """Sends an answer; any number of times. Waits for reply space and for a frontend that reads slowly.

        Args:
            payload: like a request's: any msgspec-encodable object with tensors and arrays at any depth.

        Raises:
            AbortedError: the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: it can never fit the reply reserve, or a message.
        """
        self.check_running()
        await self._ring.send_reply(self, payload)

    def reply_nowait(self, payload: object) -> None:
        """Sends an answer if that needs no waiting; the copy is made in the loop.

        Raises:
            WouldBlock: there is no reply space now, or the frontend reads slowly.
            AbortedError, TypeError, CapacityError: as :meth:`reply`.
        """
        self.check_running()
        self._ring.send_reply_nowait(self, payload)

    def done(self) -> None:
        """Releases the slots and tells the frontend that the request is finished."""
        if self._ended or self._payload is _RELEASED:
            self.release()
            self._end(RequestEvent.FINISH)
            return
        self._payload = _RELEASED
        self._ended = True
        self._callbacks.clear()
        if self._waits:
            self._end_waits()
        self._ring.finish_claim(self, self._submit)

    def fail(self, error: BaseException) -> None:
        """Releases the slots and tells the frontend that the request failed, with the error's type and text."""
        self.release()
        self._end(RequestEvent.ERROR, error)

    def time_out(self, message: str) -> None:
        """Releases the slots and tells the frontend that the request's time is over: it gets a ``TimeoutError``."""
        self.release()
        self._end(RequestEvent.DEADLINE, TimeoutError(message))

    def release(self) -> None:
        """Releases the slots before the request ends; twice is once."""
        self._release(copying=False)

    def _release(self, *, copying: bool) -> None:
        if self._payload is not _RELEASED:
            self._payload = _RELEASED
            self._ring.release_claim(self.client_id, self._submit, copying=copying)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None:
            self.done()
            return False
        self.fail(error)
        return isinstance(error, AbortedError) and self._aborted and error.request_id == self.request_id

    def _end(self, event: RequestEvent, error: BaseException | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._callbacks.clear()
            self._end_waits()
            self._ring.end_claim(self, event, error)

    def check_running(self) -> None:
        """Raises unless the request can still be answered.

        Raises:
            AbortedError: the frontend gave it up, or has gone.
            LocalProtocolError: it has ended.
        """
        if self._ended:
            raise self.why_not_running()

    def why_not_running(self) -> AbortedError | LocalProtocolError:
        """The error of whoever would still answer it."""
        if self._aborted:
            return AbortedError(f"request {self.request_id} was aborted by its frontend", request_id=self.request_id)
        return LocalProtocolError(f"request {self.request_id} has ended; answer before leaving its claim")

    def mark_aborted(self) -> None:
        """For the ring: the frontend gave the request up. Callbacks run from the loop, outside of the ring's event."""
        self._aborted = self._ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._ring.loop.call_soon(callback)
        self._end_waits()
