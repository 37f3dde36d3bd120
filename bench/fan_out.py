"""``python -m bench fan-out``: what it takes to hand a message to several workers, beside what would be taken instead.

One process is the engine; each worker is a process of its own. A *flood* is messages as fast as they are taken, timed until the
last worker has the last one. In a *pace* there is a message each 2 ms, and what counts is when the last worker has it, by the
clock that all processes share. Each message has a header and one tensor, whose first item a worker reads before it leaves the
message.

Peers as their users use them: pyzmq's PUB and SUB with the tensor as a frame of its own, and a ``torch.multiprocessing`` queue
for each worker. vLLM's MessageQueue is not among them: it needs vLLM's own environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch
import torch.multiprocessing
import uvloop
from numpy.typing import NDArray

import shmring
from bench import targets
from bench.children import described
from bench.command_line import SETTINGS, conclude, json_option, repetitions_option, seconds_option, shown_progress
from bench.coverage import Coverage, Planned, Status
from bench.machine import Machine
from bench.results import Findings, Table, Verdict, format_nbytes
from bench.tables import deliver

__all__ = ["fan_out_command", "measure"]

_NAME = "fan-out"
_GAP_S = 0.002
_JOIN_S = 60.0
_PHASES = 1 << 16  # messages of one case, at most
_POLL_S = 0.001

#: In what is compared: way, and whether workers look for messages instead of sleeping.
_OURS, _POLLING, _IN_PLACE = "shmring", "shmring-polling", "shmring-in-place"
_QUEUES, _PUBLISHED = "torch-queues", "pyzmq-pub-sub"
SUBJECTS = (_OURS, _POLLING, _IN_PLACE, _QUEUES, _PUBLISHED)


class Run(msgspec.Struct, frozen=True):
    """One repetition of a case.

    Attributes:
        rate: messages a second, in a flood.
        last_us: the median time to the last worker, in a pace.
        engine_us: CPU time of the engine for a message of a pace, its pauses left out.
        gathers: replies of all workers a second, one gather after the other; 0: this peer has none.
    """

    subject: str
    workers: int
    nbytes: int
    rate: float
    last_us: float
    engine_us: float
    gathers: float


def _stamps(path: str, workers: int) -> NDArray[np.int64]:
    """When each worker had each message: memory of a file, which all processes map."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 8 * workers * _PHASES)
    return np.frombuffer(memory, np.int64).reshape(workers, _PHASES)


def _note(stamps: NDArray[np.int64], rank: int, payload: Any) -> bool:
    """A worker has a message; returns whether it was the last of all."""
    number = int(payload["n"])
    if number < 0:
        return True
    _ = int(payload["t"][0])
    stamps[rank, number] = time.monotonic_ns()
    return False


def _worker(subject: str, rank: int, workers: int, directory: str, queue: Any) -> None:
    """The process of a worker."""
    torch.set_num_threads(1)
    stamps = _stamps(f"{directory}/stamps", workers)
    if subject in (_OURS, _POLLING, _IN_PLACE):
        busy_s = _POLL_S if subject == _POLLING else 0.0
        with shmring.threads.join(_NAME, rank, socket_dir=directory, connect_timeout_s=_JOIN_S, busy_poll_s=busy_s) as worker:
            for message in worker:
                with message:
                    if message.wants_reply:
                        message.reply(rank)
                    elif _note(stamps, rank, message.payload):
                        return
    elif subject == _QUEUES:
        stamps[rank, 0] = 1
        while not _note(stamps, rank, queue.get()):
            pass
    else:
        import zmq

        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.setsockopt(zmq.RCVHWM, 0)
            subscriber.connect(f"ipc://{directory}/zmq")
            while True:
                header, body = subscriber.recv_multipart(copy=False)
                number = msgspec.msgpack.decode(header.bytes)
                if number == 0:  # until all have subscribed, the engine says this
                    stamps[rank, 0] = 1
                elif _note(stamps, rank, {"n": number, "t": np.frombuffer(body.buffer, np.uint8)}):
                    return


