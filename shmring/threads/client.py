"""A frontend's end without an event loop: requests, streams and slots for any thread.

Theory of operation: the client lives in the loop of a thread of its own. What is asked of it here is done there, by the same
code that asyncio programs use. Payloads are encoded there while their caller waits; large ones are copied on further threads,
which hold up nobody else. Tensors in slots are made and written in the caller's thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from numpy.typing import DTypeLike, NDArray

import shmring.client.kept as kept_in_loop
import shmring.client.slot as slot_in_loop
import shmring.client.submission as submission_in_loop
from shmring.client.client import RingClient
from shmring.client.routing_client import RoutingClient
from shmring.config import ClientConfig
from shmring.errors import ClosedError, ShmringError
from shmring.statistics import ClientStatistics
from shmring.threads.loop_thread import LoopThread, within

__all__ = ["BlockingClient", "Client", "Kept", "Slot", "Submission"]


class Submission:
    """A request that was sent: its replies, and its end. From :meth:`Client.submit`.

    Whoever takes one must see it to its end or abort it; ``request`` and ``stream`` do that by themselves.

    Attributes:
        request_id: its number on this connection.
        name: the caller's own name for it; may be empty.
    """

    __slots__ = ("__weakref__", "_submission", "_thread", "name", "request_id")

    def __init__(self, thread: LoopThread, submission: submission_in_loop.Submission) -> None:
        self._thread = thread
        self._submission = submission
        self.request_id: int = submission.request_id
        self.name: str = submission.name

    @property
    def engine(self) -> str:
        """The name of the engine that has it."""
        return self._submission.engine

    @property
    def ended(self) -> bool:
        """Whether nothing more will come (what came may still be taken)."""
        return self._submission.ended

    @property
    def has_replied(self) -> bool:
        """Whether a reply has come, taken or not."""
        return self._submission.has_replied

    def next(self, reply_type: Any = Any, *, timeout: float | None = None) -> Any:
        """Waits for the next reply. A thread that is interrupted here aborts the request.

        Args:
            reply_type: a msgspec type to decode it into.
            timeout: seconds.

        Raises:
            StopIteration: the request is finished.
            TimeoutError: none came; the request goes on.
            RemoteError, AbortedError, EngineDeadError: how it ended otherwise.
            LocalProtocolError: another thread waits for it; or this is the loop's own thread.
            ClosedError: the client is closed.
        """
        try:
            return self._wait("the next reply to", functools.partial(self._submission.next, reply_type), timeout)
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self, reply_type: Any = Any, *, timeout: float | None = None) -> Any:
        """Waits for the one reply and the end. A thread that is interrupted here aborts the request.

        Args:
            reply_type: a msgspec type to decode it into.
            timeout: seconds.

        Raises:
            TimeoutError: it took longer; the request goes on.
            RemoteError: the engine failed, or finished without a reply.
            LocalProtocolError: there was more than one reply; use :meth:`next` or ``stream``. Or as :meth:`next`.
            AbortedError, EngineDeadError, ClosedError: as :meth:`next`.
        """
        return self._wait("the reply to", functools.partial(self._submission.result, reply_type), timeout)

    def wait(self, *, timeout: float | None = None) -> None:
        """Waits for the end: for requests that get no reply. Those that come are there for :meth:`next` afterwards.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it took longer; the request goes on.
            RemoteError, AbortedError, EngineDeadError, LocalProtocolError, ClosedError: as :meth:`next`.
        """
        self._wait("the end of", self._submission.wait, timeout)

    def _wait(self, what: str, wait: Callable[[], Awaitable[Any]], timeout: float | None) -> Any:
        try:
            return self._thread.call(_waited, wait, timeout, f"{what} request {self.name or self.request_id}")
        except Exception:
            raise
        except BaseException:  # this thread was interrupted
            self.abort()
            raise

    def abort(self) -> None:
        """Gives the request up; a thread that waits for it gets ``AbortedError``. A second call does nothing.

        This never waits; finalisers may call it.
        """
        self._thread.post(self._submission.abort)


async def _waited(wait: Callable[[], Awaitable[Any]], timeout: float | None, what: str) -> Any:
    return await within(timeout, what, wait())


class Slot:
    """Memory to write tensors into. Use it as ``with client.slot(nbytes) as slot:``, or :meth:`close` it.

    Attributes:
        engine: the name of the engine in whose slab it is.
        nbytes: how many bytes of tensors it holds, alignment between them included.
    """

    __slots__ = ("__weakref__", "_slot", "_thread", "engine", "nbytes")

    def __init__(self, thread: LoopThread, slot: slot_in_loop.Slot) -> None:
        self._thread = thread
        self._slot: slot_in_loop.Slot | None = slot  # None: it was left, which the loop may not have heard of yet
        self.engine: str = slot.engine
        self.nbytes: int = slot.nbytes

    def __repr__(self) -> str:
        return f"<Slot of {self.nbytes} bytes, closed>" if self._slot is None else repr(self._slot)

    def tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised, writable tensor in the slot, behind those it has handed out before.

        Args:
            shape: its shape.
            dtype: a torch dtype that can travel.

        Raises:
            CapacityError: the slot has no room left for it; :func:`shmring.nbytes_for` says how large a slot must be.
            ClosedError: the slot was left, or the client closed.
            TypeError: the dtype can't travel.
            ValueError: an extent is negative.
        """
        tensor: torch.Tensor = self._unleft().tensor(shape, dtype)
        return tensor

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an uninitialised, writable numpy array in the slot; otherwise like :meth:`tensor`."""
        return self._unleft().array(shape, dtype)

    def _unleft(self) -> slot_in_loop.Slot:
        slot = self._slot
        if slot is None:
            raise ClosedError("this slot was left; views of it are made inside its block")
        return slot

    def close(self) -> None:
        """Leaves the slot: it is free again when the engine has released it, and drained if that was asked for.

        Views of it must not be used any more. This never waits; finalisers may call it. Twice is once.
        """
        slot, self._slot = self._slot, None  # where the loop has ended, nobody closes it: it goes with its last reference
        if slot is not None:
            self._thread.post(slot.close)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class Kept:
    """Content that the engine keeps, pinned until this is left. Use it as ``with kept:``, or :meth:`close` it.

    Attributes:
        key: that it is found by.
        nbytes: bytes of its slot.
    """

    __slots__ = ("__weakref__", "_kept", "_thread", "key", "nbytes")

    def __init__(self, thread: LoopThread, kept: kept_in_loop.Kept) -> None:
        self._thread = thread
        self._kept: kept_in_loop.Kept | None = kept  # None: it was left, which the loop may not have heard of yet
        self.key: bytes = kept.key
        self.nbytes: int = kept.nbytes

    def __repr__(self) -> str:
        return f"<Kept {self.key.hex()[:16]} of {self.nbytes} bytes, left>" if self._kept is None else repr(self._kept)

    @property
    def payload(self) -> Any:
        """What was kept, its tensors viewed in place. Write to none of them: every frontend has the same.

        Raises:
            ClosedError: this was left, or the client closed.
            EngineDeadError: the engine has gone, and what it kept with it.
            RemoteError: it is not of ``payload_type``.
        """
        kept = self._kept
        if kept is None:
            raise ClosedError("this content was left; take what you need of its payload inside the block")
        return self._thread.call(lambda: kept.payload)

    def close(self) -> None:
        """Leaves the content: nobody's space waits for it any more, once the last view has died.

        This never waits; finalisers may call it. Twice is once.
        """
        kept, self._kept = self._kept, None  # as a slot
        if kept is not None:
            self._thread.post(kept.close)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


_InLoop = TypeVar("_InLoop", RingClient, RoutingClient)


class BlockingClient(Generic[_InLoop]):
    """What clients of one engine and of several have in common.

    What goes on to the client in the loop beside a payload or a size, and only one of several engines takes, is in ``where``.

    Args:
        title: of the engines, for errors.
        config: as configured.
        create: makes the client, in its loop.
    """

    def __init__(self, title: str, config: ClientConfig, create: Callable[[], Awaitable[_InLoop]]) -> None:
        self.config = config
        self._title = title
        self._client: _InLoop

        async def create_here() -> _InLoop:
            self._client = await create()
            return self._client

        self._thread = LoopThread(f"this client of {title}", create_here)
        self._thread.open()

    def _whose(self, where: dict[str, Any]) -> str:
        """Says which engine is waited for, or was, for errors."""
        return self._title

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _request(
        self, payload: object, timeout: float | None, reply_type: Any, request_id: str, where: dict[str, Any]
    ) -> Any:
        request = self._client.request(payload, reply_type=reply_type, request_id=request_id, **where)
        return await within(timeout, lambda: f"space and the reply of engine {self._whose(where)}", request)

    def _submit_blocking(self, payload: object, timeout: float | None, request_id: str, where: dict[str, Any]) -> Submission:
        submission: Submission = self._thread.call(self._submit, payload, timeout, request_id, where, undo=Submission.abort)
        return submission

    async def _submit(self, payload: object, timeout: float | None, request_id: str, where: dict[str, Any]) -> Submission:
        submitting = self._client.submit(payload, request_id=request_id, **where)
        return Submission(
            self._thread, await within(timeout, lambda: f"space in the slab of engine {self._whose(where)}", submitting)
        )

    async def _submit_nowait(self, payload: object, request_id: str, ask: bool, where: dict[str, Any]) -> Submission:
        submitting = self._client.submit_unless_full(payload, request_id=request_id, ask=ask, **where)
        return Submission(self._thread, await submitting)

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names; threads that wait for them get ``AbortedError``.

        Returns:
            How many were in flight; an unknown one is none, it may just have ended.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        count: int = self._thread.call(self._client.abort, names)
        return count

    async def _call(self, method: str, arguments: tuple[object, ...], timeout: float | None, where: dict[str, Any]) -> Any:
        return await within(
            timeout, lambda: f"{method} of engine {self._whose(where)}", self._client.call(method, *arguments, **where)
        )

    # -- slots ---------------------------------------------------------------------------------------------------------

    async def _slot(self, nbytes: int, timeout: float | None, drain: bool, where: dict[str, Any]) -> Slot:
        slot = self._client.slot(nbytes, drain=drain, **where)
        return Slot(
            self._thread, await within(timeout, lambda: f"{nbytes} bytes in the slab of engine {self._whose(where)}", slot)
        )

    def _slot_nowait(self, nbytes: int, drain: bool, ask: bool, where: dict[str, Any]) -> Slot:
        return Slot(self._thread, self._client.slot_nowait(nbytes, drain=drain, ask=ask, **where))

    async def _find(self, key: bytes, payload_type: Any, timeout: float | None, where: dict[str, Any]) -> Kept | None:
        finding = self._client.find(key, payload_type=payload_type, **where)
        kept = await within(timeout, lambda: f"what engine {self._whose(where)} keeps", finding)
        return None if kept is None else Kept(self._thread, kept)

    def _find_blocking(self, key: bytes, payload_type: Any, timeout: float | None, where: dict[str, Any]) -> Kept | None:
        kept: Kept | None = self._thread.call(self._find, key, payload_type, timeout, where, undo=_leave)
        return kept

    async def _keep(self, key: bytes, payload: object, timeout: float | None, where: dict[str, Any]) -> Kept:
        keeping = self._client.keep(key, payload, **where)
        return Kept(self._thread, await within(timeout, lambda: f"space in the slab of engine {self._whose(where)}", keeping))

    def _keep_blocking(self, key: bytes, payload: object, timeout: float | None, where: dict[str, Any]) -> Kept:
        kept: Kept = self._thread.call(self._keep, key, payload, timeout, where, undo=_leave)
        return kept

    def check_capacity(self, *sizes: int) -> None:
        """Checks that slots of these sizes could be had at once, before the caller makes what they would hold. Takes nothing.

        Raises:
            CapacityError: more than the engine can lease out.
            WouldBlock: no engine is attached now, and the next one is waited for.
            EngineDeadError, ClosedError, LocalProtocolError, ValueError: as :meth:`slot`.
        """
        self._thread.call(self._client.check_capacity, *sizes)

    # -- the connection --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        return self._client.connected

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._thread.is_open

    @property
    def lost_error(self) -> ShmringError | None:
        """Why the last engine that went away did, as far as it is known; None if none has."""
        return self._client.lost_error

    def wait_connected(self, timeout: float | None = None) -> None:
        """Waits until an engine is attached (at once, unless ``reconnect`` is waiting for one)."""
        self._thread.call(self._wait_connected, timeout)

    async def _wait_connected(self, timeout: float | None) -> None:
        await within(timeout, f"engine {self._title}", self._client.wait_connected())

    def wait_prefaulted(self, timeout: float | None = None) -> None:
        """Waits until the slab's pages are mapped in this process (at once, without ``prefault``)."""
        self._thread.call(self._wait_prefaulted, timeout)

    async def _wait_prefaulted(self, timeout: float | None) -> None:
        await within(timeout, "the pages of the slab", self._client.wait_prefaulted())

    def close(self) -> None:
        """Aborts pending requests, says goodbye, detaches, and ends the thread.

        Threads that wait for something get ``ClosedError`` at once. A second call does nothing.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class Client(BlockingClient[RingClient]):
    """A frontend's end, for any thread. Made by :func:`connect`; use it as ``with connect(...) as client:``, or close it.

    Attributes:
        name: the engine's name.
        config: as configured.
    """

    def __init__(self, name: str, config: ClientConfig, reconnect: bool, description: str) -> None:
        """Opens it; see :func:`connect`."""
        self.name = name
        super().__init__(
            repr(name),
            config,
            lambda: RingClient.create(name, config, reconnect=reconnect, description=description),
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, payload: object, *, timeout: float | None = None, reply_type: Any = Any, request_id: str = "") -> Any:
        """Sends a payload and waits for its one reply. A thread that is interrupted meanwhile aborts the request.

        Tensors of a reply are views into the engine's slab; they go back when the last view of them dies.

        Args:
            payload: any msgspec-encodable object with torch tensors and numpy arrays at any depth. Tensors that lie in a
                slot of this client are sent from there; others are copied, once.
            timeout: seconds for all of it, waiting for space included.
            reply_type: a msgspec type to decode the reply into.
            request_id: the caller's own name for it, for :meth:`abort` and the engine's log.

        Raises:
            TimeoutError: it took longer; the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path. Nothing was sent.
            CapacityError: it can never fit the slab, or a message.
            RemoteError: the engine failed with this request.
            AbortedError: it was aborted by :meth:`abort`.
            EngineDeadError: the engine went away.
            ClosedError: this client is closed, or belongs to the process that forked this one.
            LocalProtocolError: this is the loop's own thread.
        """
        return self._thread.call(self._request, payload, timeout, reply_type, request_id, {})

    def stream(
        self, payload: object, *, timeout: float | None = None, reply_type: Any = Any, request_id: str = ""
    ) -> Generator[Any, None, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` ends with the last reply, and does not interrupt what the
        caller does between two replies.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        submission = self.submit(payload, timeout=timeout, request_id=request_id)
        try:
            while True:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    reply = [submission.next(reply_type, timeout=left_s)]
                except StopIteration:
                    return
                yield reply.pop()  # or this frame would keep the reply's slot for as long as the caller takes
        finally:
            submission.abort()

    def submit(self, payload: object, *, timeout: float | None = None, request_id: str = "") -> Submission:
        """Sends a payload, and returns when it is the engine's: the first half of :meth:`request`.

        Args:
            payload, request_id: as of :meth:`request`.
            timeout: seconds to wait for space and for the engine.

        Raises:
            TimeoutError: it took longer; nothing was sent.
            TypeError, CapacityError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        return self._submit_blocking(payload, timeout, request_id, {})

    def submit_nowait(self, payload: object, *, request_id: str = "", ask: bool = True) -> Submission:
        """The same if there is space now, and the engine takes it; this waits for the copy only.

        Args:
            payload, request_id: as of :meth:`request`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: there is no space in this client's leases, too much is in flight, or no engine is attached.
            TypeError, CapacityError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        submission: Submission = self._thread.call(self._submit_nowait, payload, request_id, ask, {}, undo=Submission.abort)
        return submission

    def call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        """Calls a control method of the engine (see ``calls`` of :func:`shmring.serve`) and returns its result.

        Raises:
            RemoteError: it failed, or there is none of that name.
            TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        return self._thread.call(self._call, method, arguments, timeout, {})

    # -- slots ---------------------------------------------------------------------------------------------------------

    def slot(self, nbytes: int, *, timeout: float | None = None, drain: bool = False) -> Slot:
        """Waits in line for memory of the slab to write tensors into: ``with client.slot(nbytes) as slot``.

        Args:
            nbytes: bytes of tensors; :func:`shmring.nbytes_for` adds several up with their alignment.
            timeout: seconds to wait.
            drain: whether the memory, after the block was left, is kept until the last view of it has died. For slots that
                other threads may still write to then.

        Raises:
            CapacityError: more than the engine can lease out; waiting would be useless.
            ValueError: ``nbytes`` is negative.
            TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        slot: Slot = self._thread.call(self._slot, nbytes, timeout, drain, {}, undo=Slot.close)
        return slot

    def slot_nowait(self, nbytes: int, *, drain: bool = False, ask: bool = True) -> Slot:
        """Returns a slot if one is free in this client's leases.

        Args:
            nbytes, drain: as of :meth:`slot`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: none is, or others wait for one.
            CapacityError, EngineDeadError, ClosedError, LocalProtocolError, ValueError: as :meth:`slot`.
        """
        slot: Slot = self._thread.call(self._slot_nowait, nbytes, drain, ask, {}, undo=Slot.close)
        return slot

    def find(self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None) -> Kept | None:
        """Looks for content that the engine keeps under a key, whoever gave it. It is pinned until what is returned is left.

        Args:
            key: 32 bytes.
            payload_type: a msgspec type to decode the payload into.
            timeout: seconds to wait for the engine.

        Returns:
            The content; None if it is not there.

        Raises:
            WouldBlock: it is there, and this client has too much pinned (``RingConfig.max_pins``).
            TypeError, ValueError: this is no key.
            TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        return self._find_blocking(key, payload_type, timeout, {})

    def keep(self, key: bytes, payload: object, *, timeout: float | None = None) -> Kept:
        """Gives content to the engine, to be found under a key by every client until its space is wanted for something else.

        Args:
            key: 32 bytes that stand for this content and for no other, such as a hash of what it was made of.
            payload: with a torch tensor or numpy array in it. If all of them lie in one slot of this client, nothing is copied,
                and that slot is the engine's from now on.
            timeout: seconds for all of it, waiting for space included.

        Returns:
            The content, which is pinned until that is left.

        Raises:
            WouldBlock: it can't be kept now: what is kept is in use, or somebody waits for that memory.
            CapacityError: it is larger than all that the engine may keep.
            TypeError, ValueError: it can't be sent, has no tensor, or this is no key.
            TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        return self._keep_blocking(key, payload, timeout, {})

    # -- the connection --------------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> int:
        """How the engine that is attached now numbers this client (``Claim.client_id`` there); 0: none is."""
        return self._client.client_id

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start.

        Raises:
            ClosedError: this client is closed.
        """
        statistics: ClientStatistics = self._thread.call(self._client.statistics)
        return statistics


def _leave(kept: Kept | None) -> None:
    """What the loop does with content that its caller did not take."""
    if kept is not None:
        kept.close()
