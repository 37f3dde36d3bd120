"""The world: processes of frontends, lives of an engine, and what can happen between them next.

Deterministic: what happens depends on the scenario and the actions applied, and on nothing else. Positions in an action
count what is there at that moment, so a trace from which actions were taken can still be run (those that are not enabled
any more are passed over), which is how failures are shortened.

Invariants: see :mod:`.invariants`; :meth:`Simulation.apply` checks them, :meth:`Simulation.settle` checks that everything
that was begun comes to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shmring.core.compiled import Lending, Waiter
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import SLOT_HEADER_NBYTES, SlotRef
from shmring.core.states import ClientSlot
from tests.simulation import books, crash
from tests.simulation.engine import Engine
from tests.simulation.fan_out import FanOut
from tests.simulation.frontend import IDLE_TICKS, Pace, Process, Session, Wants, key_of
from tests.simulation.injecting import Injecting
from tests.simulation.invariants import check_books, check_end, check_memory, check_nobody_is_held_up, check_workers
from tests.simulation.midst import Midst
from tests.simulation.scenario import CANCELLING, DISTURBANCES, Action, Forgery, Inside, Kind, Scenario, Violation, require
from tests.simulation.worker import WorkerProcess

_MAX_CLIENTS_BEYOND = 3  # connections of the past that the engine still has, beside those of living processes
_MOMENTS = 5  # after which who does not answer is passed over
_MOMENTS_OF_FRONTENDS = 40  # so many of the engine are as long as one of a frontend
_MAX_MOMENTS = 2_000  # of a frontend, after which each of its callers has had its turn
_MAX_WINDOWS = 30  # that are opened one after the other, while nothing else begins
_MAX_TIMERS = 200  # that fire before something else follows; a few are usual
_MAX_SETTLING = 10_000  # actions until everything has come home; a hundredth of it is usual

# Actions that bring what was begun to its end, and begin nothing. Whoever has work left has one of these.
_FINISHING = frozenset(
    {
        Kind.LET_GO, Kind.FRONTEND_SEES_END, Kind.ENGINE_SEES_END, Kind.PIDFD_FIRES, Kind.TO_ENGINE, Kind.TO_FRONTEND,
        Kind.FRONTEND_TURN, Kind.COPIED, Kind.LEAVE, Kind.VIEW_DIES, Kind.READ, Kind.DROP_REPLY, Kind.CLAIM, Kind.FINISH,
        Kind.REPLY_COPIED, Kind.ENGINE_VIEW_DIES, Kind.UNPIN, Kind.WORKER_SEES_END, Kind.RECEIVE, Kind.LEAVE_MESSAGE,
        Kind.MESSAGES_VIEW_DIES, Kind.ANSWER, Kind.TURN, Kind.FROM_WORKER, Kind.WORKERS_BELL, Kind.ENGINE_SEES_WORKERS_END,
        Kind.WORKER_IS_DEAD, Kind.KEPT_VIEW_DIES, Kind.READ_INJECTED,
    }
)  # fmt: skip


class Simulation:
    """A world in which nothing happens by itself.

    Args:
        scenario: how large everything is.
    """

    def __init__(self, scenario: Scenario) -> None:
        crash.begin(scenario)
        self.scenario = scenario
        self.books = books.chosen
        self.midst = Midst(scenario, self._happen_inside)
        self.engine: Engine | None = Engine(scenario, 1, self.books, self.midst)
        self.epoch = 1
        self.processes: dict[int, Process] = {}
        self.workers: list[WorkerProcess] = []
        self._last_worker = 0
        self._dead_workers: list[WorkerProcess] = []  # what they had is left alone, or it would be acknowledged
        self.now = 0.0
        self.disturbances = 0
        self.trace: list[Action] = []  # what has happened
        for pid in range(min(scenario.connected, scenario.processes)):
            self._connect(pid)
        for rank in range(scenario.joined_workers):
            self._worker_joins(rank)

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self) -> list[Action]:
        """Returns what can happen now."""
        actions = self._enabled()
        without = self.scenario.without
        if self.scenario.max_disturbances is not None and self.disturbances >= self.scenario.max_disturbances:
            without = without | DISTURBANCES
        if not without:
            return actions
        return [
            action
            for action in actions
            if action.kind not in without and (action.inside is None or action.inside.kind not in without)
        ]

    def can_happen(self, action: Action) -> bool:
        """Whether this can happen now."""
        with self.midst.offering(action.inside is not None):
            return action in self.enabled()

    def _enabled(self) -> list[Action]:
        actions: list[Action] = []
        if self.engine is None:
            actions.append(Action(Kind.ENGINE_STARTS))
        else:
            actions.append(Action(Kind.ENGINE_DIES))
            actions += self.engine.enabled()
        for pid, process in self.processes.items():
            actions += self._enabled_for(pid, process)
        if len(self.processes) < self.scenario.processes and self._admits():
            new = self._new_pid()
            actions += (Action(Kind.CONNECT, new), Action(Kind.CONNECT_FAILS, new))
        actions += self._enabled_for_workers()
        if any(self._waits_for_time(process.session) for process in self.processes.values()):
            actions.append(Action(Kind.TICK))
        return actions

    def _enabled_for(self, pid: int, process: Process) -> list[Action]:
        if process.pace is not Pace.GOES:
            return [Action(Kind.CRASH, pid), Action(Kind.GO_ON, pid), *process.enabled_by_itself(pid, self.now)]
        actions = [Action(Kind.CRASH, pid)]
        if self.scenario.stops and pid < self.scenario.may_stop:
            actions += (Action(Kind.STOP, pid), Action(Kind.FALL_SILENT, pid))
        for position, former in enumerate(process.former):
            reach = sum(map(len, former.reach))
            actions += [Action(Kind.LET_GO, pid, position, index) for index in range(reach)]
        session = process.session
        if session is not None:
            actions += session.enabled(pid, self.now)
            actions += [Action(Kind.HANG_UP, pid), Action(Kind.GOODBYE, pid, 0, 1)]
            if session.replies:
                actions.append(Action(Kind.GOODBYE, pid, 0, 0))
            if self.engine is not None and session.wire.engine_open and Kind.FORGE not in self.scenario.without:
                actions += [Action(Kind.FORGE, pid, kind) for kind in self._forgeries(session)]
        elif self._admits():
            actions.append(Action(Kind.CONNECT, pid))
        return actions

    def _enabled_for_workers(self) -> Iterator[Action]:
        fan_out = self.engine.fan_out if self.engine is not None else None
        if (
            fan_out is not None
            and len(self.workers) < self.scenario.workers
            and len(fan_out.workers) < fan_out.book.max_workers
        ):
            for rank in range(self.scenario.workers):
                if fan_out.book.member(rank) is None:
                    yield Action(Kind.WORKER_JOINS, 0, rank)
        for position, worker in enumerate(self.workers):
            yield from worker.enabled(position)

    def _forgeries(self, session: Session) -> list[Forgery]:
        return [*session.forgeries(self._lease_of_another(session))]

    def _admits(self) -> bool:
        return self.engine is not None and len(self.engine.clients) < self.scenario.processes + _MAX_CLIENTS_BEYOND

    def _new_pid(self) -> int:
        return next(pid for pid in range(len(self.processes) + 1) if pid not in self.processes)

    def _waits_for_time(self, session: Session | None) -> bool:
        return session is not None and bool(timers := session.loop.other_timers) and timers[0].when() > self.now

    def is_quiet(self) -> bool:
        """Whether no message is under way between the ends of a connection."""
        clients = self.engine.clients.values() if self.engine is not None else ()
        sessions = (process.session for process in self.processes.values())
        wires = [client.wire for client in clients] + [session.wire for session in sessions if session is not None]
        wires += [worker.wire for worker in self.workers if worker.receives]
        return not any(wire.to_engine or wire.to_frontend for wire in wires)

    # -- what happens --------------------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        """Lets one of the enabled actions happen, and checks everything.

        Raises:
            Violation: something that must hold does not.
        """
        self.happen(action)
        self.check()

    def happen(self, action: Action) -> None:
        """Lets an action happen, and checks only what it meets itself.

        Raises:
            Violation: something that must hold does not.
        """
        self.trace.append(action)
        crash.note(action)
        self.disturbances += not DISTURBANCES.isdisjoint(action.kinds)
        self.midst.hold(action.kind, action.inside)
        try:
            _HAPPENINGS[action.kind](self, action)
            self.midst.let_go()
            self._follow(is_cancelling=action.kind in CANCELLING)
        except Violation:
            raise
        except Exception as error:
            # Whatever a book raises here, it raises at an honest event: in the product it would end an engine or a client.
            raise Violation(f"{type(error).__name__}: {error}") from error
        finally:
            self.midst.let_go()

    def _happen_inside(self, inside: Inside) -> None:
        _HAPPENINGS[inside.kind](self, Action(*inside[1:]))

    def _follow(self, *, is_cancelling: bool) -> None:
        """What follows in the loops, of itself."""
        for process in self.processes.values():
            if process.session is not None and process.pace is not Pace.STOPPED:
                process.session.rest(is_cancelling=is_cancelling)
                if process.session.ended:
                    process.retire()
        if self.engine is not None:
            self.engine.rest(is_cancelling=is_cancelling)

    def check(self) -> None:
        """Checks everything that must hold now.

        Raises:
            Violation: it does not.
        """
        try:
            check_memory(self)
            check_books(self)
            check_workers(self)
        except AssertionError as error:
            raise Violation(f"a book is not sound: {error}") from error

    def _living(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _session(self, pid: int) -> Session:
        session = self.processes[pid].session
        assert session is not None
        return session

    def _connect(self, pid: int) -> None:
        process = self.processes.setdefault(pid, Process())
        process.session = Session(self.scenario, self._living(), process, self.books, self.now, self.midst)

    def _change_pace(self, pid: int, pace: Pace) -> None:
        self.processes[pid].pace = pace

    def _connect_fails(self) -> None:
        self._living().admit_in_vain()

    def _hang_up(self, pid: int) -> None:
        session = self._session(pid)
        session.wire.close_frontend()
        session.sees_end()

    def _crash(self, action: Action) -> None:
        self.processes[action.at].crash()
        del self.processes[action.at]  # the engine still has its clients

    def _let_go(self, action: Action) -> None:
        process = self.processes[action.at]
        process.former[action.item].let_go(action.detail)
        process.forget()

    def _engine_dies(self) -> None:
        self._living().die()
        self.engine = None

    def _engine_starts(self) -> None:
        self.epoch += 1
        self.engine = Engine(self.scenario, self.epoch, self.books, self.midst)

    # -- workers -------------------------------------------------------------------------------------------------------------

    def _worker_joins(self, rank: int) -> None:
        engine = self._living()
        if engine.fan_out is not None:
            self._last_worker += 1
            self.workers.append(WorkerProcess(self._last_worker, rank, self.epoch, engine.fan_out, self.midst))

    def _worker_dies(self, action: Action) -> None:
        worker = self.workers.pop(action.at)
        worker.die()
        self._dead_workers.append(worker)

    def _tick(self) -> None:
        self.now += IDLE_TICKS
        for process in self.processes.values():
            if process.session is not None:
                process.session.loop.now = self.now

    def _forge(self, action: Action) -> None:
        session = self._session(action.at)
        forge = session.forgeries(self._lease_of_another(session))[Forgery(action.item)]
        session.wire.forge(forge())
        self._hang_up(action.at)  # whatever it does next is nobody's business

    def _lease_of_another(self, session: Session) -> SlotRef | None:
        for client_id, client in self._living().book.clients.items():
            for lease in client.leases.values() if client_id != session.client_id else ():
                return SlotRef(lease.lease_id, lease.start * BLOCK_NBYTES, BLOCK_NBYTES - SLOT_HEADER_NBYTES, 0)
        return None

    def close(self) -> None:
        """The world ends: nothing of it runs any more. Most of its memory is free at once, the rest with the rubbish."""
        if self.engine is not None:
            self.engine.close()
        for process in self.processes.values():
            for session in process.sessions():
                session.abandon()
        for worker in (*self.workers, *self._dead_workers):
            worker.drop()

    # -- the end -------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Lets everybody finish what was begun, then leave; nobody may wait for ever, and everything must come home.

        First those finish who go on, beside those that have stopped or are silent: nobody may wait for these without need.

        Raises:
            Violation: somebody does, or something is lost.
        """
        if self.scenario.stops:
            self._finish()
            self._pass_moments()
            self._pass_frontends_moments()
            self._pass_moments()  # for what the last of these asked for, behind the windows of others
            check_nobody_is_held_up(self)
            self._go_on()
        self._kill_who_keeps_memory()
        self._finish()
        self._pass_moments()  # for those who rest: they have their turn again
        for process in self.processes.values():
            self._check_settled(process.session)
        self._check_calls()
        injecting = self.engine.injecting if self.engine is not None else None
        require(injecting is None or not injecting.asked, "a request of the engine's process never ended")
        while injecting is not None and injecting.injectors:
            self.apply(Action(Kind.CLOSE_INJECTOR))
        for pid, process in list(self.processes.items()):
            if process.session is not None:
                self.apply(Action(Kind.GOODBYE, pid))
        while self.workers:
            self.apply(Action(Kind.WORKER_DIES))
        self._finish()
        check_end(self)

    def _pass_moments(self) -> None:
        """Time passes for those that wait for leases, until nothing follows from it.

        Each of them has its window by then, and gives it up if what lies there does not come.
        """
        in_vain = 0  # one after the other: in each, a window may have been given up for the next one that waits
        for _ in range(_MAX_WINDOWS):
            if self.engine is None or not self.engine.book.is_awaited():
                return
            before = self._who_waits()
            if in_vain > len(before):
                return
            for _ in range(_moments_of_a_turn(self.engine.book.host)):
                if self.engine.book.is_awaited():
                    self._pass_moment(self.engine)
            self.check()
            self._finish()
            in_vain = in_vain + 1 if self._who_waits() == before else 0

    def _pass_frontends_moments(self) -> None:
        """Time passes for callers that wait for slots behind others of their process, until each has had its turn."""
        had_turn: set[Waiter] = set()
        for _ in range(_MAX_MOMENTS):
            going = [(pid, process.session) for pid, process in self.processes.items() if process.pace is not Pace.STOPPED]
            turns = {
                pid: session.may_be_served()[-1]
                for pid, session in going
                if session is not None and not had_turn.issuperset(session.by_size())
            }
            if not turns:
                return
            for _ in range(_MOMENTS_OF_FRONTENDS):
                if self.engine is not None and self.engine.book.is_awaited():
                    self._pass_moment(self.engine)
            self._finish()
            had_turn.update(waiter for waiter in turns.values() if not waiter.rest_moments)
            for pid in turns:
                if (session := self.processes[pid].session) is not None and session.book.waiting:
                    self.happen(Action(Kind.FRONTEND_MOMENT, pid))
            self._finish()
        raise Violation("a caller never has its turn to wait for a slot")

    def _pass_moment(self, engine: Engine) -> None:
        require(bool(engine.loop.moments), "no moment passes while somebody waits for a lease")
        self.happen(Action(Kind.MOMENT))

    def _who_waits(self) -> list[tuple[int, int]]:
        """Who waits for a lease, and for which."""
        return [(client_id, want.token) for client_id, want in self._living().book.host._wants.items()]

    def _go_on(self) -> None:
        """Those that have stopped or are silent go on, and find in their time what has come."""
        for pid, process in self.processes.items():
            if process.pace is not Pace.GOES:
                self.apply(Action(Kind.GO_ON, pid))
        for position, worker in enumerate(self.workers):
            if worker.has_stopped:
                self.apply(Action(Kind.WORKER_GOES_ON, position))

    def _kill_who_keeps_memory(self) -> None:
        """Ends the processes of connections that have ended: what they kept comes back only with their death."""
        for pid, process in list(self.processes.items()):
            if process.session is None or not process.session.wire.engine_open or self._has_former_clients(process):
                self.apply(Action(Kind.CRASH, pid))

    def _has_former_clients(self, process: Process) -> bool:
        assert process.session is not None
        clients = self.engine.clients if self.engine is not None else {}
        return any(client.process is process for client_id, client in clients.items() if client_id != process.session.client_id)

    def _finish(self) -> None:
        in_vain = 0  # timers that have fired one after the other, and turns that followed
        for step in range(_MAX_SETTLING):
            with self.midst.offering(False):
                enabled = self._enabled()
            finishing = [action for action in enabled if self._finishes(action)]
            in_vain = 0 if any(action.kind is not Kind.TURN for action in finishing) else in_vain + 1
            if in_vain > _MAX_TIMERS and self._waits_for_silent():
                return
            if not finishing:
                finishing = self._timers(enabled) or self._in_vain(enabled)
            if not finishing:
                return
            self.apply(finishing[step % len(finishing)])  # not always the first, so that nobody is always first
        raise Violation("what was begun does not come to its end")

    def _waits_for_silent(self) -> bool:
        """Whether the engine looks, as often as a timer says, after what others do not read: workers, or clients a reply."""
        replies = self.engine.book._reply_wants if self.engine is not None else ()
        return bool(replies) or any(worker.has_stopped for worker in self.workers)

    def _finishes(self, action: Action) -> bool:
        if action.kind is Kind.ENGINE_SEES_END:
            return not list(self._living().clients.values())[action.at].wire.to_engine  # a goodbye that is lost is none
        return action.kind in _FINISHING and not (action.kind in (Kind.LEAVE, Kind.LEAVE_MESSAGE, Kind.UNPIN) and action.detail)

    def _timers(self, enabled: list[Action]) -> list[Action]:
        """Timers that somebody waits for: nothing else looks after slots of claims, workers and requests that were dropped."""
        kinds: set[Kind] = set()
        fan_out = self.engine.fan_out if self.engine is not None else None
        if fan_out is not None and (fan_out.book.outstanding or fan_out.calls) and fan_out.engine.loop.other_timers:
            kinds.add(Kind.TIMER)
        sessions = [process.session for process in self.processes.values() if process.session is not None]
        clients = self.engine.book.clients.values() if self.engine is not None else ()
        if any(len(session.end.pending) for session in sessions) or any(client.replies for client in clients):
            kinds.update((Kind.FRONTEND_TIMER, Kind.TICK))
        return [action for action in enabled if action.kind in kinds]

    def _in_vain(self, enabled: list[Action]) -> list[Action]:
        """Callers whose code has left a slot that they send, and who may wait for the memory that they keep, and callers that
        wait for content which nobody keeps: they give up."""
        sending = [
            action
            for action in enabled
            if action.kind is Kind.CANCEL
            and any(slot.state is ClientSlot.DRAINING for slot in self._session(action.at).callers[action.item].slots)
        ]
        return sending + [
            Action(Kind.CANCEL, pid, index)
            for pid, process in self.processes.items()
            for index, caller in enumerate([] if process.session is None else process.session.callers)
            if caller.wants is Wants.WAIT_KEPT and not caller.task.cancelling() and not self._is_kept(caller.detail)
        ]

    def _is_kept(self, key: int) -> bool:
        return self.engine is not None and key_of(key) in self.engine.book.kept.by_key

    def _check_calls(self) -> None:
        fan_out = self.engine.fan_out if self.engine is not None else None
        require(fan_out is None or not fan_out.calls, "a message waits to be sent for ever")

    def _check_settled(self, session: Session | None) -> None:
        if session is None:
            return
        require(not session.callers, "somebody waits for ever")
        require(not session.sent and not session.end.pending, "a request never ended")
        require(not any(session.reach) and not session.used, "a slot never came back")
        require(not session.contents, "content is held by nobody")
        require(not len(session.real.kept), "content is pinned that nobody uses")
        require(not session.real.kept._waits, "a key is waited for by nobody")
        client = self.engine.book.clients.get(session.client_id) if self.engine is not None else None
        require(client is None or not client.replies, "a reply is kept by nobody")


