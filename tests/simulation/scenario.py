"""What a simulation is made of: how large everything is, and what can happen."""

from __future__ import annotations

import enum
from random import Random
from typing import NamedTuple, Self

import msgspec

from shmring.core.geometry import EngineBookLimits, Geometry


class Kind(enum.StrEnum):
    """What can happen. In brackets: what ``at``, ``item`` and ``detail`` of an :class:`Action` mean."""

    # processes and connections
    CONNECT = "connect"  # [process] a process attaches; one that does not exist starts
    CONNECT_FAILS = "connect fails"  # [process] it died, or gave up, before it was welcomed
    GOODBYE = "goodbye"  # [process, -, replies are viewed]
    HANG_UP = "hang up"  # [process] a frontend ends its connection without a goodbye, and lives on
    CRASH = "crash"  # [process]
    LET_GO = "let go"  # [process, session, slot or reply] a view dies whose session has ended
    FRONTEND_SEES_END = "frontend sees the end"  # [process] the engine's connection or process has ended
    ENGINE_SEES_END = "engine sees the end"  # [client] a connection has ended; what was not read is lost
    ENGINE_HANGS_UP = "engine hangs up"  # [client] as on a frontend that does not read
    PIDFD_FIRES = "pidfd fires"  # [client] the kernel says that its process is dead
    ENGINE_DIES = "engine dies"
    ENGINE_STARTS = "engine starts"
    STOP = "stop"  # [process] it takes no turns, in whatever place it is, while time passes and others go on
    FALL_SILENT = "fall silent"  # [process] its callers leave, read and begin nothing; its loop goes on
    GO_ON = "go on"  # [process] after either
    # messages
    TO_ENGINE = "to engine"  # [client]
    TO_FRONTEND = "to frontend"  # [process]
    FORGE = "forge"  # [process, Forgery] a frontend breaks the rules
    # callers of a frontend
    ACQUIRE = "acquire"  # [process, blocks] enters `async with client.slot()`
    REQUEST = "request"  # [process, blocks] wants a slot to copy a payload into
    REQUEST_NOW = "request now"  # [process, blocks] the same, if it can be sent without waiting
    TRY = "try"  # [process, blocks] `slot_nowait`
    CANCEL = "cancel"  # [process, caller] its task is cancelled
    FRONTEND_TURN = "frontend's turn"  # [process] its loop runs what is ready first
    FRONTEND_TIMER = "frontend's timer"  # [process] a timer of its loop fires whose time has come
    FRONTEND_MOMENT = "frontend's moment"  # [process] another moment has passed for its callers that wait for slots
    COPIED = "copied"  # [process, copy] a thread has copied a payload
    SUBMIT = "submit"  # [process, slot, with the next one] submits held slots as they are
    LEAVE = "leave"  # [process, slot, is viewed] leaves a held slot
    TENSOR = "tensor"  # [process, slot] makes a tensor in a held slot, with a shape that is a generator
    VIEW_DIES = "view dies"  # [process, slot]
    KEEP = "keep"  # [process, slot, key] gives a held slot to the engine to keep
    FIND = "find"  # [process, key] looks for what is kept
    WAIT_KEPT = "wait for content"  # [process, key] until it is kept
    UNPIN = "unpin"  # [process, content, is viewed] leaves what it has found, or kept
    KEPT_VIEW_DIES = "kept view dies"  # [process, view]
    SEND_KEPT = "send kept"  # [process, content, held slot + 1; 0: none] a request shows content, from where it lies
    ABORT = "abort"  # [process, request]
    READ = "read"  # [process, request] its caller reads a reply, or its end
    AWAIT = "await"  # [process, request] its caller reads no other reply before this request has ended
    FORGET = "forget"  # [process, request] its caller drops it
    DROP_REPLY = "drop reply"  # [process, reply] the last view of a reply dies
    # handlers of the engine
    CLAIM = "claim"
    RELEASE = "release"  # [claim, -, mask of viewed slots]
    FINISH = "finish"  # [claim, -, mask of viewed slots]
    FAIL = "fail"  # [claim]
    TIME_OUT = "time out"  # [claim]
    REPLY = "reply"  # [claim, blocks, finishes the request] blocks 0: in the record
    REPLY_NOW = "reply now"  # [claim, blocks] the same, if it can be sent without waiting
    REPLY_COPIED = "reply copied"  # [copy] a thread has copied it
    CANCEL_REPLY = "cancel reply"  # [claim] its handler is cancelled while it waits or copies
    ENGINE_VIEW_DIES = "engine view dies"  # [draining slot]
    TICK = "tick"  # an idle time passes
    # callers of the engine's own process
    INJECTOR = "injector"  # one is made
    CLOSE_INJECTOR = "close injector"  # [injector]
    INJECT = "inject"  # [injector, blocks] a request whose payload lies anywhere
    READ_INJECTED = "read injected"  # [request] its caller reads what is there, or waits for it
    GIVE_UP_INJECTED = "give up injected"  # [request] its caller is cancelled while it waits, or aborts it
    # workers
    WORKER_JOINS = "worker joins"  # [-, rank] a process starts and joins
    WORKER_CLOSES = "worker closes"  # [worker] what it has in hands it keeps
    WORKER_SEES_END = "worker sees the end"  # [worker] the engine has ended its connection, or is dead
    WORKER_DIES = "worker dies"  # [worker]
    RECEIVE = "receive"  # [worker] takes the next message
    LEAVE_MESSAGE = "leave message"  # [worker, message, is viewed]
    MESSAGES_VIEW_DIES = "message's view dies"  # [worker, view]
    ANSWER = "answer"  # [worker, message] replies to a message that is gathered
    # the engine towards its workers
    BROADCAST = "broadcast"  # [blocks, Sending, mask of ranks; 0: all]
    SHARE = "share"  # [claim, Sending] a handler sends the payload of its claim
    CANCEL_CALL = "cancel call"  # [call] the task of a broadcast, gather or share is cancelled
    TURN = "turn"  # the engine's loop runs what is ready first
    TIMER = "timer"  # a timer of the engine's loop fires, but for that of the next
    MOMENT = "moment"  # another moment has passed for those that wait for leases
    FROM_WORKER = "from worker"  # [connection] a record is read
    WORKERS_BELL = "worker's bell"  # [connection] is heard
    ENGINE_SEES_WORKERS_END = "engine sees worker's end"  # [connection]
    WORKER_IS_DEAD = "worker is dead"  # [connection] the kernel says so
    DROP_WORKER = "drop worker"  # [connection]
    WORKER_STOPS = "worker stops"  # [worker] it receives, leaves and answers nothing
    WORKER_GOES_ON = "worker goes on"  # [worker]


