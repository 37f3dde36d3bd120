"""A frontend of a run: what it does in each phase, and what it counts meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import torch

import shmring
from tests.fleet.cargo import Answer, Order, check_stamp, stamp
from tests.fleet.child import Channel, LagMeter
from tests.soak import control
from tests.soak.plan import Phase, Plan, Sabotage

_SMALL_NBYTES = (4 << 10, 64 << 10)
_STREAMED_NBYTES = 256 << 10
_STREAM_REPLIES = 16
_REPLY_NBYTES = 32 << 10
_ABORTED_NBYTES = (64 << 10, 4 << 20)
_ABORT_WORK_S = 0.03
_CONNECT_LIMIT_S = 60.0  # an engine may be starting, on a machine that does much else
_REQUESTS_PER_CONNECTION = 4
#: Callers at a time. Enough to keep the engine busy, few enough to leave time to the other frontends of two cores.
_CALLERS: Mapping[Phase, int] = {Phase.SMALL: 8, Phase.LARGE: 3, Phase.STREAMS: 4, Phase.ABORTS: 8, Phase.RECONNECTS: 1}


class _Frontend:
    def __init__(self, assignment: control.Assignment) -> None:
        self.assignment = assignment
        self.plan: Plan = assignment.plan
        self.chance = random.Random(f"{self.plan.seed}/{assignment.index}")
        # Kept and touched: what comes from malloc for each request would be taken for memory of shmring.
        self.small_buffers = _buffers(_ABORTED_NBYTES[1], max(_CALLERS.values()))
        self.large_buffers = _buffers(self.plan.large_nbytes, _CALLERS[Phase.LARGE])
        self.client: shmring.Client | None = None
        self.stopping = False
        self.callers: list[asyncio.Task[None]] = []
        self.sent = 0
        self.requests = self.nbytes = self.aborted = 0
        self.failures: list[str] = []
        self.descriptors: list[int] = []

    async def connect(self) -> shmring.Client:
        self.client = await shmring.connect(
            self.assignment.name,
            socket_dir=self.assignment.socket_dir,
            lease_nbytes=self.plan.lease_nbytes,
            lease_idle_s=self.plan.lease_idle_s,
            connect_timeout_s=_CONNECT_LIMIT_S,
        )
        return self.client

    # -- phases ----------------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        self.stopping = False
        call = {
            Phase.SMALL: self.small,
            Phase.LARGE: self.large,
            Phase.STREAMS: self.stream,
            Phase.ABORTS: self.give_up,
            Phase.RECONNECTS: self.reconnect,
        }.get(phase)
        if call is not None:
            self.callers = [asyncio.create_task(self.repeat(call)) for _ in range(_CALLERS[phase])]

    async def stop(self) -> None:
        self.stopping = True
        if self.callers:
            await asyncio.wait(self.callers)
        self.callers = []

    async def repeat(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Calls until the phase ends; what fails is counted, and ends this caller."""
        while not self.stopping:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 # as text: the exception would keep frames, and they views of the slab
                self.failures.append(f"frontend {self.assignment.index}: {type(error).__name__}: {error}")
                return

    async def small(self) -> None:
        with self.order(self.chance.randint(*_SMALL_NBYTES)) as order:
            await self.request(order)

    async def large(self) -> None:
        """Half of them are copied in, half are written in place."""
        nbytes = self.chance.randint(1 << 20, self.plan.large_nbytes)
        if self.chance.random() < 0.5:
            with self.order(nbytes) as order:
                await self.request(order)
            return
        assert self.client is not None
        async with self.client.slot(nbytes) as slot:
            self.sent += 1
            await self.request(Order(number=self.sent, tensor=stamp(slot.tensor((nbytes,), torch.uint8), self.sent)))

    async def stream(self) -> None:
        assert self.client is not None
        with self.order(_STREAMED_NBYTES) as order:
            order.replies, order.reply_nbytes = _STREAM_REPLIES, _REPLY_NBYTES
            async for answer in self.client.stream(order, reply_type=Answer):
                check_stamp(answer.tensor, order.number)
                self.nbytes += answer.tensor.numel()
            self.requests += 1
            self.nbytes += order.tensor.numel()

    async def give_up(self) -> None:
        """Begins a request and cancels it, before, while or after the engine works on it."""
        with self.order(self.chance.randint(*_ABORTED_NBYTES)) as order:
            order.work_s = self.chance.uniform(0, _ABORT_WORK_S)
            try:
                async with asyncio.timeout(self.chance.uniform(0, _ABORT_WORK_S)):
                    await self.request(order)
            except TimeoutError:
                self.aborted += 1

    async def reconnect(self) -> None:
        assert self.client is not None
        await self.client.close()
        await self.connect()
        if Sabotage.DESCRIPTORS in self.plan.sabotages:
            self.descriptors.append(os.memfd_create("leaked"))
        for _ in range(_REQUESTS_PER_CONNECTION):
            await self.small()

    @contextlib.contextmanager
    def order(self, nbytes: int) -> Iterator[Order]:
        """An order in a buffer that is nobody else's meanwhile: callers send at the same time."""
        buffers = self.small_buffers if nbytes <= _ABORTED_NBYTES[1] else self.large_buffers
        buffer = buffers.pop()
        self.sent += 1
        try:
            yield Order(number=self.sent, tensor=stamp(buffer[:nbytes], self.sent))
        finally:
            buffers.append(buffer)

    async def request(self, order: Order) -> None:
        assert self.client is not None
        answer: Answer = await self.client.request(order, reply_type=Answer)
        check_stamp(answer.tensor, order.number)
        self.requests += 1
        self.nbytes += order.tensor.numel() + answer.tensor.numel()

    # -- what there is ---------------------------------------------------------------------------------------------------

    def look(self, lag_s: float) -> control.Seen:
        assert self.client is not None
        counts = self.client.statistics()
        held = counts.slots_writing + counts.slots_submitted + counts.slots_cached + counts.slots_draining
        return control.Seen(
            lag_s=lag_s,
            requests=self.requests,
            nbytes=self.nbytes,
            aborted=self.aborted,
            failures=self.failures,
            slots_in_use=held + counts.reply_slots_held,
            leased_nbytes=counts.leased_nbytes,
            busy=counts.in_flight,
        )


def _buffers(nbytes: int, count: int) -> list[torch.Tensor]:
    return [torch.ones(nbytes, dtype=torch.uint8) for _ in range(count)]


async def run_frontend(assignment: control.Assignment, channel: Channel) -> None:
    """Does what the driver says, until it says to leave."""
    frontend = _Frontend(assignment)
    lag = LagMeter()
    await frontend.connect()
    channel.answer(control.Ended())
    while True:
        match await channel.question():
            case control.Begin(phase):
                frontend.begin(phase)
                channel.answer(control.Ended())
            case control.Stop():
                await frontend.stop()
                channel.answer(control.Ended())
            case control.Look():
                channel.answer(frontend.look(lag.take()))
            case control.Leave():
                break
    assert frontend.client is not None
    await frontend.client.close()
