"""A worker of a run: joins whatever engine there is, checks the content of what it is handed, twice, and keeps some views."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from pathlib import Path

import shmring
from tests.chaos import control
from tests.chaos.cores import waited_ns
from tests.chaos.journal import Held, Journal
from tests.fleet.cargo import Order
from tests.fleet.child import Channel

_LONGEST_READ_S = 0.02
_KEPT_S = 0.3
_PAUSE_S = 0.02


class _Worker:
    def __init__(self, assignment: control.Assignment) -> None:
        self.assignment = assignment
        self.name = assignment.names[assignment.index % len(assignment.names)]  # of its engine
        self.chance = random.Random(f"{assignment.plan.seed}/worker/{assignment.index}/{assignment.life}")
        self.journal = Journal(Path(assignment.journal))
        self.last = 0
        self.messages = 0

    async def serve(self) -> None:
        """Joins, and joins again: the engine may have died, or a worker of this rank may not be known to be dead yet."""
        while True:
            with contextlib.suppress(shmring.PeerLostError, shmring.ClosedError, shmring.RankTakenError):
                async with shmring.join(
                    self.name, self.assignment.index, socket_dir=self.assignment.socket_dir, payload_type=Order
                ) as worker:
                    self.last = 0
                    async for message in worker:
                        await self.read(message)
            await asyncio.sleep(_PAUSE_S)

    async def read(self, message: shmring.Message) -> None:
        with message:
            self.messages += 1
            if message.sequence <= self.last:
                self.journal.wrong("violation", f"message {message.sequence} came after message {self.last}")
            self.last = message.sequence
            order: Order = message.payload
            self.journal.check(order, "when a worker received it")
            await asyncio.sleep(self.chance.uniform(0, _LONGEST_READ_S))
            self.journal.check(order, "when a worker left it")
            if message.wants_reply:
                with contextlib.suppress(shmring.PeerLostError, shmring.ClosedError):
                    await message.reply({"number": order.number, "rank": self.assignment.index})
        if self.chance.random() < 0.2:
            asyncio.get_running_loop().call_later(_KEPT_S * self.chance.random(), self.let_go, order)
        else:
            self.held(order)

    def let_go(self, order: Order) -> None:
        self.journal.check(order, "when a worker let go of it")
        self.held(order)

    def held(self, order: Order) -> None:
        """Until now the request's slot is not free, whatever the engine has done with it."""
        with contextlib.suppress(OSError, IndexError):  # the engine is dead
            pid = int(Path(self.assignment.socket_dir, f"{self.name}.lock").read_text().split()[0])
            self.journal.write(Held(order.sender, order.number, time.monotonic_ns(), pid, waited_ns(pid)))


async def run_worker(assignment: control.Assignment, channel: Channel) -> None:
    """Works until the driver says to leave, or has gone."""
    logging.getLogger("shmring").setLevel(logging.CRITICAL)  # every fault warns somewhere; what must not be is journalled
    worker = _Worker(assignment)
    serving = asyncio.create_task(worker.serve())
    serving.add_done_callback(worker.journal.ended)
    channel.answer(control.Ready())
    while not isinstance(await channel.question(), control.Leave):
        pass
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
