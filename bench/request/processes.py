"""An engine process and its client processes, and running cells on them.

The parent leads them through a cell::

    engine listens -> clients have connected -> all start at one moment -> all have measured -> clients stop -> engine stops

What it does when one of them fails, dies or is silent, and what the processes are, is in :mod:`bench.children`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import time
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.children import BenchError, Child, Children, Parent
from bench.meter import Cost
from bench.peers import RequestPeer
from bench.request.load import Load, Phases, come_to_rest
from bench.request.questions import Cell, Desk

__all__ = ["Group", "Measurement"]


class _Step(enum.Enum):
    """What a child says when it has got that far in a cell."""

    CONNECTED = "connecting"
    MEASURED = "measuring"


@dataclasses.dataclass(frozen=True)
class _Start:
    """What the parent says when the load begins."""

    at_ns: int


@dataclasses.dataclass(frozen=True)
class _Stop:
    """What the parent says when it is over."""


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


class Group(Children):
    """The processes of one peer.

    Args:
        peer: what they use; it travels to them.
        clients: how many processes ask.
    """

    def __init__(self, peer: RequestPeer, clients: int) -> None:
        context = get_context("spawn")
        super().__init__(peer.title)
        self._shared = peer.create_shared(context, clients)  # kept: what the children inherit is ours to remove
        try:
            for client in (None, *range(clients)):
                name = "engine" if client is None else f"client {client}"
                play = functools.partial(_play, peer, self._shared, client)
                self._children.append(Child(context, name, peer.name, play))
        except BaseException:
            self.kill()
            raise

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell.

        Raises:
            BenchError: a request or a reply was not what was sent, a process died, or it took longer than
                ``cell.limit_s``. The processes are dead.
        """
        with self._playing(cell.limit_s) as deadline:
            return self._run(cell, deadline)

    def _run(self, cell: Cell, deadline: float) -> Measurement:
        what = f"{cell.nbytes:,} bytes, {cell.in_flight} in flight, clients: {cell.clients}"
        engine, *clients = self._children
        for some in ([engine], clients):  # the engine listens before anybody connects
            self._tell(some, cell, what)
            self._hear(some, deadline, what)
        self._tell(self._children, _Start(time.perf_counter_ns()), what)
        self._hear(self._children, deadline, what)
        reports: list[_Finished] = []
        for some in (clients, [engine]):
            self._tell(some, _Stop(), what)
            reports += self._hear(some, deadline, what)
        *client_reports, engine_report = reports
        total = sum(report.total for report in client_reports)
        if engine_report.total != total:
            raise BenchError(f"{self._title}, {what}: {engine_report.total} requests were answered, {total} replies came")
        return Measurement(
            engine_report.cost,
            [report.cost for report in client_reports],
            np.concatenate([report.latencies_ns for report in client_reports]),
        )


# -- in the child ------------------------------------------------------------------------------------------------------


async def _play(peer: RequestPeer, shared: Any, client: int | None, parent: Parent, cell: Cell) -> _Finished:
    """A child's part of a cell. The engine has no number."""
    if client is None:
        return await _answer(peer, shared, parent, cell)
    return await _ask(peer, shared, client, parent, cell)


async def _answer(peer: RequestPeer, shared: Any, parent: Parent, cell: Cell) -> _Finished:
    desk = Desk(cell)
    phases = Phases(cell, lambda: desk.answered)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(_serve(peer, cell, shared, desk, parent))
        cost = await phases.measure((await parent.hear()).at_ns)
        parent.tell(_Step.MEASURED)
        await parent.hear()
        serving.cancel()
    return _Finished(cost, desk.answered, np.empty(0, np.int64))


async def _serve(peer: RequestPeer, cell: Cell, shared: Any, desk: Desk, parent: Parent) -> None:
    await peer.serve(cell, shared, desk, lambda: parent.tell(_Step.CONNECTED))
    raise RuntimeError("the engine has stopped answering by itself")


async def _ask(peer: RequestPeer, shared: Any, client: int, parent: Parent, cell: Cell) -> _Finished:
    load = Load(cell, client)
    async with peer.connect(cell, shared, client) as ask:
        await come_to_rest()
        parent.tell(_Step.CONNECTED)
        start = await parent.hear()
        async with asyncio.TaskGroup() as tasks:
            load.start(tasks, ask)
            cost = await load.phases.measure(start.at_ns)
            parent.tell(_Step.MEASURED)
            await parent.hear()
            load.stop()
    return _Finished(cost, load.answered, np.array(load.latencies_ns, np.int64))
