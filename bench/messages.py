"""What the benchmarks send, and the check of every message of it.

A message is a tensor with stamps (:mod:`bench.stamps`) and a header: its producer, its sequence number with that producer, the
phase of the run that it belongs to, and when it was sent. Messages of a producer come in the order in which they were sent.

Producers share :data:`Moments` with their consumer: they warm up until messages of all of them have arrived, and for
``warm_up_s`` from then on; they are timed until timed messages of all have arrived, and for ``timed_s`` from then on. So all
are timed at the same time, however long each took to connect, and what is counted lies between the first moment at which
all are in the timed phase and the first at which one has left it.

Times are ``time.perf_counter_ns``, which on Linux is CLOCK_MONOTONIC and the same clock in all processes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bench.meter import Cost, Meter
from bench.results import format_nbytes
from bench.stamps import ITEM_NBYTES, MAX_SENDERS, CheckError, Stamps

#: The dtypes of tensors that can be sent, by name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}

# What may be in flight of all producers together: transports hold up to twice of it, in /dev/shm or in memory of their own.
_MAX_IN_FLIGHT_NBYTES = 1 << 30
_MIN_WINDOWS = 2  # windows of messages that each phase lasts at least, however slow the transport


class Phase:
    """The parts of a run that messages belong to: plain numbers, which every transport encodes as such."""

    WARM_UP = 0
    TIMED = 1
    LAST = 2  # one message of each producer, not timed, after which it sends nothing


class Case(msgspec.Struct, frozen=True, order=True):
    """A kind of message stream: the size of a tensor, a multiple of 4; the processes that send at the same time to one
    consumer; and how many messages each of them has in flight.
    """

    nbytes: int
    producers: int = 1
    window: int = 16

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.producers} producer{'s' * (self.producers > 1)}, window {self.window}"

    def cell(self, **timing: Any) -> Cell:
        """Returns what processes need to run the case, with a window that keeps what is in flight within memory."""
        window = max(1, min(self.window, _MAX_IN_FLIGHT_NBYTES // (self.nbytes * self.producers)))
        return Cell(**msgspec.structs.asdict(self) | {"window": window}, **timing)


class Cell(Case, frozen=True, kw_only=True):
    """One measurement: what to send, for how long.

    Attributes:
        warm_up_s, timed_s: how long a producer sends in each phase.
        limit_s: after which the whole measurement has failed.
        directory: for sockets; private to this run.
        dtype: of the tensor: a key of :data:`DTYPES`. Engines are not told beforehand, so it travels with each tensor.
        reply_nbytes: size of a reply's tensor, where messages are requests.
    """

    warm_up_s: float
    timed_s: float
    limit_s: float
    directory: str
    dtype: str = "float32"
    reply_nbytes: int = 0

    def __post_init__(self) -> None:
        assert self.nbytes > 0, "a tensor has stamps"
        assert self.nbytes % ITEM_NBYTES == 0, "a tensor holds whole stamps"
        assert 1 <= self.producers <= MAX_SENDERS, "a stamp has 7 bits for its producer"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int]:
        """Of a message's tensor."""
        return (self.nbytes // self.torch_dtype.itemsize,)

    def path(self, name: str) -> Path:
        """Returns a path in the directory."""
        return Path(self.directory, name)


class Header(NamedTuple):
    """What travels with a tensor."""

    sequence: int
    phase: int
    sent_ns: int
    producer: int


class Answer(NamedTuple):
    """The reply to a request, as it came out of a transport, under the header of its request."""

    header: Header
    tensor: torch.Tensor


#: Sends a request and waits for its answer. Called by many tasks at a time; the tensor is not written in between.
Ask = Callable[[Header, torch.Tensor], Awaitable[Answer]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the consumer saw of the timed phase, and what the phase cost both sides.

    Attributes:
        messages: how many were received and checked after the first one, in ``elapsed_s``, of all producers together.
        latencies_ns: of each message: from before the producer handed it to the transport until the consumer had the
            tensor in its hands; its wait behind earlier messages of the window included. Of requests, what their clients saw:
            until the reply was there. Empty where only time was taken.
        consumer, producers: what it cost the consumer, and each producer. Empty until the processes that ran it have reported.
    """

    messages: int
    elapsed_s: float
    latencies_ns: NDArray[np.int64]
    consumer: tuple[Cost, ...] = ()
    producers: tuple[Cost, ...] = ()

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.elapsed_s

    @property
    def consumer_us(self) -> float | None:
        """Microseconds of CPU that a message takes in the consumer's process."""
        return _cpu_us(self.consumer)

    @property
    def producer_us(self) -> float | None:
        return _cpu_us(self.producers)

    @property
    def both_us(self) -> float | None:
        ours, theirs = self.consumer_us, self.producer_us
        return None if ours is None or theirs is None else ours + theirs

    @property
    def p50_us(self) -> float | None:
        return self._latency_us(50)

    @property
    def p99_us(self) -> float | None:
        return self._latency_us(99)

    def _latency_us(self, percent: float) -> float | None:
        return float(np.percentile(self.latencies_ns, percent)) / 1e3 if len(self.latencies_ns) else None


def _cpu_us(costs: Sequence[Cost]) -> float | None:
    return sum(cost.cpu_s for cost in costs) / sum(cost.messages for cost in costs) * 1e6 if costs else None


#: When messages of a phase had arrived of all producers, which the consumer sets and the producers read; 0 until then. One for
#: each phase but the last, in nanoseconds, in memory that all processes of a cell share if there are several.
Moments: TypeAlias = MutableSequence[int]


class Source:
    """A producer's messages. Call :meth:`stamp` before each send, until :attr:`finished`. Without moments it waits for nobody.

    Attributes:
        producer: which of the cell's producers this is, from 0.
        array: the content as bytes: uint8 of shape ``(nbytes,)``.
        tensor: the same memory in the cell's dtype, one-dimensional: what producers send that copy into the transport.
        finished: whether the message stamped last is the last one.
        meter: measures this process in the timed phase.
    """

    def __init__(self, cell: Cell, producer: int = 0, moments: Moments | None = None) -> None:
        self.producer = producer
        self._cell = cell
        self._moments = (1, 1) if moments is None else moments
        words = np.arange(cell.nbytes // ITEM_NBYTES, dtype=np.int32)
        self.array: NDArray[np.uint8] = words.view(np.uint8)
        self.tensor = torch.from_numpy(self.array).view(cell.torch_dtype)
        self.finished = False
        self.meter = Meter(cell.nbytes)
        self._stamps = Stamps(cell.nbytes, cell.torch_dtype)
        self._sequence = 0
        self._phase = Phase.WARM_UP
        self._phase_started_ns = time.perf_counter_ns()
        self._phase_sequence = 0
        self._least_sequence = self._window = _MIN_WINDOWS * cell.window  # that the phase has at least
        self._until_ns = 0  # when the phase is over; 0 until that is known
        self._words = self._stamps.words(self.tensor)

    def stamp(self, tensor: torch.Tensor | None = None) -> Header:
        """Writes the next message's samples, and returns its header. The moment of this call counts as sending it.

        They go into :attr:`tensor`, or into another one: contiguous, of as many bytes, of any dtype.
        """
        assert not self.finished, "the last message was stamped before"
        now = time.perf_counter_ns()
        words = self._words if tensor is None else self._stamps.words(tensor)
        sequence = self._sequence
        self._stamps.write(words, self.producer, sequence)
        self._sequence = sequence + 1
        if sequence >= self._least_sequence and now >= self._until_ns:
            self._advance(now)
        return Header(sequence, self._phase, now, self.producer)

    def _advance(self, now: int) -> None:
        """Enough of a phase was sent: ends it, if it has lasted for long enough."""
        if not (all_ns := self._moments[self._phase]):
            return  # a producer is still missing
        seconds = self._cell.warm_up_s if self._phase == Phase.WARM_UP else self._cell.timed_s
        self._until_ns = max(self._phase_started_ns, all_ns) + int(seconds * 1e9)
        if now >= self._until_ns:
            self._enter(self._phase + 1, now)

    def _enter(self, phase: int, now: int) -> None:
        if phase == Phase.TIMED:
            self.meter.start()
        else:
            self.meter.stop(self._sequence - self._phase_sequence)
        self._phase, self._phase_started_ns, self._phase_sequence = phase, now, self._sequence
        self._least_sequence, self._until_ns = self._sequence + self._window, 0
        self.finished = phase == Phase.LAST


class Sink:
    """The consumer's check and record of every message; its meter measures this process in the timed phase."""

    def __init__(self, cell: Cell, moments: Moments | None = None) -> None:
        self._moments = [0, 0] if moments is None else moments
        self._stamps = Stamps(cell.nbytes, cell.torch_dtype)
        self._sequences = [0] * cell.producers
        self._whose = [f" (of producer {number})" if cell.producers > 1 else "" for number in range(cell.producers)]
        self._unseen = cell.producers  # producers of which no message has come
        self._untimed = set(range(cell.producers))  # of which no timed message has come
        self._unfinished = cell.producers  # of which the last message has not come
        self.meter = Meter(0)
        self._latencies_ns: list[int] = []
        self._first_ns = self._last_ns = 0

    def take(self, header: Header, tensor: torch.Tensor) -> bool:
        """Checks a message that has just come, and records it; returns whether it is the last one of the last producer.

        Raises CheckError if it is not what was sent.
        """
        sequence, phase, sent_ns, producer = header
        if not 0 <= producer < len(self._sequences):
            raise CheckError(f"message {sequence} is of producer {producer}; there are {len(self._sequences)}")
        if sequence == self._sequences[producer]:
            self._sequences[producer] = sequence + 1
        else:
            self._out_of_turn(sequence, producer)
        received_ns = time.perf_counter_ns()
        self._stamps.check("message", tensor, producer, sequence, self._whose[producer])
        if not sequence:
            self._unseen -= 1
            if not self._unseen:
                self._moments[Phase.WARM_UP] = time.perf_counter_ns()
        if phase != Phase.WARM_UP:
            self._record(phase, sent_ns, received_ns, producer)
        return not self._unfinished

    def measurement(self) -> Measurement:
        """Returns what was recorded, once the last message has come; raises CheckError if there is nothing to measure."""
        if len(self._latencies_ns) < 2:
            raise CheckError(f"{len(self._latencies_ns)} messages came while all producers were timed; time them for longer")
        return Measurement(
            messages=len(self._latencies_ns) - 1,
            elapsed_s=(self._last_ns - self._first_ns) / 1e9,
            latencies_ns=np.array(self._latencies_ns, dtype=np.int64),
            consumer=() if self.meter.cost is None else (self.meter.cost,),
        )

    def _out_of_turn(self, sequence: int, producer: int) -> None:
        """A message has come where another was due: those of a producer come in the order in which they were sent."""
        due = self._sequences[producer]
        raise CheckError(f"message {sequence} came where message {due} was due{self._whose[producer]}")

    def _record(self, phase: int, sent_ns: int, received_ns: int, producer: int) -> None:
        """Counts a message that is not warm-up. The phase is over for all once one producer has left it."""
        if phase == Phase.LAST:
            if self.meter.cost is None:
                self.meter.stop(len(self._latencies_ns))
            self._unfinished -= 1
            return
        if self.meter.cost is not None:
            return
        if self._untimed:
            self._untimed.discard(producer)
            if self._untimed:
                return
            self.meter.start()
            self._moments[Phase.TIMED] = time.perf_counter_ns()
        self._latencies_ns.append(received_ns - sent_ns)
        self._last_ns = received_ns
        self._first_ns = self._first_ns or received_ns
