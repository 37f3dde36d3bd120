"""A consumer process and its producer processes, and running cells on them.

All are spawned (not forked), run uvloop, live for all cells with so many producers and sleep in a read of their control pipe
between cells. A cell is a fresh event loop, a fresh connection and a fresh slab in each. Every wait of the parent is bounded
and also ends with the children; a group that failed in any way is killed as a whole, since nobody knows what state it is in.
The children leave Ctrl-C to the parent, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any, Literal

import torch
import uvloop

from bench.costs import Cost, Meter
from bench.messages import Cell, Measurement, Sink, Source, Start
from bench.peers import PEERS

__all__ = ["BenchError", "Failed", "Group", "Part", "run_cell"]

_START_LIMIT_S = 120.0  # for a process to import torch, on a machine that does much else
_GRACE_S = 5.0  # for a process to end by itself, or to report its own timeout
_SECOND_REPORT_S = 1.0  # for the other processes to say what they saw of a failure

Role = Literal["consumer", "producer"]


class BenchError(Exception):
    """A measurement failed; there is no result."""


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A child is there; or, within a cell, a consumer listens."""


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A child has done its part of a cell: a consumer with what it measured, a producer with what it cost."""

    measurement: Measurement | None = None
    cost: Cost | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """A child's part of a cell has failed.

    Attributes:
        error: what happened, in words.
    """

    error: str


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


class _Child:
    """One of the processes, as their parent sees it."""

    def __init__(self, context: SpawnContext, role: Role, part: Part) -> None:
        self.role = role
        self.name = f"producer {part.producer}" if role == "producer" and part.producers > 1 else role
        self.control, control = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_run_child, args=(role, part, control), name=f"bench-{part.peer_name}-{self.name}", daemon=True
        )
        self.process.start()
        control.close()  # the child has its own; were this end open, its death would not be an end of file

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.control.close()


class Group:
    """A consumer and its producers, of one peer. Use it with ``with``; :meth:`start` waits until all are ready.

    Args:
        peer_name: a key of :data:`bench.peers.PEERS`.
        producers: how many.

    Raises:
        BenchError: what the processes share could not be made.
    """

    def __init__(self, peer_name: str, producers: int = 1) -> None:
        context = get_context("spawn")
        self._peer = PEERS[peer_name]
        self._producers = producers
        self._children: list[_Child] = []
        self._ended = False
        start_memory = context.RawArray("q", 2)
        self._start = Start(start_memory)
        try:
            self._shared = self._peer.create_shared(context, producers)  # kept: what children inherit is ours to remove
        except Exception as error:  # any of a library's own; it has its place among the results
            raise BenchError(f"{self._peer.title}: {type(error).__name__}: {error}") from error
        try:
            part = Part(peer_name, self._shared, start_memory, producers)
            self._children.append(_Child(context, "consumer", part))
            for producer in range(producers):
                self._children.append(_Child(context, "producer", dataclasses.replace(part, producer=producer)))
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[SpawnProcess]:
        """The consumer and the producers."""
        return [child.process for child in self._children]

    @property
    def ended(self) -> bool:
        """Whether the processes have been ended, by a failure or by :meth:`close`."""
        return self._ended

    def start(self) -> None:
        """Waits until all processes are ready.

        Raises:
            BenchError: one did not start.
        """
        for child in self._children:
            self._receive(child, time.monotonic() + _START_LIMIT_S, "starting")

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell, whose ``producers`` are as many as this group has.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took longer than ``cell.limit_s``. The
                processes are dead.
        """
        assert cell.producers == self._producers, "a group has the producers of its cells"
        if self._ended:
            raise BenchError(f"{self._peer.title}: its processes were ended after a failure")
        consumer, *producers = self._children
        deadline = time.monotonic() + cell.limit_s + _GRACE_S
        what = f"{cell.nbytes:,} bytes, window {cell.window}"
        self._start.clear()
        try:
            consumer.control.send(cell)
            self._receive(consumer, deadline, what)
            for producer in producers:
                producer.control.send(cell)
            return self._results(deadline, what)
        except BaseException:
            self.kill()
            raise

    def _results(self, deadline: float, what: str) -> Measurement:
        waiting: dict[Any, _Child] = {child.control: child for child in self._children}
        reports: dict[_Child, _Finished] = {}
        while waiting:
            # A dead child's pipe is ready, too. None is ready: the time is over, and receiving says so.
            for control in connection.wait(list(waiting), _until(deadline)) or list(waiting):
                child = waiting.pop(control)
                reports[child] = self._receive(child, deadline, what)
        measurement = reports[self._children[0]].measurement
        assert measurement is not None, "a consumer that finishes has measured"
        costs = tuple(cost for child in self._children[1:] if (cost := reports[child].cost) is not None)
        return dataclasses.replace(measurement, producers=costs)

    def _receive(self, child: _Child, deadline: float, what: str) -> Any:
        """Waits for a child's next report; raises what it says of a failure, its silence or its death."""
        try:
            if child.control.poll(_until(deadline)):
                report = child.control.recv()
                if not isinstance(report, Failed):
                    return report
                raise BenchError(f"{self._peer.title}, {what}: {self._failure(child, report)}")
            reason = "did not finish in time"
        except (EOFError, ConnectionError):
            child.process.join(_GRACE_S)
            reason = f"has died with exit code {child.process.exitcode}"
        raise BenchError(f"{self._peer.title}, {what}: the {child.name} {reason}")

    def _failure(self, first: _Child, report: Failed) -> str:
        """What all say of a failure, the consumer first: when one fails, the others' connections do."""
        reports = {first: report.error}
        deadline = time.monotonic() + _SECOND_REPORT_S
        for other in self._children:
            with contextlib.suppress(EOFError, ConnectionError):
                while other not in reports and other.control.poll(_until(deadline)):
                    later = other.control.recv()
                    if isinstance(later, Failed):
                        reports[other] = later.error
        return "; ".join(f"the {child.name} failed: {reports[child]}" for child in self._children if child in reports)

    def close(self) -> None:
        """Ends all processes: in order if they are idle, else by force. Twice is once."""
        if self._ended:
            return
        deadline = time.monotonic() + _GRACE_S
        for child in self._children:
            with contextlib.suppress(OSError):  # it is dead, or killed and its pipe closed
                child.control.send(None)
        for child in self._children:
            child.process.join(_until(deadline))
        self.kill()

    def kill(self) -> None:
        """Ends all processes at once. Twice is once."""
        if self._ended:
            return
        self._ended = True
        for child in self._children:
            child.kill()
        self._peer.close_shared(self._shared)

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


