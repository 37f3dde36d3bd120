"""Processes that decode media, and the order in which media get one. They run :mod:`shmring.frontend.media.decoder_process`.

Theory of operation. A decoder works twice for each medium: it finds out the medium's size, and later it decodes it. It does
one job at a time, and is used again. A job has a budget of processor time. The kernel counts what a decoder uses, and the pool
looks at that count some times a second. It kills a decoder that has used up its budget, or whose caller has gone. This works
whatever the decoder is doing. The next job gets a new decoder, a fork of a process that has imported everything already.

If a decoder dies by itself, or somebody else kills it, its job is done once more, by a new decoder. So a medium that kills
decoders kills two, and no more. The time that it used in the first one counts.

The order. There are as many *places* as there may be processes. One place is only for small pictures and recordings, so that
they do not wait for films. A job that was taken for a small one has a small budget. If that is not enough, it starts again, in
line with the large ones. A place is free when its process is idle or dead, and not as soon as the process is killed.

Invariant: the taken and the free places together are all places. A waiter that is cancelled takes no place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Annotated

import msgspec

from shmring.core.loggers import logger_of
from shmring.engine.inputs import ProcessorSpec
from shmring.frontend.callers.caller import caller
from shmring.frontend.media.jobs import MAX_MESSAGE_NBYTES, Decode, Probe, Ready, Reply
from shmring.line import WaitingLine
from shmring.processes.forking import ForkingProgram
from shmring.processes.process import Process
from shmring.service.import_path import without_working_directory
from shmring.service.logs import log_format_of_this_process
from shmring.service.numbers import Number

__all__ = ["BudgetSpentError", "DecoderDiedError", "DecoderPool", "DecoderStatistics", "Outcome", "read_into"]

_SMALL_NBYTES = 256 << 10  # a photograph of a megapixel, or half a minute of speech
_SMALL_S = 0.5  # of a core; such a picture takes 0.05
_POLL_S = 0.05  # between two looks at the time that a decoder has used
_OFF_THE_LOOP_NBYTES = 1 << 20  # larger copies are made on a thread

_LOG = logger_of(__name__)

_REPLIES = msgspec.msgpack.Decoder(Ready | Reply)


class BudgetSpentError(Exception):
    """A job has used up its budget of processor time."""


class DecoderDiedError(Exception):
    """A decoder ended by itself: its library crashed, somebody killed it, or the kernel ran out of memory.

    Attributes:
        cpu_s: processor time that it had used for the job, as far as it was seen.
    """

    def __init__(self, message: str, cpu_s: float = 0.0) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderStatistics:
    """How busy the decoders are.

    Attributes:
        total: processes that the frontend may have for decoding media (``--decoders``).
        free: processes of these that nobody uses, started or not.
        waiting: media that wait for a decoder.
        waiting_s: how long the first of them has waited; of several frontends, the longest time.
    """

    total: Annotated[int, Number("shmring_frontend_decoders")]
    free: Annotated[int, Number("shmring_frontend_decoders_free")]
    waiting: Annotated[int, Number("shmring_frontend_decoder_waiters")]
    waiting_s: Annotated[float, Number("shmring_frontend_decoder_waiting_seconds", across_frontends="livemax")]


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        reply: the decoder's.
        cpu_s: processor time that it took.
        result: what it wrote; the caller's to close.
    """

    reply: Reply
    cpu_s: float
    result: io.FileIO | None


