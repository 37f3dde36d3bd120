"""A worker's side without an event loop: ``with shmring.threads.join("vision", rank=0) as worker``.

Theory of operation: there is no loop and no further thread. A thread that receives looks into the ring itself, for a moment or
for ``busy_poll_s``, and then sleeps in the kernel until the engine rings or dies. Several threads may receive at once: one
looks, the others wait in line. The thread that replies writes the reply itself. Leaving a message acknowledges it, in C, on
whatever thread: see ``core/worker_end.pyx``.

If a finaliser has something to send (a message that wanted a reply was dropped), the next call sends it, because a finaliser
must not wait.

Closing never waits, since the thread that closes may itself be receiving or sending: in a signal handler, in a hook that
decodes a payload, in the code of a reply. It marks the worker as closed, and wakes sleeping threads. The last thread that
leaves a call cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Generic, Self, Unpack, overload

from typing_extensions import TypeVar

from shmring.config import WorkerConfig, WorkerOptions, busy_poll_of, configured
from shmring.core.compiled import ENDED, FOREIGN, GAVE_UP, RecordReader, RecordWriter, receive_bells
from shmring.door import check_name, rank_of, timeout_of
from shmring.errors import (
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ShmringError,
    WouldBlock,
    fresh,
)
from shmring.memory.limits import check_open_files
from shmring.threads.greenlets import check_threads
from shmring.threads.loop_calls import OPEN_FILES
from shmring.transport.liveness import is_stopped
from shmring.uncopied import uncopied
from shmring.worker.answers import failure_record
from shmring.worker.joining import Joined, join_in_time
from shmring.worker.worker import BaseConnection, TypedMessage

__all__ = ["Message", "Worker", "join"]

_Payload = TypeVar("_Payload", default=Any)


class Message(TypedMessage[_Payload]):
    """A message of the engine, for any thread: ``with message:``. Its attributes are those of :class:`shmring.Message`."""

    __slots__ = ()

    def reply(self, payload: object, *, timeout: float | None = None) -> None:
        """Replies to a message, once. Waits while the engine reads more slowly than it is written to.

        A reply to a message that was broadcast is dropped (``wants_reply`` is false): a worker may reply to every message.

        Args:
            payload: any msgspec-encodable object with tensors and arrays at any depth, which are copied.
            timeout: seconds to wait.

        Raises:
            TimeoutError: it took longer. Nothing was sent, and it may be tried again; or the connection has ended, if a part of
                the reply was sent.
            LocalProtocolError: the message had a reply, or was left.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: it is larger than ``max_payload_nbytes`` of the engine.
            EngineDeadError, ClosedError: there is nobody to reply to.
        """
        connection: _Connection = self._end.shell  # type: ignore[assignment]  # the shell of such a message is one
        connection.send_answer(self, payload, timeout_of(timeout))


class _Connection(BaseConnection):
    """A worker's connection to its engine: messages and replies, each for one thread at a time, and how it ends.

    Attributes:
        receiving: the turn of the thread that receives.
    """

    def __init__(self, joined: Joined, payload_type: Any) -> None:
        super().__init__(joined)
        self._socket = joined.socket
        self._pidfd = joined.pidfd
        self.receiving = _Turn("receives")
        self._sending = _Turn("replies")
        self._unsaid: deque[bytes] = deque()  # failures of messages that could not be sent yet: bounded like messages
        self._has_ended = False  # the connection; what was published before is still read
        fd = joined.socket.fileno()
        self._end = joined.make_end(
            self, RecordReader(joined.incoming, fd), RecordWriter(joined.outgoing, fd), Message, payload_type
        )
        self._reader, self._writer = self._end.reader, self._end.writer

    # -- messages --------------------------------------------------------------------------------------------------

    def next(self, wait_s: float, busy_s: float) -> Message | None:
        """Returns the next message. None: no record came in time, or one may have come since. Times as of
        :meth:`WorkerEnd.receive`."""
        self.home.check_process()
        if self._unsaid:
            self._say_unsaid()
        while True:
            if self._reason is not None:
                raise fresh(self._reason)
            try:
                taken = self._end.receive(self._pidfd, 0.0 if self._has_ended else wait_s, busy_s)
                if isinstance(taken, Message):
                    return taken
                if isinstance(taken, bytes):
                    self._end_with(self._why_ended(taken))
                    continue
            except RemoteProtocolError as error:
                self._end_with(error)
                raise
            if self._has_ended:
                self._end_with(self._dead())
            elif not taken:
                return None
            self._hear(taken)

    @property
    def engine_is_stopped(self) -> bool:
        """See :attr:`Worker.engine_is_stopped`."""
        self.home.check_process()
        return self._pidfd >= 0 and is_stopped(self._pidfd)

    def _hear(self, heard: int) -> None:
        """Acts on what :func:`~shmring.core.compiled.receive_bells` says. What was published before the end is still read."""
        if heard & (FOREIGN | GAVE_UP):
            self._end_with(RemoteProtocolError("what came over the socket is no bell"))
        elif heard & ENDED:
            self._has_ended = True

    # -- replies -----------------------------------------------------------------------------------------------------

    def send_answer(self, message: Message, payload: object, timeout: float | None) -> None:
        """For :meth:`Message.reply`."""
        parts = self._answer(message, payload, self._writer.largest_record_nbytes)
        if not parts:
            return
        count = len(parts)
        try:
            self._send(parts, timeout)
        except BaseException:
            if len(parts) == count:  # nothing was sent
                self._end.unmark_answered(message)
            elif parts:  # nothing else can follow half of a reply
                self._end_with(self._half_answered())
            raise

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """For messages: no reply to one will come. If the thread is interrupted here, the next call sends this."""
        self.fail_answer_later(sequence, error)
        self._say_unsaid()

    def fail_answer_later(self, sequence: int, error: BaseException) -> None:
        """For finalisers of messages: no reply to one will come. The next call sends this."""
        self._unsaid.append(failure_record(sequence, error))

    def _say_unsaid(self) -> None:
        with contextlib.suppress(ShmringError):  # then it is not needed, or this thread is replying, and sends it afterwards
            self._send(deque(), None)

    def _send(self, parts: deque[bytes], timeout: float | None) -> None:
        """Sends records, after the failures that were not sent yet. Removes the records that were sent.

        Raises:
            TimeoutError, ClosedError, EngineDeadError: as :meth:`Message.reply`.
            LocalProtocolError: this thread is sending already.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.take(self._sending, timeout):
            raise self._unread(timeout)
        try:
            for records in (self._unsaid, parts):
                while records:
                    self._wait_and_write(records[0], deadline, timeout)
                    records.popleft()
        finally:
            self.leave(self._sending)

    def _wait_and_write(self, record: bytes, deadline: float | None, timeout: float | None) -> None:
        while True:
            self._check_alive()  # a signal handler may have closed this
            if self._write(record):
                return
            if self._has_ended:
                raise self._dead()
            wait_s = -1.0 if deadline is None else deadline - time.monotonic()
            if deadline is not None and wait_s <= 0:
                raise self._unread(timeout)
            if self._writer.wait_for_space(len(record)):
                self._hear(self._end.wait_for_room(self._pidfd, wait_s))

    def _unread(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"waited {timeout:g} s for engine {self.name!r} to read a reply, and gave up")

    def _write(self, record: bytes) -> bool:
        try:
            is_written = self._writer.write(record)
        except RemoteProtocolError as error:
            self._end_with(error)
            raise
        if is_written:
            self._writer.ring_bell()
        return is_written

    # -- its end -----------------------------------------------------------------------------------------------------

    def _end_with(self, reason: ShmringError) -> None:
        if self._reason is None:
            self._reason = reason
            with contextlib.suppress(OSError):  # the engine has ended it
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See :meth:`Worker.close`."""
        if self.home.forked or self._pidfd < 0:
            return
        self.home.is_closed = True
        self._end_with(self.home.closed_error())
        self._tidy_up()

    def take(self, turn: _Turn, timeout: float | None) -> bool:
        """Waits for a turn; returns whether it came in time."""
        if turn.take_now():
            return True
        self.home.check_process()  # its holder may be a thread of the process that forked this one
        return turn.take(timeout)

    def leave(self, turn: _Turn) -> None:
        """The last thread that leaves a closed worker cleans up."""
        turn.pass_on()
        if self.home.is_closed:
            self._tidy_up()

    def _tidy_up(self) -> None:
        """Cleans up. If another thread is inside, that thread does it when it leaves."""
        # Checked again after each try: a thread that left meanwhile may have found this thread inside, and relies on it.
        while self._pidfd >= 0 and not (self.receiving.is_taken or self._sending.is_taken):
            if self.receiving.take_now():
                try:
                    if self._sending.take_now():
                        try:
                            self._give_back()
                        finally:
                            self._sending.pass_on()
                finally:
                    self.receiving.pass_on()

    def _give_back(self) -> None:
        if self._pidfd < 0:
            return
        pidfd, self._pidfd = self._pidfd, -1
        self._end.close()
        self._reader.mute()
        self._writer.mute()
        receive_bells(self._socket.fileno())
        self._socket.close()
        os.close(pidfd)


class Worker(Generic[_Payload]):
    """A worker's end, for any thread. Made by :func:`join`; iterate over it for messages, in the engine's order.

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

    __reduce_ex__ = uncopied("it belongs to one process, whose threads may share it; join with another rank in the new one")

    def receive(self, timeout: float | None = None, *, busy_poll_s: float | None = None) -> Message[_Payload]:
        """Waits for the next message. Leave it: ``with worker.receive() as message:``.

        Args:
            timeout: seconds.
            busy_poll_s: for how long to look for it before this sleeps, instead of the worker's ``busy_poll_s``.

        Raises:
            TimeoutError: none came.
            ClosedError: this worker is closed, or the engine has dropped it or is closing.
            EngineDeadError: the engine is dead.
            RemoteProtocolError: the engine broke the rules; the connection has ended.
            msgspec.ValidationError: the payload is not of ``payload_type``. The message was left.
            LocalProtocolError: this thread receives already, and runs a signal handler or a hook of ``payload_type`` meanwhile.
            ValueError: ``busy_poll_s`` is not what that option may be.
        """
        busy_s = self.config.busy_poll_s
        if busy_poll_s is not None:
            busy_s = busy_poll_of(busy_poll_s)
        timeout = timeout_of(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        connection = self._connection
        if not connection.take(connection.receiving, timeout):
            raise _timeout_error(timeout)
        try:
            wait_s = -1.0
            while True:
                if deadline is not None:
                    wait_s = max(0.0, deadline - time.monotonic())
                message = connection.next(wait_s, busy_s)
                if message is not None:
                    return message
                if not wait_s:
                    raise _timeout_error(timeout)
                busy_s = -1.0  # it has looked for so long already
        finally:
            connection.leave(connection.receiving)

    def receive_nowait(self) -> Message[_Payload]:
        """Returns the next message if it has come.

        Raises:
            WouldBlock: none has, or another thread waits for it.
            ClosedError, EngineDeadError, RemoteProtocolError, msgspec.ValidationError: as :meth:`receive`.
        """
        connection = self._connection
        if connection.receiving.take_now():
            try:
                message = connection.next(0.0, -1.0)
            finally:
                connection.leave(connection.receiving)
            if message is not None:
                return message
        raise WouldBlock("no message has come")

    @property
    def engine_is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger has stopped the engine's process, as the kernel says."""
        return self._connection.engine_is_stopped

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message[_Payload]:
        try:
            return self.receive()
        except ClosedError:
            self._connection.home.check_process()
            raise StopIteration from None

    def close(self) -> None:
        """Closes the connection. Messages that were received stay until they are left. A second call does nothing.

        Threads that wait for a message get ``ClosedError``. This never waits; signal handlers and finalisers may call it.
        """
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class _Turn:
    """A turn for one thread at a time. The same thread takes it and passes it on.

    Args:
        what: what the thread does, for the error.
    """

    __slots__ = ("_lock", "_owner", "_what")

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._what = what

    @property
    def is_taken(self) -> bool:
        """Whether a thread has it."""
        return self._lock.locked()

    def take_now(self) -> bool:
        """Takes it if no thread has it."""
        if not self._lock.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        return True

    def take(self, timeout: float | None) -> bool:
        """Waits for it, so many seconds at most; returns whether it was taken.

        Raises:
            LocalProtocolError: this thread has it, and would wait for itself.
        """
        if self._owner == threading.get_ident():
            raise LocalProtocolError(
                f"this thread {self._what} already: it runs a signal handler, a finaliser or a hook of a type meanwhile"
            )
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False
        self._owner = threading.get_ident()
        return True

    def pass_on(self) -> None:
        """Lets the next one have it."""
        self._owner = 0
        self._lock.release()


def _timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"waited {timeout:g} s for a message, and gave up")


