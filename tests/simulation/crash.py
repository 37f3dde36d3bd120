"""A simulation whose crash is a failure like any other: what is compiled may end the process by a signal.

So simulations that look for failures run in a forked child, and each action is noted before it happens, in memory that the two
share: see :func:`in_child`. An action that does not come to its end is ended by a signal, too.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shmring.processes.child import end_with_parent
from tests.simulation.scenario import Action, Scenario

_NOTES_NBYTES = 16 << 20  # an action takes some 30 bytes, and a walk and its settling some 13,000 actions
_HEAD_NBYTES = 8
_ENDLESS_S = 10.0  # of CPU, for an action and what is checked behind it: thousands of times what the longest one takes

_OBJECTS_BETWEEN_COLLECTIONS = 20_000  # those of some worlds; Python's 700 are fewer than one has

_Result = TypeVar("_Result")


class Crash(Exception):
    """A simulation was ended by a signal.

    Attributes:
        scenario: of the simulation that was running.
        trace: what had happened in it; the last action was not over.
    """

    def __init__(self, number: int, scenario: Scenario, trace: tuple[Action, ...]) -> None:
        is_endless = number == signal.SIGVTALRM
        super().__init__("an action does not end" if is_endless else f"it crashes: {signal.Signals(number).name}")
        self.scenario = scenario
        self.trace = trace


class _Notes:
    """What has happened in the simulation that runs: its scenario, and its actions, in memory that a parent shares."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTES_NBYTES)
        self._end = _HEAD_NBYTES

    def begin(self, scenario: Scenario) -> None:
        """A simulation begins."""
        self._end = _HEAD_NBYTES
        self._put(msgspec.msgpack.encode(scenario))

    def put(self, action: Action) -> None:
        """Something is about to happen in it."""
        self._put(msgspec.msgpack.encode(action))

    def _put(self, encoded: bytes) -> None:
        end = self._end + 4 + len(encoded)
        if end <= _NOTES_NBYTES:
            self._memory[self._end : end] = len(encoded).to_bytes(4, "little") + encoded
            self._memory[:_HEAD_NBYTES] = end.to_bytes(_HEAD_NBYTES, "little")
            self._end = end

    def read(self) -> tuple[Scenario, tuple[Action, ...]]:
        """Returns what was noted."""
        place, end = _HEAD_NBYTES, int.from_bytes(self._memory[:_HEAD_NBYTES], "little")
        noted = []
        while place < end:
            start = place + 4
            place = start + int.from_bytes(self._memory[place:start], "little")
            noted.append(self._memory[start:place])
        scenario, *actions = noted
        return msgspec.msgpack.decode(scenario, type=Scenario), tuple(
            msgspec.msgpack.decode(action, type=Action) for action in actions
        )

    def close(self) -> None:
        self._memory.close()


_notes: _Notes | None = None  # of the child that this is


def begin(scenario: Scenario) -> None:
    """Notes that a simulation begins. Of several in one process, the last one to begin is noted."""
    if _notes is not None:
        _notes.begin(scenario)


def note(action: Action) -> None:
    """Notes that an action is about to happen, and has the process end unless another one follows in time."""
    if _notes is not None:
        _notes.put(action)
        signal.setitimer(signal.ITIMER_VIRTUAL, _ENDLESS_S)


def in_child(run: Callable[[], _Result], result_type: type[_Result]) -> _Result:
    """Runs something in a forked child, and returns what that returns.

    Args:
        run: makes simulations.
        result_type: of what it returns, which travels as msgpack.

    Raises:
        Crash: a signal has ended it.
    """
    notes = _Notes()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process that do not matter to the child
        pid = os.fork()
    if not pid:
        os.close(reading)
        _end_as_child(run, writing, notes)
    os.close(writing)
    status = None
    try:
        with open(reading, "rb") as pipe:
            encoded = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            raise Crash(-status, *notes.read())
        if status:
            raise RuntimeError("a simulation has failed; see above")
        return msgspec.msgpack.decode(encoded, type=result_type)
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        notes.close()


def _end_as_child(run: Callable[[], object], writing: int, notes: _Notes) -> None:
    """Runs something, writes down what it returns, and ends the process."""
    global _notes
    status = 1
    try:
        end_with_parent()
        _notes = notes
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        encoded = msgspec.msgpack.encode(run())
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        with open(writing, "wb") as pipe:
            pipe.write(encoded)
        status = 0
    except BaseException:  # noqa: BLE001 - its parent is told by the status, and people by what is printed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
