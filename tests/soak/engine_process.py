"""The engine of a run: answers every order, and says what its ring holds."""

from __future__ import annotations

import asyncio

import torch

import shmring
from tests.fleet.cargo import Answer, Order, check_stamp, stamp
from tests.fleet.child import Channel, LagMeter
from tests.soak import control
from tests.soak.plan import Sabotage

_MAX_CONCURRENCY = 64
_LEAKED_NBYTES = 1 << 20  # by a request, where a test has it leak
_LEAK_EVERY = 2  # requests


class _Engine:
    def __init__(self, assignment: control.Assignment) -> None:
        self.plan = assignment.plan
        self.answer_tensor = torch.ones(1 << 20, dtype=torch.uint8)
        self.failures: list[str] = []
        self.leaked: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.handled = 0

    async def handle(self, claim: shmring.Claim) -> None:
        order: Order = claim.payload
        try:
            check_stamp(order.tensor, order.number)
            if order.work_s:
                await asyncio.sleep(order.work_s)
                check_stamp(order.tensor, order.number)
            for _ in range(order.replies):
                answer = stamp(self.answer_tensor[: order.reply_nbytes].clone(), order.number)
                await claim.reply(Answer(number=order.number, tensor=answer))
        except (shmring.AbortedError, asyncio.CancelledError):
            raise
        except Exception as error:
            self.failures.append(f"engine: {type(error).__name__}: {error}")
            raise
        self.handled += 1
        if self.handled % _LEAK_EVERY == 0:
            self.sabotage(order.tensor)

    def sabotage(self, tensor: torch.Tensor) -> None:
        """Leaks what a test has told us to leak."""
        if Sabotage.MEMORY in self.plan.sabotages:
            self.leaked.append(torch.ones(_LEAKED_NBYTES, dtype=torch.uint8))
        if Sabotage.SLAB in self.plan.sabotages and not self.kept:
            self.kept.append(tensor)

    def look(self, ring: shmring.Ring, lag_s: float) -> control.Seen:
        counts = ring.statistics()
        return control.Seen(
            lag_s=lag_s,
            failures=self.failures,
            slots_in_use=counts.slots_in_use,
            leased_nbytes=counts.leased_nbytes,
            quarantined_nbytes=counts.quarantined_nbytes,
            reply_slots_nbytes=counts.reply_nbytes - counts.reply_free_nbytes,
            busy=counts.waiting + counts.running,
        )


async def run_engine(assignment: control.Assignment, channel: Channel) -> None:
    """Serves until the driver has gone, or has had enough."""
    engine, plan = _Engine(assignment), assignment.plan
    lag = LagMeter()
    async with shmring.serve(
        assignment.name,
        slab_nbytes=plan.slab_nbytes,
        reply_nbytes=plan.reply_nbytes,
        socket_dir=assignment.socket_dir,
        payload_type=Order,
    ) as ring:
        channel.answer(control.Ended())
        serving = asyncio.create_task(ring.run(engine.handle, _MAX_CONCURRENCY))
        while not isinstance(question := await channel.question(), control.Leave):
            assert isinstance(question, control.Look), "an engine has no phases"
            channel.answer(engine.look(ring, lag.take()))
    await serving
