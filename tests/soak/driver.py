"""The driver of a run: starts the processes, says which phase it is, and looks at all of them again and again.

It asks one process at a time and waits for the answer, with a limit, so a process that hangs ends the run instead of being
waited for. Processes are forked from one that has imported everything; they end with the driver however it ends.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.soak import control
from tests.soak.child import Program, run_child
from tests.soak.engine_process import run_engine
from tests.soak.frontend_process import run_frontend
from tests.soak.plan import Phase, Plan
from tests.soak.process_memory import Footprint, footprint

__all__ = ["ENGINE", "IdleLook", "Observations", "ProcessDied", "ProcessSample", "Sample", "run"]

ENGINE = "engine"
_START_LIMIT_S = 120.0  # for the import of torch, on a machine that does much else
_ANSWER_LIMIT_S = 30.0
_LEAVE_LIMIT_S = 10.0
_SETTLE_LIMIT_S = 10.0  # after an idle phase; everything should have come home within it already
_SHORT_SETTLE_LIMIT_S = 1.0
_SETTLE_POLL_S = 0.05


class ProcessDied(Exception):
    """A process of the run has died, or does not answer: the run has no result."""


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


class _Child:
    """A process of the run, as the driver sees it."""

    def __init__(self, context: Any, title: str, program: Program, assignment: control.Assignment) -> None:
        self.title = title
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_child, args=(program, assignment, theirs), name=title, daemon=True)
        self._process.start()
        theirs.close()  # the child has its own; were this end open, its death would not be an end of file
        self.pid: int = self._process.pid

    def tell(self, question: control.Question) -> None:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(question))
        except OSError as error:
            raise ProcessDied(f"the {self.title} (pid {self.pid}) has died; its last words are above") from error

    def hear(self, limit_s: float = _ANSWER_LIMIT_S) -> control.Answer:
        try:
            if self._pipe.poll(limit_s):
                return control.answers.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise ProcessDied(f"the {self.title} (pid {self.pid}) has died; its last words are above") from None
        raise ProcessDied(f"the {self.title} (pid {self.pid}) has not answered within {limit_s:g} s")

    def look(self) -> control.Seen:
        self.tell(control.Look())
        seen = self.hear()
        assert isinstance(seen, control.Seen)
        return seen

    def close(self) -> None:
        """Has it leave, and makes sure that it does."""
        with contextlib.suppress(ProcessDied):
            self.tell(control.Leave())
        self._process.join(_LEAVE_LIMIT_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()


class _Driver:
    def __init__(self, plan: Plan, children: dict[str, _Child], progress: Callable[[str], None]) -> None:
        self.plan = plan
        self.children = children
        self.frontends = [child for title, child in children.items() if title != ENGINE]
        self.progress = progress
        self.seen = Observations([], [])
        self.began = time.monotonic()

    def run(self) -> Observations:
        for child in self.children.values():
            child.hear(_START_LIMIT_S)
        self.began = time.monotonic()
        for cycle in range(self.plan.cycles):
            self.progress(f"cycle {cycle + 1} of {self.plan.cycles}")
            for phase in Phase:
                self.go_through(cycle, phase)
        return self.seen

    def go_through(self, cycle: int, phase: Phase) -> None:
        self.tell_frontends(control.Begin(phase))
        ends = time.monotonic() + self.plan.phase_s
        self.sample(cycle, phase)  # so that every phase has two, however crowded the machine is, and so a throughput
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, self.plan.interval_s))
            self.sample(cycle, phase)
        self.tell_frontends(control.Stop())
        if phase is Phase.IDLE:
            self.look_idle(cycle)

    def tell_frontends(self, question: control.Question) -> None:
        """Tells all of them first: what one still does may need what another is about to give back."""
        for frontend in self.frontends:
            frontend.tell(question)
        for frontend in self.frontends:
            frontend.hear()

    def sample(self, cycle: int, phase: Phase) -> None:
        at_s = time.monotonic() - self.began
        processes = {title: ProcessSample(footprint(child.pid), child.look()) for title, child in self.children.items()}
        self.seen.samples.append(Sample(at_s, cycle, phase, processes))

    def look_idle(self, cycle: int) -> None:
        """Looks whether everything has come home; on a crowded machine it may take a moment longer."""
        # What is kept on purpose is not waited for.
        deadline = time.monotonic() + (_SHORT_SETTLE_LIMIT_S if self.plan.sabotages else _SETTLE_LIMIT_S)
        while not (look := self.idle_look(cycle)).is_empty and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_S)
        self.seen.idle_looks.append(look)

    def idle_look(self, cycle: int) -> IdleLook:
        engine = self.children[ENGINE].look()
        frontends = [frontend.look() for frontend in self.frontends]
        return IdleLook(
            cycle=cycle,
            slots=engine.slots_in_use + sum(seen.slots_in_use for seen in frontends),
            reply_nbytes=engine.reply_slots_nbytes,
            extra_leased_nbytes=max(0, engine.leased_nbytes - len(frontends) * self.plan.lease_nbytes),
            quarantined_nbytes=engine.quarantined_nbytes,
            requests=engine.busy + sum(seen.busy for seen in frontends),
        )


def run(plan: Plan, progress: Callable[[str], None]) -> Observations:
    """Carries a plan out. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to do.
        progress: called with a line before each cycle.

    Raises:
        ProcessDied: a process died or did not answer: there is no result.
    """
    with tempfile.TemporaryDirectory(prefix="shmring-soak-") as directory, _children(plan, directory) as children:
        return _Driver(plan, children, progress).run()


@contextlib.contextmanager
def _children(plan: Plan, directory: str) -> Iterator[dict[str, _Child]]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.engine_process", "tests.soak.frontend_process"])
    with contextlib.ExitStack() as stack:
        children: dict[str, _Child] = {}
        for index in range(-1, plan.frontends):
            title = ENGINE if index < 0 else f"frontend {index + 1}"
            program: Program = run_engine if index < 0 else run_frontend
            child = _Child(context, title, program, control.Assignment(plan, "soak", directory, index))
            stack.callback(child.close)  # frontends leave before the engine: the last is closed first
            children[title] = child
        yield children
