"""The processes that play the parts of a cell, and their parent's hold on them.

All are spawned (not forked), run uvloop, live for all cells and sleep in a read of their control pipe between cells. A cell is
a fresh event loop, fresh connections and a fresh slab in each. Every wait of the parent is bounded and also ends with the
children. A group is killed as a whole: when it is over, since a child between two cells has nothing to put in order; and when
it has failed in any way, since nobody knows what state it is in. The children leave Ctrl-C to the parent, and end by
themselves when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Self, TypeVar

import click
import torch
import uvloop

_START_LIMIT_S = 180.0  # for a process to import torch, on a machine where several do, or that does much else
_GRACE_S = 5.0  # for a process that has died to be gone, or for one to report its own timeout
_SECOND_REPORT_S = 1.0  # for the other processes to say what they saw of a failure

_Result = TypeVar("_Result")

#: Plays a child's part of a cell: called with its parent and the cell, returns its report.
Play = Callable[["Parent", Any], Coroutine[Any, Any, Any]]


class BenchError(click.ClickException):
    """Something could not be measured. A target that was measured and missed ends a command with 1, and this with 3."""

    exit_code = 3


# -- in the parent -----------------------------------------------------------------------------------------------------


class Child:
    """One of the processes, as their parent sees it, named after its role and after what all of them measure.

    Its part of each cell travels to it. Whatever that raises is reported as a :class:`BenchError`.
    """

    def __init__(self, context: Any, name: str, label: str, play: Play) -> None:
        self.name = name
        self.control, control = context.Pipe()
        self.process = context.Process(target=_run, args=(play, control), name=f"bench-{label}-{name}", daemon=True)
        self.process.start()
        control.close()  # the child has its own; were this end open, its death would not be an end of file

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.control.close()


class Children:
    """Processes that play cells together. Use it with ``with``; :meth:`start` waits until all are ready.

    A subclass makes them, in the order in which errors name them, and says what a cell is. Errors begin with the title.
    """

    def __init__(self, title: str) -> None:
        self.children: list[Child] = []
        self._title = title
        self._ended = False

    def start(self) -> None:
        """Waits until all processes are ready; raises BenchError if one did not start."""
        self._hear(self.children, time.monotonic() + _START_LIMIT_S, "starting")

    @contextlib.contextmanager
    def _playing(self, limit_s: float) -> Iterator[float]:
        """Yields when the cell that is run within must be over; whatever is raised ends all processes."""
        if self._ended:
            raise BenchError(f"{self._title}: its processes were ended after a failure")
        try:
            yield time.monotonic() + limit_s + _GRACE_S
        except BaseException:
            self.kill()
            raise

    def _tell(self, children: Sequence[Child], message: object, what: str) -> None:
        for child in children:
            try:
                child.control.send(message)
            except OSError:
                self._died(child, what)

    def _hear(self, children: Sequence[Child], deadline: float, what: str) -> list[Any]:
        """Waits for the next report of each; raises what one says of a failure, its silence or its death."""
        waiting: dict[Any, Child] = {child.control: child for child in children}
        reports: dict[Child, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), _until(deadline))  # a dead child's pipe is ready, too
            if not ready:
                names = ", ".join(f"the {child.name}" for child in waiting.values())
                raise BenchError(f"{self._title}, {what}: {names} did not finish in time")
            for control in ready:
                child = waiting.pop(control)
                reports[child] = self._receive(child, what)
        return [reports[child] for child in children]

    def _receive(self, child: Child, what: str) -> Any:
        try:
            report = child.control.recv()
        except (EOFError, OSError):
            self._died(child, what)
        if isinstance(report, BenchError):
            raise BenchError(f"{self._title}, {what}: {self._failures(child, report)}")
        return report

    def _died(self, child: Child, what: str) -> NoReturn:
        child.process.join(_GRACE_S)
        raise BenchError(f"{self._title}, {what}: the {child.name} has died with exit code {child.process.exitcode}")

    def _failures(self, first: Child, report: BenchError) -> str:
        """What all say of a failure, in their order: when one fails, the others' connections do."""
        errors = {first: report.message}
        deadline = time.monotonic() + _SECOND_REPORT_S
        for other in self.children:
            with contextlib.suppress(EOFError, OSError):
                while other not in errors and other.control.poll(_until(deadline)):
                    later = other.control.recv()
                    if isinstance(later, BenchError):
                        errors[other] = later.message
        return "; ".join(f"the {child.name} failed: {errors[child]}" for child in self.children if child in errors)

    def kill(self) -> None:
        """Ends all processes at once. Twice is once."""
        if self._ended:
            return
        self._ended = True
        for child in self.children:
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


# -- in the child ------------------------------------------------------------------------------------------------------


class Parent:
    """The parent, as a child sees it within a cell. That it is gone cancels the task that made this."""

    def __init__(self, control: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, message: object) -> None:
        """Says how far this child has got."""
        self._control.send(message)

    async def hear(self) -> Any:
        return await self._messages.get()

    def _readable(self) -> None:
        try:
            self._messages.put_nowait(self._control.recv())
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._control.fileno())
            self._task.cancel()

    def __enter__(self) -> Self:
        self._loop.add_reader(self._control.fileno(), self._readable)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.remove_reader(self._control.fileno())
        os.set_blocking(self._control.fileno(), True)  # uvloop made it non-blocking


def _run(play: Play, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    settle()
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):  # the parent has gone
        control.send("ready")
        while True:
            control.send(play_cell(play, control, control.recv()))


def settle() -> None:
    """Has this process be as servers are, when it has imported everything.

    With more threads, torch's copies wait for a core that is busy with another process. Without the freeze, a collection walks
    all that torch has imported, and hits somebody for 80 ms.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def on_uvloop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def play_cell(play: Play, control: Connection, cell: Any) -> Any:
    """Runs a child's part of a cell on a loop of its own, within the cell's ``limit_s``.

    Returns its report; or what went wrong, since that is for the parent to act on.
    """

    async def play_in_time() -> Any:
        with Parent(control) as parent:
            async with asyncio.timeout(cell.limit_s):
                return await play(parent, cell)

    try:
        return on_uvloop(play_in_time())
    except TimeoutError:
        return BenchError(f"it took longer than {cell.limit_s:g} s")
    except Exception as error:  # noqa: BLE001 # it ends the benchmark, in the parent
        return BenchError(described(error))


def described(error: BaseException) -> str:
    """Returns an error in one line, and where it came from; of a :class:`BenchError`, which says enough, its text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, BenchError):
        return str(error)
    places = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({place.name}, line {place.lineno} of {os.path.basename(place.filename)})" for place in places)
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}{where}"