class DecoderPool:
    """A number of decoders. Each is started when it is first needed.

    Args:
        count: of decoders.
        threads: on which large copies are made.
    """

    def __init__(self, count: int, threads: Executor) -> None:
        self._places = _Places(count)
        self._threads = threads
        self._idle: list[_Decoder] = []
        self._closed = False

    async def run(self, job: Probe | Decode, data: bytes, result_nbytes: int, budget_s: float) -> Outcome:
        """Gives a job to a decoder, and waits for the outcome.

        Args:
            job: what to do.
            data: the medium's file.
            result_nbytes: size of the memory that the decoder writes its result to.
            budget_s: of processor time.

        Raises:
            BudgetSpentError: it took more.
            DecoderDiedError: two decoders died while they did it, or could not be started.
        """
        try:
            return await self._run_in_line(job, data, result_nbytes, budget_s)
        except DecoderDiedError as death:
            _LOG.warning("a decoder died, and its medium goes to another one: %s", death)
            spent_s = death.cpu_s
        outcome = await self._run_in_line(job, data, result_nbytes, budget_s - spent_s, by_a_new_one=True)
        outcome.cpu_s += spent_s
        return outcome

    async def get_ready(self, processor: ProcessorSpec) -> None:
        """Starts a decoder that has an image processor. Importing it takes seconds; further ones are forks with it."""
        give_back = await self._places.take(is_small=True)
        try:
            decoder = await _Decoder.start(processor)
        except DecoderDiedError as death:
            _LOG.warning("a decoder could not be started; the first picture starts one: %s", death)
        else:
            if self._closed:
                decoder.close()
            else:
                self._idle.append(decoder)
        finally:
            give_back()

    def statistics(self) -> DecoderStatistics:
        """Returns how busy the decoders are."""
        return self._places.statistics()

    def take_seconds(self) -> dict[str, float]:
        """Returns for how many seconds each caller has had decoders since this was asked last; those that run count as well."""
        return self._places.take_seconds()

    def close(self) -> None:
        """Ends decoders that are idle. One that runs ends with its job."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _run_in_line(
        self, job: Probe | Decode, data: bytes, result_nbytes: int, budget_s: float, *, by_a_new_one: bool = False
    ) -> Outcome:
        """Does a job as a small one if it looks like one; if that is not enough, or it does not, as a large one."""
        spent_s = 0.0
        if job.kind != "video" and len(data) <= _SMALL_NBYTES:  # the work of a clip has little to do with its size
            spent_s = min(_SMALL_S, budget_s)
            with contextlib.suppress(BudgetSpentError):
                return await self._run_once(job, data, result_nbytes, spent_s, is_small=True, by_a_new_one=by_a_new_one)
        try:
            outcome = await self._run_once(
                job, data, result_nbytes, budget_s - spent_s, is_small=False, by_a_new_one=by_a_new_one
            )
        except DecoderDiedError as death:
            death.cpu_s += spent_s
            raise
        outcome.cpu_s += spent_s
        return outcome

    async def _run_once(
        self,
        job: Probe | Decode,
        data: bytes,
        result_nbytes: int,
        budget_s: float,
        *,
        is_small: bool,
        by_a_new_one: bool,
    ) -> Outcome:
        processor = _processor_of(job)
        give_back = await self._places.take(is_small)
        decoder: _Decoder | None = None
        try:
            if by_a_new_one and self._idle:
                self._idle.pop().close()  # it may be about to die, too; and there are never more decoders than places
            decoder = None if by_a_new_one else self._idle_decoder(processor)
            if decoder is None:
                decoder = await _Decoder.start(processor)
            outcome = await decoder.run(job, data, result_nbytes, budget_s, self._threads)
        except BaseException:
            if decoder is None:
                give_back()
            else:
                decoder.kill(give_back)
            raise
        if self._closed:
            decoder.close()
        else:
            self._idle.append(decoder)
        give_back()
        return outcome

    def _idle_decoder(self, processor: ProcessorSpec | None) -> _Decoder | None:
        """Returns one that lives, and has the image processor if the job needs one; others end."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.lives() and processor in (None, decoder.processor):
                return decoder
            decoder.close()
        return None


def _processor_of(job: Probe | Decode) -> ProcessorSpec | None:
    if isinstance(job, Decode):
        return job.processor
    return job.spec.picture.processor if job.kind == "image" and job.spec.picture is not None else None


# -- places -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    who: str
    is_small: bool
    since_s: float


