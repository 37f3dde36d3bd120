"""The engine core: ring, scheduler and executor around one event loop.

Theory of operation: requests are claimed as they arrive and stand in the scheduler's line. Each turn of :meth:`EngineCore.run`
is a step: ended requests are removed, waiting requests are admitted if there is room, and the executor runs on a thread, so
that the loop goes on handling frontends, leases, control calls and aborts. Running requests are removed only between two steps:
an abort, a deadline or a pause releases their slots when no step is reading them. Waiting requests are removed at once.

The executor is touched by one thread only: steps, ``forget``, remote calls and the profiler all run on it, one after the other.

The engine ends if an executor says that it is dead (:class:`~shmring.engine.executors.ExecutorDeadError`), or raises something
that is no ``Exception``. :meth:`EngineCore.run` then raises, every request fails, and frontends get the reason. A step or call
that takes longer than ``step_timeout_s`` ends nothing, but :meth:`EngineCore.health` says so until it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import count
from typing import Any, TypeVar

import msgspec

import shmring
from shmring.core.loggers import logger_of
from shmring.door import seconds_of
from shmring.engine.answers import checked, without_frames
from shmring.engine.described_requests import being_prepared, describe_ended, describe_requests, texts_of
from shmring.engine.executor_thread import ExecutorThread
from shmring.engine.executors.interface import Executor, ExecutorDeadError, OverloadedError, StepInput, StepOutput
from shmring.engine.frontend_reports import FrontendReports
from shmring.engine.metrics import EngineMetrics, EngineTimes
from shmring.engine.operator_aborts import OperatorAborts
from shmring.engine.profiling import StepProfiler
from shmring.engine.protocol import Calls, EncodeReply, EngineRequestPayload, FrontendReport, GenerateReply
from shmring.engine.request import EndedRequest, EngineRequest, check_payload
from shmring.engine.scheduler import Scheduler, SchedulerConfig
from shmring.engine.spending import Spending, whose
from shmring.service.logs import concerned
from shmring.service.loop_lag import LoopLag

__all__ = ["EngineCore", "OperatorAbortError", "PausedError", "ServerFacts"]

logger = logger_of("shmring.engine.core")

_Result = TypeVar("_Result")

_FORGETTING_S = 0.005  # after the last step; under load, the next one comes sooner
_RECENT_STEPS = 120  # whose times a snapshot has: some seconds of decoding
_ENDED_LATELY = 512  # requests that are remembered: a quarter of a megabyte, and some seconds of many callers with short ones
_MAX_NAMES = 8  # of requests, in a line of the log
_MAX_IN_LINE = 5  # callers in line that a snapshot names
_STEP = "a step"  # what the executor's thread is busy with

# Life-cycle methods of an executor, which no remote call may reach.
_NOT_REMOTE = frozenset({"describe", "execute", "forget", "close"})


class PausedError(Exception):
    """The engine was paused and gave up what was running; the same request may succeed once it goes on."""


class OperatorAbortError(Exception):
    """An operator has ended the request, which is not to be sent again."""


class ServerFacts(msgspec.Struct, frozen=True):
    """The server that an engine belongs to, for snapshots.

    Attributes:
        name: of the server.
        engines: how many it has.
        pid: of its supervisor.
    """

    name: str
    engines: int
    pid: int


class EngineCore:
    """Executes what the ring brings. Use :meth:`run`; ``async with`` closes ring and executor.

    Attributes:
        metrics: counters.
        times: how long the parts of requests took.
        dead_error: why the engine has ended, if its executor died.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        *,
        step_timeout_s: float,
        profiler_dir: str | None,
        server: ServerFacts | None,
    ) -> None:
        self.metrics = EngineMetrics()
        self.times = EngineTimes()
        self.dead_error: ExecutorDeadError | None = None
        self._executor = executor
        self._scheduler: Scheduler[EngineRequest] = Scheduler(scheduler_config, pauses=executor.describe().pauses)
        self._step_timeout_s = step_timeout_s
        self._lag = LoopLag()
        self._profiler = StepProfiler(profiler_dir)
        self._operator_aborts = OperatorAborts()
        self._reports = FrontendReports()
        self._thread = ExecutorThread("engine-step")
        self._flushing: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._to_forget: dict[int, str] = {}  # the names of requests that have ended, by number
        self._busy: tuple[str, float] | None = None  # what the executor's thread is doing, and since when
        self._ended = False
        self._server = server
        self._stepping: Sequence[EngineRequest] = ()  # the requests of the last step
        self._concerned = _Concerned()
        self._draining = False
        self._paused = False
        self._giving_up = False  # paused, and running requests end at the next boundary
        self._work = asyncio.Event()  # there may be work
        self._boundary = asyncio.Condition()  # of who waits for a pause: notified between two steps, and when the pause ends
        self._ring: shmring.Ring | None = None
        self._ended_lately: deque[EndedRequest] = deque(maxlen=_ENDED_LATELY)
        self._recent_steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._spending = Spending(time.monotonic())
        self._on_thread_s = 0.0  # of the executor's thread
        # Of steps, so far: in which the loop was late, and in which the process did not get to run.
        self._late_s = self._stopped_s = 0.0

    @property
    def ring(self) -> shmring.Ring:
        """The ring from which requests come."""
        assert self._ring is not None, "made by create()"
        return self._ring

    @classmethod
    async def create(
        cls,
        name: str,
        executor: Executor,
        ring_config: shmring.RingConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        *,
        step_timeout_s: float = 60.0,
        profiler_dir: str | None = None,
        server: ServerFacts | None = None,
        **overrides: Any,
    ) -> EngineCore:
        """Opens the ring of a name for an executor.

        Args:
            name: what frontends connect to.
            executor: computes; closed with the core.
            ring_config: of the ring; ``overrides`` are fields of it.
            scheduler_config: by default, steps of as many requests as the executor takes.
            step_timeout_s: a step that takes longer makes the engine report that it is not well.
            profiler_dir: where traces of :meth:`start_profile` go; None: there is no profiling.
            server: to which it belongs.

        Raises:
            shmring.ShmringError, PermissionError, ValueError, TypeError: as :func:`shmring.serve`.
        """
        scheduling = scheduler_config or SchedulerConfig(max_num_seqs=executor.describe().max_batch_size)
        step_timeout_s = seconds_of(step_timeout_s, "step_timeout_s")
        core = cls(executor, scheduling, step_timeout_s=step_timeout_s, profiler_dir=profiler_dir, server=server)
        core._ring = await shmring.serve(name, ring_config, payload_type=EngineRequestPayload, calls=core._calls(), **overrides)
        core._ring.add_to_snapshots(core._describe)
        return core

    def _calls(self) -> Mapping[str, Callable[..., Any]]:
        return {
            Calls.HEALTH: self.health,
            Calls.DESCRIBE: self.describe,
            Calls.STATISTICS: self.statistics,
            Calls.TIMES: self.collect_times,
            Calls.PAUSE: self.pause_generation,
            Calls.RESUME: self.resume_generation,
            Calls.IS_PAUSED: self.is_paused,
            Calls.ABORT_REQUESTS: self.abort_requests,
            Calls.NEXT_ABORTS: self._operator_aborts.next_names,
            Calls.TELL_ENGINES: self.tell_engines,
            Calls.RESET_MM_CACHE: self.reset_mm_cache,
            Calls.COLLECTIVE_RPC: self.collective_rpc,
            Calls.LOG_STATS: self.do_log_stats,
            Calls.START_PROFILE: self.start_profile,
            Calls.STOP_PROFILE: self.stop_profile,
        }

    async def run(self) -> None:
        """Executes steps until the ring is closed. Cancelling it waits for the running step.

        Raises:
            ExecutorDeadError: the executor will never work again.
        """
        claiming = asyncio.create_task(self._claim_all())
        watching = asyncio.create_task(self._lag.watch())
        try:
            while not claiming.done():
                await self._turn()
            claiming.result()
        finally:
            self._ended = True
            claiming.cancel()
            watching.cancel()
            for request in (*self._scheduler, *self._scheduler.withdraw_all()):
                if not request.over:
                    request.fail(self.dead_error or shmring.ClosedError("the engine is stopping"))

    # -- what comes ---------------------------------------------------------------------------------------------------

    async def _claim_all(self) -> None:
        try:
            async for claim in self.ring:
                self._take(claim)
        finally:
            self._work.set()

    def _take(self, claim: shmring.Claim) -> None:
        try:
            check_payload(claim.payload)
            request = EngineRequest(next(self._numbers), claim, self._ended_lately)
            displaced = self._scheduler.add(request, request.owner)
        except (ValueError, OverloadedError) as error:
            self.metrics.refused_requests += 1
            claim.fail(error)
            return
        if displaced is not None:
            self.metrics.refused_requests += 1
            displaced.fail(OverloadedError("the line is full, and most of it is yours; try again later"))
        claim.on_abort(lambda: self._given_up(request))
        if request.deadline is not None:
            remaining_s = request.deadline - time.monotonic()  # the loop's clock may be a cached one
            request.timer = asyncio.get_running_loop().call_later(max(0.0, remaining_s), self._expired, request)
        self._work.set()

    def _given_up(self, request: EngineRequest) -> None:
        if self._scheduler.withdraw(request):
            request.leave()
        self._work.set()  # a running one is removed at the next boundary, even if there is no other work

    def _expired(self, request: EngineRequest) -> None:
        self.metrics.timed_out_requests += 1
        if self._scheduler.is_running(request):
            request.expired = True
            self._work.set()
        else:  # it waits, or is finished and its replies wait for a slow frontend
            self._scheduler.withdraw(request)
            request.time_out()

    # -- steps ----------------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """One step, or the wait for something to do."""
        self._work.clear()  # what comes from here on is waited for no longer
        self._dismiss()
        if self._paused:
            self._scheduler.admit_answers()  # or requests with several would never end
        elif admitted := self._scheduler.admit():
            now = time.monotonic()
            for request in admitted:
                request.admitted_at = now
                self.times.queue.add(now - request.arrived_at)
        self._stepping = batch = self._scheduler.step()
        if self._paused:
            await self._tell_of_boundary()
        # A method may be called as soon as a pause has ended; it does not find requests that the pause has given up.
        if batch or (self._to_forget and (self._paused or not await self._work_comes_soon())):
            await self._step(batch)
            await asyncio.sleep(0)  # aborts and calls that came during the step go first
        elif not self._to_forget:
            await self._work.wait()

    async def _work_comes_soon(self) -> bool:
        """Whether there is work within a moment: then the next step forgets what has ended, which is no step by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FORGETTING_S):
                await self._work.wait()
        return self._work.is_set()

    def _dismiss(self) -> None:
        """Removes running requests that have ended. No step is running."""
        for request in self._scheduler:
            if self._giving_up and not request.over:
                request.revoked = PausedError("the engine was paused and gave this request up; send it again")
            if not request.over:
                continue
            if request.claim.aborted:
                request.leave()
            elif request.revoked is not None and not request.ended:
                request.fail(request.revoked)
            elif request.expired and not request.ended:
                request.time_out()
            self._scheduler.finish(request)
            self._to_forget[request.number] = request.claim.name

    async def _step(self, batch: Sequence[EngineRequest]) -> None:
        """Executes a step; without requests, it only has the executor forget those that have ended."""
        to_forget, self._to_forget = self._to_forget, {}
        step = [StepInput(request.number, request.payload, self._scheduler.begun(request)) for request in batch]
        if batch:
            self.metrics.steps += 1
            self.metrics.step_requests += len(batch)
        started, on_thread_s = time.monotonic(), self._on_thread_s
        missed_s = self._lag.missed_s(started)
        try:
            outputs = await self._on_thread(_STEP, _execute, self._executor, to_forget, step, batch, self._concerned)
        except ExecutorDeadError as error:
            self.dead_error = error
            raise
        finally:
            step.clear()  # if an error of this step is kept, so is this frame, which must not keep the payloads
            now = time.monotonic()
            stopped_s = self._count_step(now, now - started, self._on_thread_s - on_thread_s, missed_s, is_step=bool(batch))
        if batch:
            self._charge(batch, outputs, now - started, stopped_s, now)
        for request, checked_output in zip(batch, outputs, strict=True):
            output = request.counted(checked_output)
            if isinstance(output, Exception):
                self.metrics.failed_requests += 1
                request.fail(output)
            else:
                self._deliver(request, output, now)

    def _count_step(self, now: float, seconds: float, on_thread_s: float, missed_s: float, *, is_step: bool) -> float:
        """Counts a step that has ended, and notes what it was spent on.

        Args:
            now: the time.
            seconds: that it took.
            on_thread_s: of these, on the executor's thread.
            missed_s: for how many seconds the process had not got to run before it.
            is_step: whether it had requests.

        Returns:
            For how many seconds of it the process did not get to run.
        """
        self.metrics.step_seconds += seconds
        if is_step:
            self.times.step.add(seconds)
            self._recent_steps_s.append(seconds)
        if stopped_s := self._lag.missed_s(now) - missed_s:
            stopped_s = min(seconds, stopped_s)
            self._stopped_s += stopped_s
        late_s = seconds - stopped_s - on_thread_s
        if late_s > 0:
            self._late_s += late_s
        self._note_spending(now, self.metrics.step_seconds)
        return stopped_s

    def _charge(
        self,
        batch: Sequence[EngineRequest],
        outputs: Sequence[StepOutput | Exception],
        seconds: float,
        stopped_s: float,
        now: float,
    ) -> None:
        """Charges the owners of requests what these took of a step: what is told, and an equal share of the rest. Nobody pays
        for time in which the engine did not run."""
        ran = 1 - stopped_s / seconds if stopped_s else 1.0
        rest_s, silent = seconds - stopped_s, 0
        for output in outputs:
            if isinstance(output, StepOutput) and output.seconds:
                rest_s -= output.seconds * ran
            else:
                silent += 1
        share = rest_s / (silent or len(batch)) if rest_s > 0 else 0.0
        self._scheduler.accounts.turn(now)
        for request, output in zip(batch, outputs, strict=True):
            taken, beside_s = share, 0.0
            if isinstance(output, StepOutput):
                beside_s = output.beside_s
                if output.seconds:
                    taken = output.seconds * ran + (0.0 if silent else share)
            request.seconds += taken + beside_s
            request.account.charge(taken, beside_s)

    def _deliver(self, request: EngineRequest, output: StepOutput, now: float) -> None:
        if not output.keep_inputs and not request.claim.released:
            request.claim.release()
        if request.over:
            return  # aborted or out of time during the step; it is removed before the next one
        self._count(request, output, now)
        for reply in output.others:
            self._send(request, reply, finished=False)
        self._send(request, output.reply, finished=output.finished)
        if output.finished:
            self._scheduler.finish(request)
            self._to_forget[request.number] = request.claim.name

    def _send(self, request: EngineRequest, reply: EncodeReply | GenerateReply | None, *, finished: bool) -> None:
        if isinstance(reply, GenerateReply) and reply.finish_reason is not None:
            self._scheduler.end_answer(request)
        if request.ended:  # the reply before could not be sent
            return
        task = request.deliver(reply, finished=finished)
        if task is not None:
            self._flushing.add(task)
            task.add_done_callback(self._flushing.discard)

    def _count(self, request: EngineRequest, output: StepOutput, now: float) -> None:
        reply = output.reply
        self.metrics.finished_requests += output.finished
        if reply is None:
            request.prompt_tokens = output.prompt_tokens or request.prompt_tokens
            return
        request.prompt_tokens = reply.prompt_tokens
        if request.is_tokenized:
            return
        if not request.first_reply_at:
            request.first_reply_at = now
            self.times.prefill.add(now - request.admitted_at)
        if output.finished:
            self.metrics.prompt_tokens += reply.prompt_tokens
        if isinstance(reply, GenerateReply):
            tokens = len(reply.token_ids)
            for other in output.others:
                tokens += len(other.token_ids)
            request.tokens += tokens
            self.metrics.generated_tokens += tokens
            if output.finished:
                self.times.decode.add(now - request.first_reply_at)

    async def _on_thread(self, what: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls on the executor's thread. Cancelled, it waits for the end first: the slots may be read until then."""

        def run() -> _Result:
            began = time.monotonic()
            self._busy = what, began
            try:
                return function(*arguments)
            finally:
                self._on_thread_s += time.monotonic() - began
                self._busy = None

        return await self._thread.call(run)

    # -- control calls: what they do is said by EngineClient -----------------------------------------------------------

    async def health(self) -> None:
        """Raises RuntimeError if the executor's thread has been busy for too long, or if no more steps are executed.

        The loop that answers is the loop that schedules.
        """
        if complaint := self.complaint():
            raise RuntimeError(complaint)

    def complaint(self) -> str:
        """Says why requests are not carried out any more; empty: they are."""
        if self.dead_error is not None or self._ended:
            return f"the engine has ended{f': {self.dead_error}' if self.dead_error else ''}"
        if (busy := self._busy) is not None:
            age_s = time.monotonic() - busy[1]
            if age_s > self._step_timeout_s:
                return f"{busy[0]} has been running for {age_s:.0f} s, more than {self._step_timeout_s:g} s"
        return ""

    async def describe(self) -> dict[str, Any]:
        """Says what the executor does."""
        description: dict[str, Any] = msgspec.to_builtins(self._executor.describe())
        return description

    async def statistics(self) -> dict[str, float]:
        """Returns all counters by name; those that have a label by name, a colon, and the label's value."""
        self.metrics.waiting_requests = self._scheduler.waiting
        self.metrics.running_requests = self._scheduler.running
        self.metrics.loop_lag_seconds = self._lag.seconds
        numbers = self.metrics.collect(self.ring.statistics())
        by_label = {"spent_seconds": self._parts_s(), "caller_seconds": self._scheduler.accounts.totals(time.monotonic())}
        for name, values in by_label.items():
            numbers |= {f"{name}:{label}": value for label, value in values.items()}
        return numbers

    def _describe(self) -> dict[str, Any]:
        """Returns what snapshots of the ring say of the engine."""
        description, busy, now = self._executor.describe(), self._busy, time.monotonic()
        stepping = frozenset(self._stepping)
        paused = sum(request not in stepping for request in self._scheduler)
        stepped_s = self.metrics.step_seconds + (now - busy[1] if busy is not None and busy[0] == _STEP else 0.0)
        self._note_spending(now, stepped_s)
        lag_s, lag_ago_s = self._lag.longest()
        preparing, lags = self._reports.requests(now), self._reports.lags(now)
        working_s: Mapping[str, Mapping[str, float]] = getattr(self._executor, "working_s", dict)()
        callers = self._scheduler.accounts.describe(now, preparing, working_s.values())
        waiting = being_prepared(stepping, self._executor)
        unready = sum(owners.total() for owners in waiting.values())
        line = " ".join(filter(None, (self._line(), self._reports.text(now), *texts_of(waiting))))
        spending = self._spending.describe(now, self._recent_steps_s, line, working_s)
        return {
            "executor": description.executor,
            "model": description.model,
            "server": None if self._server is None else msgspec.to_builtins(self._server),
            "loop_lag_s": round(lag_s, 4),
            "loop_lag_ago_s": round(lag_ago_s, 1),
            "frontend_lags": {title: [round(lag_s, 4), round(ago_s, 1)] for title, (lag_s, ago_s) in lags.items()},
            "draining": self._draining,
            "paused": self._paused,
            "preparing": preparing.total(),
            "waiting": self._scheduler.waiting,
            "running": self._scheduler.running - paused - unready,
            "preparing_requests": unready,
            "paused_requests": paused,
            "seats": self._scheduler.config.max_num_seqs,
            "seats_taken": min(self._scheduler.seats_taken, self._scheduler.config.max_num_seqs),
            "step": None if busy is None else {"what": busy[0], "age_s": now - busy[1]},
            "steps_s": [round(seconds, 6) for seconds in self._recent_steps_s],
            "spent_s": {part: round(seconds, 6) for part, seconds in self._spent_s().items()},
            "spending": spending | {"whose": whose(callers, waiting)},
            "callers": msgspec.to_builtins(callers),
            "requests": describe_requests(self._scheduler, stepping, self._executor, now, is_paused=self._paused),
            "ended": describe_ended(self._ended_lately, now),
            "line": dict(Counter(request.owner for request in self._scheduler.line()).most_common(_MAX_IN_LINE)),
            "generated_tokens": self.metrics.generated_tokens,
            "finished_requests": self.metrics.finished_requests,
            "failed_requests": self.metrics.failed_requests,
        }

    def _line(self) -> str:
        """Returns a sentence on the requests that wait for seats, if any do."""
        waiting, seats = self._scheduler.waiting, self._scheduler.config.max_num_seqs
        if not waiting or self._paused or self._scheduler.seats_taken < seats:
            return ""
        all_seats = "The seat is" if seats == 1 else f"All {seats} seats are"
        return f"{all_seats} taken and {waiting} request{' waits' if waiting == 1 else 's wait'} in line."

    def _note_spending(self, now: float, steps_s: float) -> None:
        self._spending.note(now, {**self._parts_s(), "steps": steps_s})

    def _parts_s(self) -> dict[str, float]:
        """Returns what was spent so far, by part of steps and of what is done beside them."""
        return {**self._spent_s(), "late": self._late_s, "stopped": self._stopped_s}

    def _spent_s(self) -> Mapping[str, float]:
        """Returns what steps were spent on so far, by part, if the executor says so."""
        spent_s: Mapping[str, float] = getattr(self._executor, "spent_s", {})
        return spent_s

    async def collect_times(self) -> dict[str, tuple[list[int], float]]:
        """Returns how long the parts of requests took, by name: counts and sum."""
        return {name: (each.counts, each.total) for name, each in self.times.as_dict().items()}

    async def do_log_stats(self) -> None:
        """Logs the counters that have a value."""
        numbers = (f"{name} {value:g}" for name, value in (await self.statistics()).items() if value)
        logger.info("statistics: %s", ", ".join(numbers))

    async def pause_generation(self, wait_for_inflight_requests: bool = False) -> None:
        """Stops admitting; returns when nothing runs."""
        self._paused = True
        self._giving_up = not wait_for_inflight_requests
        self._work.set()
        async with self._boundary:
            await self._boundary.wait_for(lambda: not self._scheduler.running or not self._paused)

    async def resume_generation(self) -> None:
        """Goes on admitting."""
        self._paused = self._giving_up = False
        self._work.set()
        await self._tell_of_boundary()

    async def _tell_of_boundary(self) -> None:
        async with self._boundary:
            self._boundary.notify_all()

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        return self._paused

    async def abort_requests(self, names: Sequence[str]) -> int:
        """Ends the requests of these names, of all frontends, with an error; returns how many there were."""
        wanted = set(names)
        ended = self._abort(wanted)
        ended += await self._operator_aborts.tell(names)  # those whose media are being prepared
        ended += self._abort(wanted)  # those that were sent before their frontend was told
        logger.info("an operator has ended %d requests", ended)
        return ended

    async def tell_engines(self, report: Any) -> None:
        """Takes a report of a frontend, for people."""
        told, now = msgspec.convert(report, FrontendReport), time.monotonic()
        self._reports.take(told, now)
        for owner, (_, decoding_s) in told.callers.items():
            self._scheduler.accounts.note_decoding(owner, decoding_s, now)

    def _abort(self, wanted: Set[str]) -> int:
        found = [request for request in self._scheduler.all() if request.claim.name in wanted and not request.over]
        for request in found:
            error = OperatorAbortError("an operator of this server has ended the request")
            if self._scheduler.withdraw(request):
                request.fail(error)
            else:
                request.revoked = error  # it ends at the next boundary: a step may be reading its slots
        self._work.set()
        return len(found)

    async def reset_mm_cache(self) -> None:
        """Has an executor that keeps something of media forget it."""
        reset = getattr(self._executor, "reset_mm_cache", None)
        if reset is not None:
            await self._on_thread("reset_mm_cache", reset)

    async def collective_rpc(
        self, method: str, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of the executor between two steps.

        Returns:
            One result for each of its workers; there is one.

        Raises:
            LookupError: it has no such method, or the method must not be called remotely.
        """
        function = None if method.startswith("_") or method in _NOT_REMOTE else getattr(self._executor, method, None)
        if not callable(function):
            raise LookupError(f"the executor has no method {method!r} that can be called")
        return [await self._on_thread(method, _call, function, arguments, keywords or {})]

    async def start_profile(self) -> None:
        """Starts the profiler on the executor's thread."""
        await self._on_thread("the profiler", self._profiler.start)

    async def stop_profile(self) -> str:
        """Stops it; returns the trace's path."""
        return await self._on_thread("the profiler", self._profiler.stop)

    async def drain(self, timeout: float | None) -> bool:
        """Carries out the requests that it has, and those that still come while frontends turn to other engines.

        :meth:`run` returns when all have ended, and the result is whether they have in this time.
        """
        self._draining = True
        return await self.ring.drain(timeout, claiming=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Closes the ring, waits for the running step, and closes the executor."""
        reason = f"the engine has died: {self.dead_error}" if self.dead_error else "the engine is closing"
        await self.ring.close(reason)
        for task in self._flushing:
            task.cancel()
        await asyncio.gather(*self._flushing, return_exceptions=True)
        await asyncio.to_thread(self._thread.close)
        self._executor.close()

    async def __aenter__(self) -> EngineCore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _call(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a method of the executor. An error that is no ordinary exception would end the caller's task, or no task at all."""
    try:
        return function(*arguments, **keywords)
    except (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


class _Concerned:
    """Whom the executor's thread works for now, for lines of the log: its text is the names of these requests. (To set
    :data:`~shmring.service.logs.concerned` to such a text in each step would cost more than all else there is to say of it.)
    """

    def __init__(self) -> None:
        self.requests: Sequence[EngineRequest] = ()
        self.name = ""  # instead of theirs

    def __str__(self) -> str:
        names = [name for request in self.requests[:_MAX_NAMES] if (name := request.claim.name)] or [self.name]
        more = [f"and {len(self.requests) - _MAX_NAMES} more"] if len(self.requests) > _MAX_NAMES else []
        return ", ".join([*names, *more])


def _execute(
    executor: Executor,
    to_forget: Mapping[int, str],
    step: list[StepInput],
    batch: Sequence[EngineRequest],
    concerned_here: _Concerned,
) -> Sequence[StepOutput | Exception]:
    """One step, on the executor's thread. Its errors have no frames, which would keep the batch's slots.

    Args:
        executor: computes.
        to_forget: the names of requests that have ended, by number.
        step: what it computes.
        batch: the requests of the step, for the log.
        concerned_here: says there for whom the thread works.
    """
    if concerned.get() is not concerned_here:
        concerned.set(concerned_here)  # once: the thread has no other work
    try:
        for number, concerned_here.name in to_forget.items():
            try:
                executor.forget(number)
            except Exception:
                logger.exception("the executor could not forget request %d", number)
        return _execute_batch(executor, step, batch, concerned_here) if step else []
    except ExecutorDeadError as error:
        reason = str(error)
    except BaseException as error:  # noqa: BLE001 - it ends the engine, with the reason
        logger.critical("the executor has died\n%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
    finally:
        concerned_here.requests, concerned_here.name = (), ""
    raise ExecutorDeadError(reason)


def _execute_batch(
    executor: Executor, step: list[StepInput], batch: Sequence[EngineRequest], concerned_here: _Concerned
) -> Sequence[StepOutput | Exception]:
    concerned_here.requests = batch
    try:
        outputs = list(executor.execute(step))
    except ExecutorDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of an executor fails requests, and nothing else
        logger.error("the executor failed a step of %d\n%s", len(step), traceback.format_exc())
        if len(step) == 1:
            return [without_frames(error)]
        outputs = []
    else:
        if len(outputs) != len(step):
            return [RuntimeError(f"the executor answered {len(outputs)} of {len(step)} requests")] * len(step)
        return [checked(output, part.payload) for output, part in zip(outputs, step, strict=True)]
    alone = zip(step, batch, strict=True)
    return [output for part, request in alone for output in _execute_batch(executor, [part], [request], concerned_here)]
