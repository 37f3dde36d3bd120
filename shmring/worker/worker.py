"""A worker's side with asyncio: ``async with shmring.join("vision", rank=0) as worker``.

Theory of operation: a :class:`~shmring.transport.link.Link` reads records in the loop, as on both sides of a frontend's
connection. The records wait here until they are received; ``RingConfig.worker_backlog`` bounds them. A message is opened when
it is received. Leaving it acknowledges it, in C, without the loop: see ``core/worker_end.pyx``.

A worker for threads (``threads/worker.py``) has the same compiled end, and is made of the base classes here. They differ in how
they wait, in what carries a reply to the engine, and in which thread may do what.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, Unpack, overload

from typing_extensions import TypeVar

from shmring.cancellation import retrieve
from shmring.config import WorkerConfig, WorkerOptions, configured
from shmring.core.compiled import BaseMessage, Home, WorkerEnd
from shmring.core.messages import Refused, decode_engine_message
from shmring.core.printable import printable
from shmring.door import check_name, rank_of
from shmring.errors import ClosedError, EngineDeadError, PeerLostError, RemoteProtocolError, ShmringError, WouldBlock, fresh
from shmring.line import WaitingLine, give
from shmring.opening import Opening
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch
from shmring.transport.loops import poller_of
from shmring.uncopied import uncopied
from shmring.worker.answers import failure_record, records_of
from shmring.worker.joining import Joined, join_in_time

__all__ = ["BaseConnection", "Message", "TypedMessage", "Worker", "join"]

_Payload = TypeVar("_Payload", default=Any)

_LARGEST_FAILURE_NBYTES = 8192  # of failures, which can't wait: one for each message that may be outstanding
_MOST_MESSAGES = 256
_BACKLOG_NBYTES = _MOST_MESSAGES * _LARGEST_FAILURE_NBYTES


class TypedMessage(BaseMessage, Generic[_Payload]):
    """A message whose payload has a type, and which one process has."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def payload(self) -> _Payload: ...

    __reduce_ex__ = uncopied("it is left once, in the process that has it; hand on copies of its payload's tensors")


class Message(TypedMessage[_Payload]):
    """A message of the engine. Use it as ``with message:``; leaving acknowledges it, when the last view of it has died.

    Attributes:
        payload: what the engine has sent, its tensors viewed in place, to be read only. Of a claim that is shared: its payload.
        beside: what goes beside a claim that is shared; else None.
        sequence: its number, the same for all workers that get it.
        wants_reply: whether the engine waits for a reply.
        left: whether it was left.
    """

    __slots__ = ()

    async def reply(self, payload: object) -> None:
        """Replies to a message, once. Waits while the engine reads more slowly than it is written to.

        After a cancellation, the caller may reply again, or leave the message without a reply. But if a part of the reply was
        sent, the rest is still sent.

        A reply to a message that was broadcast is dropped (``wants_reply`` is false): a worker may reply to every message.

        Args:
            payload: any msgspec-encodable object with tensors and arrays at any depth, which are copied.

        Raises:
            LocalProtocolError: the message had a reply, or was left.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: it is larger than ``max_payload_nbytes`` of the engine.
            EngineDeadError, ClosedError: there is nobody to reply to.
        """
        connection: _Connection = self._end.shell  # type: ignore[assignment]  # the shell of such a message is one
        await connection.send_answer(self, payload)


class BaseConnection:
    """A worker's connection to its engine: how replies are cut into records, and why it has ended.

    Args:
        joined: the worker's place.

    Attributes:
        home: where the worker may be used; not a base, whose subclasses Python reads attributes of slowly.
        name: the engine's name.
        rank: the worker's.
    """

    _end: WorkerEnd  # the subclass makes it

    def __init__(self, joined: Joined, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.home = Home(f"worker {joined.rank} of engine {joined.name!r}", "join anew", loop)
        self.name = joined.name
        self.rank = joined.rank
        self._reason: ShmringError | None = None  # why no more messages will come

    def _answer(self, message: BaseMessage, payload: object, largest_nbytes: int) -> deque[bytes]:
        """Returns the records of a reply, of so many bytes at most, for one after the other; none if the engine gathers no
        replies. The message counts as replied to from here on. Raises what ``reply`` of a message does."""
        self._check_alive()
        parts = deque(records_of(self._end.pack_answer(payload, message.sequence), largest_nbytes))
        if not self._end.mark_answered(message):
            parts.clear()
        return parts

    def _why_ended(self, record: bytes) -> ClosedError:
        """Reads the record with which the engine ends the connection. Another one raises RemoteProtocolError."""
        message = decode_engine_message(record)
        if not isinstance(message, Refused):
            raise RemoteProtocolError(f"{type(message).__name__} is nothing that a worker is sent")
        return ClosedError(f"engine {self.name!r} has ended the connection of worker {self.rank}: {printable(message.reason)}")

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"engine {self.name!r} is dead, or has ended the connection without a word", engine=self.name)

    def _half_answered(self) -> ClosedError:
        """The error of a connection after half of a reply: nothing else can follow that."""
        return ClosedError(f"worker {self.rank} has given up in the middle of a reply")

    def _check_alive(self) -> None:
        self.home.check_process()
        if self._reason is not None:
            raise fresh(self._reason)


