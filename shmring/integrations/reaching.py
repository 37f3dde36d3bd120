"""On the way to a ring: why tensors go inline meanwhile, how long until the next attempt, and what the log says of it.

A plug-in's sending half goes on trying to reach its ring for as long as it lives, in the background. What it reaches has to be
the ring that was meant: a name may be another server's by then.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from shmring.client.pauses import FIRST_S, LONGEST_S
from shmring.core.loggers import Logger
from shmring.errors import ClosedError, ShmringError
from shmring.integrations.traffic import Reason

if TYPE_CHECKING:
    from shmring import Client

__all__ = ["KeptConnection", "OtherRingError", "Reach", "check_epoch"]


class OtherRingError(ShmringError):
    """Another engine than the one that was meant has the name."""


def check_epoch(epoch: int, expected: int, name: str) -> None:
    """Checks that a ring that was reached by its name is the one that was meant.

    Args:
        epoch: of the ring that was reached.
        expected: of the one that was meant; 0: it is known by its name alone.
        name: of both.

    Raises:
        OtherRingError: it is another one.
    """
    if expected not in (0, epoch):
        raise OtherRingError(f"another engine has the name {name!r} now")


class Reach:
    """The way to one ring. Not for several threads at a time.

    Args:
        whose: whose ring it is, for the log, such as "engine core 0".
        logger: the plug-in's.

    Attributes:
        reason: why tensors go inline while the ring is not reached.
        tried: set when the first attempt has ended, whichever way.
    """

    def __init__(self, whose: str, logger: Logger) -> None:
        self.reason: Reason = "connecting"
        self.tried = threading.Event()
        self._whose = whose
        self._logger = logger
        self._is_inline = False
        self._pause_s = FIRST_S

    def failed(self, why: object) -> float:
        """An attempt has failed, or the connection was lost. The log says so once, until the ring is reached.

        Returns:
            Seconds until the next attempt. Each pause is longer than the one before, up to a second.
        """
        self.reason = "engine"
        self.tried.set()
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_S)
        was_inline, self._is_inline = self._is_inline, True
        if not was_inline:
            self._logger.warning("shmring: tensors go inline until the ring of %s is reached: %s", self._whose, why)
        return pause_s

    def reached(self) -> None:
        """It is reached: should it be lost, the log says so again."""
        self.reason = "engine"
        self.tried.set()
        self._pause_s = FIRST_S
        self._is_inline = False


class KeptConnection:
    """A connection to one ring in an event loop, made again when it is lost. Subclasses say how it is made.

    What belongs to one connection ends with it: the client, its number, the epoch of the ring.

    Args:
        whose, logger: as of :class:`Reach`.
    """

    def __init__(self, whose: str, logger: Logger) -> None:
        self._reach = Reach(whose, logger)
        self._client: Client | None = None
        self._trying: asyncio.Task[None] | None = None
        self._is_closed = False

    async def _connect(self) -> Client:
        """Connects, and checks that it is the ring that was meant. Whatever it raises is said, and it is called again."""
        raise NotImplementedError

    def _connected(self) -> None:
        """It is connected: says so."""
        raise NotImplementedError

    def _lost(self) -> None:
        """The connection is lost: forgets what belonged to it."""

    def keep_trying(self) -> None:
        """Goes on trying to connect, in the background, unless it is connected. Twice is once; for each request."""
        if self.is_connected or self._is_closed or (self._trying is not None and not self._trying.done()):
            return
        self._trying = asyncio.get_running_loop().create_task(self._try(), name="shmring connecting")

    async def _try(self) -> None:
        lost, self._client = self._client, None
        if lost is not None:
            self._lost()
            await lost.close()
            self._reach.failed(lost.lost_error or "the connection was lost")
        while True:
            try:
                self._client = await self._connect()
            except Exception as error:  # noqa: BLE001 - whatever a server or shmring raises: it is said, and tried again
                pause_s = self._reach.failed(error)
            else:
                self._reach.reached()
                self._connected()
                return
            await asyncio.sleep(pause_s)

    @property
    def reason(self) -> Reason:
        """Why tensors go inline while it is not connected."""
        return self._reach.reason

    @property
    def is_connected(self) -> bool:
        """Whether tensors can be sent."""
        return self._client is not None and self._client.connected

    @property
    def client(self) -> Client:
        """The client.

        Raises:
            ClosedError: there is no connection.
        """
        if self._client is None:
            raise ClosedError("the connection was lost")
        return self._client

    @property
    def client_id(self) -> int:
        """What the ring's engine calls this process; 0: it is not connected."""
        return 0 if self._client is None else self._client.client_id

    @property
    def epoch(self) -> int:
        """Which life of an engine is connected; 0: none."""
        return 0 if self._client is None else self._client.epoch

    async def close(self) -> None:
        """Disconnects, and tries no more: what this process has in the slab is free at once."""
        self._is_closed = True
        if self._trying is not None and not self._trying.done():
            self._trying.cancel()
            await asyncio.wait([self._trying])
        if self._client is not None:
            await self._client.close()
