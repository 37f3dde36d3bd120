"""A client's connection to one engine of a Ray cluster, wherever that is, and to the next one of its name.

Theory of operation: a connection has a *way* to its engine: a client of the ring, if the engine is on this node, or a
:class:`~shmring.integrations.ray.far_client.FarClient`. When the engine has died, its way is given up, and the name is looked
up again: Ray may have started the engine on another node. One task looks it up for all who wait. A client of several engines
has it looked up at once; a client of one engine when it is used again.

Invariant: there is a way exactly while an engine is attached; a way that was given up is closed, and never used again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import shmring
from shmring.cancellation import retrieve
from shmring.client.counters import ClientCounters
from shmring.client.routing import EngineLoad
from shmring.core.loggers import logger_of
from shmring.errors import ClosedError, EngineDeadError, LocalProtocolError, ShmringError, fresh
from shmring.integrations.ray.directory import Where, look_up, node_id, store_nbytes
from shmring.integrations.ray.far_client import NOTHING, FarClient
from shmring.statistics import ClientStatistics, counted_in

__all__ = ["Connection", "Looks", "Settings", "Way"]

logger = logger_of("shmring.ray")

Way: TypeAlias = "shmring.Client | FarClient"
HowItGoes: TypeAlias = Literal["shared memory", "connection", "object store"] | None
Looks: TypeAlias = Literal["when used", "always", "for a while"]

_STORE_SHARE = 4  # each client keeps a fourth of the smaller of the two stores in flight: several clients share a store
_LEAST_FLIGHT_NBYTES = 1 << 20
_ATTACH_S = 5.0  # for a ring on this node: its engine has just said that it is there
_PAUSE_S = 1.0  # after an engine has refused this client

_COUNTERS = counted_in(ClientStatistics)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all connections of a client have in common.

    Attributes:
        connect_timeout_s, in_flight_nbytes, description: as of :func:`~shmring.integrations.ray.connect`.
        options: of :func:`shmring.connect`, for engines on this node.
    """

    connect_timeout_s: float
    in_flight_nbytes: int | None
    description: str
    options: dict[str, Any]


