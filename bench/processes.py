"""The processes of one peer: one that receives, and those that send to it; see :mod:`bench.children` for their life.

:class:`StreamGroup` is a consumer and its producers. An engine and its clients are in :mod:`bench.request.processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import get_context
from typing import Any

from bench.children import BenchError, Child, Children, Parent
from bench.messages import Cell, Measurement, Sink, Source, Start
from bench.meter import Cost, Meter
from bench.peers import Peer
from bench.peers.peer import Adapter

__all__ = ["Part", "PeerGroup", "StreamGroup", "consume", "produce"]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a child must know to play its part in every cell.

    Attributes:
        peer: what it uses.
        shared: what the peer made for all of them.
        number: of who sends, from 0; without meaning to who receives.
        start_memory: of a :class:`Start`.
    """

    peer: Any
    shared: Any = None
    number: int = 0
    start_memory: Any = None


class PeerGroup(Children):
    """Processes that use a peer, and end with what it made for them.

    Args:
        peer: what they use; it travels to them.
        ends: how many send.
        receiver, sender: what each does, and how it is called.
        start_memory: for a :class:`Part`.

    Raises:
        BenchError: what the processes share could not be made.
    """

    def __init__(
        self,
        peer: Adapter,
        ends: int,
        receiver: tuple[str, Callable[[Part, Parent, Any], Coroutine[Any, Any, Any]]],
        sender: tuple[str, Callable[[Part, Parent, Any], Coroutine[Any, Any, Any]]],
        start_memory: Any = None,
    ) -> None:
        context = get_context("spawn")
        super().__init__(peer.title)
        self._peer = peer
        self._ends = ends
        try:
            self._shared = peer.create_shared(context, ends)  # kept: what children inherit is ours to remove
        except Exception as error:  # any of a library's own; it has its place among the results
            raise BenchError(f"{peer.title}: {type(error).__name__}: {error}") from error
        try:
            for number, (role, play) in enumerate([receiver] + [sender] * ends, start=-1):
                name = f"{role} {number}" if number >= 0 and ends > 1 else role
                part = Part(peer, self._shared, number, start_memory)
                self._children.append(Child(context, name, peer.name, functools.partial(play, part)))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends all processes at once, and removes what they shared. Twice is once."""
        if not self._ended:
            super().kill()
            self._peer.close_shared(self._shared)


class StreamGroup(PeerGroup):
    """A consumer and its producers."""

    def __init__(self, peer: Peer, producers: int = 1) -> None:
        start_memory = get_context("spawn").RawArray("q", 2)
        self._start = Start(start_memory)
        super().__init__(peer, producers, ("consumer", consume), ("producer", produce), start_memory)

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell, whose ``producers`` are as many as this group has.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took longer than ``cell.limit_s``. The
                processes are dead.
        """
        assert cell.producers == self._ends, "a group has the producers of its cells"
        consumer, *producers = self._children
        with self._playing(cell.limit_s) as deadline:
            self._start.clear()
            self._tell([consumer], cell, cell.title)
            self._hear([consumer], deadline, cell.title)  # it listens
            self._tell(producers, cell, cell.title)
            measurement: Measurement
            measurement, *costs = self._hear(self._children, deadline, cell.title)
            return dataclasses.replace(measurement, producers=tuple(costs))


# -- in the child ------------------------------------------------------------------------------------------------------


async def produce(part: Part, parent: Parent, cell: Cell) -> Cost | None:
    """A producer's part of a cell; returns what it cost."""
    source = Source(cell, part.number, Start(part.start_memory))
    with _watched(part.peer, source.meter):
        await part.peer.produce(cell, part.shared, source)
    return source.meter.cost


async def consume(part: Part, parent: Parent, cell: Cell) -> Measurement:
    """The consumer's part of a cell."""
    sink = Sink(cell, Start(part.start_memory))
    with _watched(part.peer, sink.meter):
        await part.peer.consume(cell, part.shared, sink, lambda: parent.tell("listening"))
    return sink.measurement()


@contextlib.contextmanager
def _watched(peer: Peer, meter: Meter) -> Iterator[None]:
    """Has the meter look after the running loop, where the loop is meant to be free for other work."""
    if peer.loop_is_free:
        meter.watch(asyncio.get_running_loop())
    try:
        yield
    finally:
        meter.close()
