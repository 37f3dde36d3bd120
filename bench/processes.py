"""A producer process and a consumer process, and running cells on them.

Both are spawned (not forked), run uvloop, live for the whole benchmark and sleep in a read of their control pipe between
cells. A cell is a fresh event loop, a fresh connection and a fresh slab in each. Every wait of the parent is bounded and
also ends with the children; a pair that failed in any way is killed as a whole, since nobody knows what state it is in.
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

from bench.messages import Cell, Measurement, Sink, Source
from bench.peers import PEERS

__all__ = ["BenchError", "Failed", "Pair", "run_cell"]

_START_LIMIT_S = 120.0  # for a process to import torch, on a machine that does much else
_GRACE_S = 5.0  # for a process to end by itself, or to report its own timeout
_SECOND_REPORT_S = 1.0  # for the other process to say what it saw of a failure

Role = Literal["consumer", "producer"]
_ROLES: tuple[Role, Role] = ("consumer", "producer")


class BenchError(Exception):
    """A measurement failed; there is no result."""


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A child is there; or, within a cell, a consumer listens."""


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A child has done its part of a cell; of a consumer, with what it measured."""

    measurement: Measurement | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """A child's part of a cell has failed.

    Attributes:
        error: what happened, in words.
    """

    error: str


class _Child:
    """One of the two processes, as their parent sees it."""

    def __init__(self, context: SpawnContext, role: Role, peer_name: str, shared: Any) -> None:
        self.role = role
        self.control, control = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_run_child, args=(role, peer_name, shared, control), name=f"bench-{peer_name}-{role}", daemon=True
        )
        self.process.start()
        control.close()  # the child has its own; were this end open, its death would not be an end of file

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.control.close()


class Pair:
    """A producer and a consumer of one peer. Use it with ``with``; :meth:`start` waits until both are ready.

    Args:
        peer_name: a key of :data:`bench.peers.PEERS`.
    """

    def __init__(self, peer_name: str) -> None:
        context = get_context("spawn")
        self._title = PEERS[peer_name].title
        self._shared = PEERS[peer_name].create_shared(context)  # kept: what the children inherit is ours to remove
        self._children: list[_Child] = []
        self._ended = False
        try:
            for role in _ROLES:
                self._children.append(_Child(context, role, peer_name, self._shared))
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[SpawnProcess]:
        """The consumer and the producer."""
        return [child.process for child in self._children]

    def start(self) -> None:
        """Waits until both processes are ready.

        Raises:
            BenchError: one did not start.
        """
        for child in self._children:
            self._receive(child, time.monotonic() + _START_LIMIT_S, "starting")

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took longer than ``cell.limit_s``. The
                processes are dead.
        """
        if self._ended:
            raise BenchError(f"{self._title}: its processes were ended after a failure")
        consumer, producer = self._children
        deadline = time.monotonic() + cell.limit_s + _GRACE_S
        what = f"{cell.nbytes:,} bytes, window {cell.window}"
        try:
            consumer.control.send(cell)
            self._receive(consumer, deadline, what)
            producer.control.send(cell)
            return self._results(consumer, producer, deadline, what)
        except BaseException:
            self.kill()
            raise

    def _results(self, consumer: _Child, producer: _Child, deadline: float, what: str) -> Measurement:
        waiting: dict[Any, _Child] = {child.control: child for child in (consumer, producer)}
        measurement: Measurement | None = None
        while waiting:
            # A dead child's pipe is ready, too. None is ready: the time is over, and receiving says so.
            for control in connection.wait(list(waiting), _until(deadline)) or list(waiting):
                report = self._receive(waiting.pop(control), deadline, what)
                measurement = report.measurement or measurement
        assert measurement is not None, "a consumer that finishes has measured"
        return measurement

    def _receive(self, child: _Child, deadline: float, what: str) -> Any:
        """Waits for a child's next report; raises what it says of a failure, its silence or its death."""
        try:
            if child.control.poll(_until(deadline)):
                report = child.control.recv()
                if not isinstance(report, Failed):
                    return report
                raise BenchError(f"{self._title}, {what}: {self._failure(child, report)}")
            reason = "did not finish in time"
        except (EOFError, ConnectionError):
            child.process.join(_GRACE_S)
            reason = f"has died with exit code {child.process.exitcode}"
        raise BenchError(f"{self._title}, {what}: the {child.role} {reason}")

    def _failure(self, first: _Child, report: Failed) -> str:
        """What both say of a failure, the consumer first: when one fails, the other's connection does."""
        reports = {first.role: report.error}
        deadline = time.monotonic() + _SECOND_REPORT_S
        for other in self._children:
            with contextlib.suppress(EOFError, ConnectionError):
                while other is not first and other.role not in reports and other.control.poll(_until(deadline)):
                    second = other.control.recv()
                    if isinstance(second, Failed):
                        reports[other.role] = second.error
        return "; ".join(f"the {role} failed: {reports[role]}" for role in _ROLES if role in reports)

    def close(self) -> None:
        """Ends both processes: in order if they are idle, else by force. Twice is once."""
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
        """Ends both processes at once. Twice is once."""
        self._ended = True
        for child in self._children:
            child.kill()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


# -- in the child ------------------------------------------------------------------------------------------------------


def _run_child(role: Role, peer_name: str, shared: Any, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    # Both as servers do it. With more threads, torch's copies wait for a core that is busy with the other process;
    # without the freeze, a collection walks all that torch has imported, and hits some peer for 80 ms.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):  # the parent has gone
        control.send(_Ready())
        for cell in _cells(control):
            control.send(run_cell(role, peer_name, shared, control, cell))


def _cells(control: Connection) -> Iterator[Cell]:
    while (cell := control.recv()) is not None:
        yield cell


def run_cell(role: Role, peer_name: str, shared: Any, control: Connection, cell: Cell) -> _Finished | Failed:
    """Runs a child's part of a cell; what goes wrong is what it returns, since it is for the parent to act on."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_play(role, peer_name, shared, control, cell))
    except TimeoutError:
        return Failed(f"it took longer than {cell.limit_s:g} s")
    except Exception as error:  # noqa: BLE001 # it ends the benchmark, in the parent
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Failed(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename})")


async def _play(role: Role, peer_name: str, shared: Any, control: Connection, cell: Cell) -> _Finished:
    """This process's part of a cell, given up when the parent is gone or says anything in the middle of it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_reader(control.fileno(), task.cancel)
    try:
        async with asyncio.timeout(cell.limit_s):
            if role == "producer":
                await PEERS[peer_name].produce(cell, shared, Source(cell))
                return _Finished()
            sink = Sink(cell)
            await PEERS[peer_name].consume(cell, shared, sink, lambda: control.send(_Ready()))
            return _Finished(sink.measurement())
    finally:
        loop.remove_reader(control.fileno())
        os.set_blocking(control.fileno(), True)  # uvloop made it non-blocking
