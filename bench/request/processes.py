"""An engine process and its client processes, and running cells on them.

All are spawned (not forked), run uvloop, live for the whole benchmark and sleep in a read of their control pipe between
cells. A cell is a fresh event loop, fresh connections and a fresh slab in each. The parent leads them through it::

    engine listens -> clients have connected -> all start at one moment -> all have measured -> clients stop -> engine stops

Every wait of the parent is bounded and also ends with the children; a group that failed in any way is killed as a whole,
since nobody knows what state it is in. The children leave Ctrl-C to the parent, and end by themselves when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray

from bench.processes import BenchError
from bench.request.load import Cost, Load, Meter, come_to_rest
from bench.request.peers import Peer
from bench.request.questions import Cell, Desk

__all__ = ["Group", "Measurement"]

_START_LIMIT_S = 180.0  # for a process to import torch, on a machine where several do, or that does much else
_GRACE_S = 5.0  # for a process to end by itself, or to report its own timeout
_SECOND_REPORT_S = 1.0  # for the other processes to say what they saw of a failure


class _Step(enum.Enum):
    """What a child says when it has got that far."""

    READY = "starting"
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
class _Failed:
    """A child's part of a cell has failed: what happened, in words."""

    error: str


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a group measured in the timed phase of a cell."""

    engine: Cost
    clients: list[Cost]
    latencies_ns: NDArray[np.int64]

    @property
    def requests(self) -> int:
        """Replies that clients have checked."""
        return sum(client.requests for client in self.clients)

    @property
    def requests_per_s(self) -> float:
        """Of all clients together."""
        return sum(client.requests_per_s for client in self.clients)

    @property
    def engine_us(self) -> float:
        """Microseconds of CPU that a request takes in the engine's process."""
        return self.engine.cpu_s / self.engine.requests * 1e6

    @property
    def client_us(self) -> float:
        """Microseconds of CPU that a request takes in its client's process."""
        return sum(client.cpu_s for client in self.clients) / self.requests * 1e6


class _Child:
    """One of the processes, as their parent sees it. The engine has no number."""

    def __init__(self, context: SpawnContext, peer: Peer, shared: Any, client: int | None) -> None:
        self.role = "engine" if client is None else f"client {client}"
        self.control, control = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_run_child, args=(peer, shared, client, control), name=f"bench-{peer.name}-{self.role}", daemon=True
        )
        self.process.start()
        control.close()  # the child has its own; were this end open, its death would not be an end of file

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.control.close()


class Group:
    """The processes of one peer. Use it with ``with``; :meth:`start` waits until all are ready.

    Args:
        peer: what they use; it travels to them.
        clients: how many processes ask.
    """

    def __init__(self, peer: Peer, clients: int) -> None:
        context = get_context("spawn")
        self._title = peer.title
        self._shared = peer.create_shared(context, clients)  # kept: what the children inherit is ours to remove
        self._children: list[_Child] = []
        self._ended = False
        try:
            for client in (None, *range(clients)):
                self._children.append(_Child(context, peer, self._shared, client))
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[SpawnProcess]:
        """The engine, and the clients."""
        return [child.process for child in self._children]

    def start(self) -> None:
        """Waits until all processes are ready.

        Raises:
            BenchError: one did not start.
        """
        self._hear(self._children, time.monotonic() + _START_LIMIT_S, _Step.READY.value)

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell.

        Raises:
            BenchError: a request or a reply was not what was sent, a process died, or it took longer than
                ``cell.limit_s``. The processes are dead.
        """
        if self._ended:
            raise BenchError(f"{self._title}: its processes were ended after a failure")
        try:
            return self._run(cell, time.monotonic() + cell.limit_s + _GRACE_S)
        except BaseException:
            self.kill()
            raise

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
        *asked, answered = reports
        total = sum(report.total for report in asked)
        if answered.total != total:
            raise BenchError(f"{self._title}, {what}: {answered.total} requests were answered, {total} replies came")
        return Measurement(
            answered.cost,
            [report.cost for report in asked],
            np.concatenate([report.latencies_ns for report in asked]),
        )

    def _tell(self, children: Sequence[_Child], message: object, what: str) -> None:
        for child in children:
            try:
                child.control.send(message)
            except OSError:
                self._died(child, what)

    def _hear(self, children: Sequence[_Child], deadline: float, what: str) -> list[Any]:
        """Waits for the next report of each; raises what one says of a failure, its silence or its death."""
        waiting: dict[Any, _Child] = {child.control: child for child in children}
        reports: dict[str, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), _until(deadline))  # a dead child's pipe is ready, too
            if not ready:
                roles = ", ".join(child.role for child in waiting.values())
                raise BenchError(f"{self._title}, {what}: not finished in time: {roles}")
            for control in ready:
                child = waiting.pop(control)
                reports[child.role] = self._receive(child, what)
        return [reports[child.role] for child in children]

    def _receive(self, child: _Child, what: str) -> Any:
        try:
            report = child.control.recv()
        except (EOFError, OSError):
            self._died(child, what)
        if isinstance(report, _Failed):
            raise BenchError(f"{self._title}, {what}: {self._failures(child, report)}")
        return report

    def _died(self, child: _Child, what: str) -> None:
        child.process.join(_GRACE_S)
        raise BenchError(f"{self._title}, {what}: the {child.role} has died with exit code {child.process.exitcode}")

    def _failures(self, first: _Child, report: _Failed) -> str:
        """What all say of a failure, the engine first: when one fails, the others' connections do."""
        reports = {first.role: report.error}
        deadline = time.monotonic() + _SECOND_REPORT_S
        for other in self._children:
            with contextlib.suppress(EOFError, OSError):
                while other.role not in reports and other.control.poll(_until(deadline)):
                    second = other.control.recv()
                    if isinstance(second, _Failed):
                        reports[other.role] = second.error
        roles = [child.role for child in self._children if child.role in reports]
        return "; ".join(f"the {role} failed: {reports[role]}" for role in roles)

    def close(self) -> None:
        """Ends all processes: in order if they are idle, else by force. Twice is once."""
        if self._ended:
            return
        deadline = time.monotonic() + _GRACE_S
        for child in self._children:
            with contextlib.suppress(OSError):  # it is dead
                child.control.send(None)
        for child in self._children:
            child.process.join(_until(deadline))
        self.kill()

    def kill(self) -> None:
        """Ends all processes at once. Twice is once."""
        self._ended = True
        for child in self._children:
            child.kill()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


