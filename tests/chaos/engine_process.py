"""The engine of a run: it checks every request when it takes it up, when it has worked on it and when it lets go of it.

Its handlers sleep for as long as the order says (some of them on a thread, which no abort stops), answer, fail or time out,
and keep views of some requests after they have left the claim. The books are checked while it runs: every so many effects
of the ring's book, and whenever its statistics are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from pathlib import Path

import shmring
from shmring.cancellation import uninterrupted
from shmring.core.effects import ClientGone, EngineEffect, Reclaimed
from shmring.ring.frontend import Frontend
from shmring.ring.shell import Shell
from tests.chaos import control
from tests.chaos.cores import waited_ns
from tests.chaos.journal import Gone, Held, Journal
from tests.fleet import cargo
from tests.fleet.cargo import CorruptedError, Order
from tests.fleet.child import Channel

_CHECK_EVERY = 16  # effects of the book: checking it takes as long as handling some
_MAX_CONCURRENCY = 32
_SHARE_LIMIT_S = 0.3  # for workers to make room or to reply: some are stopped for longer
_LOOK_INTERVAL_S = 0.02  # of a step on a thread at its input


class PlannedFailure(Exception):
    """The order was to fail."""


class _Engine:
    def __init__(self, assignment: control.Assignment) -> None:
        plan = assignment.plan
        self.plan = plan
        self.pid = os.getpid()
        self.journal = Journal(Path(assignment.journal))
        self.source = cargo.Source(random.Random(f"{plan.seed}/engine/{assignment.index}/{assignment.life}"))
        self.answers = 0
        self.seen: dict[tuple[int, int], set[int]] = {}  # over which connections each request came
        self.kept: set[asyncio.TimerHandle] = set()
        self.leaked: list[Order] = []
        self.ring: shmring.Ring | None = None

    async def statistics(self) -> dict[str, int]:
        assert self.ring is not None
        self.check_book()
        counts = self.ring.statistics().as_dict()
        counts["workers"] = len(self.ring.ranks)
        return counts

    def check_book(self) -> None:
        assert self.ring is not None
        try:
            self.ring._shell._book.check()
            self.ring._shell.workers.look()
        except AssertionError as error:
            self.journal.wrong("violation", f"the engine's book: {error}")

    # -- requests --------------------------------------------------------------------------------------------------------

    async def handle(self, claim: shmring.Claim) -> None:
        """Works on one request; however it ends, the content must be what it was until then."""
        order: Order = claim.payload
        await self.share(claim, order)
        key = (order.sender, order.number)
        connections = self.seen.setdefault(key, set())
        if claim.client_id in connections or len(connections) >= order.sends:
            self.journal.wrong("violation", f"request {order.number} of process {order.sender} was claimed twice")
        connections.add(claim.client_id)
        try:
            await self.check(order, "when it was claimed")
            await self.work(order)
            await self.end(claim, order)
        finally:
            await self.check(order, "when its claim was left")
            self.release(order)
            del order

    async def share(self, claim: shmring.Claim, order: Order) -> None:
        """Every other request goes to the workers, some for their replies. That some die or stop is no failure of it."""
        assert self.ring is not None
        if order.number % 2:
            return
        with contextlib.suppress(shmring.WorkersBehindError, shmring.WorkerLostError):
            if order.number % 6:
                await claim.share({"number": order.number}, timeout=_SHARE_LIMIT_S)
                return
            for reply in await self.ring.gather(order, timeout=_SHARE_LIMIT_S):
                if reply["number"] != order.number:
                    self.journal.wrong("violation", f"a worker replied to {reply['number']}, asked about {order.number}")

    async def work(self, order: Order) -> None:
        if order.on_thread:
            await uninterrupted(asyncio.ensure_future(asyncio.to_thread(self.step, order)))
        else:
            await asyncio.sleep(order.work_s)

    def step(self, order: Order) -> None:
        """A step on a thread: nothing stops it, so nothing may take its input away."""
        ends = time.monotonic() + order.work_s
        while (left := ends - time.monotonic()) > 0:
            self.journal.check(order, "during a step")
            time.sleep(min(_LOOK_INTERVAL_S, left))

    async def end(self, claim: shmring.Claim, order: Order) -> None:
        if order.fate == "fail":
            raise PlannedFailure("as ordered")
        if order.fate == "time out":
            claim.time_out("as ordered")
            return
        for index in range(order.replies):
            self.answers += 1
            tensor, checksum = self.source.content(self.answers, order.reply_nbytes)
            await claim.reply(cargo.Answer(number=order.number, tensor=tensor, index=index, checksum=checksum))

    async def check(self, order: Order, when: str) -> None:
        try:
            await cargo.check_aside(order.tensor, order.number, order.checksum, f"{when}, sent by process {order.sender}")
        except CorruptedError as error:
            self.journal.wrong("corrupted", str(error))

    def release(self, order: Order) -> None:
        """Writes down when the request was let go of; some are kept for longer than their claim."""
        if self.plan.sabotage == "leak" and order.number % 20 == 7:
            self.leaked.append(order)
        if not order.keep_s:
            self.held(order)
            return

        def let_go() -> None:
            self.kept.discard(handle)
            self.journal.check(order, "when its last view died")
            self.held(order)

        handle = asyncio.get_running_loop().call_later(order.keep_s, let_go)
        self.kept.add(handle)

    def held(self, order: Order) -> None:
        self.journal.write(Held(order.sender, order.number, time.monotonic_ns(), self.pid, waited_ns(self.pid)))


def _observe(engine: _Engine) -> None:
    """Looks at what the ring's book decides: when a process has nothing of the slab left, and whether the book is sound."""
    carry_out, died = Shell.carry_out, Frontend.died
    reclaimed: dict[int, int] = {}
    heard: dict[int, tuple[int, int]] = {}  # of deaths, by pid: when, and how long this process had waited for a core
    effects_seen = 0

    def observed(shell: Shell, effects: list[EngineEffect]) -> None:
        nonlocal effects_seen
        pids = {client_id: frontend.pid for client_id, frontend in shell._frontends.items()}  # of some there is none afterwards
        carry_out(shell, effects)
        for effect in effects:  # with what followed from them
            if isinstance(effect, Reclaimed):
                reclaimed[effect.client_id] = reclaimed.get(effect.client_id, 0) + effect.nbytes
            elif isinstance(effect, ClientGone):
                pid, nbytes = pids[effect.client_id], reclaimed.pop(effect.client_id, 0)
                engine.journal.write(Gone(pid, nbytes, time.monotonic_ns(), waited_ns(engine.pid), *heard.pop(pid, (0, 0))))
        before, effects_seen = effects_seen, effects_seen + len(effects)
        if before // _CHECK_EVERY != effects_seen // _CHECK_EVERY:
            engine.check_book()

    def heard_of(frontend: Frontend) -> None:
        heard[frontend.pid] = time.monotonic_ns(), waited_ns(engine.pid)
        died(frontend)

    setattr(Shell, "carry_out", observed)  # noqa: B010  # this process has one ring
    setattr(Frontend, "died", heard_of)  # noqa: B010


async def run_engine(assignment: control.Assignment, channel: Channel) -> None:
    """Serves until the driver has gone, or has had enough."""
    logging.getLogger("shmring").setLevel(logging.CRITICAL)  # every fault warns somewhere; what must not be is journalled
    engine, plan = _Engine(assignment), assignment.plan
    _observe(engine)
    ring = engine.ring = await shmring.serve(
        assignment.names[assignment.index],
        slab_nbytes=plan.slab_nbytes,
        broadcast_nbytes="8MiB",
        worker_backlog=16,
        reply_nbytes=plan.reply_nbytes,
        inline_nbytes="1KiB",
        socket_dir=assignment.socket_dir,
        payload_type=Order,
        calls={"statistics": engine.statistics},
    )
    channel.answer(control.Ready())
    serving = asyncio.create_task(ring.run(engine.handle, _MAX_CONCURRENCY))
    while not isinstance(await channel.question(), control.Leave):
        pass
    await ring.close()
    await serving