class _Connection(BaseConnection):
    """A worker's connection to its engine: received messages, replies, and how it ends."""

    def __init__(self, joined: Joined, payload_type: Any) -> None:
        super().__init__(joined, asyncio.get_running_loop())
        self._records: deque[bytes] = deque()
        self._receivers: WaitingLine[None] = WaitingLine()
        self._answering = asyncio.Lock()  # a reply's parts follow each other
        self._rest: asyncio.Task[None] | None = None  # sends them, for the last reply that has several
        self._watch = ProcessWatch(self.home.loop, joined.pidfd, self._engine_died)
        self._link = Link(
            self,
            joined.socket,
            joined.incoming,
            joined.outgoing,
            poller_of(self.home.loop),
            max_backlog_nbytes=_BACKLOG_NBYTES,
            busy_poll_s=joined.config.busy_poll_s,
        )
        try:
            self._end = joined.make_end(self, self._link.reader, self._link.writer, Message, payload_type)
        except BaseException:
            self._watch.close()
            self._link.abort()
            raise
        self._link.start()

    # -- messages --------------------------------------------------------------------------------------------------

    def next_in_turn(self) -> Message | None:
        """Opens the next record, unless other tasks wait for it."""
        return None if self._receivers else self.next()

    def next(self) -> Message | None:
        """Opens the next record; None: none has come."""
        self.home.check_process()
        if not self._records and self._reason is None:
            self._link.poll()
        if not self._records:
            if self._reason is not None:
                raise fresh(self._reason)
            return None
        record, received = self._records.popleft(), self._end.received
        try:
            message = self._end.open(record)
            if not isinstance(message, Message):
                raise RemoteProtocolError("a record came that is nothing that a worker is sent")
        except RemoteProtocolError as error:
            self.protocol_violated(error)
            raise
        except MemoryError:
            if self._end.received == received:  # it was not read
                self._records.appendleft(record)
            raise
        return message

    async def record_came(self) -> None:
        """Waits for a record, or for the end."""
        self.home.check_loop()
        await self._receivers.wait(lambda _: self._wake())

    def _wake(self) -> None:
        """Wakes as many tasks as there are records; all of them if no more records will come."""
        left = len(self._receivers) if self._reason is not None else len(self._records)
        for place in self._receivers:
            if left and not place.cancelled():  # a task that was woken before takes a record, too
                left -= 1
                give(place, None)

    # -- replies -----------------------------------------------------------------------------------------------------

    async def send_answer(self, message: Message, payload: object) -> None:
        """For :meth:`Message.reply`."""
        parts = self._answer(message, payload, self._link.largest_record_nbytes)
        if not parts:
            return
        try:
            await self._answering.acquire()
            try:
                await self._writable()
            except BaseException:
                self._answering.release()
                raise
        except BaseException:
            self._end.unmark_answered(message)  # nothing was sent
            raise
        self._link.send(parts.popleft())
        if not parts:
            self._answering.release()
            return
        try:
            self._rest = self.home.loop.create_task(self._send_rest(parts))
        except MemoryError as error:
            self._link.fail_soon(error)
            raise
        self._rest.add_done_callback(retrieve)
        await asyncio.shield(self._rest)

    async def _send_rest(self, parts: deque[bytes]) -> None:
        """Sends the rest after the first part of a reply, even if its caller no longer waits."""
        try:
            while parts:
                await self._writable()
                self._link.send(parts.popleft())
        finally:
            self._rest = None  # if it fails, it holds the error, whose traceback holds the frame of the caller that replies
            self._answering.release()
            if parts:  # after half of a reply, no other message can be sent
                self._end_with(self._half_answered())
                self._link.close()

    async def _writable(self) -> None:
        try:
            await self._link.drain()
        except PeerLostError:
            raise fresh(self._reason or self._dead()) from None

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """For messages: no reply to one will come."""
        self._link.send(failure_record(sequence, error))

    def fail_answer_later(self, sequence: int, error: BaseException) -> None:
        """For finalisers of messages, in any thread: no reply to one will come."""
        if not self.home.forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.home.loop.call_soon_threadsafe(self.fail_answer, sequence, error)

    # -- for the link ------------------------------------------------------------------------------------------------

    def handle_record(self, record: bytes) -> None:
        """For the link: a record came."""
        if len(record) > 1 and record[1] != Refused.__struct_config__.tag:
            self._records.append(record)
            self._wake()
            return
        self._end_with(self._why_ended(record))

    def peer_gave_up(self) -> None:
        """For the link: an engine never gives up."""
        self.protocol_violated(RemoteProtocolError("the engine gave up attaching"))

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """For the link: the engine broke the rules."""
        self._end_with(error)
        self._link.close()

    def failed(self, error: BaseException) -> None:
        """For the link: this process has failed in the middle of a message."""
        self._end_with(
            ClosedError(f"worker {self.rank} has failed in the middle of a message: {type(error).__name__}: {error}")
        )
        self._leave_unread()
        self._link.close()

    def connection_lost(self) -> None:
        """For the link: it has ended."""
        self._end_with(self._dead())

    def _engine_died(self) -> None:
        self._link.read_last_words()
        self._end_with(self._dead())
        self._link.abort()

    def _end_with(self, reason: ShmringError) -> None:
        if self._reason is None:
            self._reason = reason
        self._wake()

    # -- its end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See :meth:`Worker.close`."""
        if self.home.forked or self.home.is_closed:
            return
        self.home.check_loop()
        self.home.is_closed = True
        self._end_with(self.home.closed_error())
        self._watch.close()
        self._leave_unread()
        self._link.close()
        await asyncio.sleep(0)  # lets the link report its end

    def _leave_unread(self) -> None:
        while self._records:
            with contextlib.suppress(RemoteProtocolError):  # the engine should not have sent these
                self._end.leave_unread(self._records.popleft())
        self._end.close()