class _Engine:
    """The engine of one case: subclasses say how a message is sent."""

    def __init__(self, workers: int, nbytes: int, stamps: NDArray[np.int64]) -> None:
        self.workers, self.stamps = workers, stamps
        self.tensor: Any = torch.zeros(nbytes, dtype=torch.uint8)
        self.sent = 0

    async def send(self, number: int) -> None:
        raise NotImplementedError

    async def gathers(self, seconds: float) -> float:
        """Gathers a second; 0: there are none."""
        return 0.0

    async def settle(self) -> int:
        """Waits until all workers have the last message; returns when the last one had it."""
        until_s = time.monotonic() + _JOIN_S
        while not (arrived := self.stamps[:, self.sent]).all():
            if time.monotonic() > until_s:
                raise TimeoutError(f"message {self.sent} did not come to all workers")
            await asyncio.sleep(0.0002)
        return int(arrived.max())

    async def next(self) -> int:
        self.sent += 1
        began_ns = time.monotonic_ns()
        await self.send(self.sent)
        return began_ns

    async def measured(self, subject: str, nbytes: int, seconds: float) -> Run:
        for _ in range(8):
            await self.next()
        await self.settle()
        first, began_ns = self.sent, time.monotonic_ns()
        until_ns = began_ns + int(seconds * 1e9)
        while time.monotonic_ns() < until_ns and self.sent < _PHASES - 4096:
            await self.next()
        count = self.sent - first
        rate = count / (await self.settle() - began_ns) * 1e9
        steps = max(20, min(400, int(seconds / _GAP_S)))
        cpu_s = time.process_time()
        for _ in range(steps):
            await asyncio.sleep(_GAP_S)
        pauses_s = time.process_time() - cpu_s
        late_us = []
        cpu_s = time.process_time()
        began = []
        for _ in range(steps):
            await asyncio.sleep(_GAP_S)
            began.append((await self.next(), self.sent))
        cpu_s = time.process_time() - cpu_s
        await self.settle()
        late_us = [(int(self.stamps[:, number].max()) - began_ns) / 1e3 for began_ns, number in began]
        gathers = await self.gathers(seconds)
        return Run(subject, self.workers, nbytes, rate, statistics.median(late_us), (cpu_s - pauses_s) / steps * 1e6, gathers)


class _RingEngine(_Engine):
    ring: shmring.Ring

    async def send(self, number: int) -> None:
        await self.ring.broadcast({"n": number, "t": self.tensor})

    async def gathers(self, seconds: float) -> float:
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            await self.ring.gather(count)
            count += 1
        return count / (time.perf_counter() - began_s)


class _QueueEngine(_Engine):
    queues: list[Any]

    async def send(self, number: int) -> None:
        for queue in self.queues:
            queue.put({"n": number, "t": self.tensor})


class _PublishingEngine(_Engine):
    publisher: Any

    async def send(self, number: int) -> None:
        self.publisher.send_multipart([msgspec.msgpack.encode(number), self.tensor.numpy()], copy=False)


async def _with_ring(subject: str, workers: int, nbytes: int, seconds: float, directory: str) -> Run:
    busy_s = _POLL_S if subject == _POLLING else 0.0
    slab_nbytes = max(64 << 20, 4 * nbytes)
    async with shmring.serve(
        _NAME, slab_nbytes=slab_nbytes, broadcast_nbytes=max(64 << 20, 3 * nbytes), socket_dir=directory, busy_poll_s=busy_s
    ) as ring:
        engine = _RingEngine(workers, nbytes, _stamps(f"{directory}/stamps", workers))
        engine.ring = ring
        await ring.wait_workers(workers, timeout=_JOIN_S)
        if subject != _IN_PLACE:
            run = await engine.measured(subject, nbytes, seconds)
        else:
            async with shmring.connect(_NAME, socket_dir=directory) as client:
                submission = await client.submit({"t": engine.tensor})
                with await ring.claim() as claim:
                    engine.tensor = claim.payload["t"]
                    run = await engine.measured(subject, nbytes, seconds)
                    engine.tensor = None
                submission.abort()
        await ring.broadcast({"n": -1, "t": None})
        return run


def _with_queues(workers: int, nbytes: int, seconds: float, directory: str, queues: list[Any]) -> Run:
    engine = _QueueEngine(workers, nbytes, _stamps(f"{directory}/stamps", workers))
    engine.queues = queues
    run = uvloop.run(engine.measured(_QUEUES, nbytes, seconds))
    for queue in queues:
        queue.put({"n": -1, "t": None})
    return run


def _with_publisher(workers: int, nbytes: int, seconds: float, directory: str) -> Run:
    import zmq

    engine = _PublishingEngine(workers, nbytes, _stamps(f"{directory}/stamps", workers))
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.SNDHWM, 0)
        publisher.bind(f"ipc://{directory}/zmq")
        engine.publisher = publisher
        until_s = time.monotonic() + _JOIN_S
        while not engine.stamps[:, 0].all():
            if time.monotonic() > until_s:
                raise TimeoutError("the subscribers did not come")
            publisher.send_multipart([msgspec.msgpack.encode(0), b""])
            time.sleep(0.01)
        run = uvloop.run(engine.measured(_PUBLISHED, nbytes, seconds))
        publisher.send_multipart([msgspec.msgpack.encode(-1), b""])
        return run