class Connection:
    """See the head of this file. From :attr:`Client.engines`.

    Args:
        name: the engine's.
        settings: of the client.
        looks: when the engine is looked up, if it is not attached: when somebody waits for it, always, or for
            ``connect_timeout_s`` after it has gone.
        on_change: called when an engine is attached, or not any more.
        on_gone: called if it was looked for only for a while, and that is over.

    Attributes:
        name: as given.
        ring: the name of its ring, if it was ever attached; errors and slots of the ring have that.
        node: Ray's id of the node where it is, or was last; empty: it was never attached.
        refused: how often an engine on another node could not be reached by a connection, so that Ray's object store was used.
        lost_error: why the last engine went away, or why it can't be attached, as far as it is known.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        looks: Looks,
        on_change: Callable[[], object],
        on_gone: Callable[[Connection], object],
    ) -> None:
        self.name = name
        self.ring = ""
        self.node = ""
        self.refused = 0
        self.lost_error: Exception | None = None
        self._settings = settings
        self._looks = looks
        self._on_change = on_change
        self._on_gone = on_gone
        self._way: Way | None = None
        self._attaching: asyncio.Task[Way] | None = None
        self._endings: dict[asyncio.Task[None], Way] = {}
        self._past = ClientCounters()
        self._was_attached = False
        self._why_closed: ShmringError | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.name!r}, {'attached' if self._way is not None else 'not attached'}>"

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the engine is attached now."""
        return self.now() is not None

    @property
    def is_near(self) -> bool:
        """Whether the engine is on this node, so that requests go through shared memory.

        Raises:
            EngineDeadError: the engine has died, and was not looked up again.
        """
        way = self.now()
        if way is None:
            raise EngineDeadError(f"engine {self.name!r} has died; the next call looks it up again", engine=self.name)
        return not isinstance(way, FarClient)

    @property
    def way(self) -> HowItGoes:
        """How requests go to the engine that is attached now; None: none is."""
        way = self.now()
        if way is None:
            return None
        if isinstance(way, FarClient):
            return "object store" if way.connection is None else "connection"
        return "shared memory"

    @property
    def near(self) -> shmring.Client:
        """The client of the ring on this node, for its other calls (``submit_nowait``, ``slots``).

        Raises:
            LocalProtocolError: the engine is on another node.
            EngineDeadError: as :attr:`is_near`.
        """
        if not self.is_near:
            raise LocalProtocolError(
                f"engine {self.name!r} is on another node: use submit(), request(), stream() and slot() of the client itself"
            )
        assert isinstance(self._way, shmring.Client)
        return self._way

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start, over all engines of this name."""
        way = self.now()
        now = NOTHING if way is None else way.statistics()
        parts = [now, self._past, *(ending.statistics() for ending in self._endings.values())]
        return dataclasses.replace(now, **{name: sum(getattr(part, name) for part in parts) for name in _COUNTERS})

    # -- for the client ------------------------------------------------------------------------------------------------

    def now(self) -> Way | None:
        """Returns the way to the engine; None: none is attached."""
        way = self._way
        if way is not None and not way.connected:  # it has heard that its engine has died
            why = way.why_closed if isinstance(way, FarClient) else way.lost_error
            self.lose(way, why or EngineDeadError(f"engine {self.name!r} has gone", engine=self.name))
            return None
        return way

    def load(self) -> EngineLoad | None:
        """Returns the load of the engine that is attached; None: it can't be reached now."""
        way = self.now()
        if way is None or isinstance(way, FarClient):
            return None if way is None else way.load()
        return next(iter(way.loads().values()), None)

    @property
    def draining(self) -> bool:
        """Whether the engine that is attached ends what it has, and new requests should go to others."""
        way = self.now()
        if way is None or isinstance(way, FarClient):
            return way is not None and way.is_draining
        return way.engines[self.ring]._draining

    def holds(self, payload: object) -> bool:
        """Whether tensors of a payload lie in slots at this engine that callers hold."""
        way = self.now()
        return isinstance(way, shmring.Client) and way.engines[self.ring]._holds(payload)

    async def ready(self) -> Way:
        """Returns the way to the engine; waits until it is there.

        Raises:
            EngineDeadError: no engine of that name has answered in time.
            ClosedError: the client is closed.
            LocalProtocolError: this process is not connected to a Ray cluster.
        """
        if self._why_closed is not None:
            raise fresh(self._why_closed)
        way = self.now()
        if way is not None:
            return way
        scope = asyncio.timeout(None if self._looks == "when used" else self._settings.connect_timeout_s)
        try:
            async with scope:
                return await asyncio.shield(self.attach())
        except TimeoutError:
            if not scope.expired():
                raise
            timeout_s = self._settings.connect_timeout_s
            why = f"no engine {self.name!r} has answered in this Ray cluster within {timeout_s:g} s (connect_timeout_s)"
            raise EngineDeadError(why, engine=self.name) from None
        except ShmringError as error:  # the task's, which others may get as well
            raise fresh(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._why_closed is not None and task is not None and not task.cancelling():  # the look-up was cancelled
                raise fresh(self._why_closed) from None
            raise

    def attach(self) -> asyncio.Task[Way]:
        """Looks the engine up, in a task that is returned. Twice is once."""
        if self._attaching is None or self._attaching.done():
            self._attaching = asyncio.get_running_loop().create_task(self._attach())
            self._attaching.add_done_callback(retrieve)
        return self._attaching

    async def _attach(self) -> Way:
        while True:
            try:
                way = await self._look_up()
            except Exception as error:
                self.lost_error = error.with_traceback(None)
                if self._looks == "for a while" and isinstance(error, EngineDeadError):
                    self._on_gone(self)
                    raise
                if self._looks == "when used" or isinstance(error, LocalProtocolError):
                    raise
                if not isinstance(error, ShmringError | OSError):
                    logger.error("attaching to engine %r failed, and is tried again", self.name, exc_info=error)
                else:
                    logger.warning("can't attach to engine %r yet: %s", self.name, error)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._past.reconnections += self._was_attached
                self._was_attached = True
                self._way = way
                self._on_change()
                return way

    async def _look_up(self) -> Way:
        settings = self._settings
        loop = asyncio.get_running_loop()
        until_s = None if self._looks == "always" else loop.time() + settings.connect_timeout_s
        while True:
            actor, where = await look_up(self.name, None if until_s is None else max(0.0, until_s - loop.time()))
            self.node, self.ring = where.node, where.ring
            try:
                if where.node == node_id():
                    return await shmring.connect(
                        where.ring,
                        socket_dir=where.socket_dir,
                        description=settings.description,
                        connect_timeout_s=_ATTACH_S if until_s is None else max(0.0, min(_ATTACH_S, until_s - loop.time())),
                        **settings.options,
                    )
                entering = asyncio.timeout_at(until_s if until_s is not None else loop.time() + settings.connect_timeout_s)
                try:
                    async with entering:
                        return await self._enter(actor, where)
                except TimeoutError:
                    if not entering.expired():
                        raise
                    raise EngineDeadError(f"engine {self.name!r}, on another node, does not answer", engine=self.name) from None
            except EngineDeadError:  # it has died since it was looked up
                if until_s is not None and loop.time() >= until_s:
                    raise

    async def _enter(self, actor: Any, where: Where) -> FarClient:
        max_nbytes = self._settings.in_flight_nbytes
        if max_nbytes is None:
            here_nbytes = await asyncio.to_thread(store_nbytes, node_id())
            max_nbytes = max(_LEAST_FLIGHT_NBYTES, min(here_nbytes, where.store_nbytes) // _STORE_SHARE)
        client = await FarClient.enter(self.name, actor, where, max_nbytes, self._settings.description)
        self.refused += client.connection is None
        return client

    def lose(self, way: Way, error: Exception) -> None:
        """The engine at the end of a way has died, as this error says: so do all requests that are on it."""
        if self._way is not way:
            return  # another request has seen it first
        self._way = None
        self.lost_error = fresh(error)
        task = asyncio.get_running_loop().create_task(way.close(error) if isinstance(way, FarClient) else way.close())
        self._endings[task] = way
        task.add_done_callback(self._ended)
        self._on_change()
        if self._looks != "when used" and self._why_closed is None:
            self.attach()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Called when a way that was given up has closed: what its client has counted is added to what was counted before."""
        retrieve(task)
        statistics = self._endings.pop(task).statistics()
        for name in _COUNTERS:
            setattr(self._past, name, getattr(self._past, name) + getattr(statistics, name))

    async def close(self, why: ShmringError | None = None) -> None:
        """Says goodbye, and attaches to no other engine. A second call does nothing.

        Args:
            why: the error of calls that wait for the engine; None: the client was closed.
        """
        self._why_closed = self._why_closed or why or ClosedError(f"this client of {self.name!r} is closed")
        if self._attaching is not None and not self._attaching.done():
            self._attaching.cancel()
            await asyncio.wait([self._attaching])
        way, self._way = self._way, None
        try:
            if way is not None:
                await way.close()
        finally:
            if self._endings:
                await asyncio.wait([*self._endings])