class Worker(Generic[_Payload]):
    """A worker's side. Made by :func:`join`; iterate over it for messages, in the engine's order.

    Attributes:
        name: the engine's name.
        epoch: which life of the engine it has joined (``Ring.epoch`` there).
        rank: this worker's.
        config: as configured.
    """

    def __init__(self, joined: Joined, payload_type: Any) -> None:
        self.name = joined.name
        self.epoch = joined.epoch
        self.rank = joined.rank
        self.config = joined.config
        self._connection = _Connection(joined, payload_type)

    __reduce_ex__ = uncopied("it belongs to one process and one event loop; join with another rank in the new one")

    async def receive(self) -> Message[_Payload]:
        """Waits for the next message. Leave it: ``with await worker.receive() as message:``.

        Raises:
            ClosedError: this worker is closed, or the engine has dropped it or is closing.
            EngineDeadError: the engine is dead.
            RemoteProtocolError: the engine broke the rules; the connection has ended.
            msgspec.ValidationError: the payload is not of ``payload_type``. The message was left.
        """
        while True:
            message = self._connection.next()
            if message is not None:
                return message
            await self._connection.record_came()

    def receive_nowait(self) -> Message[_Payload]:
        """Returns the next message if it has come.

        Raises:
            WouldBlock: none has, or others wait for it.
            ClosedError, EngineDeadError, RemoteProtocolError, msgspec.ValidationError: as :meth:`receive`.
        """
        message = self._connection.next_in_turn()
        if message is None:
            raise WouldBlock("no message has come")
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message[_Payload]:
        try:
            return await self.receive()
        except ClosedError:
            self._connection.home.check_process()
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Closes the connection. Messages that were received stay until they are left. A second call does nothing."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _join(name: str, rank: int, config: WorkerConfig, payload_type: Any, label: str) -> Worker[Any]:
    return Worker(await join_in_time(name, rank, label, config), payload_type)


@overload
def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = ...,
    *,
    payload_type: type[_Payload],
    label: str = ...,
    **overrides: Unpack[WorkerOptions],
) -> Opening[Worker[_Payload]]: ...


@overload
def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = ...,
    *,
    payload_type: Any = ...,
    label: str = ...,
    **overrides: Unpack[WorkerOptions],
) -> Opening[Worker[Any]]: ...


def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = None,
    *,
    payload_type: Any = Any,
    label: str = "",
    **overrides: Unpack[WorkerOptions],
) -> Opening[Worker[Any]]:
    """Joins an engine as a worker: ``async with shmring.join("vision", rank=0) as worker``.

    Args:
        name: the engine's name.
        rank: this worker's, from 0 on; one living worker of an engine may have it.
        config: limits; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        label: how the engine's log calls this worker, of at most 256 characters.

    Raises:
        EngineDeadError: there is no engine of this name within ``connect_timeout_s``.
        RankTakenError: a living worker has this rank.
        RemoteProtocolError: the engine refuses this worker (with its reason).
        PermissionError: the process that listens there is not to be trusted.
        SlabError: its memory can't be mapped.
        ValueError, TypeError: a name, rank or option is not valid.
    """
    rank = rank_of(rank)
    check_name(label, "label")
    settled = configured(WorkerConfig, config, overrides)
    return Opening(lambda: _join(name, rank, settled, payload_type, label))
