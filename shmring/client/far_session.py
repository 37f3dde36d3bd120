"""A client's session with an engine on another host, in the place of a :class:`~shmring.client.session.Session`.

Theory of operation: a request is one frame (``transport/far_wire.py``): its tensors go from where they lie into the socket, and
the engine's gateway receives them into a slot. Frames go over a few connections. A frame has its connection until it is sent;
the next request takes another one, or waits. Replies come over their request's connection whenever they are ready, into memory
of this process. One more connection is for what must not wait behind a body: aborts, calls, and what was read of replies.

A request that is given up while it is being sent: its connection is closed, and no other one. If replies to other requests are
still to come there, it is sent to its end, and aborted then.

A session of an engine on this host is made of parts (``link``, ``end``, ``sending``, ...). What clients use of these is here in
one object. What this kind of session can't do raises :class:`LocalProtocolError` that says what to do.

Invariants: the session ends with the first connection that ends by itself; then nothing is in flight. A request counts as in
flight from its turn on until its end has come, or its connection is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import itertools
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from shmring.cancellation import retrieve
from shmring.client.counters import ClientCounters
from shmring.client.far_slot import FarSlot
from shmring.client.far_submission import FarSubmission
from shmring.client.flight import Flight
from shmring.client.life import SessionLife
from shmring.config import ClientConfig
from shmring.core.compiled import ForEngine, check_count, check_payload, decode_values
from shmring.core.messages import Refused, Welcome
from shmring.core.printable import printable, printable_lines
from shmring.door import LARGEST_NBYTES, FarAddress, shown
from shmring.errors import (
    AbortedError,
    CapacityError,
    EngineDeadError,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    ShmringError,
)
from shmring.line import WaitingLine
from shmring.memory.bundles import Bundle, bounds_of, bundle
from shmring.transport.far_wire import (
    HEADER,
    MAX_HEAD_NBYTES,
    WINDOW_NBYTES,
    Abort,
    Call,
    Called,
    Draining,
    End,
    Hello,
    Read,
    Reply,
    Request,
    decode_answer,
    frame,
    hello_bytes,
)
from shmring.transport.streams import Stream

__all__ = ["Access", "FarSession", "Tls", "keeps_nothing", "tls_of"]

#: How connections between hosts are encrypted: by a context, or not at all. None: only those that leave this host have to be.
Tls = ssl.SSLContext | Literal["off"] | None

# For requests. A core sends some GB a second over one; more are for those that wait for a slot at the engine.
_MOST_CONNECTIONS = 4
_MOST_WELCOME_NBYTES = 64 << 10


def tls_of(tls: Any) -> Tls:
    """Returns what a caller says about TLS; else raises TypeError."""
    if tls is None or tls == "off" or isinstance(tls, ssl.SSLContext):
        return tls  # type: ignore[no-any-return]
    raise TypeError(f"tls is an ssl.SSLContext, 'off', or None, not {shown(tls)}")


@dataclasses.dataclass(frozen=True)
class Access:
    """What lets a client of another host in. ``token``: as the engine has it."""

    token: bytes = dataclasses.field(repr=False)
    tls: Tls = None


class _Connection:
    """One connection of a session.

    Attributes:
        stream: it.
        pending: requests that were sent over it and have not ended, also those that were given up here.
        is_taken: whether a request is being sent over it.
        reading: the task that reads what comes.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.pending: dict[int, FarSubmission] = {}
        self.is_taken = False
        self.reading: asyncio.Task[None] | None = None
        self._send_lock = asyncio.Lock()
        self._posted: set[asyncio.Task[None]] = set()

    async def send(self, *parts: Any) -> None:
        """Sends a frame behind those that are being sent."""
        async with self._send_lock:
            await self.stream.send(*parts)

    def post(self, *parts: Any) -> None:
        """Sends a frame, and does not wait for it. If it can't be sent, the reading task learns why."""
        if not self.stream.closed:
            task = asyncio.get_running_loop().create_task(self.send(*parts))
            self._posted.add(task)
            task.add_done_callback(self._posted.discard)
            task.add_done_callback(retrieve)


