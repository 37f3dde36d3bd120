"""The engines of one client in a Ray cluster, and the choice of one for each request.

The first of these that applies decides where a request goes: the slot in which tensors of its payload lie, the engine that its
caller names, its key, the route (``routing.py``). With one engine, there is nothing to decide.

Engines are given by name, or by a pattern. A pattern stands for the engines that are there now, and for those to come: when a
client has a request to send and has not looked for a while, it asks Ray which there are, and sends meanwhile to those that it
knows. So a client that does nothing costs nothing. An engine that a pattern has found, and that has gone for good, is
forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import shmring
from shmring.cancellation import retrieve, uninterrupted
from shmring.client.routing import EngineLoad
from shmring.door import check_route_key
from shmring.errors import ClosedError, EngineDeadError, LocalProtocolError
from shmring.integrations.ray.connection import Connection, Looks, Settings, Way
from shmring.integrations.ray.directory import check_in_cluster, is_like, is_pattern, names_like, validate_pattern
from shmring.integrations.ray.far_client import NOTHING
from shmring.integrations.ray.routing import ROUTES, ClusterRouter, Route
from shmring.statistics import ClientStatistics

__all__ = ["Connections"]

_MAX_ENGINES = 256  # each is asked for its load with every request; as of several engines of one machine
_LISTED_S = 2.0  # Ray is asked for engines at most so often: it takes seconds to start one
_FIRST_LISTED_S = 0.2  # the same, while there is none
_OTHERS_S = 1.0  # for the others, when one engine is attached: one that does not answer must not delay the client


class Connections:
    """See the head of this file.

    Args:
        names: of engines, or patterns.
        is_one: whether this is the only engine's name, and not a pattern.
        settings: of the connections.
        route, near_bound: as of :class:`~shmring.integrations.ray.routing.ClusterRouter`.

    Attributes:
        by_name: the connections.
        only: the only engine's; None: there are several, or may be.
        forgotten: what was counted with engines that have gone for good.
        is_closed: whether :meth:`close` was called.
    """

    def __init__(self, names: Sequence[str], is_one: bool, settings: Settings, route: Route, near_bound: int) -> None:
        if not names:
            raise ValueError("a client has an engine")
        if len(set(map(validate_pattern, names))) < len(names):
            raise ValueError(f"an engine is named twice in {list(names)}")
        if route not in ROUTES:
            raise ValueError(f"route is one of {', '.join(map(repr, ROUTES))}, not {route!r}")
        if isinstance(near_bound, bool) or not isinstance(near_bound, int) or near_bound < 0:
            raise ValueError(f"near_bound is a number of requests, not {near_bound!r}")
        self.by_name: dict[str, Connection] = {}
        self.forgotten = NOTHING
        self.is_closed = False
        self._listed = ", ".join(map(repr, names))
        self._patterns = [name for name in names if is_pattern(name)]
        self._given = frozenset(names)
        self._is_one = is_one
        self._settings = settings
        self._route = route
        self._near_bound = near_bound
        self._router: ClusterRouter | None = None
        self._some_attached = asyncio.Event()
        self._listing: asyncio.Task[None] | None = None
        self._listed_s = 0.0
        self.only: Connection | None = None
        for name in names:
            if not is_pattern(name):
                self._add(name)
        if is_one:
            self.only = self.by_name[names[0]]

    def _add(self, name: str) -> Connection:
        if len(self.by_name) >= _MAX_ENGINES:
            raise ValueError(f"a client has {_MAX_ENGINES} engines at most")
        looks: Looks = "when used" if self._is_one else "always" if name in self._given else "for a while"
        connection = Connection(name, self._settings, looks=looks, on_change=self._changed, on_gone=self._forget)
        self.by_name[name] = connection
        self._router = None
        return connection

    def _changed(self) -> None:
        """An engine is attached, or not any more."""
        if self.is_closed or any(connection.connected for connection in self.by_name.values()):
            self._some_attached.set()
        else:
            self._some_attached.clear()

    # -- attaching -----------------------------------------------------------------------------------------------------

    async def attach(self) -> None:
        """Attaches to the only engine; or to one of several, when the others that are there have been tried.

        Raises:
            EngineDeadError: none has answered in time.
            LocalProtocolError: this process is not connected to a Ray cluster.
        """
        if self.only is not None:
            await self.only.ready()
            return
        check_in_cluster()
        there = set(await names_like([*self._given]))
        for name in [*there, *self.by_name]:
            self._found(name)
        await self.some_engine()
        tries = [connection.attach() for name, connection in self.by_name.items() if name in there and not connection.connected]
        if tries:
            await asyncio.wait(tries, timeout=_OTHERS_S)

    def _found(self, name: str) -> None:
        """An engine of this name is there, or was given by name."""
        connection = self.by_name.get(name)
        if connection is None:
            if len(self.by_name) >= _MAX_ENGINES:
                return
            connection = self._add(name)
        if not connection.connected:
            connection.attach()

    def _look_for_more(self) -> None:
        """Asks Ray which engines there are, if that was long ago. Nobody waits for it."""
        if not self._patterns or self.is_closed or self._listing is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._listed_s > (_LISTED_S if self._some_attached.is_set() else _FIRST_LISTED_S):
            self._listed_s = loop.time()
            self._listing = loop.create_task(self._list())
            self._listing.add_done_callback(retrieve)

    async def _list(self) -> None:
        try:
            there = set(await names_like(self._patterns))
            for name in there:
                self._found(name)
            for name, connection in list(self.by_name.items()):
                if name not in there and name not in self._given and not connection.connected:
                    self._forget(connection)
                    await connection.close(EngineDeadError(f"engine {name!r} has gone", engine=name))
        finally:
            self._listing = None

    def _forget(self, connection: Connection) -> None:
        """An engine that a pattern has found has gone. If it comes back, the pattern finds it again."""
        if self.by_name.get(connection.name) is connection:
            self.forgotten = ClientStatistics.total([self.forgotten, connection.statistics()])
            del self.by_name[connection.name]
            self._router = None

    async def some_engine(self) -> None:
        """Waits until one of the engines is attached.

        Raises:
            EngineDeadError: none has answered in time.
            LocalProtocolError: this process is not connected to a Ray cluster.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self._settings.connect_timeout_s
        until_s = loop.time() + timeout_s
        while not any(connection.connected for connection in self.by_name.values()):
            self.check_open()
            check_in_cluster()
            for name in self._given.difference(self._patterns):  # it may have joined another cluster meanwhile
                self._found(name)
            self._look_for_more()
            left_s = until_s - loop.time()
            if left_s <= 0:
                lost = [f"{each.name!r}: {each.lost_error}" for each in self.by_name.values() if each.lost_error is not None]
                within = f"within {timeout_s:g} s (connect_timeout_s)"
                why = f"none of the engines {self._listed} has answered in this Ray cluster {within}"
                raise EngineDeadError("; ".join([why, *lost[:3]]), engine=None)
            pause_s = min(left_s, _FIRST_LISTED_S) if self._patterns else left_s
            # Not wait_for(): that of Python 3.11 loses a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._some_attached.wait()
        self.check_open()

    def check_open(self) -> None:
        """Raises :class:`ClosedError` if the client is closed."""
        if self.is_closed:
            raise ClosedError(f"this client of {self._listed} is closed")

    async def close(self) -> None:
        """Says goodbye to all of them, and attaches to no other one."""
        self.is_closed = True
        self._some_attached.set()  # whoever waits for an engine learns that there will be none
        if self._listing is not None:
            self._listing.cancel()
        closing = [connection.close() for connection in self.by_name.values()]
        await uninterrupted(asyncio.gather(*closing, return_exceptions=True))

    # -- choosing ------------------------------------------------------------------------------------------------------

    def given(self, engine: str) -> Connection:
        """Returns the connection to an engine that is named, also by its ring's name.

        Raises:
            ValueError: there is no such engine.
        """
        connection = self.by_name.get(engine)
        if connection is None:
            connection = next((each for each in self.by_name.values() if engine and each.ring == engine), None)
        if connection is None and not is_pattern(engine) and any(is_like(engine, pattern) for pattern in self._patterns):
            raise ValueError(f"no engine {engine!r} is there now, which would be one of {self._listed}")
        if connection is None:
            raise ValueError(f"there is no engine {engine!r} here, there are {self._listed}")
        return connection

    def the_only(self, what: str) -> Connection:
        """Returns the connection to the only engine.

        Raises:
            ValueError: there are several engines, or may be.
        """
        if self.only is None:
            raise ValueError(
                f"several engines have {what}: name one of {', '.join(map(repr, self.by_name))}, with engine= or "
                "in client.engines"
            )
        return self.only

    def reached(self) -> dict[str, Connection]:
        """Returns the engines that are attached; those that drain only if all do."""
        reached = {name: connection for name, connection in self.by_name.items() if connection.connected}
        return {name: connection for name, connection in reached.items() if not connection.draining} or reached

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines to which something may be sent now."""
        loads = {name: connection.load() for name, connection in self.reached().items()}
        return {name: load for name, load in loads.items() if load is not None}

    def pick(self, key: str | bytes | None, engine: str | None) -> Connection | None:
        """Chooses among the attached engines; None if none is attached. A named engine, or the only one, need not be
        attached."""
        check_route_key(key)
        self.check_open()
        if engine is not None:
            return self.given(engine)
        if self.only is not None:
            return self.only
        self._look_for_more()
        if self._router is None:
            names = list(self.by_name)
            if not names:
                return None
            self._router = ClusterRouter(names, self._route, self._near_bound, random.randrange(len(names)))
        if key is not None:
            reached = self.reached()
            return self.by_name[self._router.choose_for(key, reached)] if reached else None
        loads = self.loads()
        near = [name for name in loads if isinstance(self.by_name[name].now(), shmring.Client)]
        return self.by_name[self._router.choose(loads, near)] if loads else None

    def holder(self, payload: object, engine: str | None) -> Connection | None:
        """Finds the engine, of several, in whose slots tensors of a payload lie.

        Raises:
            LocalProtocolError: they lie in slots of two engines, or of another one than ``engine``.
        """
        if self.only is not None:
            return None
        holders = [connection for connection in self.by_name.values() if connection.holds(payload)]
        if len(holders) > 1:
            raise LocalProtocolError(
                f"tensors of the payload lie in slots of two engines, {holders[0].name!r} and {holders[1].name!r}, and neither "
                "can read the other's; send a copy of one of them, or acquire both slots with the same key= or engine="
            )
        holder = holders[0] if holders else None
        if holder is not None and engine is not None and holder is not self.given(engine):
            raise LocalProtocolError(
                f"tensors of the payload lie in a slot of engine {holder.name!r}, so the request can't go to {engine!r}; "
                "leave engine= out, or send a copy"
            )
        return holder

    async def chosen(self, key: str | bytes | None, engine: str | None, payload: object = None) -> tuple[Connection, Way]:
        """Chooses an engine, and returns the connection and the way to it; waits until one is attached."""
        connection = None if payload is None else self.holder(payload, engine)
        while True:
            connection = connection or self.pick(key, engine)
            if connection is not None:
                way = connection.now()
                if way is not None:
                    return connection, way
                if self.leaves_no_other(engine):
                    return connection, await connection.ready()
                connection = None  # it has gone just now
            await self.some_engine()
            await asyncio.sleep(0)  # a connection that has ended says so in the loop's next turn

    def leaves_no_other(self, engine: str | None) -> bool:
        """Whether no other engine would do, when an engine has died: it was named, or is the only one."""
        return engine is not None or self.only is not None

    def near_ones(self, engine: str | None) -> list[tuple[Connection, shmring.Client]]:
        """Returns the engines on this node, the least loaded first: the one that is named, or all."""
        loads = self.loads() if self.only is None and engine is None else {}
        of = [self.given(engine)] if engine is not None else [*self.by_name.values()]
        near = [(each, way) for each in of if isinstance(way := each.now(), shmring.Client)]
        return sorted(near, key=lambda each: loads[each[0].name].in_flight if each[0].name in loads else 0)

    def why_not_sent(self, engine: str | None) -> str:
        """Says for what an unsent request, or a caller that wants a slot, is waiting."""
        named = [] if engine is None else [each for each in self.by_name.values() if engine in (each.name, each.ring)]
        of = named if engine is not None else [*self.by_name.values()]
        attached = [f"at {each.name!r}: {_why_at(way)}" for each in of if (way := each.now()) is not None]
        if attached:
            return "; ".join(attached)
        return f"engine {self._listed if engine is None else repr(engine)} is looked up"


def _why_at(way: Way) -> str:
    return way._engines.why_not_sent() if isinstance(way, shmring.Client) else way.why_not_sent()
