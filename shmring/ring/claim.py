"""A claim: one request in the engine's hands, from its claim to its last view.

A claim ends in exactly one way: finished (``with claim:`` left normally), failed (left by an exception), or aborted by
its frontend. The frontend is told of the first of these; later ones do nothing, because messages of the two sides may cross.
Releasing its slots is another matter: that happens when the claim is left, and for slots of which views are still alive, when
the last of them dies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from typing_extensions import TypeVar

from shmring.core.compiled import ClaimCalls
from shmring.core.printable import printable
from shmring.core.states import RequestEvent
from shmring.door import check_error, check_text
from shmring.errors import WouldBlock
from shmring.gpu.cuda import Stream
from shmring.gpu.upload import NOTHING_GIVEN
from shmring.ring.shell import Shell
from shmring.uncopied import uncopied

__all__ = ["Claim"]

_Payload = TypeVar("_Payload", default=Any)


class Claim(ClaimCalls, Generic[_Payload]):
    """A request that this engine is working on. Use it as ``with claim:``.

    Leaving the block releases the slots and tells the frontend that the request is done, or that it failed with the exception,
    which goes on propagating. Only this claim's own :class:`AbortedError` does not propagate: an abort by the frontend is no
    failure of the handler.

    Attributes:
        client_id: the frontend, as this engine numbers its connections.
        request_id: the request, as that frontend numbers its submissions.
        for_engine: what its caller has told the engine besides the payload.
        name: the caller's own name for the request; may be empty.
        nbytes: bytes of tensors in its slots.
        payload: the payload, its tensors viewed in place; see :class:`~shmring.core.compiled.BaseClaim`.
        aborted: whether the frontend gave the request up, or has gone.
        released: whether its slots were released, or will be when their copy to a GPU is over.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def payload(self) -> _Payload: ...

    @property
    def _shell(self) -> Shell:
        return cast("Shell", self._end.shell)

    def __repr__(self) -> str:
        state = "aborted" if self.aborted else "ended" if self.ended else "running"
        return f"<Claim {self.client_id}:{self.request_id} {printable(self.name)} {self.nbytes} bytes, {state}>"

    __reduce_ex__ = uncopied(
        "it is answered once, in the process that has it; share() it with workers, or hand on copies of its payload's tensors"
    )

    async def to(self, device: torch.device | str | int, stream: Stream | None = None) -> _Payload:
        """Copies the tensors to a GPU, and releases the slots when that is done.

        It makes one copy per slot, on a stream of the ring's own. ``stream`` waits for the copies, and this call does not: work
        that is queued on ``stream`` may use the tensors at once. From a pinned slab, a copy is a DMA; from another one, a large
        copy is made on a thread. This call awaits space in the GPU's staging memory (``RingConfig.staging_nbytes``). The
        request keeps its part of that memory until the last of its tensors is gone.

        Tensors in slots of the device slab are on their GPU already, and are not copied. ``stream`` waits for the work that
        their frontend has queued. Their slots drain until the last of them is gone and ``stream`` has finished the work that
        was queued on it by then.

        Do not copy from ``payload`` with ``non_blocking=True`` instead: a pinned slab makes that copy outlive its call,
        and nothing then keeps the slot until it ends.

        Args:
            device: a CUDA device; ``"cuda"`` is this thread's current one.
            stream: the stream that will use the tensors; ``None``: the current one of this thread. If another stream uses them
                too, let it wait for ``stream`` first, and let ``stream`` wait for it before the last tensor is dropped.

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
        shell = self._shell
        if self._bundle is not None:
            moved: _Payload = await shell.move_bundle(self._bundle, device)
            self._check_unreleased()
            self._end.release(self)
            return moved
        given = NOTHING_GIVEN
        if self._submit.content.fence:
            given = shell.given(self.client_id, self._submit, device, stream)
        payload: _Payload = await shell.uploads.upload(
            self._regions,
            shell.decoder,
            device,
            stream,
            self._check_unreleased,  # it may be released while this waits: its slots may then belong to others
            given,
        )
        self._end.release(self, copying=True)
        return payload

    def to_nowait(self, device: torch.device | str | int, stream: Stream | None = None) -> _Payload:
        """Copies the payload's tensors to a GPU, and releases the slots, if nothing has to be waited for.

        Raises:
            WouldBlock: the GPU's staging memory is full or was never used; or the slab is not pinned, and the copy large; or
                the request has no slots (:meth:`Ring.injector`).
            ValueError, CapacityError, CudaError, AbortedError, LocalProtocolError, msgspec.ValidationError: as :meth:`to`.
        """
        self._check_unreleased()
        shell = self._shell
        if self._bundle is not None:
            raise WouldBlock("the tensors of a request without slots are copied on a thread; call to(), which waits")
        given = NOTHING_GIVEN
        if self._submit.content.fence:
            given = shell.given(self.client_id, self._submit, device, stream)
        payload: _Payload = shell.uploads.upload_nowait(self._regions, shell.decoder, device, stream, given)
        self._end.release(self, copying=True)
        return payload

    def _check_unreleased(self) -> None:
        self._end.check_running(self)
        _ = self.payload

    def share(
        self, beside: object = None, *, to: Iterable[int] | None = None, timeout: float | None = None
    ) -> Awaitable[tuple[int, ...]]:
        """Sends the payload to the engine's workers, its tensors in place, and another payload beside it.

        The slots go back when this claim was left and the last of those workers has left the message, or is dead.

        Args:
            beside: like a payload.
            to: ranks of the workers that get it; None: all of them.
            timeout: seconds to wait while workers are behind.

        Returns:
            The ranks that it went to, when awaited.

        Raises:
            LocalProtocolError: the claim was released.
            WorkersBehindError: the time was over; a TimeoutError that names the workers.
            WorkerLostError: there is no worker of a rank in ``to``.
            TypeError, CapacityError, ClosedError: as :meth:`Ring.broadcast`.
        """
        return self._shell.workers.share(self, beside, to, timeout)

    def share_nowait(self, beside: object = None, *, to: Iterable[int] | None = None) -> tuple[int, ...]:
        """Sends the payload to the engine's workers, and another one beside it, if nothing has to be waited for.

        Raises:
            WouldBlock: workers are behind, or others wait to send.
            LocalProtocolError, WorkerLostError, TypeError, CapacityError, ClosedError: as :meth:`share`.
        """
        return self._shell.workers.share_nowait(self, beside, to)

    def fail(self, error: BaseException) -> None:
        """Releases the slots and tells the frontend that the request failed, with the error's type and text."""
        check_error(error)
        self._end.release(self)
        self._end_with(RequestEvent.ERROR, error)

    def time_out(self, message: str) -> None:
        """Releases the slots and tells the frontend that the request's time is over: it gets a ``TimeoutError``."""
        check_text(message, "message")
        self._end.release(self)
        self._end_with(RequestEvent.DEADLINE, TimeoutError(message))

    def release(self) -> None:
        """Releases the slots before the request ends; twice is once."""
        self._end.release(self)

    def _end_with(self, event: RequestEvent, error: BaseException) -> None:
        if not self.ended:
            self._shell.end_claim(self, event, error)