class FarSession:
    """See the head of this file. Made by :meth:`open`.

    Attributes:
        life: of the engine.
        loop, engine_name, welcome: those of ``life``.
        load: the engine's load, as it was said last.
        pending: requests that have not ended.
    """

    is_far = True
    lost = False
    copies = reply_slots_held = taken_nbytes = unread_nbytes = 0
    slots: tuple[Any, ...] = ()

    def __init__(
        self,
        life: SessionLife,
        address: FarAddress,
        access: Access,
        hello: Hello,
        stream: Stream,
        on_lost: Callable[[Any], object],
    ) -> None:
        self.life = life
        self.loop, self.engine_name, self.welcome = life.loop, life.engine_name, life.welcome
        self.check_alive = life.check_alive
        self.pending: dict[int, FarSubmission] = {}
        self.load = _Load()
        self._address = address
        self._access = access
        self._hello = hello
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._flight = Flight(life.welcome.max_inflight, LARGEST_NBYTES)  # bytes are bounded by the engine
        self._connections: set[_Connection] = set()
        self._opening = 0  # connections
        self._most_connections = _MOST_CONNECTIONS  # fewer, while the engine takes no more
        self._line: WaitingLine[None] = WaitingLine()  # for a connection that is not taken
        self._untold: dict[int, int] = {}  # bytes of replies that were read, by request, and the engine was not told
        self._results: dict[int, asyncio.Future[Any]] = {}  # of calls
        self._free_calls = asyncio.Semaphore(life.welcome.max_calls)
        self.end = self.link = self.writer = self.sending = self.calls = self
        self.kept = _NothingKept()
        self.host_slots = self.device_slots = _OwnMemory(life.engine_name)
        self._control = self._use(stream)  # no request is sent over it
        self._control.is_taken = True

    @classmethod
    async def open(
        cls,
        address: FarAddress,
        access: Access,
        config: ClientConfig,
        description: str,
        counters: ClientCounters,
        on_lost: Callable[[Any], object],
    ) -> FarSession:
        """Connects to the engine at an address.

        Raises:
            EngineDeadError: no engine listens there.
            RemoteProtocolError: it refuses this client.
            PermissionError: its certificate is not to be trusted.
            LocalProtocolError: it is on another host, and nothing was said about TLS.
        """
        hello = Hello(access.token, address.name, secrets.token_bytes(16), description)
        stream, welcome = await _dial(address, access, hello)
        try:
            return cls(SessionLife(str(address), welcome, config, counters), address, access, hello, stream, on_lost)
        except BaseException:
            stream.close()
            raise

    # -- requests ------------------------------------------------------------------------------------------------------------

    async def submit_in_turn(self, payload: object, for_engine: ForEngine) -> FarSubmission:
        """Sends a payload; returns when its last byte is on the way.

        Raises:
            TypeError, CapacityError, EngineDeadError, ClosedError: as :meth:`shmring.Client.request`.
            RemoteProtocolError, PermissionError, LocalProtocolError: no connection for requests is left, and the engine, its
                certificate or its address allows none.
        """
        self.check_alive()
        packed = bundle(payload, **bounds_of(self.welcome))
        nbytes, parts = packed.laid_out()
        if nbytes > self.welcome.leasable_nbytes:
            raise CapacityError(
                f"tensors of {nbytes} bytes are more than engine {self.engine_name!r} can lend at all",
                needed=nbytes,
                capacity=self.welcome.leasable_nbytes,
            )
        await self._flight.begin(0)
        try:
            connection = await self._take_connection()
        except BaseException:
            self._flight.end(0)
            raise
        number = next(self._numbers)
        submission = FarSubmission(
            self.engine_name,
            number,
            for_engine.request_id,
            functools.partial(self._give_up, connection),
            self._reply_taken,
        )
        self.pending[number] = connection.pending[number] = submission
        self.life.counters.submitted += 1
        head = frame(Request(number, for_engine.request_id, packed.payload), nbytes)
        del packed, payload
        sending = self.loop.create_task(connection.send(head, *parts))
        del parts
        sending.add_done_callback(functools.partial(self._sent, connection))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            submission.abort()
            raise
        except OSError as error:
            if not submission.ended:  # else it was aborted by name, and its connection closed for that
                self._lose(self._dead(f"can't be reached any more: {error}"))
                self.check_alive()
        finally:
            del sending
        return submission

    async def _take_connection(self) -> _Connection:
        """Returns a connection over which nothing is being sent, and which is the caller's until its frame is sent."""
        while True:
            self.check_alive()
            free = [each for each in self._connections if not each.is_taken]
            connection = min(free, key=lambda each: len(each.pending), default=None)
            is_full = len(self._connections) + self._opening > self._most_connections  # with the one for control
            if connection is not None and (is_full or not connection.pending):
                connection.is_taken = True
                return connection
            if not is_full:
                await self._open_another()
            else:
                await self._line.wait(lambda _: self._line.give_first(None))

    async def _open_another(self) -> None:
        """Opens one more connection for requests. If that fails, those that there are serve all.

        Raises:
            RemoteProtocolError, PermissionError, LocalProtocolError: there is none, and the engine, its certificate or its
                address does not allow one. Only this request fails.
            EngineDeadError: there is none, and the engine can't be reached; or another engine answers. The session is lost.
        """
        self._opening += 1
        try:
            async with asyncio.timeout(self.life.config.connect_timeout_s):
                stream, welcome = await _dial(self._address, self._access, self._hello)
        except (EngineDeadError, RemoteProtocolError, LocalProtocolError, PermissionError, TimeoutError) as error:
            self.check_alive()
            others = len(self._connections) - 1 + self._opening - 1
            self._most_connections = max(1, others)  # until one more could be opened
            if others:
                return
            if not isinstance(error, EngineDeadError | TimeoutError):
                raise
            self._lose(self._dead(f"can't be reached any more: {error}"))
            raise self.life.fresh_error() from None
        finally:
            self._opening -= 1
            self._line.give_first(None)
        if welcome.epoch != self.welcome.epoch or self.life.error is not None:
            stream.close()
            self._lose(self._dead("has started again"))
            raise self.life.fresh_error()
        self._most_connections = _MOST_CONNECTIONS
        self._use(stream)

    def _use(self, stream: Stream) -> _Connection:
        connection = _Connection(stream)
        self._connections.add(connection)
        connection.reading = self.loop.create_task(self._read(connection))
        return connection

    def _sent(self, connection: _Connection, sending: asyncio.Task[None]) -> None:
        retrieve(sending)
        connection.is_taken = False
        self._line.give_first(None)

    def _give_up(self, connection: _Connection, submission: FarSubmission) -> None:
        """A submission was aborted: its caller has its error already."""
        self.life.counters.aborted += 1
        self.pending.pop(submission.request_id, None)
        if submission.request_id not in connection.pending:
            return  # its end has come, or its connection has gone
        if connection.is_taken and len(connection.pending) == 1:
            self._drop(connection)  # this is the one that is being sent
        else:
            self._control.post(frame(Abort(submission.request_id)))
            connection.post(frame(Abort(submission.request_id)))  # if it is not submitted yet, this one finds it

    def _drop(self, connection: _Connection) -> None:
        """Closes a connection, and no other one. Its requests are over."""
        self._connections.discard(connection)
        connection.stream.close()
        for _ in connection.pending:
            self._flight.end(0)
        connection.pending.clear()
        self._line.give_first(None)

    def _reply_taken(self, submission: FarSubmission, nbytes: int) -> None:
        """A caller has taken a reply: the gateway, which waits when too many are not read, is told now and then."""
        if submission.ended:
            return
        untold = self._untold.get(submission.request_id, 0) + nbytes
        if untold >= WINDOW_NBYTES // 4:
            self._control.post(frame(Read(submission.request_id, untold)))
            untold = 0
        self._untold[submission.request_id] = untold

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        """Calls a control method of the engine; see :meth:`shmring.Client.call`."""
        self.check_alive()
        encoded = msgspec.msgpack.encode(arguments)
        if len(encoded) > self.welcome.max_record_nbytes:
            raise CapacityError(
                f"the arguments of {method} take {len(encoded)} bytes",
                needed=len(encoded),
                capacity=self.welcome.max_record_nbytes,
            )
        check_count(f"the arguments of {method}", encoded, self.welcome.max_values)
        await self._free_calls.acquire()  # until the engine has answered, even if the caller no longer waits
        if self.life.error is not None:
            self._free_calls.release()  # so that the next one that waits learns it, too
        self.check_alive()
        number = next(self._numbers)
        future = self._results[number] = self.loop.create_future()
        self._control.post(frame(Call(number, method, encoded)))
        try:
            return await future
        finally:
            del future  # it holds its error, whose traceback holds this frame

    # -- what comes ----------------------------------------------------------------------------------------------------------

    async def _read(self, connection: _Connection) -> None:
        stream = connection.stream
        error: EngineDeadError | None = None
        header = bytearray(HEADER.size)
        try:
            while True:
                await stream.fill(memoryview(header), len(header))
                head_nbytes, body_nbytes = HEADER.unpack(header)
                if head_nbytes > self.welcome.max_payload_nbytes + MAX_HEAD_NBYTES or body_nbytes > self.welcome.slab_nbytes:
                    raise RemoteProtocolError(f"a frame of {head_nbytes} and {body_nbytes} bytes is larger than any")
                head = bytearray(head_nbytes)
                await stream.fill(memoryview(head), head_nbytes)
                body = np.empty(body_nbytes, np.uint8)
                await stream.fill(body.data, body_nbytes)
                self._came(connection, decode_answer(head), body)
                del head, body  # or this frame would keep their memory until more has come
        except (OSError, EOFError) as lost:
            error = self._dead(f"closed the connection, or died: {lost}")
        except (RemoteProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as wrong:
            error = self._dead(f"broke the protocol: {wrong}")
        finally:
            if connection in self._connections and error is not None:
                self._lose(error)

    def _came(self, connection: _Connection, answer: Reply | End | Called | Draining | Welcome | Refused, body: Any) -> None:
        match answer:
            case Reply(number, payload):
                check_payload(payload, self.welcome.max_tensors, self.welcome.max_values)
                submission = self._sent_over(connection, number)
                self.life.counters.replies += 1
                submission.replied([Bundle(payload, (0,), body) if len(body) else Bundle(payload, ())])
            case End(number, load, failed):
                submission = self._sent_over(connection, number)
                self.load = _Load(*load[:2], draining=load[2] or self.load.draining)  # an End may be late
                self._flight.end(0)
                del connection.pending[number]
                self.pending.pop(number, None)
                self._untold.pop(number, None)
                if not submission.ended:
                    error = None if failed is None else _error_of(submission, *failed)
                    self._count_end(error)
                    submission.end(error)
            case Called(number, result, failed):
                # It raises while it is known who waits.
                value = None if failed is not None else decode_values(result, self.welcome.max_values)
                future = self._results.pop(number, None)
                if future is None:
                    raise RemoteProtocolError(f"call {number} ended, which is not in flight")
                self._free_calls.release()
                if future.done():
                    return  # its caller waits no longer
                if failed is not None:
                    future.set_exception(RemoteError(printable(failed[0]), printable_lines(failed[1])))
                else:
                    future.set_result(value)
            case Draining():
                self.load.draining = True
            case _:
                raise RemoteProtocolError(f"{type(answer).__name__} was sent a second time")

    def _sent_over(self, connection: _Connection, number: int) -> FarSubmission:
        submission = connection.pending.get(number)
        if submission is None:
            raise RemoteProtocolError(f"request {number} was answered, which is not in flight there")
        return submission

    def _count_end(self, error: Exception | None) -> None:
        if isinstance(error, AbortedError):
            self.life.counters.aborted += 1
        elif error is not None:
            self.life.counters.failed += 1
        else:
            self.life.counters.finished += 1

    # -- the end -------------------------------------------------------------------------------------------------------------

    def _dead(self, how: str) -> EngineDeadError:
        return EngineDeadError(f"the engine {self.engine_name!r} {printable(how)}", engine=self.engine_name)

    def _lose(self, error: ShmringError) -> None:
        """Ends the session: all calls that wait in it fail with this error."""
        if self.life.error is not None:
            return
        self.lost = True
        self.life.error = self.life.home.closed_error() if self.life.home.is_closed else error
        for connection in list(self._connections):
            self._drop(connection)
        for submission in list(self.pending.values()):
            self._count_end(error)
            submission.end(self.life.fresh_error())
        self.pending.clear()
        self._flight.close(self.life.error)
        for place, _ in self._line.waiting():
            place.set_exception(self.life.fresh_error())
        for future in self._results.values():
            self._free_calls.release()
            if not future.done():
                future.set_exception(self.life.fresh_error())
        self._results.clear()
        self._on_lost(self)

    @property
    def error(self) -> ShmringError | None:
        """Why this has ended; None: it has not."""
        return self.life.error

    async def close(self) -> None:
        """Gives up what is in flight, and closes the connections. A second call does nothing."""
        if self.life.error is not None:
            return
        self.life.home.is_closed = True
        readings = [each.reading for each in self._connections if each.reading is not None]
        self._lose(self.life.home.closed_error())
        if readings:
            await asyncio.wait(readings)

    # -- what clients use of the other kind of session -------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests of this session, those included that wait for their turn to be sent."""
        return self._flight.requests + self._flight.waiting

    def find_held(self, payload: object) -> None:
        """No tensors lie in slots there."""

    async def prefaulted(self) -> None:
        """No slab is mapped."""

    def why_not_sent(self) -> str:
        """Says for what an unsent request is waiting."""
        return f"the engine on another host to read; {self._flight.requests} requests of this client are in flight"

    def submit_nowait(self, *_: object, **__: object) -> Any:
        """Raises LocalProtocolError."""
        raise LocalProtocolError(f"engine {self.engine_name!r} is on another host, and sending there waits: use submit()")

    async def submit_unless_full(self, *_: object, **__: object) -> Any:
        """Raises LocalProtocolError."""
        self.submit_nowait()


@dataclasses.dataclass
class _Load:
    """An engine's load, as it was said with the end of a request. ``draining``: it never ends to drain."""

    in_flight: int = 0
    waiting: int = 0
    draining: bool = False


class _OwnMemory:
    """Slots of a far session: memory of this process. ``book`` is this as well."""

    held = ()

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.book = self

    async def acquire(self, nbytes: int, *, held: bool) -> int:
        """There is always room."""
        return nbytes

    def acquire_nowait(self, nbytes: int, *, held: bool, ask: bool) -> int:
        """There is always room."""
        return nbytes

    def hold(self, nbytes: int, *, drain: bool) -> FarSlot:
        """Returns a slot for a caller."""
        return FarSlot(self._engine, nbytes)

    def split(self, _: int, sizes: Iterable[int]) -> list[int]:
        """Returns the slots that were acquired together."""
        return list(sizes)

    def count(self, _: object) -> int:
        """Of the slab, it has no slots."""
        return 0

    def check_capacity(self, _: int) -> None:
        """There is always room."""

    def opened(self, _: int) -> Any:
        """Raises LocalProtocolError."""
        raise LocalProtocolError(
            f"engine {self._engine!r} is on another host, which a GPU here can't write to: use device='cpu'"
        )

    async def open(self, index: int) -> Any:
        """Raises LocalProtocolError."""
        return self.opened(index)


class _NothingKept:
    """Kept content, of a far session: only clients on the engine's host find some, and give it some."""

    def __len__(self) -> int:
        return 0

    async def find(self, *_: object) -> None:
        """Nothing is found."""

    async def find_many(self, *_: object) -> dict[bytes, Any]:
        """Nothing is found."""
        return {}

    def find_nowait(self, *_: object) -> None:
        """Nothing is found."""

    async def wait(self, *_: object) -> Any:
        """Raises LocalProtocolError."""
        raise keeps_nothing()

    keep = deliver = take = wait

    def withdraw(self, *_: object) -> None:
        """Nothing was delivered."""


def keeps_nothing() -> LocalProtocolError:
    """Returns the error of callers who keep content from another host."""
    return LocalProtocolError("the engine is on another host: only clients on its own host keep content there, or wait for it")


def _error_of(submission: FarSubmission, kind: str, type_name: str, text: str) -> Exception:
    if kind == "aborted":
        return AbortedError(f"request {submission.request_id} was aborted", request_id=submission.name or submission.request_id)
    if kind == "timed_out":
        return TimeoutError(printable_lines(text))
    return RemoteError(printable(type_name), printable_lines(text))


async def _dial(address: FarAddress, access: Access, hello: Hello) -> tuple[Stream, Welcome]:
    """Connects, and says hello. Raises as :meth:`FarSession.open`."""

    def unreachable(error: BaseException) -> EngineDeadError:
        return EngineDeadError(f"no engine answers at {address}: {error}", engine=str(address))

    try:
        connected = await _connected(address)
        try:
            connected = _encrypted(connected, address, access)
            stream = Stream(connected)
        except BaseException:
            connected.close()
            raise
        try:
            return stream, await _greet(stream, address, hello)
        except BaseException:
            stream.close()
            raise
    except ssl.SSLCertVerificationError as error:
        raise PermissionError(f"the engine at {address} is not to be trusted: {error}") from error
    except ssl.SSLError as error:
        raise RemoteProtocolError(f"the engine at {address} does not speak TLS as this client does: {error}") from error
    except (OSError, EOFError) as error:
        raise unreachable(error) from error


async def _connected(address: FarAddress) -> socket.socket:
    """Returns a socket that is connected to the first of a host's addresses that answers."""
    loop = asyncio.get_running_loop()
    places = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in places:
        connected = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            await loop.sock_connect(connected, place)
        except BaseException as error:
            connected.close()
            if not isinstance(error, OSError) or place is places[-1][4]:
                raise
        else:
            return connected
    raise OSError("the host has no address")


def _encrypted(connected: socket.socket, address: FarAddress, access: Access) -> socket.socket:
    if isinstance(access.tls, ssl.SSLContext):
        return access.tls.wrap_socket(connected, server_hostname=address.host, do_handshake_on_connect=False)
    if access.tls is None and not ipaddress.ip_address(connected.getpeername()[0].partition("%")[0]).is_loopback:
        raise LocalProtocolError(
            f"{address} is another host, and what goes there could be read on the way: give tls=, an ssl.SSLContext, or "
            "tls='off'"
        )
    return connected


async def _greet(stream: Stream, address: FarAddress, hello: Hello) -> Welcome:
    await stream.handshake()
    await stream.send(hello_bytes(hello))
    header = bytearray(HEADER.size)
    await stream.fill(memoryview(header), len(header))
    head_nbytes, body_nbytes = HEADER.unpack(header)
    if head_nbytes > _MOST_WELCOME_NBYTES or body_nbytes:
        raise RemoteProtocolError(f"what listens at {address} is no engine of shmring")
    head = bytearray(head_nbytes)
    await stream.fill(memoryview(head), head_nbytes)
    match decode_answer(head):
        case Welcome() as welcome:
            return welcome
        case Refused(reason):
            raise RemoteProtocolError(f"the engine at {address} refuses this client: {printable(reason)}")
        case _:
            raise RemoteProtocolError(f"what listens at {address} answers before it was asked")
