"""``python -m bench cost``: the CPU time that a message takes of both ends, which are one process here.

Two processes that wait for each other also pay for waking and for cold caches, and on a crowded machine for each other. In
one process nobody waits: what is left is the work itself, so that a change of it shows, however small. Engine and frontend are
two coroutines on one event loop, as small as a program can be that uses both, with 16 messages in flight: nothing is stamped,
and of each message only its number is looked at, since the stamps and checks of ``bench transport`` take half as long as the
message does. That content arrives as it was sent is checked there.

CPU is that of all threads of the process, user and system time, over the messages of the timed phase, which begins and ends
with nothing in flight. A case has a fresh ring in each repetition.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from typing import NamedTuple

import torch

import shmring
from bench import columns
from bench.children import BenchError, on_uvloop, settle
from bench.command_line import benchmark
from bench.peers.shmring_ring import RING
from bench.plan import Plan, Runs, Timing
from bench.results import format_nbytes
from bench.targets import Target, medians

_WINDOW = 16
_MIN_SLAB_NBYTES = 64 << 20
_SUBJECT = "both ends"


async def both_ends(nbytes: int, in_place: bool, timing: Timing) -> float:
    """Returns the CPU microseconds of a message; raises BenchError if one was lost, or came out of turn."""
    shape = (nbytes // 4,)
    content = torch.zeros(shape)
    sent = claimed = 0

    async def engine(ring: shmring.Ring) -> None:
        nonlocal claimed
        while True:
            with await ring.claim() as claim:
                tensor = claim.payload["tensor"]
                if (number := claim.payload["header"][0]) != claimed:
                    raise BenchError(f"message {number} came where message {claimed} was due")
                claimed += 1
                del tensor  # or the slot would wait for the next message to let go of it

    async def frontend(client: shmring.Client, seconds: float) -> None:
        nonlocal sent
        in_flight: deque[shmring.Submission] = deque()
        until_s = time.perf_counter() + seconds
        while not in_flight or time.perf_counter() < until_s:
            for _ in range(_WINDOW):  # between two looks at the clock
                if len(in_flight) == _WINDOW:
                    await in_flight.popleft().wait()
                header = [sent, 1.0, 2]
                sent += 1
                if in_place:
                    async with client.slot(nbytes) as slot:
                        tensor = slot.tensor(shape, torch.float32)
                        in_flight.append(await client.submit({"header": header, "tensor": tensor}))
                        del tensor
                else:
                    in_flight.append(await client.submit({"header": header, "tensor": content}))
        for submission in in_flight:
            await submission.wait()

    slab_nbytes = max(_MIN_SLAB_NBYTES, 2 * _WINDOW * nbytes)
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        async with (
            shmring.serve(RING, slab_nbytes=slab_nbytes, socket_dir=directory) as ring,
            shmring.connect(RING, socket_dir=directory) as client,
            asyncio.TaskGroup() as tasks,
        ):
            await client.wait_prefaulted()
            serving = tasks.create_task(engine(ring))
            await frontend(client, timing.warm_up_s)
            before, started_s = sent, time.process_time()
            await frontend(client, timing.timed_s)
            cpu_s = time.process_time() - started_s
            serving.cancel()
    if claimed != sent:
        raise BenchError(f"{sent} messages were sent, {claimed} came")
    return cpu_s / (sent - before) * 1e6


class Case(NamedTuple):
    """A message of a size, how it travels in words, and the microseconds that it may take."""

    nbytes: int
    way: str
    limit_us: float

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.way}: CPU per message"


_IN_PLACE = "in place"

CASES = (
    Case(4 << 10, "inline", 5.0),
    Case(64 << 10, "copied", 7.0),
    *(Case(nbytes << 10, _IN_PLACE, 6.5) for nbytes in (64, 1 << 10, 8 << 10, 64 << 10)),
)

_COLUMNS = (columns.median("median us", float, 1), columns.spread("least, most", float))

PLAN = Plan(
    mode="cost",
    cases=dict.fromkeys(CASES, (_SUBJECT,)),
    timing=Timing(7, 1.0, 0.3),
    tables=columns.shown_as("cost of both ends in one process", ("what", "of"), _COLUMNS),
    targets=[
        Target(case.title, "one process", case.limit_us, "us", medians(_SUBJECT, float, {"median": case}), at_least=False)
        for case in CASES
    ],
    notes=[f"Messages are sent all the time, {_WINDOW} in flight. Nothing is stamped."],
)


@benchmark(PLAN)
def cost_command(runs: Runs) -> None:
    """CPU time of a message at both ends in one process: inline, copied, and in place up to 64 MB."""
    settle()
    runs.measure(lambda case, _: on_uvloop(both_ends(case.nbytes, case.way == _IN_PLACE, runs.plan.timing)))