#: What keeps a request from going its straight way.
DISTURBANCES = frozenset(
    {
        Kind.GOODBYE, Kind.HANG_UP, Kind.CRASH, Kind.ENGINE_HANGS_UP, Kind.ENGINE_DIES, Kind.CONNECT_FAILS, Kind.FORGE,
        Kind.CANCEL, Kind.ABORT, Kind.FORGET, Kind.RELEASE, Kind.CANCEL_REPLY, Kind.WORKER_CLOSES, Kind.WORKER_DIES,
        Kind.DROP_WORKER, Kind.CANCEL_CALL, Kind.CLOSE_INJECTOR, Kind.GIVE_UP_INJECTED,
    }
)  # fmt: skip

#: What shows who waits for whom: whoever stops, is silent, or reads one reply before all others.
PACES = frozenset(
    {
        Kind.STOP, Kind.FALL_SILENT, Kind.GO_ON, Kind.AWAIT, Kind.WORKER_STOPS, Kind.WORKER_GOES_ON, Kind.MOMENT,
        Kind.FRONTEND_MOMENT,
    }
)  # fmt: skip

#: What leaves a task that was cancelled and has not run yet.
CANCELLING = frozenset({Kind.CANCEL, Kind.CANCEL_REPLY, Kind.CANCEL_CALL, Kind.GIVE_UP_INJECTED})


