"""A client's attachment to the engine of one name: one session after the other, as engines of that name come and go.

Invariant: there is a session exactly while an engine is attached. Without ``reconnect``, the first session is the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from shmring.client import pauses
from shmring.client.counters import ClientCounters
from shmring.client.far_session import Access, FarSession
from shmring.client.session import Session
from shmring.config import ClientConfig
from shmring.core.compiled import ClientEnd, Home
from shmring.core.loggers import logger_of
from shmring.door import FarAddress, far_address_of, is_far, shown
from shmring.errors import EngineDeadError, ShmringError, WouldBlock, fresh
from shmring.gpu.cuda import Cuda
from shmring.gpu.device import DeviceMemory
from shmring.memory.copier import Copier
from shmring.transport.listener import socket_path
from shmring.transport.waiting import reach_in_time

__all__ = ["Attachment"]

logger = logger_of("shmring.client")


class Attachment:
    """See the head of this file.

    Args:
        name: the engine's.
        config: as configured.
        reconnect: whether to attach to the next engine of that name when one ends.
        description: what the engine's log calls this client.
        home: of the client, which is the door of all its attachments.
        copier: has the turns of copies, and the threads.
        cuda, device_memory: for slots in device memory.
        access: for a name that is the address of an engine on another host.
        on_change: called with the :class:`ClientEnd` of each session that begins, and with None when the session has ended.

    Attributes:
        name, home: as above.
        place: the path of its socket, or its address on another host.
        session: with the engine that is attached now; None: none is. Any thread may read it.
        counters: of all sessions before that.
        lost_error: why the last engine that went away did, as far as it is known.
    """

    def __init__(
        self,
        name: str,
        config: ClientConfig,
        *,
        reconnect: bool,
        description: str,
        home: Home,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        access: Access | None,
        on_change: Callable[[ClientEnd | None], object],
    ) -> None:
        self.name = name
        if is_far(name) and access is None:
            raise TypeError(f"the engine at {shown(name)} is on another host: shmring.connect lets in who has its token=")
        self.place: Path | FarAddress = far_address_of(name) if is_far(name) else socket_path(name, config.socket_dir)
        self.session: Session | None = None
        self.counters = ClientCounters()
        self.lost_error: ShmringError | None = None
        self._config = config
        self._reconnect = reconnect
        self._description = description
        self.home = home
        self._copier = copier
        self._cuda = cuda
        self._device_memory = device_memory
        self._access = access
        self._on_change = on_change
        self._attached = asyncio.Event()
        self._reattaching: asyncio.Task[None] | None = None

    # -- the session ---------------------------------------------------------------------------------------------------

    async def ready(self) -> Session:
        """Returns the session. Waits for the next engine, if the client reconnects.

        Raises:
            EngineDeadError: the engine has gone, and the client does not reconnect.
            ClosedError: the client is closed, or belongs to the process that forked this one.
            LocalProtocolError: this is not the client's loop.
        """
        while True:
            self.home.enter()
            if self.session is not None:
                return self.session
            self._check_awaited()
            await self._attached.wait()

    def ready_nowait(self) -> Session:
        """Returns the session.

        Raises:
            WouldBlock: the client waits for the next engine.
            EngineDeadError, ClosedError: as :meth:`ready`.
        """
        self.home.check_open()
        if self.session is not None:
            return self.session
        self._check_awaited()
        raise WouldBlock(f"no engine {self.name!r} is attached now")

    def _check_awaited(self) -> None:
        """Raises EngineDeadError unless the next engine is waited for."""
        if not self._reconnect and not self.is_attaching:
            why = f"the engine {self.name!r} has gone; connect again, or use connect(..., reconnect=True)"
            raise EngineDeadError(why, engine=self.name)

    @property
    def is_attaching(self) -> bool:
        """Whether it tries to attach, for as long as it takes."""
        return self._reattaching is not None and not self._reattaching.done()

    def why_not_sent(self) -> str:
        """Says for what an unsent request, or a caller that wants a slot, is waiting."""
        if self.session is None:
            return f"an engine {self.name!r} to be attached"
        return self.session.sending.why_not_sent()

    def why_no_answer(self) -> str:
        """Says for what a control call, or a search for kept content, is waiting."""
        if self.session is None:
            return f"an engine {self.name!r} to be attached"
        return f"the answer of engine {self.name!r}"

    # -- attaching -----------------------------------------------------------------------------------------------------

    async def attach(self) -> None:
        """Attaches to the engine, if there is one.

        Raises:
            EngineDeadError: no engine listens there.
            RemoteProtocolError, PermissionError, SlabError: as :func:`shmring.connect`.
        """
        session = await self._open()
        session.check_alive()  # the session may have ended while it opened
        self.session = session
        self._on_change(None if session.is_far else session.end)
        self._attached.set()

    async def _open(self) -> Session:
        if isinstance(self.place, Path):
            return await Session.open(
                self.place,
                self._config,
                self._description,
                self.counters,
                self._copier,
                self._cuda,
                self._device_memory,
                self._lost,
            )
        assert self._access is not None
        far = await FarSession.open(self.place, self._access, self._config, self._description, self.counters, self._lost)
        return cast(Session, far)  # it has what clients use of a session

    async def attach_in_time(self) -> None:
        """Attaches within ``connect_timeout_s``: the engine may be starting."""
        await reach_in_time(self.name, self.place, self.attach, self._config.connect_timeout_s)

    def keep_attaching(self) -> None:
        """Attaches as soon as there is an engine of this name, and does not wait for it. Twice is once."""
        if self.is_attaching:
            return
        self._reattaching = self.home.loop.create_task(self._reattach())

    async def _reattach(self) -> None:
        """Attaches to the next engine of this name, whenever it comes; pauses grow so that waiting costs nothing."""
        pause = pauses.FIRST_S
        while not self.home.is_closed:
            try:
                await self.attach()
            except Exception as error:
                if not isinstance(error, ShmringError | OSError):
                    logger.error("attaching to the engine %r failed, and is tried again", self.name, exc_info=error)
                elif not isinstance(error, EngineDeadError):
                    logger.warning("can't attach to the engine %r yet: %s", self.name, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, pauses.LONGEST_S)
            else:
                self.counters.reconnections += self.lost_error is not None
                logger.info("attached to the engine %r", self.name)
                return

    def _lost(self, session: Session) -> None:
        if session is not self.session:
            return
        self.session = None
        self._on_change(None)
        self.counters = self.counters.with_those_of(session.end)
        self.lost_error = None if session.error is None else fresh(session.error)
        self._attached.clear()
        if self._reconnect and not self.home.is_closed:
            self.keep_attaching()
            level = logging.INFO if session.load.draining else logging.WARNING  # it had said that it would end
            logger.log(level, "%s: waiting for the next engine %r", session.error, self.name)

    async def close(self) -> None:
        """Says goodbye to the engine, and attaches to no other one: the client is closed."""
        self._attached.set()  # tasks that wait for an engine learn that there will be none
        try:
            if self._reattaching is not None and self.is_attaching:
                self._reattaching.cancel()
                await asyncio.wait([self._reattaching])
                self._reattaching = None  # it holds the error that it was cancelled with, whose traceback holds frames
        finally:  # also when this is cancelled
            if self.session is not None:
                await self.session.close()
