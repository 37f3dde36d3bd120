"""The one client of an engine in a Ray cluster, or of several, wherever they are.

Theory of operation: a client has a :class:`~shmring.integrations.ray.connection.Connection` to each of its engines, which knows
the way to it: a client of the ring, if the engine is on this node, or calls of its actor. A request goes to one of them, whole;
which one is chosen when it is sent (``connections.py``). When an engine has died, requests that were not sent go to another
one, if there are others. Those that were sent fail, since they may have been carried out in part; only their caller says
whether they are sent again (``retry``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar, Unpack

import shmring
from shmring.client.deadlines import Deadlines
from shmring.client.far_slot import FarSlot
from shmring.client.far_submission import FarSubmission
from shmring.client.preparing import Preparations
from shmring.client.routing import EngineLoad
from shmring.config import ClientConfig, configured
from shmring.door import check_key, check_name, check_retry, count_of, names_of, parse_nbytes, seconds_of, timeout_of
from shmring.errors import EngineDeadError, LocalProtocolError, WouldBlock, fresh
from shmring.integrations.ray.connection import Connection, HowItGoes, Settings, Way
from shmring.integrations.ray.connections import Connections
from shmring.integrations.ray.directory import is_pattern
from shmring.integrations.ray.engine import UnknownClientError
from shmring.integrations.ray.far_client import FarClient
from shmring.integrations.ray.routing import Route
from shmring.opening import Opening
from shmring.request_options import Arguments, SubmitOptions, signed_as
from shmring.statistics import ClientStatistics
from shmring.uncopied import uncopied

__all__ = ["Client", "connect"]

_Result = TypeVar("_Result")

_NEAR_BOUND = 16  # requests: a step or two of an engine, which last longer than a request takes to another node


class Client:
    """A client of engines in a Ray cluster. Made by :func:`connect`.

    Attributes:
        engines: the connection to each engine, by its name. With a pattern, they come and go.
        resent: requests that were sent again because their engine had died (``retry``).
    """

    def __init__(self, names: Sequence[str], is_one: bool, settings: Settings, route: Route, near_bound: int) -> None:
        self.resent = 0
        self._connections = Connections(names, is_one, settings, route, near_bound)
        self._deadlines = Deadlines()
        self._preparations = Preparations()
        self.engines: Mapping[str, Connection] = MappingProxyType(self._connections.by_name)

    __reduce_ex__ = uncopied("it belongs to one process and one event loop; connect in the actor or task that is to use it")

    # -- the engines -----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its engines."""
        return tuple(self.engines)

    @property
    def name(self) -> str:
        """The name of the only engine.

        Raises:
            ValueError: there are several, or may be.
        """
        return self._connections.the_only("a name").name

    @property
    def is_near(self) -> bool:
        """Whether an engine that is attached is on this node, so that requests go through shared memory.

        Raises:
            EngineDeadError: none is attached: the only engine has died, and no call has looked it up again.
        """
        if self._connections.only is not None:
            return self._connections.only.is_near
        attached = [connection for connection in self.engines.values() if connection.connected]
        if not attached:
            raise EngineDeadError("none of the engines is attached; the next call looks them up again")
        return any(connection.is_near for connection in attached)

    @property
    def way(self) -> HowItGoes:
        """How requests go to the only engine now: by ``"shared memory"``; over a ``"connection"`` from another node; or, where
        none can be made, through Ray's ``"object store"``. None: it is not attached.

        Raises:
            ValueError: there are several: each of :attr:`engines` has its own.
        """
        return self._connections.the_only("a way").way

    @property
    def near(self) -> shmring.Client:
        """The client of the ring on this node, for its other calls (``submit_nowait``, ``slots``).

        Raises:
            LocalProtocolError: the engine is on another node; or there are several: each of :attr:`engines` has its own.
            EngineDeadError: as :attr:`is_near`.
        """
        if self._connections.only is None:
            raise LocalProtocolError("several engines have a client on this node each: client.engines[name].near")
        return self._connections.only.near

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        return any(connection.connected for connection in self.engines.values())

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines that are attached, as requests are routed by them now; see
        :meth:`shmring.Client.loads`. Engines on other nodes have said theirs with their last reply, or half a second ago."""
        return self._connections.loads()

    def choose(self, *, key: str | bytes | None = None) -> str:
        """Returns the engine that a request would go to now, for callers who need several things at one engine.

        Raises:
            WouldBlock: no engine is attached now.
        """
        connection = self._connections.pick(key, None)
        if connection is None:
            raise WouldBlock("none of the engines is attached now")
        return connection.name

    async def wait_connected(self, timeout: float | None = None, *, engine: str | None = None) -> None:
        """Waits until an engine is attached: the one that is named, or any.

        Raises:
            TimeoutError: it took longer.
            EngineDeadError: it took longer than ``connect_timeout_s``.
            ValueError: there is no such engine.
        """
        one = self._connections.only if engine is None else self._connections.given(engine)
        with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(engine)):
            await (self._connections.some_engine() if one is None else one.ready())

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start: the sums, of several engines. Each of
        :attr:`engines` has its own. What engines count is told by :func:`~shmring.integrations.ray.statistics`."""
        parts = [connection.statistics() for connection in self.engines.values()]
        return ClientStatistics.total(parts if self._connections.only is not None else [*parts, self._connections.forgotten])

    # -- requests ----------------------------------------------------------------------------------------------------------

    @signed_as(shmring.Client.request)
    async def request(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        retry: int = 0,
        **options: Unpack[SubmitOptions],
    ) -> Any:
        """Sends a payload and waits for its one reply. Cancelling aborts the request.

        Arguments, replies and errors are those of :meth:`shmring.Client.request`. Tensors of a reply that can only be read are
        there as well when the engine is on another node: they lie in Ray's object store.

        Args:
            retry: how often it may be sent again because its engine died before a reply was read, or because Ray can't say
                whether the engine has got it. It may then have been carried out twice, or in part.
        """
        given = Arguments.of(options)
        retry = check_retry(retry, given.engine)
        with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(given.engine)) as deadline:
            why_not_sent = deadline.waits_for
            while True:
                connection, way, submission = await self._submit(payload, given, one_reply=True)
                deadline.waits_for = submission._why_no_reply
                try:
                    return await submission.result(reply_type)
                except EngineDeadError as error:
                    retry = self._again(connection, way, submission, error, retry)
                    deadline.waits_for = why_not_sent
                except BaseException:
                    submission.abort()
                    raise

    @signed_as(shmring.Client.stream)
    async def stream(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        retry: int = 0,
        **options: Unpack[SubmitOptions],
    ) -> AsyncGenerator[Any, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` bounds the waiting.
        """
        given = Arguments.of(options)
        retry = check_retry(retry, given.engine)
        timeout = timeout_of(timeout)
        until_s = None if timeout is None else asyncio.get_running_loop().time() + timeout

        async def next_reply(submission: shmring.Submission | FarSubmission) -> list[Any]:
            if submission._need_not_wait():
                return [await submission.next(reply_type)]
            with self._deadlines.within(timeout, submission._why_no_reply, until_s=until_s):
                return [await submission.next(reply_type)]

        while True:
            with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(given.engine), until_s=until_s):
                connection, way, submission = await self._submit(payload, given)
            try:
                while True:
                    try:
                        reply = await next_reply(submission)
                    except StopAsyncIteration:
                        return
                    except EngineDeadError as error:
                        retry = self._again(connection, way, submission, error, retry)
                        break
                    yield reply.pop()  # or this frame would keep the reply's memory until the caller asks for the next one
            finally:
                submission.abort()

    @signed_as(shmring.Client.submit)
    async def submit(self, payload: object, **options: Unpack[SubmitOptions]) -> shmring.Submission | FarSubmission:
        """Sends a payload, and returns when it is an engine's, or on its way there; see :meth:`shmring.Client.submit`.

        Nothing that was sent is sent again.
        """
        return (await self._submit(payload, Arguments.of(options)))[2]

    async def _submit(
        self, payload: object, options: Arguments, *, one_reply: bool = False
    ) -> tuple[Connection, Way, shmring.Submission | FarSubmission]:
        name, told = options.for_engine.request_id, options.told
        while True:
            connection, way = await self._named(name, self._connections.chosen(options.key, options.engine, payload))
            try:
                if isinstance(way, FarClient):
                    sending = way.submit(payload, told, one_reply=one_reply)
                    return connection, way, await self._named(name, sending)
                return connection, way, await way.submit(payload, **told)
            except EngineDeadError as error:  # before it was sent
                connection.lose(way, error)
                if self._connections.leaves_no_other(options.engine):
                    raise _named_as(error, connection) from None

    async def _named(self, name: str, work: Awaitable[_Result]) -> _Result:
        return await (self._preparations.prepare(name, work) if name else work)

    def _again(
        self,
        connection: Connection,
        way: Way,
        submission: shmring.Submission | FarSubmission,
        error: EngineDeadError,
        retry: int,
    ) -> int:
        """Raises the error unless a request may be sent again; returns how often it may be after that."""
        is_unknown = isinstance(error, UnknownClientError)  # of this request, nothing was done; others may have been
        connection.lose(way, EngineDeadError(str(error), engine=error.engine) if is_unknown else error)
        if not self._connections.is_closed:
            if is_unknown and not submission.has_replied:
                return retry
            if retry and not submission.has_replied and not submission._on_gpu:
                self.resent += 1
                return retry - 1
        raise _named_as(error, connection) from None

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names, wherever they are; tasks that wait for them get :class:`~shmring.AbortedError`.

        Returns:
            How many were in flight.
        """
        names = names_of(request_id)
        ways = [way for connection in self.engines.values() if (way := connection.now()) is not None]
        return self._preparations.abort(names) + sum(way.abort(names) for way in ways)

    async def call(self, method: str, *arguments: object, engine: str | None = None, timeout: float | None = None) -> Any:
        """Calls a control method of an engine and returns its result; see :meth:`shmring.Client.call`.

        Args:
            engine: which one; None: the only one. To call several engines, call this for each of :attr:`names`.
        """
        check_name(method, "method")
        connection = self._connections.the_only("control methods") if engine is None else self._connections.given(engine)
        with self._deadlines.within(timeout, lambda: f"the answer of engine {connection.name!r}"):
            way = await connection.ready()
            try:
                return await (way.call(method, arguments) if isinstance(way, FarClient) else way.call(method, *arguments))
            except EngineDeadError as error:
                connection.lose(way, error)
                raise _named_as(error, connection) from None

    # -- memory --------------------------------------------------------------------------------------------------------------

    def slot(
        self,
        nbytes: int | str,
        *,
        timeout: float | None = None,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Opening[shmring.Slot | FarSlot]:
        """Waits for memory to write tensors into: a slot of the slab, or, if the engine is on another node, of this process.

        Use it as ``async with client.slot(nbytes) as slot:``; see :meth:`shmring.Client.slot`. A request with tensors in a
        slot of the slab goes to the engine of that slot.
        """
        asked_nbytes = parse_nbytes(nbytes, "nbytes")
        timeout = timeout_of(timeout)

        async def acquire() -> shmring.Slot | FarSlot:
            with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(engine)):
                while True:
                    connection, way = await self._connections.chosen(key, engine)
                    if isinstance(way, FarClient):
                        return FarSlot(connection.name, asked_nbytes)
                    try:
                        return await way.slot(asked_nbytes)
                    except EngineDeadError as error:
                        connection.lose(way, error)
                        if self._connections.leaves_no_other(engine):
                            raise _named_as(error, connection) from None

        return Opening(acquire)

    async def find(
        self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None, engine: str | None = None
    ) -> shmring.Kept[Any] | None:
        """Looks for content that an engine on this node keeps; see :meth:`shmring.Client.find`. On another node, nothing is
        ever found."""
        check_key(key)
        with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(engine)):
            await self._connections.chosen(None, engine)
            for connection, way in self._connections.near_ones(engine):
                try:
                    kept = await way.find(key, payload_type=payload_type)
                except EngineDeadError as error:
                    connection.lose(way, error)
                    if self._connections.leaves_no_other(engine):
                        raise _named_as(error, connection) from None
                else:
                    if kept is not None:
                        return kept
        return None

    async def keep(
        self, key: bytes, payload: object, *, timeout: float | None = None, engine: str | None = None
    ) -> shmring.Kept[Any]:
        """Gives content to an engine on this node; see :meth:`shmring.Client.keep`.

        Raises:
            LocalProtocolError: the engine is on another node, or all are.
        """
        check_key(key)
        with self._deadlines.within(timeout, lambda: self._connections.why_not_sent(engine)):
            holder = self._connections.holder(payload, engine)
            if holder is None:
                await self._connections.chosen(None, engine)
            near = self._connections.near_ones(engine if holder is None else holder.name)
            if not near:
                raise LocalProtocolError(
                    "no engine on this node is attached: only clients on its own node give an engine content to keep"
                )
            connection, way = near[0]
            try:
                return await way.keep(key, payload)
            except EngineDeadError as error:
                connection.lose(way, error)
                raise _named_as(error, connection) from None

    # -- the end -------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Aborts pending requests, and says goodbye. A second call does nothing."""
        if not self._connections.is_closed:
            await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _named_as(error: EngineDeadError, connection: Connection) -> EngineDeadError:
    """Returns an error with the name that the caller knows the engine by, and not that of its ring."""
    named = fresh(error)
    named.engine = connection.name
    return named


def connect(
    name: str | list[str] | tuple[str, ...],
    *,
    route: Route | None = None,
    near_bound: int = _NEAR_BOUND,
    connect_timeout_s: float = 60.0,
    in_flight_nbytes: int | str | None = None,
    description: str = "",
    **options: Any,
) -> Opening[Client]:
    """Connects an actor, a task or a driver to an engine of its cluster: ``async with connect("vision") as client``.

    With a list of names, or a pattern such as ``"vision-*"``, it connects to several engines, and each request goes to one of
    them. One engine that answers is enough; the client attaches to the others when they start. A pattern stands for all engines
    whose names are like it, also for those that are started later.

    Args:
        name: the engine's, as given to ``EngineActor.remote``; a pattern, in which ``*`` stands for any characters; or a list.
        route: for several engines: ``"nearest"`` (the default), to the least loaded one on this node, unless that has
            ``near_bound`` requests more in flight than an engine on another node; ``"least_loaded"``, wherever they are; or
            ``"round_robin"``, to each in turn. A request's ``key`` or ``engine`` comes first.
        near_bound: how many requests more an engine on this node may have.
        connect_timeout_s: how long an engine is waited for: Ray may be starting it, or starting it again on another node.
        in_flight_nbytes: of each engine on another node, the bytes of tensors that this client may have in flight; further
            requests wait. None: a fourth of the smaller of both nodes' object stores.
        description: what the engine's log calls this client.
        options: fields of :class:`shmring.ClientConfig`, for engines on this node.

    Raises:
        EngineDeadError: no engine of that name (none of these names) answers in time.
        LocalProtocolError: this process is not connected to a Ray cluster.
        ValueError, TypeError: a name, size or option is not valid.
    """
    is_one = isinstance(name, str) and not is_pattern(name)
    if is_one and route is not None:
        raise TypeError(f"route={route!r} is for several engines: connect([...], route=...)")
    check_name(description, "description")
    near_bound = count_of(near_bound, "near_bound", least=0)
    connect_timeout_s = seconds_of(connect_timeout_s, "connect_timeout_s")
    configured(ClientConfig, None, options)
    settings = Settings(
        connect_timeout_s,
        None if in_flight_nbytes is None else parse_nbytes(in_flight_nbytes, "in_flight_nbytes"),
        description,
        options,
    )
    names = [name] if isinstance(name, str) else list(name)

    async def create() -> Client:
        client = Client(names, is_one, settings, route or "nearest", near_bound)
        try:
            await client._connections.attach()
        except BaseException:
            await client.close()
            raise
        return client

    return Opening(create)