#: What the code of a caller can do while a call of its process runs it.
IN_CODE = frozenset(
    {
        Kind.TO_FRONTEND, Kind.HANG_UP, Kind.REQUEST_NOW, Kind.TRY, Kind.CANCEL, Kind.LEAVE, Kind.VIEW_DIES, Kind.UNPIN,
        Kind.KEPT_VIEW_DIES, Kind.ABORT, Kind.READ, Kind.FORGET, Kind.DROP_REPLY,
        Kind.TO_ENGINE, Kind.ENGINE_HANGS_UP, Kind.CLAIM, Kind.RELEASE, Kind.FINISH, Kind.FAIL, Kind.TIME_OUT, Kind.REPLY_NOW,
        Kind.CANCEL_REPLY, Kind.ENGINE_VIEW_DIES, Kind.BROADCAST, Kind.SHARE, Kind.CANCEL_CALL, Kind.FROM_WORKER,
        Kind.DROP_WORKER, Kind.WORKER_CLOSES, Kind.LEAVE_MESSAGE, Kind.MESSAGES_VIEW_DIES, Kind.CLOSE_INJECTOR, Kind.INJECT,
        Kind.GIVE_UP_INJECTED,
    }
)  # fmt: skip


class Sending(enum.IntEnum):
    """How a message is sent to workers."""

    WAITS = 0  # for as long as that takes
    NOW = 1  # if nothing has to be waited for
    IN_TIME = 2  # waits until a timer fires
    GATHER = 3  # and waits for replies


class Forgery(enum.IntEnum):
    """Messages that are refused whenever they come."""

    OLD_GENERATION = 0
    OLD_REQUEST = 1
    LEASE_OF_ANOTHER = 2
    BEHIND_THE_LEASE = 3
    OVERLAP = 4
    GENERATION_OF_ANOTHER = 5
    OLD_EPOCH = 6
    RETURN_OF_ANOTHER = 7
    REPLY_OF_ANOTHER = 8


class Moment(enum.StrEnum):
    """When something happens in the midst of a call."""

    LOOKING = "it looks"  # for what has come
    IN_CODE = "its code runs"  # a caller's: as it packs a payload, or reads a shape


class Inside(NamedTuple):
    """What happens in the midst of an action.

    A call that looks takes records: ``item`` of them when it first looks, and all others if it looks again, or at another
    connection. Code does what is an action otherwise, and has its numbers.
    """

    moment: Moment
    kind: Kind
    at: int = 0
    item: int = 0
    detail: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.at} {self.item} {self.detail}, as {self.moment}"


