"""A frontend's end of several engines: one client, many rings.

Theory of operation: :class:`RoutingClient` has a :class:`~shmring.client.client.RingClient` for each engine, which attaches to
it, is told of its death, and attaches to the next one of that name. A request goes to one of them, whole: its engine is chosen
when it is sent (:mod:`shmring.client.routing`), and from then on it is a request like any other. So an engine that dies takes
its own requests with it and no others.

What decides where a request goes, in this order: a slot in which tensors of its payload lie, since nobody but that slot's
engine can read them there; the ``engine`` that its caller names; its ``key``; the route.

What was not sent to an engine that died goes to another one. What was sent fails, since nobody knows how far it came, unless
its caller allows another try. Tensors in slots of the dead engine are still there, as long as their caller holds the slots: a
slab in host memory is mapped here until the last view of it has died, and nobody lends its memory out any more. They are copied
to the next engine. Of memory on a GPU nobody knows that, so nothing is sent from there a second time.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import torch

from shmring.client.client import RingClient, parse_sizes
from shmring.client.deadlines import Deadlines
from shmring.client.kept import Kept
from shmring.client.preparing import Preparations
from shmring.client.routing import ROUTES, EngineLoad, LoadEstimate, Route, Router
from shmring.client.session import Session
from shmring.client.slot import Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig, parse_nbytes
from shmring.core.compiled import Origin
from shmring.core.states import ClientSlot
from shmring.errors import ClosedError, EngineDeadError, LocalProtocolError, ShmringError, WouldBlock, fresh
from shmring.gpu.device_slots import DeviceSlots
from shmring.statistics import ClientStatistics
from shmring.transport.loops import check_loop

__all__ = ["AcquiringRoutedSlot", "RoutingClient"]

_Result = TypeVar("_Result")

#: For those that are not the first: an engine that listens and does not answer must not hold up those that do.
_OTHERS_S = 1.0
_MAX_ENGINES = 256  # each is asked for its load with every request; far more than one machine has accelerators


class RoutingClient:
    """A frontend's end of several engines. Made by :func:`shmring.connect` from a list of names.

    Engines are taken to be alike: each may get any request. A client has as much memory and as many requests in flight at each
        of them
    as it would have at that one alone.

    Attributes:
        names: of the engines, in the order in which they were given.
        config: as configured, for each of them.
        engines: the clients beneath, by name: for what is asked of one engine, such as its ``client_id`` or ``lost_error``.
        resent: requests that were sent again because their engine had died (``retry``).
    """

    def __init__(self, clients: Mapping[str, RingClient], config: ClientConfig, route: Route, reconnect: bool) -> None:
        self.names = tuple(clients)
        self.config = config
        self.engines: Mapping[str, RingClient] = MappingProxyType(dict(clients))
        self.resent = 0
        self._reconnect = reconnect
        self._router = Router(self.names, route, random.randrange(len(clients)))
        self._estimates = {name: LoadEstimate() for name in clients}
        self._sessions: dict[str, Session] = {}  # that the estimates are of
        self._deadlines = Deadlines()
        self._preparations = Preparations()
        self._closed = False
        self._origin = Origin()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def create(
        cls, names: Sequence[str], config: ClientConfig, *, route: Route, reconnect: bool, description: str = ""
    ) -> RoutingClient:
        """Attaches to engines; see :func:`shmring.connect`."""
        check_names(names)
        if route not in ROUTES:
            raise ValueError(f"route is one of {', '.join(map(repr, ROUTES))}, not {route!r}")
        clients = {name: RingClient.detached(name, config, reconnect=reconnect, description=description) for name in names}
        routing = cls(clients, config, route, reconnect)
        try:
            await routing._attach()
        except BaseException:
            await routing.close()
            raise
        return routing

    async def _attach(self) -> None:
        """Tries all engines at once; returns when one is attached and the others have been tried."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.connect_timeout_s
        tries = {loop.create_task(client.attach()): client for client in self.engines.values()}
        try:
            pending = set(tries)
            while pending and not self.connected:
                left_s = max(0.0, deadline - loop.time())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
            if pending and self.connected:
                await asyncio.wait(pending, timeout=_OTHERS_S)
        finally:
            for trying in tries:
                trying.cancel()
            outcomes = await asyncio.gather(*tries, return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        refusals = [error for error in errors if not isinstance(error, EngineDeadError | asyncio.CancelledError)]
        if len(refusals) == len(tries):
            raise refusals[0]  # whatever starts later would say the same
        for client in self.engines.values():
            if not client.connected:
                client.keep_attaching()
        if self.connected:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._some_engine()
        except TimeoutError:
            if refusals:
                raise refusals[0] from None
            raise EngineDeadError(
                f"none of the engines {self._listed} answered within {self.config.connect_timeout_s:g} s", engine=self._only
            ) from None

    # -- requests ----------------------------------------------------------------------------------------------------

    async def request(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
        retry: int = 0,
    ) -> Any:
        """Sends a payload to one of the engines and waits for its one reply. Cancelling aborts the request.

        Args:
            payload, timeout, reply_type, request_id: as of :meth:`shmring.RingClient.request`.
            key: sends all requests of this key to the same engine, as long as that is attached.
            engine: sends it to this one.
            retry: how often it may be sent again, to whichever engine is attached, because its engine died before a reply had
                come. It may then have been carried out twice, or in part.

        Raises:
            EngineDeadError: its engine went away; ``engine`` of the error names it. Or no engine is attached, and none is
                waited for (``reconnect=False``).
            LocalProtocolError: tensors of the payload lie in slots of two engines, or in a slot of another engine than
                ``engine``.
            ValueError: there is no such engine, or ``engine`` and ``retry`` contradict each other.
            TimeoutError, TypeError, CapacityError, RemoteError, AbortedError, ClosedError: as
                :meth:`shmring.RingClient.request`.
        """
        check_retry(retry, engine)
        why_not_sent = self._why_not_sent if engine is None else functools.partial(self._why_not_sent, engine)
        with self._deadlines.within(timeout, why_not_sent) as deadline:
            while True:
                submission, may_be_resent = await self._submit(payload, request_id, key, engine)
                deadline.waits_for = functools.partial(_why_no_reply, submission)
                try:
                    return await submission.result(reply_type)
                except EngineDeadError:
                    if not may_be_resent or not self._sends_again(submission, retry):
                        raise
                    retry -= 1
                    deadline.waits_for = why_not_sent
                except BaseException:
                    submission.abort()
                    raise

    async def stream(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
        retry: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` bounds the waiting, not what the caller does between two
        replies.
        """
        check_retry(retry, engine)
        until_s = None if timeout is None else asyncio.get_running_loop().time() + timeout

        async def next_reply(submission: Submission) -> list[Any]:
            with self._deadlines.within(timeout, functools.partial(_why_no_reply, submission), until_s=until_s):
                return [await submission.next(reply_type)]

        while True:
            with self._deadlines.within(timeout, lambda: self._why_not_sent(engine), until_s=until_s):
                submission, may_be_resent = await self._submit(payload, request_id, key, engine)
            try:
                while True:
                    try:
                        reply = await next_reply(submission)
                    except StopAsyncIteration:
                        return
                    except EngineDeadError:
                        if not may_be_resent or not self._sends_again(submission, retry):
                            raise
                        retry -= 1
                        break
                    yield reply.pop()  # or this frame would keep the reply's slot for as long as the caller takes
            finally:
                submission.abort()

    def _sends_again(self, submission: Submission, retry: int) -> bool:
        """Whether a request whose engine has died is sent once more."""
        if not retry or submission.has_replied:
            return False
        self.resent += 1
        return True

    async def submit(
        self, payload: object, *, request_id: str = "", key: str | bytes | None = None, engine: str | None = None
    ) -> Submission:
        """Sends a payload, and returns when it is an engine's: the first half of :meth:`request`. Its ``engine`` says whose.

        Arguments and errors are those of :meth:`request`. Nothing that was sent is sent again.
        """
        submission, _ = await self._submit(payload, request_id, key, engine)
        return submission

    async def _submit(
        self, payload: object, request_id: str, key: str | bytes | None, engine: str | None
    ) -> tuple[Submission, bool]:
        """Sends a payload; returns also whether that can be done again if its engine dies."""
        _check_key(key)
        while True:
            client, on_gpu = self._holder(payload, engine)
            client = client or self._pick(key, engine) or await self._pick_in_time(key, request_id)
            try:
                return await client.submit(payload, request_id=request_id), not on_gpu
            except EngineDeadError:  # before it was sent
                if engine is not None or on_gpu:
                    raise

    def submit_nowait(
        self,
        payload: object,
        *,
        request_id: str = "",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """The same if nothing has to be waited for. Where no slot, key or ``engine`` decides, any engine that can take it will
        do.

        In :mod:`shmring.threads`, a long copy is made beside the loop, and waited for.

        Args:
            payload, request_id, ask: as of :meth:`shmring.RingClient.submit_nowait`.
            key, engine: as of :meth:`request`.

        Raises:
            WouldBlock: there is no space in this client's leases, too much is in flight, or no engine is attached.
        """
        client, _ = self._holder(payload, engine)
        candidates = self._candidates(key, engine) if client is None else [client]
        return _first_that_can(candidates, lambda each: each.submit_nowait(payload, request_id=request_id, ask=ask))

    async def submit_in_time(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """For :mod:`shmring.threads`: as :meth:`submit`, within so many seconds."""
        with self._deadlines.within(timeout, lambda: self._why_not_sent(engine)):
            return await self.submit(payload, request_id=request_id, key=key, engine=engine)

    async def submit_unless_full(
        self,
        payload: object,
        *,
        request_id: str = "",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """For :mod:`shmring.threads`: as :meth:`submit_nowait`, with a long copy made beside the loop."""
        client, _ = self._holder(payload, engine)
        full: WouldBlock | None = None
        for candidate in self._candidates(key, engine) if client is None else [client]:
            try:
                return await candidate.submit_unless_full(payload, request_id=request_id, ask=ask)
            except WouldBlock as error:
                full = full or error
        assert full is not None
        raise full

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names, wherever they are; tasks that wait for them get :class:`AbortedError`.

        Returns:
            How many were in flight; an unknown one is none, it may just have ended.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        self._check_process()
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        return self._preparations.abort(names) + sum(client.abort(names) for client in self.engines.values())

    async def call(self, method: str, *arguments: object, engine: str, timeout: float | None = None) -> Any:
        """Calls a control method of one engine; as :meth:`shmring.RingClient.call`.

        Args:
            method, arguments, timeout: as there.
            engine: which one. What is asked of all of them is called for each name in :attr:`names`.
        """
        return await self._given(engine).call(method, *arguments, timeout=timeout)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def slot(
        self,
        nbytes: int | str,
        *,
        timeout: float | None = None,
        drain: bool = False,
        device: torch.device | str = "cpu",
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> AcquiringRoutedSlot:
        """Waits in line for memory of an engine's slab: ``async with client.slot(nbytes) as slot``. Its ``engine`` says whose.

        A request with tensors in it goes to that engine.

        Args:
            nbytes, timeout, drain, device: as of :meth:`shmring.RingClient.slot`.
            key, engine: as of :meth:`request`.

        Raises:
            CapacityError, TimeoutError, EngineDeadError, ClosedError, SlabError, ValueError: as
                :meth:`shmring.RingClient.slot`. An
                engine that dies meanwhile is no error unless ``engine`` names it: another one is chosen.
        """
        asked_nbytes = parse_nbytes(nbytes)
        _check_key(key)
        return AcquiringRoutedSlot(lambda: self._acquire(asked_nbytes, timeout, drain, device, key, engine))

    async def slots(
        self,
        sizes: Sequence[int | str],
        *,
        timeout: float | None = None,
        drain: bool = False,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> list[Slot]:
        """Waits in line for several slots at once, at one engine.

        Args:
            sizes, timeout, drain: as of :meth:`shmring.RingClient.slots`.
            key, engine: as of :meth:`request`.

        Raises:
            CapacityError, TimeoutError, EngineDeadError, ClosedError, ValueError: as :meth:`slot`.
        """
        parts = parse_sizes(sizes)
        _check_key(key)
        with self._deadlines.within(timeout, lambda: self._why_not_sent(engine)):
            return await self._at_some_engine(key, engine, lambda client: client.slots(parts, drain=drain))

    async def _acquire(
        self,
        nbytes: int,
        timeout: float | None,
        drain: bool,
        device: torch.device | str,
        key: str | bytes | None,
        engine: str | None,
    ) -> Slot:
        with self._deadlines.within(timeout, lambda: self._why_not_sent(engine)):
            return await self._at_some_engine(key, engine, lambda client: client.slot(nbytes, drain=drain, device=device))

    async def _at_some_engine(
        self, key: str | bytes | None, engine: str | None, attempt: Callable[[RingClient], Awaitable[_Result]]
    ) -> _Result:
        """Does something at an engine that is chosen; at another one if that dies meanwhile, unless it was named."""
        while True:
            client = self._pick(key, engine) or await self._pick_in_time(key, "")
            try:
                return await attempt(client)
            except EngineDeadError:
                if engine is not None:
                    raise

    def slot_nowait(
        self,
        nbytes: int | str,
        *,
        drain: bool = False,
        device: torch.device | str = "cpu",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Slot:
        """Returns a slot if one is free in this client's leases; where no key or ``engine`` decides, at whichever engine.

        Args:
            nbytes, drain, device, ask: as of :meth:`shmring.RingClient.slot_nowait`.
            key, engine: as of :meth:`request`.

        Raises:
            WouldBlock, CapacityError, EngineDeadError, ClosedError, SlabError, ValueError: as there.
        """
        asked_nbytes = parse_nbytes(nbytes)

        def take(client: RingClient) -> Slot:
            return client.slot_nowait(asked_nbytes, drain=drain, device=device, ask=ask)

        return _first_that_can(self._candidates(key, engine), take)

    def check_capacity(self, *sizes: int | str) -> None:
        """Checks that slots of these sizes could be had at once, at each engine that is attached. Takes nothing.

        Raises:
            CapacityError: more than one of the engines can lease out.
            WouldBlock, EngineDeadError, ClosedError, ValueError: as :meth:`shmring.RingClient.check_capacity`.
        """
        self._check_open()
        attached = [client for client in self.engines.values() if client.connected]
        if not attached:
            raise self._none_attached()
        for client in attached:
            client.check_capacity(*sizes)

    # -- kept content --------------------------------------------------------------------------------------------------

    async def find(
        self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None, engine: str | None = None
    ) -> Kept | None:
        """Looks for content that an engine keeps. A request with tensors of it goes to that engine.

        Args:
            key, payload_type, timeout: as of :meth:`shmring.RingClient.find`.
            engine: where it is looked for; None: at all engines that are attached, the least loaded first.

        Raises:
            WouldBlock, EngineDeadError, ClosedError, TimeoutError, TypeError, ValueError: as there.
        """
        with self._deadlines.within(timeout, lambda: self._why_no_answer(engine)):
            if engine is None and not self.connected:
                await self._some_engine()
            self._check_open()
            loads = self.loads()
            for name in [engine] if engine is not None else sorted(loads, key=lambda name: loads[name].in_flight):
                try:
                    kept = await self._given(name).find(key, payload_type=payload_type)
                except EngineDeadError:
                    if engine is not None:
                        raise
                else:
                    if kept is not None:
                        return kept
        return None

    async def keep(self, key: bytes, payload: object, *, timeout: float | None = None, engine: str | None = None) -> Kept:
        """Gives content to an engine: that in whose slot it lies, or the one that is named, or that a request would go to.

        Args:
            key, payload, timeout: as of :meth:`shmring.RingClient.keep`.
            engine: as of :meth:`request`.

        Raises:
            WouldBlock, CapacityError, EngineDeadError, ClosedError, LocalProtocolError, TimeoutError, TypeError, ValueError: as
                there, and as :meth:`request`.
        """
        with self._deadlines.within(timeout, lambda: self._why_not_sent(engine)):
            client, _ = self._holder(payload, engine)
            if client is not None:
                return await client.keep(key, payload)
            return await self._at_some_engine(None, engine, lambda client: client.keep(key, payload))

    @property
    def kept_nbytes(self) -> int:
        """How much one of the engines that are attached may keep at most; 0: none keeps anything, or none is attached."""
        return max(client.kept_nbytes for client in self.engines.values())

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, *, key: str | bytes | None = None) -> str:
        """Returns the engine that a request would go to now, for callers who need several things at one engine.

        Raises:
            WouldBlock: none is attached now, and one is waited for.
            EngineDeadError: none is attached, and none is waited for (``reconnect=False``).
        """
        return self._candidates(key, None)[0].name

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines that are attached, as requests are routed by them now.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        self._check_process()
        return {name: self._load(name, session) for name, session in self._attached()}

    def _attached(self) -> Iterator[tuple[str, Session]]:
        for name, client in self.engines.items():
            session = client.session
            if session is not None and not session.link.lost:  # it may have ended, and will say so in the loop's next turn
                yield name, session

    def _load(self, name: str, session: Session) -> EngineLoad:
        if self._sessions.get(name) is not session:  # another life: nothing of what was seen of the last one holds
            self._sessions[name], self._estimates[name] = session, LoadEstimate()
        writer = session.link.writer
        return self._estimates[name].look(
            published=session.load.in_flight,
            waiting=session.load.waiting,
            own=session.end.in_flight + session.host_slots.book.count(ClientSlot.WRITING),
            unread_nbytes=writer.unread_nbytes,
            taken_nbytes=writer.taken_nbytes,
            now=session.loop.time(),
        )

    def _holder(self, payload: object, engine: str | None) -> tuple[RingClient | None, bool]:
        """Returns the client in whose slots tensors of a payload lie, and whether some of those are on a GPU."""
        holder, on_gpu = None, False
        for client in self.engines.values():
            if client.session is None:
                continue
            holds, holds_on_gpu = client.session.find_held(payload)
            if holds and holder is not None:
                raise LocalProtocolError(
                    f"tensors of the payload lie in slots of two engines, {holder.name!r} and {client.name!r}, and neither can "
                    "read the other's; send a copy of one of them, or acquire both slots with the same key= or engine="
                )
            if holds:
                holder, on_gpu = client, holds_on_gpu
        if holder is not None and engine is not None and holder is not self._given(engine):
            raise LocalProtocolError(
                f"tensors of the payload lie in a slot of engine {holder.name!r}, so the request can't go to {engine!r}; "
                "leave engine= out, or send a copy"
            )
        return holder, on_gpu

    def _given(self, engine: str) -> RingClient:
        client = self.engines.get(engine)
        if client is None:
            raise ValueError(f"there is no engine {engine!r} here, there are {self._listed}")
        return client

    def _pick(self, key: str | bytes | None, engine: str | None) -> RingClient | None:
        """Chooses among the engines that are attached; None if none is."""
        self._check_open()
        if engine is not None:
            return self._given(engine)  # which waits for it, if it is to be waited for
        if key is not None:
            attached = [name for name, _ in self._attached()]
            return self.engines[self._router.choose_for(key, attached)] if attached else None
        loads = self.loads()
        return self.engines[self._router.choose(loads)] if loads else None

    async def _pick_in_time(self, key: str | bytes | None, request_id: str) -> RingClient:
        """The same when an engine is attached."""
        while True:
            waiting = self._some_engine()
            await (self._preparations.prepare(request_id, waiting) if request_id else waiting)
            if (client := self._pick(key, None)) is not None:
                return client

    def _candidates(self, key: str | bytes | None, engine: str | None) -> list[RingClient]:
        """Returns the engines that may take what can't wait, the best one first.

        Raises:
            WouldBlock: none is attached, and one is waited for.
        """
        _check_key(key)
        best = self._pick(key, engine)
        if best is None:
            raise self._none_attached()
        if key is not None or engine is not None:
            return [best]
        return [best, *(self.engines[name] for name, _ in self._attached() if name != best.name)]

    async def _some_engine(self) -> None:
        """Waits until one of the engines is attached."""
        self._check_open()
        waits = [asyncio.ensure_future(client.wait_connected()) for client in self.engines.values()]
        try:
            pending = set(waits)
            while pending and not self.connected:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    error = wait.exception()
                    if isinstance(error, Exception) and not isinstance(error, EngineDeadError):
                        raise fresh(error)  # this frame holds the task that holds the error
            if not self.connected and not self._reconnect:
                raise self._none_attached()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _none_attached(self) -> EngineDeadError | WouldBlock:
        """Says why nothing can be sent now: others are waited for, or none will come."""
        if self._reconnect:
            return WouldBlock(f"none of the engines {self._listed} is attached now")
        why = f"all of the engines {self._listed} have gone; connect again, or leave reconnect=False out"
        return EngineDeadError(why, engine=self._only)

    @property
    def _only(self) -> str | None:
        """The name of the engine, if there is one only."""
        return next(iter(self.engines)) if len(self.engines) == 1 else None

    @property
    def _listed(self) -> str:
        return ", ".join(map(repr, self.names))

    def _why_not_sent(self, engine: str | None = None) -> str:
        """Says what a request that was not sent yet, or a slot, is waiting for: at one engine if that is named."""
        return self._why_at(engine) or "; ".join(
            f"at {client.name!r}: {client.why_not_sent()}" for client in self._reached(engine)
        )

    def _why_no_answer(self, engine: str | None) -> str:
        """Says what somebody waits for who looks for kept content."""
        return self._why_at(engine) or ", or ".join(client.why_no_answer() for client in self._reached(engine))

    def _why_at(self, engine: str | None) -> str:
        """Says which engine would have to be attached; nothing if it is."""
        if self._reached(engine):
            return ""
        if engine is None:
            return f"one of the engines {self._listed} to be attached"
        attached = ", ".join(repr(client.name) for client in self._reached(None))
        return f"engine {engine!r} to be attached, which it is not; attached are: {attached or 'none'}"

    def _reached(self, engine: str | None) -> list[RingClient]:
        """Returns the clients of the engines that are attached: of this one, or of all."""
        return [client for client in self.engines.values() if client.connected and engine in (None, client.name)]

    # -- the connections -----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        return any(client.connected for client in self.engines.values())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def lost_error(self) -> ShmringError | None:
        """Why one of the engines that are not attached now went away, as far as it is known."""
        lost = (client.lost_error for client in self.engines.values() if not client.connected)
        return next((error for error in lost if error is not None), None)

    @property
    def used_device_slots(self) -> Sequence[DeviceSlots]:
        """As :attr:`shmring.RingClient.used_device_slots`, of all engines."""
        return [slots for client in self.engines.values() for slots in client.used_device_slots]

    async def wait_connected(self, timeout: float | None = None, *, engine: str | None = None) -> None:
        """Waits until an engine is attached: the one that is named, or any."""
        self._check_process()
        if engine is not None:
            await self._given(engine).wait_connected(timeout)
            return
        with self._deadlines.within(timeout, self._why_not_sent):
            while not self.connected or self._closed:
                await self._some_engine()

    async def wait_prefaulted(self, timeout: float | None = None) -> None:
        """As :meth:`shmring.RingClient.wait_prefaulted`, for the engines that are attached."""
        with self._deadlines.within(timeout, lambda: "the slabs' pages to be mapped in this process"):
            await self._some_engine()
            for client in self.engines.values():
                if client.session is not None:
                    await client.session.prefaulted()

    def statistics(self) -> dict[str, ClientStatistics]:
        """Returns gauges of the present state, and counters since the start, of each engine.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        return {name: client.statistics() for name, client in self.engines.items()}

    async def close(self) -> None:
        """Aborts pending requests, says goodbye to all engines, and detaches. A second call does nothing."""
        if self._closed or self._origin.forked:
            return
        check_loop(self._loop, f"this client of {self._listed}")
        self._closed = True
        outcomes = await asyncio.gather(*(client.close() for client in self.engines.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _check_process(self) -> None:
        if self._origin.forked:
            raise self._origin.stray("this client", "connect again here")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"this client of {self._listed} is closed")

    async def __aenter__(self) -> RoutingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AcquiringRoutedSlot:
    """What :meth:`RoutingClient.slot` returns: await it, or use it with ``async with``."""

    def __init__(self, acquire: Callable[[], Any]) -> None:
        self._acquire = acquire
        self._slot: Slot | None = None

    def __await__(self) -> Generator[Any, None, Slot]:
        slot: Slot = yield from self._acquire().__await__()
        return slot

    async def __aenter__(self) -> Slot:
        self._slot = await self
        return self._slot

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._slot is not None
        self._slot.close()


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError unless these can be the engines of one client."""
    if not 1 <= len(names) <= _MAX_ENGINES:
        raise ValueError(f"a client has 1 to {_MAX_ENGINES} engines, not {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"an engine is named twice in {list(names)}")


def _check_key(key: object) -> None:
    if key is not None and not isinstance(key, str | bytes):
        raise TypeError(f"a key is a str or bytes, not {type(key).__name__}")


def check_retry(retry: int, engine: str | None) -> None:
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
        raise ValueError(f"retry is how often a request may be sent again, not {retry!r}")
    if retry and engine is not None:
        raise ValueError(f"engine={engine!r} leaves no other engine to try; leave out retry or engine")


def _why_no_reply(submission: Submission) -> str:
    session: Session = submission.end.shell
    return f"at {session.engine_name!r}: {session.why_no_reply()}"


def _first_that_can(clients: Sequence[RingClient], attempt: Callable[[RingClient], _Result]) -> _Result:
    """Returns what the first client can do without waiting; the error is that of the best one."""
    full: WouldBlock | None = None
    for client in clients:
        try:
            return attempt(client)
        except WouldBlock as error:
            full = full or error
    assert full is not None, "there is a client"
    raise full
