"""Content for one taker: a process delivers it under a name, and the process that asks for that name takes it.

Theory of operation. Kept content is for many: its key stands for its bytes, and of two with one key, the first is kept. A
*delivery* is for one, and its name says only where it goes: of two with one name that nobody has taken, the later one stands.
The engine has both in one book (``core/kept_book.pyx``): it hands a delivery to whoever waits for its name in the event in
which it comes, pinned for that client, and to nobody else. So a delivery is one message of its sender, one to its taker, and
one back when its last view has died, whatever its size.

What was delivered is there when the engine has read the message, whatever becomes of its sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmring.client.kept import Kept
from shmring.door import check_key

if TYPE_CHECKING:
    from shmring.client.client import Client
    from shmring.client.kept import KeptContents
    from shmring.client.slot import Slot

__all__ = ["Deliveries"]


class Deliveries:
    """What one client delivers and takes, in its event loop.

    Args:
        client: of one engine.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _contents(self) -> KeptContents:
        attachment = self._client._engines.the_only("deliveries")
        session = attachment.session or await attachment.ready()
        return session.kept

    async def deliver(self, name: bytes, payload: object, *, timeout: float, slot: Slot | None = None) -> None:
        """Delivers content. When this returns, it is there for whoever asks for the name, also if this process dies.

        A delivery of this name that nobody has taken is replaced. If this ends by its timeout, or is cancelled, the engine may
        have it all the same: deliver it again, or withdraw it.

        Args:
            name: 32 bytes.
            payload: as of :meth:`shmring.Client.keep`; copied once, or not at all if it lies in ``slot``.
            timeout: seconds to wait for room, which is tried for each 20 ms, by everybody who waits. What takers have in use is
                no room, and of what this client has delivered, no more may be untaken than it may pin (client_pinned_nbytes).
            slot: of the client, with the payload in it: it is left as soon as the engine has that.

        Raises:
            TimeoutError: there was no room.
            WouldBlock: the engine is about to end, and keeps nothing more.
            CapacityError, TypeError, ValueError: it can't be kept by this engine.
            EngineDeadError, ClosedError: the engine has gone, or the client was closed.
        """
        check_key(name)
        try:
            async with asyncio.timeout(timeout):
                await (await self._contents()).deliver(name, payload, slot)
        except TimeoutError:
            raise TimeoutError(
                f"it took longer than the {timeout:g} s it was given: room at the engine, and its answer"
            ) from None

    async def take(self, name: bytes, *, absent: Callable[[], object] | None = None) -> Kept[Any]:
        """Waits for the delivery of a name, and takes it. Among several clients that ask for one name, the first one gets it.

        A caller that is cancelled leaves the name to others. If it came just then, the next caller of this client that waits
        for the name has it; if there is none, it is gone. Whoever may be cancelled, and wants no delivery lost, has a task of
        its own take it, which is not cancelled.

        Args:
            name: 32 bytes.
            absent: called once if there is no such delivery yet, before this waits for one.

        Returns:
            The content, until the caller leaves it.

        Raises:
            WouldBlock: callers of this client wait for as many names and keys as it may (1,024).
            EngineDeadError, ClosedError: the engine has gone, or the client was closed.
        """
        check_key(name)
        return await (await self._contents()).take(name, Any, absent)

    async def withdraw(self, *names: bytes) -> None:
        """Takes own deliveries back, of these names or, without names, all of them. What was taken stays with who has it.

        The engine hears of it before it hears of anything that this client delivers later. Own deliveries are those of this
        connection: after another one was made (``reconnect=True``), those of before are nobody's, and go after a minute.

        Raises:
            EngineDeadError, ClosedError: the engine has gone, or the client was closed.
        """
        for name in names:
            check_key(name)
        (await self._contents()).withdraw(names)
