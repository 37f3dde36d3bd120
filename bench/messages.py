"""What the benchmarks send, and the check of every message of it.

A message is a float32 tensor with a header: its sequence number, the phase of the run that it belongs to, and when it was
sent. Before each send the producer writes a value that follows from the sequence number to a few places of the tensor,
most of which move from message to message; the consumer compares. A message that is lost, doubled, overtaken, torn,
overwritten too early or seen too late so ends the run, and no transport is timed that does not deliver what was sent.

Times are ``time.perf_counter_ns``, which on Linux is CLOCK_MONOTONIC and the same clock in all processes.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ITEM_NBYTES", "Cell", "CheckError", "Header", "Measurement", "Phase", "Sink", "Source"]

ITEM_NBYTES = 4  # float32

_EXACT_INTEGERS = 1 << 24  # that float32 can hold
_MIN_WINDOWS = 2  # windows of messages that each phase lasts at least, however slow the transport


class CheckError(Exception):
    """A message was not what was sent."""


class Phase(enum.IntEnum):
    """The part of a run that a message belongs to."""

    WARM_UP = 0
    TIMED = 1
    LAST = 2  # one message, not timed, after which nothing comes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement: what to send, for how long.

    Attributes:
        nbytes: size of a message's tensor, a multiple of 4.
        window: messages in flight.
        warm_up_s, timed_s: how long the producer sends in each phase.
        limit_s: after which the whole measurement has failed.
        directory: for sockets; private to this run.
        corrupt_sequence: for tests of the check: the message whose content the producer spoils.
    """

    nbytes: int
    window: int
    warm_up_s: float
    timed_s: float
    limit_s: float
    directory: str
    corrupt_sequence: int | None = None


class Header(NamedTuple):
    """What travels with a tensor."""

    sequence: int
    phase: int
    sent_ns: int


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the consumer saw of the timed phase.

    Attributes:
        messages: how many were received and checked after the first one, in ``elapsed_s``.
        latencies_ns: of each message: from before the producer handed it to the transport until the consumer had the
            tensor in its hands; its wait behind earlier messages of the window included.
    """

    messages: int
    elapsed_s: float
    latencies_ns: NDArray[np.int64]

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.elapsed_s


def _places(sequence: int, length: int) -> tuple[int, int, int, int]:
    """Where a message is stamped: both ends, and two places that move through the tensor."""
    return 0, length - 1, sequence * 40_503 % length, (sequence * 9_973 + length // 2) % length


def _stamp(sequence: int) -> float:
    """The value a message is stamped with; the tensors' initial content has no such values."""
    return -1.0 - sequence % (_EXACT_INTEGERS - 1)


class Source:
    """The producer's messages. Call :meth:`stamp` before each send, until :attr:`finished`.

    Attributes:
        tensor: float32, one-dimensional: what producers send that copy into the transport.
        array: the same memory.
        finished: whether the message stamped last is the last one.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._length = cell.nbytes // ITEM_NBYTES
        self.array: NDArray[np.float32] = np.arange(self._length, dtype=np.float32)
        self.tensor = torch.from_numpy(self.array)
        self.finished = False
        self._items: Any = self.array.data  # a memoryview: the fastest way to write single items
        self._sequence = 0
        self._phase = Phase.WARM_UP
        self._phase_started_ns = time.perf_counter_ns()
        self._phase_sequence = 0

    def stamp(self, tensor: torch.Tensor | None = None) -> Header:
        """Writes the next message's samples, and returns its header. The moment of this call counts as sending it.

        Args:
            tensor: where to write them, if not in :attr:`tensor`.
        """
        assert not self.finished, "the last message was stamped before"
        now = time.perf_counter_ns()
        items: Any = self._items if tensor is None else tensor.numpy().data
        sequence = self._sequence
        value = _stamp(sequence)
        for place in _places(sequence, self._length):
            items[place] = value
        if sequence == self._cell.corrupt_sequence:
            items[self._length - 1] = value + 1
        self._sequence += 1
        self._advance(now)
        return Header(sequence, self._phase, now)

    def _advance(self, now: int) -> None:
        enough = self._sequence - self._phase_sequence > _MIN_WINDOWS * self._cell.window
        phase_s = self._cell.warm_up_s if self._phase is Phase.WARM_UP else self._cell.timed_s
        if enough and now - self._phase_started_ns >= phase_s * 1e9:
            self._phase = Phase(self._phase + 1)
            self._phase_started_ns, self._phase_sequence = now, self._sequence
            self.finished = self._phase is Phase.LAST


class Sink:
    """The consumer's check and record of every message."""

    def __init__(self, cell: Cell) -> None:
        self._shape = (cell.nbytes // ITEM_NBYTES,)
        self._sequence = 0
        self._latencies_ns: list[int] = []
        self._first_ns = self._last_ns = 0

    def take(self, header: Header, tensor: torch.Tensor) -> bool:
        """Checks a message that has just been received, and records it.

        Returns:
            Whether it is the last one.

        Raises:
            CheckError: it is not what was sent.
        """
        received_ns = time.perf_counter_ns()
        sequence, phase, sent_ns = header
        if sequence != self._sequence:
            raise CheckError(f"message {sequence} came where message {self._sequence} was due")
        if tensor.dtype is not torch.float32 or tensor.shape != self._shape:
            raise CheckError(f"message {sequence} is {tensor.dtype}{list(tensor.shape)}, not float32{list(self._shape)}")
        array = tensor.numpy()
        value = _stamp(sequence)
        for place in _places(sequence, self._shape[0]):
            if array.item(place) != value:
                raise CheckError(f"message {sequence} holds {array.item(place)} at {place}, not {value}: it is corrupted")
        self._sequence += 1
        if phase == Phase.TIMED:
            self._latencies_ns.append(received_ns - sent_ns)
            self._last_ns = time.perf_counter_ns()
            self._first_ns = self._first_ns or self._last_ns
        return phase == Phase.LAST

    def measurement(self) -> Measurement:
        """Returns what was recorded, once the last message has come."""
        return Measurement(
            messages=len(self._latencies_ns) - 1,
            elapsed_s=(self._last_ns - self._first_ns) / 1e9,
            latencies_ns=np.array(self._latencies_ns, dtype=np.int64),
        )
