"""A frontend's side without an event loop: requests, streams and slots for any thread.

Theory of operation: the client lives in the loop of a thread of its own. The calls here are carried out there, by the code of
the asyncio client: each call is declared as the twin of an asyncio call (:mod:`shmring.threads.blocking`). Payloads are encoded
there while their caller waits. Large ones are copied on further threads, and delay no other caller. Tensors in slots are made
and written in the caller's thread.

Each thread has a current stream of its own on a GPU, the loop's thread as well. So while slots in device memory are held, each
call lets the loop's stream wait for the work that its caller has queued until then. Leaving such a slot passes the caller's
stream along: the slot is free when the GPU has finished the work that was queued there.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import typing_extensions

import shmring.client.client as client_in_loop
import shmring.client.connection as connection_in_loop
import shmring.client.kept as kept_in_loop
import shmring.client.slot as slot_in_loop
import shmring.client.submission as submission_in_loop
from shmring.client.connecting import Options, open_client
from shmring.client.far_session import Access
from shmring.config import ClientConfig
from shmring.core.compiled import Mark
from shmring.door import shown, timeout_of
from shmring.errors import ClosedError, WouldBlock
from shmring.gpu.cuda import Stream
from shmring.gpu.device_slots import DeviceSlots
from shmring.request_options import Arguments, SubmitOptions, signed_as
from shmring.threads.blocking import Blocking, blocking, blocking_stream, done_in_loop, handed_out, like, read_through
from shmring.threads.loop_calls import LoopRunner, within
from shmring.threads.loop_thread import LoopThread

__all__ = ["Client", "EngineConnection", "Keeping", "Kept", "Slot", "Submission"]

_Inner = TypeVar("_Inner", slot_in_loop.Slot, kept_in_loop.Kept[Any])
_Payload = typing_extensions.TypeVar("_Payload", default=Any)
_Reply = TypeVar("_Reply")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Submission(Blocking[submission_in_loop.Submission]):
    """A request that was sent: its replies, and its end. From :meth:`Client.submit`.

    Its caller must wait until it ends, or abort it; ``request`` and ``stream`` do that by themselves.

    Attributes:
        request_id: its number on this connection.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come (what came may still be taken).
    """

    __slots__ = ()

    def __init__(self, thread: LoopRunner, submission: submission_in_loop.Submission) -> None:
        self._thread = thread
        self._in_loop = submission

    __reduce_ex__ = submission_in_loop.Submission.__reduce_ex__
    request_id = read_through(submission_in_loop.Submission.request_id)
    name = read_through(submission_in_loop.Submission.name)
    engine = read_through(submission_in_loop.Submission.engine)
    ended = read_through(submission_in_loop.Submission.ended)
    has_replied = read_through(submission_in_loop.Submission.has_replied)

    @overload
    def next(self, reply_type: type[_Reply], *, timeout: float | None = ...) -> _Reply: ...

    @overload
    def next(self, reply_type: Any = ..., *, timeout: float | None = ...) -> Any: ...

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

    @overload
    def result(self, reply_type: type[_Reply], *, timeout: float | None = ...) -> _Reply: ...

    @overload
    def result(self, reply_type: Any = ..., *, timeout: float | None = ...) -> Any: ...

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
            return self._thread.call(_waited, self._in_loop, wait, arguments, timeout_of(timeout))
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
    return await within(timeout, submission._why_no_reply, wait(*arguments))


class _Held(Generic[_Inner]):
    """Something that a thread holds until it leaves it, with a block or ``close``."""

    __slots__ = ("__weakref__", "_in_loop", "_thread")

    _LEFT: ClassVar[str]  # the error for later uses

    def __init__(self, thread: LoopRunner, held: _Inner) -> None:
        self._thread = thread
        self._in_loop: _Inner | None = held  # None: it was left; the loop may not know yet

    def _unleft(self) -> _Inner:
        held = self._in_loop
        if held is None:
            raise ClosedError(self._LEFT)
        return held

    def close(self) -> None:
        """Leaves it. This never waits; finalisers may call it. Twice is once."""
        held, self._in_loop = self._in_loop, None  # if the loop has ended, it is not closed, and goes with its last reference
        if held is not None:
            self._thread.post(held.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _in_this_thread(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[_Held[Any], _Arguments], _Result]:
    """The twin of a method that any thread may call until the object is left."""
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

    def __init__(self, thread: LoopRunner, slot: slot_in_loop.Slot) -> None:
        super().__init__(thread, slot)
        self.engine: str = slot.engine
        self.nbytes: int = slot.nbytes

    def __repr__(self) -> str:
        return f"<Slot of {self.nbytes} bytes, closed>" if self._in_loop is None else repr(self._in_loop)

    __reduce_ex__ = slot_in_loop.Slot.__reduce_ex__
    tensor = _in_this_thread(slot_in_loop.Slot.tensor)
    array = _in_this_thread(slot_in_loop.Slot.array)

    def close(self) -> None:
        """Leaves the slot: it is free again when the engine has released it, and drained if that was asked for.

        Views of it must not be used any more. This never waits; finalisers may call it. Twice is once.
        """
        slot = self._in_loop
        if slot is not None and slot._is_on_gpu and self._thread.is_open:
            end = slot._end
            if end is not None:  # otherwise another thread leaves it
                self._thread.post(_use_on, slot, end.device_slots.current_stream())
        super().close()


def _use_on(slot: slot_in_loop.Slot, stream: int) -> None:
    """Called in the loop before a slot in device memory is left: sets the stream of the thread that leaves it."""
    if slot._end is not None:
        slot._end.device_slots.use(slot._record, stream)


class Kept(_Held[kept_in_loop.Kept[Any]], Generic[_Payload]):
    """Content that the engine keeps, pinned until this is left. Use it as ``with kept:``, or :meth:`close` it.

    Attributes:
        key: that it is found by.
        nbytes: bytes of its slot.
    """

    __slots__ = ("key", "nbytes")

    _LEFT = "this content was left; take what you need of its payload inside the block"

    def __init__(self, thread: LoopRunner, kept: kept_in_loop.Kept[_Payload]) -> None:
        super().__init__(thread, kept)
        self.key: bytes = kept.key
        self.nbytes: int = kept.nbytes

    def __repr__(self) -> str:
        state = f"<Kept {self.key.hex()[:16]} of {self.nbytes} bytes, left>"
        return state if self._in_loop is None else repr(self._in_loop)

    __reduce_ex__ = kept_in_loop.Kept.__reduce_ex__

    @property
    def payload(self) -> _Payload:
        """The content, its tensors viewed in place. Write to none of them: every frontend reads the same memory.

        Raises:
            ClosedError: this was left, or the client closed.
            EngineDeadError: the engine has gone, and its content with it.
            RemoteError: it is not of ``payload_type``.
        """
        kept = self._unleft()
        payload: _Payload = self._thread.call(lambda: kept.payload)
        return payload


class Keeping(Blocking[kept_in_loop.Keeping]):
    """Content that will be kept, from :meth:`Client.keep_nowait`. Nobody has to wait for it; nothing is pinned for its caller.

    Attributes:
        key: that it will be found by.
    """

    __slots__ = ("key",)

    def __init__(self, thread: LoopRunner, keeping: kept_in_loop.Keeping) -> None:
        self._thread = thread
        self._in_loop = keeping
        self.key: bytes = keeping.key

    def __repr__(self) -> str:
        return repr(self._in_loop)

    __reduce_ex__ = kept_in_loop.Keeping.__reduce_ex__
    ended = read_through(kept_in_loop.Keeping.ended)

    @property
    def error(self) -> Exception | None:
        """Why it is not kept; None: it is, or that is not known yet."""
        return self._in_loop.error

    def wait(self, *, timeout: float | None = None) -> None:
        """Waits until it is kept.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer; it goes on.
            WouldBlock, CapacityError, EngineDeadError, ClosedError: it is not, as :meth:`Client.keep` says.
        """
        self._thread.call(_until_kept, self._in_loop, timeout_of(timeout))


async def _until_kept(keeping: kept_in_loop.Keeping, timeout: float | None) -> None:
    await within(timeout, lambda: f"content to be kept under the key {keeping.key.hex()[:16]}", keeping.wait())


def _slots(thread: LoopRunner, slots: list[slot_in_loop.Slot]) -> list[Slot]:
    return [Slot(thread, slot) for slot in slots]


def _leave_all(slots: list[Slot]) -> None:
    for slot in slots:
        slot.close()


def _if_found(thread: LoopRunner, kept: kept_in_loop.Kept[_Payload] | None) -> Kept[_Payload] | None:
    return None if kept is None else Kept(thread, kept)


def _leave_if_found(kept: Kept[Any] | None) -> None:
    if kept is not None:
        kept.close()


def _those_found(thread: LoopRunner, found: list[kept_in_loop.Kept[Any] | None]) -> list[Kept[Any] | None]:
    return [_if_found(thread, kept) for kept in found]


def _leave_those(found: list[Kept[Any] | None]) -> None:
    for kept in found:
        _leave_if_found(kept)


class _ClientInLoop(client_in_loop.Client):
    """Further calls of a client, for threads."""

    @signed_as(client_in_loop.Client.submit)
    async def submit_in_time(
        self, payload: object, *, timeout: float | None = None, **options: Unpack[SubmitOptions]
    ) -> submission_in_loop.Submission:
        """Submits within so many seconds; otherwise as :meth:`submit`."""
        with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(options.get("engine"))):
            return await self.submit(payload, **options)

    @signed_as(client_in_loop.Client.submit_nowait)
    async def submit_unless_full(
        self, payload: object, *, ask: bool = True, **options: Unpack[SubmitOptions]
    ) -> submission_in_loop.Submission:
        """Submits with a long copy made beside the loop; otherwise as :meth:`submit_nowait`."""
        given = Arguments.of(options)
        full: WouldBlock | None = None
        for session in self._engines.takers(payload, given.key, given.engine):
            if full is not None and session.error is not None:
                continue  # it has ended meanwhile
            try:
                return await session.sending.submit_unless_full(payload, given.for_engine, ask=ask)
            except WouldBlock as error:
                full = full or error
        assert full is not None, "there is an engine"
        raise full

    @property
    def used_device_slots(self) -> Sequence[DeviceSlots]:
        """Returns the device slots of the engines at which callers hold some; in any thread."""
        return [session.device_slots for session in self._engines.sessions() if session.device_slots.held]


class EngineConnection(Blocking[connection_in_loop.EngineConnection]):
    """A client's connection to one of its engines, and to the next one of that name. From :attr:`Client.engines`.

    Attributes:
        name: of the engine.
    """

    __slots__ = ("name",)

    def __init__(self, thread: LoopRunner, connection: connection_in_loop.EngineConnection) -> None:
        self._thread = thread
        self._in_loop = connection
        self.name = connection.name

    def __repr__(self) -> str:
        return repr(self._in_loop)

    connected = read_through(connection_in_loop.EngineConnection.connected)
    client_id = read_through(connection_in_loop.EngineConnection.client_id)
    epoch = read_through(connection_in_loop.EngineConnection.epoch)
    kept_nbytes = read_through(connection_in_loop.EngineConnection.kept_nbytes)
    copies = read_through(connection_in_loop.EngineConnection.copies)
    lost_error = read_through(connection_in_loop.EngineConnection.lost_error)
    statistics = done_in_loop(connection_in_loop.EngineConnection.statistics)


class Client(Blocking[_ClientInLoop]):
    """A frontend's end, for any thread. Made by :func:`connect`; use it as ``with connect(...) as client:``, or close it.

    Attributes:
        names: the names of its engines, in the order in which they were given.
        config: as configured, for each engine.
        engines: the connection to each engine, by its name.
    """

    def __init__(self, names: Sequence[str], options: Options, config: ClientConfig, access: Access | None = None) -> None:
        """Opens it; see :func:`connect`."""
        self.names = tuple(names)
        self.config = config

        async def create() -> _ClientInLoop:
            self._in_loop = await open_client(_ClientInLoop, names, config, access=access, **options)
            return self._in_loop

        self._thread = LoopThread(f"this client of {', '.join(map(repr, names))}", create)
        self._thread.open()
        connections = {name: EngineConnection(self._thread, each) for name, each in self._in_loop.engines.items()}
        self.engines: Mapping[str, EngineConnection] = MappingProxyType(connections)

    def _after_gpu_uses(self, function: Callable[..., Any]) -> Callable[..., Any]:
        used = self._in_loop.used_device_slots
        if not used:
            return function
        self._thread.check_open()  # in a forked child, there is no CUDA
        return functools.partial(_call_after, [(slots, slots.mark()) for slots in used], function)

    request = blocking(client_in_loop.Client.request)
    stream = blocking_stream(client_in_loop.Client.stream)
    submit = handed_out(_ClientInLoop.submit_in_time, Submission, Submission.abort, text_of=client_in_loop.Client.submit)
    submit_nowait = handed_out(
        _ClientInLoop.submit_unless_full, Submission, Submission.abort, text_of=client_in_loop.Client.submit_nowait
    )
    abort = done_in_loop(client_in_loop.Client.abort)
    call = blocking(client_in_loop.Client.call)
    slot = handed_out(client_in_loop.Client.slot, Slot, Slot.close)
    slot_nowait = handed_out(client_in_loop.Client.slot_nowait, Slot, Slot.close)
    slots = handed_out(client_in_loop.Client.slots, _slots, _leave_all)
    check_capacity = done_in_loop(client_in_loop.Client.check_capacity)
    keep = handed_out(client_in_loop.Client.keep, Kept, Kept.close)
    find_many = handed_out(client_in_loop.Client.find_many, _those_found, _leave_those)
    wait_kept = handed_out(client_in_loop.Client.wait_kept, Kept, Kept.close)

    def find_nowait(self, key: bytes, *, payload_type: Any = Any, engine: str | None = None) -> Kept[Any]:
        """Returns kept content that this client has pinned already. Asks neither the engine nor the loop's thread.

        Args:
            key, payload_type, engine: as of :meth:`find`.

        Raises:
            WouldBlock: this client has not pinned it: :meth:`find` asks the engine. Or no engine is attached now.
            EngineDeadError, ClosedError, TypeError, ValueError: as :meth:`find`.
        """
        self._thread.check_open()
        return Kept(self._thread, self._in_loop.find_nowait(key, payload_type=payload_type, engine=engine))

    def keep_nowait(self, key: bytes, payload: object, slot: Slot, *, stream: Stream | None = None) -> Keeping:
        """Gives a slot to the engine, to be found under a key as soon as a GPU has written it. Waits for no engine and no GPU.

        The slot is not the caller's any more: leaving its block does nothing. If this process dies before the GPU has done its
        work, nothing was published.

        Args:
            key, payload, slot: as of :meth:`shmring.Client.keep_nowait`.
            stream: what is queued on it by now writes to the slot: a stream of torch's, of any GPU. None: the slot is written.

        Raises:
            WouldBlock, CapacityError, TypeError, ValueError, CudaError, RuntimeError, ClosedError, EngineDeadError: as
                :meth:`shmring.Client.keep_nowait`.
        """
        if not isinstance(slot, Slot):
            raise TypeError(f"slot is a slot of this client, not {shown(slot)}")
        keeping = self._thread.at_once(self._in_loop.keep_nowait, key, payload, slot._unleft(), stream=stream)
        slot._in_loop = None
        return Keeping(self._thread, keeping)

    choose = done_in_loop(client_in_loop.Client.choose)
    loads = done_in_loop(client_in_loop.Client.loads)
    wait_connected = blocking(client_in_loop.Client.wait_connected)
    wait_prefaulted = blocking(client_in_loop.Client.wait_prefaulted)
    statistics = done_in_loop(client_in_loop.Client.statistics)

    if TYPE_CHECKING:  # otherwise the wrapped object loses its type

        @overload
        def find(
            self, key: bytes, *, payload_type: type[_Payload], timeout: float | None = ..., engine: str | None = ...
        ) -> Kept[_Payload] | None: ...

        @overload
        def find(
            self, key: bytes, *, payload_type: Any = ..., timeout: float | None = ..., engine: str | None = ...
        ) -> Kept[Any] | None: ...

        def find(self, key: bytes, **options: Any) -> Kept[Any] | None: ...
    else:
        find = handed_out(client_in_loop.Client.find, _if_found, _leave_if_found)

    client_id = read_through(client_in_loop.Client.client_id)
    epoch = read_through(client_in_loop.Client.epoch)
    connected = read_through(client_in_loop.Client.connected)
    lost_error = read_through(client_in_loop.Client.lost_error)
    kept_nbytes = read_through(client_in_loop.Client.kept_nbytes)

    @property
    def resent(self) -> int:
        """Requests that were sent again because their engine had died (``retry``)."""
        return self._in_loop.resent

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._thread.is_open

    def close(self) -> None:
        """Aborts pending requests, says goodbye, detaches, and ends the thread.

        What was handed over with :meth:`keep_nowait` is kept before, if the GPU and the engine need no more than a second.
        Waiting threads get ``ClosedError`` at once. A second call does nothing.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _call_after(marks: list[tuple[DeviceSlots, Mark]], function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Does something for a thread, in the loop, ordered after the work that the thread has queued on its GPUs."""
    for slots, mark in marks:
        slots.follow(mark)
    return function(*arguments, **named)
