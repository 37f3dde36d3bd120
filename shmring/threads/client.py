"""A frontend's end without an event loop: requests, streams and slots for any thread.

Theory of operation: the client lives in the loop of a thread of its own. What is asked of it here is done there, by the same
code that asyncio programs use: each call is declared, and made of the one that they have (:mod:`shmring.threads.blocking`).
Payloads are encoded there while their caller waits. Large ones are copied on further threads, which hold up nobody else.
Tensors in slots are made and written in the caller's thread.

Each thread has a current stream of its own on a GPU, the loop's thread as well. So while slots in device memory are held, each
call has the loop's stream wait for what its caller has queued until then. Leaving such a slot names the caller's stream: the
slot is free when the GPU has done what was queued there.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

import shmring.client.kept as kept_in_loop
import shmring.client.slot as slot_in_loop
import shmring.client.submission as submission_in_loop
from shmring.client.client import RingClient
from shmring.client.routing import Route
from shmring.client.routing_client import RoutingClient as RoutingClientInLoop
from shmring.config import ClientConfig
from shmring.errors import ClosedError
from shmring.gpu.cuda import Event, Stream
from shmring.gpu.device_slots import DeviceSlots
from shmring.threads.blocking import Blocking, blocking, blocking_stream, done_in_loop, handed_out, like, read_through
from shmring.threads.loop_thread import LoopThread, within

__all__ = ["Client", "Kept", "RoutingClient", "Slot", "Submission"]

_Inner = TypeVar("_Inner", slot_in_loop.Slot, kept_in_loop.Kept)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Submission(Blocking[submission_in_loop.Submission]):
    """A request that was sent: its replies, and its end. From :meth:`Client.submit`.

    Whoever takes one must see it to its end or abort it; ``request`` and ``stream`` do that by themselves.

    Attributes:
        request_id: its number on this connection.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come (what came may still be taken).
    """

    __slots__ = ()

    def __init__(self, thread: LoopThread, submission: submission_in_loop.Submission) -> None:
        self._thread = thread
        self._in_loop = submission

    request_id = read_through(submission_in_loop.Submission.request_id)
    name = read_through(submission_in_loop.Submission.name)
    engine = read_through(submission_in_loop.Submission.engine)
    ended = read_through(submission_in_loop.Submission.ended)
    has_replied = read_through(submission_in_loop.Submission.has_replied)

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
            return self._wait(self._in_loop.next, reply_type, timeout=timeout)
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
        return self._wait(self._in_loop.result, reply_type, timeout=timeout)

    def wait(self, *, timeout: float | None = None) -> None:
        """Waits for the end: for requests that get no reply. Those that come are there for :meth:`next` afterwards.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it took longer; the request goes on.
            RemoteError, AbortedError, EngineDeadError, LocalProtocolError, ClosedError: as :meth:`next`.
        """
        self._wait(self._in_loop.wait, timeout=timeout)

    def _wait(self, wait: Callable[..., Awaitable[Any]], *arguments: Any, timeout: float | None) -> Any:
        try:
            return self._thread.call(_waited, self._in_loop, wait, arguments, timeout)
        except Exception:
            raise
        except BaseException:  # this thread was interrupted
            self.abort()
            raise

    def abort(self) -> None:
        """Gives the request up; a thread that waits for it gets ``AbortedError``. A second call does nothing.

        This never waits; finalisers may call it.
        """
        self._thread.post(self._in_loop.abort)


async def _waited(
    submission: submission_in_loop.Submission,
    wait: Callable[..., Awaitable[Any]],
    arguments: tuple[Any, ...],
    timeout: float | None,
) -> Any:
    return await within(timeout, lambda: f"at {submission.engine!r}: {submission.end.shell.why_no_reply()}", wait(*arguments))


class _Held(Generic[_Inner]):
    """What a thread holds until it leaves it, with a block or ``close``."""

    __slots__ = ("__weakref__", "_in_loop", "_thread")

    _LEFT: ClassVar[str]  # what whoever uses it later is told

    def __init__(self, thread: LoopThread, held: _Inner) -> None:
        self._thread = thread
        self._in_loop: _Inner | None = held  # None: it was left, which the loop may not have heard of yet

    def _unleft(self) -> _Inner:
        held = self._in_loop
        if held is None:
            raise ClosedError(self._LEFT)
        return held

    def close(self) -> None:
        """Leaves it. This never waits; finalisers may call it. Twice is once."""
        held, self._in_loop = self._in_loop, None  # where the loop has ended, nobody closes it: it goes with its last reference
        if held is not None:
            self._thread.post(held.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _in_this_thread(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[_Held[Any], _Arguments], _Result]:
    """The twin of a method that any thread may call, until it leaves what has it."""
    name = method.__name__

    def twin(self: _Held[Any], /, *arguments: Any, **named: Any) -> Any:
        return getattr(self._unleft(), name)(*arguments, **named)

    return like(method, twin)


class Slot(_Held[slot_in_loop.Slot]):
    """Memory to write tensors into. Use it as ``with client.slot(nbytes) as slot:``, or :meth:`close` it.

    Attributes:
        engine: the name of the engine in whose slab it is.
        nbytes: how many bytes of tensors it holds, alignment between them included.
    """

    __slots__ = ("engine", "nbytes")

    _LEFT = "this slot was left; views of it are made inside its block"

    def __init__(self, thread: LoopThread, slot: slot_in_loop.Slot) -> None:
        super().__init__(thread, slot)
        self.engine: str = slot.engine
        self.nbytes: int = slot.nbytes

    def __repr__(self) -> str:
        return f"<Slot of {self.nbytes} bytes, closed>" if self._in_loop is None else repr(self._in_loop)

    tensor = _in_this_thread(slot_in_loop.Slot.tensor)
    array = _in_this_thread(slot_in_loop.Slot.array)

    def close(self) -> None:
        """Leaves the slot: it is free again when the engine has released it, and drained if that was asked for.

        Views of it must not be used any more. This never waits; finalisers may call it. Twice is once.
        """
        slot = self._in_loop
        if slot is not None and slot.device_memory is not None and self._thread.is_open:
            end = slot.end
            if end is not None:  # else another thread leaves it
                self._thread.post(_use_on, slot, end.device_slots.current_stream())
        super().close()


def _use_on(slot: slot_in_loop.Slot, stream: Stream) -> None:
    """Before a slot in device memory is left, in the loop: this is the stream of whoever leaves it."""
    if slot.end is not None:
        slot.end.device_slots.use(slot.record, stream)


class Kept(_Held[kept_in_loop.Kept]):
    """Content that the engine keeps, pinned until this is left. Use it as ``with kept:``, or :meth:`close` it.

    Attributes:
        key: that it is found by.
        nbytes: bytes of its slot.
    """

    __slots__ = ("key", "nbytes")

    _LEFT = "this content was left; take what you need of its payload inside the block"

    def __init__(self, thread: LoopThread, kept: kept_in_loop.Kept) -> None:
        super().__init__(thread, kept)
        self.key: bytes = kept.key
        self.nbytes: int = kept.nbytes

    def __repr__(self) -> str:
        state = f"<Kept {self.key.hex()[:16]} of {self.nbytes} bytes, left>"
        return state if self._in_loop is None else repr(self._in_loop)

    @property
    def payload(self) -> Any:
        """What was kept, its tensors viewed in place. Write to none of them: every frontend has the same.

        Raises:
            ClosedError: this was left, or the client closed.
            EngineDeadError: the engine has gone, and what it kept with it.
            RemoteError: it is not of ``payload_type``.
        """
        kept = self._unleft()
        return self._thread.call(lambda: kept.payload)


def _slots(thread: LoopThread, slots: list[slot_in_loop.Slot]) -> list[Slot]:
    return [Slot(thread, slot) for slot in slots]


def _leave_all(slots: list[Slot]) -> None:
    for slot in slots:
        slot.close()


def _if_found(thread: LoopThread, kept: kept_in_loop.Kept | None) -> Kept | None:
    return None if kept is None else Kept(thread, kept)


def _leave_if_found(kept: Kept | None) -> None:
    if kept is not None:
        kept.close()


_InLoop = TypeVar("_InLoop", RingClient, RoutingClientInLoop)


class _Client(Blocking[_InLoop]):
    """What clients of one engine and of several have in common.

    Args:
        title: of the engines, for errors.
        config: as configured.
        create: makes the client, in its loop.
    """

    def __init__(self, title: str, config: ClientConfig, create: Callable[[], Awaitable[_InLoop]]) -> None:
        self.config = config

        async def create_here() -> _InLoop:
            self._in_loop = await create()
            return self._in_loop

        self._thread = LoopThread(f"this client of {title}", create_here)
        self._thread.open()

    def _ordered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        used = self._in_loop.used_device_slots
        if not used:
            return function
        self._thread.check_open()  # in a forked child, there is no CUDA
        return functools.partial(_behind, [(slots, slots.mark()) for slots in used], function)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._thread.is_open

    def close(self) -> None:
        """Aborts pending requests, says goodbye, detaches, and ends the thread.

        Threads that wait for something get ``ClosedError`` at once. A second call does nothing.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _behind(marks: list[tuple[DeviceSlots, Event]], function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Does something for a thread, in the loop: it comes behind what that thread has queued on its GPUs."""
    for slots, mark in marks:
        slots.follow(mark)
    return function(*arguments, **named)


class Client(_Client[RingClient]):
    """A frontend's end, for any thread. Made by :func:`connect`; use it as ``with connect(...) as client:``, or close it.

    Attributes:
        name: the engine's name.
        config: as configured.
    """

    def __init__(self, name: str, config: ClientConfig, reconnect: bool, description: str) -> None:
        """Opens it; see :func:`connect`."""
        self.name = name
        super().__init__(
            repr(name), config, lambda: RingClient.create(name, config, reconnect=reconnect, description=description)
        )

    request = blocking(RingClient.request)
    stream = blocking_stream(RingClient.stream)
    submit = handed_out(RingClient.submit_in_time, Submission, Submission.abort, text_of=RingClient.submit)
    submit_nowait = handed_out(RingClient.submit_unless_full, Submission, Submission.abort, text_of=RingClient.submit_nowait)
    abort = done_in_loop(RingClient.abort)
    call = blocking(RingClient.call)
    slot = handed_out(RingClient.slot, Slot, Slot.close)
    slot_nowait = handed_out(RingClient.slot_nowait, Slot, Slot.close)
    slots = handed_out(RingClient.slots, _slots, _leave_all)
    check_capacity = done_in_loop(RingClient.check_capacity)
    find = handed_out(RingClient.find, _if_found, _leave_if_found)
    keep = handed_out(RingClient.keep, Kept, Kept.close)
    wait_connected = blocking(RingClient.wait_connected)
    wait_prefaulted = blocking(RingClient.wait_prefaulted)
    statistics = done_in_loop(RingClient.statistics)

    client_id = read_through(RingClient.client_id)
    epoch = read_through(RingClient.epoch)
    connected = read_through(RingClient.connected)
    lost_error = read_through(RingClient.lost_error)
    kept_nbytes = read_through(RingClient.kept_nbytes)


class RoutingClient(_Client[RoutingClientInLoop]):
    """A frontend's end of several engines, for any thread. Made by :func:`shmring.threads.connect` from a list of names.

    Attributes:
        names: of the engines.
        config: as configured, for each of them.
    """

    def __init__(self, names: Sequence[str], config: ClientConfig, route: Route, reconnect: bool, description: str) -> None:
        """Opens it; see :func:`shmring.threads.connect`."""
        self.names = tuple(names)
        super().__init__(
            " or ".join(map(repr, names)),
            config,
            lambda: RoutingClientInLoop.create(names, config, route=route, reconnect=reconnect, description=description),
        )

    request = blocking(RoutingClientInLoop.request)
    stream = blocking_stream(RoutingClientInLoop.stream)
    submit = handed_out(RoutingClientInLoop.submit_in_time, Submission, Submission.abort, text_of=RoutingClientInLoop.submit)
    submit_nowait = handed_out(
        RoutingClientInLoop.submit_unless_full, Submission, Submission.abort, text_of=RoutingClientInLoop.submit_nowait
    )
    abort = done_in_loop(RoutingClientInLoop.abort)
    call = blocking(RoutingClientInLoop.call)
    slot = handed_out(RoutingClientInLoop.slot, Slot, Slot.close)
    slot_nowait = handed_out(RoutingClientInLoop.slot_nowait, Slot, Slot.close)
    slots = handed_out(RoutingClientInLoop.slots, _slots, _leave_all)
    check_capacity = done_in_loop(RoutingClientInLoop.check_capacity)
    find = handed_out(RoutingClientInLoop.find, _if_found, _leave_if_found)
    keep = handed_out(RoutingClientInLoop.keep, Kept, Kept.close)
    choose = done_in_loop(RoutingClientInLoop.choose)
    loads = done_in_loop(RoutingClientInLoop.loads)
    wait_connected = blocking(RoutingClientInLoop.wait_connected)
    wait_prefaulted = blocking(RoutingClientInLoop.wait_prefaulted)
    statistics = done_in_loop(RoutingClientInLoop.statistics)

    connected = read_through(RoutingClientInLoop.connected)
    lost_error = read_through(RoutingClientInLoop.lost_error)
    kept_nbytes = read_through(RoutingClientInLoop.kept_nbytes)

    @property
    def resent(self) -> int:
        """Requests that were sent again because their engine had died (``retry``)."""
        return self._in_loop.resent
