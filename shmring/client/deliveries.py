"""Content for one taker, at a store: a process delivers it under a name, and the process that asks for that name takes it.

Theory of operation. Kept content is for many: its key stands for its bytes, and of two with one key, the first is kept. A
*delivery* is for one, and its name says only where it goes: of two with one name that nobody has taken, the later one stands.
So its content is kept under a key that nobody has used before, and a request tells the store that it is for whoever asks for
the name (:mod:`shmring.engine.store.deliveries`). The content is that request's payload: the store has it pinned as soon as
it answers ``ACCEPTED``, whatever becomes of this process.

Who takes asks with a request, too. The store answers with ``ABSENT`` if there is no such delivery yet, and with its key as soon
as there is one. The taker pins the content by this key, and ends its request, which tells the store that it has it. So nobody
polls, and nothing that was delivered can be dropped on its way.

Invariant: ``untaken`` has the deliveries of this process of which the store has not said that they are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from shmring.client.kept import Kept
from shmring.client.submission import Submission
from shmring.core.loggers import logger_of
from shmring.door import KEY_NBYTES, check_key
from shmring.errors import RemoteError, RemoteProtocolError, ShmringError, WouldBlock

if TYPE_CHECKING:
    from shmring.client.client import Client

__all__ = ["ABSENT", "ACCEPTED", "DELIVER", "TAKE", "WITHDRAW", "Deliveries"]

logger = logger_of("shmring.deliveries")

# The first word of a request to a store.
DELIVER, TAKE, WITHDRAW = "deliver", "take", "withdraw"

#: What a store answers who asks for a name of which there is no delivery yet.
ABSENT = b""

#: What a store answers who delivers, as soon as it has that.
ACCEPTED = b""

# Where there is no room, an attempt each time. What this process has delivered may have been taken; nobody tells it what others
# have left.
_ROOM_S = 0.05


def _nothing() -> None:
    pass


class Deliveries:
    """What one client delivers and takes, in its event loop.

    Args:
        client: of one store.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._untaken: dict[bytes, Submission] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._went = asyncio.Event()

    @property
    def untaken(self) -> Collection[bytes]:
        """The names of what was delivered, and is not over: nobody has taken it yet, as far as this process knows."""
        return self._untaken.keys()

    async def check(self) -> None:
        """Asks whether this is a store that hands deliveries out.

        Raises:
            RemoteError: it is another engine, or an older store.
            EngineDeadError, ClosedError: it has gone, or the client was closed.
        """
        await self._withdraw([])

    async def deliver(self, name: bytes, payload: object, *, timeout: float) -> None:
        """Delivers content. When this returns, it is there for whoever asks for the name, also if this process dies.

        A delivery of this name that nobody has taken is replaced.

        Args:
            name: 32 bytes.
            payload: as of :meth:`shmring.Client.keep`; copied once, or not at all if it lies in a slot of the client.
            timeout: seconds to wait for room. What takers have in use is no room.

        Raises:
            TimeoutError: there was no room.
            CapacityError, TypeError, ValueError: it can't be kept by this store.
            RemoteError: the store takes no deliveries, or passes this client over since it does not read.
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        check_key(name)
        async with asyncio.timeout(timeout):
            with await self._keep(payload) as kept:
                submission = await self._client.submit([DELIVER, name, kept.key, kept.payload])
                try:
                    await submission.next()  # the store has it; before that, it would go with this process
                except BaseException:
                    submission.abort()
                    raise
        self._untaken[name] = submission
        watching = asyncio.get_running_loop().create_task(self._watch(name, submission))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _keep(self, payload: object) -> Kept[Any]:
        """Has the store keep content, as soon as there is room for it."""
        while True:
            try:
                return await self._client.keep(secrets.token_bytes(KEY_NBYTES), payload)
            except WouldBlock:
                self._went.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_S):
                    await self._went.wait()

    async def _watch(self, name: bytes, submission: Submission) -> None:
        """Waits until a delivery is over: taken, replaced, withdrawn, or dropped since nobody came."""
        why: Exception | None = None
        try:
            await submission.wait()
        except (ShmringError, TimeoutError) as error:
            why = error
        finally:
            if self._untaken.get(name) is submission:
                del self._untaken[name]
            self._went.set()
        if isinstance(why, TimeoutError | RemoteError):
            logger.warning("what was delivered was dropped: %s", str(why))

    async def take(self, name: bytes, *, absent: Callable[[], object] = _nothing) -> Kept[Any]:
        """Waits for the delivery of a name, and takes it. Among several that ask for one name, the first one gets it.

        A caller that is cancelled leaves the name to others. If the store had answered just then, the delivery is gone.

        Args:
            name: 32 bytes.
            absent: called if there is no such delivery yet, before this waits for one.

        Returns:
            The content, pinned until the caller leaves it.

        Raises:
            RemoteError: the store answers no such requests, or passes this client over since it does not read.
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        check_key(name)
        submission = await self._client.submit([TAKE, name])
        try:
            key = await submission.next()
            if key == ABSENT:
                absent()
                key = await submission.next()
            return await self._pin(key)
        finally:
            submission.abort()

    async def _pin(self, key: Any) -> Kept[Any]:
        check_key(key)
        while True:
            with contextlib.suppress(WouldBlock):  # this client has pinned as much as it may, until views of that die
                kept = await self._client.find(key)
                if kept is None:
                    raise RemoteProtocolError(
                        "what was delivered is not there: its sender has named a key that it had not kept"
                    )
                return kept
            await asyncio.sleep(_ROOM_S)

    async def withdraw(self, *names: bytes) -> None:
        """Takes own deliveries back. Those that were taken stay with who has them.

        Raises:
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        if own := [name for name in names if name in self._untaken]:
            await self._withdraw(own)

    async def _withdraw(self, names: list[bytes]) -> None:
        submission = await self._client.submit([WITHDRAW, names])
        await submission.wait()
