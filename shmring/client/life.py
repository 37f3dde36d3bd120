"""One life of an engine, for all parts of a session with it: its name and numbers, and whether the session may be used now."""

from __future__ import annotations

import asyncio

from shmring.client.counters import ClientCounters
from shmring.config import ClientConfig
from shmring.core.compiled import Home
from shmring.core.messages import Welcome
from shmring.errors import EngineDeadError, ShmringError, fresh

__all__ = ["SessionLife"]


class SessionLife:
    """See above. The session lives in the loop that this is made in, until its client closes it or it has ended by itself.

    Attributes:
        home: where the session may be used.
        loop: of its home.
        engine_name: of the engine.
        welcome: its welcome.
        config: of the client.
        counters: of the client.
        error: why the session has ended; None: it has not.
    """

    def __init__(self, engine_name: str, welcome: Welcome, config: ClientConfig, counters: ClientCounters) -> None:
        self.loop = asyncio.get_running_loop()
        self.home = Home(f"this client of {engine_name!r}", "connect again here", self.loop)
        self.engine_name = engine_name
        self.welcome = welcome
        self.config = config
        self.counters = counters
        self.error: ShmringError | None = None

    @property
    def is_usable(self) -> bool:
        """Whether this process may use the session now."""
        return self.error is None and not self.home.is_closed and not self.home.forked

    def check_alive(self) -> None:
        """Raises unless this process may use the session now.

        Raises:
            ClosedError: it was closed, or belongs to the process that forked this one.
            EngineDeadError: its engine has gone.
        """
        if self.error is not None and not self.home.forked:
            raise self.fresh_error()
        self.home.check_open()

    def check_readable(self) -> None:
        """Raises unless replies that came in messages may be read: they are here although the engine has gone."""
        if not self.is_usable and (self.home.forked or not isinstance(self.error, EngineDeadError)):
            self.check_alive()

    def fresh_error(self) -> ShmringError:
        """Returns why the session has ended, for one more caller."""
        assert self.error is not None
        return fresh(self.error)
