"""A consumer process and its producer processes, and running cells on them; see :mod:`bench.children` for their life."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

from bench.children import BenchError, Child, Children, Parent
from bench.messages import Cell, Measurement, Sink, Source, Start
from bench.meter import Cost, Meter
from bench.peers import PEERS

__all__ = ["Group", "Part", "consume", "produce"]


@dataclasses.dataclass(frozen=True)
class _Listening:
    """Within a cell: producers may start."""


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A child has done its part of a cell: a consumer with what it measured, a producer with what it cost."""

    measurement: Measurement | None = None
    cost: Cost | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What a child must know to play its part in every cell.

    Attributes:
        peer_name: a key of :data:`bench.peers.PEERS`.
        shared: what the peer made for all of them.
        start_memory: of a :class:`Start`.
        producers: how many there are.
        producer: which of them this is; without meaning to a consumer.
    """

    peer_name: str
    shared: Any = None
    start_memory: Any = None
    producers: int = 1
    producer: int = 0


class Group(Children):
    """A consumer and its producers, of one peer.

    Args:
        peer_name: a key of :data:`bench.peers.PEERS`.
        producers: how many.

    Raises:
        BenchError: what the processes share could not be made.
    """

    def __init__(self, peer_name: str, producers: int = 1) -> None:
        context = get_context("spawn")
        self._peer = PEERS[peer_name]
        super().__init__(self._peer.title)
        self._producers = producers
        start_memory = context.RawArray("q", 2)
        self._start = Start(start_memory)
        try:
            self._shared = self._peer.create_shared(context, producers)  # kept: what children inherit is ours to remove
        except Exception as error:  # any of a library's own; it has its place among the results
            raise BenchError(f"{self._peer.title}: {type(error).__name__}: {error}") from error
        part = Part(peer_name, self._shared, start_memory, producers)
        try:
            play = functools.partial(consume, part)
            self._children.append(Child(context, "consumer", peer_name, play))
            for producer in range(producers):
                play = functools.partial(produce, dataclasses.replace(part, producer=producer))
                name = f"producer {producer}" if producers > 1 else "producer"
                self._children.append(Child(context, name, peer_name, play))
        except BaseException:
            self.kill()
            raise

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell, whose ``producers`` are as many as this group has.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took longer than ``cell.limit_s``. The
                processes are dead.
        """
        assert cell.producers == self._producers, "a group has the producers of its cells"
        what = f"{cell.nbytes:,} bytes, window {cell.window}"
        consumer, *producers = self._children
        with self._playing(cell.limit_s) as deadline:
            self._start.clear()
            self._tell([consumer], cell, what)
            self._hear([consumer], deadline, what)  # it listens
            self._tell(producers, cell, what)
            consumed, *produced = self._hear(self._children, deadline, what)
            measurement: Measurement | None = consumed.measurement
            assert measurement is not None, "a consumer that finishes has measured"
            return dataclasses.replace(measurement, producers=tuple(finished.cost for finished in produced))

    def kill(self) -> None:
        """Ends all processes at once, and removes what they shared. Twice is once."""
        if not self._ended:
            super().kill()
            self._peer.close_shared(self._shared)


# -- in the child ------------------------------------------------------------------------------------------------------


async def produce(part: Part, parent: Parent, cell: Cell) -> _Finished:
    """A producer's part of a cell."""
    source = Source(cell, part.producer, Start(part.start_memory))
    with _watched(part, source.meter):
        await PEERS[part.peer_name].produce(cell, part.shared, source)
    return _Finished(cost=source.meter.cost)


async def consume(part: Part, parent: Parent, cell: Cell) -> _Finished:
    """The consumer's part of a cell."""
    sink = Sink(cell, Start(part.start_memory))
    with _watched(part, sink.meter):
        await PEERS[part.peer_name].consume(cell, part.shared, sink, lambda: parent.tell(_Listening()))
    return _Finished(sink.measurement())


@contextlib.contextmanager
def _watched(part: Part, meter: Meter) -> Iterator[None]:
    """Has the meter look after the running loop, where the loop is meant to be free for other work."""
    if PEERS[part.peer_name].loop_is_free:
        meter.watch(asyncio.get_running_loop())
    try:
        yield
    finally:
        meter.close()