@contextlib.contextmanager
def _workers(subject: str, workers: int, directory: str) -> Iterator[list[Any]]:
    """Worker processes, which have ended afterwards; yields a queue to each, where there are queues."""
    context = torch.multiprocessing.get_context("spawn")
    queues = [context.Queue() if subject == _QUEUES else None for _ in range(workers)]
    arguments = [(subject, rank, workers, directory, queues[rank]) for rank in range(workers)]
    processes = [context.Process(target=_worker, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        yield queues
        for process in processes:
            process.join(_JOIN_S)
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


def _run(subject: str, workers: int, nbytes: int, seconds: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        Path(directory, "stamps").write_bytes(bytes(8 * workers * _PHASES))
        with _workers(subject, workers, directory) as queues:
            if subject == _QUEUES:
                return _with_queues(workers, nbytes, seconds, directory, queues)
            if subject == _PUBLISHED:
                return _with_publisher(workers, nbytes, seconds, directory)
            return uvloop.run(_with_ring(subject, workers, nbytes, seconds, directory))


def measure(
    workers: Sequence[int], sizes: Sequence[int], repetitions: int, seconds: float, progress: Callable[[str], None]
) -> Findings:
    """Measures all subjects in turn, again and again; one that fails is left out from then on, and said.

    Args:
        workers: how many.
        sizes: of the tensor.
        repetitions: of each case.
        seconds: of each of its parts.
        progress: called with a line before each of them.
    """
    cases = [(count, nbytes) for nbytes in sizes for count in workers]
    runs: dict[tuple[str, str], list[Run]] = {}
    failed: dict[tuple[str, str], tuple[Status, str]] = {}
    if importlib.util.find_spec("zmq") is None:
        failed = {(_title(*case), _PUBLISHED): (Status.EXCLUDED, "pyzmq is not installed") for case in cases}
    for repetition in range(repetitions):
        for case in cases:
            for subject in SUBJECTS:
                key = (_title(*case), subject)
                progress(f"{key[0]}, {subject}, repetition {repetition + 1} of {repetitions}")
                if key not in failed:
                    try:
                        runs.setdefault(key, []).append(_run(subject, *case, seconds))
                    except Exception as error:  # noqa: BLE001 # it has its place among the results
                        failed[key] = Status.FAILED, described(error)
    rows = []
    for (title, subject), measured in runs.items():
        numbers = [_median(measured, name) for name in ("rate", "last_us", "engine_us", "gathers")]
        rows.append([title, subject, *(f"{number:,.0f}" if number else "" for number in numbers)])
    columns = ["case", "peer", "messages/s", "to the last, p50 us", "engine CPU us", "gathers/s"]
    return Findings(
        mode="fan-out",
        machine=Machine.here(),
        tables=[Table("fan-out: a message to each of several workers", columns, rows, texts=("peer",), grouped=True)],
        notes=[
            f"Medians of {repetitions} interleaved repetitions of {seconds:g} s. To the last, engine CPU: a message each 2 ms.",
            "vLLM's MessageQueue is not measured here; targets that compare with it are not judged.",
        ],
        targets=_verdicts(runs, workers, sizes),
        results=[run for measured in runs.values() for run in measured],
        coverage=Coverage.of(
            [Planned(_title(*case), list(SUBJECTS), repetitions) for case in cases],
            {key: len(measured) for key, measured in runs.items()},
            failed,
        ),
    )


def _title(workers: int, nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} to {workers} worker{'s' * (workers > 1)}"


def _median(measured: Iterable[Run], name: str) -> float:
    return float(statistics.median(getattr(run, name) for run in measured))


def _verdicts(runs: dict[tuple[str, str], list[Run]], workers: Sequence[int], sizes: Sequence[int]) -> list[Verdict]:
    """Whether it is as fast as it should be; what this run lacks is neither met nor missed."""

    def ratio(title: str, of: str, to: str, to_title: str, name: str) -> float | None:
        above, below = runs.get((title, of)), runs.get((to_title, to))
        return _median(above, name) / _median(below, name) if above and below else None

    small, large, four = 4 << 10, 64 << 20, _title(4, 4 << 10)
    asleep = [(four, ratio(four, _OURS, _PUBLISHED, four, "last_us"))]
    in_place = [
        (f"{count}", ratio(_title(count, small), _IN_PLACE, _IN_PLACE, _title(count, large), "rate"))
        for count in workers
        if small in sizes
    ]
    return [
        targets.judge("to the last worker, asleep, of pyzmq's", "4 KiB to 4 workers", 0.65, "x", asleep, at_least=False),
        targets.judge("messages in place, 4 KiB of 64 MiB", "any workers", 1.5, "x", in_place, at_least=False),
    ]


@click.command("fan-out", context_settings=SETTINGS)
@click.option("--quick", is_flag=True, help="One repetition of 0.3 s, 1 and 4 workers.")
@click.option("--workers", multiple=True, type=click.IntRange(1, 32), help="Repeatable.  [default: 1, 2, 4, 8; 1, 4 if quick]")
@repetitions_option("Of each case, interleaved.  [default: 3; 1 if quick]")
@seconds_option("1; 0.3 if quick")
@json_option
def fan_out_command(
    quick: bool, workers: tuple[int, ...], repetitions: int | None, seconds: float | None, json_path: Path | None
) -> None:
    """Messages to workers: how many a second, when the last worker has one, and what they cost the engine.

    Ends with 1 if a target is missed, with 3 if something could not be measured.
    """
    counts = workers or ((1, 4) if quick else (1, 2, 4, 8))
    sizes = (4 << 10, 1 << 20, 64 << 20)
    times = repetitions or (1 if quick else 3)
    with shown_progress(times * len(counts) * len(sizes) * len(SUBJECTS)) as progress:
        findings = measure(counts, sizes, times, seconds or (0.3 if quick else 1.0), progress)
    deliver(findings, json_path)
    conclude(findings.failures, findings.targets)
