"""A connected frontend, in the engine: its messages, and how its connection ends.

Theory of operation: :class:`~shmring.core.compiled.BaseFrontend` handles submissions. :class:`Frontend` handles all other
messages; each is one event of the book.

A frontend ends by its goodbye, the end of its socket, its process's death, or by breaking the rules. In each case its requests
are aborted at once. Its memory comes back when the kernel says that its process is dead (or when it says goodbye), and no claim
or view of ours still reads it. Memory that a goodbye names is still in use: it comes back with the end of the socket, if the
goodbye says that the socket lingers for this; otherwise with the process's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from shmring.core.compiled import (
    ENDED,
    BaseFrontend,
    EngineEnd,
    RingMemory,
    check_count,
    check_kept,
    decode_values,
    receive_bells,
)
from shmring.core.effects import EngineEffect
from shmring.core.loggers import logger_of
from shmring.core.messages import (
    MAX_FINDS,
    MAX_KEPT_PAYLOAD_NBYTES,
    MAX_WAITS,
    Abort,
    Call,
    CallResult,
    EngineMessage,
    Find,
    Goodbye,
    Hello,
    Keep,
    LeaseRequest,
    LeaseReturn,
    Refused,
    ReplyRead,
    ReplyRelease,
    StopWaiting,
    Unpin,
    Withdraw,
    decode_frontend_message,
)
from shmring.core.printable import printable
from shmring.errors import CapacityError, PeerLostError, RemoteProtocolError
from shmring.gpu.device_claims import DeviceClaims
from shmring.ring import limits
from shmring.ring.life import RingLife
from shmring.ring.moments import Moments
from shmring.ring.untaken import Untaken
from shmring.transport.endpoint import Peer
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch

__all__ = ["CallHandler", "Frontend", "fit_text"]

logger = logger_of("shmring.ring")

#: A control call: positional arguments in, any msgspec-encodable result out.
CallHandler = Callable[..., Awaitable[Any]]

_MAX_ERROR_TEXT = 4096  # characters of an exception's text that travel; the rest is in the engine's log
_CALL_RESULT_NBYTES = 64  # at most, of a call's result around the result itself
_FAILED_NBYTES = 4 * _MAX_ERROR_TEXT + 2048  # at most, of the end of a request and of the release of its slots
_FOUND_NBYTES = MAX_KEPT_PAYLOAD_NBYTES + 64  # at most, of an answer about kept content
_OTHER_UNREAD_NBYTES = 4 << 20  # of leases, and of slots that drained: far more than there are


class Frontend(BaseFrontend):
    """A connected frontend.

    Args:
        life, end: of its engine.
        calls: control calls that it may make, by name.
        device_claims: of the device slab: none or one.
        moments: that pass while it waits for a lease.
        untaken: drops what it has delivered, if nobody takes that.
        carry_out: carries effects of the book out.
        lost: called when nothing more comes from it, with its id.
        client_id: in the book, which knows it already.
        peer: whose socket is taken over.
        watch: of its process; taken over.
        incoming, outgoing: its message rings.

    Attributes:
        connected: whether its connection has neither ended nor said goodbye.
    """

    def __init__(
        self,
        life: RingLife,
        end: EngineEnd,
        calls: Mapping[str, CallHandler],
        device_claims: tuple[DeviceClaims, ...],
        moments: Moments,
        untaken: Untaken,
        carry_out: Callable[[list[EngineEffect]], None],
        lost: Callable[[int], None],
        client_id: int,
        peer: Peer,
        watch: ProcessWatch,
        incoming: RingMemory,
        outgoing: RingMemory,
    ) -> None:
        super().__init__(end, client_id)
        self.pid = peer.pid
        self.name = printable(peer.hello.name)
        self.connected = True
        self.watch = watch
        self._life = life
        self._book = end.book
        self._handlers = calls
        self._device_claims = device_claims
        self._moments = moments
        self._untaken = untaken
        self._carry_out = carry_out
        self._lost = lost
        self._calls: set[asyncio.Task[None]] = set()
        self._goodbyes: list[Goodbye] = []  # the goodbyes so far, which name the memory that it still uses
        self._lingering: socket.socket | None = None  # its socket, which ends when it uses none of that memory any more
        # A frontend that is stopped reads nothing, and is owed the ends of all that it has in flight, and what it waits for.
        owed_nbytes = life.config.max_inflight * _FAILED_NBYTES + (MAX_FINDS + MAX_WAITS) * _FOUND_NBYTES
        max_backlog_nbytes = owed_nbytes + _OTHER_UNREAD_NBYTES
        self.link = Link(
            self,
            peer.socket,
            incoming,
            outgoing,
            life.poller,
            max_backlog_nbytes=max_backlog_nbytes,
            busy_poll_s=life.config.busy_poll_s,
        )
        self.attach(self.link.writer, self.link.reader)

    def __str__(self) -> str:
        return f"client {self.client_id} ({self.name or 'unnamed'}, pid {self.pid})"

    def send(self, message: EngineMessage) -> None:
        self.link.send(message)

    def describe(self, error: BaseException) -> tuple[str, str]:
        """Returns an error's type and text as they can travel, whatever is in them."""
        return type(error).__name__[:256], fit_text(str(error), self._life.record_nbytes)

    # -- what it says --------------------------------------------------------------------------------------------------

    def handle_message(self, record: bytes) -> None:
        """One message, other than a submission, is one event."""
        client_id, book, carry_out, config = self.client_id, self._book, self._carry_out, self._life.config
        message = decode_frontend_message(record)
        match message:
            case Abort(request_id):
                carry_out(book.abort(client_id, request_id))
            case LeaseRequest():
                carry_out(book.request_lease(client_id, message))
                self._moments.begin()
            case LeaseReturn(lease_ids):
                carry_out(book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                carry_out(book.release_replies(client_id, generations))
            case ReplyRead(request_ids):
                carry_out(book.replies_read(client_id, request_ids))
            case Find(token, key, waits, for_one):
                carry_out(book.find(client_id, token, key, waits, for_one))
            case StopWaiting(tokens):
                carry_out(book.stop_waiting(client_id, tokens))
            case Keep():
                check_kept(message, config.max_tensors, config.max_values)
                carry_out(book.keep(client_id, message))
                if message.for_one:
                    self._untaken.begin()
            case Unpin(generations):
                carry_out(book.unpin(client_id, generations))
            case Withdraw(names):
                carry_out(book.withdraw(client_id, names))
            case Call():
                self._call(message)
            case Goodbye():
                self._hear_goodbye(message)
            case Hello():
                raise RemoteProtocolError("Hello was sent a second time")

    def _call(self, call: Call) -> None:
        if len(self._calls) >= limits.MAX_CALLS:
            raise RemoteProtocolError(f"more than max_calls ({limits.MAX_CALLS}) calls were made at a time")
        try:  # here, and not in the task: the time counts toward this frontend's turn
            arguments = decode_values(call.arguments, self._life.config.max_values)
        except (RemoteProtocolError, msgspec.MsgspecError) as error:
            arguments = error
        context = self._life.context.copy()  # a message is heard in that of whoever happens to make the ring look
        task = context.run(self._life.loop.create_task, self._answer_call(call, arguments))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer_call(self, call: Call, arguments: Any) -> None:
        handlers, record_nbytes = self._handlers, self._life.record_nbytes
        try:
            handler = handlers.get(call.method)
            if handler is None:
                raise LookupError(f"this engine has no method {call.method!r}; it has {sorted(handlers)}")
            if isinstance(arguments, Exception):
                raise arguments
            if not isinstance(arguments, list):
                raise msgspec.ValidationError(f"the arguments of a call are an array, not {type(arguments).__name__}")
            encoded = msgspec.msgpack.encode(await handler(*arguments))
            capacity = record_nbytes - _CALL_RESULT_NBYTES
            if len(encoded) > capacity:
                raise CapacityError(
                    f"the result takes {len(encoded)} bytes, and has to fit a message of {record_nbytes}",
                    needed=len(encoded),
                    capacity=capacity,
                )
            check_count("the result", encoded, self._life.config.max_values)
            result = CallResult(call.call_id, encoded)
            with contextlib.suppress(PeerLostError):  # then it goes nowhere
                await self.link.drain()
        except Exception as error:
            # The caller handles the error of a method: it travels there, with its type.
            self._end_call(CallResult(call.call_id, b"", self.describe(error)))
            if not isinstance(error, LookupError | RemoteProtocolError | msgspec.MsgspecError):
                logger.error("the call %s of %s failed: %s: %s", call.method, self, type(error).__name__, printable(str(error)))
                logger.debug("it was raised here", exc_info=error)
        else:
            self._end_call(result)

    def _end_call(self, result: CallResult) -> None:
        # Before its frontend learns of it: that may make the next call before this task counts as ended.
        task = asyncio.current_task()
        assert task is not None
        self._calls.discard(task)
        self.send(result)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _hear_goodbye(self, goodbye: Goodbye) -> None:
        self._goodbyes.append(goodbye)
        if not goodbye.more:
            self.said_goodbye(*self._goodbyes)
            return
        client = self._book.clients[self.client_id]
        named = sum(
            len(part.kept_lease_ids) + len(part.kept_reply_generations) + len(part.pinned_generations)
            for part in self._goodbyes
        )
        there = len(client.leases) + len(client.replies) + len(client.pins) + MAX_FINDS  # also refused slots
        if not len(self._goodbyes) <= named <= there:
            raise RemoteProtocolError("a goodbye in parts keeps more than there is, or nothing in one of them")

    def peer_gave_up(self) -> None:
        """It does not attach."""
        self.said_goodbye(Goodbye())

    def said_goodbye(self, *goodbyes: Goodbye) -> None:
        """From now on, it uses only the memory that it names."""
        self.connected = False
        if not any(goodbye.maps_device_slab for goodbye in goodbyes):
            self._unmapped_device_slab()
        lease_ids = [lease_id for goodbye in goodbyes for lease_id in goodbye.kept_lease_ids]
        generations = [generation for goodbye in goodbyes for generation in goodbye.kept_reply_generations]
        pinned = [generation for goodbye in goodbyes for generation in goodbye.pinned_generations]
        self._carry_out(self._book.goodbye(self.client_id, lease_ids, generations, pinned))
        self.link.close(self._expect_last_use if any(goodbye.lingers for goodbye in goodbyes) else None)

    def _unmapped_device_slab(self) -> None:
        """It does not map the device slab (any more)."""
        for device_claims in self._device_claims:
            device_claims.unmapped(self.client_id)

    def _expect_last_use(self, connected: socket.socket) -> None:
        self._lingering = connected
        if self.client_id in self._book.clients:
            self._life.loop.add_reader(connected.fileno(), self._hear_last_use)
        else:  # it named no memory of its own
            self.forget()

    def _hear_last_use(self) -> None:
        """The socket has ended: the frontend uses no memory any more that its goodbye named. Or it has only rung before the
        goodbye."""
        assert self._lingering is not None
        heard = receive_bells(self._lingering.fileno())
        if not heard:
            return
        self._end_lingering()
        if heard == ENDED:
            self._unmapped_device_slab()
            self._carry_out(self._book.died(self.client_id))

    def _end_lingering(self) -> None:
        if self._lingering is not None:
            self._life.loop.remove_reader(self._lingering.fileno())
            self._lingering.close()
            self._lingering = None

    def forget(self) -> None:
        """It is forgotten, or the ring is closed: its end need not be watched."""
        self.watch.close()
        self._end_lingering()

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """It broke the rules: it is told why, and disconnected."""
        if not self.connected:
            return
        self._life.protocol_errors += 1
        self.dismiss(self.describe(error)[1])
        self._life.note_error(f"{self} broke the protocol and is disconnected: {error}")
        logger.warning("%s broke the protocol and is disconnected: %s", self, error)

    def failed(self, error: BaseException) -> None:
        """This engine has failed in the middle of what it has asked for, or is to be told: it is disconnected."""
        if not self.connected:
            return
        type_name, text = self.describe(error)
        self.dismiss(f"the engine has failed in the middle of a message: {type_name}: {text}")
        self._life.note_error(f"{self} is disconnected: this engine has failed in the middle of a message: {type_name}: {text}")
        logger.error("%s is disconnected: this engine has failed in the middle of a message", self, exc_info=error)

    def dismiss(self, reason: str) -> None:
        """Ends its connection, and tells it why."""
        self.send(Refused(reason))
        self.link.close()
        self.connection_lost()

    def connection_lost(self) -> None:
        """Its connection has ended: its memory is quarantined until its process is dead."""
        self.detach()
        for task in self._calls:
            task.cancel()
        if self.connected:
            self.connected = False
            self._carry_out(self._book.disconnect(self.client_id))
        self._lost(self.client_id)

    def died(self) -> None:
        """The kernel says that its process is dead."""
        self.connected = False
        self.link.abort()
        self._unmapped_device_slab()
        self._carry_out(self._book.died(self.client_id))


def fit_text(text: str, record_nbytes: int) -> str:
    """Returns as much of any text as can travel in records of this size."""
    length = min(_MAX_ERROR_TEXT, record_nbytes // 8)  # a character takes up to four bytes
    return text[:length].encode(errors="replace").decode()  # file names can hold bytes that are no text