def _run_child(role: Role, part: Part, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    # Both as servers do it. With more threads, torch's copies wait for a core that is busy with the other process;
    # without the freeze, a collection walks all that torch has imported, and hits some peer for 80 ms.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):  # the parent has gone
        control.send(_Ready())
        for cell in _cells(control):
            control.send(run_cell(role, part, control, cell))


def _cells(control: Connection) -> Iterator[Cell]:
    while (cell := control.recv()) is not None:
        yield cell


def run_cell(role: Role, part: Part, control: Connection, cell: Cell) -> _Finished | Failed:
    """Runs a child's part of a cell; what goes wrong is what it returns, since it is for the parent to act on."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_play(role, part, control, cell))
    except TimeoutError:
        return Failed(f"it took longer than {cell.limit_s:g} s")
    except Exception as error:  # noqa: BLE001 # it ends the benchmark, in the parent
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Failed(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename})")


async def _play(role: Role, part: Part, control: Connection, cell: Cell) -> _Finished:
    """This process's part of a cell, given up when the parent is gone or says anything in the middle of it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_reader(control.fileno(), task.cancel)
    try:
        async with asyncio.timeout(cell.limit_s):
            return await (_produce(part, cell) if role == "producer" else _consume(part, cell, control))
    finally:
        loop.remove_reader(control.fileno())
        os.set_blocking(control.fileno(), True)  # uvloop made it non-blocking


async def _produce(part: Part, cell: Cell) -> _Finished:
    source = Source(cell, part.producer, Start(part.start_memory))
    with _watched(part, source.meter):
        await PEERS[part.peer_name].produce(cell, part.shared, source)
    return _Finished(cost=source.meter.cost)


async def _consume(part: Part, cell: Cell, control: Connection) -> _Finished:
    sink = Sink(cell, Start(part.start_memory))
    with _watched(part, sink.meter):
        await PEERS[part.peer_name].consume(cell, part.shared, sink, lambda: control.send(_Ready()))
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
