"""The engines of one client: the attachments to them, and the choice of one for each request.

The first of these that applies decides where a request goes: the slot in which tensors of its payload lie, since only that
slot's engine can read them there; the engine that its caller names; its key; the route (:mod:`shmring.client.routing`). With
one engine, there is nothing to decide. What the route has chosen is chosen again if that engine reads nothing, another one
does, and nothing was sent yet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shmring.cancellation import uninterrupted
from shmring.client.attachment import Attachment
from shmring.client.far_session import Access
from shmring.client.routing import ROUTES, EngineLoad, LoadEstimate, Route, Router
from shmring.client.session import Session
from shmring.config import ClientConfig
from shmring.core.compiled import ClientEnd, Home, Packed
from shmring.core.states import ClientSlot
from shmring.door import check_route_key, far_address_of, is_far, shown, validate_name
from shmring.errors import EngineDeadError, LocalProtocolError, ShmringError, WouldBlock, fresh
from shmring.gpu.cuda import Cuda
from shmring.gpu.device import DeviceMemory
from shmring.memory.copier import Copier
from shmring.transport.waiting import saying_for_whom, waited

__all__ = ["Engines"]

_Result = TypeVar("_Result")

_MAX_ENGINES = 256  # each is asked for its load with every request; far more than one machine has accelerators
#: For the others, when one engine is attached: an engine that listens and does not answer must not delay the client.
_OTHERS_S = 1.0
_LOOK_S = 0.05  # between two looks whether an engine, at which something waits, responds


class Engines:
    """See the head of this file.

    Args:
        names: of the engines.
        config, route, reconnect, description, copier, cuda, device_memory, access: as of
            :class:`~shmring.client.attachment.Attachment` and :class:`~shmring.client.routing.Router`.
        use: called with the :class:`ClientEnd` of the only engine's session when it begins, and with None when it has ended.

    Attributes:
        attachments: by name.
        only: the attachment to the only engine; None: there are several.
        home: of the client: its door.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: ClientConfig,
        *,
        route: Route,
        reconnect: bool,
        description: str,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        access: Access | None,
        use: Callable[[ClientEnd | None], object],
    ) -> None:
        _check_names(names)
        if route not in ROUTES:
            raise ValueError(f"route is one of {', '.join(map(repr, ROUTES))}, not {shown(route)}")
        self._config = config
        self._reconnect = reconnect
        self._use = use
        self._listed = ", ".join(map(repr, names))
        self.home = Home(f"this client of {self._listed}", "connect again here", asyncio.get_running_loop())
        self._router = Router(names, route, random.randrange(len(names)))
        self._estimates = {name: LoadEstimate() for name in names}
        self._sessions: dict[str, Session] = {}  # the lives to which the estimates belong
        self._some_attached = asyncio.Event()
        self.attachments = {
            name: Attachment(
                name,
                config,
                reconnect=reconnect,
                description=description,
                home=self.home,
                copier=copier,
                cuda=cuda,
                device_memory=device_memory,
                access=access,
                on_change=self._changed,
            )
            for name in names
        }
        self.only = self.attachments[names[0]] if len(names) == 1 else None

    # -- the attachments -----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        if self.only is not None:
            return self.only.session is not None
        return any(attachment.session is not None for attachment in self.attachments.values())

    def sessions(self) -> list[Session]:
        """Returns the sessions with the engines that are attached. Any thread may ask."""
        sessions = [attachment.session for attachment in self.attachments.values()]
        return [session for session in sessions if session is not None]

    @property
    def lost_error(self) -> ShmringError | None:
        """Why an engine that went away did, as far as it is known: the only one, or one that is not attached now."""
        lost = (each.lost_error for each in self.attachments.values() if each is self.only or each.session is None)
        return next((error for error in lost if error is not None), None)

    def _changed(self, end: ClientEnd | None) -> None:
        """An engine is attached, or not any more."""
        if self.only is not None:
            self._use(end)
        if self.connected or self.home.is_closed:
            self._some_attached.set()
        else:
            self._some_attached.clear()

    async def attach(self) -> None:
        """Attaches to the only engine; or to one of several, when the others have been tried.

        Raises:
            EngineDeadError, RemoteProtocolError, PermissionError, SlabError: as :func:`shmring.connect`.
        """
        if self.only is not None:
            await self.only.attach_in_time()
            return
        timeout_s = self._config.connect_timeout_s
        with saying_for_whom(f"one of the engines {self._listed}{self._directory()}", timeout_s):
            await self._attach_to_some(self.home.loop.time() + timeout_s)

    async def _attach_to_some(self, deadline: float) -> None:
        refusals = await self._try_each(deadline)
        if len(refusals) == len(self.attachments):
            raise fresh(refusals[0])  # an engine that starts later would say the same
        for attachment in self.attachments.values():
            if attachment.session is None:
                attachment.keep_attaching()
        try:
            async with asyncio.timeout_at(deadline):
                await self.some_engine()
        except TimeoutError:
            if refusals:
                raise fresh(refusals[0]) from None
            answered = f"answered {waited(self._config.connect_timeout_s)}"
            raise EngineDeadError(
                f"none of the engines {self._listed} {answered}{self._directory()}: start one of them, or set "
                "socket_dir to their own",
                engine=None,
            ) from None

    def _directory(self) -> str:
        places = [attachment.place for attachment in self.attachments.values()]
        return next((f" in {place.parent}" for place in places if isinstance(place, Path)), "")

    async def _try_each(self, deadline: float) -> list[Exception]:
        """Tries all engines at once; returns when one is attached and the others have been tried, with why some refuse.

        Engines that are not there are looked for meanwhile: one that listens and does not answer must not delay them.
        """
        tries = {self.home.loop.create_task(attachment.attach()): attachment for attachment in self.attachments.values()}
        attached = self.home.loop.create_task(self._some_attached.wait())
        pending = set(tries)
        try:
            while pending and not attached.done():
                left_s = max(0.0, deadline - self.home.loop.time())
                done, _ = await asyncio.wait({attached, *pending}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for trying in pending & done:
                    pending.remove(trying)
                    if isinstance(trying.exception(), EngineDeadError):
                        tries[trying].keep_attaching()
            if pending and self.connected:
                await asyncio.wait(pending, timeout=_OTHERS_S)
        finally:
            attached.cancel()
            for trying in tries:
                trying.cancel()
            outcomes = await asyncio.gather(*tries, return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, Exception)]
        return [error for error in errors if not isinstance(error, EngineDeadError)]

    async def close(self) -> None:
        """Says goodbye to all of them, and attaches to no other one."""
        self.home.is_closed = True
        self._some_attached.set()  # whoever waits for an engine learns that there will be none
        if self.only is not None:
            await self.only.close()
        else:
            closings = [attachment.close() for attachment in self.attachments.values()]
            outcomes = await uninterrupted(asyncio.gather(*closings, return_exceptions=True))
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise fresh(outcome)

    # -- choosing ------------------------------------------------------------------------------------------------------

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines to which something may be sent now."""
        self.home.check_process()
        return {name: self._load(name, session) for name, session in self._reached()}

    def _reached(self) -> list[tuple[str, Session]]:
        """The engines to which something may be sent now; those that drain only if all do."""
        reached = [
            (name, session)
            for name, attachment in self.attachments.items()
            # Else it reports its end in the next turn.
            if (session := attachment.session) is not None and not session.link.lost
        ]
        return [each for each in reached if not each[1].load.draining] or reached

    def _load(self, name: str, session: Session) -> EngineLoad:
        if self._sessions.get(name) is not session:  # another life: observations of the last one are void
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

    def holder(self, payload: object, engine: str | None) -> tuple[Attachment | None, Packed | None, bool]:
        """Finds the engine, of several, in whose slots tensors of a payload lie.

        Returns:
            The attachment to it, the payload as it is sent there, and whether some of those tensors are on a GPU.

        Raises:
            LocalProtocolError: they lie in slots of two engines, or of another one than ``engine``.
        """
        holder, packed, on_gpu = None, None, False
        if self.only is not None:
            return holder, packed, on_gpu
        for attachment in self.attachments.values():
            session = attachment.session
            found = None if session is None else session.find_held(payload)
            if found is None:
                continue
            if holder is not None:
                raise LocalProtocolError(
                    f"tensors of the payload lie in slots of two engines, {holder.name!r} and {attachment.name!r}, and neither "
                    "can read the other's; send a copy of one of them, or acquire both slots with the same key= or engine="
                )
            holder, (packed, on_gpu) = attachment, found
        if holder is not None and engine is not None and holder is not self.given(engine):
            raise LocalProtocolError(
                f"tensors of the payload lie in a slot of engine {holder.name!r}, so the request can't go to {engine!r}; "
                "leave engine= out, or send a copy"
            )
        return holder, packed, on_gpu

    def given(self, engine: str) -> Attachment:
        """Returns the attachment to an engine that is named.

        Raises:
            ValueError, TypeError: there is no such engine.
        """
        if not isinstance(engine, str):
            raise TypeError(f"engine is the name of an engine, or None, not {shown(engine)}")
        attachment = self.attachments.get(engine)
        if attachment is None:
            raise ValueError(f"there is no engine {shown(engine)} here, there are {self._listed}")
        return attachment

    def the_only(self, what: str) -> Attachment:
        """Returns the attachment to the only engine.

        Raises:
            ValueError: there are several engines.
        """
        if self.only is None:
            raise ValueError(f"several engines have {what}: name one of {self._listed}, with engine= or in client.engines")
        return self.only

    def pick(self, key: str | bytes | None, engine: str | None) -> Attachment | None:
        """Chooses among the attached engines; None if none is attached. A named engine, or the only one, need not be
        attached."""
        if key is not None:
            check_route_key(key)
        if engine is not None:
            return self.given(engine)
        if self.only is not None:
            return self.only
        self.home.check_open()  # an attachment, which was returned above, checks it when it is used
        if key is not None:
            attached = [name for name, _ in self._reached()]
            return self.attachments[self._router.choose_for(key, attached)] if attached else None
        loads = self.loads()
        return self.attachments[self._router.choose(loads)] if loads else None

    async def pick_in_time(self, key: str | bytes | None, engine: str | None) -> Attachment:
        """Chooses as :meth:`pick` does. With several engines, this waits until one is attached."""
        while (attachment := self.pick(key, engine)) is None:
            await self.some_engine()
            await asyncio.sleep(0)  # a connection that has ended says so in the loop's next turn
        return attachment

    async def at_some_engine(
        self, key: str | bytes | None, engine: str | None, attempt: Callable[[Session], Awaitable[_Result]]
    ) -> _Result:
        """Does something at a chosen engine; at another one if that engine dies meanwhile and was not named."""
        while True:
            attachment = await self.pick_in_time(key, engine)
            try:
                session = await self.session_with(attachment, engine)
                return await self.while_it_responds(session, attempt(session), is_given=engine is not None or key is not None)
            except EngineDeadError:
                if self.leaves_no_other(engine):
                    raise

    def while_it_responds(self, session: Session, work: Awaitable[_Result], *, is_given: bool) -> Awaitable[_Result]:
        """Something at an engine, to await, unless that engine reads nothing and another one would do.

        Args:
            session: with the engine.
            work: waits there; it leaves nothing behind if it is cancelled.
            is_given: whether no other engine would do.

        Raises:
            EngineDeadError: the work was given up, and another engine may be chosen.
        """
        return work if is_given or self.only is not None else self._while_it_responds(session, work)

    async def _while_it_responds(self, session: Session, work: Awaitable[_Result]) -> _Result:
        bound, name = asyncio.timeout(None), session.engine_name
        looking = _Looking(self, name, bound)
        try:
            async with bound:
                return await work
        except TimeoutError:
            if not bound.expired():
                raise
            raise EngineDeadError(f"the engine {name!r} reads nothing", engine=name) from None
        finally:
            looking.end()
            del bound, looking

    async def session_with(self, attachment: Attachment, engine: str | None) -> Session:
        """Returns the session with a chosen engine. If that engine has gone and no other would do, this waits for the next one
        of its name.

        Raises:
            EngineDeadError: it has gone, and another engine may be chosen; or as :meth:`Attachment.ready`.
        """
        if attachment.session is None and not self.leaves_no_other(engine):
            self.home.check_open()
            raise EngineDeadError(f"the engine {attachment.name!r} has gone", engine=attachment.name)
        return await attachment.ready()

    def takers(self, payload: object, key: str | bytes | None, engine: str | None) -> list[Session]:
        """Returns the engines that may get a payload that can't wait, the best one first; errors as :meth:`candidates`."""
        holder = self.holder(payload, engine)[0]
        return self.candidates(key, engine if holder is None else holder.name)

    def candidates(self, key: str | bytes | None, engine: str | None) -> list[Session]:
        """Returns the engines for a call that can't wait, the best one first.

        Raises:
            WouldBlock: none is attached, and the client waits for one.
        """
        best = self.pick(key, engine)
        if best is None:
            raise self._none_attached()
        first = best.ready_nowait()
        if key is not None or engine is not None:
            return [first]
        return [first, *(session for _, session in self._reached() if session is not first)]

    def asked(self, engine: str | None) -> list[Session]:
        """Returns the sessions with the engines that are attached: with the one that is named, or all. Chooses nothing.

        Raises:
            WouldBlock, EngineDeadError, ClosedError: none is.
        """
        self.home.check_open()
        given = self.only if engine is None else self.given(engine)
        if given is not None:
            return [given.ready_nowait()]
        sessions = self.sessions()
        if not sessions:
            raise self._none_attached()
        return sessions

    def searched(self, engine: str | None) -> list[Attachment]:
        """Returns the engines where kept content is looked for: the one that is named, the only one, or all that are attached,
        of which those that respond come first, and then the least loaded."""
        given = self.only if engine is None else self.given(engine)
        if given is not None:
            return [given]
        loads = self.loads()
        names = sorted(loads, key=lambda name: (not loads[name].responds, loads[name].in_flight))
        return [self.attachments[name] for name in names]

    async def searched_soon(self, engine: str | None) -> list[Attachment]:
        """Returns these when one of several engines is attached, as soon as one is."""
        await self.some_engine()
        return self.searched(engine)

    def leaves_no_other(self, engine: str | None) -> bool:
        """Whether no other engine would do, when an engine has died: it was named, or is the only one."""
        return engine is not None or self.only is not None

    @property
    def has_another(self) -> bool:
        """Whether there can be another engine for the requests of one that has died: another one, or the next of its name."""
        return self.only is None or self._reconnect

    async def ready(self, engine: str | None) -> None:
        """Waits until an engine is attached: the one that is named, or any."""
        given = self.only if engine is None else self.given(engine)
        await (self.some_engine() if given is None else given.ready())

    async def some_engine(self) -> None:
        """Waits until one of the engines is attached."""
        while not self.connected:
            self.home.check_open()
            if not self._reconnect and not any(attachment.is_attaching for attachment in self.attachments.values()):
                raise self._none_attached()
            self.home.check_loop()
            await self._some_attached.wait()
        self.home.check_open()

    def _none_attached(self) -> EngineDeadError | WouldBlock:
        """Says why no request can be sent now to several engines: the client waits for them, or none will come."""
        if self._reconnect:
            return WouldBlock(f"none of the engines {self._listed} is attached now")
        why = f"all of the engines {self._listed} have gone; connect again, or leave reconnect=False out"
        return EngineDeadError(why, engine=None)

    def why_not_sent(self, engine: str | None = None) -> str:
        """Says for what an unsent request, or a caller that wants a slot, is waiting: at one engine if that is named."""
        if self.only is not None:
            return self.only.why_not_sent()
        return self._why_at(engine) or "; ".join(f"at {each.name!r}: {each.why_not_sent()}" for each in self._attached(engine))

    def why_no_answer(self, engine: str | None) -> str:
        """Says for what a search for kept content, or a control call, is waiting."""
        if self.only is not None:
            return self.only.why_no_answer()
        return self._why_at(engine) or ", or ".join(each.why_no_answer() for each in self._attached(engine))

    def _why_at(self, engine: str | None) -> str:
        """Says which of several engines would have to be attached; an empty text if it is attached."""
        if self._attached(engine):
            return ""
        if engine is None:
            return f"one of the engines {self._listed} to be attached"
        attached = ", ".join(repr(each.name) for each in self._attached(None))
        return f"engine {engine!r} to be attached, which it is not; attached are: {attached or 'none'}"

    def _attached(self, engine: str | None) -> list[Attachment]:
        """Returns the engines that are attached: this one, or all."""
        return [each for each in self.attachments.values() if each.session is not None and engine in (None, each.name)]


class _Looking:
    """Looks now and then whether an engine responds, or another one does while it does not; then a timeout ends.

    Args:
        engines: to which the engine belongs.
        name: of the engine.
        bound: the timeout.
    """

    def __init__(self, engines: Engines, name: str, bound: asyncio.Timeout) -> None:
        self._engines = engines
        self._name = name
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        loads = self._engines.loads()
        load = loads.get(self._name)
        if load is not None and not load.responds and any(other.responds for other in loads.values()):
            self._bound.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def end(self) -> None:
        """Looks no longer."""
        self._timer.cancel()


def _check_names(names: Sequence[str]) -> None:
    """Raises ValueError or TypeError unless these can be the engines of one client."""
    if not 1 <= len(names) <= _MAX_ENGINES:
        raise ValueError(f"a client has 1 to {_MAX_ENGINES} engines, not {len(names)}")
    for name in names:
        if is_far(name):
            far_address_of(name)
        else:
            validate_name(name)
    if len(set(names)) < len(names):
        raise ValueError(f"an engine is named twice in {list(names)}")
