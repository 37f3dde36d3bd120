"""An engine process and its client processes, and running cells on them.

The parent leads them through a cell::

    engine listens -> clients have connected -> all start at one moment -> all have measured -> clients stop -> engine stops

What it does when one of them fails, dies or is silent, and what the processes are, is in :mod:`bench.children`. A child says
in a word how far it has got; the parent says when to start, of ``time.perf_counter_ns``, and when to stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
from numpy.typing import NDArray

from bench.children import BenchError, Parent
from bench.meter import Cost
from bench.peers import RequestPeer
from bench.processes import Part, PeerGroup
from bench.request.load import Load, Phases, come_to_rest
from bench.request.questions import Cell, Desk

__all__ = ["Measurement", "RequestGroup"]

_CONNECTED, _MEASURED, _STOP = "connected", "measured", "stop"


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A child has done its part of a cell: what it measured, and how many requests it ended in all."""

    cost: Cost
    total: int
    latencies_ns: NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a group measured in the timed phase of a cell."""

    engine: Cost
    clients: list[Cost]
    latencies_ns: NDArray[np.int64]

    @property
    def requests(self) -> int:
        """Replies that clients have checked."""
        return sum(client.messages for client in self.clients)

    @property
    def requests_per_s(self) -> float:
        """Of all clients together."""
        return sum(client.messages_per_s for client in self.clients)

    @property
    def engine_us(self) -> float:
        """Microseconds of CPU that a request takes in the engine's process."""
        return self.engine.cpu_s / self.engine.messages * 1e6

    @property
    def client_us(self) -> float:
        """Microseconds of CPU that a request takes in its client's process."""
        return sum(client.cpu_s for client in self.clients) / self.requests * 1e6

    @property
    def cpu_us(self) -> float:
        """Of both."""
        return self.engine_us + self.client_us


class RequestGroup(PeerGroup):
    """An engine and its clients."""

    def __init__(self, peer: RequestPeer, clients: int) -> None:
        super().__init__(peer, clients, ("engine", _answer), ("client", _ask))

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell.

        Raises:
            BenchError: a request or a reply was not what was sent, a process died, or it took longer than
                ``cell.limit_s``. The processes are dead.
        """
        engine, *clients = self._children
        with self._playing(cell.limit_s) as deadline:
            for some in ([engine], clients):  # the engine listens before anybody connects
                self._tell(some, cell, cell.title)
                self._hear(some, deadline, cell.title)
            self._tell(self._children, time.perf_counter_ns(), cell.title)
            self._hear(self._children, deadline, cell.title)
            reports: list[_Finished] = []
            for some in (clients, [engine]):
                self._tell(some, _STOP, cell.title)
                reports += self._hear(some, deadline, cell.title)
            *asked, answered = reports
            if answered.total != (total := sum(report.total for report in asked)):
                raise BenchError(f"{self._title}, {cell.title}: {answered.total} requests were answered, {total} replies came")
        latencies_ns = np.concatenate([report.latencies_ns for report in asked])
        return Measurement(answered.cost, [report.cost for report in asked], latencies_ns)


# -- in the child ------------------------------------------------------------------------------------------------------


async def _answer(part: Part, parent: Parent, cell: Cell) -> _Finished:
    """The engine's part of a cell."""
    desk = Desk(cell)
    phases = Phases(cell, lambda: desk.answered)

    async def serve() -> None:
        await part.peer.serve(cell, part.shared, desk, lambda: parent.tell(_CONNECTED))
        raise RuntimeError("the engine has stopped answering by itself")

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve())
        cost = await phases.measure(await parent.hear())
        parent.tell(_MEASURED)
        await parent.hear()
        serving.cancel()
    return _Finished(cost, desk.answered, np.empty(0, np.int64))


async def _ask(part: Part, parent: Parent, cell: Cell) -> _Finished:
    """A client's."""
    load = Load(cell, part.number)
    async with part.peer.connect(cell, part.shared, part.number) as ask:
        await come_to_rest()
        parent.tell(_CONNECTED)
        start_ns = await parent.hear()
        async with asyncio.TaskGroup() as tasks:
            load.start(tasks, ask)
            cost = await load.phases.measure(start_ns)
            parent.tell(_MEASURED)
            await parent.hear()
            load.stop()
    return _Finished(cost, load.answered, np.array(load.latencies_ns, np.int64))
