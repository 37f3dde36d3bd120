"""Carries a plan out: starts the processes, makes the faults happen, and looks at the books when all is quiet.

At the end of a phase every frontend stops sending. Whatever has not ended then within the plan's limit is lost. The slots
and replies that anybody still counts are held beyond their step. After that the frontends say goodbye, and what the engine
does not count as free again has leaked; so have descriptors that a process has beyond those it began with.

A frontend that is stopped has replies that nobody reads, more than an engine has places for. It goes on when a request of each
other frontend has ended. If one has not ended within the limit, somebody waits for the stopped one. That does not depend on how
busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import shmring
from shmring.client import pauses
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY
from tests.chaos import control
from tests.chaos.cores import waited_ns
from tests.chaos.engine_process import run_engine
from tests.chaos.frontend_process import run_frontend
from tests.chaos.plan import Event, Fault, Phase, Plan, phases
from tests.chaos.worker_process import run_worker
from tests.fleet.child import Program
from tests.fleet.fleet import Child, ChildError, Fleet

_SAMPLE_INTERVAL_S = 0.25
_STATISTICS_LIMIT_S = 30.0
_SETTLE_LIMIT_S = 5.0  # for goodbyes and closed sockets to be noticed, which takes the engine a round of its loop
_SETTLE_POLL_S = 0.01


class Happened(msgspec.Struct, frozen=True):
    """A fault that was made: what, to which process, from when until when.

    Of a kill, ``engines_waited_ns`` is how long engines had waited for a core, by pid, and ``word_ns`` when the kernel's word
    of the death came here.
    """

    fault: Fault
    pid: int
    began_ns: int
    ended_ns: int
    engines_waited_ns: dict[int, int] = {}
    word_ns: int = 0


class QuietLook(msgspec.Struct, frozen=True):
    """What was found at the end of a phase.

    Attributes:
        lost: requests without an end.
        slots_held: slots and reply slots that either end still counted.
        leaked_nbytes: bytes of the slab that were not free again.
        leaked_descriptors: descriptors of the living beyond those they began with.
        segments_left: names in /dev/shm.
    """

    lost: int
    slots_held: int
    leaked_nbytes: int
    leaked_descriptors: int
    segments_left: int


class Incarnation(msgspec.Struct, frozen=True):
    """A process that there was: where its journal is, and how it ended ("killed", "left", "stayed")."""

    pid: int
    is_engine: bool
    journal: Path
    end: str


class Observations(msgspec.Struct):
    """What the driver has seen; the journals tell the rest."""

    began_ns: int = 0
    ended_ns: int = 0
    happened: list[Happened] = msgspec.field(default_factory=list)
    looks: list[QuietLook] = msgspec.field(default_factory=list)
    incarnations: list[Incarnation] = msgspec.field(default_factory=list)
    violations: list[str] = msgspec.field(default_factory=list)


class _Member:
    """An engine, a frontend or a worker, in whatever incarnation it is now. Its lock is held while something happens to it."""

    def __init__(self, kind: str, index: int, play: Program, title: str = "") -> None:
        self.kind = kind
        self.index = index
        self.play = play
        self.title = title or f"{kind} {index}"
        self.lock = asyncio.Lock()
        self.lives = 0
        self.child: Child | None = None
        self.journal = Path()
        self.first_descriptors = 0

    @property
    def now(self) -> Child:
        assert self.child is not None, f"{self.title} is not started"
        return self.child


class _Driver:
    def __init__(self, plan: Plan, directory: Path, progress: Callable[[str], None]) -> None:
        self.plan = plan
        self.directory = directory
        self.progress = progress
        self.names = tuple(f"chaos-{directory.name}-{index}" for index in range(plan.engines))
        self.fleet = Fleet(
            ["tests.chaos.engine_process", "tests.chaos.frontend_process", "tests.chaos.worker_process"],
            control.Question,
            control.Answer,
        )
        self.engines = [_Member("engine", index, run_engine, name) for index, name in enumerate(self.names)]
        self.frontends = [_Member("frontend", index, run_frontend) for index in range(plan.frontends)]
        self.readers = [_Member("worker", index, run_worker) for index in range(plan.readers)]
        self.seen = Observations()
        self.stopping = asyncio.Lock()  # held while a frontend is stopped
        self.observer: shmring.Client | None = None

    # -- starting and ending -----------------------------------------------------------------------------------------------

    async def start(self, member: _Member) -> None:
        member.lives += 1
        member.journal = self.directory / f"{member.kind}-{member.index}-{member.lives}.jsonl"
        assignment = control.Assignment(
            self.plan, member.index, member.lives, self.names, str(self.directory), str(member.journal)
        )
        member.child = await self.fleet.start(member.title, member.play, assignment)
        member.first_descriptors = member.child.descriptors()

    def readers_of(self, name: str) -> int:
        """How many workers an engine has when all is quiet."""
        return len(range(self.names.index(name), self.plan.readers, len(self.names)))

    def has_its_readers(self, name: str) -> Callable[[dict[str, int]], bool]:
        readers = self.readers_of(name)
        return lambda now: now["workers"] == readers

    def bury(self, member: _Member, end: str) -> None:
        """Notes how a process has ended."""
        self.seen.incarnations.append(Incarnation(member.now.pid, member in self.engines, member.journal, end))

    async def run(self) -> Observations:
        self.seen.began_ns = time.monotonic_ns()
        for members in (self.engines, self.frontends, self.readers):
            await asyncio.gather(*map(self.start, members))
        config = shmring.ClientConfig(socket_dir=str(self.directory), lease_nbytes=4096, prefault=False)
        pauses.LONGEST_S = 0.1
        async with shmring.connect(self.names, config) as self.observer:
            for name in self.names:
                await self.settled(name, self.has_its_readers(name))
            for engine in self.engines:
                engine.first_descriptors = engine.now.descriptors()  # with its observer and its workers
            sampling = asyncio.create_task(self.sample())
            try:
                for number, phase in enumerate(phases(self.plan), 1):
                    self.progress(f"phase {number}: {len(phase.events)} faults")
                    await self.play(phase)
            finally:
                sampling.cancel()
                await asyncio.wait([sampling])
        for member in [*self.frontends, *self.readers, *self.engines]:
            member.now.dying = True
            member.now.tell(control.Leave())
            await member.now.gone()
            self.bury(member, "stayed")
        self.seen.ended_ns = time.monotonic_ns()
        return self.seen

    async def sample(self) -> None:
        """Looks at the slabs now and then; what is free, leased, quarantined and kept must always be all of each."""
        while True:
            for name in self.names:
                if (now := await self.statistics(name)) is None:
                    continue
                parts = [now[f"{what}_nbytes"] for what in ("free", "leased", "quarantined", "kept")]
                if sum(parts) != now["leasable_nbytes"]:
                    self.seen.violations.append(f"{' + '.join(map(str, parts))} is not {now['leasable_nbytes']}")
                if now["protocol_errors"]:
                    self.seen.violations.append(f"{now['protocol_errors']} frontends were said to break the protocol")
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    async def statistics(self, name: str) -> dict[str, int] | None:
        """Asks an engine; None if it died meanwhile."""
        assert self.observer is not None
        try:
            counts: dict[str, int] = await self.observer.call("statistics", engine=name, timeout=_STATISTICS_LIMIT_S)
        except shmring.EngineDeadError:
            return None
        return counts

    # -- a phase -------------------------------------------------------------------------------------------------------------

    async def play(self, phase: Phase) -> None:
        """Load and faults for as long as the phase lasts, and then a look at what is left."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(member.now.ask(control.Open()) for member in self.frontends))
        failures: list[str] = []
        try:
            async with asyncio.TaskGroup() as happening:
                for event in phase.events:
                    await asyncio.sleep(max(0.0, started + event.at_s - loop.time()))
                    happening.create_task(self.happen(event))
        except* ChildError as group:
            failures += [str(error) for error in group.exceptions]
        if failures:
            raise ChildError("; ".join(failures))
        await asyncio.sleep(max(0.0, started + phase.seconds - loop.time()))
        self.seen.looks.append(await self.look())

    async def happen(self, event: Event) -> None:
        """Makes one fault happen, when what happens to that process before is over."""
        member = self.victim(event)
        async with member.lock:
            pid, began_ns = member.now.pid, time.monotonic_ns()
            engines_waited_ns: dict[int, int] = {}
            word_ns = 0
            self.progress(f"{event.fault.value}: {member.title}, pid {pid}")
            match event.fault:
                case Fault.KILL_ENGINE | Fault.KILL_FRONTEND | Fault.KILL_WORKER:
                    began_ns, word_ns, engines_waited_ns = await self.kill(member, event)
                case Fault.STOP_FRONTEND:
                    await self.stop_frontend(member, event)
                case Fault.STOP_ENGINE | Fault.STOP_WORKER:
                    await self.stop(member, event)
                case Fault.HANG_UP:
                    member.now.tell(control.HangUp())
                    await asyncio.sleep(event.duration_s)
                    self.seen.happened.append(Happened(Fault.HANG_UP, pid, began_ns, time.monotonic_ns()))
                    began_ns, word_ns, engines_waited_ns = await self.kill(member, event)
                case Fault.LEAVE:
                    member.now.dying = True
                    member.now.tell(control.Leave())
                    await member.now.gone()
                    await self.replace(member, event, "left")
                case Fault.ABORT_STORM:
                    member.now.tell(control.Storm(event.duration_s))
                    await asyncio.sleep(event.duration_s)
                case Fault.FULL_SLAB:
                    for each in self.frontends:
                        if each.child is not None and each.child.lives and not each.child.dying:
                            each.child.tell(control.Flood(event.duration_s))
                    await asyncio.sleep(event.duration_s)
            fault = Fault.KILL_FRONTEND if event.fault is Fault.HANG_UP else event.fault
            self.seen.happened.append(Happened(fault, pid, began_ns, time.monotonic_ns(), engines_waited_ns, word_ns))

    def victim(self, event: Event) -> _Member:
        """To whom a fault happens."""
        if event.fault in (Fault.KILL_ENGINE, Fault.STOP_ENGINE):
            return self.engines[event.engine]
        if event.fault in (Fault.KILL_WORKER, Fault.STOP_WORKER):
            return self.readers[event.frontend % len(self.readers)]
        return self.frontends[event.frontend]

    async def kill(self, member: _Member, event: Event) -> tuple[int, int, dict[int, int]]:
        engines_waited_ns = {engine.now.pid: waited_ns(engine.now.pid) for engine in self.engines if engine.now.lives}
        killed_ns = await member.now.kill()
        word_ns = time.monotonic_ns()
        pause = event if event.fault is not Fault.HANG_UP else msgspec.structs.replace(event, duration_s=0.0)
        await self.replace(member, pause, "killed")
        return killed_ns, word_ns, engines_waited_ns

    async def replace(self, member: _Member, event: Event, end: str) -> None:
        """Starts the next incarnation of a process that has ended."""
        self.bury(member, end)
        await asyncio.sleep(event.duration_s)
        await self.start(member)
        if member in self.engines:
            assert self.observer is not None
            await self.observer.wait_connected(_STATISTICS_LIMIT_S, engine=member.title)
            member.first_descriptors = 0  # other frontends attach at the same time: known when they have closed
        elif member in self.frontends:
            await member.now.ask(control.Open())

    async def stop(self, member: _Member, event: Event) -> None:
        member.now.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(event.duration_s)
        finally:
            member.now.signal(signal.SIGCONT)

    async def stop_frontend(self, member: _Member, event: Event) -> None:
        """Stops a frontend whose replies lie unread. It goes on when a request of each other frontend has ended."""
        async with self.stopping:  # one at a time, so that no other stops whoever is asked
            await member.now.ask(control.Hoard(event.duration_s))
            member.now.signal(signal.SIGSTOP)
            probes: list[asyncio.Task[None]] = []
            try:
                await asyncio.sleep(event.duration_s)
                others = [other for other in self.frontends if other is not member and not other.lock.locked()]
                probes = [asyncio.create_task(self.probe(other)) for other in others]
                if probes:
                    await asyncio.wait(probes, timeout=self.plan.quiet_limit_s)
                for other, probe in zip(others, probes, strict=True):
                    if not probe.done():
                        self.seen.violations.append(
                            f"a request of {other.title} waits for {member.title}, which is stopped and reads nothing"
                        )
            finally:
                member.now.signal(signal.SIGCONT)
            await asyncio.gather(*probes)

    async def probe(self, member: _Member) -> None:
        """Returns when a request of a frontend has ended, or the frontend has."""
        child = member.now
        try:
            await child.ask(control.Probe())
        except ChildError:
            if not child.dying:
                raise

    # -- when all is quiet -----------------------------------------------------------------------------------------------------

    async def look(self) -> QuietLook:
        """Stops all sending, and counts what is left."""
        limit_s = self.plan.quiet_limit_s
        questions = (member.now.ask(control.Quiet(limit_s), 2 * limit_s + 30) for member in self.frontends)
        reports = [answer for answer in await asyncio.gather(*questions) if isinstance(answer, control.QuietReport)]
        lost = sum(len(report.unfinished) for report in reports)
        held = sum(report.slots_in_use + report.replies_held for report in reports)
        for name in self.names:
            counts = await self.settled(name, lambda now: _held(now) == 0 and now["reply_free_nbytes"] == now["reply_nbytes"])
            held += _held(counts)
        await asyncio.gather(*(member.now.ask(control.Close()) for member in self.frontends))
        leaked = sum([await self.leaked_nbytes(name) for name in self.names])
        segments = [path for name in self.names for path in SHM_DIRECTORY.glob(f"{NAME_PREFIX}-*-{name}-*")]
        return QuietLook(lost, held, leaked, await self.leaked_descriptors(), len(segments))

    async def leaked_nbytes(self, name: str) -> int:
        """Counts what of an engine's slab is not free again."""
        assert self.observer is not None
        own = self.observer.engines[name].statistics().leased_nbytes
        readers = self.readers_of(name)

        def is_whole(now: dict[str, int]) -> bool:
            returned = now["free_nbytes"] + now["kept_nbytes"] + own == now["leasable_nbytes"]
            return returned and now["broadcast_free_nbytes"] == now["broadcast_nbytes"] and now["workers"] == readers

        counts = await self.settled(name, is_whole)
        if counts["workers"] != readers:
            self.seen.violations.append(f"{counts['workers']} of {readers} workers have joined {name} when all is quiet")
        unreturned = counts["reply_nbytes"] - counts["reply_free_nbytes"]
        unreturned += counts["broadcast_nbytes"] - counts["broadcast_free_nbytes"]
        return counts["leasable_nbytes"] - counts["free_nbytes"] - counts["kept_nbytes"] - own + unreturned

    async def settled(self, name: str, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Asks an engine until a condition is true, or has had time enough to become so; returns what it said last."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + min(_SETTLE_LIMIT_S, self.plan.quiet_limit_s)
        while True:
            counts = await self.statistics(name)
            if counts is None:
                raise ChildError(f"{name} died when nothing happened to it")
            if condition(counts) or loop.time() > ends:
                return counts
            await asyncio.sleep(_SETTLE_POLL_S)

    async def leaked_descriptors(self) -> int:
        """Counts descriptors beyond those that each process had before there was a client."""
        loop = asyncio.get_running_loop()
        members = [*self.frontends, *self.engines]
        for engine in self.engines:
            engine.first_descriptors = engine.first_descriptors or engine.now.descriptors()
        ends = loop.time() + min(_SETTLE_LIMIT_S, self.plan.quiet_limit_s)
        while True:
            leaked = sum(max(0, member.now.descriptors() - member.first_descriptors) for member in members)
            if not leaked or loop.time() > ends:
                return leaked
            await asyncio.sleep(_SETTLE_POLL_S)


def _held(counts: dict[str, int]) -> int:
    in_slots = counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"]
    return in_slots + counts["kept_pinned"] + counts["broadcasts_outstanding"]


async def run(plan: Plan, progress: Callable[[str], None], keep: Callable[[Observations], None]) -> None:
    """Carries a plan out. When this returns or raises, no process of it is left, and no file.

    Args:
        plan: what to do.
        progress: called with a line before each step.
        keep: called with what was seen, while the journals are still there.

    Raises:
        ChildError: a process died that nobody had killed, or did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        driver = _Driver(plan, Path(directory), progress)
        try:
            keep(await driver.run())
        finally:
            with contextlib.suppress(ChildError):
                await driver.fleet.kill_all()
