"""One life of an engine, for all parts of a session with it: its name and numbers, and whether the session may be used now."""

from __future__ import annotations

import asyncio

from shmring.client.counters import ClientCounters
from shmring.config import ClientConfig
from shmring.core.compiled import Origin
from shmring.core.messages import Welcome
from shmring.errors import ClosedError, EngineDeadError, ShmringError, fresh
from shmring.transport.loops import check_loop

__all__ = ["SessionLife"]


class SessionLife:
    """See above. The session lives in the loop that this is made in.

    Attributes:
        engine_name: of the engine.
        welcome: its welcome.
        config: of the client.
        counters: of the client.
        loop: the event loop that the session lives in.
        error: why the session has ended; None: it has not.
        is_closing: whether its client closes it, or has closed it.
    """

    def __init__(self, engine_name: str, welcome: Welcome, config: ClientConfig, counters: ClientCounters) -> None:
        self.engine_name = engine_name
        self.welcome = welcome
        self.config = config
        self.counters = counters
        self.loop = asyncio.get_running_loop()
        self.error: ShmringError | None = None
        self.is_closing = False
        self._origin = Origin()

    @property
    def is_usable(self) -> bool:
        """Whether this process may use the session now."""
        return self.error is None and not self.is_closing and not self._origin.forked

    def check_alive(self) -> None:
        """Raises unless this process may use the session now.

        Raises:
            ClosedError: it was closed, or belongs to the process that forked this one.
            EngineDeadError: its engine has gone.
        """
        if self._origin.forked:
            raise self._origin.stray("this client", "connect again here")
        if self.error is not None:
            raise self.fresh_error()
        if self.is_closing:
            raise self.closed_error()

    def check_readable(self) -> None:
        """Raises unless replies that came in messages may be read: they are here although the engine has gone."""
        if not self.is_usable and (self._origin.forked or not isinstance(self.error, EngineDeadError)):
            self.check_alive()

    def check_loop(self) -> None:
        """Raises LocalProtocolError in another loop than the session's."""
        check_loop(self.loop, f"this client of {self.engine_name!r}")

    def fresh_error(self) -> ShmringError:
        """Returns why the session has ended, for one more caller."""
        assert self.error is not None
        return fresh(self.error)

    def closed_error(self) -> ClosedError:
        """Returns why a session that its client closes can't be used."""
        return ClosedError("this client was closed")
