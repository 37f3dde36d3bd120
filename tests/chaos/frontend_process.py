"""A frontend of a run: workers that send requests, and the orders of the driver: storms, floods, hang-ups, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

import shmring
from shmring.client import pauses
from tests.chaos import control
from tests.chaos.journal import Journal
from tests.chaos.load import Load
from tests.fleet.child import Channel
from tests.sessions import session_of

_STORM_INTERVAL_S = 0.02
_FLOOD_WORKERS = 12  # times 2 MiB on average, times the frontends: more than the slab
_HOARDED = 48  # requests to each engine: those whose replies fill its reserve, and more than its 32 handlers beside
_CHECK_INTERVAL_S = 0.1  # between two looks at the client's own book
_QUIET_POLL_S = 0.005
_LEAVE_LIMIT_S = 10.0  # for callers to hear of a close; at once, on a machine that does nothing else
_SCRIBBLED_NBYTES = 256 << 10
_SCRIBBLE_INTERVAL_S = 0.001


class _Frontend:
    def __init__(self, assignment: control.Assignment) -> None:
        plan = assignment.plan
        self.assignment = assignment
        self.plan = plan
        self.chance = random.Random(f"{plan.seed}/frontend/{assignment.index}/{assignment.life}")
        self.journal = Journal(Path(assignment.journal))
        self.load = Load(plan, self.chance, self.journal, Path(assignment.socket_dir))
        self.load.observe_releases()
        self.sending = asyncio.Event()
        self.ended = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.kept: list[shmring.Slot] = []

    def start(self, coroutine: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(self.journal.ended)

    async def worker(self, number: int) -> None:
        pause = random.Random(f"{self.plan.seed}/pause/{self.assignment.index}/{self.assignment.life}/{number}")
        while not self.ended:
            await self.sending.wait()  # set as well when it is over
            await asyncio.sleep(pause.expovariate(1 / self.plan.pause_s))
            if self.sending.is_set() and not self.ended:
                await self.load.one()

    async def watch_book(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self.load.check_book()

    # -- orders ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        pauses.LONGEST_S = 0.1
        self.load.client = await shmring.connect(
            self.assignment.names,
            socket_dir=self.assignment.socket_dir,
            lease_nbytes=self.plan.lease_nbytes,
            connect_timeout_s=60.0,
            lease_idle_s=0.5,
            inline_nbytes="1KiB",  # what is put to the test is slots
        )
        self.sending.set()

    async def storm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while loop.time() < ends:
            self.load.storm()
            await asyncio.sleep(_STORM_INTERVAL_S)

    async def flood(self, seconds: float) -> None:
        """Large requests only, and more of them: what they need is several times the slab."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds

        async def send() -> None:
            while loop.time() < ends and self.sending.is_set() and not self.ended:
                await self.load.one()

        self.load.floods += 1
        try:
            await asyncio.gather(*(send() for _ in range(_FLOOD_WORKERS)))
        finally:
            self.load.floods -= 1

    async def hoard(self, seconds: float) -> None:
        """Has replies lie unread for a while: more to each engine than it has handlers."""
        sent, reads = [], asyncio.Event()
        for name in () if self.load.client is None else self.load.client.engines:
            for _ in range(_HOARDED):
                sent.append(asyncio.Event())
                self.start(self.load.hoarded(name, sent[-1], reads), "worker")
        await asyncio.gather(*(event.wait() for event in sent))
        asyncio.get_running_loop().call_later(seconds, reads.set)

    async def probe(self) -> None:
        """Sends each engine a small request."""
        if self.load.client is not None:
            await asyncio.gather(*(self.load.probe(name) for name in self.load.client.engines))

    async def answered(self, work: Coroutine[Any, Any, None], channel: Channel) -> None:
        try:
            await work
        finally:
            channel.answer(control.Ready())

    async def hang_up(self) -> None:
        """Drops the connection, and goes on writing to a slot of before: nobody else may have that memory."""
        client = self.load.client
        if client is None:
            return
        views = []
        for name, engine in client.engines.items():
            with contextlib.suppress(shmring.WouldBlock):
                slot = client.slot_nowait(_SCRIBBLED_NBYTES, engine=name)
                views.append(slot.tensor((_SCRIBBLED_NBYTES,), torch.uint8))
                self.kept.append(slot)
            if engine.connected:
                session_of(client, name).link.abort()
        while views:
            for view in views:
                view.add_(1)
            await asyncio.sleep(_SCRIBBLE_INTERVAL_S)

    async def quiet(self, limit_s: float) -> control.QuietReport:
        """Sends nothing more, and waits for all ends and for all memory."""
        self.sending.clear()
        loop = asyncio.get_running_loop()
        ends = loop.time() + limit_s
        while loop.time() < ends:
            report = self.report()
            if not report.unfinished and not report.slots_in_use and not report.replies_held:
                break
            # An error that a task raised and its frame are a cycle, which holds views of the slab until it is collected; and
            # who does nothing any more collects nothing.
            gc.collect()
            await asyncio.sleep(_QUIET_POLL_S)
        self.load.check_book()
        return self.report()

    def report(self) -> control.QuietReport:
        assert self.load.client is not None
        counts = self.load.client.statistics()
        return control.QuietReport(sorted(self.load.unfinished), counts.slots_in_use, counts.reply_slots_held)

    async def close(self) -> None:
        self.sending.clear()
        if self.load.client is not None:
            await self.load.client.close()
            self.load.client = None
        gc.collect()  # as in `quiet`

    async def leave(self) -> None:
        """Ends in the middle of everything; whoever waits for an answer must hear of it."""
        self.ended = self.load.closing = True
        self.sending.set()
        client = self.load.client
        if client is not None:
            await client.close()
        workers = [task for task in self.tasks if task.get_name() == "worker"]
        if workers:  # else all have ended
            await asyncio.wait(workers, timeout=min(_LEAVE_LIMIT_S, self.plan.quiet_limit_s))


async def run_frontend(assignment: control.Assignment, channel: Channel) -> None:
    """Does what the driver says, until it says to leave."""
    logging.getLogger("shmring").setLevel(logging.CRITICAL)  # every fault warns somewhere; what must not be is journalled
    frontend = _Frontend(assignment)
    for number in range(assignment.plan.workers):
        frontend.start(frontend.worker(number), "worker")
    frontend.start(frontend.watch_book())
    channel.answer(control.Ready())
    while True:
        match await channel.question():
            case control.Open():
                await frontend.open()
                channel.answer(control.Ready())
            case control.Storm(seconds):
                frontend.start(frontend.storm(seconds))
            case control.Flood(seconds):
                frontend.start(frontend.flood(seconds), "worker")
            case control.Hoard(seconds):
                frontend.start(frontend.answered(frontend.hoard(seconds), channel))
            case control.Probe():
                frontend.start(frontend.answered(frontend.probe(), channel))
            case control.HangUp():
                frontend.start(frontend.hang_up())
            case control.Quiet(seconds):
                channel.answer(await frontend.quiet(seconds))
            case control.Close():
                await frontend.close()
                channel.answer(control.Ready())
            case control.Leave():
                await frontend.leave()
                return