@overload
def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = ...,
    *,
    payload_type: type[_Payload],
    label: str = ...,
    **overrides: Unpack[WorkerOptions],
) -> Worker[_Payload]: ...


@overload
def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = ...,
    *,
    payload_type: Any = ...,
    label: str = ...,
    **overrides: Unpack[WorkerOptions],
) -> Worker[Any]: ...


def join(
    name: str,
    rank: int,
    config: WorkerConfig | None = None,
    *,
    payload_type: Any = Any,
    label: str = "",
    **overrides: Unpack[WorkerOptions],
) -> Worker[Any]:
    """Joins an engine as a worker: ``with shmring.threads.join("vision", rank=0) as worker``.

    Args:
        name: the engine's name.
        rank: this worker's, from 0 on; one living worker of an engine may have it.
        config: limits; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        label: how the engine's log calls this worker, of at most 256 characters.

    Raises:
        EngineDeadError, RankTakenError, RemoteProtocolError, PermissionError, SlabError, OSError, ValueError, TypeError:
            as :func:`shmring.join`.
        LocalProtocolError: threads are greenlets here (gevent).
    """
    check_threads()
    rank = rank_of(rank)
    check_name(label, "label")
    settled = configured(WorkerConfig, config, overrides)
    check_open_files(OPEN_FILES, f"worker {rank} of {name!r}")
    joined = _run_apart(name, rank, label, settled)
    try:
        return Worker(joined, payload_type)
    except BaseException:
        joined.close()
        raise


def _run_apart(name: str, rank: int, label: str, config: WorkerConfig) -> Joined:
    """Joins in a loop of its own, on a thread of its own: this one may have a running loop."""
    outcome: list[Joined | BaseException] = []
    is_left = threading.Event()  # the waiting thread was interrupted

    def run() -> None:
        try:
            outcome.append(asyncio.run(join_in_time(name, rank, label, config)))
        except BaseException as error:  # noqa: BLE001 - it is raised where this was called
            outcome.append(error)
        if is_left.is_set() and isinstance(outcome[0], Joined):
            outcome[0].close()

    thread = threading.Thread(target=run, name=f"shmring join {name!r}", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        is_left.set()
        raise
    result = outcome.pop()
    if isinstance(result, BaseException):
        try:
            raise result
        finally:
            del result
    return result