class _Places:
    """The order in which media get a decoder. The last free place is for small media. (If there is one place, it is for all.)

    Callers take turns. The next turn goes to the caller that has the fewest places. If several have as few, it goes to the one
    whose last turn was the longest ago. The media of one caller are decoded in the order of their arrival. So a caller that
    sends a hundred pictures lets others wait for one picture at most.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._count_for_large = max(1, count - 1)
        self._taken = Counter[str]()  # by caller
        self._taken_by_large = 0
        self._running: dict[_Waiter, float] = {}  # those that have places: since when that is not counted yet
        self._seconds = defaultdict[str, float](float)  # of places, by caller, that were not asked for yet
        self._line: WaitingLine[None] = WaitingLine()
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}  # of callers that wait or have places

    async def take(self, is_small: bool) -> Callable[[], None]:
        """Waits for a place. Returns a function that gives the place back, for the next waiter."""
        waiter = _Waiter(caller.get(), is_small, asyncio.get_running_loop().time())
        give_back = functools.partial(self._give_back, waiter)
        staying = self._line.stay(self._line.enter(waiter), lambda _: give_back(), lambda _: self._forget(waiter.who))
        self._grant()
        await staying
        return give_back

    def _give_back(self, waiter: _Waiter) -> None:
        self._seconds[waiter.who] += time.monotonic() - self._running.pop(waiter)
        self._taken[waiter.who] -= 1
        self._taken_by_large -= not waiter.is_small
        self._forget(waiter.who)
        self._grant()

    def take_seconds(self) -> dict[str, float]:
        """Returns for how many seconds each caller has had places since this was asked last."""
        now = time.monotonic()
        for waiter, since in self._running.items():
            self._seconds[waiter.who] += now - since
            self._running[waiter] = now
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _forget(self, who: str) -> None:
        if not self._taken[who]:
            del self._taken[who]
            if not any(waiter.who == who for _, waiter in self._line.waiting()):
                self._last_turn.pop(who, None)

    def statistics(self) -> DecoderStatistics:
        """Returns how many places are free, and how many media wait."""
        since_s = [waiter.since_s for _, waiter in self._line.waiting()]
        waiting_s = asyncio.get_running_loop().time() - since_s[0] if since_s else 0.0
        return DecoderStatistics(self._count, self._count - self._taken.total(), len(since_s), waiting_s)

    def _grant(self) -> None:
        while self._taken.total() < self._count:
            has_room_for_large = self._taken_by_large < self._count_for_large
            fitting = [each for each in self._line.waiting() if each[1].is_small or has_room_for_large]
            if not fitting:
                return
            place, waiter = min(fitting, key=lambda each: (self._taken[each[1].who], self._last_turn.get(each[1].who, 0)))
            self._running[waiter] = time.monotonic()
            self._taken[waiter.who] += 1
            self._taken_by_large += not waiter.is_small
            self._last_turn[waiter.who] = next(self._turns)
            place.set_result(None)


# -- processes ----------------------------------------------------------------------------------------------------------


class _Nursery:
    """The process that forks decoders; started when it is first needed, and again if it has ended.

    For the first image processor, it imports torch, or goes on without it for good. Another engine's may need torch: then a new
    process starts.
    """

    def __init__(self) -> None:
        self._program = ForkingProgram("shmring.frontend.media.decoder_process")
        self._has_torch: bool | None = None  # None: that is not decided

    def fork(self, connection: socket.socket, processor: ProcessorSpec | None) -> None:
        """Asks for a new decoder, which uses this socket and has this image processor. It sends a message when it is ready.

        Raises:
            ConnectionError: this process has just ended.
        """
        if not self._program.lives or (processor is not None and processor.needs_torch and self._has_torch is False):
            self._has_torch = None
            # One thread: it forks, and a child has only the thread that has forked it.
            environment = without_working_directory(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._program.start(log_format_of_this_process(), environment=environment)
        if processor is not None and self._has_torch is None:
            self._has_torch = processor.needs_torch
        self._program.send(msgspec.msgpack.encode(processor), connection.fileno())


@functools.cache
def _nursery() -> _Nursery:
    """One for this process."""
    return _Nursery()


class _Decoder:
    """A decoder process, seen by the pool, which closes or kills it."""

    def __init__(self, connection: socket.socket, process: Process, processor: ProcessorSpec | None) -> None:
        self.processor = processor
        self._connection = connection
        self._process = process
        self._clock = (~process.pid << 3) | 2  # the kernel's name for the processor time of a process: clock_getcpuclockid(3)

    @classmethod
    async def start(cls, processor: ProcessorSpec | None) -> _Decoder:
        """Starts a process that has an image processor, or none, and waits until it is ready.

        Raises:
            DecoderDiedError: it ended before it was ready, or the process that forks decoders ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                _nursery().fork(theirs, processor)
            ours.setblocking(False)
            ready = await _receive(ours)
            if ready is None:
                raise DecoderDiedError("no decoder could be started; if something was written to stderr, it says why")
            assert isinstance(ready, Ready), ready
            return cls(ours, Process(ready.pid), processor)
        except (ConnectionError, ProcessLookupError):
            ours.close()
            raise DecoderDiedError("a decoder, or the process that starts them, ended at once") from None
        except BaseException:
            ours.close()  # the process notices this, and ends
            raise

    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.lives

    async def run(self, job: Probe | Decode, data: bytes, result_nbytes: int, budget_s: float, threads: Executor) -> Outcome:
        """Does a job. If this raises, the decoder can't be used again: kill it.

        Raises:
            BudgetSpentError: it took more processor time.
            DecoderDiedError: the decoder ended.
        """
        began_s = self._cpu_s()
        spent_s = 0.0

        def check_budget() -> None:
            nonlocal spent_s
            spent_s = max(spent_s, self._cpu_s() - began_s)
            if spent_s > budget_s:
                raise BudgetSpentError

        result = _memory_file(result_nbytes) if result_nbytes else None
        try:
            with _memory_file(len(data)) as file:
                await _write(data, file, threads)
                files = [file] if result is None else [file, result]
                socket.send_fds(self._connection, [msgspec.msgpack.encode(job)], [file.fileno() for file in files])
            reply = await _receive(self._connection, check_budget)
            if reply is None:
                raise DecoderDiedError("it crashed or was killed, or the machine is short of memory", spent_s)
        except BaseException as error:
            if result is not None:
                result.close()
            if isinstance(error, ConnectionError):  # it had died before it got the job
                raise DecoderDiedError("it had died before it got the medium") from None
            raise
        assert not isinstance(reply, Ready), reply
        return Outcome(reply, self._cpu_s() - began_s, result)

    def close(self) -> None:
        """Ends a process that is idle."""
        self._connection.close()
        self._process.close()

    def kill(self, on_dead: Callable[[], None]) -> None:
        """Ends the process, and calls back when it is dead."""
        self._process.send(signal.SIGKILL)

        def died() -> None:
            self.close()
            on_dead()

        self._process.when_ended(died)

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it is dead, as its socket will show
            return 0.0


