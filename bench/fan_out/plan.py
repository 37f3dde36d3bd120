"""What ``bench fan-out`` measures: cells, and what is found in each."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

OURS, POLLING, IN_PLACE = "shmring", "shmring-polling", "shmring-in-place"
CALLERS, BACKS = "shmring-callers", "shmring-rings-back"
MESSAGE_QUEUE, ARENA = "message-queue", "message-queue-arena"
QUEUES, PUBLISHED, ICEORYX2 = "torch-queues", "pyzmq-pub-sub", "iceoryx2"


class Subject(NamedTuple):
    """What is measured.

    Attributes:
        title: in words.
        gathers: whether it brings replies back.
        only_steps: it has no event loop, as engines with a loop of their own have them; measured with steps that carry nothing.
        needs: a module that must be there.
    """

    title: str
    gathers: bool = False
    only_steps: bool = False
    needs: str = ""


#: In the order of tables.
SUBJECTS = {
    OURS: Subject("shmring", gathers=True),
    POLLING: Subject("shmring, busy_poll_s", gathers=True),
    IN_PLACE: Subject("shmring, in a slot already"),
    CALLERS: Subject("shmring, served by callers", gathers=True, only_steps=True),
    BACKS: Subject("shmring, a ring back from each", gathers=True, only_steps=True),
    MESSAGE_QUEUE: Subject("vLLM MessageQueue", gathers=True, needs="vllm"),
    ARENA: Subject("vLLM MessageQueue, its arena", needs="vllm"),
    QUEUES: Subject("torch.multiprocessing queues"),
    PUBLISHED: Subject("pyzmq PUB/SUB", needs="zmq"),
    ICEORYX2: Subject("iceoryx2", needs="iceoryx2"),
}
TITLES = {name: subject.title for name, subject in SUBJECTS.items()}

STEP, SMALL, MIDDLE, LARGE = SIZES = (256, 4 << 10, 1 << 20, 64 << 20)
WORKERS = (1, 2, 4, 8)
CENTRAL = 4  # workers, of which most targets speak


class Cell(msgspec.Struct, frozen=True):
    """One repetition of a case, of one subject.

    Attributes:
        subject: one of :data:`SUBJECTS`.
        workers: how many.
        nbytes: of the tensor in each message.
        seconds: of the flood, and of the gathers.
        steps: messages of the pace.
        gathers: whether replies are measured, too.
        sleeps: whether replies are measured after pauses, too.
        rests: whether it is measured what workers take when nothing comes.
        stops: whether one worker is stopped for a while.
    """

    subject: str
    workers: int
    nbytes: int
    seconds: float
    steps: int
    gathers: bool = False
    sleeps: bool = False
    rests: bool = False
    stops: bool = False


class Run(msgspec.Struct, frozen=True):
    """What was measured in a cell; None: that was not asked for.

    Attributes:
        per_s: messages a second of a flood, until the last worker has the last one.
        last_us: the median time from sending to the last worker, a message each 2 ms.
        engine_us, worker_us: CPU time of the engine, and of one worker, for each of those; the engine's pauses left out.
        gathers_per_s: how often in a second all replied, one gather after the other.
        gather_us: the median time of one.
        gather_engine_us: CPU time of the engine for one.
        asleep_us, asleep_engine_us: the same two of a gather after a pause in which whoever looks for messages has given up.
        awake_percent, idle_percent: CPU of all workers in the second after a message, and in the one after that, of one core.
        stopped_ratio: the median time to the last of the others while one worker is stopped, of that before.
    """

    per_s: float
    last_us: float
    engine_us: float
    worker_us: float
    gathers_per_s: float | None = None
    gather_us: float | None = None
    gather_engine_us: float | None = None
    asleep_us: float | None = None
    asleep_engine_us: float | None = None
    awake_percent: float | None = None
    idle_percent: float | None = None
    stopped_ratio: float | None = None


def measurable(subject: str, nbytes: int) -> bool:
    """Whether a subject is measured with tensors of this size: the arena takes what no chunk of the queue holds."""
    if nbytes == STEP:
        return SUBJECTS[subject].gathers
    return not SUBJECTS[subject].only_steps and (subject != ARENA or nbytes >= LARGE)


def planned(subject: str, workers: int, nbytes: int, seconds: float) -> Cell:
    """Returns what is measured of a subject in a case."""
    is_central = workers == CENTRAL and nbytes == SMALL
    return Cell(
        subject,
        workers,
        nbytes,
        seconds,
        steps=max(20, min(300, round(seconds * 600))) if nbytes < LARGE else 20,
        gathers=nbytes <= SMALL and SUBJECTS[subject].gathers,
        sleeps=nbytes == STEP,
        rests=is_central and subject in (OURS, MESSAGE_QUEUE),
        stops=is_central and subject == OURS,
    )