class Action(NamedTuple):
    """One thing that happens. Places are positions in lists, so that a trace from which actions are taken still runs."""

    kind: Kind
    at: int = 0
    item: int = 0
    detail: int = 0
    inside: Inside | None = None

    def __str__(self) -> str:
        inside = f", and inside: {self.inside}" if self.inside is not None else ""
        return f"{self.kind} {self.at} {self.item} {self.detail}{inside}"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Its own, and that of what happens inside."""
        return (self.kind,) if self.inside is None else (self.kind, self.inside.kind)


class Violation(Exception):
    """Something that must hold does not."""


def require(holds: bool, text: str) -> None:
    """Raises :class:`Violation` with ``text`` unless ``holds``."""
    if not holds:
        raise Violation(text)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """How large everything is. Small, so that everything is scarce and each limit is met often.

    Attributes:
        processes: frontends that are alive at a time.
        connected: frontends that are there from the beginning, if there may be as many.
        stops: whether processes stop, fall silent and go on, moments pass for those that wait for leases or slots, and callers
            await one reply before all others (:data:`PACES`). Where everybody goes on, moments pass at the end.
        may_stop: frontends that may stop or fall silent: those with numbers below this. All are alike: one shows it.
        slot_blocks, reply_blocks_wanted: sizes that are asked for; 0 of a reply travels in its message.
        max_slots: slots and waiters of the callers of one session.
        max_queue: messages in one direction at which voluntary ones wait; also the backlog of an end that does not read.
        kept_blocks: that may hold content which is kept; 0: nothing is.
        keys: that content is kept under.
        max_kept, max_pins: contents, and pins of one client.
        max_asking, max_held: callers of one session that ask for content, or have some.
        max_asks: of one session, in all; None for any number.
        max_moments: that pass for callers of one session, in all; likewise. Patience has no bound.
        workers: processes that may have joined at a time; 0: there are none. With model ends there are none either.
        joined_workers: those that are there from the beginning.
        broadcast_blocks, broadcast_blocks_wanted: memory for what is copied to workers, and what a message asks of it.
        worker_backlog: messages that a worker may have.
        injectors: of the engine's own process, at a time.
        copies_wait: whether copies are made by threads.
        turns_wait: whether what becomes ready in a loop runs in a turn of its own, and callers may wait for room, for their
            turn and to read. Otherwise it runs at once, unless a task was cancelled just now.
        sendings: how messages are sent to workers.
        max_calls: messages to workers, of one engine; None for any number.
        max_requests: submissions of one session; None for as many as fit.
        max_replies: to one request.
        looks: whether calls that look find what is under way.
        in_code: what code of callers does in the midst of calls that run it.
        max_disturbances: how often something of :data:`DISTURBANCES` happens; None for any number.
        without: what never happens.
    """

    leasable_blocks: int
    reply_blocks: int
    max_lease_blocks: int
    quota_blocks: int
    max_leases: int
    max_inflight: int
    base_blocks: int
    lease_blocks: int
    processes: int
    connected: int = 2
    stops: bool = False
    may_stop: int = 99
    slot_blocks: tuple[int, ...]
    reply_blocks_wanted: tuple[int, ...]
    max_slots: int
    max_queue: int
    kept_blocks: int = 0
    keys: int = 3
    max_kept: int = 3
    max_pins: int = 3
    max_asking: int = 2
    max_held: int = 3
    max_asks: int | None = None
    max_moments: int | None = None
    workers: int = 0
    joined_workers: int = 0
    broadcast_blocks: int = 3
    broadcast_blocks_wanted: tuple[int, ...] = (0, 1)
    worker_backlog: int = 2
    injectors: int = 0
    copies_wait: bool = True
    turns_wait: bool = False
    sendings: tuple[Sending, ...] = tuple(Sending)
    max_calls: int | None = None
    max_requests: int | None = None
    max_replies: int = 3  # a second of them can wait for what the first took
    max_disturbances: int | None = None
    looks: bool = False
    in_code: frozenset[Kind] = frozenset()
    without: frozenset[Kind] = frozenset()

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.leasable_blocks, self.reply_blocks)

    @property
    def limits(self) -> EngineBookLimits:
        return EngineBookLimits(
            self.max_lease_blocks,
            self.quota_blocks,
            self.max_leases,
            self.max_inflight,
            kept_blocks=self.kept_blocks,
            max_kept=self.max_kept,
            max_pins=self.max_pins,
        )

    @classmethod
    def draw(cls, random: Random) -> Self:
        """Returns a scenario of a walk: from two frontends that are crowded to four with room."""
        leasable = random.choice((3, 6, 12, 20))
        reply = random.choice((1, 2, 4))
        return cls(
            leasable_blocks=leasable,
            reply_blocks=reply,
            max_lease_blocks=random.randint(1, max(1, leasable // 2)),
            quota_blocks=random.randint(1, leasable),
            max_leases=random.randint(1, 4),
            max_inflight=random.randint(1, 5),
            base_blocks=random.randint(1, 3),
            lease_blocks=random.randint(1, 4),
            processes=random.randint(2, 4),
            slot_blocks=tuple(sorted({1, 2, random.randint(1, leasable), leasable})),
            reply_blocks_wanted=tuple(sorted({0, 1, reply})),
            max_slots=random.randint(2, 6),
            max_queue=random.choice((2, 8, 32)),
            kept_blocks=random.choice((0, (leasable + 1) // 2, leasable)),
            workers=random.choice((0, 2, 3)),
            broadcast_blocks=(broadcast := random.choice((2, 4))),
            broadcast_blocks_wanted=(0, 1, broadcast),
            worker_backlog=random.choice((1, 2, 5)),
            copies_wait=random.choice((False, True)),
            turns_wait=random.choice((False, True, True)),
            looks=random.choice((False, True)),
            in_code=random.choice((frozenset(), IN_CODE)),
        )