def _moments_of_a_turn(lending: Lending) -> int:
    """After so many the window is open for another request, or one that rests has its turn again; or neither ever is."""
    window = lending._window
    if window is None:
        return _MOMENTS + max(want.rest_moments for want in lending._wants.values())
    return _MOMENTS + lending._wants[window.client_id].patience - window.vain_moments


_Happening = Callable[[Simulation, Action], None]


def _injecting(does: Callable[[Injecting, Action], None]) -> _Happening:
    return lambda world, action: does(world._living().injecting, action)


def _fan_out(does: Callable[[FanOut, Action], None]) -> _Happening:
    def happening(world: Simulation, action: Action) -> None:
        fan_out = world._living().fan_out
        assert fan_out is not None
        with fan_out.engine.loop.running():
            does(fan_out, action)

    return happening


def _worker(does: Callable[[WorkerProcess, Action], None]) -> _Happening:
    return lambda world, action: does(world.workers[action.at], action)


def _engine(does: Callable[[Engine, Action], None]) -> _Happening:
    return lambda world, action: does(world._living(), action)


def _client(does: Callable[[Engine, int], None]) -> _Happening:
    return lambda world, action: does(world._living(), list(world._living().clients)[action.at])


def _session(does: Callable[[Session, Action], None]) -> _Happening:
    return lambda world, action: does(world._session(action.at), action)


