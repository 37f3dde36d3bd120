"""What the shells stand on in a simulation, in place of sockets, pidfds and threads.

The shells themselves are the product's: they make these where they would make the real ones, see :func:`standing_on`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from shmring.cancellation import uninterrupted
from shmring.core.compiled import LinkReader, Mapping, Packed, RecordWriter, ring_nbytes
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks
from shmring.core.messages import EngineMessage, FrontendMessage
from shmring.errors import PeerLostError, RemoteProtocolError
from shmring.memory.copier import Copier
from tests.simulation.midst import Midst
from tests.simulation.scenario import Violation
from tests.simulation.wire import Wire


class standing_on:
    """Lets a module of the product make these, by the names that it has for them. A class: worlds are made by the thousand."""

    def __init__(self, module: ModuleType, **others: object) -> None:
        self._names, self._others = vars(module), others
        self._real = {name: self._names[name] for name in others}

    def __enter__(self) -> None:
        self._names.update(self._others)

    def __exit__(self, *_: object) -> None:
        self._names.update(self._real)


@dataclasses.dataclass(slots=True, eq=False)
class Connected:
    """In place of one end's socket.

    Attributes:
        wire: of which it is an end.
        is_engines: whether it is the engine's.
        midst: of the calls in which somebody looks for what has come.
    """

    wire: Wire
    is_engines: bool
    midst: Midst


class End:
    """One end of a connection: what :class:`shmring.transport.link.Link` is to its owner.

    One record is delivered when the simulation says so, or when a call looks and is to find some. Room for more is there, and
    is said to be, when the other end has taken a record.
    """

    bells = 0

    def __init__(
        self,
        owner: Any,
        connected: Connected,
        incoming: object,
        outgoing: object,
        poller: object,
        *,
        max_backlog_nbytes: int,
        busy_poll_s: float,
    ) -> None:
        wire = connected.wire
        self.lost = False
        self.reader = _always_news()
        self._midst = connected.midst
        self._owner = owner
        self._loop: Any = asyncio.get_running_loop()
        self._outgoing, self._incoming = wire.towards_frontend, wire.towards_engine
        self._close_wire = wire.close_engine
        self._is_engines = connected.is_engines
        if not connected.is_engines:
            self._outgoing, self._incoming = self._incoming, self._outgoing
            self._close_wire = wire.close_frontend
        self.writer = self._outgoing.writer
        self.largest_record_nbytes = self._outgoing.largest_nbytes
        self.writable = asyncio.Event()  # who waits for room waits for this
        self._outgoing.room_changed = self._room_changed
        self._room_changed()

    def _room_changed(self) -> None:
        if self.can_write:
            self._loop.is_touched = True
            self.writable.set()
        else:
            self.writable.clear()

    def start(self) -> None:
        """Begins to read: when the simulation says so."""

    # -- sending -------------------------------------------------------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        return self.lost or self._outgoing.can_write

    async def drain(self) -> None:
        while not self.writable.is_set():
            await self.writable.wait()
        if self.lost:
            raise PeerLostError("the connection has ended")

    def expect_space(self) -> None:
        """There is room again when a record was taken."""

    def published(self) -> None:
        self._outgoing.published()

    def queue(self, record: bytes) -> None:
        if not self.lost:
            self._outgoing.queue(record)

    def send(self, message: FrontendMessage | EngineMessage) -> None:
        if not self.lost:
            self._outgoing.send(message)

    def send_listed(self, make: Callable[[tuple[int, ...]], FrontendMessage | EngineMessage], numbers: Sequence[int]) -> None:
        for part in self.split(numbers):
            self.send(make(part))

    def split(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(numbers)] if numbers else []

    # -- receiving -----------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Somebody looks for what has come."""
        for _ in range(self._midst.look(len(self._incoming.records))):
            if self.lost:
                break
            self.deliver()

    def deliver(self) -> None:
        """One record is read."""
        record = self._incoming.take()
        take = self._owner.handle_record
        try:
            (take if callable(take) else take.handle_record)(record)
        except RemoteProtocolError as error:
            self.violated(error)

    def violated(self, error: RemoteProtocolError) -> None:
        if not self._is_engines:
            raise Violation(f"an honest engine is accused: {error}")
        self._owner.protocol_violated(error)

    def failed(self, error: BaseException) -> None:
        raise error

    def fail_soon(self, error: BaseException) -> None:
        raise error

    def break_off(self, error: RemoteProtocolError) -> None:
        raise Violation(f"a ring is spoiled: {error}")

    # -- the end -------------------------------------------------------------------------------------------------------------

    def close(self, heir: object = None) -> None:
        """Ends the connection, from this end or because the other one has ended it; its owner hears of it."""
        if not self.lost:
            self.lost = True
            self._close_wire()
            self._room_changed()
            self._loop.call_soon(self._owner.connection_lost)

    abort = close


def _always_news() -> LinkReader:
    """Returns the reader of a ring in which there is something, and which is asleep: who looks there has the end polled."""
    memory = bytearray(ring_nbytes(64))
    RecordWriter(memory, -1).write(b"")
    return LinkReader(memory, -1)


class Watch:
    """In place of a pidfd that is watched."""

    def __init__(self, loop: object, pidfd: int, on_death: Callable[[], object]) -> None:
        self._on_death = on_death
        self.is_open = True
        self.has_fired = False

    def fire(self) -> None:
        """The kernel says that the process is dead."""
        self.has_fired = True
        self.close()
        self._on_death()

    def close(self) -> None:
        self.is_open = False


@dataclasses.dataclass(slots=True, eq=False)
class Copying:
    """A copy that a thread makes: nothing is written before it ends, which is as late as may be.

    Attributes:
        task: that waits for it.
        start, blocks: where it writes, in blocks of the slab.
        work: makes it.
        ended: is set when it is made.
    """

    task: asyncio.Task[Any] | None
    start: int
    blocks: int
    work: Callable[[], Any]
    ended: asyncio.Future[Any]


class CopyingThreads(Copier):
    """The product's copier, whose threads work when the simulation says so.

    Attributes:
        running: copies that have begun and not ended.
        aside: makes a copy at once and returns True, or returns False; its task then goes on in a later turn.
    """

    aside: Callable[[Packed, Mapping, int], bool] | None = None

    def __init__(self, threads: int, offload_nbytes: int) -> None:
        super().__init__(threads, offload_nbytes)
        self.running: list[Copying] = []
        self._to = 0, 0

    async def copy(self, packed: Packed, mapping: Mapping, address: int) -> None:
        if self.aside is not None and self.aside(packed, mapping, address):
            await asyncio.sleep(0)
            return
        self._to = (address - mapping.address) // BLOCK_NBYTES, slot_blocks(packed.slot_nbytes)
        await super().copy(packed, mapping, address)

    async def run(self, work: Callable[[], Any]) -> Any:
        ended = asyncio.get_running_loop().create_future()
        self.running.append(Copying(asyncio.current_task(), *self._to, work, ended))  # no frame of the task's keeps its task
        return await uninterrupted(ended)

    def end(self, index: int) -> None:
        """A copy has been made."""
        copying = self.running.pop(index)
        copying.ended.set_result(copying.work())

    def abandon(self) -> None:
        """The process ends, and with it its threads."""
        for copying in self.running:
            copying.ended.set_result(None)
        self.running.clear()
        self.close()