async def _receive(connection: socket.socket, check: Callable[[], None] = lambda: None) -> Reply | Ready | None:
    """Waits for a message, and calls ``check`` from time to time. Returns None if the other end has closed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        while not readable.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await readable.wait()
            check()
        message = connection.recv(MAX_MESSAGE_NBYTES)
    except ConnectionResetError:  # it died with an unread message
        return None
    finally:
        loop.remove_reader(connection)
    return _REPLIES.decode(message) if message else None


# -- memory files ---------------------------------------------------------------------------------------------------------


def _memory_file(nbytes: int) -> io.FileIO:
    file = io.FileIO(os.memfd_create("medium"), "r+")
    file.truncate(nbytes)
    return file


async def _write(data: bytes, file: io.FileIO, threads: Executor) -> None:
    if len(data) < _OFF_THE_LOOP_NBYTES:
        _write_all(file, data)
    else:
        await asyncio.get_running_loop().run_in_executor(threads, _write_all, _duplicate(file), data)


async def read_into(memory: memoryview, file: io.FileIO, threads: Executor) -> None:
    """Copies the first bytes of what a decoder wrote.

    If this is cancelled, a thread may still write to the memory for some milliseconds, and keeps it until then.

    Args:
        memory: bytes, not more than the file has.
        file: an outcome's result.
        threads: on which large copies are made.
    """
    if len(memory) < _OFF_THE_LOOP_NBYTES:
        _read_all(file, memory)
    else:
        await asyncio.get_running_loop().run_in_executor(threads, _read_all, _duplicate(file), memory)


def _duplicate(file: io.FileIO) -> io.FileIO:
    """Returns a descriptor for a thread. (A cancelled caller closes the original, and another file may get its number.)"""
    return io.FileIO(os.dup(file.fileno()), "r+")


def _write_all(file: io.FileIO, data: bytes) -> None:
    remainder = memoryview(data)
    while remainder:
        remainder = remainder[file.write(remainder) :]


def _read_all(file: io.FileIO, memory: memoryview) -> None:
    while memory:
        memory = memory[file.readinto(memory) :]
