"""A client whose engine is on another node: its requests go over a connection, or are calls of the engine's actor.

Theory of operation: who enters is told a token by the actor, and requests go over a connection straight into slots of the
engine (:mod:`shmring.client.far_session`). If no connection can be made, requests are calls of the actor. So are requests with
a deadline, which is a time of this machine's clock: the actor is told how much time is left.

Of such a call, the payload becomes a :class:`~shmring.memory.bundles.Bundle`. Ray moves it to the engine's node in its object
store, without pickling tensors, and the engine views it there. Replies come in the same way. Small ones of both travel with the
call (``wire.py``). How many bytes are on their way is bounded here. A task for each request reads what comes, so that a caller
that is cancelled loses no reply, and a request that is dropped ends. Giving a request up is a call of its own: Ray's
cancellation may overtake what it cancels, and is then tried again seconds later, or never.

With each reply, the engine says its load. What Ray says of a call becomes the error that a client of the ring would get
(:func:`_translated`).

Invariants: a request counts as in flight from its turn on until its call is over, or the engine has said that it is aborted;
after :meth:`FarClient.close`, none is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

import shmring
from shmring.cancellation import uninterrupted
from shmring.client.counters import ClientCounters
from shmring.client.far_submission import FarSubmission
from shmring.client.flight import Flight
from shmring.client.routing import EngineLoad, LoadEstimate
from shmring.core.loggers import logger_of
from shmring.engine.protocol import EncodeRequest, GenerateRequest
from shmring.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    EngineDeadError,
    RemoteError,
    RemoteProtocolError,
    WouldBlock,
    fresh,
)
from shmring.integrations.ray.directory import Load, Where, membership
from shmring.integrations.ray.wire import SMALL_NBYTES, Call, size_of, to_frame, to_outcome
from shmring.memory.bundles import Bundle, bounds_of, bundle
from shmring.request_options import EngineOptions
from shmring.statistics import ClientStatistics

__all__ = ["NOTHING", "FarClient"]

logger = logger_of("shmring.ray")

#: Statistics where no engine is attached.
NOTHING = ClientStatistics(
    **dict.fromkeys((field.name for field in dataclasses.fields(ClientStatistics)), 0) | {"connected": False}  # type: ignore[arg-type]
)

_CONNECT_S = 5.0  # for an engine that has just said where it listens

_THREAD_NBYTES = 1 << 20  # a longer copy into the object store is made beside the loop; it takes seconds if the store is full

# An engine that answers says its load at once. A node that is busy may take some tenths of a second.
_PATIENCE_S = 1.0
_LOAD_S = 0.5  # a load that is older is asked for; choosing does not wait for the answer


class FarClient:
    """See above. Made by :meth:`enter`.

    Args:
        name: the engine's.
        actor: its actor.
        where: what it says of itself.
        max_nbytes: of tensors in flight.

    Attributes:
        flight: what is in flight.
        is_draining: whether the engine drains, so that new requests should go to other engines.
        connection: by which requests go; None: the object store's are used.
    """

    def __init__(self, name: str, actor: Any, where: Where, max_nbytes: int) -> None:
        self.flight = Flight(where.max_inflight, max_nbytes)
        self.is_draining = False
        self._name = name
        self._actor = actor
        self._where = where
        self._membership = membership()
        self._id = secrets.token_hex(8)
        self._lifeline: Any = None
        self._numbers = itertools.count(1)
        self._calls: dict[FarSubmission, tuple[Any, asyncio.Task[Exception | None]]] = {}
        self._given_up: set[asyncio.Task[None]] = set()
        self._counters = ClientCounters()
        self._load: Load = (0, 0, False)
        self._load_s = 0.0  # when it was said
        self._loads = 0  # how often it was
        self._estimate = LoadEstimate(_PATIENCE_S)
        self._asking_load: asyncio.Task[None] | None = None
        self.connection: shmring.Client | None = None

    @classmethod
    async def enter(cls, name: str, actor: Any, where: Where, max_nbytes: int, description: str) -> FarClient:
        """Makes one that the engine knows.

        Raises:
            EngineDeadError: the engine has gone.
        """
        client = cls(name, actor, where, max_nbytes)
        client._lifeline = actor.hold.remote()
        try:
            load, token = await actor.enter.remote(client._id, description, [client._lifeline])
            client._heard(load)
            await client._connect(token, description)
        except BaseException as error:
            with contextlib.suppress(RayError):  # it may have entered
                actor.leave.remote(client._id)
                ray.cancel(client._lifeline)
            if isinstance(error, RayError):
                raise client._translated(error) from error
            raise
        return client

    async def _connect(self, token: bytes, description: str) -> None:
        address = self._where.address
        if not address:
            return
        try:
            self.connection = await shmring.connect(
                address, token=token, tls="off", description=description, connect_timeout_s=_CONNECT_S
            )
        except (EngineDeadError, RemoteProtocolError, OSError) as error:
            logger.warning("engine %r can't be reached at %s, and Ray's object store is used: %s", self._name, address, error)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def submit(self, payload: object, told: EngineOptions, *, one_reply: bool = False) -> FarSubmission:
        """Sends a payload, and returns when it is on its way to the engine.

        Args:
            payload: as of :meth:`shmring.Client.request`.
            told: what the engine is told beside it.
            one_reply: whether one reply is wanted: it then travels in one object with the end, which is faster.

        Raises:
            EngineDeadError: the engine has died. Nothing was sent.
            TypeError, CapacityError, ClosedError: as :meth:`shmring.Client.request`.
        """
        self.flight.check_open()
        self._check_membership()
        payload, deadline = _without_deadline(payload)
        if self.connection is not None and deadline is None:
            return cast(FarSubmission, await self.connection.submit(payload, **told))
        packed = self._pack(payload)
        nbytes = size_of(packed)
        is_small = nbytes < SMALL_NBYTES
        await self.flight.begin(nbytes)
        try:
            beside = () if is_small else (await self._put(packed),)
            self._counters.copies += len(packed.buffers)
            self._counters.copied_nbytes += packed.nbytes
            self.flight.check_open()  # it may have been closed meanwhile
            left_s = None if deadline is None else float(deadline - time.monotonic())
            number = next(self._numbers)
            method = self._actor.request if one_reply else self._actor.stream.options(num_returns="streaming")
            frame = to_frame(Call(self._id, number, told, left_s), [packed] if is_small else ())
            call = method.remote(frame, *beside)
        except BaseException as error:
            self.flight.end(nbytes)
            if isinstance(error, RayError):
                raise self._translated(error, nbytes) from error
            raise
        submission = FarSubmission(self._name, number, told.get("request_id", ""), self._give_up)
        outcomes = _only(call) if one_reply else _each(call)
        reading = asyncio.get_running_loop().create_task(self._read(submission, outcomes, nbytes))
        reading.add_done_callback(functools.partial(self._over, submission, nbytes))
        self._calls[submission] = call, reading
        self._counters.submitted += 1
        return submission

    async def _read(self, submission: FarSubmission, outcomes: AsyncIterator[Any], nbytes: int) -> Exception | None:
        """Hands what comes to a submission; returns the error with which that ended."""
        error: Exception | None = None
        try:
            async for outcome in outcomes:
                replies, error, load = to_outcome(outcome)
                del outcome
                self._heard(load)
                self._counters.replies += len(replies)
                submission.replied(replies)
                del replies  # or this frame would keep their memory until more has come
        except RayError as ray_error:
            return self._translated(ray_error, nbytes)
        except Exception as other:  # noqa: BLE001  # its caller gets it
            return other
        return error

    def _over(self, submission: FarSubmission, nbytes: int, reading: asyncio.Task[Exception | None]) -> None:
        """What comes of a request is read no longer; perhaps the task was cancelled before it began."""
        error = ClosedError("the loop of this client has ended") if reading.cancelled() else reading.result()
        if self._calls.pop(submission, None) is not None or not self.connected:
            self.flight.end(nbytes)
        else:
            giving_up = asyncio.get_running_loop().create_task(self._end_there(submission, nbytes))
            self._given_up.add(giving_up)
            giving_up.add_done_callback(self._given_up.discard)
        self._count_end(submission, error)
        submission.end(error)

    async def _end_there(self, submission: FarSubmission, nbytes: int) -> None:
        """A request was given up: it is in flight until the engine has aborted it."""
        try:
            with contextlib.suppress(RayError, EngineDeadError):  # the engine may have gone
                self._check_membership()
                await self._actor.abort.remote(self._id, submission.request_id)
        finally:
            self.flight.end(nbytes)

    def _count_end(self, submission: FarSubmission, error: Exception | None) -> None:
        if submission.ended or isinstance(error, AbortedError | EngineDeadError):
            self._counters.aborted += 1
        elif error is not None:
            self._counters.failed += 1
        else:
            self._counters.finished += 1

    def _give_up(self, submission: FarSubmission) -> None:
        """A submission was aborted, or has ended for its caller."""
        call = self._calls.pop(submission, None)
        if call is not None:
            with contextlib.suppress(RayError, EngineDeadError):  # the engine may have gone
                self._check_membership()
                ray.cancel(call[0])  # its tensors may be on their way still
            call[1].cancel()

    def _check_membership(self) -> None:
        if membership() != self._membership:
            raise EngineDeadError(f"this process has left the Ray cluster of engine {self._name!r}", engine=self._name)

    def _pack(self, payload: object) -> Bundle:
        return bundle(payload, **bounds_of(self._where))

    async def _put(self, packed: Bundle) -> Any:
        if size_of(packed) < _THREAD_NBYTES:
            return ray.put(packed)
        put = asyncio.ensure_future(asyncio.to_thread(ray.put, packed))
        return await uninterrupted(put)  # the thread goes on in any case, and its bytes are in flight until it is done

    def _translated(self, error: RayError, nbytes: int = 0) -> Exception:
        """Returns what an error of Ray means to a client of an engine."""
        if isinstance(error, RayTaskError):  # the engine's program: what its arguments are made of is not there, for example
            return RemoteError(type(error.cause).__name__, str(error.cause))
        if isinstance(error, TaskCancelledError):
            return AbortedError(f"the call was cancelled: {error}")
        if isinstance(error, ObjectStoreFullError | OutOfDiskError):
            return CapacityError(
                f"Ray's object store can't take {nbytes} bytes: {error}", needed=nbytes, capacity=self._where.store_nbytes
            )
        if isinstance(error, PendingCallsLimitExceeded):
            return WouldBlock(f"engine {self._name!r}: {error}")
        if isinstance(error, GetTimeoutError):
            return TimeoutError(str(error))
        if isinstance(error, RayActorError | ObjectLostError):
            return EngineDeadError(f"engine {self._name!r}, on another node: {error}", engine=self._name)
        return RemoteError(type(error).__name__, str(error))

    def abort(self, names: Iterable[str]) -> int:
        """See :meth:`Client.abort`."""
        names = set(names)
        submissions = [submission for submission in self._calls if submission.name in names]
        for submission in submissions:
            submission.abort()
        return len(submissions) + (0 if self.connection is None else self.connection.abort(names))

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        """See :meth:`Client.call`."""
        self._check_membership()
        if self.connection is not None:
            return await self.connection.call(method, *arguments)
        try:
            result, error = await self._actor.call.remote(method, arguments)
        except RayError as ray_error:
            raise self._translated(ray_error) from ray_error
        if error is not None:
            raise error
        return result

    # -- what is known of the engine -----------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """Returns the engine's load, as it was said last, with what this client has sent since. If that is long ago, the
        engine is asked, for the next time."""
        loop = asyncio.get_running_loop()
        own = self.flight.requests + self.flight.waiting
        if self.connection is not None and (session := self.connection._engines.the_only("a load").session) is not None:
            own += session.end.in_flight  # also what waits for its turn to be sent
        if self._asking_load is None and loop.time() - self._load_s > _LOAD_S:
            self._asking_load = loop.create_task(self._ask_load())
        in_flight, waiting, _ = self._load
        return self._estimate.look(
            published=in_flight,
            waiting=waiting,
            own=own,
            unread_nbytes=self._asking_load is not None,
            taken_nbytes=self._loads,
            now=loop.time(),
        )

    async def _ask_load(self) -> None:
        try:
            self._check_membership()
            self._heard(await self._actor.load.remote())
        except (RayError, EngineDeadError) as error:
            lost = self._translated(error) if isinstance(error, RayError) else error
            if isinstance(lost, EngineDeadError):
                await self.close(lost)
        finally:
            self._asking_load = None

    def _heard(self, load: Load) -> None:
        self._load, self._load_s = load, asyncio.get_running_loop().time()
        self._loads += 1
        self.is_draining = load[2]

    @property
    def connected(self) -> bool:
        """Whether the engine is not known to have gone, and this client is open."""
        return self.flight.why_closed is None and (self.connection is None or self.connection.connected)

    @property
    def why_closed(self) -> Exception | None:
        """The error that it was closed with."""
        return self.flight.why_closed or (None if self.connection is None else self.connection.lost_error)

    def why_not_sent(self) -> str:
        """Says for what an unsent request is waiting."""
        return (
            f"on another node; {self.flight.requests} requests with {self.flight.nbytes} bytes are in flight, and "
            f"{self.flight.waiting} wait"
        )

    def statistics(self) -> ClientStatistics:
        """Returns gauges and counters. It has no slots; copies are those into Ray's object store."""
        gauges = {"connected": self.connected, "in_flight": self.flight.requests, "waiting": self.flight.waiting}
        own = dataclasses.replace(NOTHING, **gauges, **self._counters.as_dict())  # type: ignore[arg-type]  # as their names say
        return own if self.connection is None else ClientStatistics.total([own, self.connection.statistics()])

    async def close(self, why: Exception | None = None) -> None:
        """Ends what is in flight, and says goodbye. A second call does nothing.

        Args:
            why: the error of what is in flight; None: this client was closed.
        """
        if self.flight.why_closed is not None:
            return
        error = ClosedError("the client was closed") if why is None else why
        self.flight.close(error)
        if self.connection is not None:
            await self.connection.close()
        with contextlib.suppress(RayError, EngineDeadError):  # the engine may have gone
            self._check_membership()
            self._actor.leave.remote(self._id)
            ray.cancel(self._lifeline)
        if self._asking_load is not None and self._asking_load is not asyncio.current_task():
            self._asking_load.cancel()
        reading = [task for _, task in self._calls.values()]
        for submission in list(self._calls):
            submission.end(fresh(error))
            self._give_up(submission)
        if reading:
            await asyncio.wait(reading)  # they count how requests have ended
        for task in list(self._given_up):
            task.cancel()


async def _only(call: Any) -> AsyncIterator[Any]:
    """The one outcome of a call."""
    yield await call


async def _each(call: Any) -> AsyncIterator[Any]:
    """The outcomes of a call that streams."""
    async for reference in call:
        outcome = [await reference]
        del reference  # or this frame would keep it in the object store until the next one has come
        yield outcome.pop()


def _without_deadline(payload: object) -> tuple[object, float | None]:
    """Returns a payload without its deadline, and that: a time of this machine's clock, which means nothing on another one."""
    if isinstance(payload, EncodeRequest | GenerateRequest) and payload.deadline is not None:
        return msgspec.structs.replace(payload, deadline=None), payload.deadline
    return payload, None