_HAPPENINGS: Mapping[Kind, _Happening] = {
    Kind.CONNECT: lambda world, action: world._connect(action.at),
    Kind.CONNECT_FAILS: lambda world, action: world._connect_fails(),
    Kind.GOODBYE: _session(lambda session, action: session.goodbye(replies_viewed=bool(action.detail))),
    Kind.HANG_UP: lambda world, action: world._hang_up(action.at),
    Kind.CRASH: Simulation._crash,
    Kind.LET_GO: Simulation._let_go,
    Kind.FRONTEND_SEES_END: _session(lambda session, action: session.sees_end()),
    Kind.ENGINE_DIES: lambda world, action: world._engine_dies(),
    Kind.ENGINE_STARTS: lambda world, action: world._engine_starts(),
    Kind.STOP: lambda world, action: world._change_pace(action.at, Pace.STOPPED),
    Kind.FALL_SILENT: lambda world, action: world._change_pace(action.at, Pace.SILENT),
    Kind.GO_ON: lambda world, action: world._change_pace(action.at, Pace.GOES),
    Kind.FORGE: Simulation._forge,
    Kind.TO_FRONTEND: _session(lambda session, action: session.hear()),
    Kind.TICK: lambda world, action: world._tick(),
    Kind.ENGINE_SEES_END: _client(Engine.sees_end),
    Kind.ENGINE_HANGS_UP: _client(Engine.hang_up),
    Kind.PIDFD_FIRES: _client(Engine.bury),
    Kind.TO_ENGINE: _client(Engine.hear),
    Kind.ACQUIRE: _session(lambda session, action: session.acquire(action.item)),
    Kind.REQUEST: _session(lambda session, action: session.request(action.item)),
    Kind.REQUEST_NOW: _session(lambda session, action: session.request_now(action.item)),
    Kind.TRY: _session(lambda session, action: session.attempt(action.item)),
    Kind.CANCEL: _session(lambda session, action: session.cancel(action.item)),
    Kind.FRONTEND_TURN: _session(lambda session, action: session.loop.run_next()),
    Kind.FRONTEND_TIMER: _session(lambda session, action: session.fire()),
    Kind.FRONTEND_MOMENT: _session(lambda session, action: session.pass_moment()),
    Kind.COPIED: _session(lambda session, action: session.copied(action.item)),
    Kind.SUBMIT: _session(lambda session, action: session.submit_held(action.item, action.detail)),
    Kind.LEAVE: _session(lambda session, action: session.leave(action.item, action.detail)),
    Kind.TENSOR: _session(lambda session, action: session.make_tensor(action.item)),
    Kind.VIEW_DIES: _session(lambda session, action: session.view_dies(action.item)),
    Kind.KEEP: _session(lambda session, action: session.keep(action.item, action.detail)),
    Kind.FIND: _session(lambda session, action: session.find(action.item)),
    Kind.WAIT_KEPT: _session(lambda session, action: session.wait_kept(action.item)),
    Kind.UNPIN: _session(lambda session, action: session.unpin(action.item, action.detail)),
    Kind.KEPT_VIEW_DIES: _session(lambda session, action: session.kept_view_dies(action.item)),
    Kind.SEND_KEPT: _session(lambda session, action: session.send_kept(action.item, action.detail - 1)),
    Kind.ABORT: _session(lambda session, action: session.abort(action.item)),
    Kind.READ: _session(lambda session, action: session.read(list(session.sent)[action.item])),
    Kind.AWAIT: _session(lambda session, action: session.await_reply(action.item)),
    Kind.FORGET: _session(lambda session, action: session.forget(list(session.sent)[action.item])),
    Kind.DROP_REPLY: _session(lambda session, action: session.drop_reply(action.item)),
    Kind.CLAIM: _engine(lambda engine, action: engine.claim()),
    Kind.RELEASE: _engine(lambda engine, action: engine.release(action.at, action.detail)),
    Kind.FINISH: _engine(lambda engine, action: engine.leave(action.at, action.kind, action.detail)),
    Kind.FAIL: _engine(lambda engine, action: engine.leave(action.at, action.kind, 0)),
    Kind.TIME_OUT: _engine(lambda engine, action: engine.leave(action.at, action.kind, 0)),
    Kind.REPLY: _engine(lambda engine, action: engine.reply(action.at, action.item, action.detail)),
    Kind.REPLY_NOW: _engine(lambda engine, action: engine.reply_now(action.at, action.item)),
    Kind.REPLY_COPIED: _engine(lambda engine, action: engine.reply_copied(action.at)),
    Kind.CANCEL_REPLY: _engine(lambda engine, action: engine.cancel_reply(action.at)),
    Kind.ENGINE_VIEW_DIES: _engine(lambda engine, action: engine.view_dies(action.at)),
    Kind.INJECTOR: _injecting(lambda injecting, action: injecting.open()),
    Kind.CLOSE_INJECTOR: _injecting(lambda injecting, action: injecting.close(action.at)),
    Kind.INJECT: _injecting(lambda injecting, action: injecting.inject(action.at, action.item)),
    Kind.READ_INJECTED: _injecting(lambda injecting, action: injecting.read(action.at)),
    Kind.GIVE_UP_INJECTED: _injecting(lambda injecting, action: injecting.give_up(action.at)),
    Kind.WORKER_JOINS: lambda world, action: world._worker_joins(action.item),
    Kind.WORKER_DIES: Simulation._worker_dies,
    Kind.WORKER_STOPS: _worker(lambda worker, action: worker.stop()),
    Kind.WORKER_GOES_ON: _worker(lambda worker, action: worker.go_on()),
    Kind.WORKER_CLOSES: _worker(lambda worker, action: worker.close()),
    Kind.WORKER_SEES_END: _worker(lambda worker, action: worker.close()),
    Kind.RECEIVE: _worker(lambda worker, action: worker.receive()),
    Kind.LEAVE_MESSAGE: _worker(lambda worker, action: worker.leave(action.item, action.detail)),
    Kind.MESSAGES_VIEW_DIES: _worker(lambda worker, action: worker.view_dies(action.item)),
    Kind.ANSWER: _worker(lambda worker, action: worker.reply(action.item)),
    Kind.BROADCAST: _fan_out(lambda fan_out, action: fan_out.send(action.at, action.item, action.detail)),
    Kind.SHARE: _fan_out(lambda fan_out, action: fan_out.share_claim(fan_out.engine.claims[action.at], action.item)),
    Kind.CANCEL_CALL: _fan_out(lambda fan_out, action: fan_out.cancel(action.at)),
    Kind.TURN: _engine(lambda engine, action: engine.turn()),
    Kind.TIMER: _engine(lambda engine, action: engine.loop.fire()),
    Kind.MOMENT: _engine(lambda engine, action: engine.pass_moment()),
    Kind.FROM_WORKER: _fan_out(lambda fan_out, action: fan_out.connections[action.at].hear()),
    Kind.WORKERS_BELL: _fan_out(lambda fan_out, action: fan_out.hear_bell(action.at)),
    Kind.ENGINE_SEES_WORKERS_END: _fan_out(lambda fan_out, action: fan_out.sees_end(action.at)),
    Kind.WORKER_IS_DEAD: _fan_out(lambda fan_out, action: fan_out.bury(action.at)),
    Kind.DROP_WORKER: _fan_out(lambda fan_out, action: fan_out.drop(fan_out.connections[action.at].rank, "dropped")),
}
