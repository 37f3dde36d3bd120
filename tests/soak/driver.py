"""The driver of a run: starts the processes, says which phase it is, and looks at all of them again and again."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence

import msgspec

from tests.fleet.fleet import Child, Fleet
from tests.fleet.footprint import Footprint, footprint
from tests.soak import control
from tests.soak.engine_process import run_engine
from tests.soak.frontend_process import run_frontend
from tests.soak.plan import Phase, Plan

ENGINE = "engine"
_SETTLE_LIMIT_S = 10.0  # after an idle phase; everything should have come home within it already
_SHORT_SETTLE_LIMIT_S = 1.0
_SETTLE_POLL_S = 0.05


class ProcessSample(msgspec.Struct, frozen=True):
    """A process at a moment: what the kernel says of it, and what it says itself."""

    footprint: Footprint
    seen: control.Seen


class Sample(msgspec.Struct, frozen=True):
    """All processes at a moment, ``at_s`` seconds after the start of the first phase."""

    at_s: float
    cycle: int
    phase: Phase
    processes: dict[str, ProcessSample]


class IdleLook(msgspec.Struct, frozen=True):
    """What was not at home after an idle phase; all must be 0.

    Attributes:
        cycle: of the phase.
        slots: in use by the engine or a frontend.
        reply_nbytes: of the reply reserve in use.
        extra_leased_nbytes: leased out beyond every frontend's base lease.
        quarantined_nbytes: of leases whose frontend is neither connected nor known to be dead.
        requests: that wait or run.
    """

    cycle: int
    slots: int
    reply_nbytes: int
    extra_leased_nbytes: int
    quarantined_nbytes: int
    requests: int

    @property
    def is_empty(self) -> bool:
        return not (self.slots or self.reply_nbytes or self.extra_leased_nbytes or self.quarantined_nbytes or self.requests)


class Observations(msgspec.Struct):
    """What a run has shown."""

    samples: list[Sample]
    idle_looks: list[IdleLook]


class _Driver:
    def __init__(self, plan: Plan, engine: Child, frontends: Sequence[Child], progress: Callable[[str], None]) -> None:
        self.plan = plan
        self.engine = engine
        self.frontends = frontends
        self.progress = progress
        self.seen = Observations([], [])
        self.began = time.monotonic()

    async def run(self) -> Observations:
        for cycle in range(self.plan.cycles):
            self.progress(f"cycle {cycle + 1} of {self.plan.cycles}")
            for phase in Phase:
                await self.go_through(cycle, phase)
        return self.seen

    async def go_through(self, cycle: int, phase: Phase) -> None:
        await self.ask_frontends(control.Begin(phase))
        ends = time.monotonic() + self.plan.phase_s
        await self.sample(cycle, phase)  # so that every phase has two, however crowded the machine is, and so a throughput
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self.plan.interval_s))
            await self.sample(cycle, phase)
        await self.ask_frontends(control.Stop())
        if phase is Phase.IDLE:
            await self.look_idle(cycle)

    async def ask_frontends(self, question: control.Question) -> None:
        """Asks all of them at once: what one still does may need what another is about to give back."""
        await asyncio.gather(*(frontend.ask(question) for frontend in self.frontends))

    async def sample(self, cycle: int, phase: Phase) -> None:
        at_s = time.monotonic() - self.began
        processes = {}
        for child in (self.engine, *self.frontends):
            processes[child.title] = ProcessSample(footprint(child.pid), await child.ask(control.Look()))
        self.seen.samples.append(Sample(at_s, cycle, phase, processes))

    async def look_idle(self, cycle: int) -> None:
        """Looks whether everything has come home; on a crowded machine it may take a moment longer."""
        # What is kept on purpose is not waited for.
        deadline = time.monotonic() + (_SHORT_SETTLE_LIMIT_S if self.plan.sabotages else _SETTLE_LIMIT_S)
        while not (look := await self.idle_look(cycle)).is_empty and time.monotonic() < deadline:
            await asyncio.sleep(_SETTLE_POLL_S)
        self.seen.idle_looks.append(look)

    async def idle_look(self, cycle: int) -> IdleLook:
        engine: control.Seen = await self.engine.ask(control.Look())
        frontends: list[control.Seen] = [await frontend.ask(control.Look()) for frontend in self.frontends]
        return IdleLook(
            cycle=cycle,
            slots=engine.slots_in_use + sum(seen.slots_in_use for seen in frontends),
            reply_nbytes=engine.reply_slots_nbytes,
            extra_leased_nbytes=max(0, engine.leased_nbytes - len(frontends) * self.plan.lease_nbytes),
            quarantined_nbytes=engine.quarantined_nbytes,
            requests=engine.busy + sum(seen.busy for seen in frontends),
        )


async def run(plan: Plan, progress: Callable[[str], None]) -> Observations:
    """Carries a plan out. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to do.
        progress: called with a line before each cycle.

    Raises:
        ChildError: a process died or did not answer: there is no result.
    """
    fleet = Fleet(["tests.soak.engine_process", "tests.soak.frontend_process"], control.Question, control.Answer)
    with tempfile.TemporaryDirectory(prefix="shmring-soak-") as directory:
        try:
            engine = await fleet.start(ENGINE, run_engine, control.Assignment(plan, "soak", directory, -1))
            frontends = [
                await fleet.start(f"frontend {index + 1}", run_frontend, control.Assignment(plan, "soak", directory, index))
                for index in range(plan.frontends)
            ]
            seen = await _Driver(plan, engine, frontends, progress).run()
            for child in (*frontends, engine):
                child.tell(control.Leave())
                await child.gone()
            return seen
        finally:
            await fleet.kill_all()
