"""The processes of one peer: one that receives, and those that send to it; see :mod:`bench.children` for their life.

Of a transport of streams they are a consumer and its producers, of one of requests an engine and its clients. Their parent
has the receiver listen, and then the senders send in all phases. A consumer ends by itself after the last message, an engine
when it is told that all clients have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from contextlib import AbstractContextManager
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.children import BenchError, Child, Children, Parent
from bench.messages import Cell, Measurement, Sink, Source
from bench.meter import Cost, Meter
from bench.peers import Peer, RequestPeer
from bench.request.questions import Client, Desk


@dataclasses.dataclass(frozen=True)
class Part:
    """What a child must know to play its part in every cell.

    Attributes:
        peer: what it uses.
        shared: what the peer made for all of them.
        number: of who sends, from 0; without meaning to who receives.
        moments: of the cell that is run.
    """

    peer: Any
    shared: Any = None
    number: int = 0
    moments: Any = None


class PeerGroup(Children):
    """Processes that use a peer, and end with what it made for them.

    Args:
        peer: what they use; it travels to them.
        ends: how many send.

    Raises:
        BenchError: what the processes share could not be made.
    """

    def __init__(self, peer: Peer | RequestPeer, ends: int = 1) -> None:
        context = get_context("spawn")
        super().__init__(peer.title)
        self._peer = peer
        self._ends = ends
        self._moments = context.RawArray("q", 2)
        roles: list[tuple[str, Any]] = [("consumer", consume)] + [("producer", produce)] * ends
        if isinstance(peer, RequestPeer):
            roles = [("engine", answer)] + [("client", ask)] * ends
        try:
            self._shared = peer.create_shared(context, ends)  # kept: what children inherit is ours to remove
        except Exception as error:  # any of a library's own; it has its place among the results
            raise BenchError(f"{peer.title}: {type(error).__name__}: {error}") from error
        try:
            for number, (role, play) in enumerate(roles, start=-1):
                name = f"{role} {number}" if number >= 0 and ends > 1 else role
                part = Part(peer, self._shared, number, self._moments)
                self.children.append(Child(context, name, peer.name, functools.partial(play, part)))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends all processes at once, and removes what they shared. Twice is once."""
        if not self._ended:
            super().kill()
            self._peer.close_shared(self._shared)

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell, whose ``producers`` are as many as this group has senders.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took longer than ``cell.limit_s``. The
                processes are dead.
        """
        assert cell.producers == self._ends, "a group has the producers of its cells"
        receiver, *senders = self.children
        with self._playing(cell.limit_s) as deadline:
            self._moments[:] = 0, 0
            self._tell([receiver], cell, cell.title)
            self._hear([receiver], deadline, cell.title)  # it listens
            self._tell(senders, cell, cell.title)
            measurement, *costs = self._hear(self.children, deadline, cell.title)
            if isinstance(self._peer, RequestPeer):  # the engine has only said that it has answered the last question
                latencies_ns = [latencies for _, latencies in costs]
                costs = [cost for cost, _ in costs]
                self._tell([receiver], "end", cell.title)
                (measurement,) = self._hear([receiver], deadline, cell.title)
                measurement = dataclasses.replace(measurement, latencies_ns=np.concatenate(latencies_ns))
            result: Measurement = dataclasses.replace(measurement, producers=tuple(costs))
            return result


# -- in the child ------------------------------------------------------------------------------------------------------


async def produce(part: Part, parent: Parent, cell: Cell) -> Cost | None:
    """A producer's part of a cell; returns what it cost."""
    source = Source(cell, part.number, part.moments)
    with _watching(part, source.meter):
        await part.peer.produce(cell, part.shared, source)
    return source.meter.cost


async def consume(part: Part, parent: Parent, cell: Cell) -> Measurement:
    """The consumer's part of a cell."""
    sink = Sink(cell, part.moments)
    with _watching(part, sink.meter):
        await part.peer.consume(cell, part.shared, sink, lambda: parent.tell("listening"))
    return sink.measurement()


async def ask(part: Part, parent: Parent, cell: Cell) -> tuple[Cost | None, NDArray[np.int64]]:
    """A client's; returns what it cost, and its round trips."""
    client = Client(cell, part.number, part.moments)
    async with part.peer.connect(cell, part.shared, part.number) as ask_one:
        await client.ask_all(ask_one)
    return client.source.meter.cost, np.array(client.latencies_ns, np.int64)


async def answer(part: Part, parent: Parent, cell: Cell) -> Measurement:
    """The engine's, which answers until its clients have gone."""
    finished, loop = asyncio.Event(), asyncio.get_running_loop()
    desk = Desk(cell, part.moments, lambda: loop.call_soon_threadsafe(finished.set))

    async def serve() -> None:
        await part.peer.serve(cell, part.shared, desk, lambda: parent.tell("listening"))
        raise RuntimeError("the engine has stopped answering by itself")

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve())
        await finished.wait()
        parent.tell("finished")
        await parent.hear()
        serving.cancel()
    return desk.measurement()


def _watching(part: Part, meter: Meter) -> AbstractContextManager[None]:
    """Has the meter look after the running loop, where the loop is meant to be free for other work."""
    return meter.watched() if part.peer.event_driven else contextlib.nullcontext()