# -- in the child ------------------------------------------------------------------------------------------------------


def _run_child(peer: Peer, shared: Any, client: int | None, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    # Both as servers do it. With more threads, torch's copies wait for a core that is busy with another process;
    # without the freeze, a collection walks all that torch has imported, and hits some peer for 80 ms.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):  # the parent has gone
        control.send(_Step.READY)
        for cell in _cells(control):
            control.send(_run_cell(peer, shared, client, control, cell))


def _cells(control: Connection) -> Iterator[Cell]:
    while isinstance(cell := control.recv(), Cell):
        yield cell


def _run_cell(peer: Peer, shared: Any, client: int | None, control: Connection, cell: Cell) -> _Finished | _Failed:
    """Runs a child's part of a cell; what goes wrong is what it returns, since it is for the parent to act on."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_play(peer, shared, client, control, cell))
    except TimeoutError:
        return _Failed(f"it took longer than {cell.limit_s:g} s")
    except Exception as error:  # noqa: BLE001 # it ends the benchmark, in the parent
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        where = traceback.extract_tb(first.__traceback__)[-1]
        return _Failed(f"{type(first).__name__}: {first} ({where.name}, line {where.lineno} of {where.filename})")


async def _play(peer: Peer, shared: Any, client: int | None, control: Connection, cell: Cell) -> _Finished:
    """This process's part of a cell, given up when the parent is gone."""
    with _Parent(control) as parent:
        async with asyncio.timeout(cell.limit_s):
            if client is None:
                return await _answer(peer, shared, parent, cell)
            return await _ask(peer, shared, client, parent, cell)


class _Parent:
    """The parent, as a child sees it within a cell; that it is gone cancels the task that made this."""

    def __init__(self, control: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, step: _Step) -> None:
        self._control.send(step)

    async def hear(self) -> Any:
        return await self._messages.get()

    def _readable(self) -> None:
        try:
            self._messages.put_nowait(self._control.recv())
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._control.fileno())
            self._task.cancel()

    def __enter__(self) -> _Parent:
        self._loop.add_reader(self._control.fileno(), self._readable)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._loop.remove_reader(self._control.fileno())
        os.set_blocking(self._control.fileno(), True)  # uvloop made it non-blocking


async def _answer(peer: Peer, shared: Any, parent: _Parent, cell: Cell) -> _Finished:
    desk = Desk(cell)
    meter = Meter(cell, lambda: desk.answered)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(_serve(peer, cell, shared, desk, parent))
        cost = await meter.measure((await parent.hear()).at_ns)
        parent.tell(_Step.MEASURED)
        await parent.hear()
        serving.cancel()
    return _Finished(cost, desk.answered, np.empty(0, np.int64))


async def _serve(peer: Peer, cell: Cell, shared: Any, desk: Desk, parent: _Parent) -> None:
    await peer.serve(cell, shared, desk, lambda: parent.tell(_Step.CONNECTED))
    raise RuntimeError("the engine has stopped answering by itself")


async def _ask(peer: Peer, shared: Any, client: int, parent: _Parent, cell: Cell) -> _Finished:
    load = Load(cell, client)
    async with peer.connect(cell, shared, client) as ask:
        await come_to_rest()
        parent.tell(_Step.CONNECTED)
        start = await parent.hear()
        async with asyncio.TaskGroup() as tasks:
            load.start(tasks, ask)
            cost = await load.meter.measure(start.at_ns)
            parent.tell(_Step.MEASURED)
            await parent.hear()
            load.stop()
    return _Finished(cost, load.answered, np.array(load.latencies_ns, np.int64))
